//! [`DraftHead`]: the layer behind a decoder's last one that predicts the token after the next
//! (multi-token prediction; DeepSeek-V3, arXiv 2412.19437, section 2.2).
//!
//! For a token it reads the token's embedding and the final row of the token before, each normed,
//! side by side, through one matrix and one layer of the decoder's kind. Its rows have the place of
//! the final rows again, so it can go on from its own. Or it reads rows of several layers, see
//! [`FusedHead`], or attends over the model's own keys and values, see [`SharingHead`]. Invariant:
//! what it stores of a token depends on that token and those before it alone. Knows no architecture
//! by name.

use kv_graph::weights::WeightSource;
use kv_graph::{Graph, GraphBuilder, GraphError, GraphShape, Input};

use super::decoder::{TOKEN_EMBEDDING, wanted_rows};
use super::{Decoder, DecoderLayer, FusedHead, LayerContext, SharingHead};
use crate::error::ModelError;
use crate::hyperparameters::{Hyperparameters, optional_weight};

/// The layer that predicts the token after the next one.
#[derive(Clone, Debug, PartialEq)]
pub struct DraftHead {
    /// Its layers, whose numbers are those behind the decoder's last: one, but of heads that share
    /// the model's rows.
    pub layers: Vec<DecoderLayer>,
    /// Name of its embedding matrix.
    pub embedding: String,
    /// Name of the norm behind the layer, without `.weight`.
    pub last_norm: String,
    /// Name of its output matrix.
    pub output_weight: String,
    /// The rows of the model that it reads.
    pub input: DraftInput,
}

/// The rows of a model that its head reads.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum DraftInput {
    /// Those behind its last norm.
    #[default]
    Final,
    /// Those of several layers, fused.
    Fused(FusedHead),
    /// Those behind its last norm, and its keys and values.
    Sharing(Box<SharingHead>),
}

impl DraftHead {
    /// Takes the layers behind the decoder's last off `layers`, which are all that the file counts.
    /// The first of them is the head's, with matrices of its own where the file has them, else with
    /// those of the model, whose output matrix is `output_weight`. `None` where there are none.
    ///
    /// # Errors
    /// [`ModelError`] where no layer would be left, or a tensor cannot be read.
    pub fn split_off(
        layers: &mut Vec<DecoderLayer>,
        output_weight: &str,
        hyper: &Hyperparameters<'_>,
        weights: &dyn WeightSource,
    ) -> Result<Option<Self>, ModelError> {
        let number = layers.len() - hyper.n_layers_behind(layers.len())?;
        let Some(layer) = layers.drain(number..).next() else {
            return Ok(None);
        };
        let own = |name: &str| {
            let name = format!("blk.{number}.nextn.{name}");
            let found = optional_weight(weights, &format!("{name}.weight"))?;
            Ok::<_, ModelError>(found.map(|_| name))
        };
        let matrix = |name: Option<String>, other: &str| {
            name.map_or_else(|| other.to_owned(), |name| format!("{name}.weight"))
        };
        Ok(Some(Self {
            layers: vec![layer],
            embedding: matrix(own("embed_tokens")?, TOKEN_EMBEDDING),
            last_norm: own("shared_head_norm")?.unwrap_or_else(|| "output_norm".to_owned()),
            output_weight: matrix(own("shared_head_head")?, output_weight),
            input: DraftInput::Final,
        }))
    }

    /// Its settings as one that reads rows of several layers.
    pub(super) fn fused(&self) -> Option<&FusedHead> {
        match &self.input {
            DraftInput::Final | DraftInput::Sharing(_) => None,
            DraftInput::Fused(fused) => Some(fused),
        }
    }

    /// Its settings as one that attends over the model's keys and values.
    pub(super) fn sharing(&self) -> Option<&SharingHead> {
        match &self.input {
            DraftInput::Final | DraftInput::Fused(_) => None,
            DraftInput::Sharing(sharing) => Some(sharing),
        }
    }

    /// The computation for a ubatch of `shape`, from tokens and, as embeddings, the final rows of
    /// those before them: logits and final rows of the wanted tokens. Where none are wanted it only
    /// stores keys and values.
    pub(super) fn graph(&self, decoder: &Decoder, shape: GraphShape) -> Result<Graph, GraphError> {
        match &self.input {
            DraftInput::Final => {}
            DraftInput::Fused(fused) => return fused.graph(self, decoder, shape),
            DraftInput::Sharing(sharing) => return sharing.graph(self, decoder, shape),
        }
        let mut b = GraphBuilder::new(shape);
        let (norm, dim) = (decoder.norm, decoder.dim);
        let tokens = b.input(Input::Tokens)?;
        let rows = b.input(Input::Embeddings { dim })?;
        let embedded = b.embed("head_embd", tokens, &self.embedding, [decoder.vocab, dim])?;
        let at = LayerContext {
            output_rows: wanted_rows(&mut b)?,
            ..decoder.place_of(decoder.layers.len())
        };
        let mut x = {
            let b = &mut b.scope(at.layer);
            let embedded = norm.build(b, "head_enorm", embedded, "nextn.enorm")?;
            let rows = norm.build(b, "head_hnorm", rows, "nextn.hnorm")?;
            let both = b.concat("head_both", embedded, rows)?;
            b.linear("head_inp", both, "nextn.eh_proj.weight", dim)?
        };
        for layer in &self.layers {
            x = decoder.layer(&mut b.scope(at.layer), at, layer, [x, x])?;
        }
        let rows = norm.build(&mut b, "head_norm", x, &self.last_norm)?;
        let logits = b.linear("head_output", rows, &self.output_weight, decoder.vocab)?;
        b.finish(&[logits, rows])
    }
}
