//! Reads the sizes of latent attention.
//!
//! Invariant: heads are those of the model, not those of the form that its files describe for
//! attention over latents (one key/value head as wide as a row), which only has to agree. Knows no
//! member by name.

use kv_core::Window;
use kv_graph::IndexSpec;
use kv_graph::rope::{RopeScaling, RopeSpec};
use kv_graph::weights::WeightSource;
use model_core::architecture::ModelError;
use model_core::blocks::{IndexerBlock, LatentAttentionBlock};
use model_core::hyperparameters::{Hyperparameters, optional_weight};

use crate::member::{AttentionForm, LlamaLike};

/// Added to the variance of an indexer's keys; files have no key for it.
const INDEX_NORM_EPS: f32 = 1e-6;

/// Key of the `eps` of the norms of latents, where it is not that of others.
pub(crate) const LATENT_EPS: &str = "attention.latent_norm_rms_epsilon";

impl LlamaLike {
    /// The attention of every layer.
    pub(crate) fn latent_attention(
        &self,
        hyper: &Hyperparameters<'_>,
        weights: &dyn WeightSource,
    ) -> Result<LatentAttentionBlock, ModelError> {
        let heads = latent_heads(hyper, weights)?;
        let k_dim = heads.k_dim;
        let shared_dim = hyper.count("rope.dimension_count")?;
        let Some(plain_dim) = k_dim.checked_sub(shared_dim).filter(|&n| n > 0) else {
            let reason = format!("{shared_dim} rotated values of {k_dim}; some must not rotate");
            return Err(hyper.wrong("rope.dimension_count", reason));
        };
        let query_rank = match hyper.optional::<u32>("attention.q_lora_rank")? {
            None | Some(0) => None,
            Some(rank) => Some(rank as usize),
        };
        let rank = hyper.count("attention.kv_lora_rank")?;
        let rows = match heads.described {
            HeadForm::Rows => [1, rank + shared_dim, rank],
            HeadForm::Heads => [hyper.count("attention.head_count")?, k_dim, heads.v_dim],
        };
        check_rows(hyper, rows)?;
        let (rope, stretch) = self.latent_rope(hyper, shared_dim, weights)?;
        let indexer = match self.attention {
            AttentionForm::IndexedLatents { rope: style } => {
                let rope = RopeSpec {
                    style,
                    ..rope.clone()
                };
                Some(indexer(hyper, rope, query_rank)?)
            }
            _ => None,
        };
        let scale = hyper.positive("attention.scale")?;
        Ok(LatentAttentionBlock {
            n_heads: hyper.count("attention.head_count")?,
            plain_dim,
            shared_dim,
            v_dim: heads.v_dim,
            rank,
            query_rank,
            scale: scale.unwrap_or_else(|| stretch * stretch / (k_dim as f64).sqrt()) as f32,
            norm_eps: match hyper.positive(LATENT_EPS)? {
                Some(own) => own as f32,
                None => hyper.norm_eps()?,
            },
            rope: Some(rope),
            query_scale: self.query_scale(hyper)?,
            window: Window::Full,
            indexer,
        })
    }

    /// The rotation, and the factor on queries and on keys by which scores make up for a stretched
    /// context.
    ///
    /// YaRN has a factor on rotated values and one on all scores (`mscale` and `mscale_all_dim` of
    /// the published settings). GGUF files have a tenth of the latter in `yarn_log_multiplier`, and
    /// the former in `attn_factor`, 1 where there is none.
    fn latent_rope(
        &self,
        hyper: &Hyperparameters<'_>,
        n_rot: usize,
        weights: &dyn WeightSource,
    ) -> Result<(RopeSpec, f64), ModelError> {
        let mut rope = hyper.rope(self.rope, n_rot, weights)?;
        let RopeScaling::Yarn {
            factor,
            attention_factor,
            ..
        } = &mut rope.scaling
        else {
            return Ok((rope, 1.0));
        };
        *attention_factor = hyper.positive("rope.scaling.attn_factor")?.unwrap_or(1.0);
        let key = "rope.scaling.yarn_log_multiplier";
        let stretch = match hyper.optional::<f32>(key)? {
            Some(by) if by.is_finite() && by >= 0.0 => 1.0 + f64::from(by) * factor.ln(),
            Some(by) => return Err(hyper.wrong(key, format!("{by} is not possible"))),
            None => {
                let reason = "is missing; a stretched context needs it".to_owned();
                return Err(hyper.wrong(key, reason));
            }
        };
        Ok((rope, stretch))
    }
}

/// That every layer has an indexer of its own: newer GLM-5s have layers that attend over the choice
/// of an earlier one.
fn refuse_shared_choices(hyper: &Hyperparameters<'_>) -> Result<(), ModelError> {
    let key = "attention.indexer.types";
    let n_heads = hyper.optional::<u32>("nextn_predict_layers")?.unwrap_or(0) as usize;
    let n_layers = hyper.n_layers()?.saturating_sub(n_heads);
    let types = hyper.optional_flags(key, n_layers)?;
    match types.and_then(|types| types.iter().position(|&own| !own)) {
        None => Ok(()),
        Some(layer) => {
            let reason = format!(
                "layer {layer} takes the rows that an earlier layer chose, which is not supported"
            );
            Err(hyper.wrong(key, reason))
        }
    }
}

/// The indexer of every layer, whose heads begin with what rotates.
fn indexer(
    hyper: &Hyperparameters<'_>,
    rope: RopeSpec,
    query_rank: Option<usize>,
) -> Result<IndexerBlock, ModelError> {
    if query_rank.is_none() {
        let reason = "is missing; an indexer's queries are made of the latents of queries";
        return Err(hyper.wrong("attention.q_lora_rank", reason.to_owned()));
    }
    refuse_shared_choices(hyper)?;
    let dim = hyper.count("attention.indexer.key_length")?;
    if dim < rope.n_rot {
        let reason = format!("{dim}; it must be at least {}, which rotate", rope.n_rot);
        return Err(hyper.wrong("attention.indexer.key_length", reason));
    }
    Ok(IndexerBlock {
        index: IndexSpec {
            n_heads: hyper.count("attention.indexer.head_count")?,
            dim,
            top_k: hyper.count("attention.indexer.top_k")?,
        },
        rope: Some(rope),
        norm_eps: INDEX_NORM_EPS,
    })
}

/// The heads that a file's `attention.head_count_kv`, `attention.key_length` and
/// `attention.value_length` are about.
#[derive(Clone, Copy, PartialEq, Eq)]
enum HeadForm {
    /// The rows that attention over latents reads.
    Rows,
    /// The heads that latents are made into: in files of MiniCPM 3, and in those of DeepSeek from
    /// before llama.cpp divided the matrix of keys and values in two (April 2025).
    Heads,
}

/// Sizes of the heads of a model.
struct LatentHeadSizes {
    k_dim: usize,
    v_dim: usize,
    described: HeadForm,
}

fn latent_heads(
    hyper: &Hyperparameters<'_>,
    weights: &dyn WeightSource,
) -> Result<LatentHeadSizes, ModelError> {
    let key = "attention.key_length_mla";
    if hyper.has(key) {
        return Ok(LatentHeadSizes {
            k_dim: hyper.count(key)?,
            v_dim: hyper.count("attention.value_length_mla")?,
            described: HeadForm::Rows,
        });
    }
    let n_heads = hyper.count("attention.head_count")?;
    let described = hyper.optional::<u32>("attention.head_count_kv")?;
    let values = optional_weight(weights, "blk.0.attn_v_b.weight")?;
    // One head that all share is a row of latents.
    if let Some(values) = values.filter(|_| n_heads == 1 || described != Some(1)) {
        return Ok(LatentHeadSizes {
            k_dim: hyper.count("attention.key_length")?,
            v_dim: values.shape.get(1).copied().unwrap_or(0),
            described: HeadForm::Heads,
        });
    }
    let reason = match optional_weight(weights, "blk.0.attn_kv_b.weight")? {
        None => "is missing".to_owned(),
        Some(both) => {
            format!(
                "is missing, and 'attn_kv_b' with shape {:?} holds no keys and values of {n_heads} \
                 heads: convert the model again",
                both.shape
            )
        }
    };
    Err(hyper.wrong(key, reason))
}

/// That the file says nothing else of its rows, or of its heads: their number, and the values of
/// their keys and values.
fn check_rows(
    hyper: &Hyperparameters<'_>,
    [n_heads, k_dim, v_dim]: [usize; 3],
) -> Result<(), ModelError> {
    for (key, wanted) in [
        ("attention.head_count_kv", n_heads),
        ("attention.key_length", k_dim),
        ("attention.value_length", v_dim),
    ] {
        let found = hyper.optional::<u32>(key)?;
        if let Some(found) = found.filter(|&n| n as usize != wanted) {
            let reason = format!("{found}; with these latents it must be {wanted}");
            return Err(hyper.wrong(key, reason));
        }
    }
    Ok(())
}
