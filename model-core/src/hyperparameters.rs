//! [`Hyperparameters`]: a model's sizes, read from the keys that all architectures share.
//!
//! Keys are `{architecture}.{name}` of the GGUF specification. Invariant: what comes out can be
//! used without further checks (heads divide, nothing is zero, the RoPE is complete). Knows no
//! architecture by name.

use kv_core::rope::{RopeScaling, RopeSpec, RopeStyle};
use kv_core::weights::{Weight, WeightError, WeightSource};

use crate::architecture::ModelError;
use crate::blocks::TOKEN_EMBEDDING;
use crate::gguf::{FromValue, Metadata, Value};

/// Name of the weight with one divisor for each RoPE frequency.
const ROPE_FACTORS: &str = "rope_freqs.weight";
/// More layers than any model has; a larger count is a broken file.
const MAX_LAYERS: usize = 4096;

/// The metadata of one architecture, by short key.
#[derive(Clone, Copy, Debug)]
pub struct Hyperparameters<'a> {
    metadata: &'a Metadata,
    architecture: &'a str,
}

/// A weight that some models of an architecture have and others do not.
///
/// # Errors
/// [`ModelError::Weight`] where it is there but cannot be read: that is not the same as absent.
pub fn optional_weight(
    weights: &dyn WeightSource,
    name: &str,
) -> Result<Option<Weight>, ModelError> {
    match weights.require(name) {
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
    pub(crate) fn value(&self, name: &str) -> Option<&'a Value> {
        self.metadata.value(&self.key(name))
    }

    /// One truth value a layer.
    pub(crate) fn flags(&self, name: &str, n_layers: usize) -> Result<Vec<bool>, ModelError> {
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

    /// `eps` of RMS norms.
    ///
    /// # Errors
    /// [`ModelError`] with the key.
    pub fn norm_eps(&self) -> Result<f32, ModelError> {
        self.eps("attention.layer_norm_rms_epsilon")
    }

    /// `eps` of layer norms.
    ///
    /// # Errors
    /// [`ModelError`] with the key.
    pub fn layer_norm_eps(&self) -> Result<f32, ModelError> {
        self.eps("attention.layer_norm_epsilon")
    }

    fn eps(&self, name: &str) -> Result<f32, ModelError> {
        let eps: f32 = self.metadata.get(&self.key(name))?;
        match eps.is_finite() && eps >= 0.0 {
            true => Ok(eps),
            false => Err(self.wrong(name, format!("{eps} is not possible"))),
        }
    }

    /// Heads of every layer; a file may give one number or one a layer.
    ///
    /// # Errors
    /// [`ModelError`] with the key, where heads do not divide.
    pub fn heads(&self, n_layers: usize, dim: usize) -> Result<Vec<HeadSizes>, ModelError> {
        let heads = self.heads_of_each(n_layers)?.into_iter();
        heads.map(|heads| self.head_sizes(heads, dim)).collect()
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
            heads => self.head_sizes(heads, dim).map(Some),
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

    fn head_sizes(
        &self,
        (n_heads, kv_heads): (u32, u32),
        dim: usize,
    ) -> Result<HeadSizes, ModelError> {
        let k_dim = self.optional::<u32>("attention.key_length")?;
        let v_dim = self.optional::<u32>("attention.value_length")?;
        if n_heads == 0 || kv_heads == 0 || n_heads % kv_heads != 0 {
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

    /// Tokens of the vocabulary: the rows of the embedding matrix, which must be `[vocab, dim]`.
    ///
    /// # Errors
    /// [`ModelError`] where the matrix is absent or has another width.
    pub fn vocab(&self, weights: &dyn WeightSource, dim: usize) -> Result<usize, ModelError> {
        let name = TOKEN_EMBEDDING.to_owned();
        let Some(weight) = weights.get(TOKEN_EMBEDDING) else {
            return Err(ModelError::MissingTensor {
                name,
                shape: vec![0, dim],
            });
        };
        match *weight.shape() {
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

    /// The rotary embedding of heads of `k_dim` values.
    ///
    /// # Errors
    /// [`ModelError`] with the key, where the scaling is unknown or a number impossible.
    pub fn rope(
        &self,
        style: RopeStyle,
        k_dim: usize,
        weights: &dyn WeightSource,
    ) -> Result<RopeSpec, ModelError> {
        let n_rot = self
            .optional::<u32>("rope.dimension_count")?
            .map_or(k_dim, |n| n as usize);
        if n_rot == 0 || n_rot > k_dim || n_rot % 2 != 0 {
            let reason = format!("{n_rot} rotated values of {k_dim}; it must be even and fit");
            return Err(self.wrong("rope.dimension_count", reason));
        }
        let base = self.rope_base("rope.freq_base")?.unwrap_or(10_000.0);
        let factors = match optional_weight(weights, ROPE_FACTORS)? {
            None => None,
            Some(weight) if weight.shape() == [n_rot / 2] => Some(ROPE_FACTORS.to_owned()),
            Some(weight) => {
                let (name, got) = (ROPE_FACTORS.to_owned(), weight.shape().to_vec());
                return Err(ModelError::TensorShape {
                    name,
                    wanted: vec![n_rot / 2],
                    got,
                });
            }
        };
        Ok(RopeSpec {
            style,
            n_rot,
            base,
            scaling: self.rope_scaling()?,
            factors,
        })
    }

    /// A base of rotary frequencies that may be absent.
    ///
    /// # Errors
    /// [`ModelError`] with the key.
    pub fn rope_base(&self, name: &str) -> Result<Option<f64>, ModelError> {
        match self.positive(name)? {
            Some(base) if base <= 1.0 => Err(self.wrong(name, format!("{base} must be above 1"))),
            base => Ok(base),
        }
    }

    fn rope_scaling(&self) -> Result<RopeScaling, ModelError> {
        let factor = self.positive("rope.scaling.factor")?;
        let kind = self.optional::<&str>("rope.scaling.type")?;
        let needs_factor = || {
            let reason = "is missing; this kind of RoPE scaling needs it".to_owned();
            factor.ok_or_else(|| self.wrong("rope.scaling.factor", reason))
        };
        match kind {
            None | Some("none") => match (kind, self.positive("rope.scale_linear")?) {
                (None, Some(factor)) => Ok(RopeScaling::Linear { factor }),
                _ => Ok(RopeScaling::None),
            },
            Some("linear") => Ok(RopeScaling::Linear {
                factor: needs_factor()?,
            }),
            Some("yarn") => self.yarn(needs_factor()?),
            Some(other) => {
                let reason = format!("'{other}' is not supported; known are none, linear and yarn");
                Err(self.wrong("rope.scaling.type", reason))
            }
        }
    }

    fn yarn(&self, factor: f64) -> Result<RopeScaling, ModelError> {
        let original_context = match self.optional("rope.scaling.original_context_length")? {
            Some(n) => n,
            None => u32::try_from(self.count("context_length")?).unwrap_or(u32::MAX),
        };
        if original_context == 0 {
            let name = "rope.scaling.original_context_length";
            return Err(self.wrong(name, "0 is not possible".into()));
        }
        let own = self.positive("rope.scaling.attn_factor")?.unwrap_or(1.0);
        Ok(RopeScaling::Yarn {
            factor,
            original_context,
            beta_fast: self
                .positive("rope.scaling.yarn_beta_fast")?
                .unwrap_or(32.0),
            beta_slow: self.positive("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
            attention_factor: own * (0.1 * factor.ln() + 1.0),
        })
    }
}
