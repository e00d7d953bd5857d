//! [`RopeSettings`]: rotary settings of a `config.json` in any of the styles that are about.
//!
//! Newer files have one object `rope_parameters`, or one for each kind of layer inside it; older
//! ones `rope_theta` and `rope_scaling`. Source of the Llama 3 formula: Meta's reference
//! implementation of Llama 3.1; of YaRN: Peng et al., arXiv 2309.00071.

use std::f64::consts::TAU;

use kv_graph::rope::YarnRamp;

use super::rules::head_dim;
use super::{HfConfig, Keys, ModelFileError};

/// Rotary settings of one kind of layer.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSettings {
    /// Base of the frequencies.
    pub theta: f64,
    /// The part of a head that rotates, from its start: 1 is all of it.
    pub partial: f64,
    /// The way positions beyond the trained length are reached.
    pub kind: RopeKind,
}

/// The way positions beyond the trained length are reached.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeKind {
    /// They are not.
    Plain,
    /// Positions are divided.
    Linear {
        /// Divisor.
        factor: f64,
    },
    /// Low frequencies are divided, high ones are not.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Above the original context divided by this, a wavelength is long.
        low: f64,
        /// Below the original context divided by this, it is short.
        high: f64,
        /// Tokens of the original context.
        original: usize,
    },
    /// YaRN.
    Yarn {
        /// Divisor of low frequencies.
        factor: f64,
        /// Tokens of the original context.
        original: usize,
        /// Rotations above which a frequency stays.
        beta_fast: Option<f64>,
        /// Rotations below which a frequency is divided.
        beta_slow: Option<f64>,
        /// Factor on rotated values, where it is not the formula's.
        attention: Option<f64>,
        /// The beginning and end of the ramp between: at whole frequencies, or exact.
        ramp: YarnRamp,
    },
    /// One divisor for each frequency, for short and for long texts.
    LongRope {
        /// For texts within the original context.
        short: Vec<f32>,
        /// For longer ones.
        long: Vec<f32>,
        /// Tokens of the original context.
        original: usize,
        /// Factor on rotated values, where the file names one.
        attention: Option<f64>,
    },
}

impl RopeSettings {
    /// The settings of layers of this type, where the config tells types apart.
    ///
    /// # Errors
    /// [`ModelFileError`] naming the key that is missing, wrong or not known.
    pub fn read(config: &HfConfig, layer_type: Option<&str>) -> Result<Self, ModelFileError> {
        let theta = Self::base(config, layer_type)?;
        let partial = Self::rotated_part(config, layer_type)?;
        let scaled = layer_type
            .map(|t| format!("rope_parameters.{t}.rope_type"))
            .into_iter()
            .chain(
                [
                    "rope_parameters.rope_type",
                    "rope_scaling.rope_type",
                    "rope_scaling.type",
                ]
                .map(str::to_owned),
            )
            .find(|path| config.value(path).is_some());
        let kind = match &scaled {
            None => {
                for object in OBJECTS {
                    config.check_known(object, &KNOWN)?;
                }
                RopeKind::Plain
            }
            Some(path) => {
                let object = path.rsplit_once('.').map_or("", |(object, _)| object);
                kind(config, path, object)?
            }
        };
        Ok(Self {
            theta,
            partial,
            kind,
        })
    }
}

/// The objects that settings stand in.
const OBJECTS: [&str; 2] = ["rope_parameters", "rope_scaling"];

/// The first of the places of a setting that has it.
fn place_of(config: &HfConfig, layer_type: Option<&str>, key: &str) -> Option<String> {
    let own = layer_type.map(|t| format!("rope_parameters.{t}.{key}"));
    let shared = [
        format!("rope_parameters.{key}"),
        format!("rope_scaling.{key}"),
        key.to_owned(),
    ];
    let mut places = own.into_iter().chain(shared);
    places.find(|path| config.value(path).is_some())
}

/// For classes of which it is not certain what they take for a base that their config does not
/// have.
///
/// # Errors
/// [`ModelFileError`] where it does not have one.
pub fn rope_base_is_stated(config: &HfConfig, _: &mut Keys) -> Result<(), ModelFileError> {
    match place_of(config, None, "rope_theta") {
        Some(_) => Ok(()),
        None => Err(config.missing("rope_theta", "a number above 1")),
    }
}

fn checked_base(config: &HfConfig, key: &str) -> Result<f64, ModelFileError> {
    let wanted = "a number above 1";
    match config.optional_number(key)? {
        Some(theta) if theta.is_finite() && theta > 1.0 => Ok(theta),
        Some(_) => Err(config.wrong(key, wanted)),
        None => Err(config.missing(key, wanted)),
    }
}

impl RopeSettings {
    /// The settings of all layers: those of a class where the config has neither object of them.
    ///
    /// # Errors
    /// [`ModelFileError`] naming the key, also where a base stands alone that is not the class's.
    pub fn read_or(config: &HfConfig, usual: Self) -> Result<Self, ModelFileError> {
        let is_given = OBJECTS.iter().any(|object| config.value(object).is_some());
        match config.optional_number("rope_theta")? {
            _ if is_given => Self::read(config, None),
            Some(theta) if theta != usual.theta => {
                Err(config.missing(OBJECTS[0], "an object, next to 'rope_theta'"))
            }
            _ => Ok(usual),
        }
    }

    /// The base of layers of this type, which rotate whole heads without scaling. Older files have
    /// it under a key of its own.
    ///
    /// # Errors
    /// [`ModelFileError`] naming the key, also of another rotation.
    pub fn plain_base(
        config: &HfConfig,
        layer_type: &str,
        old: &str,
    ) -> Result<f64, ModelFileError> {
        let rope = Self::read(config, Some(layer_type))?;
        if rope.kind != RopeKind::Plain || rope.partial != 1.0 {
            let wanted = "a rotation of whole heads without scaling";
            return Err(config.wrong("rope_parameters", wanted));
        }
        let own = format!("rope_parameters.{layer_type}.rope_theta");
        match config.value(&own) {
            Some(_) => Ok(rope.theta),
            None => checked_base(config, old),
        }
    }

    /// The base of layers of this type.
    ///
    /// # Errors
    /// [`ModelFileError`] naming the key.
    pub fn base(config: &HfConfig, layer_type: Option<&str>) -> Result<f64, ModelFileError> {
        if let Some(layer_type) = layer_type {
            config.check_object(&format!("rope_parameters.{layer_type}"))?;
        }
        let Some(path) = place_of(config, layer_type, "rope_theta") else {
            return Ok(10_000.0);
        };
        checked_base(config, &path)
    }

    /// The part of a head that rotates in layers of this type.
    ///
    /// # Errors
    /// [`ModelFileError`] naming the key.
    pub fn rotated_part(
        config: &HfConfig,
        layer_type: Option<&str>,
    ) -> Result<f64, ModelFileError> {
        let Some(path) = place_of(config, layer_type, "partial_rotary_factor") else {
            return Ok(1.0);
        };
        let partial = config.number(&path)?;
        if partial > 0.0 && partial <= 1.0 {
            Ok(partial)
        } else {
            Err(config.wrong(&path, "a number above 0 and at most 1"))
        }
    }
}

fn kind(config: &HfConfig, path: &str, object: &str) -> Result<RopeKind, ModelFileError> {
    let at = |key: &str| format!("{object}.{key}");
    let positive = |key: &str| match config.optional_number(&at(key))? {
        Some(x) if !(x.is_finite() && x > 0.0) => Err(config.wrong(&at(key), "a number above 0")),
        x => Ok(x),
    };
    let needed =
        |key: &str| positive(key)?.ok_or_else(|| config.missing(&at(key), "a number above 0"));
    let original = || {
        let (key, own) = (
            "original_max_position_embeddings",
            at("original_max_position_embeddings"),
        );
        match (config.optional_count(&own)?, config.optional_count(key)?) {
            // Which of the two counts differs from class to class.
            (Some(n), Some(other)) if n != other => {
                Err(config.wrong(key, format!("{n}, as '{own}' is")))
            }
            (Some(n), _) | (None, Some(n)) => Ok(n),
            (None, None) => config.count("max_position_embeddings"),
        }
    };
    config.check_known(object, &KNOWN)?;
    match config.optional_text(path)?.unwrap_or("default") {
        "default" => Ok(RopeKind::Plain),
        "linear" => Ok(RopeKind::Linear {
            factor: needed("factor")?,
        }),
        "llama3" => Ok(RopeKind::Llama3 {
            factor: needed("factor")?,
            low: needed("low_freq_factor")?,
            high: needed("high_freq_factor")?,
            original: original()?,
        }),
        "yarn" => {
            let factor = needed("factor")?;
            let plain = |scale: f64| 0.1 * scale * factor.ln() + 1.0;
            let attention = match (positive("attention_factor")?, positive("mscale")?) {
                (Some(factor), _) => Some(factor),
                (None, Some(scale)) => {
                    positive("mscale_all_dim")?.map(|all| plain(scale) / plain(all))
                }
                (None, None) => None,
            };
            Ok(RopeKind::Yarn {
                factor,
                original: original()?,
                beta_fast: positive("beta_fast")?,
                beta_slow: positive("beta_slow")?,
                attention,
                ramp: match config.optional_flag(&at("truncate"))? {
                    Some(false) => YarnRamp::Exact,
                    _ => YarnRamp::Whole,
                },
            })
        }
        "longrope" | "su" => {
            let list = |key: &str| {
                let numbers = config.optional_numbers(&at(key))?;
                let numbers =
                    numbers.ok_or_else(|| config.missing(&at(key), "a list of numbers"))?;
                Ok::<_, ModelFileError>(numbers.into_iter().map(|n| n as f32).collect::<Vec<f32>>())
            };
            Ok(RopeKind::LongRope {
                short: list("short_factor")?,
                long: list("long_factor")?,
                original: original()?,
                attention: positive("attention_factor")?,
            })
        }
        _ => Err(config.wrong(path, "one of: default, linear, llama3, yarn, longrope")),
    }
}

/// The settings that are read here. `max_position_embeddings` and `finetuned` change nothing.
const KNOWN: [&str; 18] = [
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "finetuned",
    "high_freq_factor",
    "long_factor",
    "low_freq_factor",
    "max_position_embeddings",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "short_factor",
    "truncate",
    "type",
];

/// The keys and tensors of the rotation, where all layers have the same.
///
/// # Errors
/// [`ModelFileError`] naming the key.
pub fn rope_keys(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let settings = RopeSettings::read(config, None)?;
    settings.write(config, keys)
}

impl RopeSettings {
    /// The keys and tensors of these settings.
    ///
    /// # Errors
    /// [`ModelFileError`] naming the key, where a head cannot be rotated so.
    pub fn write(&self, config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
        let head = head_dim(config)?;
        // As transformers rounds it.
        let n_rot = (head as f64 * self.partial) as usize;
        if n_rot == 0 || !n_rot.is_multiple_of(2) {
            let key = if self.partial < 1.0 {
                "partial_rotary_factor"
            } else if config.value("head_dim").is_some() {
                "head_dim"
            } else {
                "hidden_size"
            };
            let wanted = format!("an even number of the {head} values of a head ({n_rot} is not)");
            return Err(config.wrong(key, wanted));
        }
        self.write_rotating(n_rot, config, keys)
    }

    /// The same for heads of which `n_rot` values rotate, whatever the config says of heads.
    ///
    /// # Errors
    /// [`ModelFileError`] naming the key.
    pub fn write_rotating(
        &self,
        n_rot: usize,
        config: &HfConfig,
        keys: &mut Keys,
    ) -> Result<(), ModelFileError> {
        keys.set("rope.dimension_count", super::class::as_u32(n_rot));
        keys.set("rope.freq_base", self.theta as f32);
        match &self.kind {
            RopeKind::Plain => {}
            RopeKind::Linear { factor } => {
                keys.set("rope.scaling.type", "linear");
                keys.set("rope.scaling.factor", *factor as f32);
            }
            RopeKind::Llama3 { .. } => {
                keys.add_vector("rope_freqs.weight", &self.llama3_divisors(n_rot))?;
            }
            RopeKind::Yarn {
                factor,
                original,
                beta_fast,
                beta_slow,
                attention,
                ramp,
            } => {
                keys.set("rope.scaling.yarn_truncate", ramp.is_whole());
                keys.set("rope.scaling.type", "yarn");
                keys.set("rope.scaling.factor", *factor as f32);
                let original = super::class::as_u32(*original);
                keys.set("rope.scaling.original_context_length", original);
                for (key, beta) in [("fast", beta_fast), ("slow", beta_slow)] {
                    if let Some(beta) = beta {
                        keys.set(&format!("rope.scaling.yarn_beta_{key}"), *beta as f32);
                    }
                }
                if let Some(attention) = attention {
                    // GGUF keeps what is multiplied with the formula's own factor.
                    let own = attention / (0.1 * factor.ln() + 1.0);
                    keys.set("rope.scaling.attn_factor", own as f32);
                }
            }
            RopeKind::LongRope {
                short,
                long,
                original,
                attention,
            } => {
                for (key, list) in [("short", short), ("long", long)] {
                    if list.len() != n_rot / 2 {
                        let wanted = format!("{} numbers, one a frequency", n_rot / 2);
                        return Err(config.wrong(&format!("rope_scaling.{key}_factor"), wanted));
                    }
                    keys.add_vector(&format!("rope_factors_{key}.weight"), list)?;
                }
                let trained = config.count("max_position_embeddings")?;
                let stretch = trained as f64 / *original as f64;
                let own = if stretch > 1.0 {
                    (1.0 + stretch.ln() / (*original as f64).ln()).sqrt()
                } else {
                    1.0
                };
                let original = super::class::as_u32(*original);
                keys.set("rope.scaling.type", "longrope");
                keys.set("rope.scaling.original_context_length", original);
                keys.set("rope.scaling.attn_factor", attention.unwrap_or(own) as f32);
            }
        }
        Ok(())
    }

    /// The divisor of each frequency of a rotation of `n_rot` values.
    fn llama3_divisors(&self, n_rot: usize) -> Vec<f32> {
        let RopeKind::Llama3 {
            factor,
            low,
            high,
            original,
        } = self.kind
        else {
            return vec![1.0; n_rot / 2];
        };
        let divisor = |i: usize| {
            let wavelength = TAU * self.theta.powf(2.0 * i as f64 / n_rot as f64);
            let turns = original as f64 / wavelength;
            let smooth = (turns - low) / (high - low);
            match (turns > high, turns < low) {
                (true, _) => 1.0,
                (_, true) => factor,
                _ => 1.0 / ((1.0 - smooth) / factor + smooth),
            }
        };
        (0..n_rot / 2).map(|i| divisor(i) as f32).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, layer_type: Option<&str>) -> Result<RopeSettings, ModelFileError> {
        let config = HfConfig::new("'config.json'", serde_json::from_str(text).unwrap());
        RopeSettings::read(&config, layer_type)
    }

    #[test]
    fn both_styles_say_the_same() {
        let new = r#"{"rope_parameters": {"rope_type": "linear", "factor": 4, "rope_theta": 5e5}}"#;
        let old = r#"{"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}}"#;
        let newer_old =
            r#"{"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4}}"#;
        let settings = read(new, None).unwrap();
        assert_eq!(settings.kind, RopeKind::Linear { factor: 4.0 });
        assert_eq!(settings, read(old, None).unwrap());
        assert_eq!(settings, read(newer_old, None).unwrap());
        let plain = read(r#"{"rope_theta": 5e5, "rope_scaling": null}"#, None).unwrap();
        assert_eq!((plain.theta, plain.kind), (5e5, RopeKind::Plain));
    }

    #[test]
    fn kinds_of_layers_have_settings_of_their_own() {
        let text = r#"{"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}"#;
        assert_eq!(read(text, Some("full_attention")).unwrap().theta, 1e6);
        assert_eq!(read(text, Some("sliding_attention")).unwrap().theta, 1e4);
    }

    #[test]
    fn the_ramp_of_yarn_is_read_and_what_is_unknown_is_named() {
        let with = |setting: &str| {
            let text = format!(
                r#"{{"max_position_embeddings": 64, "rope_parameters": {{"rope_type": "yarn", "factor": 4{setting}}}}}"#
            );
            read(&text, None)
        };
        let ramp = |setting: &str| match with(setting).unwrap().kind {
            RopeKind::Yarn { ramp, .. } => ramp,
            other => panic!("{other:?}"),
        };
        assert_eq!(ramp(""), YarnRamp::Whole);
        assert_eq!(ramp(r#", "truncate": true"#), YarnRamp::Whole);
        assert_eq!(ramp(r#", "truncate": false"#), YarnRamp::Exact);
        let error = with(r#", "llama_4_scaling_beta": 0.1"#).unwrap_err();
        assert_eq!(
            error.to_string(),
            "'config.json': 'rope_parameters.llama_4_scaling_beta' is 0.1, not a setting that Cellar knows"
        );
    }

    #[test]
    fn unknown_kinds_and_missing_numbers_are_named() {
        let dynamic = r#"{"rope_scaling": {"type": "dynamic", "factor": 2.0}}"#;
        let error = read(dynamic, None).unwrap_err().to_string();
        assert_eq!(
            error,
            "'config.json': 'rope_scaling.type' is \"dynamic\", not one of: default, linear, llama3, \
             yarn, longrope"
        );
        let error = read(r#"{"rope_parameters": {"rope_type": "yarn"}}"#, None).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("'rope_parameters.factor' is missing")
        );
        let error = read(r#"{"rope_theta": 0}"#, None).unwrap_err().to_string();
        assert_eq!(
            error,
            "'config.json': 'rope_theta' is 0, not a number above 1"
        );
    }

    #[test]
    fn both_sets_of_long_rope_are_kept_and_their_factor_is_computed() {
        // A case of the reference rotations (`rope_shift.json`): rotated values and head of 16.
        let text = r#"{"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 512,
            "original_max_position_embeddings": 32, "rope_theta": 10000.0, "rope_scaling":
            {"type": "longrope", "short_factor": [1, 1, 1, 1, 1, 1, 1, 2],
             "long_factor": [1.0, 1.37, 1.74, 2.11, 2.48, 2.85, 3.22, 3.59]}}"#;
        let translated = |text: &str| {
            let config = HfConfig::new("'config.json'", serde_json::from_str(text).unwrap());
            let mut keys = Keys::new("phi3");
            rope_keys(&config, &mut keys).map(|()| keys.into_parts())
        };
        let (metadata, vectors) = translated(text).unwrap();
        let number = |key: &str| metadata.get::<f32>(&format!("phi3.rope.{key}")).unwrap();
        // sqrt(1 + ln(512 / 32) / ln(32))
        assert_eq!(number("scaling.attn_factor"), 1.341_640_8);
        assert_eq!(
            metadata.get::<u32>("phi3.rope.scaling.original_context_length"),
            Ok(32)
        );
        let [short, long] = &vectors[..] else {
            panic!("{vectors:?}");
        };
        assert_eq!(short.name(), "rope_factors_short.weight");
        let rope = kv_graph::rope::RopeSpec {
            style: kv_graph::rope::RopeStyle::Neox,
            n_rot: 16,
            base: f64::from(number("freq_base")),
            scaling: kv_graph::rope::RopeScaling::None,
            factors: Some(long.name().to_owned()),
        };
        let wanted = [
            1.0,
            0.230_823_186_873_604_3,
            0.057_471_264_367_816_1,
            0.014_987_097_915_489_95,
            0.004_032_258_064_516_129,
            0.001_109_571_108_831_010_3,
            0.000_310_559_006_211_180_14,
            0.000_088_085_728_695_498_03,
        ];
        let found = rope.frequencies(Some(&long.to_f32()));
        for (found, wanted) in found.iter().zip(wanted) {
            assert!((found / wanted - 1.0).abs() < 1e-6, "{found} {wanted}");
        }
        let own = text.replace("\"type\"", "\"attention_factor\": 1.25, \"type\"");
        let (metadata, _) = translated(&own).unwrap();
        assert_eq!(metadata.get("phi3.rope.scaling.attn_factor"), Ok(1.25f32));
        let cut = text.replace("1, 2]", "2]");
        let error = translated(&cut).unwrap_err().to_string();
        assert!(
            error.contains("rope_scaling.short_factor") && error.contains("8 numbers"),
            "{error}"
        );
    }
}
