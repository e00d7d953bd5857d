//! Directories of transformers in the keys and names of `mmproj` files: one class each.
//!
//! Invariant: a setting that changes a tower's rows and is not known is refused by its key. Knows
//! no decoder.

use std::path::Path;

use model_core::gguf::{Array, Metadata};
use model_core::hf::{
    Heads, HfClass, HfClasses, HfConfig, HfHead, Key, Keys, ModelFileError, TensorRule, TensorStep,
    in_stack, same, with,
};
use serde_json::Value;

/// The classes that have a tower.
pub(crate) fn classes() -> HfClasses {
    let mut classes = HfClasses::default();
    for class in [QWEN2_VL, QWEN25_VL, LLAVA, GEMMA3, MISTRAL3] {
        classes.register(class);
    }
    classes
}

/// A class without tables.
const TOWER: HfClass = HfClass {
    architecture: "clip",
    section: Some("vision_config"),
    head: HfHead::None,
    // Names in tables are whole.
    body: "",
    // The decoder's tensors.
    other_parts: &[
        "model.layers.",
        "model.embed_tokens.",
        "model.norm.",
        "model.language_model.",
        "language_model.",
        "lm_head.",
    ],
    ..HfClass::EMPTY
};

const QWEN2_VL: HfClass = HfClass {
    name: "Qwen2VLForConditionalGeneration",
    keys: &[&[Key::With(qwen2_vl)]],
    tensors: &[
        &in_stack("v.blk.{l}.", "visual.blocks.{l}.", QWEN_ATTENTION),
        &in_stack("v.blk.{l}.", "model.visual.blocks.{l}.", QWEN_ATTENTION),
        &in_stack("v.blk.{l}.", "visual.blocks.{l}.mlp.", TWO_MATRICES),
        &in_stack("v.blk.{l}.", "model.visual.blocks.{l}.mlp.", TWO_MATRICES),
        &in_stack("", "visual.", QWEN_OUTER),
        &in_stack("", "model.visual.", QWEN_OUTER),
    ],
    defaults: &[
        ("depth", 32),
        ("embed_dim", 1280),
        ("num_heads", 16),
        ("patch_size", 14),
        ("spatial_merge_size", 2),
        ("temporal_patch_size", 2),
    ],
    ..TOWER
};

const QWEN25_VL: HfClass = HfClass {
    name: "Qwen2_5_VLForConditionalGeneration",
    keys: &[&[Key::With(qwen25_vl)]],
    tensors: &[
        &in_stack("v.blk.{l}.", "visual.blocks.{l}.", QWEN_ATTENTION),
        &in_stack("v.blk.{l}.", "model.visual.blocks.{l}.", QWEN_ATTENTION),
        &in_stack("v.blk.{l}.", "visual.blocks.{l}.mlp.", GATED_WITH_BIASES),
        &in_stack(
            "v.blk.{l}.",
            "model.visual.blocks.{l}.mlp.",
            GATED_WITH_BIASES,
        ),
        &in_stack("", "visual.", QWEN_OUTER),
        &in_stack("", "model.visual.", QWEN_OUTER),
    ],
    defaults: &[
        ("depth", 32),
        ("num_heads", 16),
        ("patch_size", 14),
        ("spatial_merge_size", 2),
        ("temporal_patch_size", 2),
        ("window_size", 112),
    ],
    ..TOWER
};

const LLAVA: HfClass = HfClass {
    name: "LlavaForConditionalGeneration",
    keys: &[&[Key::With(llava)]],
    tensors: &[
        &in_stack("v.blk.{l}.", "vision_tower.encoder.layers.{l}.", CLIP_LAYER),
        &in_stack(
            "v.blk.{l}.",
            "vision_tower.vision_model.encoder.layers.{l}.",
            CLIP_LAYER,
        ),
        &in_stack(
            "v.blk.{l}.",
            "model.vision_tower.vision_model.encoder.layers.{l}.",
            CLIP_LAYER,
        ),
        &in_stack(
            "v.blk.{l}.",
            "model.vision_tower.encoder.layers.{l}.",
            CLIP_LAYER,
        ),
        &in_stack("v.", "vision_tower.", CLIP_OUTER),
        &in_stack("v.", "vision_tower.vision_model.", CLIP_OUTER),
        &in_stack("v.", "model.vision_tower.vision_model.", CLIP_OUTER),
        &in_stack("v.", "model.vision_tower.", CLIP_OUTER),
        &in_stack("mm.", "multi_modal_projector.", LLAVA_PROJECTOR),
        &in_stack("mm.", "model.multi_modal_projector.", LLAVA_PROJECTOR),
    ],
    unused: &[
        "vision_tower.vision_model.embeddings.position_ids",
        "model.vision_tower.vision_model.embeddings.position_ids",
    ],
    ..TOWER
};

const GEMMA3: HfClass = HfClass {
    name: "Gemma3ForConditionalGeneration",
    keys: &[&[Key::With(gemma3)]],
    tensors: &[
        &in_stack("v.blk.{l}.", "vision_tower.encoder.layers.{l}.", CLIP_LAYER),
        &in_stack(
            "v.blk.{l}.",
            "vision_tower.vision_model.encoder.layers.{l}.",
            CLIP_LAYER,
        ),
        &in_stack(
            "v.blk.{l}.",
            "model.vision_tower.vision_model.encoder.layers.{l}.",
            CLIP_LAYER,
        ),
        &in_stack(
            "v.blk.{l}.",
            "model.vision_tower.encoder.layers.{l}.",
            CLIP_LAYER,
        ),
        &in_stack("v.", "vision_tower.", CLIP_OUTER),
        &in_stack("v.", "vision_tower.vision_model.", CLIP_OUTER),
        &in_stack("v.", "model.vision_tower.vision_model.", CLIP_OUTER),
        &in_stack("v.", "model.vision_tower.", CLIP_OUTER),
        &in_stack("mm.", "multi_modal_projector.", GEMMA_PROJECTOR),
        &in_stack("mm.", "model.multi_modal_projector.", GEMMA_PROJECTOR),
    ],
    ..TOWER
};

/// Mistral Small 3.1 and later, with the tower of Pixtral.
const MISTRAL3: HfClass = HfClass {
    name: "Mistral3ForConditionalGeneration",
    keys: &[&[Key::With(mistral3)]],
    tensors: &[
        &in_stack(
            "v.blk.{l}.",
            "vision_tower.transformer.layers.{l}.",
            PIXTRAL_LAYER,
        ),
        &in_stack(
            "v.blk.{l}.",
            "model.vision_tower.transformer.layers.{l}.",
            PIXTRAL_LAYER,
        ),
        &in_stack("v.", "vision_tower.", PIXTRAL_OUTER),
        &in_stack("v.", "model.vision_tower.", PIXTRAL_OUTER),
        &in_stack("mm.", "multi_modal_projector.", MISTRAL_PROJECTOR),
        &in_stack("mm.", "model.multi_modal_projector.", MISTRAL_PROJECTOR),
    ],
    ..TOWER
};

const PIXTRAL_LAYER: [TensorRule; 9] = [
    same("ln1.weight", "attention_norm.weight"),
    same("ln2.weight", "ffn_norm.weight"),
    with(
        "attn_q.weight",
        "attention.q_proj.weight",
        &[TensorStep::Pairs(Heads::Query)],
    ),
    with(
        "attn_k.weight",
        "attention.k_proj.weight",
        &[TensorStep::Pairs(Heads::Query)],
    ),
    same("attn_v.weight", "attention.v_proj.weight"),
    same("attn_output.weight", "attention.o_proj.weight"),
    same("ffn_gate.weight", "feed_forward.gate_proj.weight"),
    same("ffn_up.weight", "feed_forward.up_proj.weight"),
    same("ffn_down.weight", "feed_forward.down_proj.weight"),
];

const PIXTRAL_OUTER: [TensorRule; 2] = [
    same("patch_embd.weight", "patch_conv.weight"),
    same("pre_ln.weight", "ln_pre.weight"),
];

const MISTRAL_PROJECTOR: [TensorRule; 6] = [
    same("input_norm.weight", "norm.weight"),
    same("patch_merger.weight", "patch_merger.merging_layer.weight"),
    same("1.weight", "linear_1.weight"),
    same("1.bias", "linear_1.bias"),
    same("2.weight", "linear_2.weight"),
    same("2.bias", "linear_2.bias"),
];

const QWEN_ATTENTION: [TensorRule; 8] = [
    same("ln1.weight", "norm1.weight"),
    same("ln1.bias", "norm1.bias"),
    same("ln2.weight", "norm2.weight"),
    same("ln2.bias", "norm2.bias"),
    same("attn_qkv.weight", "attn.qkv.weight"),
    same("attn_qkv.bias", "attn.qkv.bias"),
    same("attn_output.weight", "attn.proj.weight"),
    same("attn_output.bias", "attn.proj.bias"),
];

const TWO_MATRICES: [TensorRule; 4] = [
    same("ffn_up.weight", "fc1.weight"),
    same("ffn_up.bias", "fc1.bias"),
    same("ffn_down.weight", "fc2.weight"),
    same("ffn_down.bias", "fc2.bias"),
];

const GATED_WITH_BIASES: [TensorRule; 6] = [
    same("ffn_gate.weight", "gate_proj.weight"),
    same("ffn_gate.bias", "gate_proj.bias"),
    same("ffn_up.weight", "up_proj.weight"),
    same("ffn_up.bias", "up_proj.bias"),
    same("ffn_down.weight", "down_proj.weight"),
    same("ffn_down.bias", "down_proj.bias"),
];

const QWEN_OUTER: [TensorRule; 7] = [
    same("v.patch_embd.weight", "patch_embed.proj.weight"),
    same("v.post_ln.weight", "merger.ln_q.weight"),
    same("v.post_ln.bias", "merger.ln_q.bias"),
    same("mm.0.weight", "merger.mlp.0.weight"),
    same("mm.0.bias", "merger.mlp.0.bias"),
    same("mm.2.weight", "merger.mlp.2.weight"),
    same("mm.2.bias", "merger.mlp.2.bias"),
];

const CLIP_LAYER: [TensorRule; 16] = [
    same("ln1.weight", "layer_norm1.weight"),
    same("ln1.bias", "layer_norm1.bias"),
    same("ln2.weight", "layer_norm2.weight"),
    same("ln2.bias", "layer_norm2.bias"),
    same("attn_q.weight", "self_attn.q_proj.weight"),
    same("attn_q.bias", "self_attn.q_proj.bias"),
    same("attn_k.weight", "self_attn.k_proj.weight"),
    same("attn_k.bias", "self_attn.k_proj.bias"),
    same("attn_v.weight", "self_attn.v_proj.weight"),
    same("attn_v.bias", "self_attn.v_proj.bias"),
    same("attn_output.weight", "self_attn.out_proj.weight"),
    same("attn_output.bias", "self_attn.out_proj.bias"),
    same("ffn_up.weight", "mlp.fc1.weight"),
    same("ffn_up.bias", "mlp.fc1.bias"),
    same("ffn_down.weight", "mlp.fc2.weight"),
    same("ffn_down.bias", "mlp.fc2.bias"),
];

const CLIP_OUTER: [TensorRule; 8] = [
    same("patch_embd.weight", "embeddings.patch_embedding.weight"),
    same("patch_embd.bias", "embeddings.patch_embedding.bias"),
    same(
        "position_embd.weight",
        "embeddings.position_embedding.weight",
    ),
    same("class_embd", "embeddings.class_embedding"),
    same("pre_ln.weight", "pre_layrnorm.weight"),
    same("pre_ln.bias", "pre_layrnorm.bias"),
    same("post_ln.weight", "post_layernorm.weight"),
    same("post_ln.bias", "post_layernorm.bias"),
];

const LLAVA_PROJECTOR: [TensorRule; 4] = [
    same("0.weight", "linear_1.weight"),
    same("0.bias", "linear_1.bias"),
    same("2.weight", "linear_2.weight"),
    same("2.bias", "linear_2.bias"),
];

const GEMMA_PROJECTOR: [TensorRule; 2] = [
    same("input_projection.weight", "mm_input_projection_weight"),
    with(
        "soft_emb_norm.weight",
        "mm_soft_emb_norm.weight",
        &[TensorStep::PlusOne],
    ),
];

/// Sets counts that go by these names.
fn counts(
    config: &HfConfig,
    keys: &mut Keys,
    names: &[(&str, &str)],
) -> Result<(), ModelFileError> {
    for (to, from) in names {
        let count = u32::try_from(config.count(from)?).unwrap_or(u32::MAX);
        keys.set(&format!("vision.{to}"), count);
    }
    Ok(())
}

/// Refuses another value of a key than this.
fn only(config: &HfConfig, key: &str, known: &[&str]) -> Result<(), ModelFileError> {
    match config.optional_text(key)? {
        Some(text) if !known.contains(&text) => {
            Err(config.wrong(key, format!("one of: {}", known.join(", "))))
        }
        _ => Ok(()),
    }
}

fn qwen2_vl(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    only(config, "hidden_act", &["quick_gelu"])?;
    keys.set("vision.projector_type", "qwen2vl_merger");
    counts(config, keys, &[("embedding_length", "embed_dim")])?;
    qwen(config, keys)
}

fn qwen25_vl(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    keys.set("vision.projector_type", "qwen2.5vl_merger");
    counts(
        config,
        keys,
        &[
            ("embedding_length", "hidden_size"),
            ("window_size", "window_size"),
        ],
    )?;
    let full = config.optional_numbers("fullatt_block_indexes")?;
    let full = full.unwrap_or_else(|| vec![7.0, 15.0, 23.0, 31.0]);
    let full = full.iter().map(|&layer| layer as u32).collect();
    keys.set("vision.wa_layer_indexes", Array::U32(full));
    qwen(config, keys)
}

fn qwen(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    // The decoder's, which older files have next to the tower's settings.
    let _of_the_decoder = config.value("rope_scaling");
    keys.set("vision.attention.layer_norm_epsilon", 1e-6f32);
    counts(
        config,
        keys,
        &[
            ("block_count", "depth"),
            ("attention.head_count", "num_heads"),
            ("patch_size", "patch_size"),
            ("spatial_merge_size", "spatial_merge_size"),
        ],
    )
}

/// The sizes that CLIP and SigLIP have.
const CLIP_COUNTS: &[(&str, &str)] = &[
    ("embedding_length", "hidden_size"),
    ("attention.head_count", "num_attention_heads"),
    ("patch_size", "patch_size"),
    ("image_size", "image_size"),
];

fn llava(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    only(config, "model_type", &["clip_vision_model"])?;
    only(config, "hidden_act", &["quick_gelu"])?;
    only(config, "vision_feature_select_strategy", &["default"])?;
    only(config, "projector_hidden_act", &["gelu"])?;
    keys.set("vision.projector_type", "mlp");
    keys.set("vision.attention.layer_norm_epsilon", 1e-5f32);
    counts(config, keys, CLIP_COUNTS)?;
    let n_layers = config.count("num_hidden_layers")? as i64;
    // The rows before a layer, counted from the end: -1 are those of the last.
    let layer = config.value("vision_feature_layer").and_then(Value::as_i64);
    let used = match layer.unwrap_or(-2) {
        layer if layer < 0 => n_layers + 1 + layer,
        layer => layer,
    };
    match u32::try_from(used) {
        Ok(used) if (1..=n_layers).contains(&i64::from(used)) => {
            keys.set("vision.block_count", used);
            Ok(())
        }
        _ => Err(config.wrong("vision_feature_layer", format!("a layer of {n_layers}"))),
    }
}

fn mistral3(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    only(config, "model_type", &["pixtral"])?;
    only(config, "hidden_act", &["silu"])?;
    only(config, "projector_hidden_act", &["gelu"])?;
    keys.set("vision.projector_type", "pixtral");
    keys.set_whole("clip.use_silu", true);
    keys.set("vision.attention.layer_norm_epsilon", 1e-5f32);
    let eps = config.optional_number("text_config.rms_norm_eps")?;
    if eps.is_some_and(|eps| eps != 1e-5) {
        return Err(config.wrong("text_config.rms_norm_eps", "1e-5, as in the tower"));
    }
    let layer = config.value("vision_feature_layer");
    if layer.and_then(Value::as_i64).unwrap_or(-1) != -1 {
        return Err(config.wrong("vision_feature_layer", "-1, the last"));
    }
    let base = config.optional_number("rope_theta")?;
    let base = match base {
        Some(base) => base,
        None => config
            .optional_number("rope_parameters.rope_theta")?
            .unwrap_or(10_000.0),
    };
    keys.set_whole("clip.rope.freq_base", base as f32);
    counts(config, keys, CLIP_COUNTS)?;
    counts(
        config,
        keys,
        &[
            ("block_count", "num_hidden_layers"),
            ("spatial_merge_size", "spatial_merge_size"),
        ],
    )
}

fn gemma3(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    only(config, "hidden_act", &["gelu_pytorch_tanh"])?;
    keys.set("vision.projector_type", "gemma3");
    keys.set_whole("clip.use_gelu", true);
    let eps = config.optional_number("layer_norm_eps")?.unwrap_or(1e-6);
    keys.set("vision.attention.layer_norm_epsilon", eps as f32);
    counts(config, keys, CLIP_COUNTS)?;
    counts(config, keys, &[("block_count", "num_hidden_layers")])?;
    let n_rows = config.optional_count("mm_tokens_per_image")?.unwrap_or(256);
    keys.set("vision.projector.query_side", n_rows.isqrt() as u32);
    Ok(())
}

/// Adds what a directory says of how pictures are prepared.
///
/// # Errors
/// [`ModelFileError`] where a file cannot be read.
pub(crate) fn add_processor(
    directory: &Path,
    metadata: &mut Metadata,
) -> Result<(), ModelFileError> {
    let mut found = None;
    for (file, object) in [
        ("processor_config.json", "image_processor"),
        ("preprocessor_config.json", ""),
    ] {
        let path = directory.join(file);
        if path.exists() && found.is_none() {
            let config = HfConfig::open(&path)?;
            if object.is_empty() || config.value(object).is_some() {
                found = Some((config, object));
            }
        }
    }
    let Some((config, object)) = found else {
        return Ok(());
    };
    let at = |key: &str| match object {
        "" => key.to_owned(),
        object => format!("{object}.{key}"),
    };
    for key in ["image_mean", "image_std"] {
        if let Some(values) = config.optional_numbers(&at(key))? {
            let values = values.iter().map(|&value| value as f32).collect();
            metadata.insert(&format!("clip.vision.{key}"), Array::F32(values));
        }
    }
    if let Some(resample) = config.optional_count(&at("resample")).ok().flatten() {
        metadata.insert("clip.vision.resample", resample as u32);
    }
    let longest = config.value(&at("size.longest_edge"));
    if let Some(longest) = longest.and_then(Value::as_u64) {
        let longest = u32::try_from(longest).unwrap_or(u32::MAX);
        metadata.insert("clip.vision.image_longest_edge", longest);
    }
    for (to, names) in [
        (
            "image_min_pixels",
            ["min_pixels", "size.min_pixels", "size.shortest_edge"],
        ),
        (
            "image_max_pixels",
            ["max_pixels", "size.max_pixels", "size.longest_edge"],
        ),
    ] {
        let value = names.iter().find_map(|name| {
            let value = config.value(&at(name))?.as_u64()?;
            u32::try_from(value).ok()
        });
        if let Some(value) = value {
            metadata.insert(&format!("clip.vision.{to}"), value);
        }
    }
    Ok(())
}
