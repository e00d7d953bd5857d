//! [`MergedWeights`]: a model's weights with adapters added to them, for a file without adapters.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use kv_block::BlockFormat;
use kv_graph::weights::{SourceChanged, Weight, WeightError, WeightInfo, WeightSource};

use super::check::Use;
use super::{Adapters, LowRank};

/// The weights of a model to which adapters are added, each by its scale. Those that change are
/// `F32`.
pub struct MergedWeights {
    model: Arc<dyn WeightSource>,
    adapters: Arc<Adapters>,
}

impl MergedWeights {
    /// Both together, with the default scales.
    pub fn new(model: Arc<dyn WeightSource>, adapters: Arc<Adapters>) -> Self {
        Self { model, adapters }
    }

    /// The pairs that are added to a matrix, each with its scale.
    fn pairs(&self, name: &str) -> Vec<(&LowRank, f32)> {
        let all = self.adapters.all().iter();
        let scaled = all.zip(self.adapters.default_scales().iter());
        let pairs = scaled.filter(|(_, scale)| **scale != 0.0);
        pairs
            .filter_map(|(adapter, scale)| Some((adapter.pairs().get(name)?, *scale)))
            .collect()
    }
}

impl WeightSource for MergedWeights {
    fn get(&self, name: &str) -> Option<Weight> {
        self.require(name).ok()
    }

    fn names(&self) -> Vec<String> {
        self.model.names()
    }

    fn require(&self, name: &str) -> Result<Weight, WeightError> {
        let weight = self.model.require(name)?;
        let pairs = self.pairs(name);
        if pairs.is_empty() {
            return Ok(weight);
        }
        let mut values = weight.to_f32();
        let is_embedding = self.adapters.uses.get(name) == Some(&Use::Embedding);
        for (pair, scale) in pairs {
            if is_embedding {
                add(&mut values, [&pair.a, &pair.b], pair.scale * scale);
            } else {
                add_product(&mut values, pair, scale);
            }
        }
        Weight::from_f32(name, weight.shape().to_vec(), &values)
    }

    fn describe(&self, name: &str) -> Result<WeightInfo, WeightError> {
        let info = self.model.describe(name)?;
        let format = if self.pairs(name).is_empty() {
            info.format
        } else {
            BlockFormat::F32
        };
        Ok(WeightInfo { format, ..info })
    }

    fn check(&self) -> Result<(), SourceChanged> {
        self.model.check()?;
        self.adapters.check_files()
    }
}

/// Adds `scale b a` to a matrix, or to the matrices of all experts.
fn add_product(values: &mut [f32], pair: &LowRank, scale: f32) {
    let (rank, columns) = (pair.rank(), pair.a.n_columns());
    let (a, b) = (pair.a.to_f32(), pair.b.to_f32());
    let n_matrices = (a.len() / (rank * columns).max(1)).max(1);
    let factor = pair.scale * scale;
    let each = values.chunks_exact_mut((values.len() / n_matrices).max(1));
    let of_a = a.chunks_exact((rank * columns).max(1));
    let of_b = b.chunks_exact((b.len() / n_matrices).max(1));
    for ((values, a), b) in each.zip(of_a).zip(of_b) {
        let rows = values.chunks_exact_mut(columns.max(1));
        for (row, b) in rows.zip(b.chunks_exact(rank.max(1))) {
            add_row(row, b, a, factor);
        }
    }
}

/// Adds `scale a b^T`: rows by tokens.
fn add(values: &mut [f32], [a, b]: [&Weight; 2], scale: f32) {
    let (rank, dim) = (b.n_columns(), b.n_rows());
    let (a, b) = (a.to_f32(), b.to_f32());
    // `b` by columns: a row for each of the narrow values.
    let of_column = |column: usize| b.iter().skip(column).step_by(rank.max(1));
    let turned: Vec<f32> = (0..rank).flat_map(of_column).copied().collect();
    let rows = values.chunks_exact_mut(dim.max(1));
    for (row, a) in rows.zip(a.chunks_exact(rank.max(1))) {
        add_row(row, a, &turned, scale);
    }
}

/// Adds `scale x m` to a row, where `m` has a row for each value of `x`.
fn add_row(row: &mut [f32], x: &[f32], m: &[f32], scale: f32) {
    let n = row.len().max(1);
    for (x, of_x) in x.iter().zip(m.chunks_exact(n)) {
        let factor = x * scale;
        let pairs = row.iter_mut().zip(of_x);
        pairs.for_each(|(to, value)| *to += factor * value);
    }
}

impl fmt::Debug for MergedWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let merged: BTreeMap<&str, f32> = self
            .adapters
            .all()
            .iter()
            .map(super::Adapter::name)
            .zip(self.adapters.default_scales().iter().copied())
            .collect();
        f.debug_struct("MergedWeights")
            .field("adapters", &merged)
            .finish_non_exhaustive()
    }
}
