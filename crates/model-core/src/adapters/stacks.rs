//! The matrices of all adapters as the weights of graphs.
//!
//! Those of one matrix of the model are a stack, as experts are: a matrix for each adapter, with as
//! many rows or columns as the largest rank has, and zeros beyond an adapter's own. Made when they
//! are wanted, and not kept. Knows no graph.

use half::f16;
use kv_block::BlockFormat;
use kv_graph::weights::{SharedBytes, Weight, WeightError, WeightInfo};

use super::check::Use;
use super::{Adapters, LowRank};

/// The name of the control vector's weight, `[layers, dim]`.
pub(super) const STEERING: &str = "control_vector";

/// The name of a stack: `part` is `a` or `b`.
pub(super) fn stacked_name(part: &str, matrix: &str) -> String {
    format!("adapters.{part}.{matrix}")
}

/// The name of one adapter's matrix, where there are no stacks.
pub(super) fn name_of_one(at: usize, part: &str, matrix: &str) -> String {
    format!("adapter{at}.{part}.{matrix}")
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    A,
    B,
}

/// The meaning of a weight's name.
enum Place<'a> {
    Steering,
    Stack(Part, &'a str),
    One(&'a LowRank, Part),
}

impl Adapters {
    /// The largest rank of any adapter's matrices for this one of the model.
    pub(super) fn stack_rank(&self, matrix: &str) -> usize {
        let pairs = self.all().iter().filter_map(|a| a.pairs().get(matrix));
        pairs.map(LowRank::rank).max().unwrap_or(0)
    }

    /// The names of all weights that graphs with adapters have.
    pub fn weight_names(&self) -> Vec<String> {
        let mut names = Vec::new();
        for (matrix, of_model) in &self.uses {
            if *of_model == Use::Matrix {
                names.extend(["a", "b"].map(|part| stacked_name(part, matrix)));
                continue;
            }
            for (at, adapter) in self.all().iter().enumerate() {
                if adapter.pairs().contains_key(matrix) {
                    names.extend(["a", "b"].map(|part| name_of_one(at, part, matrix)));
                }
            }
        }
        names.extend(self.control().map(|_| STEERING.to_owned()));
        names
    }

    /// Shape and format of a weight of this name; `None` where it is none of these.
    pub(super) fn describe_weight(&self, name: &str) -> Option<WeightInfo> {
        Some(match self.place(name)? {
            Place::Steering => {
                let control = self.control()?;
                let shape = vec![control.n_rows(), control.dim()];
                let format = BlockFormat::F32;
                WeightInfo { shape, format }
            }
            Place::Stack(part, matrix) => self.stack_info(part, matrix)?,
            Place::One(pair, Part::A) => pair.a.info(),
            Place::One(pair, Part::B) => WeightInfo {
                shape: pair.b.shape().to_vec(),
                format: format_of(std::iter::once(pair)),
            },
        })
    }

    /// The weight of this name; `None` where it is none of these.
    pub(super) fn weight(&self, name: &str) -> Option<Result<Weight, WeightError>> {
        Some(match self.place(name)? {
            Place::Steering => {
                let control = self.control()?;
                let shape = vec![control.n_rows(), control.dim()];
                Weight::from_f32(name, shape, control.values())
            }
            Place::Stack(part, matrix) => {
                let info = self.stack_info(part, matrix)?;
                let values = self.stacked(part, matrix, &info.shape);
                encoded(name, info, &values)
            }
            Place::One(pair, Part::A) => Weight::new(
                name,
                pair.a.shape().to_vec(),
                pair.a.format(),
                pair.a.bytes().clone(),
            ),
            Place::One(pair, Part::B) => {
                let info = WeightInfo {
                    shape: pair.b.shape().to_vec(),
                    format: format_of(std::iter::once(pair)),
                };
                encoded(name, info, &scaled(pair))
            }
        })
    }

    fn place<'a>(&'a self, name: &'a str) -> Option<Place<'a>> {
        if name == STEERING {
            return self.control().map(|_| Place::Steering);
        }
        if let Some(rest) = name.strip_prefix("adapters.") {
            let (part, matrix) = part_of(rest)?;
            let is_matrix = self.uses.get(matrix) == Some(&Use::Matrix);
            return is_matrix.then_some(Place::Stack(part, matrix));
        }
        let (at, rest) = name.strip_prefix("adapter")?.split_once('.')?;
        let (part, matrix) = part_of(rest)?;
        let adapter = self.all().get(at.parse::<usize>().ok()?)?;
        Some(Place::One(adapter.pairs().get(matrix)?, part))
    }

    fn stack_info(&self, part: Part, matrix: &str) -> Option<WeightInfo> {
        let pairs = || self.all().iter().filter_map(|a| a.pairs().get(matrix));
        let (n, rank, first) = (self.len(), self.stack_rank(matrix), pairs().next()?);
        let shape = match part {
            Part::A => vec![n, rank, first.a.n_columns()],
            Part::B => vec![n, first.b.n_rows(), rank],
        };
        let format = format_of(pairs());
        Some(WeightInfo { shape, format })
    }

    /// The values of a stack of this shape.
    fn stacked(&self, part: Part, matrix: &str, shape: &[usize]) -> Vec<f32> {
        let mut values = vec![0.0; shape.iter().product()];
        let &[_, n_rows, n_columns] = shape else {
            return values;
        };
        let each = values.chunks_exact_mut((n_rows * n_columns).max(1));
        for (to, adapter) in each.zip(self.all()) {
            let Some(pair) = adapter.pairs().get(matrix) else {
                continue;
            };
            let (own, own_columns) = match part {
                Part::A => (pair.a.to_f32(), pair.a.n_columns()),
                Part::B => (scaled(pair), pair.b.n_columns()),
            };
            let rows = to.chunks_exact_mut(n_columns.max(1));
            for (to, own) in rows.zip(own.chunks_exact(own_columns.max(1))) {
                let to = to.iter_mut().zip(own);
                to.for_each(|(to, own)| *to = *own);
            }
        }
        values
    }
}

fn part_of(rest: &str) -> Option<(Part, &str)> {
    match rest.split_once('.')? {
        ("a", matrix) => Some((Part::A, matrix)),
        ("b", matrix) => Some((Part::B, matrix)),
        _ => None,
    }
}

/// The second matrix times the scale that the adapter's settings give.
fn scaled(pair: &LowRank) -> Vec<f32> {
    let mut values = pair.b.to_f32();
    values.iter_mut().for_each(|value| *value *= pair.scale);
    values
}

/// F16 where that is how all are stored, and scales change no digit; else F32.
fn format_of<'a>(pairs: impl Iterator<Item = &'a LowRank>) -> BlockFormat {
    let is_f16 = |weight: &Weight| weight.format() == BlockFormat::F16;
    let keeps_digits = |scale: f32| (0.25..=8.0).contains(&scale) && scale.log2().fract() == 0.0;
    let mut pairs = pairs;
    if pairs.all(|pair| is_f16(&pair.a) && is_f16(&pair.b) && keeps_digits(pair.scale)) {
        BlockFormat::F16
    } else {
        BlockFormat::F32
    }
}

fn encoded(name: &str, info: WeightInfo, values: &[f32]) -> Result<Weight, WeightError> {
    if info.format != BlockFormat::F16 {
        return Weight::from_f32(name, info.shape, values);
    }
    let bytes = values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes());
    let bytes: Vec<u8> = bytes.collect();
    Weight::new(name, info.shape, info.format, SharedBytes::from(bytes))
}
