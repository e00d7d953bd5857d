//! Settings of attention and rotations that a class does not read: refused, as they would give other numbers.
//!
//! Knows names alone. Invariant: what a class reads is never refused here, whatever its value.

use serde_json::Value;

use super::{HfConfig, ModelFileError};

/// Parts of the names of settings that change scores or rotations.
const PARTS: [&str; 12] = [
    "rope",
    "rotary",
    "attn",
    "attention",
    "alibi",
    "clip_qkv",
    "softcap",
    "soft_cap",
    "qk_norm",
    "qk_layernorm",
    "position_embedding",
    "sliding_window",
];

/// Parts of the names of settings of training, of how a library computes, and of what the shapes of
/// tensors say.
const WITHOUT_EFFECT: [&str; 12] = [
    "full_precision",
    "attn_mode",
    "dropout",
    "pdrop",
    "implementation",
    "output_attentions",
    "flash",
    "softmax_in_fp32",
    "max_position_embeddings",
    "_heads",
    "_bias",
    "hidden_size",
];

/// Patterns of layers, and where the layers are listed.
const PATTERNS: [(&str, &str); 3] = [
    ("sliding_window_pattern", "layer_types"),
    ("global_attn_every_n_layers", "layer_types"),
    ("attention_types", "attention_layers"),
];

/// Checks that every setting of attention and rotations was read, or turns nothing on.
///
/// # Errors
/// [`ModelFileError::WrongKey`] with the first that was not.
pub(super) fn check(config: &HfConfig) -> Result<(), ModelFileError> {
    let has = |name: &str, parts: &[&str]| parts.iter().any(|part| name.contains(part));
    let unread = config.unread().into_iter().find(|(name, value)| {
        // A name that begins with this is a library's own.
        let is_setting = has(name, &PARTS) && !name.starts_with('_');
        let has_effect = is_setting && !has(name, &WITHOUT_EFFECT) && !is_off(value);
        has_effect && !is_said_twice(config, name, value) && !is_of_what_is_off(config, name)
    });
    match unread {
        Some((name, _)) => {
            let wanted = "absent: models of this class have no such setting that Cellar knows; \
                remove it if it has no effect";
            Err(config.wrong(name, wanted))
        }
        None => Ok(()),
    }
}

/// A setting that newer files have elsewhere, too: of rotations, or the pattern of layers that are listed.
fn is_said_twice(config: &HfConfig, name: &str, value: &Value) -> bool {
    if let Some((_, listed)) = PATTERNS.iter().find(|(pattern, _)| *pattern == name) {
        return config.value(listed).is_some();
    }
    let newer = config.value(&format!("rope_parameters.{name}"));
    newer.is_some_and(|newer| newer.as_f64() == value.as_f64())
}

/// Whether a setting is one of something that another key turns off (`alibi_bias_max` where `alibi` is false).
fn is_of_what_is_off(config: &HfConfig, name: &str) -> bool {
    let ends = name.match_indices('_').map(|(end, _)| end);
    let mut switches = ends.filter_map(|end| config.value(&name[..end]));
    switches.any(is_off)
}

fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(object) => object.is_empty(),
        Value::Bool(true) => false,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    fn checked(json: &str) -> Result<(), String> {
        let config = HfConfig::new("'config.json'", serde_json::from_str(json).unwrap());
        config.value("rope_parameters");
        config.value("use_qk_norm");
        check(&config).map_err(|error| error.to_string())
    }

    #[test]
    fn unread_settings_are_named() {
        for unread in [
            r#"{"attn_logit_softcapping": 30.0}"#,
            r#"{"clip_qkv": 8}"#,
            r#"{"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4}"#,
            r#"{"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"type": "dynamic"}}"#,
            r#"{"position_embedding_type": "relative_key"}"#,
        ] {
            let error = checked(unread).unwrap_err();
            assert!(
                error.contains("no such setting that Cellar knows"),
                "{error}"
            );
        }
    }

    #[test]
    fn what_is_read_or_off_or_of_no_effect_stays() {
        for fine in [
            r#"{"use_qk_norm": true, "alibi": false, "clip_qkv": null, "rope_scaling": {}}"#,
            r#"{"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 500000}"#,
            r#"{"attention_dropout": 0.1, "_attn_implementation": "sdpa", "attention_bias": true}"#,
            r#"{"max_position_embeddings": 4096, "num_attention_heads": 8}"#,
            r#"{"alibi": false, "alibi_bias_max": 8.0, "attention_layer_norm": false,
                "attention_layer_norm_with_affine": true}"#,
        ] {
            assert_eq!(checked(fine), Ok(()));
        }
    }
}
