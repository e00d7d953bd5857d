//! [`TensorStep`]: what happens to a tensor between its file and its place under a GGUF name.
//!
//! Rows are moved as they are stored; where values change, they become `F32`. Invariant: the shape
//! that [`Action::shape`] promises is the one that [`Action::apply`] makes. Knows no tensor by
//! name.

use std::ops::Range;

use kv_block::{BlockFormat, dequantize};
use kv_graph::weights::SharedBytes;

use super::{HfConfig, ModelFileError};

/// Numbers of rows, each with the factor that they get.
pub type RowFactors = Vec<(usize, f32)>;

/// Some of the rows that each head of a projection has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadRows {
    /// Number of heads.
    pub n_heads: usize,
    /// Rows that a head has.
    pub n_rows: usize,
    /// The range of rows that is taken.
    pub rows: Range<usize>,
}

/// Rows of a tensor in another order, or some of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PickedRows {
    /// Rows that the tensor has.
    pub n_rows: usize,
    /// The ranges of rows that are taken, in this order.
    pub rows: Vec<Range<usize>>,
}

impl PickedRows {
    fn len(&self) -> usize {
        self.rows.iter().map(Range::len).sum()
    }
}

/// The heads that the rows of a projection belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heads {
    /// `num_attention_heads`
    Query,
    /// `num_key_value_heads`
    KeyValue,
}

/// One change to a tensor, as tables specify it.
#[derive(Clone, Copy, Debug)]
pub enum TensorStep {
    /// Of each head, the rows that rotate together become neighbours: transformers pairs row `i`
    /// with row `i + n_rot / 2`, GGUF's `llama` pairs `2i` with `2i + 1`. Rows that do not rotate
    /// stay.
    Pairs(Heads),
    /// One of `of` equal parts of the second to last dimension.
    RowPart {
        /// The number of the part, from 0.
        part: usize,
        /// Their number.
        of: usize,
    },
    /// One of `of` equal parts of the last dimension.
    ColumnPart {
        /// The number of the part, from 0.
        part: usize,
        /// Their number.
        of: usize,
    },
    /// Rows of so many groups, each with `of` parts, become `of` parts, each with all groups: fused
    /// queries, keys and values that lie head by head.
    PartsTogether {
        /// Number of groups.
        groups: fn(&HfConfig) -> Result<usize, ModelFileError>,
        /// Parts of each.
        of: usize,
    },
    /// Every `step`-th of the last dimension.
    EveryColumn {
        /// The first.
        first: usize,
        /// Distance to the next.
        step: usize,
    },
    /// The last two dimensions swapped.
    Transposed,
    /// Without dimensions of length 1.
    Squeezed,
    /// With one dimension.
    Flat,
    /// With a last dimension of length 1.
    Column,
    /// With a first dimension of length 1.
    LeadingOne,
    /// A vector in as many rows as the value of this key.
    Rows(&'static str),
    /// Some of the rows of every head: `[heads * head_rows, columns]` becomes
    /// `[heads, rows, columns]`.
    HeadRows(fn(&HfConfig) -> Result<HeadRows, ModelFileError>),
    /// These rows, in this order.
    PickedRows(fn(&HfConfig) -> Result<PickedRows, ModelFileError>),
    /// The first dimension cut into as many equal ones as the value of this key.
    Stacked(&'static str),
    /// Without the first rows: as many as this.
    RowsAfter(fn(&HfConfig) -> Result<usize, ModelFileError>),
    /// 1 added to every value.
    PlusOne,
    /// A number that is computed, added to every value.
    Plus(fn(&HfConfig) -> Result<f32, ModelFileError>),
    /// `-exp(x)`
    NegativeExp,
    /// `-ln(1 + exp(x))`
    NegativeSoftplus,
    /// Times the number under this key.
    Scaled(&'static str),
    /// Rows times numbers that are computed: so many rows, then their factor.
    ScaledRows(fn(&HfConfig) -> Result<RowFactors, ModelFileError>),
    /// Rows by their length, in models whose config has this key.
    UnitRowsWhere(&'static str),
}

/// One change to a tensor, with its numbers.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Action {
    Pairs { heads: usize, rotary: f64 },
    RowPart { part: usize, of: usize },
    ColumnPart { part: usize, of: usize },
    PartsTogether { groups: usize, of: usize },
    EveryColumn { first: usize, step: usize },
    EveryRow { first: usize, step: usize },
    Transposed,
    Squeezed,
    Flat,
    Column,
    LeadingOne,
    Rows(usize),
    HeadRows(HeadRows),
    PickedRows(PickedRows),
    Stacked(usize),
    RowsAfter(usize),
    Plus(f32),
    NegativeExp,
    NegativeSoftplus,
    Scaled(f32),
    ScaledRows(RowFactors),
    UnitRows,
}

/// A tensor on its way.
#[derive(Clone, Debug)]
pub(super) struct Values {
    pub(super) shape: Vec<usize>,
    pub(super) format: BlockFormat,
    pub(super) bytes: SharedBytes,
}

impl TensorStep {
    /// Fills in the numbers of a config.
    pub(super) fn resolve(self, config: &HfConfig) -> Result<Action, ModelFileError> {
        Ok(match self {
            Self::Pairs(heads) => {
                let n_heads = config.count("num_attention_heads")?;
                let heads = match heads {
                    Heads::Query => n_heads,
                    Heads::KeyValue => config
                        .optional_count("num_key_value_heads")?
                        .unwrap_or(n_heads),
                };
                let rotary = super::RopeSettings::rotated_part(config, None)?;
                Action::Pairs { heads, rotary }
            }
            Self::RowPart { part, of } => Action::RowPart { part, of },
            Self::ColumnPart { part, of } => Action::ColumnPart { part, of },
            Self::PartsTogether { groups, of } => Action::PartsTogether {
                groups: groups(config)?,
                of,
            },
            Self::EveryColumn { first, step } => Action::EveryColumn { first, step },
            Self::Transposed => Action::Transposed,
            Self::Squeezed => Action::Squeezed,
            Self::Flat => Action::Flat,
            Self::Column => Action::Column,
            Self::LeadingOne => Action::LeadingOne,
            Self::Rows(key) => Action::Rows(config.count(key)?),
            Self::HeadRows(rows) => Action::HeadRows(rows(config)?),
            Self::PickedRows(rows) => Action::PickedRows(rows(config)?),
            Self::Stacked(key) => Action::Stacked(config.count(key)?),
            Self::RowsAfter(n) => Action::RowsAfter(n(config)?),
            Self::PlusOne => Action::Plus(1.0),
            Self::Plus(number) => Action::Plus(number(config)?),
            Self::NegativeExp => Action::NegativeExp,
            Self::NegativeSoftplus => Action::NegativeSoftplus,
            Self::Scaled(key) => Action::Scaled(config.optional_number(key)?.unwrap_or(1.0) as f32),
            Self::ScaledRows(factors) => Action::ScaledRows(factors(config)?),
            Self::UnitRowsWhere(key) if config.value(key).is_some() => Action::UnitRows,
            Self::UnitRowsWhere(_) => Action::Scaled(1.0),
        })
    }
}

/// A shape as `[outer, rows, columns]`.
fn as_matrices(shape: &[usize]) -> Result<[usize; 3], String> {
    match *shape {
        [.., rows, columns] => {
            let outer = shape.iter().rev().skip(2).product();
            Ok([outer, rows, columns])
        }
        _ => Err(format!("shape {shape:?} is no matrix")),
    }
}

/// `ln(1 + exp(x))`, without overflow.
fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

fn part_of(n: usize, of: usize, what: &str) -> Result<usize, String> {
    if n.is_multiple_of(of) {
        Ok(n / of)
    } else {
        Err(format!("{n} {what} cannot be cut into {of} equal parts"))
    }
}

/// Replaces the last `N` dimensions.
fn with_last<const N: usize>(shape: &[usize], last: [usize; N]) -> Vec<usize> {
    let kept = shape.len().saturating_sub(N);
    shape.iter().take(kept).copied().chain(last).collect()
}

impl Action {
    /// The shape that a tensor of `shape` takes.
    ///
    /// # Errors
    /// If it has no such shape, in words.
    pub(super) fn shape(&self, shape: &[usize]) -> Result<Vec<usize>, String> {
        match *self {
            Self::Pairs { heads, rotary } => {
                rotated_rows(shape, heads, rotary).map(|_| shape.to_vec())
            }
            Self::RowPart { of, .. } | Self::EveryRow { step: of, .. } => {
                let [_, rows, columns] = as_matrices(shape)?;
                Ok(with_last(shape, [part_of(rows, of, "rows")?, columns]))
            }
            Self::ColumnPart { of, .. } | Self::EveryColumn { step: of, .. } => {
                let columns = shape.last().copied().unwrap_or(1);
                Ok(with_last(shape, [part_of(columns, of, "columns")?]))
            }
            // Rows that lie together already, equal parts or not.
            Self::PartsTogether { groups: 1, .. } => Ok(shape.to_vec()),
            Self::PartsTogether { groups, of } => {
                let rows = shape.first().copied().unwrap_or(0);
                part_of(rows, (groups * of).max(1), "rows").map(|_| shape.to_vec())
            }
            Self::Transposed => {
                let [_, rows, columns] = as_matrices(shape)?;
                Ok(with_last(shape, [columns, rows]))
            }
            Self::Squeezed => Ok(shape.iter().copied().filter(|&n| n != 1).collect()),
            Self::Flat => Ok(vec![shape.iter().product()]),
            Self::Column => Ok(shape.iter().copied().chain([1]).collect()),
            Self::LeadingOne => Ok([&[1], shape].concat()),
            Self::Rows(n) => match *shape {
                [values] => Ok(vec![n, part_of(values, n, "values")?]),
                _ => Err(format!("shape {shape:?} is no vector")),
            },
            Self::HeadRows(ref heads) => {
                let HeadRows {
                    n_heads,
                    n_rows,
                    rows,
                } = heads;
                match *shape {
                    [found, columns] if found == n_heads * n_rows && rows.end <= *n_rows => {
                        Ok(vec![*n_heads, rows.len(), columns])
                    }
                    _ => Err(format!(
                        "shape {shape:?} where the config asks for {n_heads} heads of {n_rows} rows"
                    )),
                }
            }
            Self::PickedRows(ref picked) => match *shape {
                [found, ref rest @ ..]
                    if found == picked.n_rows && picked.rows.iter().all(|r| r.end <= found) =>
                {
                    Ok([&[picked.len()], rest].concat())
                }
                _ => Err(format!(
                    "shape {shape:?} where the config asks for {} rows",
                    picked.n_rows
                )),
            },
            Self::Stacked(n) => match *shape {
                [rows, ref inner @ ..] => {
                    let outer = [n, part_of(rows, n, "rows")?];
                    Ok(outer.iter().chain(inner).copied().collect())
                }
                [] => Err("a single value cannot be stacked".to_owned()),
            },
            Self::ScaledRows(ref factors) => {
                let found = shape.first().copied().unwrap_or(1);
                let wanted: usize = factors.iter().map(|(rows, _)| rows).sum();
                if found == wanted {
                    Ok(shape.to_vec())
                } else {
                    Err(format!("{found} rows where the config asks for {wanted}"))
                }
            }
            Self::RowsAfter(n) => match *shape {
                [rows, columns] if rows > n => Ok(vec![rows - n, columns]),
                _ => Err(format!("shape {shape:?} has no rows after the first {n}")),
            },
            Self::Plus(_)
            | Self::NegativeExp
            | Self::NegativeSoftplus
            | Self::Scaled(_)
            | Self::UnitRows => Ok(shape.to_vec()),
        }
    }

    /// The way values are stored after this step.
    pub(super) fn format(&self, format: BlockFormat) -> BlockFormat {
        match *self {
            Self::Plus(_)
            | Self::NegativeExp
            | Self::NegativeSoftplus
            | Self::ScaledRows(_)
            | Self::UnitRows => BlockFormat::F32,
            Self::Scaled(factor) if factor != 1.0 => BlockFormat::F32,
            _ => format,
        }
    }

    /// Changes a tensor.
    ///
    /// # Errors
    /// As [`Self::shape`].
    pub(super) fn apply(&self, values: &Values) -> Result<Values, String> {
        let shape = self.shape(&values.shape)?;
        let bytes = match *self {
            Self::Pairs { heads, rotary } => {
                let (head_rows, n_rot) = rotated_rows(&values.shape, heads, rotary)?;
                let rows = heads * head_rows;
                values.gather(rows, rows, |row| source_row(row, head_rows, n_rot))
            }
            Self::RowPart { part, of } => {
                let [outer, rows, _] = as_matrices(&values.shape)?;
                let part_rows = rows / of.max(1);
                values.gather(outer * rows, outer * part_rows, |row| {
                    row / part_rows * rows + part * part_rows + row % part_rows
                })
            }
            Self::ColumnPart { part, of } => {
                let columns = values.shape.last().copied().unwrap_or(1);
                let kept = columns / of.max(1);
                let n = values.n_values();
                values.gather(n, n / of.max(1), |at| {
                    at / kept * columns + part * kept + at % kept
                })
            }
            Self::PartsTogether { groups: 1, .. } => values.bytes.clone(),
            Self::PartsTogether { groups, of } => {
                let rows = values.shape.first().copied().unwrap_or(0);
                let part = (rows / (groups * of).max(1)).max(1);
                values.gather(rows, rows, |row| {
                    let (at, inside) = (row / part, row % part);
                    (at % groups * of + at / groups) * part + inside
                })
            }
            Self::EveryColumn { first, step } => {
                let n = values.n_values();
                values.gather(n, n / step.max(1), |at| at * step + first)
            }
            Self::EveryRow { first, step } => {
                let [outer, rows, _] = as_matrices(&values.shape)?;
                let n = outer * rows;
                values.gather(n, n / step.max(1), |row| row * step + first)
            }
            Self::Transposed => {
                let [_, rows, columns] = as_matrices(&values.shape)?;
                let n = values.n_values();
                values.gather(n, n, |at| {
                    let (matrix, inside) = (at / (rows * columns), at % (rows * columns));
                    matrix * rows * columns + inside % rows * columns + inside / rows
                })
            }
            Self::Squeezed
            | Self::Flat
            | Self::Column
            | Self::LeadingOne
            | Self::Rows(_)
            | Self::Stacked(_) => values.bytes.clone(),
            Self::HeadRows(ref heads) => {
                let HeadRows {
                    n_heads,
                    n_rows,
                    rows,
                } = heads;
                let len = rows.len().max(1);
                values.gather(n_heads * n_rows, n_heads * rows.len(), |row| {
                    row / len * n_rows + rows.start + row % len
                })
            }
            Self::PickedRows(ref picked) => {
                let source: Vec<usize> = picked.rows.iter().cloned().flatten().collect();
                values.gather(picked.n_rows, source.len(), |row| source[row])
            }
            Self::RowsAfter(n) => {
                let rows = values.shape.first().copied().unwrap_or(0);
                values.gather(rows, rows.saturating_sub(n), |row| row + n)
            }
            Self::UnitRows => values.unit_rows(),
            Self::Plus(number) => values.map(|_, v| v + number),
            Self::NegativeExp => values.map(|_, v| -v.exp()),
            Self::NegativeSoftplus => values.map(|_, v| -softplus(v)),
            Self::Scaled(1.0) => values.bytes.clone(),
            Self::Scaled(factor) => values.map(|_, v| v * factor),
            Self::ScaledRows(ref factors) => {
                let rows = values.shape.first().copied().unwrap_or(1).max(1);
                let columns = (values.n_values() / rows).max(1);
                let of_row: Vec<f32> = factors
                    .iter()
                    .flat_map(|&(n, factor)| std::iter::repeat_n(factor, n))
                    .collect();
                values.map(|at, v| v * of_row.get(at / columns).copied().unwrap_or(1.0))
            }
        };
        Ok(Values {
            shape,
            format: self.format(values.format),
            bytes,
        })
    }
}

/// Rows of one head, and how many of them rotate.
fn rotated_rows(shape: &[usize], heads: usize, rotary: f64) -> Result<(usize, usize), String> {
    let rows = shape.first().copied().unwrap_or(0);
    let head_rows = part_of(rows, heads.max(1), "rows")?;
    // As transformers rounds it.
    let n_rot = (head_rows as f64 * rotary) as usize;
    if n_rot.is_multiple_of(2) && n_rot <= head_rows {
        Ok((head_rows, n_rot))
    } else {
        Err(format!(
            "{n_rot} rows of {head_rows} cannot rotate in pairs"
        ))
    }
}

/// The number of the row that becomes `row`.
fn source_row(row: usize, head_rows: usize, n_rot: usize) -> usize {
    let (head, inside) = (row / head_rows, row % head_rows);
    let source = if inside < n_rot {
        inside / 2 + inside % 2 * (n_rot / 2)
    } else {
        inside
    };
    head * head_rows + source
}

impl Values {
    fn n_values(&self) -> usize {
        self.shape.iter().product()
    }

    /// `n` units, each a copy of one of the `n_units` equal pieces that there are.
    fn gather(&self, n_units: usize, n: usize, source: impl Fn(usize) -> usize) -> SharedBytes {
        let unit = self.bytes.len() / n_units.max(1);
        let mut out = Vec::with_capacity(n * unit);
        for at in 0..n {
            let from = source(at) * unit;
            out.extend_from_slice(self.bytes.get(from..from + unit).unwrap_or_default());
        }
        out.into()
    }

    /// Every value, with its place, through `change`.
    fn map(&self, change: impl Fn(usize, f32) -> f32) -> SharedBytes {
        let mut values = self.floats();
        for (at, value) in values.iter_mut().enumerate() {
            *value = change(at, *value);
        }
        SharedBytes::from_f32(&values)
    }

    /// Every row by its length; one of zeros stays.
    fn unit_rows(&self) -> SharedBytes {
        let mut values = self.floats();
        let columns = self.shape.last().copied().unwrap_or(1).max(1);
        for row in values.chunks_exact_mut(columns) {
            let square: f64 = row.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
            let length = square.sqrt().max(1e-12);
            for value in row {
                *value = (f64::from(*value) / length) as f32;
            }
        }
        SharedBytes::from_f32(&values)
    }

    fn floats(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.n_values()];
        dequantize(self.format, &self.bytes, &mut values);
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Applies to 0, 1, 2 … in this shape.
    fn applied(action: &Action, shape: &[usize]) -> (Vec<usize>, Vec<f32>) {
        let n = shape.iter().product::<usize>();
        let values: Vec<f32> = (0..n).map(|v| v as f32).collect();
        let values = Values {
            shape: shape.to_vec(),
            format: BlockFormat::F32,
            bytes: SharedBytes::from_f32(&values),
        };
        let out = action.apply(&values).unwrap();
        assert_eq!(out.shape, action.shape(shape).unwrap());
        let mut read = vec![0.0; out.n_values()];
        dequantize(out.format, &out.bytes, &mut read);
        (out.shape, read)
    }

    #[test]
    fn halves_become_pairs_in_every_head() {
        let pairs = Action::Pairs {
            heads: 2,
            rotary: 1.0,
        };
        let (_, rows) = applied(&pairs, &[8, 1]);
        assert_eq!(rows, [0., 2., 1., 3., 4., 6., 5., 7.]);
        let partial = Action::Pairs {
            heads: 1,
            rotary: 0.5,
        };
        let (_, rows) = applied(&partial, &[8]);
        assert_eq!(rows, [0., 2., 1., 3., 4., 5., 6., 7.]);
        assert!(pairs.shape(&[9, 1]).unwrap_err().contains("9 rows"));
    }

    #[test]
    fn parts_of_rows_and_columns() {
        let second = Action::RowPart { part: 1, of: 2 };
        let (shape, values) = applied(&second, &[2, 2, 2]);
        assert_eq!((shape, values), (vec![2, 1, 2], vec![2., 3., 6., 7.]));
        let second = Action::ColumnPart { part: 1, of: 2 };
        let (shape, values) = applied(&second, &[2, 4]);
        assert_eq!((shape, values), (vec![2, 2], vec![2., 3., 6., 7.]));
        let odd = Action::EveryColumn { first: 1, step: 2 };
        let (shape, values) = applied(&odd, &[2, 4]);
        assert_eq!((shape, values), (vec![2, 2], vec![1., 3., 5., 7.]));
        assert!(odd.shape(&[3]).unwrap_err().contains("3 columns"));
        let odd = Action::EveryRow { first: 1, step: 2 };
        assert_eq!(applied(&odd, &[2, 2, 1]), (vec![2, 1, 1], vec![1., 3.]));
    }

    #[test]
    fn rows_get_the_length_of_one() {
        let (shape, values) = applied(&Action::UnitRows, &[2, 2]);
        assert_eq!(shape, [2, 2]);
        let length = 13f32.sqrt();
        assert_eq!(values, [0., 1., 2. / length, 3. / length]);
        assert_eq!(applied(&Action::UnitRows, &[1, 1]).1, [0.]);
    }

    #[test]
    fn parts_of_groups_come_together() {
        let together = Action::PartsTogether { groups: 2, of: 3 };
        let (_, rows) = applied(&together, &[12]);
        assert_eq!(rows, [0., 1., 6., 7., 2., 3., 8., 9., 4., 5., 10., 11.]);
        assert!(together.shape(&[10, 1]).unwrap_err().contains("10 rows"));
    }

    #[test]
    fn transposed_matrix_by_matrix() {
        let (shape, values) = applied(&Action::Transposed, &[2, 2, 3]);
        assert_eq!(shape, [2, 3, 2]);
        assert_eq!(values, [0., 3., 1., 4., 2., 5., 6., 9., 7., 10., 8., 11.]);
        assert!(Action::Transposed.shape(&[3]).is_err());
    }

    #[test]
    fn shapes_and_values() {
        assert_eq!(applied(&Action::Squeezed, &[3, 1, 2]).0, [3, 2]);
        assert_eq!(applied(&Action::Column, &[3]).0, [3, 1]);
        assert_eq!(applied(&Action::LeadingOne, &[3, 2]).0, [1, 3, 2]);
        assert_eq!(applied(&Action::Stacked(2), &[4, 3]).0, [2, 2, 3]);
        assert!(Action::Stacked(3).shape(&[4, 3]).is_err());
        assert_eq!(applied(&Action::Rows(2), &[4]).0, [2, 2]);
        let (shape, rows) = applied(&Action::RowsAfter(2), &[3, 2]);
        assert_eq!((shape, rows), (vec![1, 2], vec![4., 5.]));
        assert!(Action::RowsAfter(3).shape(&[3, 2]).is_err());
        let heads = Action::HeadRows(HeadRows {
            n_heads: 2,
            n_rows: 3,
            rows: 1..3,
        });
        let (shape, rows) = applied(&heads, &[6, 1]);
        assert_eq!((shape, rows), (vec![2, 2, 1], vec![1., 2., 4., 5.]));
        assert!(
            heads
                .shape(&[5, 1])
                .unwrap_err()
                .contains("2 heads of 3 rows")
        );
        let picked = Action::PickedRows(PickedRows {
            n_rows: 4,
            rows: vec![2..4, 0..1],
        });
        let (shape, rows) = applied(&picked, &[4, 2]);
        assert_eq!((shape, rows), (vec![3, 2], vec![4., 5., 6., 7., 0., 1.]));
        assert_eq!(applied(&picked, &[4]).1, [2., 3., 0.]);
        assert!(picked.shape(&[5, 2]).unwrap_err().contains("4 rows"));
        assert_eq!(applied(&Action::Plus(1.0), &[2]).1, [1., 2.]);
        assert_eq!(applied(&Action::NegativeExp, &[1]).1, [-1.]);
        let softplus = applied(&Action::NegativeSoftplus, &[2]).1;
        for (ours, wanted) in softplus.iter().zip([-std::f32::consts::LN_2, -1.313_261_7]) {
            assert!((ours - wanted).abs() < 1e-6, "{ours}, {wanted}");
        }
        assert_eq!(applied(&Action::Flat, &[2, 2]).0, [4]);
        let scaled = Action::ScaledRows(vec![(1, 2.0), (2, 0.5)]);
        assert_eq!(applied(&scaled, &[3, 1]).1, [0., 0.5, 1.]);
        assert!(scaled.shape(&[4, 1]).is_err());
    }
}
