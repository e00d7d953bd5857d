//! Self-attention over a memory: project, rotate, store, attend, project back.
//!
//! Grouped-query attention: Ainslie et al., arXiv 2305.13245. Knows nothing of the layers around.

use kv_core::graph::{AttendSpec, GraphBuilder, GraphError, Input, NodeId};
use kv_core::layers::AttentionMemory;
use kv_core::rope::RopeSpec;
use kv_core::{LayerIdx, PartIdx, Window};

/// Which projections have a bias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QkvBias {
    /// None of them.
    #[default]
    None,
    /// Queries, keys and values, but not the output (Qwen 2).
    Qkv,
}

/// Whether queries and keys are normed before they rotate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QkNorm {
    /// They are not.
    #[default]
    None,
    /// Every head by itself, with one gain for all query heads and one for all key heads (Gemma 3,
    /// Qwen 3).
    PerHead,
}

/// Settings of one attention block.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionBlock {
    /// Number of query heads.
    pub n_heads: usize,
    /// Number of key/value heads; divides `n_heads`.
    pub kv_heads: usize,
    /// Values of one query or key head.
    pub k_dim: usize,
    /// Values of one value head.
    pub v_dim: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// Biases of the projections.
    pub bias: QkvBias,
    /// Norms of queries and keys.
    pub qk_norm: QkNorm,
    /// Added to the mean square in these norms.
    pub norm_eps: f32,
    /// Rotation of queries and keys, where positions are told that way.
    pub rope: Option<RopeSpec>,
    /// Which earlier tokens are seen.
    pub window: Window,
}

impl AttentionBlock {
    /// What a layer with this block remembers.
    pub fn memory(&self) -> AttentionMemory {
        let Self {
            kv_heads,
            k_dim,
            v_dim,
            window,
            ..
        } = *self;
        AttentionMemory {
            kv_heads,
            k_dim,
            v_dim,
            window,
        }
    }

    /// Adds the block: `x [tokens, dim]` in, `[tokens, heads * v_dim]` projected back to
    /// `[rows, dim]` out, for `rows` only where given.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn build(
        &self,
        b: &mut GraphBuilder,
        (layer, part): (LayerIdx, PartIdx),
        x: NodeId,
        rows: Option<NodeId>,
    ) -> Result<NodeId, GraphError> {
        let dim = b.shape_of(x).last().copied().unwrap_or(0);
        let rope = match &self.rope {
            None => None,
            Some(rope) => Some((rope, b.input(Input::Positions)?)),
        };
        let q = self.project(b, layer, x, ("Q", "attn_q", self.n_heads, self.k_dim))?;
        let k = self.project(b, layer, x, ("K", "attn_k", self.kv_heads, self.k_dim))?;
        let v = self.project(b, layer, x, ("V", "attn_v", self.kv_heads, self.v_dim))?;
        let q = self.norm(b, layer, q, ("Q", "attn_q_norm"))?;
        let k = self.norm(b, layer, k, ("K", "attn_k_norm"))?;
        let mut rotate = |name: &str, x| match rope {
            None => Ok(x),
            Some((rope, positions)) => b.rope(&format!("{name}-{layer}"), x, positions, rope),
        };
        let (q, k) = (rotate("Qcur", q)?, rotate("Kcur", k)?);
        let cells = b.input(Input::Cells { part })?;
        let stored = b.store_kv(&format!("kv_store-{layer}"), layer, [k, v, cells])?;
        let visibility = b.input(Input::Visibility {
            part,
            window: self.window,
        })?;
        let Self {
            n_heads,
            kv_heads,
            k_dim,
            v_dim,
            scale,
            ..
        } = *self;
        let spec = AttendSpec {
            n_heads,
            kv_heads,
            k_dim,
            v_dim,
            scale,
            soft_cap: None,
            alibi: None,
        };
        let mut out = b.attend(
            &format!("kqv-{layer}"),
            layer,
            spec,
            [q, stored, visibility],
        )?;
        if let Some(rows) = rows {
            out = b.take_rows(&format!("kqv_rows-{layer}"), out, rows)?;
        }
        b.linear(
            &format!("kqv_out-{layer}"),
            out,
            &format!("blk.{layer}.attn_output.weight"),
            dim,
        )
    }

    fn norm(
        &self,
        b: &mut GraphBuilder,
        layer: LayerIdx,
        heads: NodeId,
        (letter, weight): (&str, &str),
    ) -> Result<NodeId, GraphError> {
        match self.qk_norm {
            QkNorm::None => Ok(heads),
            QkNorm::PerHead => b.rms_norm(
                &format!("{letter}normed-{layer}"),
                heads,
                &format!("blk.{layer}.{weight}.weight"),
                self.norm_eps,
            ),
        }
    }

    fn project(
        &self,
        b: &mut GraphBuilder,
        layer: LayerIdx,
        x: NodeId,
        (letter, weight, heads, dim): (&str, &str, usize, usize),
    ) -> Result<NodeId, GraphError> {
        let matrix = format!("blk.{layer}.{weight}.weight");
        let bias = format!("blk.{layer}.{weight}.bias");
        let bias = match self.bias {
            QkvBias::None => None,
            QkvBias::Qkv => Some(bias.as_str()),
        };
        let flat = b.affine(
            &format!("{letter}proj-{layer}"),
            x,
            (&matrix, bias),
            heads * dim,
        )?;
        let n = b.shape_of(flat).first().copied().unwrap_or(0);
        b.reshape(&format!("{letter}heads-{layer}"), flat, &[n, heads, dim])
    }
}
