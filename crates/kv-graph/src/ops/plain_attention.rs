//! Plain attention: scores, masked softmax and weighted sum as nodes of their own, to be looked at
//! and compared with the fused [`Op::Attend`].
//!
//! Scores are a table over the first `n_kv` cells of a part, used or not, so a plain graph
//! depends on how far the memory is in use, and its shapes say so. Does not know how cells are
//! found.

use kv_core::ids::{LayerIdx, PartIdx};

use super::attend::with_attention;
use crate::op::{AttendSpec, Input, Op};
use crate::spec::{OpContext, OpResult, OpScope, OpSpec};
use crate::{Attention, Claim, Graph, GraphBuilder, GraphError, Node, NodeId};

pub(crate) fn kq(layer: LayerIdx, of: &AttendSpec) -> OpSpec<'_> {
    let spec = OpSpec::new("kq", 2, |given| {
        let (n, heads, n_kv) = (given.graph.n_tokens, of.n_heads, given.width());
        if given.shape(0) == [n, heads, of.k_dim] && of.is_grouped() {
            Ok(OpResult::f32([n, heads, n_kv]))
        } else {
            Err(format!("[{n}, {heads}, {}]", of.k_dim))
        }
    });
    let spec = spec.setting("layer", layer).scope_of(OpScope::Tokens);
    with_attention(spec, of, None)
}

pub(crate) fn kq_soft_max<'a>(of: &'a AttendSpec, sinks: Option<&'a String>) -> OpSpec<'a> {
    let spec = OpSpec::new("kq_soft_max", of.n_operands(2), move |given| {
        check_table(given, of)?;
        of.check_positions(given, 2)?;
        Ok(OpResult::f32(given.shape(0)).weight_if(sinks, [of.n_heads]))
    });
    with_attention(spec, of, sinks)
}

pub(crate) fn kqv(layer: LayerIdx, of: &AttendSpec) -> OpSpec<'_> {
    let spec = OpSpec::new("kqv", 2, |given| {
        check_table(given, of)?;
        Ok(OpResult::f32(of.result(given.graph.n_tokens)))
    });
    let spec = spec.setting("layer", layer).scope_of(OpScope::Tokens);
    with_attention(spec, of, None)
}

/// Checks that the first operand has a number for each token, head and cell.
fn check_table(given: &OpContext<'_>, of: &AttendSpec) -> Result<(), String> {
    match *given.shape(0) {
        [n, heads, _] if n == given.graph.n_tokens && heads == of.n_heads => Ok(()),
        _ => Err("[tokens, heads, cells]".into()),
    }
}

impl GraphBuilder {
    /// Scaled (and capped) products of `q [n, heads, k_dim]` with the keys of cells `0..n_kv`,
    /// which `stored` left behind: `[n, heads, n_kv]`.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where heads or widths do not match `spec`.
    pub fn kq(
        &mut self,
        name: &str,
        layer: LayerIdx,
        spec: AttendSpec,
        q_stored: [NodeId; 2],
        n_kv: usize,
    ) -> Result<NodeId, GraphError> {
        let op = Op::Kq { layer, spec };
        self.push(name, op, &q_stored, Claim::shape(&[n_kv]))
    }

    /// The softmax of each row and head over the cells that the row sees; all others get 0, and so
    /// does everything in a row that sees nothing.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where `kq` is no table of scores of these heads.
    pub fn kq_soft_max<'a>(
        &mut self,
        name: &str,
        attention: impl Into<Attention<'a>>,
        kq_visibility: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        let Attention { spec, sinks } = attention.into();
        let sinks = self.optional_weight_name(sinks);
        let op = Op::KqSoftMax { spec, sinks };
        self.push_attend(name, op, &spec, kq_visibility.to_vec())
    }

    /// The values of cells `0..n_kv`, summed with these weights: `[n, heads * v_dim]`.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where `weights` is no table of weights of these heads.
    pub fn kqv(
        &mut self,
        name: &str,
        layer: LayerIdx,
        spec: AttendSpec,
        weights_stored: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        let op = Op::Kqv { layer, spec };
        self.push(name, op, &weights_stored, Claim::default())
    }
}

impl Graph {
    /// The same computation with every [`Op::Attend`] in three nodes: `kq`, `kq_soft_max` and
    /// `kqv`, over the first `n_kv` cells of its part. Attention that needs no memory, or has
    /// scores by distance, stays as it is.
    ///
    /// # Errors
    /// [`GraphError`] where a name of the new nodes is taken.
    pub fn with_plain_attention(
        &self,
        n_kv: impl Fn(PartIdx) -> usize,
    ) -> Result<Self, GraphError> {
        let mut b = GraphBuilder::new(self.shape());
        let mut moved: Vec<NodeId> = Vec::with_capacity(self.nodes().len());
        for node in self.nodes() {
            let to = |id: &NodeId| moved.get(id.as_usize()).copied().unwrap_or(*id);
            let operands: Vec<NodeId> = node.operands.iter().map(to).collect();
            let id = match (&node.op, operands.as_slice()) {
                (
                    Op::Attend {
                        layer,
                        spec,
                        sinks,
                        relative: None,
                    },
                    &[q, stored, visibility, ..],
                ) => {
                    let part = match node.operands.get(2).and_then(|&id| self.node(id)) {
                        Some(Node {
                            op: Op::Input(Input::Visibility { part, .. }),
                            ..
                        }) => *part,
                        _ => PartIdx(0),
                    };
                    let (layer, spec, sinks) = (*layer, *spec, sinks.as_deref());
                    let name = named(node, "kq");
                    let kq = b.kq(&name, layer, spec, [q, stored], n_kv(part))?;
                    let (name, attention) = (named(node, "kq_soft_max"), Attention { spec, sinks });
                    let weights = b.kq_soft_max(&name, attention, [kq, visibility])?;
                    b.kqv(&node.name, layer, spec, [weights, stored])?
                }
                _ => b.copy_node(self, node, &operands)?,
            };
            moved.push(id);
        }
        let outputs: Vec<NodeId> = self.outputs().iter().map(|o| moved[o.as_usize()]).collect();
        b.finish(&outputs)
    }
}

/// `kqv-3` becomes `kq-3`; a node that is called otherwise gets a suffix.
fn named(node: &Node, what: &str) -> String {
    match node.name.strip_prefix("kqv") {
        Some(rest) => format!("{what}{rest}"),
        None => format!("{}.{what}", node.name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GraphShape;
    use kv_core::window::Window;

    #[test]
    fn the_three_nodes_take_the_place_of_one() {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 2,
            n_outputs: 2,
        });
        let x = b.input(Input::Embeddings { dim: 8 }).unwrap();
        let q = b.reshape("q", x, &[2, 2, 4]).unwrap();
        let part = PartIdx(1);
        let cells = b.input(Input::Cells { part }).unwrap();
        let window = Window::Full;
        let seen = b.input(Input::Visibility { part, window }).unwrap();
        let layer = LayerIdx(3);
        let stored = b.store_kv("store", layer, [q, q, cells]).unwrap();
        let spec = AttendSpec {
            n_heads: 2,
            kv_heads: 2,
            k_dim: 4,
            v_dim: 4,
            scale: 0.5,
            soft_cap: Some(9.0),
            alibi: Some(crate::Alibi::new(8.0)),
        };
        let both = Attention {
            spec,
            sinks: Some("sinks"),
        };
        let y = b.attend("kqv-3", layer, both, [q, stored, seen]);
        let y = b.scale("y", y.unwrap(), 2.0).unwrap();
        let fused = b.finish(&[y]).unwrap();
        let plain = fused.with_plain_attention(|part| 128 << part.0).unwrap();
        for (name, shape) in [
            ("kq-3", &[2, 2, 256][..]),
            ("kq_soft_max-3", &[2, 2, 256]),
            ("kqv-3", &[2, 8]),
            ("y", &[2, 8]),
        ] {
            assert_eq!(plain.find(name).unwrap().1.shape, shape, "{name}");
        }
        assert_eq!(plain.nodes().len(), fused.nodes().len() + 2);
        assert_eq!(plain.weights(), fused.weights());
        assert_eq!(Graph::from_json(&plain.to_json().unwrap()), Ok(plain));
    }
}
