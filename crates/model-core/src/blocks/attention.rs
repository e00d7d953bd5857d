//! Self-attention: project, norm, rotate, store, attend, project back; without a memory, nothing is
//! stored.
//!
//! Grouped-query attention: Ainslie et al., arXiv 2305.13245. Does not know the layers around.

use kv_core::Window;
use kv_core::layers::AttentionMemory;
use kv_graph::rope::{RopeSections, RopeSpec};
use kv_graph::{
    Activation, Affine, Alibi, AttendSpec, Attention, DistanceBuckets, DistanceScores, Distances,
    GraphBuilder, GraphError, Input, NodeId, NormGain, PositionScale, RowGain,
};

use super::{Adapter, LayerContext, OutputGate, OutputName, OutputNorm, RowsOf};

/// The projections that have a bias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QkvBias {
    /// None of them.
    #[default]
    None,
    /// Queries, keys and values, but not the output (Qwen 2).
    Qkv,
    /// These and the output (gpt-oss, StarCoder 2).
    All,
    /// The output alone (GPT-Neo).
    Output,
}

/// The layout of the matrices of queries, keys and values in the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QkvWeights {
    /// One each.
    #[default]
    Separate,
    /// One for all three, in this order (Phi-3).
    Fused,
}

/// The norms of queries and keys, before they rotate where nothing else is said.
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
    /// As `PerHead`, behind the rotation (Hunyuan).
    PerHeadRotated,
    /// Every head by itself, centred, with one gain and one bias for all query heads and others for
    /// all key heads (Phi).
    PerHeadCentred,
    /// Every head by itself, centred, with a gain of its own (Command R+, StableLM 2 12B).
    PerHeadGains,
}

/// The presence of one more score in a softmax, which has no value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sinks {
    /// It has not.
    #[default]
    None,
    /// One that was learnt for every head (gpt-oss).
    PerHead,
}

/// The values of an attention.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum AttentionValues {
    /// A projection of the rows.
    #[default]
    Projected,
    /// The same, every head normed by itself, without a gain (Gemma 4).
    Normed,
    /// The projection of the keys before their norm, normed in that way (the full layers of larger
    /// Gemma 4).
    NormedKeys,
    /// A projection of the rows, times this factor (MiMo-V2).
    Scaled(f32),
}

/// The bias on the scores of an attention by the distance of query and key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RelativeAttention {
    /// Nothing.
    #[default]
    None,
    /// Biases of buckets, out of a weight of all layers (T5, MPNet).
    Biases {
        /// The distances that share a bucket.
        buckets: DistanceBuckets,
        /// The weight's whole name, as [`RELATIVE_BIAS`].
        weight: &'static str,
    },
    /// The products of a query with a key of the bucket, and of a key with a query of it, which a
    /// layer has for every head: `[heads, buckets, k_dim]` (DeBERTa, arXiv 2006.03654).
    Disentangled(DistanceBuckets),
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
    /// The values of the attention.
    pub values: AttentionValues,
    /// The layer whose rows it attends over, where it has none of its own: it projects queries
    /// alone, by a matrix of their own.
    pub rows_of: Option<RowsOf>,
    /// Added to the mean square in these norms.
    pub norm_eps: f32,
    /// Rotation of queries and keys, where they rotate.
    pub rope: Option<RopeSpec>,
    /// The pairs that rotate with rows and columns of images, where some do.
    pub sections: Option<RopeSections>,
    /// Factor on the queries by position, where there is one.
    pub query_scale: Option<PositionScale>,
    /// Bound of the values of queries, keys and values, where there is one.
    pub clamp: Option<f32>,
    /// Linear biases of scores by distance, where there are any.
    pub alibi: Option<Alibi>,
    /// The bias on scores by distance; with a memory biases alone.
    pub relative: RelativeAttention,
    /// Scores without a value.
    pub sinks: Sinks,
    /// The gate on what heads attend to.
    pub output_gate: OutputGate,
    /// The norm of what heads attend to.
    pub output_norm: OutputNorm,
    /// The name of its output matrix.
    pub output: OutputName,
    /// Width of its outputs, where it is not that of the rows.
    pub out_dim: Option<usize>,
    /// The adapters of the projections, where they have any.
    pub adapter: Option<Adapter>,
    /// The window of the layer.
    pub window: Window,
}

/// Name of the biases of buckets that all layers share, where there is one stack of them.
pub const RELATIVE_BIAS: &str = "attn_rel_b.weight";

/// Projection to queries, keys or values: names of nodes and weights, and sizes.
#[derive(Clone, Copy)]
struct Projection {
    letter: &'static str,
    weight: &'static str,
    n_heads: usize,
    dim: usize,
    /// The gate in the same matrix.
    gate: OutputGate,
}

/// Queries, keys and values, and the gate on outputs where there is one.
struct Projections {
    qkv: [NodeId; 3],
    /// `[tokens, heads * dim]`.
    gate: Option<NodeId>,
}

/// The outputs of heads, and the gate on them where there is one: `[tokens, heads * dim]` each.
struct AttendedHeads {
    out: NodeId,
    gate: Option<NodeId>,
}

impl Projection {
    /// Rows of the matrix.
    fn width(&self) -> usize {
        let parts = match self.gate {
            OutputGate::None => 1,
            OutputGate::WithQueries => 2,
        };
        parts * self.n_heads * self.dim
    }

    /// Divides queries from their gate, which follows them head by head: `[tokens, heads * dim]`
    /// each.
    fn split_gate(self, b: &mut GraphBuilder, both: NodeId) -> Result<[NodeId; 2], GraphError> {
        let n = b.shape_of(both).first().copied().unwrap_or(0);
        let (n_heads, dim) = (self.n_heads, self.dim);
        let both = b.reshape("Qgate_heads", both, &[n, n_heads, 2 * dim])?;
        let part = |b: &mut GraphBuilder, name: &str, first: usize| {
            let part = b.columns(&format!("{name}_part"), both, first..first + dim)?;
            b.reshape(name, part, &[n, n_heads * dim])
        };
        Ok([part(b, "Qplain", 0)?, part(b, "Qgate", dim)?])
    }

    /// `[tokens, heads * dim]` as `[tokens, heads, dim]`.
    fn split_heads(self, b: &mut GraphBuilder, flat: NodeId) -> Result<NodeId, GraphError> {
        let n = b.shape_of(flat).first().copied().unwrap_or(0);
        let shape = [n, self.n_heads, self.dim];
        b.reshape(&format!("{}heads", self.letter), flat, &shape)
    }
}

impl AttentionBlock {
    /// The memory of a layer with this block.
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
    /// `[rows, dim]` out, for the output rows only where the layer has them.
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
        let dim = b.shape_of(x).last().copied().unwrap_or(0);
        let dim = self.out_dim.unwrap_or(dim);
        let window = self.window;
        let seen = Input::Visibility { part, window };
        let (q, gate, stored) = match self.rows_of {
            Some(owner) => {
                let [query, ..] = self.projections();
                let flat = self.project_one(b, x, query)?;
                let (q, gate) = self.queries(b, flat)?;
                let stored = match owner {
                    RowsOf::Earlier(layer) => b.stored(layer)?,
                    RowsOf::OtherGraph(_) => b.input(seen)?,
                };
                (self.scale_queries(b, q)?, gate, stored)
            }
            None => {
                let Projections {
                    qkv: [q, k, v],
                    gate,
                } = self.queries_keys_values(b, x)?;
                let cells = b.input(Input::Cells { part })?;
                (q, gate, b.store_kv("kv_store", layer, [k, v, cells])?)
            }
        };
        let rows = [q, stored, b.input(seen)?];
        let out = match self.relative {
            RelativeAttention::Biases { buckets, weight } => {
                let scores = DistanceScores::SharedWeight(weight);
                let distances = Distances { buckets, scores };
                b.attend_relative("kqv", layer, self.spec(), rows, distances)?
            }
            RelativeAttention::None | RelativeAttention::Disentangled(_) => {
                b.attend("kqv", layer, self.attention(), rows)?
            }
        };
        self.project_back(b, at, AttendedHeads { out, gate }, dim)
    }

    /// Adds the block without a memory, as in encoders: tokens attend within their ubatch through
    /// the window, later ones too. Otherwise as [`AttentionBlock::build`].
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn build_in_batch(
        &self,
        b: &mut GraphBuilder,
        at: LayerContext,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let dim = b.shape_of(x).last().copied().unwrap_or(0);
        let Projections { qkv, gate } = self.queries_keys_values(b, x)?;
        let (buckets, scores) = match self.relative {
            RelativeAttention::None => {
                let out = b.attend_batch("kqv", self.attention(), qkv, self.window)?;
                return self.project_back(b, at, AttendedHeads { out, gate }, dim);
            }
            RelativeAttention::Biases { buckets, weight } => {
                (buckets, DistanceScores::SharedWeight(weight))
            }
            RelativeAttention::Disentangled(buckets) => {
                let [q, k, _] = qkv;
                let of_queries = b.head_linear("Qrel", q, "attn_rel_k.weight", buckets.n())?;
                let of_keys = b.head_linear("Krel", k, "attn_rel_q.weight", buckets.n())?;
                (buckets, DistanceScores::Tables([of_queries, of_keys]))
            }
        };
        let distances = Distances { buckets, scores };
        let out = b.attend_batch_relative("kqv", self.spec(), qkv, self.window, distances)?;
        self.project_back(b, at, AttendedHeads { out, gate }, dim)
    }

    /// Queries, keys and values, `[tokens, heads, dim]` each.
    fn queries_keys_values(
        &self,
        b: &mut GraphBuilder,
        x: NodeId,
    ) -> Result<Projections, GraphError> {
        let [_, key, value] = self.projections();
        let [q, k, v] = self.project(b, x)?;
        let (q, gate) = self.queries(b, q)?;
        let k = self.norm_and_rotate(b, key, k)?;
        let v = value.split_heads(b, v)?;
        let v = match self.values {
            AttentionValues::Projected => v,
            AttentionValues::Scaled(factor) => b.scale("Vscaled", v, factor)?,
            AttentionValues::Normed | AttentionValues::NormedKeys => {
                b.rms_norm_with("Vnormed", v, NormGain::None, self.norm_eps)?
            }
        };
        Ok(Projections {
            qkv: [self.scale_queries(b, q)?, k, v],
            gate,
        })
    }

    /// Normed and rotated queries, and the gate in the same projection, where there is one.
    fn queries(
        &self,
        b: &mut GraphBuilder,
        flat: NodeId,
    ) -> Result<(NodeId, Option<NodeId>), GraphError> {
        let [query, ..] = self.projections();
        let (q, gate) = match self.output_gate {
            OutputGate::None => (flat, None),
            OutputGate::WithQueries => {
                let [q, gate] = query.split_gate(b, flat)?;
                (q, Some(gate))
            }
        };
        Ok((self.norm_and_rotate(b, query, q)?, gate))
    }

    /// Queries times the factor of their position, where there is one.
    fn scale_queries(&self, b: &mut GraphBuilder, q: NodeId) -> Result<NodeId, GraphError> {
        match self.query_scale {
            Some(scale) => {
                let positions = b.input(Input::Positions)?;
                b.scale_by_position("Qscaled", scale, [q, positions])
            }
            None => Ok(q),
        }
    }

    /// `[tokens, heads * v_dim]`, gated where there is a gate, projected back to `[rows, dim]`.
    fn project_back(
        &self,
        b: &mut GraphBuilder,
        at: LayerContext,
        attended: AttendedHeads,
        dim: usize,
    ) -> Result<NodeId, GraphError> {
        let out = at.take_rows(b, "kqv_rows", attended.out)?;
        let out = match attended.gate {
            None => out,
            Some(gate) => {
                let gate = at.take_rows(b, "Qgate_rows", gate)?;
                b.gate("kqv_gated", Activation::Sigmoid, gate, out)?
            }
        };
        let out = match self.output_norm {
            OutputNorm::None => out,
            OutputNorm::Rms => {
                b.rms_norm("kqv_normed", out, "attn_sub_norm.weight", self.norm_eps)?
            }
        };
        let [weight, bias] = self.output.weights();
        let weights = Affine {
            weight,
            bias: matches!(self.bias, QkvBias::All | QkvBias::Output).then_some(bias),
        };
        b.affine("kqv_out", out, weights, dim)
    }

    fn projections(&self) -> [Projection; 3] {
        let projection = |letter, weight, n_heads, dim| Projection {
            letter,
            weight,
            n_heads,
            dim,
            gate: OutputGate::None,
        };
        let queries = projection("Q", "attn_q", self.n_heads, self.k_dim);
        [
            Projection {
                gate: self.output_gate,
                ..queries
            },
            projection("K", "attn_k", self.kv_heads, self.k_dim),
            projection("V", "attn_v", self.kv_heads, self.v_dim),
        ]
    }

    /// Queries, keys and values, `[tokens, heads * dim]` each.
    fn project(&self, b: &mut GraphBuilder, x: NodeId) -> Result<[NodeId; 3], GraphError> {
        let projections = self.projections();
        let mut out = [x; 3];
        match self.weights {
            QkvWeights::Separate => {
                let [query, key, value] = projections;
                let q = self.project_one(b, x, query)?;
                let k = self.project_one(b, x, key)?;
                let v = match self.values {
                    AttentionValues::NormedKeys => k,
                    _ => self.project_one(b, x, value)?,
                };
                return Ok([q, k, v]);
            }
            QkvWeights::Fused => {
                let width = projections.iter().map(Projection::width).sum();
                let all = self.linear(b, x, "QKVproj", ("attn_qkv", width))?;
                let mut first = 0;
                for (out, p) in out.iter_mut().zip(projections) {
                    let columns = first..first + p.width();
                    first = columns.end;
                    *out = b.columns(&format!("{}proj", p.letter), all, columns)?;
                }
            }
        }
        for (out, p) in out.iter_mut().zip(projections) {
            *out = self.clamped(b, *out, p)?;
        }
        Ok(out)
    }

    /// One projection by a matrix of its own.
    fn project_one(
        &self,
        b: &mut GraphBuilder,
        x: NodeId,
        p: Projection,
    ) -> Result<NodeId, GraphError> {
        let name = format!("{}proj", p.letter);
        let out = self.linear(b, x, &name, (p.weight, p.width()))?;
        self.clamped(b, out, p)
    }

    fn clamped(
        &self,
        b: &mut GraphBuilder,
        x: NodeId,
        p: Projection,
    ) -> Result<NodeId, GraphError> {
        self.clamp.map_or(Ok(x), |limit| {
            b.clamp(&format!("{}clamped", p.letter), x, limit)
        })
    }

    fn linear(
        &self,
        b: &mut GraphBuilder,
        x: NodeId,
        name: &str,
        (weight, width): (&str, usize),
    ) -> Result<NodeId, GraphError> {
        let (matrix, bias) = (format!("{weight}.weight"), format!("{weight}.bias"));
        let weights = Affine {
            weight: &matrix,
            bias: matches!(self.bias, QkvBias::Qkv | QkvBias::All).then_some(&*bias),
        };
        let y = b.affine(name, x, weights, width)?;
        let adapter = self.adapter;
        adapter.map_or(Ok(y), |adapter| adapter.added(b, (name, weight), [x, y]))
    }

    /// Norms and rotates queries or keys: `[tokens, heads * dim]` in, `[tokens, heads, dim]` out.
    fn norm_and_rotate(
        &self,
        b: &mut GraphBuilder,
        projection: Projection,
        flat: NodeId,
    ) -> Result<NodeId, GraphError> {
        let (letter, eps) = (projection.letter, self.norm_eps);
        let normed = format!("{letter}normed");
        let gain = format!("{}_norm.weight", projection.weight);
        let x = match self.qk_norm {
            QkNorm::WholeRow => {
                let normed = b.rms_norm(&normed, flat, &gain, eps)?;
                projection.split_heads(b, normed)?
            }
            QkNorm::PerHead => {
                let x = projection.split_heads(b, flat)?;
                b.rms_norm(&normed, x, &gain, eps)?
            }
            QkNorm::PerHeadCentred => {
                let x = projection.split_heads(b, flat)?;
                let bias = format!("{}_norm.bias", projection.weight);
                b.layer_norm(&normed, x, Affine::new(&gain).bias(&bias), eps)?
            }
            QkNorm::PerHeadGains => {
                let x = projection.split_heads(b, flat)?;
                let unit = b.plain_layer_norm(&format!("{letter}centred"), x, eps)?;
                b.gain(&normed, unit, RowGain::PerGroup(&gain))?
            }
            QkNorm::PerHeadPlain => {
                let x = projection.split_heads(b, flat)?;
                b.rms_norm_with(&normed, x, NormGain::None, eps)?
            }
            QkNorm::None | QkNorm::PerHeadRotated => projection.split_heads(b, flat)?,
        };
        let rotated = format!("{letter}cur");
        let x = match (&self.rope, self.sections) {
            (Some(rope), Some(sections)) => {
                let coordinates = b.input(Input::Coordinates)?;
                b.rope_sections(&rotated, [x, coordinates], rope, sections)?
            }
            (Some(rope), None) => {
                let positions = b.input(Input::Positions)?;
                b.rope(&rotated, x, positions, rope)?
            }
            (None, _) => x,
        };
        match self.qk_norm {
            QkNorm::PerHeadRotated => b.rms_norm(&normed, x, &gain, eps),
            _ => Ok(x),
        }
    }

    /// The attention with its weight of sinks, where it has one.
    fn attention(&self) -> Attention<'static> {
        Attention {
            spec: self.spec(),
            sinks: (self.sinks == Sinks::PerHead).then_some("attn_sinks.weight"),
        }
    }

    fn spec(&self) -> AttendSpec {
        let Self {
            n_heads,
            kv_heads,
            k_dim,
            v_dim,
            scale,
            soft_cap,
            alibi,
            ..
        } = *self;
        AttendSpec {
            n_heads,
            kv_heads,
            k_dim,
            v_dim,
            scale,
            soft_cap,
            alibi,
        }
    }
}
