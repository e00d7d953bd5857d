//! Multi-head latent attention: one latent row a token in place of the keys and values of all heads
//! (DeepSeek-V2, arXiv 2405.04434).
//!
//! In absorbed form: what would make a head's keys of a latent is applied to its queries, and what
//! would make its values to the mean of latents, so that all heads attend over the rows themselves,
//! and each row is read once. Does not know the layers around.

use kv_core::Window;
use kv_core::layers::AttentionMemory;
use kv_graph::rope::RopeSpec;
use kv_graph::{AttendSpec, GraphBuilder, GraphError, Input, NodeId, PositionScale};

use super::{IndexerBlock, LayerContext};

/// Settings of one latent attention.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LatentAttentionBlock {
    /// Number of heads.
    pub n_heads: usize,
    /// Values of a query of one head that meet the latent.
    pub plain_dim: usize,
    /// Values of a query of one head that meet the key that all heads share.
    pub shared_dim: usize,
    /// Values of one value head.
    pub v_dim: usize,
    /// Values of a latent.
    pub rank: usize,
    /// Values between the two matrices of the queries, where there are two.
    pub query_rank: Option<usize>,
    /// Factor on the scores.
    pub scale: f32,
    /// Added to the mean square in the norms of latents.
    pub norm_eps: f32,
    /// Rotation of the shared part of queries and keys, where it rotates.
    pub rope: Option<RopeSpec>,
    /// Factor on the queries by position, where there is one.
    pub query_scale: Option<PositionScale>,
    /// The window of the layer.
    pub window: Window,
    /// The indexer that chooses among them, where not all are attended over.
    pub indexer: Option<IndexerBlock>,
}

impl LatentAttentionBlock {
    /// The memory of a layer with this block: `[latent, shared key]` of every token, of which the
    /// latent is the value too.
    pub fn memory(&self) -> AttentionMemory {
        AttentionMemory {
            kv_heads: 1,
            k_dim: self.row_dim(),
            v_dim: self.rank,
            window: self.window,
        }
    }

    /// Values of a row, and of an absorbed query.
    fn row_dim(&self) -> usize {
        self.rank.saturating_add(self.shared_dim)
    }

    /// Adds the block: `x [tokens, dim]` in, `[rows, dim]` out, for the output rows only where the
    /// layer has them.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn build(
        &self,
        b: &mut GraphBuilder,
        at: LayerContext,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let LayerContext { layer, part, .. } = at;
        let [n, dim] = rows_and_width(b, x);
        let (query_latent, q) = self.queries(b, x, n)?;
        let row = self.rows(b, x, n)?;
        let cells = b.input(Input::Cells { part })?;
        let stored = b.store_k("kv_store", layer, [row, cells])?;
        let window = self.window;
        let visibility = b.input(Input::Visibility { part, window })?;
        let means = match &self.indexer {
            None => b.attend("kqv_latent", layer, self.spec(), [q, stored, visibility])?,
            Some(indexer) => {
                let chosen = indexer.build(b, at, [x, query_latent], visibility)?;
                let operands = [q, stored, visibility, chosen];
                b.attend_sparse("kqv_latent", layer, self.spec(), operands)?
            }
        };
        let means = at.take_rows(b, "kqv_rows", means)?;
        let [n, _] = rows_and_width(b, means);
        let means = b.reshape("kqv_heads", means, &[n, self.n_heads, self.rank])?;
        let values = b.head_linear("kqv", means, "attn_v_b.weight", self.v_dim)?;
        let values = b.reshape("kqv_flat", values, &[n, self.n_heads * self.v_dim])?;
        b.linear("kqv_out", values, "attn_output.weight", dim)
    }

    /// The rows that queries are made of, and absorbed queries, `[tokens, heads, rank +
    /// shared_dim]`.
    fn queries(
        &self,
        b: &mut GraphBuilder,
        x: NodeId,
        n: usize,
    ) -> Result<(NodeId, NodeId), GraphError> {
        let head_dim = self.plain_dim + self.shared_dim;
        let width = self.n_heads * head_dim;
        let (from, weight) = match self.query_rank {
            None => (x, "attn_q.weight"),
            Some(rank) => {
                let latent = b.linear("Qlatent", x, "attn_q_a.weight", rank)?;
                let gain = "attn_q_a_norm.weight";
                let normed = b.rms_norm("Qlatent_normed", latent, gain, self.norm_eps)?;
                (normed, "attn_q_b.weight")
            }
        };
        let flat = b.linear("Qproj", from, weight, width)?;
        let heads = b.reshape("Qheads", flat, &[n, self.n_heads, head_dim])?;
        let plain = b.columns("Qplain", heads, 0..self.plain_dim)?;
        let shared = b.columns("Qshared", heads, self.plain_dim..head_dim)?;
        let shared = self.rotate(b, "Qrotated", shared)?;
        let absorbed = b.head_linear("Qabsorbed", plain, "attn_k_b.weight", self.rank)?;
        let q = b.concat("Qcur", absorbed, shared)?;
        let q = match self.query_scale {
            None => q,
            Some(scale) => {
                let positions = b.input(Input::Positions)?;
                b.scale_by_position("Qscaled", scale, [q, positions])?
            }
        };
        Ok((from, q))
    }

    /// The rows that are stored for each token, `[tokens, 1, rank + shared_dim]`.
    fn rows(&self, b: &mut GraphBuilder, x: NodeId, n: usize) -> Result<NodeId, GraphError> {
        let both = b.linear("KVproj", x, "attn_kv_a_mqa.weight", self.row_dim())?;
        let latent = b.columns("KVlatent", both, 0..self.rank)?;
        let gain = "attn_kv_a_norm.weight";
        let latent = b.rms_norm("KVnormed", latent, gain, self.norm_eps)?;
        let latent = b.reshape("KVheads", latent, &[n, 1, self.rank])?;
        let shared = b.columns("Kshared", both, self.rank..self.row_dim())?;
        let shared = b.reshape("Kheads", shared, &[n, 1, self.shared_dim])?;
        let shared = self.rotate(b, "Krotated", shared)?;
        b.concat("Kcur", latent, shared)
    }

    fn rotate(&self, b: &mut GraphBuilder, name: &str, x: NodeId) -> Result<NodeId, GraphError> {
        let Some(rope) = &self.rope else {
            return Ok(x);
        };
        let positions = b.input(Input::Positions)?;
        b.rope(name, x, positions, rope)
    }

    fn spec(&self) -> AttendSpec {
        AttendSpec {
            n_heads: self.n_heads,
            kv_heads: 1,
            k_dim: self.row_dim(),
            v_dim: self.rank,
            scale: self.scale,
            soft_cap: None,
            alibi: None,
        }
    }
}

/// Rows of a matrix and their width.
fn rows_and_width(b: &GraphBuilder, x: NodeId) -> [usize; 2] {
    match *b.shape_of(x) {
        [n, .., width] => [n, width],
        _ => [0, 0],
    }
}
