//! Attention in parts: partial results over different rows, and their merge.
//!
//! Invariant: merged partial attention over two sets of rows is the attention over all of them.
//! Does not know why rows are apart.

use kv_core::ids::LayerIdx;
use serde::{Deserialize, Serialize};

use super::attend::{attended, with_attention};
use crate::op::{AttendSpec, Op};
use crate::spec::{OpResult, OpScope, OpSpec};
use crate::{Attention, Claim, GraphBuilder, GraphError, NodeId};

/// The result of attention for a query and a head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResultForm {
    /// The mean of values: [`Op::Attend`] and its like.
    #[default]
    Whole,
    /// The same, then the logarithm of the sum of `e^score`: [`Op::AttendPartial`].
    Partial,
}

impl ResultForm {
    /// The form of an operation's results.
    pub const fn of(op: &Op) -> Self {
        match op {
            Op::AttendPartial { .. } => Self::Partial,
            Op::MergePartials { form } => *form,
            _ => Self::Whole,
        }
    }

    /// Values of a head whose values are `v_dim` wide.
    pub const fn len(self, v_dim: usize) -> usize {
        match self {
            Self::Whole => v_dim,
            Self::Partial => v_dim.saturating_add(1),
        }
    }
}

pub(crate) fn attend_partial<'a>(
    layer: LayerIdx,
    of: &'a AttendSpec,
    sinks: Option<&'a String>,
) -> OpSpec<'a> {
    let spec = OpSpec::new("attend_partial", of.n_operands(3), move |given| {
        of.check_positions(given, 3)?;
        let len = ResultForm::Partial.len(of.v_dim);
        let shape = [given.graph.n_tokens, of.n_heads, len];
        let whole = attended(given, of, sinks)?;
        Ok(OpResult {
            shape: shape.into(),
            ..whole
        })
    });
    let spec = spec.setting("layer", layer).scope_of(OpScope::Tokens);
    with_attention(spec, of, sinks)
}

pub(crate) fn merge_partials<'a>(form: ResultForm) -> OpSpec<'a> {
    let spec = OpSpec::new("merge_partials", 2, move |given| match given.shapes() {
        [a @ &[n, heads, width], b] if a == b && width > 1 => Ok(match form {
            ResultForm::Whole => OpResult::f32([n, heads.saturating_mul(width - 1)]),
            ResultForm::Partial => OpResult::f32([n, heads, width]),
        }),
        _ => Err("two of [n, heads, dim + 1]".into()),
    });
    match form {
        ResultForm::Whole => spec,
        ResultForm::Partial => spec.setting("form", "partial"),
    }
}

impl GraphBuilder {
    /// Attention of `q [n, heads, k_dim]` over the rows that `stored` left behind, to be merged
    /// with that over others; see [`Op::AttendPartial`].
    ///
    /// # Errors
    /// [`GraphError::Shape`] where heads or widths do not match the specification.
    pub fn attend_partial<'a>(
        &mut self,
        name: &str,
        layer: LayerIdx,
        attention: impl Into<Attention<'a>>,
        q_stored_visibility: [NodeId; 3],
    ) -> Result<NodeId, GraphError> {
        let Attention { spec, sinks } = attention.into();
        let sinks = self.optional_weight_name(sinks);
        let op = Op::AttendPartial { layer, spec, sinks };
        self.push_attend(name, op, &spec, q_stored_visibility.to_vec())
    }

    /// The attention over the rows of both, `[n, heads * dim]`, or again a partial one.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where they are no partial results of the same heads and widths.
    pub fn merge_partials(
        &mut self,
        name: &str,
        form: ResultForm,
        both: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        self.push(name, Op::MergePartials { form }, &both, Claim::default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Alibi, Graph, GraphShape, Input};
    use kv_core::ids::PartIdx;
    use kv_core::window::Window;

    #[test]
    fn partial_results_are_one_wider_until_they_are_merged() {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 1,
        });
        let x = b.input(Input::Embeddings { dim: 8 }).unwrap();
        let q = b.reshape("q", x, &[3, 2, 4]).unwrap();
        let (part, window) = (PartIdx(0), Window::Older { by: 5, from: 0 });
        let seen = b.input(Input::Visibility { part, window }).unwrap();
        let spec = AttendSpec {
            n_heads: 2,
            kv_heads: 1,
            k_dim: 4,
            v_dim: 6,
            scale: 0.5,
            soft_cap: None,
            alibi: Some(Alibi::new(8.0)),
        };
        let with_sinks = Attention {
            spec,
            sinks: Some("sinks.w"),
        };
        let mut attend =
            |name, attention| b.attend_partial(name, LayerIdx(0), attention, [q, seen, seen]);
        let old = attend("old", with_sinks).unwrap();
        let recent = attend("recent", spec.into()).unwrap();
        assert!(matches!(
            b.merge_partials("wrong", ResultForm::Whole, [old, q]),
            Err(GraphError::Shape { .. })
        ));
        let mut merge = |name, form, both| b.merge_partials(name, form, both).unwrap();
        let some = merge("some", ResultForm::Partial, [old, recent]);
        let all = merge("all", ResultForm::Whole, [some, recent]);
        let graph = b.finish(&[all]).unwrap();
        let shape = |id: NodeId| graph.node(id).unwrap().shape.clone();
        assert_eq!([shape(old), shape(some)], [vec![3, 2, 7], vec![3, 2, 7]]);
        assert_eq!(shape(all), [3, 12]);
        let text = graph.text().to_string();
        assert!(text.contains("older(5)"), "{text}");
        assert!(text.contains("form=partial)"), "{text}");
        assert!(text.contains("alibi=8, sinks=sinks.w)"), "{text}");
        assert_eq!(Graph::from_json(&graph.to_json().unwrap()), Ok(graph));
    }
}
