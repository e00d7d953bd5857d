//! The rotary embedding of a file.
//!
//! Invariant: a setting that is not supported is an error that names its key.

use kv_graph::rope::{RopeScaling, RopeSections, RopeSpec, RopeStyle, SectionOrder, YarnRamp};
use kv_graph::weights::WeightSource;

use super::{Hyperparameters, optional_weight};
use crate::blocks::LongRope;
use crate::error::ModelError;

/// Name of the weight with one divisor for each RoPE frequency.
const ROPE_FACTORS: &str = "rope_freqs.weight";

impl Hyperparameters<'_> {
    /// The rotary embedding of heads of `k_dim` values; where it depends on the length of the
    /// context ([`Hyperparameters::long_rope`]), that for the trained length.
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
        let (factors, scaling) = match self.long_rope(weights)? {
            None => (ROPE_FACTORS, self.rope_scaling()?),
            Some(long) => {
                // Those that are not chosen must fit as well.
                for name in [LongRope::LONG, LongRope::SHORT] {
                    has_factors(weights, name, n_rot)?;
                }
                let trained = self.count("context_length")?;
                (long.factors(trained), long.scaling(trained))
            }
        };
        let factors = has_factors(weights, factors, n_rot)?.then(|| factors.to_owned());
        Ok(RopeSpec {
            style,
            n_rot,
            base,
            scaling,
            factors,
        })
    }

    /// The pairs of values that rotate with the position of a token, with its row and with its
    /// column.
    ///
    /// # Errors
    /// [`ModelError`] with the key, where it is absent or its numbers do not make up what rotates.
    pub fn rope_sections(
        &self,
        order: SectionOrder,
        n_rot: usize,
    ) -> Result<RopeSections, ModelError> {
        let name = "rope.dimension_sections";
        // The fourth is for a coordinate that no model has.
        let found: Vec<u32> = self.metadata.per_layer(&self.key(name), 4)?;
        let pairs = found.iter().map(|&n| n as usize);
        match pairs.collect::<Vec<_>>()[..] {
            [positions, rows, columns, 0] if 2 * (positions + rows + columns) == n_rot => {
                Ok(RopeSections {
                    pairs: [positions, rows, columns],
                    order,
                })
            }
            _ => {
                let reason = format!(
                    "{found:?} is not possible: it must be three numbers that add up to {} and a 0",
                    n_rot / 2
                );
                Err(self.wrong(name, reason))
            }
        }
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

    /// The rule by which the length of the context chooses among two sets of divisors, where the
    /// file has two.
    ///
    /// # Errors
    /// [`ModelError`] where there is one set without the other, or one for any length besides.
    pub fn long_rope(&self, weights: &dyn WeightSource) -> Result<Option<LongRope>, ModelError> {
        let kind = self.optional::<&str>("rope.scaling.type")?;
        let names = [LongRope::LONG, LongRope::SHORT];
        let mut missing = Vec::new();
        for name in names {
            if optional_weight(weights, name)?.is_none() {
                missing.push(name);
            }
        }
        let has_any = missing.len() < names.len() || kind == Some("longrope");
        if let Some(name) = missing.first().filter(|_| has_any) {
            let reason = format!("tensor '{name}' is missing; LongRoPE needs both sets of factors");
            return Err(self.wrong("rope.scaling.type", reason));
        }
        if !has_any {
            return Ok(None);
        }
        if optional_weight(weights, ROPE_FACTORS)?.is_some() {
            let reason = format!("tensor '{ROPE_FACTORS}' is not possible with LongRoPE's");
            return Err(self.wrong("rope.scaling.type", reason));
        }
        self.check_long_rope_scaling()?;
        let factor = self.positive("rope.scaling.attn_factor")?.unwrap_or(1.0);
        // What Cellar's conversions write where it is not the same.
        let short = self.positive("rope.scaling.attn_factor_short")?;
        Ok(Some(LongRope {
            original_context: self.original_context()? as usize,
            short_attention: short.unwrap_or(factor),
            long_attention: factor,
        }))
    }

    /// That the file asks for no other scaling next to two sets of divisors.
    fn check_long_rope_scaling(&self) -> Result<(), ModelError> {
        let key = "rope.scaling.type";
        if let Some(kind) = self.optional::<&str>(key)?
            && !["none", "longrope"].contains(&kind)
        {
            let reason = format!("'{kind}' is not possible with LongRoPE's factors");
            return Err(self.wrong(key, reason));
        }
        let key = "rope.scaling.factor";
        if let Some(factor) = self.positive(key)?.filter(|&factor| factor != 1.0) {
            let reason = format!("{factor} is not supported with LongRoPE's factors");
            return Err(self.wrong(key, reason));
        }
        Ok(())
    }

    /// Tokens of the context before it was stretched: the trained length, where the file does not
    /// specify it.
    fn original_context(&self) -> Result<u32, ModelError> {
        let name = "rope.scaling.original_context_length";
        match self.optional(name)? {
            Some(0) => Err(self.wrong(name, "0 is not possible".into())),
            Some(n) => Ok(n),
            None => Ok(u32::try_from(self.count("context_length")?).unwrap_or(u32::MAX)),
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
                let reason = format!(
                    "'{other}' is not supported; known are none, linear, yarn and longrope"
                );
                Err(self.wrong("rope.scaling.type", reason))
            }
        }
    }

    /// The ramp by the key that Cellar's conversions write. Other GGUF files have none: gpt-oss was
    /// trained with an exact ramp, all others with a whole one.
    fn yarn_ramp(&self) -> Result<YarnRamp, ModelError> {
        let truncates = self.optional::<bool>("rope.scaling.yarn_truncate")?;
        Ok(if truncates.unwrap_or(self.architecture != "gpt-oss") {
            YarnRamp::Whole
        } else {
            YarnRamp::Exact
        })
    }

    fn yarn(&self, factor: f64) -> Result<RopeScaling, ModelError> {
        let own = self.positive("rope.scaling.attn_factor")?.unwrap_or(1.0);
        let formula = |scale: f64| 0.1 * scale * factor.ln() + 1.0;
        // YaRN as DeepSeek's authors extend it: divided by the same formula with another factor on
        // the logarithm.
        let key = "rope.scaling.yarn_log_multiplier";
        let divisor = match self.optional::<f32>(key)? {
            Some(0.0) => None,
            _ => self.positive(key)?,
        };
        Ok(RopeScaling::Yarn {
            factor,
            original_context: self.original_context()?,
            beta_fast: self
                .positive("rope.scaling.yarn_beta_fast")?
                .unwrap_or(32.0),
            beta_slow: self.positive("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
            attention_factor: own * formula(1.0) / divisor.map_or(1.0, formula),
            ramp: self.yarn_ramp()?,
        })
    }
}

/// True if there are divisors of this name; they must be one a frequency.
fn has_factors(weights: &dyn WeightSource, name: &str, n_rot: usize) -> Result<bool, ModelError> {
    let wanted = vec![n_rot / 2];
    match optional_weight(weights, name)? {
        None => Ok(false),
        Some(weight) if weight.shape == wanted => Ok(true),
        Some(weight) => Err(ModelError::TensorShape {
            name: name.to_owned(),
            wanted,
            got: weight.shape,
        }),
    }
}
