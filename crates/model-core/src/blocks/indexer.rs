//! The indexer of sparse attention: small heads that choose which rows a token attends over
//! (DeepSeek-V3.2, arXiv 2512.02556).
//!
//! Its keys are a memory of their own, behind those of the layers, in the same cells as the rows
//! that are chosen. Does not know what is attended.

use kv_core::Window;
use kv_core::layers::AttentionMemory;
use kv_graph::rope::RopeSpec;
use kv_graph::{Affine, GraphBuilder, GraphError, IndexSpec, Input, NodeId};

use super::LayerContext;

/// Settings of one indexer.
#[derive(Clone, Debug, PartialEq)]
pub struct IndexerBlock {
    /// Its heads, and how many rows it chooses.
    pub index: IndexSpec,
    /// Rotation of queries and keys, where they rotate.
    pub rope: Option<RopeSpec>,
    /// Added to the variance in the norm of keys.
    pub norm_eps: f32,
}

impl IndexerBlock {
    /// The memory of its keys, for rows that are seen through `window`.
    pub fn memory(&self, window: Window) -> AttentionMemory {
        AttentionMemory {
            kv_heads: 1,
            k_dim: self.index.dim,
            v_dim: 0,
            window,
        }
    }

    /// Adds the indexer of rows `x [tokens, dim]` and their query latents: what is chosen of what
    /// `visibility` shows, `[tokens, top_k]`.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn build(
        &self,
        b: &mut GraphBuilder,
        at: LayerContext,
        [x, query_latent]: [NodeId; 2],
        visibility: NodeId,
    ) -> Result<NodeId, GraphError> {
        let IndexSpec { n_heads, dim, .. } = self.index;
        let n = b.shape().n_tokens;
        let key = b.linear("IKproj", x, "indexer.attn_k.weight", dim)?;
        let gain = Affine {
            weight: "indexer.k_norm.weight",
            bias: Some("indexer.k_norm.bias"),
        };
        let key = b.layer_norm("IKnormed", key, gain, self.norm_eps)?;
        let key = b.reshape("IKhead", key, &[n, 1, dim])?;
        let key = self.rotate(b, "IKcur", key)?;
        let cells = b.input(Input::Cells { part: at.part })?;
        let stored = b.store_k("index_store", at.index_layer, [key, cells])?;
        let q = "indexer.attn_q_b.weight";
        let q = b.linear("IQproj", query_latent, q, n_heads * dim)?;
        let q = b.reshape("IQheads", q, &[n, n_heads, dim])?;
        let q = self.rotate(b, "IQcur", q)?;
        let weights = b.linear("index_weights", x, "indexer.proj.weight", n_heads)?;
        let operands = [q, weights, stored, visibility];
        b.index("index_chosen", at.index_layer, self.index, operands)
    }

    fn rotate(&self, b: &mut GraphBuilder, name: &str, x: NodeId) -> Result<NodeId, GraphError> {
        let Some(rope) = &self.rope else {
            return Ok(x);
        };
        let positions = b.input(Input::Positions)?;
        b.rope(name, x, positions, rope)
    }
}
