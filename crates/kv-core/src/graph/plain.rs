//! Plain attention: scores, masked softmax and weighted sum as nodes of their own, to be looked at and
//! compared with the fused [`Op::Attend`].
//!
//! Scores are a table over the first `n_kv` cells of a part, whoever uses them, so a plain graph
//! depends on how far the memory is in use, and its shapes say so. Knows nothing of how cells are
//! found.

use super::builder::{GraphBuilder, GraphError};
use super::check::add;
use super::op::{AttendSpec, DType, Input, Op};
use super::{Graph, Node, NodeId};
use crate::ids::{LayerIdx, PartIdx};

impl GraphBuilder {
    /// Scaled (and capped) products of `q [n, heads, k_dim]` with the keys of cells `0..n_kv`, which
    /// `stored` left behind: `[n, heads, n_kv]`.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where heads or widths do not match `spec`.
    pub fn kq(
        &mut self,
        name: &str,
        (layer, spec): (LayerIdx, AttendSpec),
        [q, stored]: [NodeId; 2],
        n_kv: usize,
    ) -> Result<NodeId, GraphError> {
        let op = Op::Kq { layer, spec };
        let (n, heads) = (self.shape().n_tokens, spec.n_heads);
        if self.shape_of(q) != [n, heads, spec.k_dim] || !spec.is_grouped() {
            let wanted = format!("[{n}, {heads}, {}]", spec.k_dim);
            return Err(self.misfit(name, &op, &wanted, &[q]));
        }
        self.push(
            name,
            op,
            vec![q, stored],
            (vec![n, heads, n_kv], DType::F32),
        )
    }

    /// The softmax of each row and head over the cells that the row sees; all others get 0, and so
    /// does everything in a row that sees nothing.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where `kq` is no table of scores of these heads.
    pub fn kq_soft_max(
        &mut self,
        name: &str,
        (spec, sinks): (AttendSpec, Option<&str>),
        [kq, visibility]: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        let op = Op::KqSoftMax {
            spec,
            sinks: sinks.map(str::to_owned),
        };
        let shape = self.shape_of(kq).to_vec();
        if !matches!(*shape, [n, heads, _] if n == self.shape().n_tokens && heads == spec.n_heads) {
            return Err(self.misfit(name, &op, "[tokens, heads, cells]", &[kq]));
        }
        if let Some(sinks) = sinks {
            self.declare(sinks, &[spec.n_heads])?;
        }
        let mut operands = vec![kq, visibility];
        if spec.alibi.is_some() {
            operands.push(self.input(Input::Positions)?);
        }
        self.push(name, op, operands, (shape, DType::F32))
    }

    /// The values of cells `0..n_kv`, summed with these weights: `[n, heads * v_dim]`.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where `weights` is no table of weights of these heads.
    pub fn kqv(
        &mut self,
        name: &str,
        (layer, spec): (LayerIdx, AttendSpec),
        [weights, stored]: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        let op = Op::Kqv { layer, spec };
        let n = self.shape().n_tokens;
        if !matches!(*self.shape_of(weights), [m, heads, _] if m == n && heads == spec.n_heads) {
            return Err(self.misfit(name, &op, "[tokens, heads, cells]", &[weights]));
        }
        let shape = vec![n, spec.n_heads * spec.v_dim];
        self.push(name, op, vec![weights, stored], (shape, DType::F32))
    }
}

impl AttendSpec {
    /// Whether every key/value head has the same number of query heads.
    pub(super) fn is_grouped(&self) -> bool {
        self.kv_heads > 0 && self.n_heads.is_multiple_of(self.kv_heads)
    }
}

impl Graph {
    /// The same computation with every [`Op::Attend`] in three nodes: `kq`, `kq_soft_max` and
    /// `kqv`, over as many cells of its part as `n_kv` says. Attention that needs no memory stays as
    /// it is.
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
                (Op::Attend { layer, spec, sinks }, &[q, stored, visibility, ..]) => {
                    let part = match node.operands.get(2).and_then(|&id| self.node(id)) {
                        Some(Node {
                            op: Op::Input(Input::Visibility { part, .. }),
                            ..
                        }) => *part,
                        _ => PartIdx(0),
                    };
                    let of = (*layer, *spec);
                    let kq = b.kq(&named(node, "kq"), of, [q, stored], n_kv(part))?;
                    let name = named(node, "kq_soft_max");
                    let heads = (*spec, sinks.as_deref());
                    let weights = b.kq_soft_max(&name, heads, [kq, visibility])?;
                    b.kqv(&node.name, of, [weights, stored])?
                }
                _ => {
                    let node = Node {
                        operands,
                        ..node.clone()
                    };
                    add(&mut b, self, &node)?
                }
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
        Some(rest) if !rest.contains("kqv") => format!("{what}{rest}"),
        _ => format!("{}.{what}", node.name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::GraphShape;
    use crate::window::Window;

    #[test]
    fn the_three_nodes_take_the_place_of_one() {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 2,
            n_outputs: 2,
        });
        let x = b.input(Input::Embeddings { dim: 8 }).unwrap();
        let q = b.reshape("q", x, &[2, 2, 4]).unwrap();
        let part = PartIdx(0);
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
            alibi: Some(crate::graph::Alibi { max_bias: 8.0 }),
        };
        let both = (spec, Some("sinks"));
        let y = b.attend_with_sinks("kqv-3", layer, both, [q, stored, seen]);
        let y = b.scale("y", y.unwrap(), 2.0).unwrap();
        let fused = b.finish(&[y]).unwrap();
        let plain = fused.with_plain_attention(|_| 256).unwrap();
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
