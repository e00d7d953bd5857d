//! How a row of the table and a file make a model.
//!
//! Invariant: a setting that its row does not know is an error that names the key. Knows no
//! member.

use std::sync::Arc;

use kv_core::Window;
use kv_graph::rope::RopeStyle;
use kv_graph::weights::WeightSource;
use model_core::architecture::{Architecture, MaskPlace, Model, ModelError};
use model_core::blocks::{
    Arrangement, AttentionBlock, Decoder, DecoderInput, DecoderLayer, DecoderModel, DecoderRows,
    DraftHead, LastNorm, Mixer, Multipliers, Norm, OUTPUT_BIAS, POSITION_EMBEDDING, Residual,
    ResidualFactors,
};
use model_core::gguf::Metadata;
use model_core::hyperparameters::{HeadSizes, Hyperparameters, optional_weight};

use crate::attention::Rotation;
use crate::factors::LOGIT_CAP;
use crate::member::{
    AttentionForm, EmbeddingNorm, LlamaLike, Parallel, Positions, ResidualRows, RotatedLayers,
    Sections, Sight,
};

/// Key of diffusion models: whether the logits of a mask are in the row of the token before it.
pub(crate) const SHIFTED_LOGITS: &str = "diffusion.shift_logits";

/// Key of models that may add to rows behind their norms: whether this one does.
pub(crate) const NORMED_RESIDUAL: &str = "residual_behind_norms";

/// Key of models that may norm the sums of their blocks and rows: whether this one does.
pub(crate) const NORMED_SUMS: &str = "norms_behind_sums";

/// Key of the width of embeddings, where it is not that of rows.
pub(crate) const EMBEDDING_WIDTH: &str = "input_embedding_length";

impl LlamaLike {
    /// The first layers behind which something is added to given rows.
    fn deep_rows(&self, hyper: &Hyperparameters<'_>, n_layers: usize) -> Result<usize, ModelError> {
        let key = "n_deepstack_layers";
        let n = hyper.optional::<u32>(key)?.unwrap_or(0) as usize;
        if n > n_layers {
            let reason = format!("it is {n}, and the model has {n_layers} layers");
            let key = hyper.key(key);
            return Err(ModelError::Setting { key, reason });
        }
        Ok(n)
    }

    /// The places of the norms of this file's layers.
    fn arrangement(
        &self,
        hyper: &Hyperparameters<'_>,
        weights: &dyn WeightSource,
    ) -> Result<Arrangement, ModelError> {
        let second = || optional_weight(weights, &format!("blk.0.{}", self.feed_forward_norm));
        let named = || hyper.optional::<bool>("use_parallel_residual");
        let own = || optional_weight(weights, "blk.0.attn_norm_2.weight");
        Ok(match self.parallel {
            Parallel::AsArranged => self.arrangement,
            Parallel::WithoutSecondNorm if second()?.is_none() => {
                if own()?.is_some() {
                    Arrangement::ParallelSecondNorm
                } else {
                    Arrangement::Parallel
                }
            }
            Parallel::IfNamed if named()? == Some(true) => Arrangement::ParallelTwoNorms,
            Parallel::WithoutSecondNorm | Parallel::IfNamed => self.arrangement,
        })
    }

    /// The work on embeddings before the first layer.
    fn decoder_input(&self, weights: &dyn WeightSource) -> Result<DecoderInput, ModelError> {
        if self.embedding_norm == EmbeddingNorm::Normed {
            return Ok(DecoderInput::Normed);
        }
        if self.positions != Positions::Learnt {
            return Ok(DecoderInput::Tokens);
        }
        // The rows are missed by their name where they are not there.
        let rows = optional_weight(weights, POSITION_EMBEDDING)?;
        let n_rows = rows.and_then(|rows| rows.shape.first().copied());
        Ok(DecoderInput::Positions(n_rows.unwrap_or(1)))
    }

    fn layers(
        &self,
        hyper: &Hyperparameters<'_>,
        dim: usize,
        weights: &dyn WeightSource,
    ) -> Result<Vec<DecoderLayer>, ModelError> {
        let n_layers = hyper.n_layers()?;
        let feed_forwards = self.feed_forwards(hyper, n_layers, weights)?;
        let mixers = match self.attention {
            AttentionForm::KeysAndValues => self.mixers(hyper, n_layers, dim, weights)?,
            AttentionForm::Latents | AttentionForm::IndexedLatents { .. } => {
                vec![Mixer::Latent(self.latent_attention(hyper, weights)?); n_layers]
            }
        };
        let together = mixers.into_iter().zip(feed_forwards);
        let layer = |(at, (mixer, feed_forward))| {
            Ok(DecoderLayer {
                mixer,
                feed_forward: Some(feed_forward),
                scale: self.layer_scale(weights, at)?,
                residual: self.residual_rows(hyper)?,
            })
        };
        together.enumerate().map(layer).collect()
    }

    /// The rows that the blocks of this file's layers add to.
    fn residual_rows(&self, hyper: &Hyperparameters<'_>) -> Result<Residual, ModelError> {
        let named = |key: &str| Ok::<_, ModelError>(hyper.optional::<bool>(key)? == Some(true));
        let refused = |key: &str| {
            let reason = format!("true is not possible: {} has no such layers", self.name);
            Err(hyper.wrong(key, reason))
        };
        match (named(NORMED_RESIDUAL)?, named(NORMED_SUMS)?) {
            (false, false) => Ok(Residual::Rows),
            (true, _) if self.residual_rows != ResidualRows::NormedIfNamed => {
                refused(NORMED_RESIDUAL)
            }
            (_, true) if self.residual_rows != ResidualRows::SumsNormedIfNamed => {
                refused(NORMED_SUMS)
            }
            (true, _) => Ok(Residual::Normed {
                mixer: ResidualFactors::NONE,
                feed_forward: ResidualFactors::NONE,
            }),
            (false, true) => Ok(Residual::SumsNormed),
        }
    }

    /// The attention of all layers, over keys and values.
    pub(crate) fn mixers(
        &self,
        hyper: &Hyperparameters<'_>,
        n_layers: usize,
        dim: usize,
        weights: &dyn WeightSource,
    ) -> Result<Vec<Mixer>, ModelError> {
        let shared = self.shared(hyper, weights)?;
        let windows = self.windows(hyper, n_layers)?;
        let heads = hyper.heads(n_layers, dim)?;
        let rotating = self.rotating(hyper, n_layers)?;
        let trained = hyper.optional::<bool>("rope.scaling.finetuned")?;
        // Linear biases take the place of rotations.
        let none = shared.max_bias.is_some()
            || shared.rotated == RotatedLayers::IfTrained && trained == Some(false);
        let layer = |(at, (heads, window)): (usize, (HeadSizes, Window))| {
            let heads = self.heads_of(hyper, heads, window)?;
            let rotates = match &rotating {
                Some(named) => named.get(at).copied().unwrap_or(false),
                None => shared.rotated.includes(at, window),
            };
            let rotation = if !none && rotates {
                let mut rope = self.rope_of(hyper, window, heads.k_dim, weights)?;
                let order = match self.sections {
                    Sections::None => None,
                    Sections::Always(order) => Some(order),
                    Sections::IfNamed(order) => hyper.has("rope.dimension_sections").then(|| {
                        rope.style = RopeStyle::Neox;
                        order
                    }),
                };
                let sections = order.map(|order| hyper.rope_sections(order, rope.n_rot));
                Rotation {
                    sections: sections.transpose()?,
                    rope: Some(rope),
                }
            } else {
                Rotation::default()
            };
            let scale = shared
                .scale
                .unwrap_or_else(|| self.score_scale(n_layers, dim, heads));
            Ok(AttentionBlock {
                values: self.values_of(hyper, weights, at)?,
                ..self.attention_block(&shared, heads, scale, window, rotation)
            })
        };
        let layers = heads.into_iter().zip(windows).enumerate();
        let mut blocks: Vec<AttentionBlock> =
            layers.map(layer).collect::<Result<_, ModelError>>()?;
        self.share_rows(hyper, &mut blocks)?;
        let mixer = |block| self.sight.mixer(block);
        Ok(blocks.into_iter().map(mixer).collect())
    }

    /// That the file agrees with the row about which tokens see which.
    fn check_causality(&self, hyper: &Hyperparameters<'_>) -> Result<(), ModelError> {
        let key = "attention.causal";
        let reason = match (self.sight, hyper.optional::<bool>(key)?) {
            (Sight::Earlier | Sight::EarlierInFull, Some(false)) => {
                "false is not supported: tokens of a decoder see no later ones"
            }
            (Sight::WholeText(_), Some(true)) => {
                "true is not supported: tokens of a diffusion model see each other"
            }
            _ => return Ok(()),
        };
        Err(hyper.wrong(key, reason.to_owned()))
    }

    pub(crate) fn norm(&self, eps: f32) -> Norm {
        Norm {
            kind: self.norm,
            eps,
        }
    }
}

impl Sight {
    /// Attention over what tokens see.
    pub(crate) fn mixer(self, block: AttentionBlock) -> Mixer {
        match self {
            Self::Earlier | Self::EarlierInFull => Mixer::Attention(block),
            Self::WholeText(_) => Mixer::WithinBatch(block),
        }
    }

    /// The decoder whose logits are of next tokens, or of masks.
    fn model(self, decoder: DecoderModel) -> DecoderModel {
        match self {
            Self::Earlier => decoder,
            Self::EarlierInFull => decoder.causal_in_full(),
            Self::WholeText(place) => decoder.of_masks(place),
        }
    }
}

/// The rows that hold the logits of masks, where the file says so.
fn mask_place(metadata: &Metadata) -> Result<Option<MaskPlace>, ModelError> {
    let shifted: Option<bool> = metadata.optional(SHIFTED_LOGITS)?;
    Ok(shifted.map(|shifted| {
        if shifted {
            MaskPlace::Before
        } else {
            MaskPlace::Own
        }
    }))
}

impl Architecture for LlamaLike {
    fn name(&self) -> &'static str {
        self.name
    }

    fn model(
        &self,
        metadata: &Metadata,
        weights: &dyn WeightSource,
    ) -> Result<Arc<dyn Model>, ModelError> {
        let hyper = Hyperparameters::new(metadata, self.name);
        self.check_causality(&hyper)?;
        let dim = hyper.count("embedding_length")?;
        let norm = self.norm(self.shared(&hyper, weights)?.norm_eps);
        let mut layers = self.layers(&hyper, dim, weights)?;
        let output_weight = hyper.output_weight(weights)?;
        let embedding_dim = hyper.optional::<u32>(EMBEDDING_WIDTH)?;
        let embedding_dim = embedding_dim.map(|_| hyper.count(EMBEDDING_WIDTH));
        let embedding_dim = embedding_dim.transpose()?;
        let norms_sums = layers
            .iter()
            .any(|layer| layer.residual == Residual::SumsNormed);
        let draft_head = DraftHead::split_off(&mut layers, &output_weight, &hyper, weights)?;
        let decoder = Decoder {
            vocab: hyper.vocab(weights, embedding_dim.unwrap_or(dim))?,
            dim,
            embedding_dim,
            norm,
            per_layer_inputs: self.per_layer_inputs(&hyper, weights, norm)?,
            rows: DecoderRows::OfTokens,
            deep_rows: self.deep_rows(&hyper, layers.len())?,
            input: self.decoder_input(weights)?,
            arrangement: self.arrangement(&hyper, weights)?,
            feed_forward_norm: self.feed_forward_norm,
            last_norm: if norms_sums {
                LastNorm::None
            } else {
                LastNorm::Output
            },
            multipliers: Multipliers {
                embedding: self.embedding_scale(&hyper, dim)?,
                residual: self.residual_scale(&hyper)?,
                logits: self.logit_scale(&hyper)?,
            },
            output_weight,
            output_bias: optional_weight(weights, OUTPUT_BIAS)?.map(|_| OUTPUT_BIAS.to_owned()),
            logit_cap: self.soft_cap(&hyper, LOGIT_CAP)?,
            long_rope: hyper.long_rope(weights)?,
            layers,
            draft_head: None,
        };
        let context_length = hyper.count("context_length")?;
        let sight = match self.sight {
            Sight::WholeText(place) => Sight::WholeText(mask_place(metadata)?.unwrap_or(place)),
            sight => sight,
        };
        let model = DecoderModel::new(self.name, decoder, context_length);
        let model = model.with_head_in_file(draft_head);
        Ok(Arc::new(sight.model(model)))
    }

    fn example(&self) -> Result<Arc<dyn Model>, ModelError> {
        Ok(Arc::new(self.sight.model(self.typical())))
    }
}
