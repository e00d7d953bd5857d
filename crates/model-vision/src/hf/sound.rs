//! Classes that hear: Qwen2-Audio.
//!
//! Knows no decoder.

use std::path::Path;

use model_core::gguf::Metadata;
use model_core::hf::{HfClass, HfConfig, Key, Keys, ModelFileError, TensorRule, in_stack, same};

use super::{PROJECTOR, TOWER, counts_of, only};
use crate::sound::{FRAME, HOP, SAMPLE_RATE};

/// Qwen2-Audio (Chu et al., arXiv 2407.10759).
pub(super) const QWEN2_AUDIO: HfClass = HfClass {
    name: "Qwen2AudioForConditionalGeneration",
    keys: &[&[Key::With(qwen2_audio)]],
    tensors: &[
        &in_stack("v.blk.{l}.", "audio_tower.layers.{l}.", WHISPER_LAYER),
        &in_stack("v.", "audio_tower.", WHISPER_OUTER),
        &in_stack("mm.fc.", "multi_modal_projector.linear.", super::MATRIX),
    ],
    places: &[
        ("audio_tower.", &["model.audio_tower."]),
        (PROJECTOR, &["model.multi_modal_projector."]),
    ],
    section: Some("audio_config"),
    defaults: &[
        ("d_model", 1280),
        ("encoder_layers", 32),
        ("encoder_attention_heads", 20),
        ("encoder_ffn_dim", 5120),
        ("num_mel_bins", 128),
        ("max_source_positions", 1500),
    ],
    ..TOWER
};

const WHISPER_LAYER: [TensorRule; 15] = [
    same("ln1.weight", "self_attn_layer_norm.weight"),
    same("ln1.bias", "self_attn_layer_norm.bias"),
    same("ln2.weight", "final_layer_norm.weight"),
    same("ln2.bias", "final_layer_norm.bias"),
    same("attn_q.weight", "self_attn.q_proj.weight"),
    same("attn_q.bias", "self_attn.q_proj.bias"),
    same("attn_k.weight", "self_attn.k_proj.weight"),
    same("attn_v.weight", "self_attn.v_proj.weight"),
    same("attn_v.bias", "self_attn.v_proj.bias"),
    same("attn_output.weight", "self_attn.out_proj.weight"),
    same("attn_output.bias", "self_attn.out_proj.bias"),
    same("ffn_up.weight", "fc1.weight"),
    same("ffn_up.bias", "fc1.bias"),
    same("ffn_down.weight", "fc2.weight"),
    same("ffn_down.bias", "fc2.bias"),
];

const WHISPER_OUTER: [TensorRule; 7] = [
    same("stem.weight", "conv1.weight"),
    same("stem.bias", "conv1.bias"),
    same("patch_embd.weight", "conv2.weight"),
    same("patch_embd.bias", "conv2.bias"),
    same("position_embd.weight", "embed_positions.weight"),
    same("post_ln.weight", "layer_norm.weight"),
    same("post_ln.bias", "layer_norm.bias"),
];

/// Refuses what a directory says of its processor of sounds where that makes other frames.
///
/// # Errors
/// [`ModelFileError`] naming the key, or where a file cannot be read.
pub(super) fn check_processor(directory: &Path, metadata: &Metadata) -> Result<(), ModelFileError> {
    let n_bins: Option<u32> = metadata.optional("clip.audio.num_mel_bins").ok().flatten();
    for (file, object) in [
        ("processor_config.json", "feature_extractor."),
        ("preprocessor_config.json", ""),
    ] {
        let path = directory.join(file);
        if !path.exists() {
            continue;
        }
        let config = HfConfig::open(&path)?;
        for (key, wanted) in [
            ("sampling_rate", Some(SAMPLE_RATE)),
            ("hop_length", Some(HOP as u32)),
            ("n_fft", Some(FRAME as u32)),
            ("feature_size", n_bins),
            ("dither", Some(0)),
        ] {
            let key = format!("{object}{key}");
            let stated = config.optional_number(&key)?;
            if let (Some(stated), Some(wanted)) = (stated, wanted)
                && stated != f64::from(wanted)
            {
                return Err(config.wrong(&key, wanted.to_string()));
            }
        }
    }
    Ok(())
}

fn qwen2_audio(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    only(config, "model_type", &["qwen2_audio_encoder"])?;
    only(config, "activation_function", &["gelu"])?;
    keys.set("audio.projector_type", "qwen2a");
    keys.set("audio.attention.layer_norm_epsilon", 1e-5f32);
    let names = [
        ("embedding_length", "d_model"),
        ("block_count", "encoder_layers"),
        ("attention.head_count", "encoder_attention_heads"),
        ("num_mel_bins", "num_mel_bins"),
    ];
    counts_of(config, keys, "audio", &names)?;
    // What tensors say, too.
    for key in ["encoder_ffn_dim", "max_source_positions"] {
        config.count(key)?;
    }
    Ok(())
}
