//! The flags that change what a model's file says: its rotary embedding, and any other setting.
//!
//! Invariant: they become values of metadata, which are checked as those of the file are.

use std::str::FromStr;

use clap::{Args, ValueEnum};
use model_core::gguf::Value;

/// Values in place of those of a model's file.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct OverrideArgs {
    /// Base of the rotary frequencies [default: that of the model]
    #[arg(long, value_name = "N", value_parser = positive, hide_short_help = true)]
    pub(crate) rope_freq_base: Option<f32>,
    /// Factor on positions: 0.5 stretches the context to twice its length [default: that of the
    /// model]
    #[arg(long, value_name = "N", value_parser = positive, hide_short_help = true, conflicts_with = "rope_scale")]
    pub(crate) rope_freq_scale: Option<f32>,
    /// How many times longer the context is: the inverse of --rope-freq-scale
    #[arg(long, value_name = "N", value_parser = positive, hide_short_help = true)]
    pub(crate) rope_scale: Option<f32>,
    /// How positions beyond the trained length are scaled [default: as the model's file says, or
    /// linear where a factor is given]
    #[arg(long, value_enum, value_name = "HOW", hide_short_help = true)]
    pub(crate) rope_scaling: Option<RopeScalingName>,
    /// YaRN: the context length of the training [default: that of the model]
    #[arg(long, value_name = "N", hide_short_help = true)]
    pub(crate) yarn_orig_ctx: Option<u32>,
    /// YaRN: factor on the rotated values, on top of the usual one
    #[arg(long, value_name = "N", value_parser = positive, hide_short_help = true)]
    pub(crate) yarn_attn_factor: Option<f32>,
    /// YaRN: rotations over the trained length up to which a frequency is scaled
    #[arg(long, value_name = "N", value_parser = positive, hide_short_help = true)]
    pub(crate) yarn_beta_slow: Option<f32>,
    /// YaRN: rotations over the trained length from which a frequency is kept
    #[arg(long, value_name = "N", value_parser = positive, hide_short_help = true)]
    pub(crate) yarn_beta_fast: Option<f32>,
    /// A setting in place of that of the file: KEY=int:N, KEY=float:X, KEY=bool:true or
    /// KEY=str:TEXT; several with commas, or once per setting
    #[arg(
        long,
        value_name = "KEY=TYPE:VALUE",
        value_delimiter = ',',
        hide_short_help = true
    )]
    pub(crate) override_kv: Vec<Override>,
}

/// The scaling of positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RopeScalingName {
    /// Not at all
    None,
    /// All positions alike
    Linear,
    /// High frequencies are kept (YaRN)
    Yarn,
}

/// A setting with its value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Override {
    key: String,
    value: OverrideValue,
}

#[derive(Clone, Debug, PartialEq)]
enum OverrideValue {
    Int(i64),
    Float(f64),
    Bool(bool),
    Text(String),
}

impl OverrideArgs {
    /// True if nothing is changed.
    pub(crate) fn is_empty(&self) -> bool {
        self.changes("").is_empty()
    }

    /// The settings of a model of this architecture that change, in the order in which they do.
    pub(crate) fn changes(&self, architecture: &str) -> Vec<(String, Value)> {
        let mut changes = Vec::new();
        let mut set = |key: &str, value: Option<Value>| {
            if let Some(value) = value {
                changes.push((format!("{architecture}.rope.{key}"), value));
            }
        };
        let factor = self
            .rope_scale
            .or(self.rope_freq_scale.map(|scale| 1.0 / scale));
        let scaling = match (self.rope_scaling, factor) {
            (Some(RopeScalingName::None), _) => Some("none"),
            (Some(RopeScalingName::Yarn), _) => Some("yarn"),
            (Some(RopeScalingName::Linear), _) | (None, Some(_)) => Some("linear"),
            (None, None) => None,
        };
        let number = |value: Option<f32>| value.map(Value::F32);
        set("freq_base", number(self.rope_freq_base));
        set(
            "scaling.type",
            scaling.map(|name| Value::String(name.to_owned())),
        );
        set("scaling.factor", number(factor));
        let trained = self.yarn_orig_ctx.filter(|n| *n > 0);
        set("scaling.original_context_length", trained.map(Value::U32));
        set("scaling.attn_factor", number(self.yarn_attn_factor));
        set("scaling.yarn_beta_slow", number(self.yarn_beta_slow));
        set("scaling.yarn_beta_fast", number(self.yarn_beta_fast));
        let own = self.override_kv.iter();
        changes.extend(own.map(|change| (change.key.clone(), change.value.value())));
        changes
    }
}

impl OverrideValue {
    fn value(&self) -> Value {
        match self {
            Self::Int(n) => u32::try_from(*n).map_or(Value::I64(*n), Value::U32),
            Self::Float(x) => Value::F32(*x as f32),
            Self::Bool(flag) => Value::Bool(*flag),
            Self::Text(text) => Value::String(text.clone()),
        }
    }
}

impl FromStr for Override {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("'{text}' is not KEY=TYPE:VALUE, where TYPE is int, float, bool or str");
        let (key, typed) = text.split_once('=').ok_or_else(wrong)?;
        let (kind, value) = typed.split_once(':').ok_or_else(wrong)?;
        let no_value = || format!("'{value}' is no value of type {kind}");
        let value = match kind {
            "int" => OverrideValue::Int(value.parse().map_err(|_| no_value())?),
            "float" => OverrideValue::Float(value.parse().map_err(|_| no_value())?),
            "bool" => OverrideValue::Bool(value.parse().map_err(|_| no_value())?),
            "str" => OverrideValue::Text(value.to_owned()),
            _ => return Err(wrong()),
        };
        if key.is_empty() {
            return Err(wrong());
        }
        let key = key.to_owned();
        Ok(Self { key, value })
    }
}

fn positive(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        _ => Err("a number above 0 is needed".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_become_settings_of_the_file() {
        let args = OverrideArgs {
            rope_freq_scale: Some(0.25),
            rope_scaling: Some(RopeScalingName::Yarn),
            override_kv: vec!["llama.context_length=int:9".parse().unwrap()],
            ..OverrideArgs::default()
        };
        let text = |text: &str| Value::String(text.to_owned());
        assert_eq!(
            args.changes("llama"),
            [
                ("llama.rope.scaling.type".to_owned(), text("yarn")),
                ("llama.rope.scaling.factor".to_owned(), Value::F32(4.0)),
                ("llama.context_length".to_owned(), Value::U32(9)),
            ]
        );
        assert!(OverrideArgs::default().is_empty());
    }

    #[test]
    fn a_setting_has_a_type_that_its_value_fits() {
        let read = |text: &str| text.parse::<Override>().map(|change| change.value.value());
        assert_eq!(read("a=int:-1"), Ok(Value::I64(-1)));
        assert_eq!(read("a=float:0.5"), Ok(Value::F32(0.5)));
        assert_eq!(read("a=bool:true"), Ok(Value::Bool(true)));
        assert_eq!(read("a=str:b:c=d"), Ok(Value::String("b:c=d".into())));
        for wrong in ["a", "a=1", "a=u8:1", "=int:1", "a=int:x", "a=bool:1"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
