//! The decoder: embedding, layers of a mixer and perhaps a feed-forward block with residuals, norm,
//! head.
//!
//! Invariant: only rows whose logits are wanted pass through what follows the last mixer's memory. Knows no architecture by name.

use kv_core::graph::{Graph, GraphBuilder, GraphError, GraphShape, Input, NodeId};
use kv_core::layers::LayerMap;
use kv_core::{LayerIdx, PartIdx};

use super::{FeedForward, LongRope, Mixer, Norm};

/// Where a layer's norms stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Arrangement {
    /// Before each of its two blocks, as in Llama (Touvron et al., arXiv 2302.13971).
    #[default]
    Before,
    /// Before and behind each, as in Gemma 2 (arXiv 2408.00118).
    Around,
    /// Behind each only, as in OLMo 2 (arXiv 2501.00656).
    Behind,
    /// One before both, which work side by side (Wang and Komatsuzaki, GPT-J; Cohere).
    Parallel,
}

/// One layer of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderLayer {
    /// Its mixer.
    pub mixer: Mixer,
    /// The feed-forward block or mixture of them that follows, where one does.
    pub feed_forward: Option<FeedForward>,
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

/// Settings of a whole decoder.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decoder {
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Width of the rows between layers.
    pub dim: usize,
    /// Every norm of rows.
    pub norm: Norm,
    /// Where the norms of layers stand.
    pub arrangement: Arrangement,
    /// Name of the gain of the norm before the feed-forward block, behind the layer.
    pub feed_forward_norm: &'static str,
    /// Factors.
    pub multipliers: Multipliers,
    /// Name of the matrix that turns the last row into logits; the embedding matrix itself where
    /// the two are tied.
    pub output_weight: String,
    /// Soft cap on the logits, where there is one.
    pub logit_cap: Option<f32>,
    /// Divisors of the rotation that depend on the length of the context, where they do.
    pub long_rope: Option<LongRope>,
    /// The layers, in order.
    pub layers: Vec<DecoderLayer>,
}

/// Name of the embedding matrix.
pub const TOKEN_EMBEDDING: &str = "token_embd.weight";
/// Name of the output matrix of models that do not reuse the embedding matrix.
pub const OUTPUT: &str = "output.weight";

/// One layer under construction.
#[derive(Clone, Copy)]
struct At {
    index: LayerIdx,
    part: PartIdx,
    /// The rows that are wanted behind the attention, where not all are.
    wanted: Option<NodeId>,
}

impl At {
    fn name(self, what: &str) -> String {
        format!("{what}-{}", self.index)
    }

    fn weight(self, what: &str) -> String {
        format!("blk.{}.{what}", self.index)
    }

    /// The wanted rows of `x`.
    fn take(self, b: &mut GraphBuilder, what: &str, x: NodeId) -> Result<NodeId, GraphError> {
        match self.wanted {
            Some(rows) => b.take_rows(&self.name(what), x, rows),
            None => Ok(x),
        }
    }
}

impl Decoder {
    /// What each layer remembers.
    pub fn memory(&self) -> LayerMap {
        LayerMap::new(self.layers.iter().map(|l| l.mixer.memory()).collect())
    }

    /// The same for sequences of at most so many tokens, where that makes a difference.
    pub fn for_context(&self, n_tokens: usize) -> Option<Self> {
        let long_rope = self.long_rope?;
        let mut chosen = self.clone();
        let mixers = chosen.layers.iter_mut().map(|layer| &mut layer.mixer);
        for attention in mixers.filter_map(Mixer::attention_mut) {
            long_rope.choose(attention, n_tokens);
        }
        Some(chosen)
    }

    /// The computation for a ubatch of `shape`.
    ///
    /// # Errors
    /// [`GraphError`] where the settings do not fit together.
    pub fn graph(&self, shape: GraphShape) -> Result<Graph, GraphError> {
        let mut b = GraphBuilder::new(shape);
        let tokens = b.input(Input::Tokens)?;
        let x = b.embed("inp_embd", tokens, TOKEN_EMBEDDING, [self.vocab, self.dim])?;
        let mut x = scaled(&mut b, "inp_scaled", x, self.multipliers.embedding)?;
        let memory = self.memory();
        let last = self.layers.len().saturating_sub(1);
        for (at, layer) in self.layers.iter().enumerate() {
            let index = LayerIdx(u32::try_from(at).unwrap_or(u32::MAX));
            let part = memory.part_of(index).unwrap_or(PartIdx(0));
            let wanted = match at == last && shape.n_outputs < shape.n_tokens {
                true => Some(b.input(Input::OutputRows)?),
                false => None,
            };
            let at = At {
                index,
                part,
                wanted,
            };
            x = self.layer(&mut b, at, layer, x)?;
        }
        let x = self.norm.build(&mut b, "result_norm", x, "output_norm")?;
        let logits = self.head(&mut b, x)?;
        b.finish(&[logits])
    }

    fn head(&self, b: &mut GraphBuilder, x: NodeId) -> Result<NodeId, GraphError> {
        let logits = b.linear("result_output", x, &self.output_weight, self.vocab)?;
        let logits = scaled(b, "result_scaled", logits, self.multipliers.logits)?;
        match self.logit_cap {
            Some(cap) => b.soft_cap("result_capped", logits, cap),
            None => Ok(logits),
        }
    }

    fn layer(
        &self,
        b: &mut GraphBuilder,
        at: At,
        layer: &DecoderLayer,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let normed = self.before(b, at, ("attn_norm", "attn_norm.weight"), x)?;
        let mixed = self.mixed(b, at, layer, normed)?;
        let x = at.take(b, "inpL_rows", x)?;
        let Some(feed_forward) = &layer.feed_forward else {
            return b.add(&at.name("l_out"), mixed, x);
        };
        let (fed, x) = match self.arrangement {
            Arrangement::Parallel => {
                let normed = at.take(b, "attn_norm_rows", normed)?;
                let fed = self.fed(b, at, feed_forward, normed)?;
                (fed, b.add(&at.name("ffn_inp"), mixed, x)?)
            }
            _ => {
                let x = b.add(&at.name("ffn_inp"), mixed, x)?;
                let normed = self.before(b, at, ("ffn_norm", self.feed_forward_norm), x)?;
                (self.fed(b, at, feed_forward, normed)?, x)
            }
        };
        b.add(&at.name("l_out"), fed, x)
    }

    /// What the mixer adds to the residual.
    fn mixed(
        &self,
        b: &mut GraphBuilder,
        at: At,
        layer: &DecoderLayer,
        normed: NodeId,
    ) -> Result<NodeId, GraphError> {
        let mixed = layer
            .mixer
            .build(b, (at.index, at.part), normed, at.wanted)?;
        let names = ("attn_post_norm", "post_attention_norm.weight");
        let mixed = self.behind(b, at, names, mixed)?;
        scaled(
            b,
            &at.name("mixed_scaled"),
            mixed,
            self.multipliers.residual,
        )
    }

    /// What the feed-forward block adds to the residual.
    fn fed(
        &self,
        b: &mut GraphBuilder,
        at: At,
        feed_forward: &FeedForward,
        normed: NodeId,
    ) -> Result<NodeId, GraphError> {
        let fed = feed_forward.build(b, at.index, normed)?;
        let names = ("ffn_post_norm", "post_ffw_norm.weight");
        let fed = self.behind(b, at, names, fed)?;
        scaled(b, &at.name("ffn_scaled"), fed, self.multipliers.residual)
    }

    /// The norm before a block, where layers have it.
    fn before(
        &self,
        b: &mut GraphBuilder,
        at: At,
        (name, gain): (&str, &str),
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        match self.arrangement {
            Arrangement::Behind => Ok(x),
            _ => self.norm.build_with(b, &at.name(name), x, &at.weight(gain)),
        }
    }

    /// The norm behind a block, where layers have it.
    fn behind(
        &self,
        b: &mut GraphBuilder,
        at: At,
        (name, gain): (&str, &str),
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        match self.arrangement {
            Arrangement::Before | Arrangement::Parallel => Ok(x),
            Arrangement::Around | Arrangement::Behind => {
                self.norm.build_with(b, &at.name(name), x, &at.weight(gain))
            }
        }
    }
}

/// `x`, times the factor where there is one.
fn scaled(
    b: &mut GraphBuilder,
    name: &str,
    x: NodeId,
    factor: Option<f32>,
) -> Result<NodeId, GraphError> {
    factor.map_or(Ok(x), |factor| b.scale(name, x, factor))
}
