//! [`Hyperparameters`]: a model's sizes, read from the keys that all architectures share.
//!
//! Keys are `{architecture}.{name}` of the GGUF specification. Invariant: what comes out can be
//! used without further checks (heads divide, nothing is zero, the RoPE is complete). Knows no
//! architecture by name.

mod activation;
mod groups;
mod rope;

use kv_graph::weights::{WeightError, WeightInfo, WeightSource};

pub use activation::{ACTIVATION, activation_named, activation_names};

use crate::blocks::{AttentionBlock, OUTPUT, TOKEN_EMBEDDING};
use crate::error::ModelError;
use crate::gguf::{Array, FromValue, Metadata, Value};

/// More layers than any model has; a larger count is a broken file.
const MAX_LAYERS: usize = 4096;

const RMS_EPS: &str = "attention.layer_norm_rms_epsilon";
const LAYER_NORM_EPS: &str = "attention.layer_norm_epsilon";

/// The metadata of one architecture, by short key.
#[derive(Clone, Copy, Debug)]
pub struct Hyperparameters<'a> {
    metadata: &'a Metadata,
    architecture: &'a str,
}

/// Shape and format of a weight that some models of an architecture have and others do not. Its
/// values are not looked at: a header is all that a model is made of.
///
/// # Errors
/// [`ModelError::Weight`] where it is there but cannot be read: that is not the same as absent.
pub fn optional_weight(
    weights: &dyn WeightSource,
    name: &str,
) -> Result<Option<WeightInfo>, ModelError> {
    match weights.describe(name) {
        Ok(weight) => Ok(Some(weight)),
        Err(WeightError::Missing { .. }) => Ok(None),
        Err(other) => Err(ModelError::Weight(other)),
    }
}

/// Sizes of an attention layer's heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadSizes {
    /// Number of query heads.
    pub n_heads: usize,
    /// Number of key/value heads; divides `n_heads`.
    pub kv_heads: usize,
    /// Values of one query or key head.
    pub k_dim: usize,
    /// Values of one value head.
    pub v_dim: usize,
}

impl From<HeadSizes> for AttentionBlock {
    /// Attention of these heads and nothing more: the factor on its scores is that of the keys'
    /// size.
    fn from(heads: HeadSizes) -> Self {
        let HeadSizes {
            n_heads,
            kv_heads,
            k_dim,
            v_dim,
        } = heads;
        Self {
            n_heads,
            kv_heads,
            k_dim,
            v_dim,
            scale: 1.0 / (k_dim as f32).sqrt(),
            ..Self::default()
        }
    }
}

impl AttentionBlock {
    /// Its heads.
    pub fn head_sizes(&self) -> HeadSizes {
        HeadSizes {
            n_heads: self.n_heads,
            kv_heads: self.kv_heads,
            k_dim: self.k_dim,
            v_dim: self.v_dim,
        }
    }
}

impl<'a> Hyperparameters<'a> {
    /// The keys of `architecture`.
    pub fn new(metadata: &'a Metadata, architecture: &'a str) -> Self {
        Self {
            metadata,
            architecture,
        }
    }

    /// The whole key, as in the file.
    pub fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    /// A value that may be absent.
    ///
    /// # Errors
    /// [`ModelError::Metadata`] where it is of another type.
    pub fn optional<T: FromValue<'a>>(&self, name: &str) -> Result<Option<T>, ModelError> {
        Ok(self.metadata.optional(&self.key(name))?)
    }

    /// A value of whichever type.
    /// Whether the file has this setting.
    pub fn has(&self, name: &str) -> bool {
        self.value(name).is_some()
    }

    pub(crate) fn value(&self, name: &str) -> Option<&'a Value> {
        self.metadata.value(&self.key(name))
    }

    /// One truth value a layer, which some converters write as 0 or 1.
    pub(crate) fn flags(&self, name: &str, n_layers: usize) -> Result<Vec<bool>, ModelError> {
        if !matches!(
            self.value(name),
            Some(Value::Array(Array::I32(_) | Array::U32(_)))
        ) {
            return Ok(self.metadata.per_layer(&self.key(name), n_layers)?);
        }
        let numbers = self.numbers(name, n_layers)?.into_iter();
        let flag = |number| match number {
            0 | 1 => Ok(number == 1),
            _ => Err(self.wrong(name, format!("{number} is neither 0 nor 1"))),
        };
        numbers.map(flag).collect()
    }

    /// One truth value a layer, which may be absent.
    ///
    /// # Errors
    /// [`ModelError`] with the key.
    pub fn optional_flags(
        &self,
        name: &str,
        n_layers: usize,
    ) -> Result<Option<Vec<bool>>, ModelError> {
        Ok(self
            .metadata
            .optional_per_layer(&self.key(name), n_layers)?)
    }

    /// One number a layer, 0 where the layer has no such thing; a file may give one for all.
    ///
    /// # Errors
    /// [`ModelError::Metadata`] where it is absent, of another type or length.
    pub fn numbers(&self, name: &str, n_layers: usize) -> Result<Vec<u32>, ModelError> {
        Ok(self.metadata.per_layer(&self.key(name), n_layers)?)
    }

    /// A count that must be there and at least 1.
    ///
    /// # Errors
    /// [`ModelError`] with the key.
    pub fn count(&self, name: &str) -> Result<usize, ModelError> {
        let count: u32 = self.metadata.get(&self.key(name))?;
        match count {
            0 => Err(self.wrong(name, "0 is not possible; it must be at least 1".into())),
            n => Ok(n as usize),
        }
    }

    /// The same of one layer, where the file gives one number or one a layer.
    ///
    /// # Errors
    /// [`ModelError`] with the key.
    pub fn count_of_layer(
        &self,
        name: &str,
        layer: usize,
        n_layers: usize,
    ) -> Result<usize, ModelError> {
        let Some(Value::Array(_)) = self.value(name) else {
            return self.count(name);
        };
        let counts: Vec<u32> = self.metadata.per_layer(&self.key(name), n_layers)?;
        match counts.get(layer) {
            None | Some(0) => {
                let reason = format!("0 is not possible in layer {layer}; it must be at least 1");
                Err(self.wrong(name, reason))
            }
            Some(&count) => Ok(count as usize),
        }
    }

    /// One number for each layer, which may be absent.
    ///
    /// # Errors
    /// [`ModelError::Metadata`] where they are of another type, or not one a layer.
    pub fn factors(&self, name: &str, n_layers: usize) -> Result<Option<Vec<f32>>, ModelError> {
        Ok(self
            .metadata
            .optional_per_layer(&self.key(name), n_layers)?)
    }

    /// One number for each layer, or one for all, by the whole key.
    ///
    /// # Errors
    /// [`ModelError::Metadata`] where they are absent, of another type, or not one a layer.
    pub fn numbers_of(&self, key: &str, n_layers: usize) -> Result<Vec<f32>, ModelError> {
        Ok(self.metadata.per_layer(key, n_layers)?)
    }

    /// A positive number that may be absent.
    ///
    /// # Errors
    /// [`ModelError`] with the key.
    pub fn positive(&self, name: &str) -> Result<Option<f64>, ModelError> {
        match self.optional::<f64>(name)? {
            Some(x) if !(x.is_finite() && x > 0.0) => {
                Err(self.wrong(name, format!("{x} is not possible; it must be above 0")))
            }
            x => Ok(x),
        }
    }

    /// The error that a setting cannot be what it is.
    pub fn wrong(&self, name: &str, reason: String) -> ModelError {
        ModelError::Setting {
            key: self.key(name),
            reason,
        }
    }

    /// Number of layers.
    ///
    /// # Errors
    /// [`ModelError`] with the key.
    pub fn n_layers(&self) -> Result<usize, ModelError> {
        match self.count("block_count")? {
            n if n > MAX_LAYERS => Err(self.wrong(
                "block_count",
                format!("{n} layers; at most {MAX_LAYERS} are read"),
            )),
            n => Ok(n),
        }
    }

    /// Of all its layers, the number of those behind the decoder's last, which predict the tokens
    /// after the next one.
    ///
    /// # Errors
    /// [`ModelError`] with the key, where no layer would be left.
    pub fn n_layers_behind(&self, n_layers: usize) -> Result<usize, ModelError> {
        let key = "nextn_predict_layers";
        match self.optional::<u32>(key)?.unwrap_or(0) as usize {
            0 => Ok(0),
            n if n >= n_layers => {
                let reason = format!("{n} of {n_layers} layers are not possible");
                Err(self.wrong(key, reason))
            }
            n => Ok(n),
        }
    }

    /// `eps` of RMS norms, which some files give as that of layer norms (Nemotron-H).
    ///
    /// # Errors
    /// [`ModelError`] with the key.
    pub fn norm_eps(&self) -> Result<f32, ModelError> {
        self.eps_of_either([RMS_EPS, LAYER_NORM_EPS])
    }

    /// `eps` of layer norms; under the key of RMS norms where the file has no other (llama.cpp's
    /// Phi-3.5 MoE).
    ///
    /// # Errors
    /// [`ModelError`] with the key.
    pub fn layer_norm_eps(&self) -> Result<f32, ModelError> {
        self.eps_of_either([LAYER_NORM_EPS, RMS_EPS])
    }

    fn eps_of_either(&self, [own, other]: [&str; 2]) -> Result<f32, ModelError> {
        match (self.value(own), self.value(other)) {
            (None, Some(_)) => self.eps(other),
            _ => self.eps(own),
        }
    }

    fn eps(&self, name: &str) -> Result<f32, ModelError> {
        let eps: f32 = self.metadata.get(&self.key(name))?;
        if eps.is_finite() && eps >= 0.0 {
            Ok(eps)
        } else {
            Err(self.wrong(name, format!("{eps} is not possible")))
        }
    }

    /// Heads of every layer; a file may give one number or one a layer.
    ///
    /// # Errors
    /// [`ModelError`] with the key, where heads do not divide.
    pub fn heads(&self, n_layers: usize, dim: usize) -> Result<Vec<HeadSizes>, ModelError> {
        let heads = self.heads_of_each(n_layers)?.into_iter();
        heads
            .map(|(n_heads, kv_heads)| self.head_sizes(n_heads, kv_heads, dim))
            .collect()
    }

    /// Heads of every layer that attends: in hybrids, those with key/value heads.
    ///
    /// # Errors
    /// As for [`Self::heads`].
    pub fn heads_where_any(
        &self,
        n_layers: usize,
        dim: usize,
    ) -> Result<Vec<Option<HeadSizes>>, ModelError> {
        let heads = self.heads_of_each(n_layers)?.into_iter();
        let sizes = heads.map(|heads| match heads {
            (_, 0) => Ok(None),
            (n_heads, kv_heads) => self.head_sizes(n_heads, kv_heads, dim).map(Some),
        });
        sizes.collect()
    }

    /// Query and key/value heads of every layer.
    fn heads_of_each(&self, n_layers: usize) -> Result<Vec<(u32, u32)>, ModelError> {
        let key = |name: &str| self.key(name);
        let heads: Vec<u32> = self
            .metadata
            .per_layer(&key("attention.head_count"), n_layers)?;
        let kv_heads: Vec<u32> = self
            .metadata
            .optional_per_layer(&key("attention.head_count_kv"), n_layers)?
            .unwrap_or_else(|| heads.clone());
        Ok(heads.into_iter().zip(kv_heads).collect())
    }

    fn head_sizes(&self, n_heads: u32, kv_heads: u32, dim: usize) -> Result<HeadSizes, ModelError> {
        let k_dim = self.optional::<u32>("attention.key_length")?;
        let v_dim = self.optional::<u32>("attention.value_length")?;
        if n_heads == 0 || kv_heads == 0 || !n_heads.is_multiple_of(kv_heads) {
            let reason = format!("{kv_heads} key/value heads do not divide {n_heads} query heads");
            return Err(self.wrong("attention.head_count_kv", reason));
        }
        if k_dim.is_none() && !dim.is_multiple_of(n_heads as usize) {
            let reason = format!("{n_heads} heads do not divide the width {dim}");
            return Err(self.wrong("attention.head_count", reason));
        }
        let own = dim / n_heads as usize;
        let k_dim = k_dim.map_or(own, |d| d as usize);
        let v_dim = v_dim.map_or(own, |d| d as usize);
        if k_dim == 0 || v_dim == 0 {
            let reason = format!("heads of {k_dim} and {v_dim} values are not possible");
            return Err(self.wrong("attention.key_length", reason));
        }
        let (n_heads, kv_heads) = (n_heads as usize, kv_heads as usize);
        Ok(HeadSizes {
            n_heads,
            kv_heads,
            k_dim,
            v_dim,
        })
    }

    /// Name of the output matrix: the embedding matrix itself where the file has no other.
    ///
    /// # Errors
    /// [`ModelError::Weight`] where it cannot be read.
    pub fn output_weight(&self, weights: &dyn WeightSource) -> Result<String, ModelError> {
        let own = optional_weight(weights, OUTPUT)?.map(|_| OUTPUT);
        Ok(own.unwrap_or(TOKEN_EMBEDDING).to_owned())
    }

    /// Tokens of the vocabulary: the rows of the embedding matrix, which must be `[vocab, dim]`.
    ///
    /// # Errors
    /// [`ModelError`] where the matrix is absent or has another width.
    pub fn vocab(&self, weights: &dyn WeightSource, dim: usize) -> Result<usize, ModelError> {
        let name = TOKEN_EMBEDDING.to_owned();
        let Ok(weight) = weights.describe(TOKEN_EMBEDDING) else {
            return Err(ModelError::MissingTensor {
                name,
                shape: vec![0, dim],
            });
        };
        match weight.shape[..] {
            [vocab, width] if width == dim && vocab > 0 => Ok(vocab),
            ref got => {
                let wanted = vec![got.first().copied().unwrap_or(0), dim];
                Err(ModelError::TensorShape {
                    name,
                    wanted,
                    got: got.to_vec(),
                })
            }
        }
    }
}
