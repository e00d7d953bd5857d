//! Weights that are quantized in a way that is not read: refused by its name, from `config.json`
//! alone. Without this, tensors would be missing, or have other types than a model needs.

use serde_json::Value;

use super::{HfConfig, ModelFileError};

/// Methods whose weights are read: the blocks of gpt-oss, and 8-bit floats ([`super::fp8`]).
const KNOWN: [&str; 3] = ["mxfp4", "fp8", "fbgemm_fp8"];
/// The format of compressed-tensors that is read: 8-bit floats, too.
const KNOWN_COMPRESSED: &str = "float-quantized";

/// The keys of `config.json` that say how weights are quantized.
const KEYS: [&str; 3] = [
    "quantization_config",
    "text_config.quantization_config",
    "compression_config",
];

/// # Errors
/// [`ModelFileError::Quantization`] with the method.
pub(super) fn check(config: &HfConfig) -> Result<(), ModelFileError> {
    for settings in KEYS.into_iter().filter_map(|key| config.value(key)) {
        let method = settings.get("quant_method").and_then(Value::as_str);
        let format = settings.get("format").and_then(Value::as_str);
        let is_known = match method {
            Some("compressed-tensors") => format == Some(KNOWN_COMPRESSED),
            Some(method) => KNOWN.contains(&method),
            None => false,
        };
        if !is_known {
            return Err(ModelFileError::Quantization {
                file: config.file().to_owned(),
                method: named(method, settings),
            });
        }
    }
    Ok(())
}

/// The method with what tells its variants apart: `bitsandbytes nf4`, `gptq 4-bit`.
fn named(method: Option<&str>, settings: &Value) -> String {
    let text = |key: &str| settings.get(key).and_then(Value::as_str);
    let is_on = |key: &str| settings.get(key).and_then(Value::as_bool) == Some(true);
    let bits = settings.get("bits").and_then(Value::as_u64);
    let variant = if is_on("load_in_8bit") {
        "int8".to_owned()
    } else if let Some(bits) = bits {
        format!("{bits}-bit")
    } else {
        let keys = ["bnb_4bit_quant_type", "format", "quant_algo"];
        let known = keys.into_iter().find_map(text);
        known.unwrap_or_default().to_owned()
    };
    let method = method.unwrap_or("a quantization without a name");
    format!("{method} {variant}").trim_end().to_owned()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    fn checked(json: &str) -> Result<(), String> {
        let config = HfConfig::new("'config.json'", serde_json::from_str(json).unwrap());
        check(&config).map_err(|error| error.to_string())
    }

    #[test]
    fn methods_are_named_with_their_variant() {
        for (settings, name) in [
            (
                r#"{"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4"}"#,
                "bitsandbytes nf4",
            ),
            (
                r#"{"quant_method": "bitsandbytes", "load_in_8bit": true, "bnb_4bit_quant_type": "fp4"}"#,
                "bitsandbytes int8",
            ),
            (
                r#"{"quant_method": "gptq", "bits": 4, "desc_act": true}"#,
                "gptq 4-bit",
            ),
            (
                r#"{"quant_method": "awq", "bits": 4, "version": "gemm"}"#,
                "awq 4-bit",
            ),
            (
                r#"{"quant_method": "compressed-tensors", "format": "pack-quantized"}"#,
                "compressed-tensors pack-quantized",
            ),
            (
                r#"{"quant_method": "modelopt", "quant_algo": "NVFP4"}"#,
                "modelopt NVFP4",
            ),
            (r#"{"load_in_4bit": 1}"#, "a quantization without a name"),
            ("7", "a quantization without a name"),
        ] {
            for (before, after) in [
                (r#"{"quantization_config": "#, "}"),
                (r#"{"text_config": {"quantization_config": "#, "}}"),
            ] {
                let error = checked(&format!("{before}{settings}{after}")).unwrap_err();
                assert!(error.contains(&format!("weights in {name},")), "{error}");
            }
        }
    }

    #[test]
    fn what_is_read_or_absent_stays() {
        for fine in [
            "{}",
            r#"{"quantization_config": null}"#,
            r#"{"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}}"#,
            r#"{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}"#,
            r#"{"compression_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}}"#,
        ] {
            assert_eq!(checked(fine), Ok(()));
        }
    }
}
