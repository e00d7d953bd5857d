//! [`CLASSES`]: Phi-3.5 MoE, whose two experts share with near ties (GRIN MoE: Liu et al., arXiv
//! 2409.12136), and whose two sets of rotary divisors have a factor each.

use model_core::hf::{
    ATTENTION_TENSORS, ATTENTION_VECTORS, DECODER_KEYS, EMBEDDING_TENSORS, HfClass, HfConfig,
    INPUT_NORM, Key, Keys, ModelFileError, NORM_BEFORE_FFN, RMS_EPS, RopeKind, RopeSettings, SILU,
    TensorRule, same, window_of_all,
};

use super::LLAMA;
use super::keys::EXPERT_KEYS;
use super::tensors::{MIXTRAL_TENSORS, STARCODER2_NORM_BIASES};

/// The classes of this file: as transformers calls it, and as the published files do.
pub(super) const CLASSES: &[HfClass] = &[
    PHIMOE,
    HfClass {
        name: "PhiMoEForCausalLM",
        ..PHIMOE
    },
];

const PHIMOE: HfClass = HfClass {
    name: "PhimoeForCausalLM",
    architecture: "phimoe",
    keys: &[
        DECODER_KEYS,
        RMS_EPS,
        EXPERT_KEYS,
        &[
            SILU,
            Key::With(window_of_all),
            Key::With(phimoe_rope),
            Key::With(router_jitter),
        ],
    ],
    tensors: &[
        EMBEDDING_TENSORS,
        OUTPUT_BIAS,
        INPUT_NORM,
        ATTENTION_TENSORS,
        ATTENTION_VECTORS,
        NORM_BEFORE_FFN,
        STARCODER2_NORM_BIASES,
        MIXTRAL_TENSORS,
    ],
    defaults: &[
        ("num_key_value_heads", 8),
        ("num_experts_per_tok", 2),
        ("rope_theta", 1_000_000),
    ],
    ..LLAMA
};

const OUTPUT_BIAS: &[TensorRule] = &[same("output.bias", "lm_head.bias")];

/// LongRoPE whose factors on rotated values the config names: one for each set of divisors.
fn phimoe_rope(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let objects = ["rope_parameters", "rope_scaling"];
    let found = objects.into_iter().find(|o| config.value(o).is_some());
    let object = found.unwrap_or("rope_parameters");
    let names = ["short", "long"].map(|set| format!("{object}.{set}_mscale"));
    let wanted = "a number above 0";
    let factor = |key: &str| match config.optional_number(key)? {
        Some(x) if !(x.is_finite() && x > 0.0) => Err(config.wrong(key, wanted)),
        x => Ok(x),
    };
    let factors = (factor(&names[0])?, factor(&names[1])?);
    let rest = config.without(&names[0]).without(&names[1]);
    let settings = RopeSettings::read(&rest, None)?;
    if settings.kind != RopeKind::Plain {
        // The class does not read the key of this name outside.
        config.count(&format!("{object}.original_max_position_embeddings"))?;
    }
    settings.write(&rest, keys)?;
    match (settings.kind, factors) {
        // Without divisors transformers takes no factors, and without factors the usual one.
        (RopeKind::Plain, _) | (RopeKind::LongRope { .. }, (None, None)) => Ok(()),
        (RopeKind::LongRope { .. }, (Some(short), Some(long))) => {
            keys.set("rope.scaling.attn_factor", long as f32);
            if short != long {
                keys.set("rope.scaling.attn_factor_short", short as f32);
            }
            Ok(())
        }
        (RopeKind::LongRope { .. }, (None, _)) => Err(config.missing(&names[0], wanted)),
        (RopeKind::LongRope { .. }, (_, None)) => Err(config.missing(&names[1], wanted)),
        _ => {
            let key = [format!("{object}.rope_type"), format!("{object}.type")];
            let [kind, older] = key;
            let key = match config.value(&kind) {
                Some(_) => kind,
                None => older,
            };
            Err(config.wrong(&key, "default or longrope"))
        }
    }
}

/// The distance within which experts share. It is no noise at inference, despite its name.
fn router_jitter(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let key = "router_jitter_noise";
    match config.optional_number(key)?.unwrap_or(0.01) {
        jitter if jitter >= 0.0 && jitter.is_finite() => {
            keys.set("expert_router_jitter", jitter as f32);
            Ok(())
        }
        _ => Err(config.wrong(key, "a number of at least 0")),
    }
}
