//! EmbeddingGemma (Schechter Vera et al., arXiv 2509.20354): Gemma 3 whose tokens see later ones.

use model_core::hf::{
    ATTENTION_TENSORS, ClassWhen, FixedValue, GATED_TENSORS, GEMMA_NORMS, HfClass, HfConfig, Key,
    Keys, ModelFileError, PLUS_ONE, RMS_EPS, SIZE_KEYS, TensorRule, gemma_score_scale,
    gemma3_windows, head_dim, same, with,
};

use super::{NOT_CAUSAL, activation};

/// The classes of this file.
pub(super) const CLASSES: &[HfClass] = &[HfClass {
    name: "Gemma3TextModel",
    when: ClassWhen::Flagged("use_bidirectional_attention"),
    architecture: "gemma-embedding",
    keys: &[SIZE_KEYS, RMS_EPS, GEMMA_KEYS],
    tensors: &[GEMMA_INPUT, GEMMA_NORMS, ATTENTION_TENSORS, GATED_TENSORS],
    defaults: &[
        ("head_dim", 256),
        ("num_key_value_heads", 4),
        ("query_pre_attn_scalar", 256),
        ("sliding_window", 4096),
        ("rope_theta", 1_000_000),
        ("rope_local_base_freq", 10_000),
    ],
    ..HfClass::EMPTY
}];

const GEMMA_KEYS: &[Key] = &[
    Key::Only {
        from: "attention_bias",
        is: FixedValue::Flag(false),
    },
    NOT_CAUSAL,
    Key::With(|config, keys| activation(config, keys, "hidden_activation")),
    Key::With(no_soft_caps),
    Key::With(gemma_score_scale),
    Key::With(gemma3_windows),
    Key::With(bases),
];

fn no_soft_caps(config: &HfConfig, _: &mut Keys) -> Result<(), ModelFileError> {
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if config.optional_number(key)?.is_some() {
            return Err(config.wrong(key, "null"));
        }
    }
    Ok(())
}

/// Two bases, which older files have under names of their own.
fn bases(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    if !head_dim(config)?.is_multiple_of(2) {
        return Err(config.wrong("head_dim", "an even number"));
    }
    super::two_bases(config, keys, ["rope_theta", "rope_local_base_freq"])
}

const GEMMA_INPUT: &[TensorRule] = &[
    same("token_embd.weight", "model.embed_tokens.weight"),
    with("output_norm.weight", "model.norm.weight", PLUS_ONE),
    same("dense_2.weight", "dense_2.linear.weight"),
    same("dense_3.weight", "dense_3.linear.weight"),
];
