//! [`Op`]: the closed list of operations.
//!
//! [`Op::spec`] returns the description of each, from which shapes, checks and text derive. Shapes
//! are written outermost first; `tokens` is the number of rows. Formulas are those of the papers
//! that introduced them. Does not know how an operation is computed.

use std::fmt;

use kv_core::ids::{LayerIdx, PartIdx};
use kv_core::window::Window;
use serde::{Deserialize, Serialize};

use crate::alibi::Alibi;
use crate::ops::custom::CustomSpec;
use crate::ops::delta_rule::{DecaySpec, DeltaSpec};
use crate::ops::elementwise::PositionScale;
use crate::ops::partial::ResultForm;
use crate::ops::recurrent::{ConvSpec, HeadScanSpec, ScanSpec};
use crate::ops::route::RouteSpec;
use crate::ops::sparse::IndexSpec;
use crate::ops::{
    self, attend, delta_rule, dense, elementwise, experts, norm, plain_attention, recurrent,
};
use crate::relative::RelativeBias;
use crate::rope::{RopeSections, RopeSpec};
use crate::spec::OpSpec;

/// A value that the caller hands to every run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "input")]
pub enum Input {
    /// Token ids, `u32 [tokens]`.
    Tokens,
    /// Embedding rows, `f32 [tokens, dim]`.
    Embeddings {
        /// Width of a row.
        dim: usize,
    },
    /// Positions of the tokens in their sequences, `u32 [tokens]`.
    Positions,
    /// Types of the tokens (which text of a pair they belong to), `u32 [tokens]`.
    TokenTypes,
    /// Position, row and column of the tokens, `u32 [tokens, 3]`; for text all three are the
    /// position.
    Coordinates,
    /// Rows whose result is wanted, ascending, `u32 [outputs]`.
    OutputRows,
    /// The cell of each token in one part of the memory, `u32 [tokens]`.
    Cells {
        /// The part.
        part: PartIdx,
    },
    /// The cells of a part that each row sees; no values of its own.
    Visibility {
        /// The part.
        part: PartIdx,
        /// The part's window, so that graphs of different windows differ; or that for its first
        /// tokens.
        window: Window,
    },
    /// The tokens of the ubatch that each row sees, without any memory: all of its own sequence
    /// within the window, later ones too; no values of its own.
    BatchVisibility {
        /// The window of the rows.
        window: Window,
    },
    /// The recurrent state that each row continues; no values of its own.
    States,
}

/// An elementwise function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Activation {
    /// `x / (1 + e^-x)` (Hendrycks and Gimpel, arXiv 1606.08415; also called swish).
    Silu,
    /// `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`: the tanh form of GELU, same paper.
    GeluTanh,
    /// `x/2 (1 + erf(x / sqrt(2)))`: GELU itself, same paper.
    GeluErf,
    /// `1 / (1 + e^-x)`.
    Sigmoid,
    /// `max(x, 0)`.
    Relu,
    /// The square of that (So et al., arXiv 2109.08668).
    ReluSquared,
}

/// The attention of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttendSpec {
    /// Number of query heads; a multiple of the layer's key/value heads.
    pub n_heads: usize,
    /// Number of key/value heads.
    pub kv_heads: usize,
    /// Values of one query or key head.
    pub k_dim: usize,
    /// Values of one value head.
    pub v_dim: usize,
    /// Factor on the scores, usually `1 / sqrt(k_dim)`.
    pub scale: f32,
    /// Soft cap `c` on scaled scores, `c tanh(x / c)`, where the model has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub soft_cap: Option<f32>,
    /// Linear biases by distance, added to capped scores, where the model has them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alibi: Option<Alibi>,
}

/// One operation. Operands are listed in order in each variant's description.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "op")]
#[non_exhaustive]
pub enum Op {
    /// A value that the caller hands in. No operands.
    Input(Input),
    /// Rows of a weight by token id. `(tokens u32 [n]) -> [n, dim]`, weight `[vocab, dim]`.
    Embed {
        /// The embedding matrix.
        weight: String,
    },
    /// `y = x W^T + b`. `(x [n, in]) -> [n, out]`, weight `[out, in]`, bias `[out]`.
    Linear {
        /// The matrix.
        weight: String,
        /// The bias, where there is one.
        #[serde(skip_serializing_if = "Option::is_none")]
        bias: Option<String>,
    },
    /// `x / sqrt(mean(x^2) + eps) * w` over the last dimension (Zhang and Sennrich,
    /// arXiv 1910.07467). `(x [.., dim]) -> [.., dim]`, weight `[dim]`, or `[groups, dim]` for
    /// `x [n, groups, dim]`.
    RmsNorm {
        /// The gain, where there is one.
        #[serde(skip_serializing_if = "Option::is_none")]
        weight: Option<String>,
        /// Added to the mean square.
        eps: f32,
    },
    /// Rotary position embedding of every head. `(x [n, heads, dim], positions u32 [n]) -> same`.
    Rope {
        /// The rotation.
        rope: RopeSpec,
    },
    /// Rotary position embedding in sections, of tokens that may be in images.
    /// `(x [n, heads, dim], coordinates u32 [n, 3]) -> same`.
    RopeSections {
        /// The rotation.
        rope: RopeSpec,
        /// The coordinate that rotates each pair.
        sections: RopeSections,
    },
    /// The same values in another shape with the same first dimension. `(x) -> shape`.
    Reshape,
    /// Elementwise sum. `(a, b) -> same`, equal shapes.
    Add,
    /// Elementwise product. `(a, b) -> same`, equal shapes.
    Mul,
    /// Every value times `factor`. `(x) -> same`.
    Scale {
        /// The factor.
        factor: f32,
    },
    /// `activation(gate) * up` (Shazeer, arXiv 2002.05202). `(gate, up) -> same`, equal shapes.
    Gate {
        /// Applied to the gate.
        activation: Activation,
    },
    /// Stores K and V of the ubatch's tokens in a layer's rows.
    /// `(k [n, kv_heads, k_dim], v [n, kv_heads, v_dim], cells u32 [n]) -> nothing`.
    StoreKv {
        /// The layer that owns the rows.
        layer: LayerIdx,
    },
    /// The same for a layer whose values are the beginnings of its keys and are not stored again.
    /// `(k [n, kv_heads, k_dim], cells u32 [n]) -> nothing`.
    StoreK {
        /// The layer that owns the rows.
        layer: LayerIdx,
    },
    /// Attention over the visible rows of a layer: `softmax(scale q K^T) V`; a row that sees
    /// nothing gives zeros. `(q [n, heads, k_dim], stored, visibility) -> [n, heads * v_dim]`,
    /// where `stored` is the [`Op::StoreKv`] or [`Op::StoreK`] that must have happened, of the
    /// layer itself or of the one whose rows it shares, or the visibility again, where the rows
    /// were stored by another graph (those of sources). Where the specification has ALiBi, or
    /// scores depend on distances, the positions `u32 [n]` of the rows are a further operand.
    Attend {
        /// The layer that owns the rows.
        layer: LayerIdx,
        /// Heads, widths and scale.
        #[serde(flatten)]
        spec: AttendSpec,
        /// Scores `[heads]` that take part in the softmax of every row and have no value (gpt-oss;
        /// Xiao et al., arXiv 2309.17453): `softmax([q K^T, sink])` without its last column.
        #[serde(skip_serializing_if = "Option::is_none")]
        sinks: Option<String>,
        /// The bias on scores by the distance of query and key, out of a weight, where there is
        /// something.
        #[serde(skip_serializing_if = "Option::is_none")]
        relative: Option<RelativeBias>,
    },
    /// [`Op::Attend`] that can be merged with that over other rows: behind the result of a head,
    /// the logarithm of what its weights were divided by, `ln(sum e^score)`, with the sink's;
    /// `-inf` where it saw nothing. `(q [n, heads, k_dim], stored, visibility) ->`
    /// `[n, heads, v_dim + 1]`, and with ALiBi the positions `u32 [n]`.
    AttendPartial {
        /// The layer that owns the rows.
        layer: LayerIdx,
        /// Heads, widths and scale.
        #[serde(flatten)]
        spec: AttendSpec,
        /// As in [`Op::Attend`].
        #[serde(skip_serializing_if = "Option::is_none")]
        sinks: Option<String>,
    },
    /// Attention over the rows of two partial ones: the means of their results with the weights
    /// `e^(logarithm)`, zeros where both saw nothing (flash-decoding: Dao et al., 2023).
    /// `(a [n, heads, dim + 1], b like a) -> [n, heads * dim]`, or like `a` to be merged further.
    MergePartials {
        /// The form of the result.
        form: ResultForm,
    },
    /// Attention among the tokens of the ubatch, as in encoders: nothing is remembered. `(q [n,
    /// heads, k_dim], k [n, kv_heads, k_dim], v [n, kv_heads, v_dim], visibility) -> [n, heads *
    /// v_dim]`; where scores depend on distances the tables of
    /// [`RelativeScores::Tables`](crate::RelativeScores::Tables), if there are any, and the
    /// positions `u32 [n]`; otherwise as [`Op::Attend`].
    AttendBatch {
        /// Heads, widths and scale.
        #[serde(flatten)]
        spec: AttendSpec,
        /// As in [`Op::Attend`].
        #[serde(skip_serializing_if = "Option::is_none")]
        sinks: Option<String>,
        /// The bias that capped scores get by distance, where there is one.
        #[serde(skip_serializing_if = "Option::is_none")]
        relative: Option<RelativeBias>,
    },
    /// The rows that a token attends over where it sees more than `top_k` (DeepSeek-V3.2's indexer,
    /// arXiv 2512.02556). The visible keys `k` of a layer have the scores `sum_h weights[t, h]
    /// max(q[t, h] k, 0)`; the result names those of the largest, the earlier of equal ones, by
    /// their rank among the visible ones in order of position, ascending, then -1. `(q [n, heads,
    /// dim], weights [n, heads], stored, visibility) -> [n, top_k]`.
    Index {
        /// The layer that owns the keys.
        layer: LayerIdx,
        /// Heads, width and number.
        #[serde(flatten)]
        index: IndexSpec,
    },
    /// [`Op::Attend`] over those of the visible rows alone that an [`Op::Index`] chose.
    /// `(q [n, heads, k_dim], stored, visibility, chosen [n, top_k]) -> [n, heads * v_dim]`.
    AttendSparse {
        /// The layer that owns the rows.
        layer: LayerIdx,
        /// Heads, widths and scale.
        #[serde(flatten)]
        spec: AttendSpec,
    },
    /// Scores of plain attention: `scale q K^T` with the soft cap, against the keys of the first
    /// cells of a layer's part, whichever sequence uses them.
    /// `(q [n, heads, k_dim], stored) -> [n, heads, n_kv]`, where `stored` is as in [`Op::Attend`].
    Kq {
        /// The layer that owns the rows.
        layer: LayerIdx,
        /// Heads, widths and scale.
        #[serde(flatten)]
        spec: AttendSpec,
    },
    /// Weights of plain attention: the softmax of each row and head over the cells that the row
    /// sees, with biases and sinks; 0 for the others, and for all where it sees nothing.
    /// `(kq [n, heads, n_kv], visibility) -> same`, and with ALiBi the positions `u32 [n]`.
    KqSoftMax {
        /// Heads and biases.
        #[serde(flatten)]
        spec: AttendSpec,
        /// As in [`Op::Attend`].
        #[serde(skip_serializing_if = "Option::is_none")]
        sinks: Option<String>,
    },
    /// Result of plain attention: the values of the first cells, weighted.
    /// `(weights [n, heads, n_kv], stored) -> [n, heads * v_dim]`.
    Kqv {
        /// The layer that owns the rows.
        layer: LayerIdx,
        /// Heads and widths.
        #[serde(flatten)]
        spec: AttendSpec,
    },
    /// `activation(x)`. `(x) -> same`.
    Activate {
        /// The function.
        activation: Activation,
    },
    /// Columns from `first` on of the last dimension, as many as the result has.
    /// `(x [n, .., width]) -> [n, .., len]`.
    Columns {
        /// The first column.
        first: usize,
    },
    /// `y[t, i] = bias[i] + sum_k weight[i, k] x[t + k - (width - 1), i]` along each sequence,
    /// where inputs before the ubatch come from the layer's state, which takes the last `width -
    /// 1`. `(x [tokens, channels], states) -> [tokens, channels]`.
    Conv {
        /// The layer that owns the state.
        layer: LayerIdx,
        /// Width and weights.
        #[serde(flatten)]
        conv: ConvSpec,
    },
    /// The selective scan of Mamba (Gu and Dao, arXiv 2312.00752) along each sequence. With
    /// `s = softplus(dt[t, i])` every token does
    /// `h[i, k] = exp(s A[i, k]) h[i, k] + s b[t, k] x[t, i]`,
    /// `y[t, i] = sum_k c[t, k] h[i, k] + d[i] x[t, i]`, where `h` is the layer's state.
    /// `(x [tokens, channels], dt [tokens, channels], b [tokens, d_state], c [tokens, d_state],
    /// states) -> [tokens, channels]`.
    Scan {
        /// The layer that owns the state.
        layer: LayerIdx,
        /// State width and weights.
        #[serde(flatten)]
        scan: ScanSpec,
    },
    /// `(x - mean(x)) / sqrt(variance(x) + eps) * w + b` over the last dimension (Ba et al.,
    /// arXiv 1607.06450). `(x [.., dim]) -> [.., dim]`, weights `[dim]`.
    LayerNorm {
        /// The gain, where there is one.
        #[serde(skip_serializing_if = "Option::is_none")]
        weight: Option<String>,
        /// The bias, where there is one.
        #[serde(skip_serializing_if = "Option::is_none")]
        bias: Option<String>,
        /// Added to the variance.
        eps: f32,
    },
    /// Every row plus one row of a weight. `(x [n, dim]) -> same`, weight `[rows, dim]`.
    AddRow {
        /// The matrix.
        weight: String,
        /// The number of the row.
        row: usize,
    },
    /// Every row times a weight. `(x [.., dim]) -> same`, weight `[dim]`, or `[1]` for all values
    /// (Touvron et al., arXiv 2103.17239), or for `x [n, groups, dim]` one of `[groups, dim]`.
    Gain {
        /// The weight.
        weight: String,
    },
    /// `y[t, i] = sum_j coefficients[t, i, j] x[t, j]`.
    /// `(x [n, inputs, dim], coefficients [n, outputs, inputs]) -> [n, outputs, dim]`.
    Mix,
    /// `max(x - (mean + deviations * deviation), 0)` with mean and deviation (of the population) of
    /// each row (You et al., arXiv 2506.06644). `(x [n, dim]) -> same`.
    GaussianTopK {
        /// The distance of the threshold from the mean, in deviations.
        deviations: f32,
    },
    /// `cap * tanh(x / cap)` (Gemma 2, arXiv 2408.00118). `(x) -> same`.
    SoftCap {
        /// The bound that no value reaches.
        cap: f32,
    },
    /// Every value, at least `-limit` and at most `limit`. `(x) -> same`.
    Clamp {
        /// The bound.
        limit: f32,
    },
    /// `g / (1 + e^(-slope g)) * (u + 1)`, where `g` is the gate, at most `limit`, and `u` is `up`,
    /// between `-limit` and `limit` (gpt-oss, arXiv 2508.10925).
    /// `(gate, up) -> same`, equal shapes.
    ClampedGate {
        /// Factor on the gate inside of the sigmoid.
        slope: f32,
        /// The bound.
        limit: f32,
    },
    /// Every row times a factor of its position. `(x [n, ..], positions u32 [n]) -> same`.
    ScaleByPosition {
        /// The factor.
        #[serde(flatten)]
        scale: PositionScale,
    },
    /// Chooses experts for every row. `(logits [n, experts]) -> [n, experts]`: a weight for each
    /// expert, 0 for those that are not chosen. Bias `[experts]`.
    Route {
        /// The number of groups, and their scores.
        #[serde(flatten)]
        spec: RouteSpec,
        /// Added to the scores to choose by, but not to weights, where there is one.
        #[serde(skip_serializing_if = "Option::is_none")]
        bias: Option<String>,
        /// Factors `[experts]` on the finished weights, where there are any (Gemma 4).
        #[serde(skip_serializing_if = "Option::is_none")]
        gain: Option<String>,
    },
    /// `y[t, s] = x[t, s] W[e]^T + b[e]`, where `e` is the expert of slot `s` of row `t`; slots
    /// without an expert are zeros. `(x [n, in] or [n, slots, in], routes) -> [n, slots, out]`,
    /// weight `[experts, out, in]`, bias `[experts, out]`, where `routes` is an [`Op::Route`].
    ExpertLinear {
        /// The matrices.
        weight: String,
        /// The biases, where there are any.
        #[serde(skip_serializing_if = "Option::is_none")]
        bias: Option<String>,
    },
    /// Every slot times the weight of its expert.
    /// `(x [n, dim] or [n, slots, dim], routes) -> [n, slots, dim]`.
    ExpertScale,
    /// The sum over slots. `(x [n, slots, dim]) -> [n, dim]`.
    ExpertSum,
    /// The selective scan of Mamba-2 (Dao and Gu, arXiv 2405.21060) along each sequence. A head is
    /// `head_dim = channels / heads` neighbouring channels, and `g` is the group of head `j`. With
    /// `s = softplus(dt[t, j] + dt_bias[j])` every token does
    /// `h[j, i, k] = exp(s A[j]) h[j, i, k] + s b[t, g, k] x[t, j, i]`,
    /// `y[t, j, i] = sum_k c[t, g, k] h[j, i, k] + d[j] x[t, j, i]`, where `h` is the layer's
    /// state. `(x [tokens, channels], dt [tokens, heads], b [tokens, groups * d_state],
    /// c [tokens, groups * d_state], states) -> [tokens, channels]`.
    ScanHeads {
        /// The layer that owns the state.
        layer: LayerIdx,
        /// Heads, state width and weights.
        #[serde(flatten)]
        scan: HeadScanSpec,
    },
    /// Decay factors `y[t, i] = exp(A[j] softplus(x[t, i] + dt_bias[i]))`, where `j` is the head
    /// that column `i` belongs to. `(x [n, columns]) -> same`.
    Decay {
        /// Heads and weights.
        #[serde(flatten)]
        decay: DecaySpec,
    },
    /// The gated delta rule (Yang, Kautz and Hatamizadeh, arXiv 2412.06464) along each sequence.
    /// A value head `j` has a state `S [v_dim, k_dim]`, and with the `q` and `k` of its key head
    /// every token does `S = S diag(decay[t, j])`, `S += beta[t, j] (v[t, j] - S k) k^T`,
    /// `y[t, j] = scale S q`. The decay is one number for each head, or one for each key value
    /// (Kimi Linear, arXiv 2510.26692). `(q [tokens, key_heads * k_dim], k likewise,
    /// v [tokens, heads * v_dim], decay [tokens, heads] or [tokens, heads * k_dim],
    /// beta [tokens, heads], states) -> [tokens, heads * v_dim]`.
    Delta {
        /// The layer that owns the state.
        layer: LayerIdx,
        /// Heads and widths.
        #[serde(flatten)]
        delta: DeltaSpec,
    },
    /// `y[t, h] = x[t, h] W[h]^T`: a matrix for each head.
    /// `(x [n, heads, in]) -> [n, heads, out]`, weight `[heads, out, in]`.
    HeadLinear {
        /// The matrices.
        weight: String,
    },
    /// Two values next to each other: `b` behind `a` in the last dimension.
    /// `(a [.., x], b [.., y]) -> [.., x + y]`.
    Concat,
    /// The named rows only. `(x [n, ..], rows u32 [m]) -> [m, ..]`.
    TakeRows,
    /// The largest values of every row, from the largest down, with their columns and the logarithm
    /// of the sum of all exponentials: rows of [`TopK`](crate::TopK).
    /// `(x [n, width]) -> [n, 2 k + 1]`.
    TopK {
        /// Their number.
        k: usize,
    },
    /// An operation on rows that is registered with the backend
    /// (`CustomOp` of `kv-backend`). `(x [n, ..] …, states where it has one) -> [n,
    /// width]`.
    Custom {
        /// Name, settings and weights.
        custom: CustomSpec,
    },
}

impl Op {
    /// The operation's description with its attributes.
    pub fn spec(&self) -> OpSpec<'_> {
        match self {
            Self::Input(input) => ops::input::input(*input),
            Self::Embed { weight } => dense::embed(weight),
            Self::Linear { weight, bias } => dense::linear(weight, bias.as_ref()),
            Self::RmsNorm { weight, eps } => norm::rms_norm(weight.as_ref(), *eps),
            Self::Rope { rope } => ops::rope::rope(rope),
            Self::RopeSections { rope, sections } => ops::rope::rope_sections(rope, *sections),
            Self::Reshape => dense::reshape(),
            Self::Add => elementwise::add(),
            Self::Mul => elementwise::mul(),
            Self::Scale { factor } => elementwise::scale(*factor),
            Self::Gate { activation } => elementwise::gate(*activation),
            Self::StoreKv { layer } => attend::store_kv(*layer),
            Self::StoreK { layer } => attend::store_k(*layer),
            Self::Attend {
                layer,
                spec,
                sinks,
                relative,
            } => attend::attend(*layer, spec, sinks.as_ref(), relative.as_ref()),
            Self::AttendBatch {
                spec,
                sinks,
                relative,
            } => attend::attend_batch(spec, sinks.as_ref(), relative.as_ref()),
            Self::Kq { layer, spec } => plain_attention::kq(*layer, spec),
            Self::KqSoftMax { spec, sinks } => plain_attention::kq_soft_max(spec, sinks.as_ref()),
            Self::Kqv { layer, spec } => plain_attention::kqv(*layer, spec),
            Self::Activate { activation } => elementwise::activate(*activation),
            Self::Columns { first } => dense::columns(*first),
            Self::Conv { layer, conv } => recurrent::conv(*layer, conv),
            Self::Scan { layer, scan } => recurrent::scan(*layer, scan),
            Self::LayerNorm { weight, bias, eps } => {
                norm::layer_norm(weight.as_ref(), bias.as_ref(), *eps)
            }
            Self::AddRow { weight, row } => dense::add_row(weight, *row),
            Self::Gain { weight } => norm::gain(weight),
            Self::Mix => ops::mix::spec(),
            Self::GaussianTopK { deviations } => ops::gaussian_top_k::spec(*deviations),
            Self::SoftCap { cap } => elementwise::soft_cap(*cap),
            Self::Clamp { limit } => elementwise::clamp(*limit),
            Self::ClampedGate { slope, limit } => elementwise::clamped_gate(*slope, *limit),
            Self::ScaleByPosition { scale } => elementwise::scale_by_position(*scale),
            Self::Route { spec, bias, gain } => experts::route(*spec, bias.as_ref(), gain.as_ref()),
            Self::ExpertLinear { weight, bias } => experts::expert_linear(weight, bias.as_ref()),
            Self::ExpertScale => experts::expert_scale(),
            Self::ExpertSum => experts::expert_sum(),
            Self::ScanHeads { layer, scan } => recurrent::scan_heads(*layer, scan),
            Self::Decay { decay } => delta_rule::decay(decay),
            Self::Delta { layer, delta } => delta_rule::delta(*layer, delta),
            Self::HeadLinear { weight } => ops::heads::head_linear(weight),
            Self::Concat => ops::heads::concat(),
            Self::Index { layer, index } => ops::sparse::index(*layer, index),
            Self::AttendSparse { layer, spec } => ops::sparse::attend_sparse(*layer, spec),
            Self::AttendPartial { layer, spec, sinks } => {
                ops::partial::attend_partial(*layer, spec, sinks.as_ref())
            }
            Self::MergePartials { form } => ops::partial::merge_partials(*form),
            Self::TakeRows => dense::take_rows(),
            Self::TopK { k } => ops::top_k::top_k(*k),
            Self::Custom { custom } => ops::custom::custom(custom),
        }
    }

    /// The operation's name, as in text form and JSON.
    pub fn name(&self) -> &'static str {
        self.spec().name()
    }
}

impl fmt::Display for Activation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Silu => "silu",
            Self::GeluTanh => "gelu_tanh",
            Self::GeluErf => "gelu_erf",
            Self::Sigmoid => "sigmoid",
            Self::Relu => "relu",
            Self::ReluSquared => "relu_squared",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GraphBuilder, GraphShape};

    #[test]
    fn an_operation_has_one_name_in_text_and_json() {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 2,
            n_outputs: 1,
        });
        let x = b.input(Input::Embeddings { dim: 4 }).unwrap();
        let wanted = b.input(Input::OutputRows).unwrap();
        let y = b.linear("y", x, "w", 4).unwrap();
        let y = b.soft_cap("cap", y, 2.0).unwrap();
        let y = b.take_rows("rows", y, wanted).unwrap();
        let graph = b.finish(&[y]).unwrap();
        let json = serde_json::to_value(&graph).unwrap();
        for (node, json) in graph.nodes().iter().zip(json["nodes"].as_array().unwrap()) {
            let key = match node.op {
                Op::Input(_) => "input",
                _ => "op",
            };
            assert_eq!(json["op"][key], node.op.name());
        }
    }
}
