//! [`RowCount`]: whether the rows of a result are one for each token or one for each output, so
//! that a program can run with fewer of them than its graph has.
//!
//! Does not know how an operation is computed.

use crate::op::{Input, Op};
use crate::{Graph, GraphShape};

/// The things that a result has one row for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowCount {
    /// The tokens of the ubatch.
    Tokens,
    /// The rows whose logits are wanted.
    Outputs,
}

impl RowCount {
    /// Number of rows in a run of this shape.
    pub const fn of(self, shape: GraphShape) -> usize {
        match self {
            Self::Tokens => shape.n_tokens,
            Self::Outputs => shape.n_outputs,
        }
    }
}

impl Graph {
    /// The row count of each node, in the order of the nodes. `None` where a node takes rows of
    /// both kinds: such a graph is valid for its own shape alone.
    pub fn row_counts(&self) -> Option<Vec<RowCount>> {
        let mut counts: Vec<RowCount> = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            let mut operands = node.operands.iter().map(|id| counts.get(id.as_usize()));
            let count = match node.op {
                Op::Input(Input::OutputRows) => RowCount::Outputs,
                Op::Input(_) => RowCount::Tokens,
                Op::TakeRows => *operands.nth(1)??,
                _ => {
                    let first = *operands.next()??;
                    operands
                        .all(|count| count == Some(&first))
                        .then_some(first)?
                }
            };
            let has_rows = !node.shape.is_empty();
            if has_rows && node.n_rows() != count.of(self.shape) {
                return None;
            }
            counts.push(count);
        }
        Some(counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GraphBuilder, NodeId};

    fn builder() -> (GraphBuilder, [NodeId; 2]) {
        // As many outputs as tokens: shapes do not tell them apart.
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 3,
        });
        let x = b.input(Input::Embeddings { dim: 4 }).unwrap();
        let wanted = b.input(Input::OutputRows).unwrap();
        let taken = b.take_rows("taken", x, wanted).unwrap();
        (b, [x, taken])
    }

    #[test]
    fn rows_that_were_taken_are_outputs() {
        let (mut b, [x, taken]) = builder();
        let y = b.scale("y", x, 2.0).unwrap();
        let z = b.add("z", taken, taken).unwrap();
        let graph = b.finish(&[y, z]).unwrap();
        use RowCount::{Outputs, Tokens};
        let wanted = vec![Tokens, Outputs, Outputs, Tokens, Outputs];
        assert_eq!(graph.row_counts(), Some(wanted));
    }

    #[test]
    fn sums_of_tokens_and_outputs_have_no_count() {
        let (mut b, [x, taken]) = builder();
        let sum = b.add("sum", x, taken).unwrap();
        assert_eq!(b.finish(&[sum]).unwrap().row_counts(), None);
    }

    #[test]
    fn nodes_that_only_store_have_no_rows() {
        let (mut b, [x, _]) = builder();
        let part = kv_core::ids::PartIdx(0);
        let cells = b.input(Input::Cells { part }).unwrap();
        let heads = b.reshape("heads", x, &[3, 1, 4]).unwrap();
        let layer = kv_core::ids::LayerIdx(0);
        b.store_kv("stored", layer, [heads, heads, cells]).unwrap();
        let counts = b.finish(&[x]).unwrap().row_counts();
        assert_eq!(counts.unwrap().last(), Some(&RowCount::Tokens));
    }
}
