//! The decoder: embedding, layers of attention and feed-forward with residuals, norm, head.
//!
//! Pre-norm as in Llama (Touvron et al., arXiv 2302.13971), with norms also behind the blocks where
//! a model has them (Gemma 2, arXiv 2408.00118). Invariant: only rows whose logits are
//! wanted pass through the last feed-forward block and the head.

use kv_core::graph::{Graph, GraphBuilder, GraphError, GraphShape, Input, NodeId};
use kv_core::layers::{LayerMap, LayerMemory};
use kv_core::{LayerIdx, PartIdx};

use super::{AttentionBlock, FeedForward};

/// Whether the results of a layer's blocks are normed before they are added to the residual.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PostNorms {
    /// They are not.
    #[default]
    None,
    /// Both are.
    Both,
}

/// One layer of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderLayer {
    /// Its attention.
    pub attention: AttentionBlock,
    /// Its feed-forward block or mixture of them.
    pub feed_forward: FeedForward,
    /// Norms behind the two.
    pub post_norms: PostNorms,
}

/// Settings of a whole decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Decoder {
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Width of the rows between layers.
    pub dim: usize,
    /// Factor on the embeddings, where there is one.
    pub embedding_scale: Option<f32>,
    /// Added to the mean square in every norm.
    pub norm_eps: f32,
    /// Name of the matrix that turns the last row into logits; the embedding matrix itself where
    /// the two are tied.
    pub output_weight: String,
    /// The layers, in order.
    pub layers: Vec<DecoderLayer>,
}

/// Name of the embedding matrix.
pub const TOKEN_EMBEDDING: &str = "token_embd.weight";

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
            x = self.layer(&mut b, (index, part), layer, (x, wanted))?;
        }
        let x = b.rms_norm("result_norm", x, "output_norm.weight", self.norm_eps)?;
        let logits = b.linear("result_output", x, &self.output_weight, self.vocab)?;
        b.finish(&[logits])
    }

    fn layer(
        &self,
        b: &mut GraphBuilder,
        (index, part): (LayerIdx, PartIdx),
        layer: &DecoderLayer,
        (x, wanted): (NodeId, Option<NodeId>),
    ) -> Result<NodeId, GraphError> {
        let name = |what: &str| format!("{what}-{index}");
        let weight = |what: &str| format!("blk.{index}.{what}.weight");
        let normed = b.rms_norm(&name("attn_norm"), x, &weight("attn_norm"), self.norm_eps)?;
        let attended = layer.attention.build(b, (index, part), normed, wanted)?;
        let attended = match layer.post_norms {
            PostNorms::None => attended,
            PostNorms::Both => b.rms_norm(
                &name("attn_post_norm"),
                attended,
                &weight("post_attention_norm"),
                self.norm_eps,
            )?,
        };
        let x = match wanted {
            Some(rows) => b.take_rows(&name("inpL_rows"), x, rows)?,
            None => x,
        };
        let x = b.add(&name("ffn_inp"), attended, x)?;
        let normed = b.rms_norm(&name("ffn_norm"), x, &weight("ffn_norm"), self.norm_eps)?;
        let fed = layer.feed_forward.build(b, index, normed)?;
        let fed = match layer.post_norms {
            PostNorms::None => fed,
            PostNorms::Both => b.rms_norm(
                &name("ffn_post_norm"),
                fed,
                &weight("post_ffw_norm"),
                self.norm_eps,
            )?,
        };
        b.add(&name("l_out"), fed, x)
    }
}
