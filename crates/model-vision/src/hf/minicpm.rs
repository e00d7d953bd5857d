//! The class of MiniCPM-V 4.6.
//!
//! Knows no decoder.

use model_core::gguf::Array;
use model_core::hf::{HfClass, HfConfig, Key, Keys, ModelFileError, in_stack};

use super::tables::{CLIP_LAYER, CLIP_OUTER, MINICPM_MERGER, MINICPM_PROJECTOR};
use super::{TOWER, counts, only, siglip};

pub(super) const MINICPM: HfClass = HfClass {
    name: "MiniCPMV4_6ForConditionalGeneration",
    keys: &[&[Key::With(minicpm)]],
    tensors: &[
        &in_stack(
            "v.blk.{l}.",
            "model.vision_tower.encoder.layers.{l}.",
            CLIP_LAYER,
        ),
        &in_stack("v.", "model.vision_tower.", CLIP_OUTER),
        &in_stack(
            "v.vit_merger.",
            "model.vision_tower.vit_merger.",
            MINICPM_MERGER,
        ),
        &in_stack("mm.", "model.merger.mlp.0.", MINICPM_PROJECTOR),
    ],
    defaults: &[
        ("hidden_size", 768),
        ("num_hidden_layers", 12),
        ("num_attention_heads", 12),
        ("patch_size", 16),
    ],
    ..TOWER
};

/// Pixels of a row of a slice, where the processor does not state them.
const SIDE: u32 = 448;

fn minicpm(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    only(config, "model_type", &["minicpmv4_6_vision"])?;
    only(config, "hidden_act", &["gelu_pytorch_tanh"])?;
    only(config, "downsample_mode", &["16x"])?;
    for key in ["window_kernel_size", "merge_kernel_size"] {
        let sides = config.optional_numbers(key)?;
        if sides.is_some_and(|sides| sides != [2.0, 2.0]) {
            return Err(config.wrong(key, "[2, 2]"));
        }
    }
    if config
        .optional_count("merger_times")?
        .is_some_and(|n| n != 1)
    {
        return Err(config.wrong("merger_times", "1"));
    }
    if config.optional_flag("drop_vision_last_layer")? == Some(true) {
        return Err(config.wrong("drop_vision_last_layer", "false"));
    }
    keys.set("vision.projector_type", "minicpmv4_6");
    siglip(config, keys)?;
    counts(
        config,
        keys,
        &[
            ("embedding_length", "hidden_size"),
            ("attention.head_count", "num_attention_heads"),
            ("patch_size", "patch_size"),
        ],
    )?;
    // Squares of two rows and columns twice.
    keys.set("vision.projector.scale_factor", 4u32);
    keys.set("vision.image_size", SIDE);
    let layer = config.optional_count("insert_layer_id")?.unwrap_or(6);
    let layer = u32::try_from(layer).unwrap_or(u32::MAX);
    keys.set("vision.wa_layer_indexes", Array::U32(vec![layer]));
    Ok(())
}
