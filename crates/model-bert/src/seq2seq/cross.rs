//! [`CrossAttention`]: attention over the keys and values of a source.
//!
//! The encoder's graph stores them, the decoder's reads them. Invariant: neither depends on
//! positions of the decoder. Knows nothing of the layers around.

use kv_core::layers::{AttentionMemory, LayerMemory};
use kv_core::{LayerIdx, PartIdx, Window};
use kv_graph::{Affine, AttendSpec, GraphBuilder, GraphError, Input, NodeId};
use model_core::blocks::{AttentionBlock, LayerContext, QkvBias};

/// The place of the rows of a cross attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct CrossRows {
    /// The layer of the memory.
    pub(super) layer: LayerIdx,
    /// The part of sources.
    pub(super) part: PartIdx,
}

/// Attention over the source, with the heads of a decoder's attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct CrossAttention {
    n_heads: usize,
    k_dim: usize,
    v_dim: usize,
    scale: f32,
    has_bias: bool,
}

impl CrossAttention {
    pub(super) fn like(attention: &AttentionBlock) -> Self {
        Self {
            n_heads: attention.n_heads,
            k_dim: attention.k_dim,
            v_dim: attention.v_dim,
            scale: attention.scale,
            has_bias: attention.bias == QkvBias::All,
        }
    }

    /// The memory of a layer of the decoder for a source.
    pub(super) fn memory(self) -> LayerMemory {
        LayerMemory::Attention(AttentionMemory {
            kv_heads: self.n_heads,
            k_dim: self.k_dim,
            v_dim: self.v_dim,
            window: Window::Source,
        })
    }

    /// Adds what the encoder stores: keys and values of its last rows `x [tokens, dim]`.
    pub(super) fn store(
        self,
        b: &mut GraphBuilder,
        rows: CrossRows,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let k = self.heads(b, x, ["Kcross", "cross_attn_k"], self.k_dim)?;
        let v = self.heads(b, x, ["Vcross", "cross_attn_v"], self.v_dim)?;
        let cells = b.input(Input::Cells { part: rows.part })?;
        b.store_kv("cross_store", rows.layer, [k, v, cells])
    }

    /// Adds what the decoder computes: `x [tokens, dim]` in, `[rows, dim]` out.
    pub(super) fn attend(
        self,
        b: &mut GraphBuilder,
        at: LayerContext,
        rows: CrossRows,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let dim = b.shape_of(x).last().copied().unwrap_or(0);
        let q = self.heads(b, x, ["Qcross", "cross_attn_q"], self.k_dim)?;
        let (part, window) = (rows.part, Window::Source);
        let seen = b.input(Input::Visibility { part, window })?;
        let spec = AttendSpec {
            n_heads: self.n_heads,
            kv_heads: self.n_heads,
            k_dim: self.k_dim,
            v_dim: self.v_dim,
            scale: self.scale,
            soft_cap: None,
            alibi: None,
        };
        // The rows were stored by the encoder's graph.
        let out = b.attend("cross_kqv", rows.layer, spec, [q, seen, seen])?;
        let out = at.take_rows(b, "cross_kqv_rows", out)?;
        self.project(b, "cross_out", out, ("cross_attn_o", dim))
    }

    /// A projection in heads, `[tokens, heads, dim]`.
    fn heads(
        self,
        b: &mut GraphBuilder,
        x: NodeId,
        [name, weight]: [&str; 2],
        dim: usize,
    ) -> Result<NodeId, GraphError> {
        let flat = self.project(b, name, x, (weight, self.n_heads * dim))?;
        let n = b.shape_of(flat).first().copied().unwrap_or(0);
        b.reshape(&format!("{name}_heads"), flat, &[n, self.n_heads, dim])
    }

    fn project(
        self,
        b: &mut GraphBuilder,
        name: &str,
        x: NodeId,
        (weight, width): (&str, usize),
    ) -> Result<NodeId, GraphError> {
        let (matrix, bias) = (format!("{weight}.weight"), format!("{weight}.bias"));
        let weights = Affine {
            weight: &matrix,
            bias: self.has_bias.then_some(&*bias),
        };
        b.affine(name, x, weights, width)
    }
}
