//! What the attention of a member's layers is, of a file.
//!
//! Invariant: a setting that its row does not know is an error that names the key. Knows no
//! member.

use kv_core::Window;
use kv_graph::rope::{RopeScaling, RopeSections, RopeSpec};
use kv_graph::weights::WeightSource;
use kv_graph::{Alibi, PositionScale};
use model_core::architecture::ModelError;
use model_core::blocks::{
    AttentionBlock, NormKind, OutputNorm, QkNorm, QkvBias, QkvWeights, Sinks,
};
use model_core::hyperparameters::{HeadSizes, Hyperparameters, optional_weight};

use crate::member::{
    Biases, HeadWidths, LayerSinks, LayerWindows, LlamaLike, Positions, QkNormed, QkvClamp,
    QueryScale, RotatedLayers, SubNorms, WindowedRope,
};

/// The traits that the attention of all layers shares.
pub(crate) struct AttentionTraits {
    pub(crate) norm_eps: f32,
    /// The file's value, if there is one.
    pub(crate) scale: Option<f32>,
    pub(crate) soft_cap: Option<f32>,
    pub(crate) weights: QkvWeights,
    pub(crate) bias: QkvBias,
    pub(crate) qk_norm: QkNorm,
    pub(crate) query_scale: Option<PositionScale>,
    pub(crate) rotated: RotatedLayers,
    pub(crate) clamp: Option<f32>,
    /// The largest linear bias, where there are any.
    pub(crate) max_bias: Option<f32>,
}

/// The rotation of queries and keys of a layer.
#[derive(Default)]
pub(crate) struct Rotation {
    pub(crate) rope: Option<RopeSpec>,
    pub(crate) sections: Option<RopeSections>,
}

impl LlamaLike {
    /// The attention of a layer; one that does not rotate has no norms without a gain.
    pub(crate) fn attention_block(
        &self,
        shared: &AttentionTraits,
        heads: HeadSizes,
        scale: f32,
        window: Window,
        rotation: Rotation,
    ) -> AttentionBlock {
        let Rotation { rope, sections } = rotation;
        let tempered = matches!(self.query_scale, QueryScale::Tempered { .. });
        let query_scale = shared.query_scale.filter(|_| !tempered || rope.is_none());
        let qk_norm = match (shared.qk_norm, &rope) {
            (QkNorm::PerHeadPlain, None) => QkNorm::None,
            (norm, _) => norm,
        };
        AttentionBlock {
            scale,
            soft_cap: shared.soft_cap,
            weights: shared.weights,
            bias: shared.bias,
            qk_norm,
            norm_eps: shared.norm_eps,
            rope,
            sections,
            query_scale,
            clamp: shared.clamp,
            alibi: shared.max_bias.map(|max_bias| Alibi {
                max_bias,
                factor: match self.positions {
                    Positions::ScaledBiasesIfNamed => scale,
                    _ => 1.0,
                },
            }),
            sinks: match self.sinks {
                LayerSinks::All => Sinks::PerHead,
                LayerSinks::Windowed if window != Window::Full => Sinks::PerHead,
                LayerSinks::Windowed | LayerSinks::None => Sinks::None,
            },
            output_norm: match self.sub_norms {
                SubNorms::None => OutputNorm::None,
                SubNorms::BeforeOutputs => OutputNorm::Rms,
            },
            window,
            ..heads.into()
        }
    }

    pub(crate) fn windows(
        &self,
        hyper: &Hyperparameters<'_>,
        n: usize,
    ) -> Result<Vec<Window>, ModelError> {
        match self.windows {
            LayerWindows::None => Ok(vec![Window::Full; n]),
            LayerWindows::Sliding { pattern, .. } => hyper.windows(n, pattern),
            LayerWindows::IfNamed { pattern, .. } => hyper.windows_if_named(n, pattern),
            LayerWindows::Chunked { pattern, n_tokens } => {
                let n_tokens = match hyper.optional::<u32>("attention.chunk_size")? {
                    Some(0) => {
                        let reason = "0 is not possible; it must be at least 1".to_owned();
                        return Err(hyper.wrong("attention.chunk_size", reason));
                    }
                    own => own.unwrap_or(n_tokens),
                };
                let window = |layer| {
                    if pattern.is_windowed(layer) {
                        Window::Chunked(n_tokens)
                    } else {
                        Window::Full
                    }
                };
                Ok((0..n).map(window).collect())
            }
        }
    }

    /// The layers that rotate, of the file.
    fn rotated(&self, hyper: &Hyperparameters<'_>) -> Result<RotatedLayers, ModelError> {
        match self.rotated {
            RotatedLayers::WindowedIfNamed => Ok(if hyper.names_window()? {
                RotatedLayers::Windowed
            } else {
                RotatedLayers::All
            }),
            other => Ok(other),
        }
    }

    /// The layers that rotate, where the file names them.
    pub(crate) fn rotating(
        &self,
        hyper: &Hyperparameters<'_>,
        n_layers: usize,
    ) -> Result<Option<Vec<bool>>, ModelError> {
        let key = "attention.rope_pattern";
        let named = hyper.optional_flags(key, n_layers)?;
        match (self.rotated, &named) {
            (RotatedLayers::AllButEvery(_) | RotatedLayers::NamedOrAll, _) | (_, None) => Ok(named),
            _ => {
                let reason = format!("is not possible: {} has no such pattern", self.name);
                Err(hyper.wrong(key, reason))
            }
        }
    }

    /// The rotation in a layer with this window.
    pub(crate) fn rope_of(
        &self,
        hyper: &Hyperparameters<'_>,
        window: Window,
        k_dim: usize,
        weights: &dyn WeightSource,
    ) -> Result<RopeSpec, ModelError> {
        if self.head_widths == HeadWidths::ByWindow && window != Window::Full {
            return self.windowed_rope(hyper, k_dim);
        }
        let rope = hyper.rope(self.rope, k_dim, weights)?;
        let base = match self.windows.rope() {
            _ if window == Window::Full => return Ok(rope),
            WindowedRope::Same => return Ok(rope),
            WindowedRope::Own(base) => base,
            WindowedRope::Unstretched => rope.base,
        };
        Ok(RopeSpec {
            base: hyper.rope_base("rope.freq_base_swa")?.unwrap_or(base),
            scaling: RopeScaling::None,
            factors: None,
            ..rope
        })
    }

    pub(crate) fn shared(
        &self,
        hyper: &Hyperparameters<'_>,
        weights: &dyn WeightSource,
    ) -> Result<AttentionTraits, ModelError> {
        Ok(AttentionTraits {
            norm_eps: match self.norm {
                NormKind::Rms => hyper.norm_eps()?,
                NormKind::Layer | NormKind::LayerWithBias | NormKind::LayerPlain => {
                    hyper.layer_norm_eps()?
                }
            },
            scale: hyper.positive("attention.scale")?.map(|s| s as f32),
            soft_cap: self.soft_cap(hyper, "attn_logit_softcapping")?,
            weights: self.qkv_weights(weights)?,
            bias: self.qkv_bias(weights)?,
            qk_norm: if self.has_qk_norm(hyper, weights)? {
                self.qk_norm
            } else {
                QkNorm::None
            },
            query_scale: self.query_scale(hyper)?,
            rotated: self.rotated(hyper)?,
            clamp: self.clamp(hyper)?,
            max_bias: self.max_bias(hyper)?,
        })
    }

    /// A bound that the file names, where the member has one.
    fn clamp(&self, hyper: &Hyperparameters<'_>) -> Result<Option<f32>, ModelError> {
        let name = "attention.clamp_kqv";
        match hyper.optional::<f32>(name)?.filter(|&limit| limit != 0.0) {
            None => Ok(None),
            Some(limit) if self.clamp == QkvClamp::None => {
                let reason = format!("{limit}; {} has no such bound", self.name);
                Err(hyper.wrong(name, reason))
            }
            Some(_) => Ok(hyper.positive(name)?.map(|limit| limit as f32)),
        }
    }

    /// The largest linear bias, where the model has any.
    fn max_bias(&self, hyper: &Hyperparameters<'_>) -> Result<Option<f32>, ModelError> {
        let name = "attention.max_alibi_bias";
        let own = match hyper.optional::<f32>(name)?.filter(|&bias| bias != 0.0) {
            None => None,
            Some(_) => hyper.positive(name)?.map(|bias| bias as f32),
        };
        match (self.positions, own) {
            (Positions::Biases(usual), own) => Ok(Some(own.unwrap_or(usual))),
            (Positions::BiasesOfLayers { n_layers, usual }, own) => {
                let has = own.is_some() || hyper.n_layers()? == n_layers;
                Ok(has.then(|| own.unwrap_or(usual)))
            }
            (Positions::BiasesIfNamed | Positions::ScaledBiasesIfNamed, own) => Ok(own),
            (_, None) => Ok(None),
            (_, Some(bias)) => {
                let reason = format!("{bias}; {} has no linear biases", self.name);
                Err(hyper.wrong(name, reason))
            }
        }
    }

    /// The matrices of queries, keys and values: converters write both forms of most members.
    fn qkv_weights(&self, weights: &dyn WeightSource) -> Result<QkvWeights, ModelError> {
        let has = |name: &str| optional_weight(weights, name).map(|w| w.is_some());
        Ok(if has("blk.0.attn_qkv.weight")? {
            QkvWeights::Fused
        } else if has("blk.0.attn_q.weight")? {
            QkvWeights::Separate
        } else {
            self.qkv
        })
    }

    pub(crate) fn qkv_bias(&self, weights: &dyn WeightSource) -> Result<QkvBias, ModelError> {
        let of_file = match self.bias {
            Biases::Of(bias) => return Ok(bias),
            Biases::AsInFile => |name: &str| optional_weight(weights, name).map(|w| w.is_some()),
        };
        let separate = of_file("blk.0.attn_q.bias")?;
        let qkv = separate || of_file("blk.0.attn_qkv.bias")?;
        Ok(match (qkv, of_file("blk.0.attn_output.bias")?) {
            (true, true) => QkvBias::All,
            (true, false) => QkvBias::Qkv,
            (false, true) => QkvBias::Output,
            (false, false) => QkvBias::None,
        })
    }

    fn has_qk_norm(
        &self,
        hyper: &Hyperparameters<'_>,
        weights: &dyn WeightSource,
    ) -> Result<bool, ModelError> {
        match self.qk_normed {
            QkNormed::Always => Ok(true),
            QkNormed::UnlessExperts(n) => Ok(hyper.optional::<u32>("expert_count")? != Some(n)),
            QkNormed::AsInFile => {
                Ok(optional_weight(weights, "blk.0.attn_q_norm.weight")?.is_some())
            }
        }
    }

    pub(crate) fn query_scale(
        &self,
        hyper: &Hyperparameters<'_>,
    ) -> Result<Option<PositionScale>, ModelError> {
        let own = hyper.positive("attention.temperature_scale")?;
        let own = own.map(|strength| strength as f32);
        match self.query_scale {
            QueryScale::None => Ok(None),
            QueryScale::Tempered { every, strength } => Ok(Some(PositionScale {
                every: match hyper.optional::<u32>("attention.temperature_length")? {
                    None => every,
                    Some(_) => hyper.count("attention.temperature_length")? as u32,
                },
                strength: own.unwrap_or(strength),
                offset: 1,
            })),
            QueryScale::Stretched => own
                .map(|strength| {
                    let every = hyper.count("rope.scaling.original_context_length")? as u32;
                    Ok(PositionScale {
                        every,
                        strength,
                        offset: 0,
                    })
                })
                .transpose(),
        }
    }
}
