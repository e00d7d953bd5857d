//! Classes whose pictures come in tiles: InternVL, Idefics 3 and SmolVLM, LFM2-VL, Llama 4.
//!
//! Knows no decoder.

use model_core::hf::{HfClass, HfConfig, Key, Keys, ModelFileError, in_stack};

use super::tables::{
    CLIP_LAYER, CLIP_OUTER, CONNECTOR, INTERNVL_LAYER, INTERNVL_OUTER, INTERNVL_PROJECTOR,
    LFM2_PROJECTOR, LLAMA4_LAYER, LLAMA4_OUTER,
};
use super::{CLIP_COUNTS, TOWER, counts, of_last_layer, only, rope_base, siglip};

/// InternVL 2.5 and later in the words of transformers (`-hf`).
pub(super) const INTERNVL: HfClass = HfClass {
    name: "InternVLForConditionalGeneration",
    keys: &[&[Key::With(internvl)]],
    tensors: &[
        &in_stack(
            "v.blk.{l}.",
            "vision_tower.encoder.layer.{l}.",
            INTERNVL_LAYER,
        ),
        &in_stack("v.", "vision_tower.", INTERNVL_OUTER),
        &in_stack(
            "mm.model.mlp.",
            "multi_modal_projector.",
            INTERNVL_PROJECTOR,
        ),
    ],
    defaults: &[
        ("hidden_size", 1024),
        ("num_hidden_layers", 24),
        ("num_attention_heads", 16),
        ("image_size", 448),
        ("patch_size", 14),
    ],
    ..TOWER
};

pub(super) const IDEFICS3: HfClass = HfClass {
    name: "Idefics3ForConditionalGeneration",
    keys: &[&[Key::With(idefics3)]],
    tensors: &[
        &in_stack(
            "v.blk.{l}.",
            "model.vision_model.encoder.layers.{l}.",
            CLIP_LAYER,
        ),
        &in_stack("v.", "model.vision_model.", CLIP_OUTER),
        &in_stack(
            "mm.model.fc.",
            "model.connector.modality_projection.",
            CONNECTOR,
        ),
    ],
    other_parts: &["model.text_model.", "lm_head."],
    defaults: &[
        ("hidden_size", 1152),
        ("num_hidden_layers", 12),
        ("num_attention_heads", 16),
        ("image_size", 224),
        ("patch_size", 32),
        ("scale_factor", 2),
    ],
    ..TOWER
};

pub(super) const SMOLVLM: HfClass = HfClass {
    name: "SmolVLMForConditionalGeneration",
    ..IDEFICS3
};

pub(super) const LFM2_VL: HfClass = HfClass {
    name: "Lfm2VlForConditionalGeneration",
    keys: &[&[Key::With(lfm2_vl)]],
    tensors: &[
        &in_stack(
            "v.blk.{l}.",
            "model.vision_tower.encoder.layers.{l}.",
            CLIP_LAYER,
        ),
        &in_stack("v.", "model.vision_tower.", CLIP_OUTER),
        &in_stack("mm.", "model.multi_modal_projector.", LFM2_PROJECTOR),
    ],
    places: &[("model.vision_tower.", &["model.vision_tower.vision_model."])],
    defaults: &[
        ("hidden_size", 768),
        ("num_hidden_layers", 12),
        ("num_attention_heads", 12),
        ("patch_size", 16),
        ("downsample_factor", 2),
    ],
    ..TOWER
};

pub(super) const LLAMA4: HfClass = HfClass {
    name: "Llama4ForConditionalGeneration",
    keys: &[&[Key::With(llama4)]],
    tensors: &[
        &in_stack("v.blk.{l}.", "vision_model.model.layers.{l}.", LLAMA4_LAYER),
        &in_stack("", "", LLAMA4_OUTER),
    ],
    defaults: &[
        ("hidden_size", 768),
        ("num_hidden_layers", 34),
        ("num_attention_heads", 16),
        ("image_size", 448),
        ("patch_size", 14),
    ],
    ..TOWER
};

/// A length that is stated for both sides, or for each.
fn side(config: &HfConfig, key: &str) -> Result<u32, ModelFileError> {
    let [height, width] = [0, 1].map(|at| format!("{key}.{at}"));
    let side = match config.optional_count(&height)? {
        None => config.count(key)?,
        Some(side) if config.count(&width)? == side => side,
        Some(_) => return Err(config.wrong(key, "two equal lengths")),
    };
    Ok(u32::try_from(side).unwrap_or(u32::MAX))
}

fn internvl(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    only(config, "model_type", &["internvl_vision"])?;
    only(config, "hidden_act", &["gelu"])?;
    only(config, "vision_feature_select_strategy", &["default"])?;
    only(config, "projector_hidden_act", &["gelu"])?;
    of_last_layer(config)?;
    for (key, wanted) in [
        ("use_absolute_position_embeddings", true),
        ("use_mean_pooling", true),
        ("use_mask_token", false),
    ] {
        if config.optional_flag(key)?.is_some_and(|is| is != wanted) {
            return Err(config.wrong(key, wanted.to_string()));
        }
    }
    keys.set("vision.projector_type", "internvl");
    siglip(config, keys)?;
    counts(
        config,
        keys,
        &[
            ("embedding_length", "hidden_size"),
            ("attention.head_count", "num_attention_heads"),
        ],
    )?;
    for key in ["image_size", "patch_size"] {
        keys.set(&format!("vision.{key}"), side(config, key)?);
    }
    merged_by(config, "downsample_ratio", keys)
}

/// The patches of a row of a square, of which this key has the inverse.
fn merged_by(config: &HfConfig, key: &str, keys: &mut Keys) -> Result<(), ModelFileError> {
    let merge = 1.0 / config.optional_number(key)?.unwrap_or(0.5);
    if merge.fract() != 0.0 || !(1.0..=64.0).contains(&merge) {
        return Err(config.wrong(key, "one part of a whole number"));
    }
    keys.set("vision.projector.scale_factor", merge as u32);
    Ok(())
}

fn llama4(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    only(config, "model_type", &["llama4_vision_model"])?;
    only(config, "hidden_act", &["gelu"])?;
    only(config, "vision_feature_select_strategy", &["default"])?;
    if config.optional_flag("multi_modal_projector_bias")? == Some(true) {
        return Err(config.wrong("multi_modal_projector_bias", "false"));
    }
    keys.set("vision.projector_type", "llama4");
    keys.set_whole("clip.use_gelu", true);
    // Whatever 'norm_eps' is.
    keys.set("vision.attention.layer_norm_epsilon", 1e-5f32);
    let base = rope_base(config)?.unwrap_or(10_000.0);
    keys.set_whole("clip.rope.freq_base", base as f32);
    counts(
        config,
        keys,
        &[
            ("block_count", "num_hidden_layers"),
            ("embedding_length", "hidden_size"),
            ("attention.head_count", "num_attention_heads"),
        ],
    )?;
    for key in ["image_size", "patch_size"] {
        keys.set(&format!("vision.{key}"), side(config, key)?);
    }
    merged_by(config, "pixel_shuffle_ratio", keys)
}

fn idefics3(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    only(config, "hidden_act", &["gelu_pytorch_tanh"])?;
    keys.set("vision.projector_type", "idefics3");
    siglip(config, keys)?;
    counts(config, keys, CLIP_COUNTS)?;
    counts(config, keys, &[("projector.scale_factor", "scale_factor")])
}

fn lfm2_vl(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    only(config, "model_type", &["siglip2_vision_model"])?;
    only(config, "hidden_act", &["gelu_pytorch_tanh"])?;
    only(config, "projector_hidden_act", &["gelu"])?;
    keys.set("vision.projector_type", "lfm2");
    siglip(config, keys)?;
    counts(
        config,
        keys,
        &[
            ("embedding_length", "hidden_size"),
            ("attention.head_count", "num_attention_heads"),
            ("patch_size", "patch_size"),
            ("projector.scale_factor", "downsample_factor"),
        ],
    )
}
