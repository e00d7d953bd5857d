//! Whether an adapter fits a model: matrices, shapes, values. Invariant: what passes can be
//! computed.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use kv_graph::weights::Weight;
use kv_graph::{Graph, GraphShape, Op};

use super::{AdapterError, LowRank, RawAdapter};
use crate::architecture::Model;
use crate::model_file::OpenModel;

/// The way in which a model uses a matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// Rows are multiplied with it.
    Matrix,
    /// Its rows are looked up by token; perhaps it is the output matrix, too.
    Embedding,
    /// It has a matrix for each expert.
    Experts,
    /// Another operation, by its name.
    Other(String),
}

/// The uses that a model has for each of its matrices.
pub(super) fn uses_of(model: &dyn Model) -> Result<BTreeMap<String, Use>, AdapterError> {
    let shape = GraphShape {
        n_tokens: 1,
        n_outputs: 1,
    };
    let graph: Graph = model.graph(shape)?;
    let mut uses = BTreeMap::new();
    for node in graph.nodes() {
        let of_node = match &node.op {
            Op::Linear { .. } => Use::Matrix,
            Op::ExpertLinear { .. } => Use::Experts,
            Op::Embed { .. } => Use::Embedding,
            op => Use::Other(op.name().to_owned()),
        };
        for weight in node.op.spec().weights() {
            match uses.entry(weight.to_owned()) {
                Entry::Vacant(entry) => {
                    entry.insert(of_node.clone());
                }
                Entry::Occupied(mut entry) => {
                    let both = match (entry.get(), &of_node) {
                        (here, other) if here == other => continue,
                        (Use::Matrix, Use::Embedding) | (Use::Embedding, Use::Matrix) => {
                            Use::Embedding
                        }
                        (Use::Other(_), _) => continue,
                        (_, other) => other.clone(),
                    };
                    entry.insert(both);
                }
            }
        }
    }
    Ok(uses)
}

/// Checks an adapter against a model.
pub(super) fn check(adapter: &RawAdapter, model: &OpenModel) -> Result<(), AdapterError> {
    if adapter.pairs.is_empty() {
        return Err(AdapterError::Empty);
    }
    let uses = uses_of(model.model().as_ref())?;
    let weights = model.weights();
    for (matrix, pair) in &adapter.pairs {
        let (Some(of_model), Ok(info)) = (uses.get(matrix), weights.describe(matrix)) else {
            return Err(AdapterError::Unknown {
                module: matrix.clone(),
                architecture: model.model().architecture().to_owned(),
            });
        };
        check_pair(matrix, pair, of_model, &info.shape)?;
    }
    Ok(())
}

fn check_pair(
    matrix: &str,
    pair: &LowRank,
    of_model: &Use,
    shape: &[usize],
) -> Result<(), AdapterError> {
    let rank = pair.rank();
    let (a, b) = (pair.a.shape(), pair.b.shape());
    let fits = match (of_model, shape) {
        (Use::Matrix, &[out, columns]) => a == [rank, columns] && b == [out, rank],
        (Use::Embedding, &[vocab, dim]) => a == [vocab, rank] && b == [dim, rank],
        (Use::Experts, &[experts, out, columns]) => {
            a == [experts, rank, columns] && b == [experts, out, rank]
        }
        (Use::Other(op), _) => {
            return Err(AdapterError::Use {
                matrix: matrix.to_owned(),
                op: op.clone(),
            });
        }
        _ => false,
    };
    if rank == 0 {
        return Err(AdapterError::Rank {
            matrix: matrix.to_owned(),
            found: 0,
            wanted: "at least 1".to_owned(),
        });
    }
    if !fits {
        return Err(AdapterError::Shape {
            matrix: matrix.to_owned(),
            model: shape.to_vec(),
            a: a.to_vec(),
            b: b.to_vec(),
        });
    }
    let not_finite = |what: String, value| AdapterError::NotFinite { what, value };
    if !pair.scale.is_finite() {
        return Err(not_finite(format!("the scale of '{matrix}'"), pair.scale));
    }
    for part in [&pair.a, &pair.b] {
        check_values(part).map_err(|value| not_finite(format!("a value of '{matrix}'"), value))?;
    }
    Ok(())
}

/// The first value that is not finite.
pub(super) fn check_values(weight: &Weight) -> Result<(), f32> {
    let wrong = weight.to_f32().into_iter().find(|value| !value.is_finite());
    wrong.map_or(Ok(()), Err)
}

/// FNV-1a of 64 bits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(0xCBF2_9CE4_8422_2325)
    }
}

impl Fnv {
    pub(super) fn update(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01B3);
        }
    }

    pub(super) fn finish(self) -> u64 {
        self.0
    }
}

/// Bytes of each matrix that tell contents apart, at its beginning and at its end.
const SAMPLE: usize = 4096;

/// A number that tells an adapter's contents from those of others.
pub(super) fn content_id(adapter: &RawAdapter) -> u64 {
    let mut id = Fnv::default();
    for (matrix, pair) in &adapter.pairs {
        id.update(matrix.as_bytes());
        id.update(&pair.scale.to_bits().to_le_bytes());
        for part in [&pair.a, &pair.b] {
            let bytes: &[u8] = part.bytes();
            id.update(format!("{:?} {}", part.shape(), part.format()).as_bytes());
            id.update(bytes.get(..SAMPLE).unwrap_or(bytes));
            let last = bytes.len().saturating_sub(SAMPLE);
            id.update(bytes.get(last..).unwrap_or_default());
        }
    }
    let invocation = adapter.invocation.iter();
    invocation.for_each(|token| id.update(&token.0.to_le_bytes()));
    id.finish()
}
