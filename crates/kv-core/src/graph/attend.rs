//! The attentions of [`GraphBuilder`].
//!
//! Invariant: an attention with linear biases has the positions of its rows as its last operand; the
//! builder adds it. Knows nothing of what is remembered.

use super::builder::{GraphBuilder, GraphError};
use super::op::{AttendSpec, DType, Input, Op};
use super::{Graph, NodeId};
use crate::ids::LayerIdx;
use crate::window::Window;

impl Graph {
    /// The windows through which its tokens see their own ubatch, each once.
    pub fn batch_windows(&self) -> impl Iterator<Item = Window> + '_ {
        // Inputs are shared, so there is one node for each window.
        self.nodes().iter().filter_map(|node| match node.op {
            Op::Input(Input::BatchVisibility { window }) => Some(window),
            _ => None,
        })
    }
}

impl GraphBuilder {
    /// Stores `k [n, kv_heads, k_dim]`, whose heads begin with the values, in the cells of the
    /// ubatch's tokens.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where rows and cells do not match.
    pub fn store_k(
        &mut self,
        name: &str,
        layer: LayerIdx,
        [k, cells]: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        let op = Op::StoreK { layer };
        match (self.shape_of(k), self.shape_of(cells)) {
            (&[n, _, _], &[n_cells]) if n == n_cells => {}
            _ => {
                let wanted = "[tokens, kv_heads, k_dim], [tokens]";
                return Err(self.misfit(name, &op, wanted, &[k, cells]));
            }
        }
        self.push(name, op, vec![k, cells], (vec![], DType::None))
    }

    /// Attention of `q [n, heads, k_dim]` over the rows that `stored` left behind.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where heads or widths do not match `spec`.
    pub fn attend(
        &mut self,
        name: &str,
        layer: LayerIdx,
        spec: AttendSpec,
        operands: [NodeId; 3],
    ) -> Result<NodeId, GraphError> {
        self.attend_with_sinks(name, layer, (spec, None), operands)
    }

    /// The same with a weight of `[heads]` sinks, where given; see [`Op::Attend`].
    ///
    /// # Errors
    /// As [`GraphBuilder::attend`].
    pub fn attend_with_sinks(
        &mut self,
        name: &str,
        layer: LayerIdx,
        (spec, sinks): (AttendSpec, Option<&str>),
        [q, stored, visibility]: [NodeId; 3],
    ) -> Result<NodeId, GraphError> {
        let op = Op::Attend {
            layer,
            spec,
            sinks: sinks.map(str::to_owned),
        };
        self.push_attend(name, op, (spec, sinks), vec![q, stored, visibility])
    }

    /// Attention of the ubatch's tokens among themselves through `window`: `q [n, heads, k_dim]`,
    /// `k [n, kv_heads, k_dim]` and `v [n, kv_heads, v_dim]`; see [`Op::AttendBatch`].
    ///
    /// # Errors
    /// [`GraphError::Shape`] where heads or widths do not match `spec`.
    pub fn attend_batch(
        &mut self,
        name: &str,
        (spec, sinks): (AttendSpec, Option<&str>),
        [q, k, v]: [NodeId; 3],
        window: Window,
    ) -> Result<NodeId, GraphError> {
        let op = Op::AttendBatch {
            spec,
            sinks: sinks.map(str::to_owned),
        };
        let n = self.shape().n_tokens;
        let AttendSpec {
            kv_heads,
            k_dim,
            v_dim,
            ..
        } = spec;
        let wanted = [[n, kv_heads, k_dim], [n, kv_heads, v_dim]];
        if [self.shape_of(k), self.shape_of(v)] != [&wanted[0][..], &wanted[1][..]] {
            let wanted = format!("{:?} and {:?}", wanted[0], wanted[1]);
            return Err(self.misfit(name, &op, &wanted, &[k, v]));
        }
        let visibility = self.input(Input::BatchVisibility { window })?;
        self.push_attend(name, op, (spec, sinks), vec![q, k, v, visibility])
    }

    fn push_attend(
        &mut self,
        name: &str,
        op: Op,
        (spec, sinks): (AttendSpec, Option<&str>),
        mut operands: Vec<NodeId>,
    ) -> Result<NodeId, GraphError> {
        let AttendSpec {
            n_heads,
            kv_heads,
            k_dim,
            v_dim,
            ..
        } = spec;
        let n = self.shape().n_tokens;
        let q = operands.first().copied().unwrap_or(NodeId(u32::MAX));
        let grouped = kv_heads > 0 && n_heads.is_multiple_of(kv_heads);
        if self.shape_of(q) != [n, n_heads, k_dim] || !grouped {
            let wanted = format!("[{n}, {n_heads} (a multiple of {kv_heads}), {k_dim}]");
            return Err(self.misfit(name, &op, &wanted, &[q]));
        }
        if let Some(sinks) = sinks {
            self.declare(sinks, &[n_heads])?;
        }
        if spec.alibi.is_some() {
            operands.push(self.input(Input::Positions)?);
        }
        self.push(name, op, operands, (vec![n, n_heads * v_dim], DType::F32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Alibi, GraphShape};

    const SPEC: AttendSpec = AttendSpec {
        n_heads: 2,
        kv_heads: 1,
        k_dim: 4,
        v_dim: 2,
        scale: 0.5,
        soft_cap: None,
        alibi: Some(Alibi { max_bias: 8.0 }),
    };

    /// Queries, keys and values.
    fn qkv(b: &mut GraphBuilder) -> [NodeId; 3] {
        let x = b.input(Input::Embeddings { dim: 14 }).unwrap();
        let mut heads = |name: &str, at: std::ops::Range<usize>, shape: [usize; 3]| {
            let flat = b.columns(&format!("{name}.flat"), x, at).unwrap();
            b.reshape(name, flat, &shape).unwrap()
        };
        [
            heads("q", 0..8, [3, 2, 4]),
            heads("k", 8..12, [3, 1, 4]),
            heads("v", 12..14, [3, 1, 2]),
        ]
    }

    fn builder() -> GraphBuilder {
        GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 1,
        })
    }

    #[test]
    fn heads_must_divide() {
        let mut b = builder();
        let [q, ..] = qkv(&mut b);
        let spec = AttendSpec {
            kv_heads: 0,
            ..SPEC
        };
        let err = b.attend("kqv", LayerIdx(0), spec, [q, q, q]).unwrap_err();
        assert!(err.to_string().contains("a multiple of 0"), "{err}");
        let spec = AttendSpec { n_heads: 3, ..SPEC };
        assert!(b.attend("kqv", LayerIdx(0), spec, [q, q, q]).is_err());
    }

    #[test]
    fn sinks_and_positions_are_part_of_the_graph() {
        let mut b = builder();
        let [q, k, v] = qkv(&mut b);
        let both = (SPEC, Some("sinks.w"));
        let window = Window::Symmetric(5);
        let y = b.attend_batch("kqv", both, [q, k, v], window).unwrap();
        assert!(matches!(
            b.attend_batch("wide", both, [q, v, v], window),
            Err(GraphError::Shape { .. })
        ));
        let graph = b.finish(&[y]).unwrap();
        let text = graph.text().to_string();
        for wanted in [
            "inp_visibility.batch.symmetric(5): () = batch_visibility(window=symmetric(5))",
            "attend_batch(%2, %4, %6, %7, %8, heads=2/1, dim=4/2, scale=0.5, alibi=8, sinks=sinks.w)",
        ] {
            assert!(text.contains(wanted), "{text}");
        }
        assert_eq!(graph.weights()[0].shape, [2]);
        assert_eq!(Graph::from_json(&graph.to_json().unwrap()), Ok(graph));
    }
}
