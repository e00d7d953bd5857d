//! Directories of transformers in the keys and names of `mmproj` files: one class each.
//!
//! Invariant: a setting that changes a tower's rows and is not known is refused by its key. Knows
//! no decoder.

mod gemma4;
mod minicpm;
mod processor;
mod sound;
mod tables;
mod tiled;

use model_core::gguf::Array;
use model_core::hf::{
    ClassWhen, HfClass, HfClasses, HfConfig, HfHead, Key, Keys, ModelFileError, in_stack,
};
use serde_json::Value;

use gemma4::GEMMA4;
use minicpm::MINICPM;
pub(crate) use processor::add_processor;
use sound::QWEN2_AUDIO;
use tables::{
    CLIP_LAYER, CLIP_OUTER, GATED_WITH_BIASES, GEMMA_PROJECTOR, GLM_LAYER, GLM_OUTER,
    LLAVA_LINE_END, LLAVA_PROJECTOR, MATRIX, MISTRAL_PROJECTOR, PIXTRAL_LAYER, PIXTRAL_OUTER,
    QWEN_ATTENTION, QWEN_OUTER, QWEN3_DEEP, QWEN3_OUTER, TWO_MATRICES,
};

use tiled::{IDEFICS3, INTERNVL, LFM2_VL, LLAMA4, SMOLVLM};

/// The classes that have a tower.
pub(crate) fn classes() -> HfClasses {
    let mut classes = HfClasses::default();
    for class in [
        QWEN2_VL,
        QWEN25_VL,
        QWEN3_VL,
        QWEN3_VL_MOE,
        QWEN35,
        QWEN35_MOE,
        GLM4V,
        GLM4V_MOE,
        LLAVA,
        LLAVA_NEXT,
        PIXTRAL,
        MISTRAL3,
        GEMMA3,
        GEMMA4,
        INTERNVL,
        IDEFICS3,
        SMOLVLM,
        LFM2_VL,
        LLAMA4,
        MINICPM,
        QWEN2_AUDIO,
    ] {
        classes.register(class);
    }
    classes
}

/// Beginnings of names, and those of files in which all is a part of `model.`.
const PLACES: &[(&str, &[&str])] = &[
    ("visual.", &["model.visual."]),
    ("vision_tower.", &["model.vision_tower."]),
    (PROJECTOR, &["model.multi_modal_projector."]),
];

/// The same of towers that are a model of their own in some files.
const CLIP_PLACES: &[(&str, &[&str])] = &[
    (
        "vision_tower.",
        &[
            "vision_tower.vision_model.",
            "model.vision_tower.vision_model.",
            "model.vision_tower.",
        ],
    ),
    (PROJECTOR, &["model.multi_modal_projector."]),
    ("image_newline", &["model.image_newline"]),
];

const PROJECTOR: &str = "multi_modal_projector.";

/// A class without tables.
const TOWER: HfClass = HfClass {
    architecture: "clip",
    places: PLACES,
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
        &in_stack("v.blk.{l}.", "visual.blocks.{l}.mlp.", TWO_MATRICES),
        &in_stack("", "visual.", QWEN_OUTER),
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
        &in_stack("v.blk.{l}.", "visual.blocks.{l}.mlp.", GATED_WITH_BIASES),
        &in_stack("", "visual.", QWEN_OUTER),
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

const QWEN3_VL: HfClass = HfClass {
    name: "Qwen3VLForConditionalGeneration",
    keys: &[&[Key::With(qwen3_vl)]],
    tensors: &[
        &in_stack("v.blk.{l}.", "visual.blocks.{l}.", QWEN_ATTENTION),
        &in_stack(
            "v.blk.{l}.ffn_up.",
            "visual.blocks.{l}.mlp.linear_fc1.",
            MATRIX,
        ),
        &in_stack(
            "v.blk.{l}.ffn_down.",
            "visual.blocks.{l}.mlp.linear_fc2.",
            MATRIX,
        ),
        &in_stack("", "visual.", QWEN3_OUTER),
        &in_stack(
            "v.deepstack.{l}.",
            "visual.deepstack_merger_list.{l}.",
            QWEN3_DEEP,
        ),
    ],
    defaults: &[
        ("depth", 27),
        ("hidden_size", 1152),
        ("num_heads", 16),
        ("patch_size", 16),
        ("spatial_merge_size", 2),
        ("temporal_patch_size", 2),
    ],
    ..TOWER
};

const QWEN3_VL_MOE: HfClass = HfClass {
    name: "Qwen3VLMoeForConditionalGeneration",
    ..QWEN3_VL
};

const QWEN35_MOE: HfClass = HfClass {
    name: "Qwen3_5MoeForConditionalGeneration",
    ..QWEN35
};

/// Without DeepStack.
const QWEN35: HfClass = HfClass {
    name: "Qwen3_5ForConditionalGeneration",
    keys: &[&[Key::With(qwen35)]],
    ..QWEN3_VL
};

const GLM4V: HfClass = HfClass {
    name: "Glm4vForConditionalGeneration",
    keys: &[&[Key::With(glm4v)]],
    tensors: &[
        &in_stack("v.blk.{l}.", "visual.blocks.{l}.", GLM_LAYER),
        &in_stack("", "visual.", GLM_OUTER),
    ],
    defaults: &[
        ("depth", 24),
        ("hidden_size", 1536),
        ("num_heads", 12),
        ("patch_size", 14),
        ("spatial_merge_size", 2),
        ("temporal_patch_size", 2),
    ],
    ..TOWER
};

/// GLM-4.5V, with the tower of GLM-4.1V.
const GLM4V_MOE: HfClass = HfClass {
    name: "Glm4vMoeForConditionalGeneration",
    ..GLM4V
};

const LLAVA: HfClass = HfClass {
    name: "LlavaForConditionalGeneration",
    keys: &[&[Key::With(llava)]],
    tensors: &[
        &in_stack("v.blk.{l}.", "vision_tower.encoder.layers.{l}.", CLIP_LAYER),
        &in_stack("v.", "vision_tower.", CLIP_OUTER),
        &in_stack("v.", "", LLAVA_LINE_END),
        &in_stack("mm.", "multi_modal_projector.", LLAVA_PROJECTOR),
    ],
    places: CLIP_PLACES,
    unused: &[
        "vision_tower.vision_model.embeddings.position_ids",
        "model.vision_tower.vision_model.embeddings.position_ids",
    ],
    ..TOWER
};

/// LLaVA 1.6: tiles, and a learned row behind each line of rows.
const LLAVA_NEXT: HfClass = HfClass {
    name: "LlavaNextForConditionalGeneration",
    keys: &[&[Key::With(llava_next)]],
    ..LLAVA
};

const GEMMA3: HfClass = HfClass {
    name: "Gemma3ForConditionalGeneration",
    keys: &[&[Key::With(gemma3)]],
    tensors: &[
        &in_stack("v.blk.{l}.", "vision_tower.encoder.layers.{l}.", CLIP_LAYER),
        &in_stack("v.", "vision_tower.", CLIP_OUTER),
        &in_stack("mm.", "multi_modal_projector.", GEMMA_PROJECTOR),
    ],
    places: CLIP_PLACES,
    ..TOWER
};

/// Pixtral 12B, a LLaVA with the tower that was made for it.
const PIXTRAL: HfClass = HfClass {
    name: LLAVA.name,
    when: ClassWhen::Says("vision_config.model_type", "pixtral"),
    keys: &[&[Key::With(pixtral)]],
    ..MISTRAL3
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
        &in_stack("v.", "vision_tower.", PIXTRAL_OUTER),
        &in_stack("mm.", "multi_modal_projector.", MISTRAL_PROJECTOR),
    ],
    ..TOWER
};

/// Sets counts of a tower that sees, which go by these names.
fn counts(
    config: &HfConfig,
    keys: &mut Keys,
    names: &[(&str, &str)],
) -> Result<(), ModelFileError> {
    counts_of(config, keys, "vision", names)
}

/// Sets counts below `part` that go by these names.
fn counts_of(
    config: &HfConfig,
    keys: &mut Keys,
    part: &str,
    names: &[(&str, &str)],
) -> Result<(), ModelFileError> {
    for (to, from) in names {
        let count = u32::try_from(config.count(from)?).unwrap_or(u32::MAX);
        keys.set(&format!("{part}.{to}"), count);
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

fn qwen3_vl(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let layers = config.optional_numbers("deepstack_visual_indexes")?;
    let layers = layers.unwrap_or_else(|| vec![8.0, 16.0, 24.0]);
    let layers = layers.iter().map(|&layer| layer as u32).collect();
    keys.set("vision.deepstack_layers", Array::U32(layers));
    qwen3_tower(config, keys)
}

fn qwen35(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    keys.set("vision.deepstack_layers", Array::U32(Vec::new()));
    qwen3_tower(config, keys)
}

fn qwen3_tower(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    only(config, "hidden_act", &["gelu_pytorch_tanh"])?;
    keys.set("vision.projector_type", "qwen3vl_merger");
    keys.set_whole("clip.use_gelu", true);
    counts(config, keys, &[("embedding_length", "hidden_size")])?;
    qwen(config, keys)
}

fn glm4v(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    only(config, "hidden_act", &["silu"])?;
    if config.optional_flag("attention_bias")? == Some(true) {
        return Err(config.wrong("attention_bias", "false"));
    }
    let base = config.optional_number("rope_parameters.rope_theta")?;
    if base.is_some_and(|base| base != 10_000.0) {
        return Err(config.wrong("rope_parameters.rope_theta", "10000"));
    }
    keys.set("vision.projector_type", "glm4v");
    keys.set_whole("clip.use_silu", true);
    counts(config, keys, &[("embedding_length", "hidden_size")])?;
    qwen(config, keys)?;
    let eps = config.optional_number("rms_norm_eps")?.unwrap_or(1e-5);
    keys.set("vision.attention.layer_norm_epsilon", eps as f32);
    Ok(())
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

/// GELU, the epsilon of norms and the layers of a tower like SigLIP.
fn siglip(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    keys.set_whole("clip.use_gelu", true);
    let eps = config.optional_number("layer_norm_eps")?.unwrap_or(1e-6);
    keys.set("vision.attention.layer_norm_epsilon", eps as f32);
    counts(config, keys, &[("block_count", "num_hidden_layers")])
}

/// The base of rotations, where older files have it or newer ones.
fn rope_base(config: &HfConfig) -> Result<Option<f64>, ModelFileError> {
    match config.optional_number("rope_theta")? {
        None => config.optional_number("rope_parameters.rope_theta"),
        base => Ok(base),
    }
}

/// Refuses rows of another layer than the last.
fn of_last_layer(config: &HfConfig) -> Result<(), ModelFileError> {
    let key = "vision_feature_layer";
    let layer = config.value(key).and_then(Value::as_i64);
    if layer.unwrap_or(-1) == -1 {
        Ok(())
    } else {
        Err(config.wrong(key, "-1, the last"))
    }
}

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

fn llava_next(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    llava(config, keys)?;
    let key = "image_grid_pinpoints";
    let wrong = || config.wrong(key, "a list of heights and widths");
    let sizes = config.value(key).and_then(Value::as_array);
    let mut listed = Vec::new();
    for size in sizes.ok_or_else(wrong)? {
        let sides: Option<Vec<i32>> = (size.as_array().into_iter().flatten())
            .map(|side| i32::try_from(side.as_i64()?).ok())
            .collect();
        let sides = sides.filter(|sides| sides.len() == 2);
        listed.extend(sides.ok_or_else(wrong)?);
    }
    keys.set("vision.image_grid_pinpoints", Array::I32(listed));
    Ok(())
}

fn pixtral(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    only(config, "vision_feature_select_strategy", &["full"])?;
    pixtral_tower(config, keys)
}

fn mistral3(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let eps = config.optional_number("text_config.rms_norm_eps")?;
    if eps.is_some_and(|eps| eps != 1e-5) {
        return Err(config.wrong("text_config.rms_norm_eps", "1e-5, as in the tower"));
    }
    counts(
        config,
        keys,
        &[("spatial_merge_size", "spatial_merge_size")],
    )?;
    pixtral_tower(config, keys)
}

fn pixtral_tower(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    only(config, "model_type", &["pixtral"])?;
    only(config, "hidden_act", &["silu"])?;
    only(config, "projector_hidden_act", &["gelu"])?;
    keys.set("vision.projector_type", "pixtral");
    keys.set_whole("clip.use_silu", true);
    keys.set("vision.attention.layer_norm_epsilon", 1e-5f32);
    of_last_layer(config)?;
    let base = rope_base(config)?.unwrap_or(10_000.0);
    keys.set_whole("clip.rope.freq_base", base as f32);
    counts(config, keys, CLIP_COUNTS)?;
    counts(config, keys, &[("block_count", "num_hidden_layers")])
}

fn gemma3(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    only(config, "hidden_act", &["gelu_pytorch_tanh"])?;
    keys.set("vision.projector_type", "gemma3");
    siglip(config, keys)?;
    counts(config, keys, CLIP_COUNTS)?;
    let n_rows = config.optional_count("mm_tokens_per_image")?.unwrap_or(256);
    keys.set("vision.projector.query_side", n_rows.isqrt() as u32);
    Ok(())
}
