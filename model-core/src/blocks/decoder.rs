//! The decoder: embedding, layers of attention and feed-forward with residuals, norm, head.
//!
//! Invariant: only rows whose logits are wanted pass through the last feed-forward block and the
//! head. Knows no architecture by name.

use kv_core::graph::{Graph, GraphBuilder, GraphError, GraphShape, Input, NodeId};
use kv_core::layers::{LayerMap, LayerMemory};
use kv_core::{LayerIdx, PartIdx};

use super::{AttentionBlock, FeedForward, Norm};

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
    /// Its attention.
    pub attention: AttentionBlock,
    /// Its feed-forward block or mixture of them.
    pub feed_forward: FeedForward,
}

/// Settings of a whole decoder.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decoder {
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Width of the rows between layers.
    pub dim: usize,
    /// Factor on the embeddings, where there is one.
    pub embedding_scale: Option<f32>,
    /// Every norm of rows.
    pub norm: Norm,
    /// Where the norms of layers stand.
    pub arrangement: Arrangement,
    /// Name of the norm before the feed-forward block, without layer and ending.
    pub feed_forward_norm: &'static str,
    /// Factor on what a block adds to the residual, where there is one.
    pub residual_scale: Option<f32>,
    /// Name of the matrix that turns the last row into logits; the embedding matrix itself where
    /// the two are tied.
    pub output_weight: String,
    /// Factor on the logits, where there is one.
    pub logit_scale: Option<f32>,
    /// Soft cap on the logits, where there is one.
    pub logit_cap: Option<f32>,
    /// The layers, in order.
    pub layers: Vec<DecoderLayer>,
}

/// Name of the embedding matrix.
pub const TOKEN_EMBEDDING: &str = "token_embd.weight";

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
        let memory = |l: &DecoderLayer| LayerMemory::Attention(l.attention.memory());
        LayerMap::new(self.layers.iter().map(memory).collect())
    }

    /// The computation for a ubatch of `shape`.
    ///
    /// # Errors
    /// [`GraphError`] where the settings do not fit together.
    pub fn graph(&self, shape: GraphShape) -> Result<Graph, GraphError> {
        let mut b = GraphBuilder::new(shape);
        let tokens = b.input(Input::Tokens)?;
        let mut x = b.embed("inp_embd", tokens, TOKEN_EMBEDDING, [self.vocab, self.dim])?;
        if let Some(factor) = self.embedding_scale {
            x = b.scale("inp_scaled", x, factor)?;
        }
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
            x = match self.arrangement {
                Arrangement::Parallel => self.parallel_layer(&mut b, at, layer, x)?,
                _ => self.layer(&mut b, at, layer, x)?,
            };
        }
        let x = self.norm.build(&mut b, "result_norm", x, "output_norm")?;
        let logits = self.head(&mut b, x)?;
        b.finish(&[logits])
    }

    fn head(&self, b: &mut GraphBuilder, x: NodeId) -> Result<NodeId, GraphError> {
        let mut logits = b.linear("result_output", x, &self.output_weight, self.vocab)?;
        if let Some(factor) = self.logit_scale {
            logits = b.scale("result_scaled", logits, factor)?;
        }
        if let Some(cap) = self.logit_cap {
            logits = b.soft_cap("result_capped", logits, cap)?;
        }
        Ok(logits)
    }

    fn layer(
        &self,
        b: &mut GraphBuilder,
        at: At,
        layer: &DecoderLayer,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let normed = self.before(b, at, ("attn_norm", "attn_norm"), x)?;
        let attended = layer
            .attention
            .build(b, (at.index, at.part), normed, at.wanted)?;
        let names = ("attn_post_norm", "post_attention_norm");
        let attended = self.behind(b, at, names, attended)?;
        let attended = self.scaled(b, &at.name("attn_scaled"), attended)?;
        let x = at.take(b, "inpL_rows", x)?;
        let x = b.add(&at.name("ffn_inp"), attended, x)?;
        let normed = self.before(b, at, ("ffn_norm", self.feed_forward_norm), x)?;
        let fed = layer.feed_forward.build(b, at.index, normed)?;
        let fed = self.behind(b, at, ("ffn_post_norm", "post_ffw_norm"), fed)?;
        let fed = self.scaled(b, &at.name("ffn_scaled"), fed)?;
        b.add(&at.name("l_out"), fed, x)
    }

    fn parallel_layer(
        &self,
        b: &mut GraphBuilder,
        at: At,
        layer: &DecoderLayer,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let normed = self.before(b, at, ("attn_norm", "attn_norm"), x)?;
        let attended = layer
            .attention
            .build(b, (at.index, at.part), normed, at.wanted)?;
        let attended = self.scaled(b, &at.name("attn_scaled"), attended)?;
        let x = at.take(b, "inpL_rows", x)?;
        let normed = at.take(b, "attn_norm_rows", normed)?;
        let fed = layer.feed_forward.build(b, at.index, normed)?;
        let fed = self.scaled(b, &at.name("ffn_scaled"), fed)?;
        let x = b.add(&at.name("ffn_inp"), attended, x)?;
        b.add(&at.name("l_out"), fed, x)
    }

    /// The norm before a block, where layers have it.
    fn before(
        &self,
        b: &mut GraphBuilder,
        at: At,
        (name, weight): (&str, &str),
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        match self.arrangement {
            Arrangement::Behind => Ok(x),
            _ => self.norm.build(b, &at.name(name), x, &at.weight(weight)),
        }
    }

    /// The norm behind a block, where layers have it.
    fn behind(
        &self,
        b: &mut GraphBuilder,
        at: At,
        (name, weight): (&str, &str),
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        match self.arrangement {
            Arrangement::Before | Arrangement::Parallel => Ok(x),
            Arrangement::Around | Arrangement::Behind => {
                self.norm.build(b, &at.name(name), x, &at.weight(weight))
            }
        }
    }

    fn scaled(&self, b: &mut GraphBuilder, name: &str, x: NodeId) -> Result<NodeId, GraphError> {
        match self.residual_scale {
            Some(factor) => b.scale(name, x, factor),
            None => Ok(x),
        }
    }
}
