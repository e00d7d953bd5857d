//! The largest values of rows: what a sampler needs of logits, without the rest of the vocabulary.
//!
//! Invariant: of equal values the one of the smaller column comes first, so candidates do not
//! depend on a device. Does not know tokens.

use crate::op::Op;
use crate::spec::{OpResult, OpSpec};
use crate::{Claim, Graph, GraphBuilder, GraphError, NodeId};

/// Columns that a row may have at most: an `f32` holds their numbers exactly.
const MAX_COLUMNS: usize = 1 << 24;

pub(crate) fn top_k<'a>(k: usize) -> OpSpec<'a> {
    let spec = OpSpec::new("top_k", 1, move |given| match *given.shape(0) {
        [n, width] if (1..=width).contains(&k) && width <= MAX_COLUMNS => {
            Ok(OpResult::f32([n, TopK::row_len(k)]))
        }
        _ => Err(format!("[n, {k} to {MAX_COLUMNS}], at least 1 of them")),
    });
    spec.setting("k", k)
}

/// One row of the result of [`Op::TopK`]: `k` values from the largest down, their columns, and
/// `ln(sum(e^x))` of the whole row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TopK<'a> {
    values: &'a [f32],
    columns: &'a [f32],
    /// Logarithm of the sum of the exponentials of the row; NaN where a value of it is NaN or plus
    /// infinity.
    pub log_sum_exp: f32,
}

impl<'a> TopK<'a> {
    /// Values of a row of the result.
    pub const fn row_len(k: usize) -> usize {
        2 * k + 1
    }

    /// Reads a row of the result; `None` where it has no odd number of values.
    pub fn read(row: &'a [f32]) -> Option<Self> {
        let (log_sum_exp, rest) = row.split_last()?;
        let (values, columns) = rest.split_at(rest.len() / 2);
        (values.len() == columns.len()).then_some(Self {
            values,
            columns,
            log_sum_exp: *log_sum_exp,
        })
    }

    /// Columns with their values, from the largest down.
    pub fn iter(&self) -> impl Iterator<Item = (u32, f32)> + 'a {
        let columns = self.columns.iter().map(|&column| column as u32);
        columns.zip(self.values.iter().copied())
    }

    /// The row that it was read from.
    pub fn to_row(&self) -> Vec<f32> {
        let rest = self.values.iter().chain(self.columns).copied();
        rest.chain([self.log_sum_exp]).collect()
    }

    /// The definition: the row of the result for `x`, into `out`, whose length says how many.
    pub fn of(x: &[f32], out: &mut [f32]) {
        let Some((log_sum_exp, rest)) = out.split_last_mut() else {
            return;
        };
        let k = rest.len() / 2;
        let (values, columns) = rest.split_at_mut(k);
        let mut best: Vec<(f32, u32)> = x.iter().copied().zip(0..).collect();
        let order = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        if k < best.len() {
            best.select_nth_unstable_by(k, order);
            best.truncate(k);
        }
        best.sort_unstable_by(order);
        for ((value, column), best) in values.iter_mut().zip(columns).zip(&best) {
            (*value, *column) = (best.0, best.1 as f32);
        }
        let largest = best.first().map_or(f32::NEG_INFINITY, |best| best.0);
        let is_number = x.iter().all(|x| *x < f32::INFINITY);
        let sum: f64 = x.iter().map(|x| f64::from(x - largest).exp()).sum();
        *log_sum_exp = if !is_number {
            f32::NAN
        } else if largest == f32::NEG_INFINITY {
            largest
        } else {
            (f64::from(largest) + sum.ln()) as f32
        };
    }
}

impl GraphBuilder {
    /// The `k` largest values of every row of `x [n, width]` with their columns: rows of
    /// [`TopK`], `[n, 2 k + 1]`.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where rows have fewer columns, or more than 2^24.
    pub fn top_k(&mut self, name: &str, x: NodeId, k: usize) -> Result<NodeId, GraphError> {
        self.push(name, Op::TopK { k }, &[x], Claim::default())
    }
}

impl Graph {
    /// The same computation whose first output, logits, is reduced to the candidates of a sampler:
    /// rows of [`TopK`].
    ///
    /// # Errors
    /// [`GraphError`] where there is no output of rows of at least `k` columns.
    pub fn with_candidates(&self, k: usize) -> Result<Self, GraphError> {
        let mut b = GraphBuilder::new(self.shape());
        let mut copies = Vec::with_capacity(self.nodes().len());
        for node in self.nodes() {
            let of = |id: &NodeId| copies.get(id.as_usize()).copied().unwrap_or(*id);
            let operands: Vec<NodeId> = node.operands.iter().map(of).collect();
            copies.push(b.copy_node(self, node, &operands)?);
        }
        let mut outputs: Vec<NodeId> = self
            .outputs()
            .iter()
            .map(|o| copies[o.as_usize()])
            .collect();
        if let Some(logits) = outputs.first_mut() {
            *logits = b.top_k("candidates", *logits, k)?;
        }
        b.finish(&outputs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GraphShape, Input};

    fn of(x: &[f32], k: usize) -> Vec<f32> {
        let mut out = vec![9.0; TopK::row_len(k)];
        TopK::of(x, &mut out);
        out
    }

    #[test]
    fn the_largest_come_first_and_the_first_of_equal_ones() {
        let x = [1.0, 5.0, -2.0, 5.0, 3.0];
        assert_eq!(of(&x, 3)[..6], [5.0, 5.0, 3.0, 1.0, 3.0, 4.0]);
        let row = of(&x, 5);
        let top = TopK::read(&row).unwrap();
        assert_eq!(top.iter().last(), Some((2, -2.0)));
        let sum: f32 = x.iter().map(|x| x.exp()).sum();
        assert!((top.log_sum_exp - sum.ln()).abs() < 1e-6);
        assert_eq!(TopK::read(&row[1..]), None);
        assert_eq!(top.to_row(), row);
    }

    #[test]
    fn what_is_no_number_is_seen() {
        assert!(of(&[1.0, f32::NAN, 2.0], 1)[2].is_nan());
        assert!(of(&[1.0, f32::INFINITY, 2.0], 1)[2].is_nan());
        assert_eq!(of(&[1.0, f32::NEG_INFINITY], 1)[2], 1.0);
        assert_eq!(of(&[f32::NEG_INFINITY; 2], 1)[2], f32::NEG_INFINITY);
        // In the order of all floats it is below every number.
        let nan = -f32::NAN.abs();
        assert!(of(&[nan, f32::NEG_INFINITY], 1)[2].is_nan());
    }

    #[test]
    fn sums_of_large_exponentials_do_not_overflow() {
        assert_eq!(of(&[1000.0, 0.0], 2)[4], 1000.0);
    }

    #[test]
    fn a_graph_gives_candidates_instead_of_logits() {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 3,
        });
        let x = b.input(Input::Embeddings { dim: 4 }).unwrap();
        let logits = b.linear("logits", x, "output", 50).unwrap();
        let graph = b.finish(&[logits]).unwrap();
        let candidates = graph.with_candidates(8).unwrap();
        let output = candidates.node(candidates.outputs()[0]).unwrap();
        assert_eq!(
            (&*output.name, &*output.shape),
            ("candidates", &[3, 17][..])
        );
        assert!(graph.with_candidates(51).is_err());
        assert!(graph.with_candidates(0).is_err());
        let json = candidates.to_json().unwrap();
        assert_eq!(Graph::from_json(&json), Ok(candidates));
    }
}
