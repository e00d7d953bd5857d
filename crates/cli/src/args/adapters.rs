//! The flags of adapters and control vectors.
//!
//! Knows no model: [`crate::adapters`] opens them.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use model_core::adapters::{AdapterOptions, AdapterSpec, ControlVectorFile, LayerRange};

/// Adapters and control vectors of a model.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct AdapterArgs {
    /// LoRA adapter: a GGUF file or a PEFT directory, with a scale after = [default: 1]; once per
    /// adapter
    #[arg(long, value_name = "FILE[=SCALE]")]
    pub(crate) lora: Vec<LoraFlag>,
    /// The same in the form of llama.cpp; several with commas
    #[arg(
        long,
        value_name = "FILE:SCALE",
        value_delimiter = ',',
        hide_short_help = true
    )]
    pub(crate) lora_scaled: Vec<ScaledFile>,
    /// Control vector (GGUF) that is added to what leaves layers; once per file
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(crate) control_vector: Vec<PathBuf>,
    /// The same with a scale; several with commas
    #[arg(
        long,
        value_name = "FILE:SCALE",
        value_delimiter = ',',
        hide_short_help = true
    )]
    pub(crate) control_vector_scaled: Vec<ScaledFile>,
    /// First and last layer that control vectors are added to, counted from 0; one number is that
    /// layer alone
    #[arg(long, value_names = ["FIRST", "LAST"], num_args = 1..=2, hide_short_help = true)]
    pub(crate) control_vector_layer_range: Vec<usize>,
}

impl AdapterArgs {
    /// The adapters and control vectors that a model is to be loaded with.
    pub(crate) fn options(&self) -> AdapterOptions {
        let plain = self
            .lora
            .iter()
            .map(|LoraFlag { path, scale }| AdapterSpec {
                path: path.clone(),
                name: None,
                scale: *scale,
            });
        let scaled = self.lora_scaled.iter().map(|file| AdapterSpec {
            path: file.path.clone(),
            name: None,
            scale: file.scale,
        });
        let vector = |path: &PathBuf, scale| ControlVectorFile {
            path: path.clone(),
            scale,
        };
        let vectors = self.control_vector.iter().map(|path| vector(path, 1.0));
        let scaled_vectors = self.control_vector_scaled.iter();
        let scaled_vectors = scaled_vectors.map(|file| vector(&file.path, file.scale));
        AdapterOptions {
            adapters: plain.chain(scaled).collect(),
            control_vectors: vectors.chain(scaled_vectors).collect(),
            control_layers: match *self.control_vector_layer_range.as_slice() {
                [first, last] => Some(LayerRange { first, last }),
                [only] => Some(LayerRange {
                    first: only,
                    last: only,
                }),
                _ => None,
            },
        }
    }
}

/// `FILE`, or `FILE=SCALE`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LoraFlag {
    pub(crate) path: PathBuf,
    pub(crate) scale: f32,
}

impl FromStr for LoraFlag {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let scaled = text.rsplit_once('=').and_then(|(path, scale)| {
            let scale = scale.parse().ok()?;
            Some((path, scale))
        });
        // A file may have the sign in its name.
        let (path, scale) = scaled.unwrap_or((text, 1.0));
        named(path, scale).map(|(path, scale)| Self { path, scale })
    }
}

/// `FILE:SCALE`
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ScaledFile {
    pub(crate) path: PathBuf,
    pub(crate) scale: f32,
}

impl FromStr for ScaledFile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{text}' is not FILE:SCALE, with a number as SCALE");
        let (path, scale) = text.rsplit_once(':').ok_or_else(wrong)?;
        let scale = scale.parse().map_err(|_| wrong())?;
        named(path, scale).map(|(path, scale)| Self { path, scale })
    }
}

fn named(path: &str, scale: f32) -> Result<(PathBuf, f32), String> {
    if path.is_empty() {
        Err("there is no name of a file".to_owned())
    } else if scale.is_finite() {
        Ok((path.into(), scale))
    } else {
        Err(format!("the scale is {scale}: it must be a finite number"))
    }
}

/// `NAME=PATH`: vLLM's form.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LoraModule {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
}

impl FromStr for LoraModule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((name, path)) if !name.is_empty() && !path.is_empty() => Ok(Self {
                name: name.to_owned(),
                path: path.into(),
            }),
            _ => Err(format!("'{text}' is not NAME=PATH")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_read_behind_the_last_sign() {
        let lora = |text: &str| text.parse::<LoraFlag>().map(|f| (f.path, f.scale));
        assert_eq!(lora("a.gguf"), Ok(("a.gguf".into(), 1.0)));
        assert_eq!(lora("a.gguf=0.5"), Ok(("a.gguf".into(), 0.5)));
        assert_eq!(lora("r=8/a=-2"), Ok(("r=8/a".into(), -2.0)));
        assert_eq!(lora("r=x/a"), Ok(("r=x/a".into(), 1.0)));
        assert!(lora("a=nan").unwrap_err().contains("finite"));
        assert!(lora("=1").unwrap_err().contains("no name"));
        let scaled = |text: &str| text.parse::<ScaledFile>().map(|f| (f.path, f.scale));
        assert_eq!(scaled("C:a:2"), Ok(("C:a".into(), 2.0)));
        assert!(scaled("a.gguf").unwrap_err().contains("FILE:SCALE"));
        assert!("a".parse::<LoraModule>().is_err());
    }
}
