//! DeepSeek V2 and V3: keys of `config.json` and tensors.
//!
//! Latents are in GGUF files as one key/value head as wide as a row. Does not know graphs.

use model_core::gguf::Array;
use model_core::hf::{
    FixedValue, GATE_AND_UP_IN_ROWS, GATED, GATED_EXPERTS, HfConfig, Key, Keys, ModelFileError,
    RopeKind, RopeSettings, SILU, TRAINED_LENGTH, TensorRule, TensorStep, VOCAB_SIZE, WIDTH_KEYS,
    groups, in_layers, latent_head_dims, latent_key_rows, latent_value_rows, layer_types, same,
    with,
};

use super::keys::as_u32;
use super::routed::dense_layers;
use crate::latent::LATENT_EPS;

/// Sizes and experts, whatever the version.
const SHARED_KEYS: &[Key] = &[
    Key::All(WIDTH_KEYS),
    TRAINED_LENGTH,
    SILU,
    VOCAB_SIZE,
    Key::Only {
        from: "is_causal",
        is: FixedValue::Flag(true),
    },
    Key::Only {
        from: "attention_bias",
        is: FixedValue::Flag(false),
    },
    Key::Only {
        from: "mlp_bias",
        is: FixedValue::Flag(false),
    },
    Key::With(latents),
    Key::Count {
        to: "expert_count",
        from: "n_routed_experts",
    },
    Key::Count {
        to: "expert_used_count",
        from: "num_experts_per_tok",
    },
    Key::Count {
        to: "expert_feed_forward_length",
        from: "moe_intermediate_size",
    },
    Key::Number {
        to: "expert_weights_scale",
        from: "routed_scaling_factor",
    },
    Key::With(layers),
];

pub(super) const DEEPSEEK_V2_KEYS: &[Key] = &[
    Key::All(SHARED_KEYS),
    Key::With(rope),
    Key::Constant {
        to: "expert_gating_func",
        value: 1,
    },
    Key::Only {
        from: "scoring_func",
        is: FixedValue::Text(&["softmax"]),
    },
    Key::Only {
        from: "norm_topk_prob",
        is: FixedValue::Flag(false),
    },
    Key::With(groups_by_method),
];

pub(super) const DEEPSEEK_V3_KEYS: &[Key] = &[
    Key::All(SHARED_KEYS),
    Key::With(rope),
    Key::Constant {
        to: "expert_gating_func",
        value: 2,
    },
    Key::Only {
        from: "scoring_func",
        is: FixedValue::Text(&["sigmoid"]),
    },
    Key::Only {
        from: "topk_method",
        is: FixedValue::Text(&["noaux_tc"]),
    },
    Key::Only {
        from: "rope_interleave",
        is: FixedValue::Flag(true),
    },
    Key::With(sum_of_weights),
    Key::With(groups),
];

/// The same with indexers, whose queries and keys rotate in halves.
pub(super) const DEEPSEEK_V32_KEYS: &[Key] = &[
    Key::All(DEEPSEEK_V3_KEYS),
    Key::Count {
        to: "attention.indexer.head_count",
        from: "index_n_heads",
    },
    Key::Count {
        to: "attention.indexer.key_length",
        from: "index_head_dim",
    },
    Key::Count {
        to: "attention.indexer.top_k",
        from: "index_topk",
    },
    Key::With(layer_kinds),
];

/// GLM-5: the same, with layers that may have no indexer of their own.
pub(super) const GLM_DSA_KEYS: &[Key] = &[Key::All(DEEPSEEK_V32_KEYS), Key::With(indexers)];

/// Mistral 4: a softmax without groups, and queries that grow with the position.
pub(super) const MISTRAL4_KEYS: &[Key] = &[
    Key::All(SHARED_KEYS),
    Key::With(mistral4_rope),
    Key::Constant {
        to: "expert_gating_func",
        value: 1,
    },
    Key::Only {
        from: "rope_interleave",
        is: FixedValue::Flag(true),
    },
    Key::With(sum_of_weights),
    Key::With(no_groups),
];

/// Heads and latents.
pub(super) fn latents(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let heads = config.count("num_attention_heads")?;
    let key = "num_key_value_heads";
    if config.optional_count(key)?.is_some_and(|n| n != heads) {
        let wanted = format!("'num_attention_heads', which is {heads}");
        return Err(config.wrong(key, wanted));
    }
    let [plain, shared] = latent_head_dims(config)?;
    let rank = config.count("kv_lora_rank")?;
    keys.set("attention.head_count", as_u32(heads));
    keys.set("attention.head_count_kv", 1u32);
    keys.set("attention.key_length", as_u32(rank + shared));
    keys.set("attention.value_length", as_u32(rank));
    keys.set("attention.key_length_mla", as_u32(plain + shared));
    keys.set(
        "attention.value_length_mla",
        as_u32(config.count("v_head_dim")?),
    );
    keys.set("attention.kv_lora_rank", as_u32(rank));
    if let Some(rank) = config.optional_count("q_lora_rank")? {
        keys.set("attention.q_lora_rank", as_u32(rank));
    }
    // The classes have a number for these norms, whatever the config says of others.
    if config.number("rms_norm_eps")? != 1e-6 {
        keys.set(LATENT_EPS, 1e-6f32);
    }
    let key = "qk_head_dim";
    match config.optional_count(key)? {
        Some(own) if own != plain + shared => Err(config.wrong(key, (plain + shared).to_string())),
        _ => Ok(()),
    }
}

/// The rotation, and the factors on rotated values and on scores that YaRN has here.
pub(super) fn rope(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let mut settings = RopeSettings::read(config, None)?;
    let [_, shared] = latent_head_dims(config)?;
    if let Some(head) = config.optional_count("head_dim")? {
        // As transformers rounds it.
        let rotated = (head as f64 * settings.partial) as usize;
        if rotated != shared {
            let wanted = format!("of a size of which {shared} values rotate ('qk_rope_head_dim')");
            return Err(config.wrong("head_dim", wanted));
        }
    }
    if let RopeKind::Yarn {
        factor, attention, ..
    } = &mut settings.kind
    {
        let plain = |scale: f64| 0.1 * scale * factor.ln() + 1.0;
        // Files have the factor on rotated values itself, not its quotient by the formula's.
        *attention = Some(attention.unwrap_or(plain(1.0)) * plain(1.0));
        let path = |object: &str| format!("{object}.mscale_all_dim");
        let all = match config.optional_number(&path("rope_parameters"))? {
            None => config.optional_number(&path("rope_scaling"))?,
            all => all,
        };
        let multiplier = 0.1 * all.unwrap_or(0.0);
        keys.set("rope.scaling.yarn_log_multiplier", multiplier as f32);
    }
    settings.write_rotating(shared, config, keys)
}

/// The same where scores have no factor of their own, and queries one that grows with the position.
fn mistral4_rope(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    rope(&config.without(QUERY_GROWTH), keys)?;
    query_growth(config, keys)
}

/// One group of experts, which is none.
fn no_groups(config: &HfConfig, _: &mut Keys) -> Result<(), ModelFileError> {
    match config.optional_count("n_group")? {
        Some(n) if n != 1 => Err(config.wrong("n_group", "1")),
        _ => Ok(()),
    }
}

/// The layers that are dense; every other one is a mixture.
fn layers(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let key = "moe_layer_freq";
    if config.optional_count(key)?.is_some_and(|n| n != 1) {
        return Err(config.wrong(key, "1"));
    }
    dense_layers(config, keys)?;
    if let Some(n) = config.optional_count("n_shared_experts")? {
        keys.set("expert_shared_count", as_u32(n));
    }
    Ok(())
}

/// The kinds of layers' attention, of which there is one.
fn layer_kinds(config: &HfConfig, _: &mut Keys) -> Result<(), ModelFileError> {
    layer_types(config, &["indexed_attention"]).map(drop)
}

/// The layers with an indexer of their own, which have to be all.
fn indexers(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let key = "indexer_types";
    let Some(types) = config.optional_texts(key)? else {
        // Without the list, every so many layers have one, or those of a pattern.
        let freq = config.optional_count("index_topk_freq")?.unwrap_or(1);
        if freq > 1 || config.value("index_topk_pattern").is_some() {
            return Err(config.missing(key, "a list of \"full\", one for each layer"));
        }
        return Ok(());
    };
    let n_layers = config.count("num_hidden_layers")?;
    if types.len() != n_layers || types.iter().any(|&own| own != "full") {
        let wanted = format!(
            "a list of {n_layers} times \"full\": layers that take the rows that an earlier layer \
             chose are not supported"
        );
        return Err(config.wrong(key, wanted));
    }
    keys.set("attention.indexer.types", Array::Bool(vec![true; n_layers]));
    Ok(())
}

/// [`groups`], where a method chooses whether there are any.
fn groups_by_method(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let key = "topk_method";
    match config.optional_text(key)? {
        None | Some("greedy") => Ok(()),
        Some("group_limited_greedy") => {
            config.count("n_group")?;
            groups(config, keys)
        }
        Some(_) => Err(config.wrong(key, "one of: greedy, group_limited_greedy")),
    }
}

/// The choice to scale the weights of a row's experts to a sum of 1.
pub(super) fn sum_of_weights(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let one = config.optional_flag("norm_topk_prob")?.unwrap_or(true);
    keys.set("expert_weights_norm", one);
    Ok(())
}

/// Attention over latents.
pub(super) const LATENT_ATTENTION: &[TensorRule] = &in_layers(
    "model.layers.{l}.self_attn.",
    [
        same("attn_q.weight", "q_proj.weight"),
        same("attn_q_a.weight", "q_a_proj.weight"),
        same("attn_q_a_norm.weight", "q_a_layernorm.weight"),
        same("attn_q_b.weight", "q_b_proj.weight"),
        same("attn_kv_a_mqa.weight", "kv_a_proj_with_mqa.weight"),
        same("attn_kv_a_norm.weight", "kv_a_layernorm.weight"),
        with(
            "attn_k_b.weight",
            "kv_b_proj.weight",
            &[
                TensorStep::HeadRows(latent_key_rows),
                TensorStep::Transposed,
            ],
        ),
        with(
            "attn_v_b.weight",
            "kv_b_proj.weight",
            &[TensorStep::HeadRows(latent_value_rows)],
        ),
        same("attn_output.weight", "o_proj.weight"),
    ],
);

/// The tensors of the indexer, which chooses the rows that attention reads.
pub(super) const INDEXER: &[TensorRule] = &in_layers(
    "model.layers.{l}.self_attn.indexer.",
    [
        same("indexer.attn_q_b.weight", "wq_b.weight"),
        same("indexer.attn_k.weight", "wk.weight"),
        same("indexer.k_norm.weight", "k_norm.weight"),
        same("indexer.k_norm.bias", "k_norm.bias"),
        same("indexer.proj.weight", "weights_proj.weight"),
    ],
);

/// Dense layers, the router with its biases, and what every row goes through.
pub(super) const DEEPSEEK_FEED_FORWARD: &[TensorRule] = &in_layers(
    "model.layers.{l}.mlp.",
    [
        GATED[0],
        GATED[1],
        GATED[2],
        same("ffn_gate_inp.weight", "gate.weight"),
        same("exp_probs_b.bias", "gate.e_score_correction_bias"),
        same("ffn_gate_shexp.weight", "shared_experts.gate_proj.weight"),
        same("ffn_up_shexp.weight", "shared_experts.up_proj.weight"),
        same("ffn_down_shexp.weight", "shared_experts.down_proj.weight"),
    ],
);

/// The experts of Mistral 4: gate and up are the halves of the rows of one matrix for each.
pub(super) const MISTRAL4_EXPERTS: &[TensorRule] =
    &in_layers("model.layers.{l}.mlp.experts.", GATE_AND_UP_IN_ROWS);

pub(super) const DEEPSEEK_EXPERTS: &[TensorRule] =
    &in_layers("model.layers.{l}.mlp.experts.{e}.", GATED_EXPERTS);

/// How fast the factor on queries grows with the position.
pub(super) const QUERY_GROWTH: &str = "rope_parameters.llama_4_scaling_beta";

/// Reads [`QUERY_GROWTH`].
pub(super) fn query_growth(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let strength = config.optional_number(QUERY_GROWTH)?.unwrap_or(0.0);
    if strength < 0.0 || !strength.is_finite() {
        return Err(config.wrong(QUERY_GROWTH, "a number of at least 0"));
    }
    if strength > 0.0 {
        keys.set("attention.temperature_scale", strength as f32);
    }
    Ok(())
}
