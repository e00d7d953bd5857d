//! Heads: a matrix for each, and heads put together from two.
//!
//! Latent attention (DeepSeek-V2, arXiv 2405.04434) needs both. Does not know attention.

use crate::op::Op;
use crate::spec::{OpResult, OpSpec};
use crate::{Claim, GraphBuilder, GraphError, NodeId};

pub(crate) fn head_linear(weight: &String) -> OpSpec<'_> {
    let spec = OpSpec::new("head_linear", 1, |given| match *given.shape(0) {
        [n, heads, n_in] if heads > 0 => {
            let n_out = given.width();
            Ok(OpResult::f32([n, heads, n_out]).weight([heads, n_out, n_in]))
        }
        _ => Err("[n, heads, in], at least 1 head".into()),
    });
    spec.weights_as("w", [weight])
}

pub(crate) fn concat<'a>() -> OpSpec<'a> {
    OpSpec::new("concat", 2, |given| match given.shapes() {
        [[a_rows @ .., a], [b_rows @ .., b]] if a_rows == b_rows && !a_rows.is_empty() => {
            Ok(OpResult::f32([a_rows, &[a.saturating_add(*b)]].concat()))
        }
        _ => Err("two shapes that differ in the last dimension alone".into()),
    })
}

impl GraphBuilder {
    /// Each head of `x [n, heads, in]` times a matrix of its own, with `weight`
    /// `[heads, n_out, in]`: `[n, heads, n_out]`.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where `x` has no heads.
    pub fn head_linear(
        &mut self,
        name: &str,
        x: NodeId,
        weight: &str,
        n_out: usize,
    ) -> Result<NodeId, GraphError> {
        let weight = self.weight_name(weight);
        self.push(
            name,
            Op::HeadLinear { weight },
            &[x],
            Claim::shape(&[n_out]),
        )
    }

    /// `a [.., x]` and `b [.., y]` next to each other: `[.., x + y]`.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where other dimensions than the last differ.
    pub fn concat(&mut self, name: &str, a: NodeId, b: NodeId) -> Result<NodeId, GraphError> {
        self.push(name, Op::Concat, &[a, b], Claim::default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Graph, GraphShape, Input};

    #[test]
    fn heads_have_matrices_and_parts_of_their_own() {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 1,
        });
        let x = b.input(Input::Embeddings { dim: 12 }).unwrap();
        let heads = b.reshape("heads", x, &[3, 2, 6]).unwrap();
        let first = b.columns("first", heads, 0..4).unwrap();
        assert_eq!(b.shape_of(first), [3, 2, 4]);
        assert!(b.columns("wide", heads, 4..7).is_err());
        let y = b.head_linear("y", first, "k_b", 5).unwrap();
        let joined = b.concat("joined", y, heads).unwrap();
        for refused in [
            b.head_linear("no heads", x, "w", 5),
            b.concat("rows", x, heads),
            b.concat("heads_too", x, y),
        ] {
            assert!(
                matches!(refused, Err(GraphError::Shape { .. })),
                "{refused:?}"
            );
        }
        let flat = b.concat("flat", x, x).unwrap();
        let graph = b.finish(&[joined, flat]).unwrap();
        let text = graph.text().to_string();
        for line in [
            "first: f32[3, 2, 4] = columns(%1, first=0)",
            "y: f32[3, 2, 5] = head_linear(%2, w=k_b)",
            "joined: f32[3, 2, 11] = concat(%3, %1)",
            "flat: f32[3, 24] = concat(%0, %0)",
        ] {
            assert!(text.contains(line), "{text}");
        }
        assert_eq!(graph.weights()[0].shape, [2, 5, 4]);
        assert_eq!(Graph::from_json(&graph.to_json().unwrap()), Ok(graph));
    }
}
