//! What sets single layers of a member apart, of a file: shared rows, widths of heads, inputs and
//! factors of their own.
//!
//! Invariant: a setting that its row does not know is an error that names the key. Knows no member.

use kv_core::{LayerIdx, Window};
use kv_graph::rope::{RopeScaling, RopeSpec};
use kv_graph::weights::WeightSource;
use model_core::architecture::ModelError;
use model_core::blocks::{
    AttentionBlock, AttentionValues, LayerScale, Norm, PER_LAYER_EMBEDDING, PerLayerInputs, RowsOf,
};
use model_core::hyperparameters::{HeadSizes, Hyperparameters, optional_weight};

use crate::member::{HeadWidths, LlamaLike, PerLayer, RowSharing, ValueForm, WindowedRope};

/// The number of the last layers that share rows.
const SHARED_LAYERS: &str = "attention.shared_kv_layers";
/// Values that every layer gets of a token.
const PER_LAYER_WIDTH: &str = "embedding_length_per_layer_input";

impl LlamaLike {
    /// The heads of a layer with this window, where all others have `heads`.
    pub(crate) fn heads_of(
        &self,
        hyper: &Hyperparameters<'_>,
        heads: HeadSizes,
        window: Window,
    ) -> Result<HeadSizes, ModelError> {
        if self.head_widths == HeadWidths::Same || window == Window::Full {
            return Ok(heads);
        }
        let width = |name: &str, usual: usize| match hyper.optional::<u32>(name)? {
            None => Ok(usual),
            Some(_) => hyper.count(name),
        };
        Ok(HeadSizes {
            k_dim: width("attention.key_length_swa", heads.k_dim)?,
            v_dim: width("attention.value_length_swa", heads.v_dim)?,
            ..heads
        })
    }

    /// The rotation of windowed layers whose heads have widths of their own.
    pub(crate) fn windowed_rope(
        &self,
        hyper: &Hyperparameters<'_>,
        k_dim: usize,
    ) -> Result<RopeSpec, ModelError> {
        let name = "rope.dimension_count_swa";
        let n_rot = hyper.optional::<u32>(name)?.map_or(k_dim, |n| n as usize);
        if n_rot == 0 || n_rot > k_dim || !n_rot.is_multiple_of(2) {
            let reason = format!("{n_rot} rotated values of {k_dim}; it must be even and fit");
            return Err(hyper.wrong(name, reason));
        }
        let base = match hyper.rope_base("rope.freq_base_swa")? {
            Some(base) => base,
            None => match self.windows.rope() {
                WindowedRope::Own(base) => base,
                WindowedRope::Same | WindowedRope::Unstretched => {
                    hyper.rope_base("rope.freq_base")?.unwrap_or(10_000.0)
                }
            },
        };
        Ok(RopeSpec {
            style: self.rope,
            n_rot,
            base,
            scaling: RopeScaling::None,
            factors: None,
        })
    }

    /// The values of a layer's attention.
    pub(crate) fn values_of(
        &self,
        hyper: &Hyperparameters<'_>,
        weights: &dyn WeightSource,
        layer: usize,
    ) -> Result<AttentionValues, ModelError> {
        match self.values {
            ValueForm::Projected => Ok(AttentionValues::Projected),
            ValueForm::ScaledIfNamed => {
                let factor = hyper.positive("attention.value_scale")?;
                let factor = factor.filter(|&factor| factor != 1.0);
                Ok(factor.map_or(AttentionValues::Projected, |factor| {
                    AttentionValues::Scaled(factor as f32)
                }))
            }
            ValueForm::Normed => Ok(AttentionValues::Normed),
            ValueForm::NormedOrKeys => {
                let own = optional_weight(weights, &format!("blk.{layer}.attn_v.weight"))?;
                Ok(match own {
                    Some(_) => AttentionValues::Normed,
                    None => AttentionValues::NormedKeys,
                })
            }
        }
    }

    /// Gives the last layers the rows of others, where the file says so.
    pub(crate) fn share_rows(
        &self,
        hyper: &Hyperparameters<'_>,
        blocks: &mut [AttentionBlock],
    ) -> Result<(), ModelError> {
        let n_shared = hyper.optional::<u32>(SHARED_LAYERS)?.unwrap_or(0) as usize;
        if n_shared == 0 {
            return Ok(());
        }
        let n_layers = blocks.len();
        if self.sharing == RowSharing::None || n_shared >= n_layers {
            let reason = match self.sharing {
                RowSharing::None => format!("{n_shared}; {} has no such layers", self.name),
                RowSharing::LastLayers => format!("{n_shared} of {n_layers} are not possible"),
            };
            return Err(hyper.wrong(SHARED_LAYERS, reason));
        }
        let (owners, sharing) = blocks.split_at_mut(n_layers - n_shared);
        for (at, block) in (n_layers - n_shared..).zip(sharing) {
            let owner = owners.iter().rposition(|owner| {
                owner.window == block.window
                    && owner.kv_heads == block.kv_heads
                    && [owner.k_dim, owner.v_dim] == [block.k_dim, block.v_dim]
            });
            let Some(owner) = owner.and_then(|owner| u32::try_from(owner).ok()) else {
                let reason = format!(
                    "{n_shared}: no layer before the last {n_shared} has the window and the heads \
                     of layer {at}"
                );
                return Err(hyper.wrong(SHARED_LAYERS, reason));
            };
            block.rows_of = Some(RowsOf::Earlier(LayerIdx(owner)));
        }
        Ok(())
    }

    /// The per-layer embeddings, where the file has them.
    pub(crate) fn per_layer_inputs(
        &self,
        hyper: &Hyperparameters<'_>,
        weights: &dyn WeightSource,
        norm: Norm,
    ) -> Result<Option<PerLayerInputs>, ModelError> {
        let dim = hyper.optional::<u32>(PER_LAYER_WIDTH)?.unwrap_or(0) as usize;
        match self.per_layer {
            PerLayer::Nothing if dim > 0 => {
                let reason = format!("{dim}; {} has no inputs of layers", self.name);
                Err(hyper.wrong(PER_LAYER_WIDTH, reason))
            }
            PerLayer::InputsAndScales if dim > 0 => {
                let n_layers = hyper.n_layers()?;
                let vocab = self.per_layer_vocab(hyper, weights, [n_layers, dim])?;
                Ok(Some(PerLayerInputs {
                    vocab,
                    n_layers,
                    dim,
                    activation: self.activation,
                    norm,
                }))
            }
            _ => Ok(None),
        }
    }

    /// Tokens that have embeddings for layers. Where there are fewer than the vocabulary's,
    /// backends refuse the others.
    fn per_layer_vocab(
        &self,
        hyper: &Hyperparameters<'_>,
        weights: &dyn WeightSource,
        [n_layers, dim]: [usize; 2],
    ) -> Result<usize, ModelError> {
        let vocab = hyper.vocab(weights, hyper.count("embedding_length")?)?;
        let wanted = vec![vocab, n_layers * dim];
        let name = PER_LAYER_EMBEDDING.to_owned();
        match optional_weight(weights, PER_LAYER_EMBEDDING)? {
            None => Err(ModelError::MissingTensor {
                name,
                shape: wanted,
            }),
            Some(weight) => match weight.shape[..] {
                [rows, width] if rows > 0 && width == n_layers * dim => Ok(rows),
                ref got => Err(ModelError::TensorShape {
                    name,
                    wanted,
                    got: got.to_vec(),
                }),
            },
        }
    }

    /// The factor on the rows behind a layer.
    pub(crate) fn layer_scale(
        &self,
        weights: &dyn WeightSource,
        layer: usize,
    ) -> Result<LayerScale, ModelError> {
        if self.per_layer == PerLayer::Nothing {
            return Ok(LayerScale::None);
        }
        let name = format!("blk.{layer}.layer_output_scale.weight");
        Ok(match optional_weight(weights, &name)? {
            Some(_) => LayerScale::Learnt,
            None => LayerScale::None,
        })
    }
}
