//! [`Gemma4Assistant`]: heads that draft for Gemma 4 and attend over its keys and values, which are
//! files of their own.
//!
//! Their layers are Gemma 4's, but have queries alone: each attends over the rows of the last layer
//! of the model that stores rows for a window like its own. Keys are our own, as there are no such
//! GGUF files. Knows no model that they draft for.

use std::sync::Arc;

use kv_core::TokenId;
use kv_core::layers::AttentionMemory;
use kv_graph::weights::WeightSource;
use model_core::architecture::{HeadArchitecture, LayerRows, ModelError};
use model_core::blocks::{
    Arrangement, Decoder, DecoderLayer, DraftHead, DraftInput, Mixer, OUTPUT, OWN_HEAD, Residual,
    RowsOf, SharingHead, TOKEN_EMBEDDING, TokenGroups,
};
use model_core::gguf::Metadata;
use model_core::head_file::HeadWeights;
use model_core::hyperparameters::{Hyperparameters, optional_weight};

use crate::family::GEMMA4;
use crate::member::{LlamaLike, RowSharing};

/// The layers of assistants of Gemma 4: all of them share the rows of another model.
const GEMMA4_ASSISTANT: LlamaLike = LlamaLike {
    name: "gemma4_assistant",
    sharing: RowSharing::None,
    ..GEMMA4
};

/// Key of the width of the model's rows.
pub(crate) const MODEL_WIDTH: &str = "backbone_hidden_size";
/// Key of the number of groups of tokens, where logits are of some of them.
pub(crate) const N_GROUPS: &str = "num_centroids";
/// Key of the number of these groups.
pub(crate) const N_CHOSEN: &str = "centroid_intermediate_top_k";
/// Tensor of all tokens, by group.
pub(crate) const GROUPED_TOKENS: &str = "token_ordering";

/// Assistants of Gemma 4.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gemma4Assistant;

impl HeadArchitecture for Gemma4Assistant {
    fn name(&self) -> &'static str {
        GEMMA4_ASSISTANT.name
    }

    fn head(
        &self,
        metadata: &Metadata,
        weights: &dyn HeadWeights,
        of: &LayerRows,
    ) -> Result<DraftHead, ModelError> {
        let hyper = Hyperparameters::new(metadata, GEMMA4_ASSISTANT.name);
        let dim = hyper.count("embedding_length")?;
        let width = hyper.count(MODEL_WIDTH)?;
        if width != of.dim {
            let reason = format!("{width}, but rows of the model have {} values", of.dim);
            return Err(hyper.wrong(MODEL_WIDTH, reason));
        }
        let vocab = hyper.vocab(weights, dim)?;
        if vocab != of.vocab {
            let reason = format!("{vocab} tokens, but the model has {}", of.vocab);
            return Err(hyper.wrong("vocab_size", reason));
        }
        let decoder = Decoder {
            vocab,
            dim,
            norm: GEMMA4_ASSISTANT.norm(hyper.norm_eps()?),
            arrangement: Arrangement::PreAndPostNorm,
            feed_forward_norm: GEMMA4_ASSISTANT.feed_forward_norm,
            ..Decoder::default()
        };
        let own_output = optional_weight(weights, OUTPUT)?.map(|_| OUTPUT);
        let output = own_output.unwrap_or(TOKEN_EMBEDDING);
        Ok(DraftHead {
            layers: layers(&hyper, dim, weights, of)?,
            embedding: TOKEN_EMBEDDING.to_owned(),
            last_norm: format!("{OWN_HEAD}output_norm"),
            output_weight: format!("{OWN_HEAD}{output}"),
            input: DraftInput::Sharing(Box::new(SharingHead {
                decoder,
                groups: groups(&hyper, weights, vocab)?,
            })),
        })
    }
}

/// Its layers, which attend over the rows of layers of the model.
fn layers(
    hyper: &Hyperparameters<'_>,
    dim: usize,
    weights: &dyn WeightSource,
    of: &LayerRows,
) -> Result<Vec<DecoderLayer>, ModelError> {
    let n_layers = hyper.n_layers()?;
    let mut mixers = GEMMA4_ASSISTANT.mixers(hyper, n_layers, dim, weights)?;
    for (at, mixer) in mixers.iter_mut().enumerate() {
        let Some(attention) = mixer.attention_mut() else {
            continue;
        };
        let wanted = attention.memory();
        let owner = of.owners.iter().rfind(|owner| owner.memory == wanted);
        let Some(owner) = owner else {
            let theirs = of.owners.iter().map(|owner| described(owner.memory));
            let mut theirs: Vec<String> = theirs.collect();
            theirs.sort();
            theirs.dedup();
            let reason = format!(
                "layer {at} attends over {}, but layers of the model have {}",
                described(wanted),
                theirs.join(", or ")
            );
            return Err(hyper.wrong("attention.head_count_kv", reason));
        };
        attention.rows_of = Some(RowsOf::OtherGraph(owner.layer));
        if let Some(factors) = attention.rope.as_mut().and_then(|r| r.factors.as_mut()) {
            *factors = format!("{OWN_HEAD}{factors}");
        }
    }
    let feed_forwards = GEMMA4_ASSISTANT.feed_forwards(hyper, n_layers, weights)?;
    let layer = |(at, (mixer, feed_forward)): (usize, (Mixer, _))| {
        Ok(DecoderLayer {
            mixer,
            feed_forward: Some(feed_forward),
            scale: GEMMA4_ASSISTANT.layer_scale(weights, at)?,
            residual: Residual::Rows,
        })
    };
    let both = mixers.into_iter().zip(feed_forwards).enumerate();
    both.map(layer).collect()
}

fn described(memory: AttentionMemory) -> String {
    let AttentionMemory {
        kv_heads,
        k_dim,
        v_dim,
        window,
    } = memory;
    format!("{kv_heads} heads of {k_dim} and {v_dim} values through {window}")
}

/// The groups of tokens that it chooses from; `None` where it has logits of all.
fn groups(
    hyper: &Hyperparameters<'_>,
    weights: &dyn HeadWeights,
    n_vocab: usize,
) -> Result<Option<TokenGroups>, ModelError> {
    if !hyper.has(N_GROUPS) {
        return Ok(None);
    }
    let (n_groups, n_chosen) = (hyper.count(N_GROUPS)?, hyper.count(N_CHOSEN)?);
    if !n_vocab.is_multiple_of(n_groups) {
        let reason = format!("{n_groups}, which does not divide the {n_vocab} tokens");
        return Err(hyper.wrong(N_GROUPS, reason));
    }
    if n_chosen > n_groups {
        let reason = format!("{n_chosen} of {n_groups} groups");
        return Err(hyper.wrong(N_CHOSEN, reason));
    }
    let wrong = |reason: String| ModelError::Setting {
        key: GROUPED_TOKENS.to_owned(),
        reason,
    };
    let stored = weights
        .integers(GROUPED_TOKENS)
        .map_err(ModelError::Weight)?;
    let Some(stored) = stored else {
        return Err(ModelError::MissingTensor {
            name: GROUPED_TOKENS.to_owned(),
            shape: vec![n_vocab],
        });
    };
    let mut is_named = vec![false; n_vocab];
    let tokens = stored.iter().map(|&token| {
        let at = usize::try_from(token).ok().filter(|&at| at < n_vocab);
        let Some(at) = at else {
            return Err(wrong(format!(
                "token {token}, but the model has {n_vocab} tokens"
            )));
        };
        if std::mem::replace(&mut is_named[at], true) {
            return Err(wrong(format!("token {token} is there twice")));
        }
        Ok(TokenId(u32::try_from(at).unwrap_or(u32::MAX)))
    });
    let tokens: Arc<[TokenId]> = tokens.collect::<Result<_, _>>()?;
    if tokens.len() != n_vocab {
        let n = tokens.len();
        return Err(wrong(format!("{n} tokens, but the model has {n_vocab}")));
    }
    Ok(Some(TokenGroups {
        tokens,
        n_groups,
        n_chosen,
    }))
}
