//! Settings that change scores or rotations and that a class does not read: refused, as they would
//! give other numbers.
//!
//! Knows names alone, each whole: published configs also have keys that look alike and have no
//! effect (`rotary`, `scale_attn_weights`, `attn_type_list`). Invariant: what a class reads is
//! never refused here, whatever its value.

use serde_json::Value;

use super::{HfConfig, ModelFileError};

/// Settings that change the numbers of every class of transformers that reads them.
const SETTINGS: [&str; 13] = [
    "alibi",
    "attention_chunk_size",
    "attention_multiplier",
    "attn_logit_softcapping",
    "attn_scale",
    "attn_temperature_tuning",
    "clip_qkv",
    "final_logit_softcapping",
    "logits_soft_cap",
    "rope_interleaved",
    "rope_scaling",
    "scale_attn_by_inverse_layer_idx",
    "use_alibi",
];

/// Checks that every one of [`SETTINGS`] was read, or turns nothing on.
///
/// # Errors
/// [`ModelFileError::WrongKey`] with the first that was not.
pub(super) fn check(config: &HfConfig) -> Result<(), ModelFileError> {
    let mut unread = config.unread().into_iter();
    match unread.find(|(name, value)| SETTINGS.contains(name) && !is_off(value)) {
        Some((name, _)) => {
            let wanted = "absent: Cellar does not know this setting in models of this class; \
                remove it if it has no effect";
            Err(config.wrong(name, wanted))
        }
        None => Ok(()),
    }
}

fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::Object(object) => object.is_empty(),
        Value::Bool(true) | Value::String(_) | Value::Array(_) => false,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    fn checked(json: &str) -> Result<(), String> {
        let config = HfConfig::new("'config.json'", serde_json::from_str(json).unwrap());
        config.value("attn_scale");
        check(&config).map_err(|error| error.to_string())
    }

    #[test]
    fn unread_settings_are_named() {
        for unread in [
            r#"{"attn_logit_softcapping": 30.0}"#,
            r#"{"clip_qkv": 8}"#,
            r#"{"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"type": "dynamic"}}"#,
            r#"{"alibi": true}"#,
        ] {
            let error = checked(unread).unwrap_err();
            assert!(error.contains("does not know this setting"), "{error}");
        }
    }

    #[test]
    fn what_is_read_or_off_or_of_no_effect_stays() {
        for fine in [
            r#"{"attn_scale": 0.1, "alibi": false, "clip_qkv": null, "rope_scaling": {}}"#,
            r#"{"final_logit_softcapping": 0, "rotary": true, "scale_attn_weights": true}"#,
            r#"{"attention_dropout": 0.1, "alibi_bias_max": 8.0, "position_embedding_type": "absolute"}"#,
        ] {
            assert_eq!(checked(fine), Ok(()));
        }
    }
}
