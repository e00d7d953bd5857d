//! Self-attention: project, norm, rotate, store, attend, project back; without a memory, nothing is
//! stored.
//!
//! Grouped-query attention: Ainslie et al., arXiv 2305.13245. Knows nothing of the layers around.

use kv_core::graph::{
    AttendSpec, GraphBuilder, GraphError, Input, NodeId, NormGain, PositionScale,
};
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
    /// These and the output (gpt-oss, StarCoder 2).
    All,
}

/// How the matrices of queries, keys and values lie in the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QkvWeights {
    /// One each.
    #[default]
    Separate,
    /// One for all three, in this order (Phi-3).
    Fused,
}

/// Whether queries and keys are normed, before they rotate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QkNorm {
    /// They are not.
    #[default]
    None,
    /// Every head by itself, with one gain for all query heads and one for all key heads (Gemma 3,
    /// Qwen 3).
    PerHead,
    /// All heads of a row together (OLMo 2).
    WholeRow,
    /// Every head by itself, without a gain (Llama 4; there behind the rotation, which changes no
    /// length).
    PerHeadPlain,
}

/// Whether a softmax has one more score, which has no value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sinks {
    /// It has not.
    #[default]
    None,
    /// One that was learnt for every head (gpt-oss).
    PerHead,
}

/// Settings of one attention block.
#[derive(Clone, Debug, Default, PartialEq)]
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
    /// Soft cap on the scaled scores, where there is one.
    pub soft_cap: Option<f32>,
    /// The projections' matrices.
    pub weights: QkvWeights,
    /// Biases of the projections.
    pub bias: QkvBias,
    /// Norms of queries and keys.
    pub qk_norm: QkNorm,
    /// Added to the mean square in these norms.
    pub norm_eps: f32,
    /// Rotation of queries and keys, where they rotate.
    pub rope: Option<RopeSpec>,
    /// Factor on the queries by position, where there is one.
    pub query_scale: Option<PositionScale>,
    /// Scores without a value.
    pub sinks: Sinks,
    /// Which earlier tokens are seen.
    pub window: Window,
}

/// Queries or keys: names of nodes and weights, and how many heads.
#[derive(Clone, Copy)]
struct Heads {
    letter: &'static str,
    weight: &'static str,
    n: usize,
    dim: usize,
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
        let [q, k, v] = self.queries_keys_values(b, layer, x)?;
        let cells = b.input(Input::Cells { part })?;
        let stored = b.store_kv(&format!("kv_store-{layer}"), layer, [k, v, cells])?;
        let out = self.attend(b, (layer, part), q, stored)?;
        self.project_back(b, layer, (out, rows), dim)
    }

    /// Adds the block without a memory, as in encoders: tokens attend within their ubatch through the
    /// window, later ones too. Otherwise as [`AttentionBlock::build`].
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn build_in_batch(
        &self,
        b: &mut GraphBuilder,
        layer: LayerIdx,
        x: NodeId,
        rows: Option<NodeId>,
    ) -> Result<NodeId, GraphError> {
        let dim = b.shape_of(x).last().copied().unwrap_or(0);
        let qkv = self.queries_keys_values(b, layer, x)?;
        let sinks = self.sink_weight(layer);
        let spec = (self.spec(), sinks.as_deref());
        let out = b.attend_batch(&format!("kqv-{layer}"), spec, qkv, self.window)?;
        self.project_back(b, layer, (out, rows), dim)
    }

    /// Queries, keys and values, `[tokens, heads, dim]` each.
    fn queries_keys_values(
        &self,
        b: &mut GraphBuilder,
        layer: LayerIdx,
        x: NodeId,
    ) -> Result<[NodeId; 3], GraphError> {
        let [query, key, value] = self.heads();
        let [q, k, v] = self.project(b, layer, x)?;
        let q = self.turn(b, layer, query, q)?;
        let k = self.turn(b, layer, key, k)?;
        let v = split(b, layer, value, v)?;
        let q = match self.query_scale {
            Some(scale) => {
                let positions = b.input(Input::Positions)?;
                b.scale_by_position(&format!("Qscaled-{layer}"), scale, [q, positions])?
            }
            None => q,
        };
        Ok([q, k, v])
    }

    /// `[tokens, heads * v_dim]` projected back to `[rows, dim]`.
    fn project_back(
        &self,
        b: &mut GraphBuilder,
        layer: LayerIdx,
        (mut out, rows): (NodeId, Option<NodeId>),
        dim: usize,
    ) -> Result<NodeId, GraphError> {
        if let Some(rows) = rows {
            out = b.take_rows(&format!("kqv_rows-{layer}"), out, rows)?;
        }
        let matrix = format!("blk.{layer}.attn_output.weight");
        let bias = format!("blk.{layer}.attn_output.bias");
        let bias = (self.bias == QkvBias::All).then_some(&*bias);
        b.affine(&format!("kqv_out-{layer}"), out, (&matrix, bias), dim)
    }

    fn heads(&self) -> [Heads; 3] {
        let heads = |letter, weight, n, dim| Heads {
            letter,
            weight,
            n,
            dim,
        };
        [
            heads("Q", "attn_q", self.n_heads, self.k_dim),
            heads("K", "attn_k", self.kv_heads, self.k_dim),
            heads("V", "attn_v", self.kv_heads, self.v_dim),
        ]
    }

    /// Queries, keys and values, `[tokens, heads * dim]` each.
    fn project(
        &self,
        b: &mut GraphBuilder,
        layer: LayerIdx,
        x: NodeId,
    ) -> Result<[NodeId; 3], GraphError> {
        let product = |b: &mut GraphBuilder, name: &str, weight: &str, width: usize| {
            let matrix = format!("blk.{layer}.{weight}.weight");
            let bias = format!("blk.{layer}.{weight}.bias");
            let bias = (self.bias != QkvBias::None).then_some(&*bias);
            b.affine(&format!("{name}-{layer}"), x, (&matrix, bias), width)
        };
        let heads = self.heads();
        let mut out = [x; 3];
        match self.weights {
            QkvWeights::Separate => {
                for (out, heads) in out.iter_mut().zip(heads) {
                    let name = format!("{}proj", heads.letter);
                    *out = product(b, &name, heads.weight, heads.n * heads.dim)?;
                }
            }
            QkvWeights::Fused => {
                let width = heads.iter().map(|h| h.n * h.dim).sum();
                let all = product(b, "QKVproj", "attn_qkv", width)?;
                let mut first = 0;
                for (out, heads) in out.iter_mut().zip(heads) {
                    let columns = first..first + heads.n * heads.dim;
                    first = columns.end;
                    *out = b.columns(&format!("{}proj-{layer}", heads.letter), all, columns)?;
                }
            }
        }
        Ok(out)
    }

    /// Norms and rotates queries or keys: `[tokens, heads * dim]` in, `[tokens, heads, dim]` out.
    fn turn(
        &self,
        b: &mut GraphBuilder,
        layer: LayerIdx,
        heads: Heads,
        flat: NodeId,
    ) -> Result<NodeId, GraphError> {
        let (letter, eps) = (heads.letter, self.norm_eps);
        let name = |what: &str| format!("{letter}{what}-{layer}");
        let gain = format!("blk.{layer}.{}_norm.weight", heads.weight);
        let x = match self.qk_norm {
            QkNorm::WholeRow => {
                let normed = b.rms_norm(&name("normed"), flat, &gain, eps)?;
                split(b, layer, heads, normed)?
            }
            QkNorm::PerHead => {
                let x = split(b, layer, heads, flat)?;
                b.rms_norm(&name("normed"), x, &gain, eps)?
            }
            QkNorm::PerHeadPlain => {
                let x = split(b, layer, heads, flat)?;
                b.rms_norm_with(&name("normed"), x, NormGain::None, eps)?
            }
            QkNorm::None => split(b, layer, heads, flat)?,
        };
        let Some(rope) = &self.rope else {
            return Ok(x);
        };
        let positions = b.input(Input::Positions)?;
        b.rope(&name("cur"), x, positions, rope)
    }

    fn attend(
        &self,
        b: &mut GraphBuilder,
        (layer, part): (LayerIdx, PartIdx),
        q: NodeId,
        stored: NodeId,
    ) -> Result<NodeId, GraphError> {
        let window = self.window;
        let visibility = b.input(Input::Visibility { part, window })?;
        let sinks = self.sink_weight(layer);
        let spec = (self.spec(), sinks.as_deref());
        let operands = [q, stored, visibility];
        b.attend_with_sinks(&format!("kqv-{layer}"), layer, spec, operands)
    }

    /// Name of the weight of sinks, where there are any.
    fn sink_weight(&self, layer: LayerIdx) -> Option<String> {
        (self.sinks == Sinks::PerHead).then(|| format!("blk.{layer}.attn_sinks.weight"))
    }

    fn spec(&self) -> AttendSpec {
        let Self {
            n_heads,
            kv_heads,
            k_dim,
            v_dim,
            scale,
            soft_cap,
            ..
        } = *self;
        AttendSpec {
            n_heads,
            kv_heads,
            k_dim,
            v_dim,
            scale,
            soft_cap,
            alibi: None,
        }
    }
}

/// `[tokens, heads * dim]` as `[tokens, heads, dim]`.
fn split(
    b: &mut GraphBuilder,
    layer: LayerIdx,
    heads: Heads,
    flat: NodeId,
) -> Result<NodeId, GraphError> {
    let n = b.shape_of(flat).first().copied().unwrap_or(0);
    let shape = [n, heads.n, heads.dim];
    b.reshape(&format!("{}heads-{layer}", heads.letter), flat, &shape)
}
