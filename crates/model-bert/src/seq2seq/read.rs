//! How a row of the table and a file make an encoder-decoder.
//!
//! Keys and tensors are those of T5's GGUF files; keys of our own are listed here. Invariant: a
//! setting that is not supported is an error that names the key.

use std::sync::Arc;

use kv_core::TokenId;
use kv_graph::weights::WeightSource;
use kv_graph::{Activation, DistanceBuckets};
use model_core::architecture::{Architecture, Model, ModelError};
use model_core::blocks::{
    AttentionBlock, FeedForwardBlock, FeedForwardForm, Norm, NormKind, OUTPUT, OUTPUT_BIAS,
    OutputName, RelativeAttention,
};
use model_core::gguf::Metadata;
use model_core::hyperparameters::{HeadSizes, Hyperparameters, optional_weight};

use super::family::{Seq2SeqLike, Seq2SeqPositions};
use super::graph::{OutputBias, OutputMatrix, Seq2Seq, Side, Stack, StackPositions};
use super::model::Seq2SeqModel;

/// Layers of the decoder, where it has not as many as the encoder.
pub(crate) const DECODER_LAYERS: &str = "decoder_block_count";
/// The token with which texts of the decoder begin.
pub(crate) const START: &str = "decoder_start_token_id";
/// The token after it that every text has, where there is one.
pub(crate) const FORCED: &str = "forced_bos_token_id";
/// Buckets of distances.
pub(crate) const BUCKETS: &str = "attention.relative_buckets_count";
/// From which distance on all share the last bucket: a key of our own; 128 without it.
pub(crate) const MAX_DISTANCE: &str = "attention.relative_max_distance";
/// Factor on the rows that logits are made of: a key of our own.
pub(crate) const OUTPUT_SCALE: &str = "decoder.output_scale";
/// Heads of the decoder, where it has not as many as the encoder: a key of our own.
pub(crate) const DECODER_HEADS: &str = "decoder.attention.head_count";
/// Width of the decoder's feed-forward blocks, where it is not the encoder's: a key of our own.
pub(crate) const DECODER_HIDDEN: &str = "decoder.feed_forward_length";
/// Factor on embeddings: a key of our own.
pub(crate) const EMBEDDING_SCALE: &str = "embedding_scale";

impl Seq2SeqLike {
    fn seq2seq(
        &self,
        hyper: &Hyperparameters<'_>,
        weights: &dyn WeightSource,
    ) -> Result<Seq2Seq, ModelError> {
        let dim = hyper.count("embedding_length")?;
        let eps = match self.norm {
            NormKind::Rms => hyper.norm_eps()?,
            NormKind::Layer | NormKind::LayerWithBias | NormKind::LayerPlain => {
                hyper.layer_norm_eps()?
            }
        };
        let output = match optional_weight(weights, OUTPUT)? {
            Some(_) => OutputMatrix::Own,
            None => OutputMatrix::Embedding,
        };
        let output_scale = match hyper.positive(OUTPUT_SCALE)? {
            Some(scale) => Some(scale as f32),
            // Models without an output matrix were trained so; files of others do not say it.
            None if self.is_t5() && output == OutputMatrix::Embedding => {
                Some(1.0 / (dim as f32).sqrt())
            }
            None => None,
        };
        Ok(Seq2Seq {
            vocab: hyper.vocab(weights, dim)?,
            dim,
            norm: Norm {
                kind: self.norm,
                eps,
            },
            norms: self.norms,
            embedding_scale: hyper.positive(EMBEDDING_SCALE)?.map(|scale| scale as f32),
            encoder: self.stack(hyper, weights, Side::Encoder)?,
            decoder: self.stack(hyper, weights, Side::Decoder)?,
            output_scale: output_scale.filter(|&scale| scale != 1.0),
            output,
            output_bias: match optional_weight(weights, OUTPUT_BIAS)? {
                Some(_) => OutputBias::Own,
                None => OutputBias::None,
            },
        })
    }

    fn is_t5(&self) -> bool {
        self.positions == Seq2SeqPositions::Biases
    }

    fn stack(
        &self,
        hyper: &Hyperparameters<'_>,
        weights: &dyn WeightSource,
        side: Side,
    ) -> Result<Stack, ModelError> {
        let own = |key: &'static str, usual: usize| match (side, hyper.optional::<u32>(key)?) {
            (Side::Decoder, Some(_)) => hyper.count(key),
            _ => Ok(usual),
        };
        let hidden = own(DECODER_HIDDEN, hyper.count("feed_forward_length")?)?;
        Ok(Stack {
            n_layers: own(DECODER_LAYERS, hyper.n_layers()?)?,
            attention: self.attention(hyper, side)?,
            feed_forward: self.feed_forward(hyper, weights, hidden)?,
            positions: match self.positions {
                Seq2SeqPositions::Biases => StackPositions::None,
                Seq2SeqPositions::Learnt => StackPositions::Learnt(hyper.count("context_length")?),
                Seq2SeqPositions::Waves => StackPositions::Shared(hyper.count("context_length")?),
            },
        })
    }

    fn attention(
        &self,
        hyper: &Hyperparameters<'_>,
        side: Side,
    ) -> Result<AttentionBlock, ModelError> {
        let heads = self.heads(hyper, side)?;
        let relative = match self.positions {
            Seq2SeqPositions::Learnt | Seq2SeqPositions::Waves => RelativeAttention::None,
            Seq2SeqPositions::Biases => relative(hyper, side)?,
        };
        Ok(self.attention_block(heads, relative))
    }

    /// Attention with these heads over the tokens of a stack.
    fn attention_block(&self, heads: HeadSizes, relative: RelativeAttention) -> AttentionBlock {
        let usual = AttentionBlock::from(heads);
        AttentionBlock {
            scale: match self.positions {
                Seq2SeqPositions::Learnt | Seq2SeqPositions::Waves => usual.scale,
                Seq2SeqPositions::Biases => 1.0,
            },
            bias: self.bias,
            relative,
            output: OutputName::AttnO,
            ..usual
        }
    }

    fn heads(&self, hyper: &Hyperparameters<'_>, side: Side) -> Result<HeadSizes, ModelError> {
        let dim = hyper.count("embedding_length")?;
        let of_encoder = hyper.heads(1, dim)?;
        let [heads] = of_encoder.as_slice() else {
            let reason = "the layers have as many heads each".to_owned();
            return Err(hyper.wrong("attention.head_count", reason));
        };
        if heads.n_heads != heads.kv_heads {
            let reason = "there are as many heads of keys as of queries".to_owned();
            return Err(hyper.wrong("attention.head_count_kv", reason));
        }
        match (side, hyper.optional::<u32>(DECODER_HEADS)?) {
            (Side::Decoder, Some(_)) => {
                let n_heads = hyper.count(DECODER_HEADS)?;
                if !dim.is_multiple_of(n_heads) {
                    let reason = format!("{n_heads} heads do not divide the width {dim}");
                    return Err(hyper.wrong(DECODER_HEADS, reason));
                }
                Ok(HeadSizes {
                    n_heads,
                    kv_heads: n_heads,
                    k_dim: dim / n_heads,
                    v_dim: dim / n_heads,
                })
            }
            _ => Ok(*heads),
        }
    }

    fn feed_forward(
        &self,
        hyper: &Hyperparameters<'_>,
        weights: &dyn WeightSource,
        hidden: usize,
    ) -> Result<FeedForwardBlock, ModelError> {
        let has_gate = optional_weight(weights, "dec.blk.0.ffn_gate.weight")?.is_some();
        let (form, usual) = if has_gate {
            (FeedForwardForm::Gated, Activation::GeluTanh)
        } else {
            (self.feed_forward, self.activation)
        };
        Ok(FeedForwardBlock {
            hidden,
            activation: hyper.activation(usual)?,
            form,
        })
    }
}

/// The bias on scores by distance.
fn relative(hyper: &Hyperparameters<'_>, side: Side) -> Result<RelativeAttention, ModelError> {
    let n = hyper.count(BUCKETS)?;
    let max_distance = match hyper.optional::<u32>(MAX_DISTANCE)? {
        Some(_) => hyper.count(MAX_DISTANCE)?,
        None => 128,
    };
    let (buckets, weight) = biases(side, n, max_distance);
    if buckets.is_sound() {
        Ok(RelativeAttention::Biases { buckets, weight })
    } else {
        let reason = format!(
            "{n} buckets up to a distance of {max_distance}: they must be a multiple of 4, \
             and half of them below that distance"
        );
        Err(hyper.wrong(BUCKETS, reason))
    }
}

/// The buckets of a stack, and the weight of their biases, which is that of its first layer.
fn biases(side: Side, n: usize, max_distance: usize) -> (DistanceBuckets, &'static str) {
    match side {
        Side::Encoder => (
            DistanceBuckets::Halves { n, max_distance },
            "enc.blk.0.attn_rel_b.weight",
        ),
        Side::Decoder => (
            DistanceBuckets::Earlier { n, max_distance },
            "dec.blk.0.attn_rel_b.weight",
        ),
    }
}

impl Architecture for Seq2SeqLike {
    fn name(&self) -> &'static str {
        self.name
    }

    fn model(
        &self,
        metadata: &Metadata,
        weights: &dyn WeightSource,
    ) -> Result<Arc<dyn Model>, ModelError> {
        let hyper = Hyperparameters::new(metadata, self.name);
        let settings = self.seq2seq(&hyper, weights)?;
        let first = hyper.optional::<u32>(START)?.unwrap_or(0);
        let start = [(START, Some(first)), (FORCED, hyper.optional(FORCED)?)];
        let start = start.into_iter().filter_map(|(key, id)| Some((key, id?)));
        let start = start.map(|(key, id)| {
            if (id as usize) < settings.vocab {
                Ok(TokenId(id))
            } else {
                let reason = format!("{id} is not below the vocabulary's {}", settings.vocab);
                Err(hyper.wrong(key, reason))
            }
        });
        let start = start.collect::<Result<_, _>>()?;
        Ok(Arc::new(Seq2SeqModel::new(
            self.name,
            settings,
            hyper.count("context_length")?,
            start,
        )))
    }

    fn example(&self) -> Result<Arc<dyn Model>, ModelError> {
        Ok(Arc::new(self.typical()))
    }
}

impl Seq2SeqLike {
    /// Two layers of the size of T5 base or BART base; M2M-100's are wider.
    fn typical(&self) -> Seq2SeqModel {
        let dim = 768;
        let heads = HeadSizes {
            n_heads: 12,
            kv_heads: 12,
            k_dim: 64,
            v_dim: 64,
        };
        let relative = |side| match self.positions {
            Seq2SeqPositions::Learnt | Seq2SeqPositions::Waves => RelativeAttention::None,
            Seq2SeqPositions::Biases => {
                let (buckets, weight) = biases(side, 32, 128);
                RelativeAttention::Biases { buckets, weight }
            }
        };
        let stack = |side| Stack {
            n_layers: 2,
            attention: self.attention_block(heads, relative(side)),
            feed_forward: FeedForwardBlock {
                hidden: 3072,
                activation: self.activation,
                form: self.feed_forward,
            },
            positions: match self.positions {
                Seq2SeqPositions::Learnt => StackPositions::Learnt(1024),
                Seq2SeqPositions::Waves => StackPositions::Shared(1024),
                Seq2SeqPositions::Biases => StackPositions::None,
            },
        };
        let settings = Seq2Seq {
            vocab: 32_128,
            dim,
            norm: Norm {
                kind: self.norm,
                eps: 1e-6,
            },
            norms: self.norms,
            embedding_scale: None,
            encoder: stack(Side::Encoder),
            decoder: stack(Side::Decoder),
            output_scale: self.is_t5().then(|| 1.0 / (dim as f32).sqrt()),
            output: OutputMatrix::Embedding,
            output_bias: match self.positions {
                Seq2SeqPositions::Learnt => OutputBias::Own,
                Seq2SeqPositions::Biases | Seq2SeqPositions::Waves => OutputBias::None,
            },
        };
        Seq2SeqModel::new(self.name, settings, 1024, vec![TokenId(0)])
    }
}
