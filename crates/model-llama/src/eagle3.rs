//! [`Eagle3`]: heads of EAGLE-3 (Li et al., arXiv 2503.01840), which are files of their own.
//!
//! Their one layer is Llama's, but for its input. Keys are those of GGUF files of `eagle3`. Knows
//! no model that they draft for.

use std::sync::Arc;

use kv_core::TokenId;
use kv_graph::weights::WeightSource;
use model_core::architecture::{HeadArchitecture, LayerRows, ModelError};
use model_core::blocks::{
    BeforeFusion, DecoderLayer, DraftHead, DraftInput, FusedHead, HeadResidual, LayerScale, Mixer,
    OUTPUT, OWN_HEAD, Residual, TOKEN_EMBEDDING,
};
use model_core::gguf::Metadata;
use model_core::head_file::HeadWeights;
use model_core::hyperparameters::{Hyperparameters, optional_weight};

use crate::family::EAGLE3_LAYER;

/// Key of the layers whose rows it reads.
pub(crate) const TARGET_LAYERS: &str = "target_layers";
/// Key of the width of their rows.
pub(crate) const TARGET_WIDTH: &str = "target_hidden_size";
/// Key of heads whose attention adds to normed rows.
pub(crate) const NORM_BEFORE_RESIDUAL: &str = "norm_before_residual";
/// Key of heads that norm the rows of layers before they are fused.
pub(crate) const NORM_BEFORE_FC: &str = "norm_before_fc";
/// Key of our own: the number of tokens that it knows.
pub(crate) const DRAFT_VOCAB: &str = "draft_vocab_size";
/// Key of our own: true where the table of tokens says how far each is behind its number.
pub(crate) const TOKENS_BY_DISTANCE: &str = "d2t_by_distance";
/// Tensor of the model's tokens, by those of the head.
pub(crate) const TOKENS: &str = "d2t";

/// Heads of EAGLE-3.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Eagle3;

impl HeadArchitecture for Eagle3 {
    fn name(&self) -> &'static str {
        EAGLE3_LAYER.name
    }

    fn head(
        &self,
        metadata: &Metadata,
        weights: &dyn HeadWeights,
        of: &LayerRows,
    ) -> Result<DraftHead, ModelError> {
        let hyper = Hyperparameters::new(metadata, EAGLE3_LAYER.name);
        let dim = hyper.count("embedding_length")?;
        let n_layers = hyper.n_layers()?;
        if n_layers != 1 {
            let reason = format!("{n_layers} layers; heads of EAGLE-3 have 1");
            return Err(hyper.wrong("block_count", reason));
        }
        check_vocabulary(&hyper, metadata, of)?;
        let layer = layer(&hyper, dim, weights)?;
        let tokens = tokens(&hyper, weights, of.vocab)?;
        let vocab = tokens.as_ref().map_or(of.vocab, |tokens| tokens.len());
        // Without a matrix of its own it takes the model's, which has rows of as many values and as
        // many tokens as the model.
        let matrix =
            |name: &str, n_tokens: usize, of_model: &str| match optional_weight(weights, name)? {
                Some(_) => Ok(format!("{OWN_HEAD}{name}")),
                None if dim == of.dim && n_tokens == of.vocab => Ok(of_model.to_owned()),
                None => Err(ModelError::MissingTensor {
                    name: name.to_owned(),
                    shape: vec![n_tokens, dim],
                }),
            };
        let embedding = matrix(TOKEN_EMBEDDING, of.vocab, TOKEN_EMBEDDING)?;
        let output_weight = matrix(OUTPUT, vocab, &of.output_weight)?;
        let fused = FusedHead {
            layers: target_layers(&hyper, of)?,
            dim,
            vocab,
            tokens,
            norm: EAGLE3_LAYER.norm(hyper.norm_eps()?),
            before: match hyper.optional::<bool>(NORM_BEFORE_FC)? {
                Some(true) => BeforeFusion::Normed,
                Some(false) | None => BeforeFusion::Nothing,
            },
            residual: match hyper.optional::<bool>(NORM_BEFORE_RESIDUAL)? {
                Some(true) => HeadResidual::Normed,
                Some(false) | None => HeadResidual::Fused,
            },
        };
        Ok(DraftHead {
            layers: vec![layer],
            embedding,
            last_norm: format!("{OWN_HEAD}output_norm"),
            output_weight,
            input: DraftInput::Fused(fused),
        })
    }
}

/// Its one layer.
fn layer(
    hyper: &Hyperparameters<'_>,
    dim: usize,
    weights: &dyn WeightSource,
) -> Result<DecoderLayer, ModelError> {
    let mut mixers = EAGLE3_LAYER.mixers(hyper, 1, dim, weights)?;
    let feed_forward = EAGLE3_LAYER.feed_forwards(hyper, 1, weights)?.pop();
    if let Some(attention) = mixers.first_mut().and_then(Mixer::attention_mut) {
        // It reads two concatenated rows.
        attention.out_dim = Some(dim);
        if let Some(factors) = attention.rope.as_mut().and_then(|r| r.factors.as_mut()) {
            *factors = format!("{OWN_HEAD}{factors}");
        }
    }
    let no_layer = || hyper.wrong("block_count", "it has no layer".to_owned());
    Ok(DecoderLayer {
        mixer: mixers.pop().ok_or_else(no_layer)?,
        feed_forward,
        scale: LayerScale::None,
        residual: Residual::Rows,
    })
}

/// The layers whose rows it reads: those that its file names, or one at the beginning, one in the
/// middle and one at the end.
fn target_layers(hyper: &Hyperparameters<'_>, of: &LayerRows) -> Result<[usize; 3], ModelError> {
    let width = hyper.optional::<u32>(TARGET_WIDTH)?;
    if let Some(width) = width.filter(|&width| width as usize != of.dim) {
        let reason = format!("{width}, but rows of the model have {} values", of.dim);
        return Err(hyper.wrong(TARGET_WIDTH, reason));
    }
    let n = of.n_layers;
    let named = if hyper.has(TARGET_LAYERS) {
        let named = hyper.numbers(TARGET_LAYERS, 3)?;
        named.into_iter().map(|layer| layer as usize).collect()
    } else {
        vec![2, n / 2, n.saturating_sub(3)]
    };
    match named.as_slice().try_into() {
        Ok(layers) if named.iter().all(|&layer| layer <= n) => Ok(layers),
        _ => {
            let reason = format!("{named:?}, but the model has {n} layers");
            Err(hyper.wrong(TARGET_LAYERS, reason))
        }
    }
}

/// That it was made for as many tokens as the model has.
fn check_vocabulary(
    hyper: &Hyperparameters<'_>,
    metadata: &Metadata,
    of: &LayerRows,
) -> Result<(), ModelError> {
    let listed = metadata.optional::<&[String]>("tokenizer.ggml.tokens")?;
    let n_tokens = match hyper.optional::<u32>("vocab_size")? {
        Some(n) => Some(n as usize),
        None => listed.map(<[String]>::len),
    };
    match n_tokens {
        Some(n) if n != of.vocab => {
            let reason = format!("{n} tokens, but the model has {}", of.vocab);
            Err(hyper.wrong("vocab_size", reason))
        }
        _ => Ok(()),
    }
}

/// The model's names of the tokens that it knows; `None` where it knows all of them.
fn tokens(
    hyper: &Hyperparameters<'_>,
    weights: &dyn HeadWeights,
    n_vocab: usize,
) -> Result<Option<Arc<[TokenId]>>, ModelError> {
    let by_distance = hyper.optional::<bool>(TOKENS_BY_DISTANCE)? == Some(true);
    let n_known = hyper.optional::<u32>(DRAFT_VOCAB)?.map(|n| n as usize);
    let Some(stored) = weights.integers(TOKENS).map_err(ModelError::Weight)? else {
        return match n_known.filter(|&n| n != n_vocab) {
            None => Ok(None),
            Some(n) => Err(ModelError::MissingTensor {
                name: TOKENS.to_owned(),
                shape: vec![n],
            }),
        };
    };
    if let Some(n) = n_known.filter(|&n| n != stored.len()) {
        let reason = format!("{n} tokens, but '{TOKENS}' names {}", stored.len());
        return Err(hyper.wrong(DRAFT_VOCAB, reason));
    }
    let wrong = |reason: String| ModelError::Setting {
        key: TOKENS.to_owned(),
        reason,
    };
    let mut is_known = vec![false; n_vocab];
    let named = (0i64..).zip(&stored).map(|(number, &stored)| {
        let start = if by_distance { number } else { 0 };
        let token = start.saturating_add(stored);
        let at = usize::try_from(token).ok().filter(|&at| at < n_vocab);
        let Some(at) = at else {
            let reason = format!("token {number} is {token}, but the model has {n_vocab} tokens");
            return Err(wrong(reason));
        };
        if std::mem::replace(&mut is_known[at], true) {
            return Err(wrong(format!("token {token} is there twice")));
        }
        Ok(TokenId(u32::try_from(at).unwrap_or(u32::MAX)))
    });
    let named: Vec<TokenId> = named.collect::<Result<_, _>>()?;
    if named.is_empty() {
        return Err(wrong("it names no token".to_owned()));
    }
    Ok(Some(named.into()))
}
