//! The decoder: embedding, layers of a mixer and perhaps a feed-forward block with residuals, norm,
//! head.
//!
//! Invariant: only rows whose logits are wanted pass through what follows the last mixer.
//! Knows no architecture by name.

use kv_backend::CustomOps;
use kv_core::layers::{LayerMap, LayerMemory};
use kv_core::{LayerIdx, PartIdx};
use kv_graph::{Affine, Graph, GraphBuilder, GraphError, GraphShape, Input, NodeId, RowGain};

use super::{
    DraftHead, FeedForward, LayerContext, LongRope, Mixer, Norm, PerLayerInputs, Residual,
    ResidualFactors,
};

/// The arrangement of a layer's norms and of its two blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Arrangement {
    /// A norm before each block, as in Llama (Touvron et al., arXiv 2302.13971).
    #[default]
    PreNorm,
    /// A norm before and after each block, as in Gemma 2 (arXiv 2408.00118).
    PreAndPostNorm,
    /// A norm after each block only, as in OLMo 2 (arXiv 2501.00656).
    PostNorm,
    /// One norm before both blocks, which read the same rows (Wang and Komatsuzaki, GPT-J; Cohere).
    Parallel,
    /// A norm of the same rows for each block (GPT-NeoX, arXiv 2204.06745).
    ParallelTwoNorms,
    /// The same, where `attn_norm` is of the feed-forward block and `attn_norm_2` of the attention
    /// (Falcon 40B, arXiv 2311.16867).
    ParallelSecondNorm,
}

/// One layer of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderLayer {
    /// Its mixer.
    pub mixer: Mixer,
    /// The feed-forward block or mixture of them that follows, where one does.
    pub feed_forward: Option<FeedForward>,
    /// Factor on the rows behind it.
    pub scale: LayerScale,
    /// The rows that its blocks add to.
    pub residual: Residual,
}

/// Factor on the rows behind a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LayerScale {
    /// None.
    #[default]
    None,
    /// One that was learnt for the layer (Gemma 4).
    Learnt,
}

impl LayerScale {
    /// The rows behind a layer, scaled.
    pub(super) fn build(self, b: &mut GraphBuilder, x: NodeId) -> Result<NodeId, GraphError> {
        match self {
            Self::None => Ok(x),
            Self::Learnt => b.gain("l_scaled", x, RowGain::One("layer_output_scale.weight")),
        }
    }
}

/// Factors that a model was trained with, where it was.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Multipliers {
    /// On the embeddings.
    pub embedding: Option<f32>,
    /// On what a block adds to the residual.
    pub residual: Option<f32>,
    /// On the logits.
    pub logits: Option<f32>,
}

/// The work on the embeddings of tokens before the first layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DecoderInput {
    /// Nothing.
    #[default]
    Tokens,
    /// A row that was learnt for each position, so many, is added (GPT-2).
    Positions(usize),
    /// They are normed (BLOOM, arXiv 2211.05100).
    Normed,
}

/// The name of the norm after the last layer in files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LastNorm {
    /// `output_norm`.
    #[default]
    Output,
    /// `token_embd_norm`, though it norms no embeddings (LFM2).
    Embedding,
    /// There is none.
    None,
}

/// The rows that a decoder's graphs take for each token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DecoderRows {
    /// Its number, for a row of the embedding matrix.
    #[default]
    OfTokens,
    /// A row that another model made, of an image or a sound; it gets no factor.
    Given,
}

/// Settings of a whole decoder.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decoder {
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Width of the rows between layers.
    pub dim: usize,
    /// Width of embeddings, and of the rows that make logits, where it is another: a matrix makes
    /// one of the other, and another one the other way round (OPT-350m).
    pub embedding_dim: Option<usize>,
    /// Every norm of rows.
    pub norm: Norm,
    /// The rows that its graphs take for each token.
    pub rows: DecoderRows,
    /// The first layers behind which something is added to given rows, which have it behind their
    /// own values (DeepStack: Meng et al., arXiv 2406.04334). Tokens get nothing.
    pub deep_rows: usize,
    /// The work on embeddings before the first layer.
    pub input: DecoderInput,
    /// The further inputs of every layer, where it has any.
    pub per_layer_inputs: Option<PerLayerInputs>,
    /// The arrangement of norms and blocks in layers.
    pub arrangement: Arrangement,
    /// Name of the gain of the norm before the feed-forward block, without its layer.
    pub feed_forward_norm: &'static str,
    /// Name of the norm after the last layer.
    pub last_norm: LastNorm,
    /// Factors.
    pub multipliers: Multipliers,
    /// Name of the matrix that projects rows to logits; the embedding matrix itself where
    /// the two are tied.
    pub output_weight: String,
    /// Name of the bias of logits, where there is one.
    pub output_bias: Option<String>,
    /// Soft cap on the logits, where there is one.
    pub logit_cap: Option<f32>,
    /// Divisors of the rotation that depend on the length of the context, where they do.
    pub long_rope: Option<LongRope>,
    /// The layers, in order.
    pub layers: Vec<DecoderLayer>,
    /// The layer behind them that predicts the token after the next, where it is computed.
    pub draft_head: Option<DraftHead>,
}

/// Name of the embedding matrix.
pub const TOKEN_EMBEDDING: &str = "token_embd.weight";
/// Name of the learnt rows of positions.
pub const POSITION_EMBEDDING: &str = "position_embd.weight";
/// Name of the matrix from embeddings to rows, where these have another width.
const EMBEDDING_TO_ROWS: &str = "token_embd_proj.weight";
/// Name of the matrix from rows to what makes logits, where that has another width.
const ROWS_TO_OUTPUT: &str = "output_proj.weight";
/// Name of the bias of logits.
pub const OUTPUT_BIAS: &str = "output.bias";
/// Name of the output matrix of models that do not reuse the embedding matrix.
pub const OUTPUT: &str = "output.weight";

impl Decoder {
    /// The memory of each layer, that of the head that drafts among them, and behind the layers,
    /// where there are indexers, the keys of each layer's.
    pub fn memory(&self) -> LayerMap {
        let head = self.draft_head.iter().flat_map(|head| &head.layers);
        let layers = self.layers.iter().chain(head);
        let mixers = || layers.clone().map(|layer| &layer.mixer);
        let mut memory: Vec<LayerMemory> = mixers().map(Mixer::memory).collect();
        if mixers().any(|mixer| mixer.index_memory().is_some()) {
            let keys = mixers().map(|mixer| mixer.index_memory().unwrap_or(LayerMemory::Nothing));
            memory.extend(keys);
        }
        LayerMap::new(memory)
    }

    /// Values of a row that is given in place of a token.
    pub fn given_dim(&self) -> usize {
        self.row_dim() * (1 + self.deep_rows)
    }

    /// Width of embeddings, and of the rows that make logits.
    pub fn row_dim(&self) -> usize {
        self.embedding_dim.unwrap_or(self.dim)
    }

    /// The custom operations of its graphs.
    pub fn custom_ops(&self) -> CustomOps {
        let mut ops = CustomOps::new();
        for layer in &self.layers {
            ops.extend(&layer.mixer.custom_ops());
        }
        ops
    }

    /// The same for sequences of at most so many tokens, where that makes a difference.
    pub fn for_context(&self, n_tokens: usize) -> Option<Self> {
        let long_rope = self.long_rope?;
        let mut chosen = self.clone();
        let mixers = chosen.layers.iter_mut().map(|layer| &mut layer.mixer);
        for rope in mixers.filter_map(Mixer::rope_mut) {
            long_rope.choose(rope, n_tokens);
        }
        Some(chosen)
    }

    /// The computation for a ubatch of `shape`, which gives logits; where a head drafts, also the
    /// rows of all tokens that it reads: the final ones, or fused ones.
    ///
    /// # Errors
    /// [`GraphError`] where the settings do not fit together.
    pub fn graph(&self, shape: GraphShape) -> Result<Graph, GraphError> {
        let mut b = GraphBuilder::new(shape);
        let LastRows { wanted, for_head } = self.final_rows(&mut b)?;
        let logits = self.head(&mut b, wanted)?;
        match for_head {
            None => b.finish(&[logits]),
            Some(for_head) => b.finish(&[logits, for_head]),
        }
    }

    /// The graph of its head for a ubatch of `shape`; `None` where there is none.
    pub(super) fn head_graph(&self, shape: GraphShape) -> Option<Result<Graph, GraphError>> {
        let head = self.draft_head.as_ref()?;
        Some(head.graph(self, shape))
    }

    /// The computation for a ubatch of `shape`, which gives the rows after the last norm.
    ///
    /// # Errors
    /// [`GraphError`] where the settings do not fit together.
    pub fn rows_graph(&self, shape: GraphShape) -> Result<Graph, GraphError> {
        let mut b = GraphBuilder::new(shape);
        let LastRows { wanted, .. } = self.final_rows(&mut b)?;
        b.finish(&[wanted])
    }

    /// The rows of wanted tokens after the last norm, and those of all that a head reads.
    fn final_rows(&self, b: &mut GraphBuilder) -> Result<LastRows, GraphError> {
        let (x, deep) = self.rows(b)?;
        let first = self.layer_input(b, x)?;
        let mut x = first;
        let own = self.per_layer_inputs;
        let per_layer = own.map(|own| Ok((own, own.build(b, x)?))).transpose()?;
        let n_layers = self.layers.len();
        let fused = self.draft_head.as_ref().and_then(DraftHead::fused);
        let passes_all = match fused {
            None => self.draft_head.is_some(),
            Some(fused) => fused.layers.contains(&n_layers),
        };
        let mut before = Vec::with_capacity(n_layers);
        for (number, layer) in self.layers.iter().enumerate() {
            before.push(x);
            let mut at = self.place_of(number);
            if number + 1 == n_layers && !passes_all {
                at.output_rows = wanted_rows(b)?;
            }
            let b = &mut b.scope(at.layer);
            x = self.layer(b, at, layer, [x, first])?;
            if let Some((own, inputs)) = per_layer {
                let gated = own.gated(b, at, inputs, x)?;
                x = b.add("per_layer_added", x, gated)?;
            }
            x = layer.scale.build(b, x)?;
            if let Some(given) = deep.filter(|_| number < self.deep_rows) {
                let start = (1 + number) * self.dim;
                let added = b.columns("deep_rows", given, start..start + self.dim)?;
                let added = at.take_rows(b, "deep_rows_wanted", added)?;
                x = b.add("l_deep", x, added)?;
            }
        }
        let fused = fused.map(|fused| {
            let rows = fused.layers.map(|at| before.get(at).copied().unwrap_or(x));
            fused.fuse(b, rows)
        });
        let fused = fused.transpose()?;
        let rows = self.last_rows(b, x)?;
        let for_head = fused.or(self.draft_head.as_ref().map(|_| rows));
        let taken = if passes_all { wanted_rows(b)? } else { None };
        let wanted = match taken {
            Some(wanted) => b.take_rows("result_rows", rows, wanted)?,
            None => rows,
        };
        Ok(LastRows { wanted, for_head })
    }

    /// The rows that make logits, of those behind the last layer.
    fn last_rows(&self, b: &mut GraphBuilder, x: NodeId) -> Result<NodeId, GraphError> {
        let norm = |b: &mut GraphBuilder, weight| self.norm.build(b, "result_norm", x, weight);
        let rows = match self.last_norm {
            LastNorm::Output => norm(b, "output_norm")?,
            LastNorm::Embedding => norm(b, "token_embd_norm")?,
            LastNorm::None => x,
        };
        match self.embedding_dim {
            None => Ok(rows),
            Some(dim) => b.linear("result_projected", rows, ROWS_TO_OUTPUT, dim),
        }
    }

    /// The place of the layer of this number, of which all rows pass.
    pub(super) fn place_of(&self, number: usize) -> LayerContext {
        let index = |at| LayerIdx(u32::try_from(at).unwrap_or(u32::MAX));
        let n_of_head = self.draft_head.as_ref().map_or(0, |head| head.layers.len());
        let n_layers = self.layers.len() + n_of_head;
        LayerContext {
            layer: index(number),
            index_layer: index(n_layers + number),
            part: self.memory().part_of(index(number)).unwrap_or(PartIdx(0)),
            output_rows: None,
        }
    }

    /// The embeddings of tokens, or rows in place of them, and these whole where they have more
    /// than that.
    fn rows(&self, b: &mut GraphBuilder) -> Result<(NodeId, Option<NodeId>), GraphError> {
        let (x, deep) = self.embeddings(b)?;
        let x = match self.embedding_dim {
            None => x,
            Some(_) => b.linear("inp_projected", x, EMBEDDING_TO_ROWS, self.dim)?,
        };
        Ok((x, deep))
    }

    /// The same by their own width.
    fn embeddings(&self, b: &mut GraphBuilder) -> Result<(NodeId, Option<NodeId>), GraphError> {
        if self.rows == DecoderRows::Given {
            let dim = self.given_dim();
            let given = b.input(Input::Embeddings { dim })?;
            if self.deep_rows == 0 {
                return Ok((given, None));
            }
            return Ok((b.columns("inp_rows", given, 0..self.dim)?, Some(given)));
        }
        let tokens = b.input(Input::Tokens)?;
        let sizes = [self.vocab, self.row_dim()];
        let x = b.embed("inp_embd", tokens, TOKEN_EMBEDDING, sizes)?;
        Ok((
            scaled(b, "inp_scaled", x, self.multipliers.embedding)?,
            None,
        ))
    }

    /// The input of the first layer for the embeddings `x`.
    fn layer_input(&self, b: &mut GraphBuilder, x: NodeId) -> Result<NodeId, GraphError> {
        match self.input {
            DecoderInput::Tokens => Ok(x),
            DecoderInput::Normed => self.norm.build(b, "inp_norm", x, "token_embd_norm"),
            DecoderInput::Positions(n_rows) => {
                let positions = b.input(Input::Positions)?;
                let sizes = [n_rows, self.dim];
                let rows = b.embed("pos_embd", positions, POSITION_EMBEDDING, sizes)?;
                b.add("inp_pos_embd", x, rows)
            }
        }
    }

    fn head(&self, b: &mut GraphBuilder, x: NodeId) -> Result<NodeId, GraphError> {
        let weights = Affine {
            weight: &self.output_weight,
            bias: self.output_bias.as_deref(),
        };
        let logits = b.affine("result_output", x, weights, self.vocab)?;
        let logits = scaled(b, "result_scaled", logits, self.multipliers.logits)?;
        match self.logit_cap {
            Some(cap) => b.soft_cap("result_capped", logits, cap),
            None => Ok(logits),
        }
    }

    /// One layer: the rows `x` before it and the rows `first` before the first one in.
    pub(super) fn layer(
        &self,
        b: &mut GraphBuilder,
        at: LayerContext,
        layer: &DecoderLayer,
        [x, first]: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        match layer.residual {
            Residual::Rows => {}
            Residual::Normed {
                mixer,
                feed_forward,
            } => return self.normed_layer(b, at, layer, [mixer, feed_forward], x),
            Residual::SumsNormed => return self.layer_of_normed_sums(b, at, layer, x),
        }
        let input = layer.mixer.input(b, at, self.norm, [x, first])?;
        let (of_mixer, of_feed_forward) = match self.arrangement {
            Arrangement::ParallelSecondNorm => ("attn_norm_2.weight", "attn_norm.weight"),
            _ => ("attn_norm.weight", self.feed_forward_norm),
        };
        let normed = self.pre_norm(b, "attn_norm", input, of_mixer)?;
        let mixed = self.mixed(b, at, layer, normed)?;
        let x = at.take_rows(b, "inpL_rows", x)?;
        let Some(feed_forward) = &layer.feed_forward else {
            return b.add("l_out", mixed, x);
        };
        let (fed, x) = match self.arrangement {
            Arrangement::Parallel => {
                let normed = at.take_rows(b, "attn_norm_rows", normed)?;
                let fed = self.fed_forward(b, feed_forward, [normed, x])?;
                (fed, b.add("ffn_inp", mixed, x)?)
            }
            Arrangement::ParallelTwoNorms | Arrangement::ParallelSecondNorm => {
                let normed = self.pre_norm(b, "ffn_norm", x, of_feed_forward)?;
                let fed = self.fed_forward(b, feed_forward, [normed, x])?;
                (fed, b.add("ffn_inp", mixed, x)?)
            }
            _ => {
                let x = b.add("ffn_inp", mixed, x)?;
                let normed = self.pre_norm(b, "ffn_norm", x, of_feed_forward)?;
                (self.fed_forward(b, feed_forward, [normed, x])?, x)
            }
        };
        b.add("l_out", fed, x)
    }

    /// One layer whose blocks add to the rows behind their norms.
    fn normed_layer(
        &self,
        b: &mut GraphBuilder,
        at: LayerContext,
        layer: &DecoderLayer,
        [of_mixer, of_feed_forward]: [ResidualFactors; 2],
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let normed = self.norm.build(b, "attn_norm", x, "attn_norm")?;
        let mixed = layer.mixer.build(b, at, normed)?;
        let normed = at.take_rows(b, "attn_norm_rows", normed)?;
        let x = of_mixer.sum(b, "ffn_inp", [normed, mixed])?;
        let Some(feed_forward) = &layer.feed_forward else {
            return Ok(x);
        };
        let gain = self.feed_forward_norm;
        let normed = self.norm.build_with(b, "ffn_norm", x, gain)?;
        let fed = feed_forward.build(b, normed, x)?;
        of_feed_forward.sum(b, "l_out", [normed, fed])
    }

    /// One layer whose sums are normed, and no rows before its blocks.
    fn layer_of_normed_sums(
        &self,
        b: &mut GraphBuilder,
        at: LayerContext,
        layer: &DecoderLayer,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let mixed = layer.mixer.build(b, at, x)?;
        let x = at.take_rows(b, "inpL_rows", x)?;
        let sum = b.add("attn_sum", mixed, x)?;
        let x = self.norm.build(b, "attn_norm", sum, "attn_norm")?;
        let Some(feed_forward) = &layer.feed_forward else {
            return Ok(x);
        };
        let fed = feed_forward.build(b, x, x)?;
        let sum = b.add("ffn_sum", fed, x)?;
        self.norm
            .build_with(b, "l_out", sum, self.feed_forward_norm)
    }

    /// The rows that the mixer adds to the residual.
    fn mixed(
        &self,
        b: &mut GraphBuilder,
        at: LayerContext,
        layer: &DecoderLayer,
        normed: NodeId,
    ) -> Result<NodeId, GraphError> {
        let mixed = layer.mixer.build(b, at, normed)?;
        let mixed = self.post_norm(b, "attn_post_norm", mixed, "post_attention_norm.weight")?;
        scaled(b, "mixed_scaled", mixed, self.multipliers.residual)
    }

    /// The rows that the feed-forward block adds to the residual, of normed rows and of those
    /// before the norm.
    fn fed_forward(
        &self,
        b: &mut GraphBuilder,
        feed_forward: &FeedForward,
        [normed, x]: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        let fed = feed_forward.build(b, normed, x)?;
        let fed = self.post_norm(b, "ffn_post_norm", fed, "post_ffw_norm.weight")?;
        scaled(b, "ffn_scaled", fed, self.multipliers.residual)
    }

    /// The norm before a block, where layers have it.
    fn pre_norm(
        &self,
        b: &mut GraphBuilder,
        name: &str,
        x: NodeId,
        gain: &str,
    ) -> Result<NodeId, GraphError> {
        match self.arrangement {
            Arrangement::PostNorm => Ok(x),
            _ => self.norm.build_with(b, name, x, gain),
        }
    }

    /// The norm after a block, where layers have it.
    fn post_norm(
        &self,
        b: &mut GraphBuilder,
        name: &str,
        x: NodeId,
        gain: &str,
    ) -> Result<NodeId, GraphError> {
        match self.arrangement {
            Arrangement::PreNorm
            | Arrangement::Parallel
            | Arrangement::ParallelTwoNorms
            | Arrangement::ParallelSecondNorm => Ok(x),
            Arrangement::PreAndPostNorm | Arrangement::PostNorm => {
                self.norm.build_with(b, name, x, gain)
            }
        }
    }
}

/// The rows that come out of a decoder's layers.
struct LastRows {
    /// The rows of wanted tokens after the last norm.
    wanted: NodeId,
    /// The rows of all tokens that its head reads, where it has one.
    for_head: Option<NodeId>,
}

/// The rows whose outputs are wanted, where not all are.
pub(super) fn wanted_rows(b: &mut GraphBuilder) -> Result<Option<NodeId>, GraphError> {
    let GraphShape {
        n_tokens,
        n_outputs,
    } = b.shape();
    let rows = (n_outputs < n_tokens).then(|| b.input(Input::OutputRows));
    rows.transpose()
}

/// `x`, times the factor where there is one.
pub(super) fn scaled(
    b: &mut GraphBuilder,
    name: &str,
    x: NodeId,
    factor: Option<f32>,
) -> Result<NodeId, GraphError> {
    factor.map_or(Ok(x), |factor| b.scale(name, x, factor))
}
