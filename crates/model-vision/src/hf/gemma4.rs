//! The class of Gemma 4.
//!
//! Knows no decoder.

use model_core::hf::{HfClass, HfConfig, Key, Keys, ModelFileError, in_stack};

use super::tables::{GEMMA4_BOUNDS, GEMMA4_LAYER, GEMMA4_OUTER};
use super::{TOWER, counts, only, rope_base};

pub(super) const GEMMA4: HfClass = HfClass {
    name: "Gemma4ForConditionalGeneration",
    keys: &[&[Key::With(gemma4)]],
    tensors: &[
        &in_stack(
            "v.blk.{l}.",
            "model.vision_tower.encoder.layers.{l}.",
            GEMMA4_LAYER,
        ),
        &in_stack(
            "v.blk.{l}.",
            "model.vision_tower.encoder.layers.{l}.",
            GEMMA4_BOUNDS,
        ),
        &in_stack("", "", GEMMA4_OUTER),
    ],
    other_parts: &[
        "model.language_model.",
        "model.audio_tower.",
        "model.embed_audio.",
        "lm_head.",
    ],
    defaults: &[
        ("hidden_size", 768),
        ("num_hidden_layers", 16),
        ("num_attention_heads", 12),
        ("num_key_value_heads", 12),
        ("head_dim", 64),
        ("patch_size", 16),
        ("pooling_kernel_size", 3),
    ],
    ..TOWER
};

fn gemma4(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    only(config, "model_type", &["gemma4_vision"])?;
    only(config, "hidden_activation", &["gelu_pytorch_tanh"])?;
    // Older files call the one kind that there is "default".
    only(config, "rope_parameters.rope_type", &["axial", "default"])?;
    if config.optional_flag("attention_bias")? == Some(true) {
        return Err(config.wrong("attention_bias", "false"));
    }
    let (n_heads, width) = (
        config.count("num_attention_heads")?,
        config.count("hidden_size")?,
    );
    if config.count("num_key_value_heads")? != n_heads {
        let wanted = format!("{n_heads}, as many as 'num_attention_heads'");
        return Err(config.wrong("num_key_value_heads", wanted));
    }
    if config.count("head_dim")?.checked_mul(n_heads) != Some(width) {
        let wanted =
            format!("'hidden_size' divided by 'num_attention_heads', {width} by {n_heads}");
        return Err(config.wrong("head_dim", wanted));
    }
    // What a row of a picture has for a token in the embeddings of layers.
    let padding = config.optional_number("text_config.pad_token_id")?;
    if padding.is_some_and(|padding| padding != 0.0) {
        return Err(config.wrong("text_config.pad_token_id", "0"));
    }
    let sight = "text_config.use_bidirectional_attention";
    only(config, sight, &["vision"])?;
    let sees_itself = config.optional_text(sight)? == Some("vision");
    keys.set("vision.sees_itself", sees_itself);
    keys.set("vision.projector_type", "gemma4v");
    keys.set_whole("clip.use_gelu", true);
    let eps = config.optional_number("rms_norm_eps")?.unwrap_or(1e-6);
    keys.set("vision.attention.layer_norm_epsilon", eps as f32);
    if let Some(base) = rope_base(config)? {
        keys.set_whole("clip.rope.freq_base", base as f32);
    }
    for key in ["standardize", "use_clipped_linears"] {
        let is_on = config.optional_flag(key)? == Some(true);
        keys.set(&format!("vision.{key}"), is_on);
    }
    counts(
        config,
        keys,
        &[
            ("block_count", "num_hidden_layers"),
            ("embedding_length", "hidden_size"),
            ("attention.head_count", "num_attention_heads"),
            ("patch_size", "patch_size"),
            ("projector.scale_factor", "pooling_kernel_size"),
        ],
    )
}
