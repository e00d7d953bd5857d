//! Sparse attention: an indexer chooses rows, and attention reads those alone (DeepSeek-V3.2,
//! arXiv 2512.02556).
//!
//! Invariant: what is chosen depends on the row and on what it sees, not on where cells are: rows
//! are named by their rank among the visible ones. Does not know how backends sort.

use kv_core::ids::LayerIdx;
use serde::{Deserialize, Serialize};

use crate::op::{AttendSpec, Op};
use crate::spec::{OpResult, OpScope, OpSpec};
use crate::{Claim, GraphBuilder, GraphError, NodeId};

/// Heads of an indexer, and how many rows it chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IndexSpec {
    /// Number of query heads, which share one key.
    pub n_heads: usize,
    /// Values of a key.
    pub dim: usize,
    /// Rows that are chosen, where a token sees more.
    pub top_k: usize,
}

impl IndexSpec {
    /// Cells that a part may have at most: an `f32` holds their numbers exactly.
    pub const MAX_CELLS: usize = 1 << 24;

    /// The definition of what is chosen: the ranks of the `out.len()` largest scores, ascending,
    /// then -1. Of equal scores the earlier is chosen.
    ///
    /// `scores` are those of what a token sees, by position; `order` is memory to sort in.
    pub fn choose(scores: &[f32], order: &mut Vec<u32>, out: &mut [f32]) {
        order.clear();
        order.extend((0u32..).take(scores.len()));
        if out.len() < order.len() {
            // Zeros are equal, whatever their sign.
            let score = |&rank: &u32| scores.get(rank as usize).map_or(f32::NAN, |s| s + 0.0);
            let larger_first =
                |a: &u32, b: &u32| score(b).total_cmp(&score(a)).then_with(|| a.cmp(b));
            order.select_nth_unstable_by(out.len(), larger_first);
            order.truncate(out.len());
            order.sort_unstable();
        }
        let ranks = order.iter().map(|&rank| rank as f32);
        for (to, rank) in out.iter_mut().zip(ranks.chain(std::iter::repeat(-1.0))) {
            *to = rank;
        }
    }
}

pub(crate) fn index<'a>(layer: LayerIdx, of: &'a IndexSpec) -> OpSpec<'a> {
    let spec = OpSpec::new("index", 4, move |given| {
        let (n, heads) = (given.graph.n_tokens, of.n_heads);
        let fits = given.shape(0) == [n, heads, of.dim] && given.shape(1) == [n, heads];
        if fits && of.top_k > 0 {
            Ok(OpResult::f32([n, of.top_k]))
        } else {
            Err(format!(
                "[{n}, {heads}, {}], [{n}, {heads}] and at least 1 row to choose",
                of.dim
            ))
        }
    });
    spec.setting("layer", layer)
        .setting("heads", of.n_heads)
        .setting("dim", of.dim)
        .setting("top_k", of.top_k)
        .scope_of(OpScope::Tokens)
}

pub(crate) fn attend_sparse<'a>(layer: LayerIdx, of: &'a AttendSpec) -> OpSpec<'a> {
    let spec = OpSpec::new("attend_sparse", 4, move |given| {
        let n = given.graph.n_tokens;
        if !matches!(given.op(3), Some(Op::Index { .. })) {
            return Err("the rows that an indexer chose as its last operand".into());
        }
        if of.alibi.is_some() {
            return Err("no linear biases".into());
        }
        if given.shape(0) == [n, of.n_heads, of.k_dim] && of.is_grouped() {
            Ok(OpResult::f32(of.result(n)))
        } else {
            Err(format!(
                "[{n}, {} (a multiple of {}), {}]",
                of.n_heads, of.kv_heads, of.k_dim
            ))
        }
    });
    let spec = spec.setting("layer", layer).scope_of(OpScope::Tokens);
    super::attend::with_attention(spec, of, None)
}

impl GraphBuilder {
    /// Chooses the rows of what each token sees that have the largest scores: for queries
    /// `[n, heads, dim]` with weights `[n, heads]` over the keys that `stored` left in `layer`,
    /// `[n, top_k]`; see [`Op::Index`].
    ///
    /// # Errors
    /// [`GraphError::Shape`] where heads or widths do not match the specification.
    pub fn index(
        &mut self,
        name: &str,
        layer: LayerIdx,
        index: IndexSpec,
        q_weights_stored_visibility: [NodeId; 4],
    ) -> Result<NodeId, GraphError> {
        let op = Op::Index { layer, index };
        self.push(name, op, &q_weights_stored_visibility, Claim::default())
    }

    /// Attention of `q [n, heads, k_dim]` over those of the rows that `stored` left behind that an
    /// [`Op::Index`] chose.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where heads or widths do not match the specification.
    pub fn attend_sparse(
        &mut self,
        name: &str,
        layer: LayerIdx,
        spec: AttendSpec,
        q_stored_visibility_chosen: [NodeId; 4],
    ) -> Result<NodeId, GraphError> {
        let op = Op::AttendSparse { layer, spec };
        self.push(name, op, &q_stored_visibility_chosen, Claim::default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Graph, GraphShape, Input};
    use kv_core::ids::PartIdx;
    use kv_core::window::Window;

    fn chosen(scores: &[f32], k: usize) -> Vec<f32> {
        let mut out = vec![7.0; k];
        IndexSpec::choose(scores, &mut Vec::new(), &mut out);
        out
    }

    #[test]
    fn the_largest_are_chosen_and_the_earlier_of_equal_ones() {
        let scores = [0.0, 3.0, 0.0, -1.0, 3.0, 9.0];
        assert_eq!(chosen(&scores, 1), [5.0]);
        assert_eq!(chosen(&scores, 2), [1.0, 5.0]);
        assert_eq!(chosen(&scores, 4), [0.0, 1.0, 4.0, 5.0]);
        assert_eq!(chosen(&scores, 6), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(chosen(&[-0.0, 0.0, -0.0], 2), [0.0, 1.0]);
        assert_eq!(chosen(&[-0.0, 0.0], 1), [0.0]);
        assert_eq!(chosen(&[1e-10, 2e-10], 1), [1.0]);
        let all_and_none = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, -1.0, -1.0];
        assert_eq!(chosen(&scores, 8), all_and_none);
        assert_eq!(chosen(&[], 2), [-1.0; 2]);
    }

    #[test]
    fn memory_to_sort_in_may_be_used_again() {
        let (mut order, mut out) = (Vec::new(), [7.0]);
        IndexSpec::choose(&[0.0, 1.0, 2.0], &mut order, &mut out);
        IndexSpec::choose(&[1.0, 0.0], &mut order, &mut out);
        assert_eq!(out, [0.0]);
    }

    const INDEX: IndexSpec = IndexSpec {
        n_heads: 2,
        dim: 3,
        top_k: 5,
    };
    const SPEC: AttendSpec = AttendSpec {
        n_heads: 2,
        kv_heads: 1,
        k_dim: 3,
        v_dim: 2,
        scale: 0.5,
        soft_cap: None,
        alibi: None,
    };

    #[test]
    fn an_attention_reads_what_an_indexer_chose() {
        let (part, window) = (PartIdx(0), Window::Full);
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 1,
        });
        let x = b.input(Input::Embeddings { dim: 8 }).unwrap();
        let cells = b.input(Input::Cells { part }).unwrap();
        let seen = b.input(Input::Visibility { part, window }).unwrap();
        let q = b.columns("q.flat", x, 0..6).unwrap();
        let q = b.reshape("q", q, &[3, 2, 3]).unwrap();
        let weights = b.columns("weights", x, 6..8).unwrap();
        let key = b.columns("key", x, 0..3).unwrap();
        let key = b.reshape("key_head", key, &[3, 1, 3]).unwrap();
        let stored = b.store_k("stored", LayerIdx(1), [key, cells]).unwrap();
        let operands = [q, weights, stored, seen];
        let chosen = b.index("chosen", LayerIdx(1), INDEX, operands).unwrap();
        let none = IndexSpec { top_k: 0, ..INDEX };
        let wide = IndexSpec { dim: 4, ..INDEX };
        for refused in [
            b.index("none", LayerIdx(1), none, operands),
            b.index("wide", LayerIdx(1), wide, operands),
            b.index("no weights", LayerIdx(1), INDEX, [q, q, stored, seen]),
            b.attend_sparse("all", LayerIdx(1), SPEC, [q, stored, seen, weights]),
        ] {
            assert!(
                matches!(refused, Err(GraphError::Shape { .. })),
                "{refused:?}"
            );
        }
        let operands = [q, stored, seen, chosen];
        let y = b.attend_sparse("y", LayerIdx(1), SPEC, operands).unwrap();
        let graph = b.finish(&[y]).unwrap();
        let text = graph.text().to_string();
        for line in [
            "chosen: f32[3, 5] = index(",
            "layer=1, heads=2, dim=3, top_k=5)",
            "y: f32[3, 4] = attend_sparse(",
        ] {
            assert!(text.contains(line), "{text}");
        }
        assert_eq!(Graph::from_json(&graph.to_json().unwrap()), Ok(graph));
    }
}
