//! [`Storage`]: how `config.json` says that weights are quantized. What is not read is refused by
//! its name, from the config alone: without this, tensors would be missing, or have other types
//! than a model needs.

use serde_json::Value;

use super::{HfConfig, ModelFileError};

/// The layout of the tensors of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Storage {
    /// A tensor is a matrix; one of 8-bit floats may have scales next to it ([`super::fp8`]).
    AsTheyAre,
    /// Whole numbers of this many bits, or of as many as the shapes say.
    Gptq {
        zero_points: ZeroPoints,
        bits: Option<usize>,
    },
    /// Whole numbers of 4 bits.
    Awq,
    /// compressed-tensors and ModelOpt: as the names and types of the tensors say.
    Compressed,
    /// gpt-oss: blocks of 4-bit floats, and their powers of two.
    FloatBlocks,
    /// BitNet: whole numbers of 2 bits with one scale for all.
    Bitnet(BitnetScale),
}

/// The use of a BitNet matrix's scale: its numbers are multiplied or divided by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BitnetScale {
    Multiplies,
    Divides,
}

/// The way GPTQ's zero points are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ZeroPoints {
    OneLess,
    AsStored,
}

/// Methods whose tensors are matrices as they are: 8-bit floats.
const PLAIN: [&str; 2] = ["fp8", "fbgemm_fp8"];
/// The formats of compressed-tensors that are read.
const COMPRESSED: [&str; 8] = [
    "dense",
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "mxfp4-pack-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",
];

/// The keys of `config.json` that say how weights are quantized.
const KEYS: [&str; 3] = [
    "quantization_config",
    "text_config.quantization_config",
    "compression_config",
];

/// How the weights of a config's model are stored.
///
/// # Errors
/// [`ModelFileError::Quantization`] with the method.
pub(super) fn storage(config: &HfConfig) -> Result<Storage, ModelFileError> {
    let mut storage = Storage::AsTheyAre;
    for settings in KEYS.into_iter().filter_map(|key| config.value(key)) {
        storage = read(settings).map_err(|method| ModelFileError::Quantization {
            file: config.file().to_owned(),
            method,
        })?;
    }
    Ok(storage)
}

fn text<'a>(settings: &'a Value, key: &str) -> Option<&'a str> {
    settings.get(key).and_then(Value::as_str)
}

/// The storage of one method, or the method's name.
fn read(settings: &Value) -> Result<Storage, String> {
    let method = text(settings, "quant_method");
    let other = || named(method, settings);
    match method {
        Some("gptq") => gptq(settings).ok_or_else(other),
        Some("awq") => awq(settings).ok_or_else(other),
        Some("compressed-tensors") => match compressed(settings) {
            Ok(()) => Ok(Storage::Compressed),
            Err(variant) => Err(format!("compressed-tensors {variant}")
                .trim_end()
                .to_owned()),
        },
        Some("mxfp4") => Ok(Storage::FloatBlocks),
        Some("bitnet") => bitnet(settings).ok_or_else(other),
        Some("modelopt") => match text(settings, "quant_algo") {
            Some("NVFP4") => Ok(Storage::Compressed),
            Some("FP8") => Ok(Storage::AsTheyAre),
            _ => Err(other()),
        },
        Some(method) if PLAIN.contains(&method) => Ok(Storage::AsTheyAre),
        _ => Err(other()),
    }
}

/// Single modules may have other settings (`dynamic`): then shapes tell the bits of each.
fn gptq(settings: &Value) -> Option<Storage> {
    let bits = settings.get("bits").and_then(Value::as_u64);
    let bits = usize::try_from(bits?).ok()?;
    let zero_points = match text(settings, "checkpoint_format") {
        None | Some("gptq") => ZeroPoints::OneLess,
        Some("gptq_v2") => ZeroPoints::AsStored,
        Some(_) => return None,
    };
    let is_marlin = settings.get("is_marlin_format").and_then(Value::as_bool) == Some(true);
    let overrides = settings.get("dynamic").and_then(Value::as_object);
    let has_overrides = overrides.is_some_and(|overrides| !overrides.is_empty());
    ([2, 3, 4, 8].contains(&bits) && !is_marlin).then_some(Storage::Gptq {
        zero_points,
        bits: (!has_overrides).then_some(bits),
    })
}

fn awq(settings: &Value) -> Option<Storage> {
    let bits = settings.get("bits").or_else(|| settings.get("w_bit"));
    let is_gemm = text(settings, "version").is_none_or(|name| name.eq_ignore_ascii_case("gemm"));
    let is_other = text(settings, "backend").is_some_and(|name| name != "autoawq");
    let is_read = bits.and_then(Value::as_u64) == Some(4) && is_gemm && !is_other;
    is_read.then_some(Storage::Awq)
}

/// Matrices that are rounded at each use (`online`) and norms of their inputs are not read.
fn bitnet(settings: &Value) -> Option<Storage> {
    let is_offline = text(settings, "quantization_mode").is_none_or(|mode| mode == "offline");
    let has_norms = settings.get("use_rms_norm").and_then(Value::as_bool) == Some(true);
    let scale = match text(settings, "linear_class") {
        None | Some("bitlinear") => BitnetScale::Divides,
        Some("autobitlinear") => BitnetScale::Multiplies,
        Some(_) => return None,
    };
    (is_offline && !has_norms).then_some(Storage::Bitnet(scale))
}

/// # Errors
/// What is not read of it.
fn compressed(settings: &Value) -> Result<(), String> {
    let format = text(settings, "format").unwrap_or_default();
    let groups = settings.get("config_groups").and_then(Value::as_object);
    let groups = || groups.into_iter().flat_map(|groups| groups.values());
    let formats = groups().filter_map(|group| text(group, "format"));
    if let Some(other) = [format]
        .into_iter()
        .chain(formats)
        .find(|f| !COMPRESSED.contains(f))
    {
        return Err(other.to_owned());
    }
    let sparsity = settings
        .get("sparsity_config")
        .and_then(|s| text(s, "format"));
    if let Some(other) = sparsity.filter(|format| *format != "dense") {
        return Err(other.to_owned());
    }
    let transforms = settings
        .get("transform_config")
        .and_then(|t| t.get("config_groups"));
    if transforms
        .and_then(Value::as_object)
        .is_some_and(|groups| !groups.is_empty())
    {
        return Err(format!("{format} with transforms"));
    }
    for weights in groups().filter_map(|group| group.get("weights")) {
        let bits = weights.get("num_bits").and_then(Value::as_u64);
        if let Some(bits) = bits.filter(|bits| ![2, 4, 8].contains(bits)) {
            return Err(format!("{format} {bits}-bit"));
        }
    }
    Ok(())
}

/// The method with what tells its variants apart: `bitsandbytes nf4`, `gptq 4-bit marlin`.
fn named(method: Option<&str>, settings: &Value) -> String {
    let is_on = |key: &str| settings.get(key).and_then(Value::as_bool) == Some(true);
    let bits = settings.get("bits").and_then(Value::as_u64);
    let variant = if is_on("load_in_8bit") {
        "int8".to_owned()
    } else if let Some(bits) = bits {
        let keys = ["backend", "version", "checkpoint_format"];
        let mut layouts = keys.into_iter().filter_map(|key| text(settings, key));
        let layout = layouts.find(|layout| Some(*layout) != method);
        format!("{bits}-bit {}", layout.unwrap_or_default())
    } else if is_on("use_rms_norm") {
        "use_rms_norm".to_owned()
    } else {
        let keys = [
            "bnb_4bit_quant_type",
            "format",
            "quant_algo",
            "quantization_mode",
            "linear_class",
        ];
        let known = keys.into_iter().find_map(|key| text(settings, key));
        known.unwrap_or_default().to_owned()
    };
    let method = method.unwrap_or("a quantization without a name");
    format!("{method} {variant}").trim_end().to_owned()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    fn read(json: &str) -> Result<Storage, String> {
        let config = HfConfig::new("'config.json'", serde_json::from_str(json).unwrap());
        storage(&config).map_err(|error| error.to_string())
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
            (r#"{"quant_method": "gptq", "bits": 5}"#, "gptq 5-bit"),
            (r#"{"quant_method": "gptq"}"#, "gptq"),
            (
                r#"{"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}"#,
                "gptq 4-bit marlin",
            ),
            (
                r#"{"quant_method": "awq", "bits": 4, "version": "gemv"}"#,
                "awq 4-bit gemv",
            ),
            (
                r#"{"quant_method": "awq", "bits": 4, "version": "gemm", "backend": "llm-awq"}"#,
                "awq 4-bit llm-awq",
            ),
            (
                r#"{"quant_method": "compressed-tensors", "format": "marlin-24"}"#,
                "compressed-tensors marlin-24",
            ),
            (
                r#"{"quant_method": "compressed-tensors", "format": "mixed-precision",
                    "config_groups": {"a": {"format": "mxfp8-quantized"}}}"#,
                "compressed-tensors mxfp8-quantized",
            ),
            (
                r#"{"quant_method": "compressed-tensors", "format": "pack-quantized",
                    "config_groups": {"a": {"weights": {"num_bits": 3}}}}"#,
                "compressed-tensors pack-quantized 3-bit",
            ),
            (
                r#"{"quant_method": "compressed-tensors", "format": "pack-quantized",
                    "sparsity_config": {"format": "sparse-24-bitmask"}}"#,
                "compressed-tensors sparse-24-bitmask",
            ),
            (
                r#"{"quant_method": "compressed-tensors", "format": "pack-quantized",
                    "transform_config": {"config_groups": {"R1": {}}}}"#,
                "compressed-tensors pack-quantized with transforms",
            ),
            (
                r#"{"quant_method": "compressed-tensors"}"#,
                "compressed-tensors",
            ),
            (
                r#"{"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}"#,
                "modelopt W4A8_AWQ",
            ),
            (
                r#"{"quant_method": "bitnet", "linear_class": "autobitlinear",
                    "quantization_mode": "online"}"#,
                "bitnet online",
            ),
            (
                r#"{"quant_method": "bitnet", "use_rms_norm": true}"#,
                "bitnet use_rms_norm",
            ),
            (
                r#"{"quant_method": "bitnet", "linear_class": "other"}"#,
                "bitnet other",
            ),
            (r#"{"load_in_4bit": 1}"#, "a quantization without a name"),
            ("7", "a quantization without a name"),
        ] {
            for (before, after) in [
                (r#"{"quantization_config": "#, "}"),
                (r#"{"text_config": {"quantization_config": "#, "}}"),
            ] {
                let error = read(&format!("{before}{settings}{after}")).unwrap_err();
                assert!(error.contains(&format!("weights in {name},")), "{error}");
            }
        }
    }

    #[test]
    fn what_is_read_is_known_by_its_storage() {
        let gptq = |zero_points, bits| Storage::Gptq { zero_points, bits };
        for (settings, wanted) in [
            ("null", Storage::AsTheyAre),
            (
                r#"{"quant_method": "mxfp4", "modules_to_not_convert": []}"#,
                Storage::FloatBlocks,
            ),
            (
                r#"{"quant_method": "fp8", "weight_block_size": [128, 128]}"#,
                Storage::AsTheyAre,
            ),
            (
                r#"{"quant_method": "gptq", "bits": 4, "desc_act": true, "sym": false}"#,
                gptq(ZeroPoints::OneLess, Some(4)),
            ),
            (
                r#"{"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2",
                    "dynamic": {"-:lm_head": {}}}"#,
                gptq(ZeroPoints::AsStored, None),
            ),
            (
                r#"{"quant_method": "awq", "bits": 4, "version": "GEMM"}"#,
                Storage::Awq,
            ),
            (
                r#"{"quant_method": "modelopt", "quant_algo": "NVFP4"}"#,
                Storage::Compressed,
            ),
            (
                r#"{"quant_method": "bitnet", "modules_to_not_convert": null}"#,
                Storage::Bitnet(BitnetScale::Divides),
            ),
            (
                r#"{"quant_method": "bitnet", "linear_class": "autobitlinear",
                    "quantization_mode": "offline", "use_rms_norm": false}"#,
                Storage::Bitnet(BitnetScale::Multiplies),
            ),
            (
                r#"{"quant_method": "compressed-tensors", "format": "int-quantized",
                    "sparsity_config": {}, "transform_config": {},
                    "config_groups": {"a": {"weights": {"num_bits": 8}, "format": null}}}"#,
                Storage::Compressed,
            ),
        ] {
            for key in ["quantization_config", "compression_config"] {
                let config = format!(r#"{{"{key}": {settings}}}"#);
                assert_eq!(read(&config), Ok(wanted), "{settings}");
            }
        }
        assert_eq!(read("{}"), Ok(Storage::AsTheyAre));
    }
}
