//! DeBERTa v2 and v3 (He et al., arXiv 2006.03654 and 2111.09543): scores of queries with keys of
//! distances, and of keys with queries of distances.
//!
//! The files have one row for each bucket of distances; a model has what its layers' projections
//! make of these, which does not depend on any text.

use kv_block::BlockFormat;
use kv_graph::DistanceBuckets;
use kv_graph::weights::{Weight, WeightError, WeightInfo, WeightSource};
use model_core::hf::{
    FixedValue, HfClass, HfConfig, HfWeights, Key, Keys, ModelFileError, SIZE_KEYS, TensorRule,
    in_layers, same,
};

use super::bert::FEED_FORWARD;
use super::{LAYER_NORM_EPS, NOT_CAUSAL, RANK, activation, as_u32};
use crate::read::MAX_DISTANCE;

/// The classes of this file.
pub(super) const CLASSES: &[HfClass] = &[
    DEBERTA,
    HfClass {
        name: "DebertaV2ForMaskedLM",
        ..DEBERTA
    },
    HfClass {
        name: "DebertaV2ForSequenceClassification",
        keys: &[SIZE_KEYS, DEBERTA_KEYS, RANK, HEAD_KEYS],
        tensors: &[
            DEBERTA_INPUT,
            DEBERTA_ATTENTION,
            DEBERTA_FEED_FORWARD,
            DEBERTA_SCORES,
        ],
        unused: &["deberta.embeddings.position_ids"],
        ..DEBERTA
    },
];

const DEBERTA: HfClass = HfClass {
    name: "DebertaV2Model",
    architecture: "deberta-v2",
    keys: &[SIZE_KEYS, DEBERTA_KEYS],
    tensors: &[DEBERTA_INPUT, DEBERTA_ATTENTION, DEBERTA_FEED_FORWARD],
    unused: &[
        "embeddings.position_ids",
        "deberta.embeddings.position_ids",
        "cls.predictions.bias",
        "cls.predictions.decoder.weight",
        "cls.predictions.decoder.bias",
        "cls.predictions.transform.dense.weight",
        "cls.predictions.transform.dense.bias",
        "cls.predictions.transform.LayerNorm.weight",
        "cls.predictions.transform.LayerNorm.bias",
        "lm_predictions.lm_head.bias",
        "lm_predictions.lm_head.dense.weight",
        "lm_predictions.lm_head.dense.bias",
        "lm_predictions.lm_head.LayerNorm.weight",
        "lm_predictions.lm_head.LayerNorm.bias",
        "mask_predictions.classifier.weight",
        "mask_predictions.classifier.bias",
        "mask_predictions.dense.weight",
        "mask_predictions.dense.bias",
        "mask_predictions.LayerNorm.weight",
        "mask_predictions.LayerNorm.bias",
    ],
    body: "deberta.",
    derive: Some(derive),
    ..HfClass::EMPTY
};

const DEBERTA_KEYS: &[Key] = &[
    LAYER_NORM_EPS,
    Key::Only {
        from: "relative_attention",
        is: FixedValue::StatedFlag(true),
    },
    Key::Only {
        from: "position_biased_input",
        is: FixedValue::StatedFlag(false),
    },
    Key::With(|config, _| projections(config).map(drop)),
    Key::Only {
        from: "is_decoder",
        is: FixedValue::Flag(false),
    },
    NOT_CAUSAL,
    Key::With(|config, keys| activation(config, keys, "hidden_act")),
    Key::With(both_directions),
    Key::With(without_more),
    Key::With(buckets),
];

/// A head like that of the published rerankers.
const HEAD_KEYS: &[Key] = &[
    Key::Only {
        from: "pooler_hidden_act",
        is: FixedValue::Text(&["gelu"]),
    },
    Key::With(|config, _| {
        let key = "pooler_hidden_size";
        match config.optional_count(key)? {
            Some(found) if found != config.count("hidden_size")? => {
                Err(config.wrong(key, "'hidden_size'"))
            }
            _ => Ok(()),
        }
    }),
];

/// Keys and queries of distances both take part, so scores have three terms.
fn both_directions(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let key = "pos_att_type";
    let wanted = "a list of c2p and p2c";
    // Old files have one text.
    let listed = match config.value(key) {
        Some(value) if value.is_string() => config
            .optional_text(key)?
            .map(|text| text.split('|').collect()),
        _ => config.optional_texts(key)?,
    };
    match listed {
        Some(mut kinds) => {
            kinds.sort_unstable();
            if kinds != ["c2p", "p2c"] {
                return Err(config.wrong(key, wanted));
            }
        }
        None => return Err(config.missing(key, wanted)),
    }
    keys.set("attention.scale", score_scale(config)? as f32);
    Ok(())
}

/// The matrices that make keys and queries of rows of buckets.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Projections {
    /// Those that make keys and queries of tokens.
    Shared,
    /// Their own, as transformers has it where the config does not say.
    Own,
}

fn projections(config: &HfConfig) -> Result<Projections, ModelFileError> {
    Ok(match config.optional_flag("share_att_key")? {
        Some(true) => Projections::Shared,
        Some(false) | None => Projections::Own,
    })
}

fn head_dim(config: &HfConfig) -> Result<usize, ModelFileError> {
    Ok(config.count("hidden_size")? / config.count("num_attention_heads")?)
}

/// The factor on each of the three terms of a score.
fn score_scale(config: &HfConfig) -> Result<f64, ModelFileError> {
    Ok((3.0 * head_dim(config)? as f64).sqrt().recip())
}

/// Refuses parts of some models that this architecture has not.
fn without_more(config: &HfConfig, _: &mut Keys) -> Result<(), ModelFileError> {
    for key in ["conv_kernel_size", "type_vocab_size"] {
        match config.optional_number(key)? {
            None | Some(0.0) => {}
            Some(_) => return Err(config.wrong(key, "0")),
        }
    }
    let key = "embedding_size";
    match config.optional_count(key)? {
        Some(found) if found != config.count("hidden_size")? => {
            Err(config.wrong(key, "'hidden_size'"))
        }
        _ => Ok(()),
    }
}

/// The distance at which the last bucket begins.
fn max_distance(config: &HfConfig) -> Result<usize, ModelFileError> {
    match config.optional_number("max_relative_positions")? {
        Some(n) if n >= 1.0 => config.count("max_relative_positions"),
        _ => config.count("max_position_embeddings"),
    }
}

/// The sharing of buckets by distances.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Spread {
    Logarithm,
    Single,
}

/// Buckets of either direction.
fn span(config: &HfConfig) -> Result<(usize, Spread), ModelFileError> {
    match config.optional_number("position_buckets")? {
        Some(n) if n >= 1.0 => Ok((config.count("position_buckets")?, Spread::Logarithm)),
        _ => Ok((max_distance(config)?, Spread::Single)),
    }
}

/// The buckets that distances share; without that, each has its own.
fn buckets(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let (span, spread) = span(config)?;
    if spread == Spread::Single {
        return Ok(());
    }
    let max_distance = max_distance(config)?;
    if !(DistanceBuckets::Signed { span, max_distance }).is_sound() {
        let key = match config.optional_number("max_relative_positions")? {
            Some(n) if n >= 1.0 => "max_relative_positions",
            _ => "max_position_embeddings",
        };
        let wanted = format!("a distance that fits {span} buckets ('position_buckets')");
        return Err(config.wrong(key, wanted));
    }
    keys.set(MAX_DISTANCE, as_u32(max_distance));
    Ok(())
}

/// The rows of the buckets, and their norm.
const ROWS: &str = "rel_embd.weight";
const NORM: [&str; 2] = ["rel_embd_norm.weight", "rel_embd_norm.bias"];

/// The beginning of the names of matrices of the buckets' own, before `k` and `q`.
const OWN_MATRIX: &str = "attn_rel_proj_";

/// Adds the keys and queries of the buckets of every layer.
fn derive(config: &HfConfig, weights: &mut HfWeights) -> Result<(), ModelFileError> {
    let (n_layers, dim) = (
        config.count("num_hidden_layers")?,
        config.count("hidden_size")?,
    );
    let n_buckets = 2 * span(config)?.0;
    let found = weights.describe(ROWS).map(|info| info.shape);
    if found.as_deref() != Ok(&[n_buckets, dim]) {
        return Err(ModelFileError::Tensor {
            name: weights.name_in_files(ROWS).unwrap_or_default(),
            reason: format!("it is missing or has another shape than [{n_buckets}, {dim}]"),
        });
    }
    let eps = match config.optional_text("norm_rel_ebd")? {
        Some("layer_norm") => Some(config.number("layer_norm_eps")?),
        None | Some("none") => None,
        Some(_) => return Err(config.wrong("norm_rel_ebd", "layer_norm or none")),
    };
    let projection = Projection {
        n_heads: config.count("num_attention_heads")?,
        scale: score_scale(config)? as f32,
        eps,
    };
    let shape = vec![projection.n_heads, n_buckets, head_dim(config)?];
    let format = BlockFormat::F32;
    let projections = projections(config)?;
    let matrix = match projections {
        Projections::Own => OWN_MATRIX,
        Projections::Shared => "attn_",
    };
    for layer in 0..n_layers {
        for kind in ["k", "q"] {
            let name = format!("blk.{layer}.attn_rel_{kind}.weight");
            let of = format!("blk.{layer}.{matrix}{kind}");
            for part in ["weight", "bias"] {
                let own = format!("blk.{layer}.{OWN_MATRIX}{kind}.{part}");
                check_own(weights, &own, projections)?;
                weights.hide(&own);
            }
            let info = WeightInfo {
                shape: shape.clone(),
                format,
            };
            let (made, shape) = (name.clone(), shape.clone());
            weights.derive(&name, info, move |weights| {
                let values = projection.apply(weights, &of)?;
                Weight::from_f32(&made, shape.clone(), &values)
            });
        }
    }
    let used_up = [ROWS].into_iter().chain(NORM);
    used_up.for_each(|name| weights.hide(name));
    Ok(())
}

/// Checks that a tensor of the buckets' own is there where it is wanted, and nowhere else.
fn check_own(
    weights: &HfWeights,
    own: &str,
    projections: Projections,
) -> Result<(), ModelFileError> {
    let reason = match (weights.describe(own), projections) {
        (Ok(_), Projections::Own) | (Err(WeightError::Missing { .. }), Projections::Shared) => {
            return Ok(());
        }
        (Ok(_), Projections::Shared) => "it is there, but 'share_att_key' is true".to_owned(),
        (Err(WeightError::Missing { .. }), Projections::Own) => {
            "it is missing, but 'share_att_key' is not true".to_owned()
        }
        (Err(error), _) => error.to_string(),
    };
    let name = weights.name_in_files(own).unwrap_or_default();
    Err(ModelFileError::Tensor { name, reason })
}

/// The projection of rows of buckets to keys or queries.
#[derive(Clone, Copy)]
struct Projection {
    n_heads: usize,
    scale: f32,
    /// Of the rows' norm, where they are normed.
    eps: Option<f64>,
}

impl Projection {
    /// The rows of all buckets times a layer's matrix, scaled as scores are:
    /// `[heads, buckets, k_dim]`.
    fn apply(self, weights: &HfWeights, of: &str) -> Result<Vec<f32>, WeightError> {
        let matrix = weights.require(&format!("{of}.weight"))?.to_f32();
        let bias = weights.require(&format!("{of}.bias"))?.to_f32();
        let rows = self.rows(weights, bias.len())?;
        let dim = bias.len().max(1);
        let n_rows = rows.len() / dim;
        let head_dim = (dim / self.n_heads.max(1)).max(1);
        let mut out = vec![0.0; n_rows * dim];
        for (at, row) in rows.chunks_exact(dim).enumerate() {
            for (i, (weights, bias)) in matrix.chunks_exact(dim).zip(&bias).enumerate() {
                let place = (i / head_dim * n_rows + at) * head_dim + i % head_dim;
                if let Some(to) = out.get_mut(place) {
                    *to = (dot(weights, row) + bias) * self.scale;
                }
            }
        }
        Ok(out)
    }

    /// The rows, normed where they are.
    fn rows(self, weights: &HfWeights, dim: usize) -> Result<Vec<f32>, WeightError> {
        let mut rows = weights.require(ROWS)?.to_f32();
        let Some(eps) = self.eps else {
            return Ok(rows);
        };
        let [gain, bias] = NORM.map(|name| weights.require(name).map(|w| w.to_f32()));
        let (gain, bias) = (gain?, bias?);
        for row in rows.chunks_exact_mut(dim.max(1)) {
            let n = row.len() as f64;
            let mean = row.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
            let squares = row.iter().map(|&x| (f64::from(x) - mean).powi(2));
            let factor = (squares.sum::<f64>() / n + eps).sqrt().recip();
            for ((x, gain), bias) in row.iter_mut().zip(&gain).zip(&bias) {
                *x = ((f64::from(*x) - mean) * factor) as f32 * gain + bias;
            }
        }
        Ok(rows)
    }
}

/// A dot product by several sums, which a compiler keeps in one register.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let (a, b) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut sums = [0.0f32; LANES];
    for (a, b) in a.0.iter().zip(b.0) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    let rest: f32 = a.1.iter().zip(b.1).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

const DEBERTA_INPUT: &[TensorRule] = &[
    same(
        "token_embd.weight",
        "deberta.embeddings.word_embeddings.weight",
    ),
    same(
        "token_embd_norm.weight",
        "deberta.embeddings.LayerNorm.weight",
    ),
    same("token_embd_norm.bias", "deberta.embeddings.LayerNorm.bias"),
    same(ROWS, "deberta.encoder.rel_embeddings.weight"),
    same(NORM[0], "deberta.encoder.LayerNorm.weight"),
    same(NORM[1], "deberta.encoder.LayerNorm.bias"),
];

const DEBERTA_ATTENTION: &[TensorRule] = &in_layers(
    "deberta.encoder.layer.{l}.attention.",
    [
        same("attn_q.weight", "self.query_proj.weight"),
        same("attn_q.bias", "self.query_proj.bias"),
        same("attn_k.weight", "self.key_proj.weight"),
        same("attn_k.bias", "self.key_proj.bias"),
        same("attn_rel_proj_k.weight", "self.pos_key_proj.weight"),
        same("attn_rel_proj_k.bias", "self.pos_key_proj.bias"),
        same("attn_rel_proj_q.weight", "self.pos_query_proj.weight"),
        same("attn_rel_proj_q.bias", "self.pos_query_proj.bias"),
        same("attn_v.weight", "self.value_proj.weight"),
        same("attn_v.bias", "self.value_proj.bias"),
        same("attn_output.weight", "output.dense.weight"),
        same("attn_output.bias", "output.dense.bias"),
        same("attn_output_norm.weight", "output.LayerNorm.weight"),
        same("attn_output_norm.bias", "output.LayerNorm.bias"),
    ],
);

const DEBERTA_FEED_FORWARD: &[TensorRule] = &in_layers("deberta.encoder.layer.{l}.", FEED_FORWARD);

/// The pooler and the scores.
const DEBERTA_SCORES: &[TensorRule] = &[
    same("cls.weight", "pooler.dense.weight"),
    same("cls.bias", "pooler.dense.bias"),
    same("cls.output.weight", "classifier.weight"),
    same("cls.output.bias", "classifier.bias"),
];
