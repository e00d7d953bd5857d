//! Nemotron-H: layers of one kind each, by a pattern or by names.

use model_core::gguf::Array;
use model_core::hf::{
    ClassWhen, FixedValue, HfClass, HfConfig, Key, Keys, ModelFileError, TRAINED_LENGTH,
    TensorRule, TensorStep, groups, head_dim, in_layers, only, same, with,
};

use super::hybrid::kv_heads_of;
use super::mixer_tensors::{CONV, MAMBA2, PROJECTIONS};
use super::{as_u32, free_time_steps};

/// The classes.
pub(super) const CLASSES: &[HfClass] = &[
    NEMOTRON_H,
    HfClass {
        when: ClassWhen::Counts("n_routed_experts"),
        architecture: "nemotron_h_moe",
        keys: &[NEMOTRON_KEYS, EXPERT_KEYS],
        tensors: &[
            FRAME_TENSORS,
            MIXER_TENSORS,
            CONV_TENSORS,
            MAMBA2_TENSORS,
            OTHER_TENSORS,
            EXPERT_TENSORS,
            SHARED_TENSORS,
        ],
        defaults: &[("n_group", 1), ("topk_group", 1)],
        ..NEMOTRON_H
    },
];

const NEMOTRON_H: HfClass = HfClass {
    name: "NemotronHForCausalLM",
    architecture: "nemotron_h",
    keys: &[NEMOTRON_KEYS],
    tensors: &[
        FRAME_TENSORS,
        MIXER_TENSORS,
        CONV_TENSORS,
        MAMBA2_TENSORS,
        OTHER_TENSORS,
    ],
    body: "backbone.",
    ..HfClass::EMPTY
};

const fn count(to: &'static str, from: &'static str) -> Key {
    Key::Count { to, from }
}

const NEMOTRON_KEYS: &[Key] = &[
    TRAINED_LENGTH,
    count("embedding_length", "hidden_size"),
    count("attention.head_count", "num_attention_heads"),
    count("ssm.conv_kernel", "conv_kernel"),
    count("ssm.state_size", "ssm_state_size"),
    count("ssm.group_count", "n_groups"),
    count("ssm.time_step_rank", "mamba_num_heads"),
    Key::Number {
        to: "attention.layer_norm_rms_epsilon",
        from: "layer_norm_epsilon",
    },
    only("mamba_hidden_act", FixedValue::Text(&["silu"])),
    only("mlp_hidden_act", FixedValue::Text(&["relu2"])),
    only("attention_bias", FixedValue::Flag(false)),
    only("mlp_bias", FixedValue::Flag(false)),
    only("use_bias", FixedValue::Flag(false)),
    only("mamba_proj_bias", FixedValue::Flag(false)),
    Key::With(free_time_steps),
    Key::With(inner),
    Key::With(heads),
    Key::With(layers),
];

const EXPERT_KEYS: &[Key] = &[
    count("expert_count", "n_routed_experts"),
    count("expert_used_count", "num_experts_per_tok"),
    count("expert_feed_forward_length", "moe_intermediate_size"),
    Key::OptionalNumber {
        to: "expert_weights_scale",
        from: "routed_scaling_factor",
    },
    Key::With(experts),
];

/// The tensors around the layers, and their norms.
const FRAME_TENSORS: &[TensorRule] = &[
    same("token_embd.weight", "backbone.embeddings.weight"),
    same("output_norm.weight", "backbone.norm_f.weight"),
    same("output.weight", "lm_head.weight"),
];

const MIXER_TENSORS: &[TensorRule] = &in_layers("backbone.layers.{l}.mixer.", PROJECTIONS);
const CONV_TENSORS: &[TensorRule] = &in_layers("backbone.layers.{l}.mixer.", CONV);
const MAMBA2_TENSORS: &[TensorRule] = &in_layers("backbone.layers.{l}.mixer.", MAMBA2);

const OTHER_TENSORS: &[TensorRule] = &in_layers(
    "backbone.layers.{l}.",
    [
        same("attn_norm.weight", "norm.weight"),
        with(
            "ssm_norm.weight",
            "mixer.norm.weight",
            &[TensorStep::Rows("n_groups")],
        ),
        same("attn_q.weight", "mixer.q_proj.weight"),
        same("attn_k.weight", "mixer.k_proj.weight"),
        same("attn_v.weight", "mixer.v_proj.weight"),
        same("attn_output.weight", "mixer.o_proj.weight"),
        same("ffn_up.weight", "mixer.up_proj.weight"),
        same("ffn_down.weight", "mixer.down_proj.weight"),
        same("ffn_gate_inp.weight", "mixer.gate.weight"),
        same("exp_probs_b.bias", "mixer.gate.e_score_correction_bias"),
    ],
);

const EXPERT_TENSORS: &[TensorRule] = &in_layers(
    "backbone.layers.{l}.mixer.experts.{e}.",
    [
        same("ffn_up_exps.weight", "up_proj.weight"),
        same("ffn_down_exps.weight", "down_proj.weight"),
    ],
);

const SHARED_TENSORS: &[TensorRule] = &in_layers(
    "backbone.layers.{l}.mixer.shared_experts.",
    [
        same("ffn_up_shexp.weight", "up_proj.weight"),
        same("ffn_down_shexp.weight", "down_proj.weight"),
    ],
);

fn inner(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let inner = config.count("mamba_num_heads")? * config.count("mamba_head_dim")?;
    keys.set("ssm.inner_size", as_u32(inner));
    Ok(())
}

fn heads(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let dim = as_u32(head_dim(config)?);
    keys.set("attention.key_length", dim);
    keys.set("attention.value_length", dim);
    // No position encoding: the only thing that this key means here.
    keys.set("rope.scaling.finetuned", false);
    Ok(())
}

fn experts(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let key = "moe_latent_size";
    if config.value(key).is_some() {
        return Err(config.wrong(key, "null: experts over latents are not supported"));
    }
    groups(config, keys)?;
    if let Some(norm) = config.optional_flag("norm_topk_prob")? {
        keys.set("expert_weights_norm", norm);
    }
    Ok(())
}

/// The kind of a layer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Mamba,
    Attention,
    Dense,
    Experts,
}

/// The kinds of all layers: a letter each, or a name.
fn kinds(config: &HfConfig) -> Result<(&'static str, Vec<Kind>), ModelFileError> {
    let (letters, names) = ("hybrid_override_pattern", "layers_block_type");
    if let Some(pattern) = config.optional_text(letters)? {
        let kind = |letter| match letter {
            'M' => Ok(Kind::Mamba),
            '*' => Ok(Kind::Attention),
            '-' => Ok(Kind::Dense),
            'E' => Ok(Kind::Experts),
            _ => Err(config.wrong(letters, "letters M, *, - and E, one for each layer")),
        };
        let kinds = pattern.chars().map(kind).collect::<Result<_, _>>()?;
        return Ok((letters, kinds));
    }
    let found = config.optional_texts(names)?;
    let found = found.ok_or_else(|| config.missing(letters, "a letter for each layer"))?;
    let kind = |name: &&str| match *name {
        "mamba" | "linear_attention" => Ok(Kind::Mamba),
        "attention" | "full_attention" => Ok(Kind::Attention),
        "mlp" => Ok(Kind::Dense),
        "moe" => Ok(Kind::Experts),
        _ => Err(config.wrong(names, "a list of mamba, attention, mlp and moe")),
    };
    let kinds = found.iter().map(kind).collect::<Result<_, _>>()?;
    Ok((names, kinds))
}

fn layers(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let (key, kinds) = kinds(config)?;
    let n_layers = config.optional_count("num_hidden_layers")?;
    if kinds.is_empty() || n_layers.is_some_and(|n| n != kinds.len()) {
        let wanted = match n_layers {
            Some(n) => format!("one for each of {n} layers ('num_hidden_layers')"),
            None => "one for each layer".to_owned(),
        };
        return Err(config.wrong(key, wanted));
    }
    let has_experts = config.optional_count("n_routed_experts")?.is_some();
    if kinds.contains(&Kind::Experts) && !has_experts {
        return Err(config.missing("n_routed_experts", "a whole number of at least 1"));
    }
    keys.set("block_count", as_u32(kinds.len()));
    let number = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
    let dense = if kinds.contains(&Kind::Dense) {
        number(config.count("intermediate_size")?)
    } else {
        0
    };
    let expert = if kinds.contains(&Kind::Experts) {
        number(config.count("moe_intermediate_size")?)
    } else {
        0
    };
    let hidden = kinds.iter().map(|kind| match kind {
        Kind::Dense => dense,
        Kind::Experts => expert,
        Kind::Mamba | Kind::Attention => 0,
    });
    keys.set("feed_forward_length", Array::I32(hidden.collect()));
    let attends = |layer| kinds.get(layer) == Some(&Kind::Attention);
    kv_heads_of(config, keys, kinds.len(), attends)
}
