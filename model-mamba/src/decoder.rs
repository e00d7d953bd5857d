//! [`MixerDecoder`]: embedding, layers of a mixer and perhaps a feed-forward block with residuals,
//! norm, head.
//!
//! A mixer is recurrent, or attention, or both beside each other. Invariant: only rows whose logits
//! are wanted pass through what follows the last mixer's memory.

use kv_core::graph::{Graph, GraphBuilder, GraphError, GraphShape, Input, NodeId};
use kv_core::layers::{LayerMap, LayerMemory};
use kv_core::{LayerIdx, PartIdx};
use model_core::blocks::{AttentionBlock, FeedForward, SsmMixer, TOKEN_EMBEDDING};

/// What lets the rows of a sequence see each other in one layer.
#[derive(Clone, Debug, PartialEq)]
pub enum Mixer {
    /// Attention.
    Attention(AttentionBlock),
    /// A recurrence.
    Recurrent(SsmMixer),
    /// Both, of the same rows, added (Falcon-H1, arXiv 2507.22448).
    Both(AttentionBlock, SsmMixer),
}

/// One layer.
#[derive(Clone, Debug, PartialEq)]
pub struct MixerLayer {
    /// Its mixer.
    pub mixer: Mixer,
    /// What follows it, where anything does.
    pub feed_forward: Option<FeedForward>,
}

/// Factors that a model was trained with (Granite), where it was.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Multipliers {
    /// On the embeddings.
    pub embedding: Option<f32>,
    /// On what is added to the residual.
    pub residual: Option<f32>,
    /// On the logits.
    pub logits: Option<f32>,
}

/// Settings of a whole model.
#[derive(Clone, Debug, PartialEq)]
pub struct MixerDecoder {
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Width of the rows between layers.
    pub dim: usize,
    /// Added to the mean square in every norm.
    pub norm_eps: f32,
    /// Name of the matrix that turns the last row into logits; the embedding matrix itself where
    /// the two are tied.
    pub output_weight: String,
    /// What the gain of the norm before feed-forward blocks is called, behind the layer.
    pub ffn_norm: &'static str,
    /// Factors.
    pub multipliers: Multipliers,
    /// The layers, in order.
    pub layers: Vec<MixerLayer>,
}

impl Mixer {
    fn memory(&self) -> LayerMemory {
        match self {
            Self::Attention(attention) => LayerMemory::Attention(attention.memory()),
            Self::Recurrent(ssm) => LayerMemory::Recurrent(ssm.memory()),
            Self::Both(attention, ssm) => LayerMemory::Both(attention.memory(), ssm.memory()),
        }
    }

    /// Adds the mixer: `x [tokens, dim]` in, `[rows, dim]` out.
    fn build(
        &self,
        b: &mut GraphBuilder,
        (layer, part): (LayerIdx, PartIdx),
        x: NodeId,
        wanted: Option<NodeId>,
    ) -> Result<NodeId, GraphError> {
        match self {
            Self::Attention(attention) => attention.build(b, (layer, part), x, wanted),
            Self::Recurrent(ssm) => ssm.build(b, layer, x, wanted),
            Self::Both(attention, ssm) => {
                let attended = attention.build(b, (layer, part), x, wanted)?;
                let recurred = ssm.build(b, layer, x, wanted)?;
                b.add(&format!("mixed-{layer}"), recurred, attended)
            }
        }
    }
}

impl MixerDecoder {
    /// What each layer remembers.
    pub fn memory(&self) -> LayerMap {
        LayerMap::new(self.layers.iter().map(|l| l.mixer.memory()).collect())
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
            x = self.layer(&mut b, (index, part), layer, (x, wanted))?;
        }
        let x = b.rms_norm("result_norm", x, "output_norm.weight", self.norm_eps)?;
        let logits = b.linear("result_output", x, &self.output_weight, self.vocab)?;
        let logits = scaled(&mut b, "result_scaled", logits, self.multipliers.logits)?;
        b.finish(&[logits])
    }

    fn layer(
        &self,
        b: &mut GraphBuilder,
        (index, part): (LayerIdx, PartIdx),
        layer: &MixerLayer,
        (x, wanted): (NodeId, Option<NodeId>),
    ) -> Result<NodeId, GraphError> {
        let name = |what: &str| format!("{what}-{index}");
        let weight = |what: &str| format!("blk.{index}.{what}");
        let factor = self.multipliers.residual;
        let gain = weight("attn_norm.weight");
        let normed = b.rms_norm(&name("attn_norm"), x, &gain, self.norm_eps)?;
        let mixed = layer.mixer.build(b, (index, part), normed, wanted)?;
        let mixed = scaled(b, &name("mixed_scaled"), mixed, factor)?;
        let x = match wanted {
            Some(rows) => b.take_rows(&name("inpL_rows"), x, rows)?,
            None => x,
        };
        let Some(feed_forward) = &layer.feed_forward else {
            return b.add(&name("l_out"), mixed, x);
        };
        let x = b.add(&name("ffn_inp"), mixed, x)?;
        let normed = b.rms_norm(&name("ffn_norm"), x, &weight(self.ffn_norm), self.norm_eps)?;
        let fed = feed_forward.build(b, index, normed)?;
        let fed = scaled(b, &name("ffn_scaled"), fed, factor)?;
        b.add(&name("l_out"), fed, x)
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
