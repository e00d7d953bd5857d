//! [`Gemma3n`]: a decoder whose rows are several streams, of which each layer computes one.
//!
//! Its attention, feed-forward blocks and per-layer inputs are those of a row of the family; what
//! is its own is how they are wired. Invariant: only rows whose logits are wanted pass through what
//! follows the last attention.

use std::sync::Arc;

use kv_core::layers::{LayerMap, LayerMemory};
use kv_core::{LayerIdx, PartIdx, Window};
use kv_graph::rope::{RopeScaling, RopeSpec};
use kv_graph::weights::WeightSource;
use kv_graph::{Activation, Graph, GraphBuilder, GraphError, GraphShape, Input, NodeId, RowGain};
use model_core::architecture::{Architecture, Model, ModelError, OutputKind};
use model_core::blocks::{
    AltUp, AttentionBlock, AttentionValues, FeedForward, FeedForwardBlock, FeedForwardForm, Laurel,
    LayerContext, Mixer, Norm, NormKind, PerLayerInputs, QkNorm, RowsOf, TOKEN_EMBEDDING,
};
use model_core::gguf::Metadata;
use model_core::hyperparameters::{HeadSizes, Hyperparameters, optional_weight};

use crate::factors::LOGIT_CAP;
use crate::family::GEMMA3N;

/// The architecture.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gemma3nArchitecture;

/// One layer.
#[derive(Clone, Debug)]
struct Layer {
    attention: AttentionBlock,
    feed_forward: FeedForwardBlock,
    /// The threshold of its gate above the mean, in deviations, where there is one.
    sparsity: Option<f32>,
}

/// Gemma 3n.
#[derive(Clone, Debug)]
struct Gemma3n {
    vocab: usize,
    dim: usize,
    context_length: usize,
    norm: Norm,
    alt_up: AltUp,
    laurel: Laurel,
    per_layer_inputs: PerLayerInputs,
    layers: Vec<Layer>,
    memory: LayerMap,
    output_weight: String,
    logit_cap: Option<f32>,
    output: OutputKind,
}

impl Model for Gemma3n {
    fn architecture(&self) -> &str {
        GEMMA3N.name
    }

    fn layers(&self) -> &LayerMap {
        &self.memory
    }

    fn vocab_size(&self) -> usize {
        self.vocab
    }

    fn context_length(&self) -> usize {
        self.context_length
    }

    fn embedding_dim(&self) -> usize {
        self.dim
    }

    fn output(&self) -> OutputKind {
        self.output
    }

    fn without_head(&self) -> Option<Arc<dyn Model>> {
        (self.output == OutputKind::Logits).then(|| {
            let model: Arc<dyn Model> = Arc::new(Self {
                output: OutputKind::Embeddings,
                ..self.clone()
            });
            model
        })
    }

    fn graph(&self, shape: GraphShape) -> Result<Graph, ModelError> {
        let mut b = GraphBuilder::new(shape);
        let rows = self.final_rows(&mut b)?;
        let out = match self.output {
            OutputKind::Logits => self.head(&mut b, rows)?,
            _ => rows,
        };
        Ok(b.finish(&[out])?)
    }
}

impl Gemma3n {
    /// The rows of wanted tokens after the last norm.
    fn final_rows(&self, b: &mut GraphBuilder) -> Result<NodeId, GraphError> {
        let shape = b.shape();
        let tokens = b.input(Input::Tokens)?;
        let x = b.embed("inp_embd", tokens, TOKEN_EMBEDDING, [self.vocab, self.dim])?;
        let x = b.scale("inp_scaled", x, (self.dim as f32).sqrt())?;
        let inputs = self.per_layer_inputs.build(b, x)?;
        let mut streams = self.alt_up.spread(b, x)?;
        let last = self.layers.len().saturating_sub(1);
        for (layer, at) in self.layers.iter().zip(0u32..) {
            let index = LayerIdx(at);
            let output_rows = if index.as_usize() == last && shape.n_outputs < shape.n_tokens {
                Some(b.input(Input::OutputRows)?)
            } else {
                None
            };
            let at = LayerContext {
                layer: index,
                index_layer: index,
                part: self.memory.part_of(index).unwrap_or(PartIdx(0)),
                output_rows,
            };
            streams = self.layer(&mut b.scope(index), at, layer, [streams, inputs])?;
        }
        let x = self.alt_up.merge(b, streams)?;
        self.norm.build(b, "result_norm", x, "output_norm")
    }

    fn layer(
        &self,
        b: &mut GraphBuilder,
        at: LayerContext,
        layer: &Layer,
        [streams, inputs]: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        let (norm, alt_up) = (self.norm, &self.alt_up);
        let predicted = alt_up.predict(b, streams)?;
        let active = alt_up.active(b, "altup_active", predicted)?;
        let normed = norm.build(b, "attn_norm", active, "attn_norm")?;
        let attended = layer.attention.build(b, at, normed)?;
        let attended = norm.build(b, "attn_post_norm", attended, "post_attention_norm")?;
        let [predicted, active, normed] = [
            at.take_rows(b, "altup_predicted_rows", predicted)?,
            at.take_rows(b, "altup_active_rows", active)?,
            at.take_rows(b, "attn_norm_rows", normed)?,
        ];
        let laurel = self.laurel.build(b, normed)?;
        let x = b.add("attn_gated", attended, active)?;
        let x = b.add("attn_laurel", x, laurel)?;
        let x = b.scale("ffn_inp", x, std::f32::consts::FRAC_1_SQRT_2)?;
        let normed = norm.build(b, "ffn_norm", x, "ffn_norm")?;
        let fed = match layer.sparsity {
            None => layer.feed_forward.build(b, normed)?,
            Some(deviations) => layer.feed_forward.build_sparse(b, normed, deviations)?,
        };
        let fed = norm.build(b, "ffn_post_norm", fed, "post_ffw_norm")?;
        let computed = b.add("ffn_added", fed, x)?;
        let corrected = alt_up.correct(b, predicted, computed)?;
        let first = alt_up.active(b, "altup_corrected_active", corrected)?;
        let scale = RowGain::PerValue("altup_correct_scale.weight");
        let first = b.gain("altup_corrected_scaled", first, scale)?;
        let added = self.per_layer_inputs.gated(b, at, inputs, first)?;
        alt_up.add_to_others(b, corrected, added)
    }

    fn head(&self, b: &mut GraphBuilder, x: NodeId) -> Result<NodeId, GraphError> {
        let logits = b.linear("result_output", x, &self.output_weight, self.vocab)?;
        match self.logit_cap {
            Some(cap) => b.soft_cap("result_capped", logits, cap),
            None => Ok(logits),
        }
    }
}

/// More streams than any model has: graphs have several operations for each.
const MAX_STREAMS: u32 = 64;

/// Number of streams of published models.
const STREAMS: usize = 4;

/// The cap on logits where a file names none: no GGUF file does.
const USUAL_LOGIT_CAP: f32 = 30.0;

fn alt_up(hyper: &Hyperparameters<'_>, dim: usize, norm: Norm) -> Result<AltUp, ModelError> {
    let n_streams = match hyper.optional::<u32>("altup.num_inputs")? {
        Some(n) if n > MAX_STREAMS => {
            let reason = format!("{n} streams; at most {MAX_STREAMS} are computed");
            return Err(hyper.wrong("altup.num_inputs", reason));
        }
        None => STREAMS,
        Some(n) if n >= 2 => n as usize,
        Some(n) => {
            let reason = format!("{n} is not possible; it must be at least 2");
            return Err(hyper.wrong("altup.num_inputs", reason));
        }
    };
    let active = hyper.optional::<u32>("altup.active_idx")?.unwrap_or(0) as usize;
    if active >= n_streams {
        let reason = format!("{active} of {n_streams} streams is not possible");
        return Err(hyper.wrong("altup.active_idx", reason));
    }
    Ok(AltUp {
        n_streams,
        active,
        dim,
        norm,
    })
}

/// Deviations of every layer's gate that are cut off. Numbers that are not finite, as converters
/// write for a layer without, stand for none.
fn sparsities(
    hyper: &Hyperparameters<'_>,
    n_layers: usize,
) -> Result<Vec<Option<f32>>, ModelError> {
    let name = "activation_sparsity_scale";
    let scales = hyper.factors(name, n_layers)?;
    let scales =
        scales.ok_or_else(|| hyper.wrong(name, "is missing; the model needs it".to_owned()))?;
    Ok(scales
        .into_iter()
        .map(|s| Some(s).filter(|s| s.is_finite()))
        .collect())
}

/// The width between the matrices of the learnt residuals.
fn laurel_rank(weights: &dyn WeightSource, dim: usize) -> Result<usize, ModelError> {
    let name = "blk.0.laurel_l.weight";
    let shape = optional_weight(weights, name)?.map(|weight| weight.shape);
    match shape.as_deref() {
        Some(&[rank, width]) if width == dim && rank > 0 => Ok(rank),
        None => Err(ModelError::MissingTensor {
            name: name.to_owned(),
            shape: vec![0, dim],
        }),
        Some(got) => Err(ModelError::TensorShape {
            name: name.to_owned(),
            wanted: vec![got.first().copied().unwrap_or(0), dim],
            got: got.to_vec(),
        }),
    }
}

/// The layers of a file.
fn layers(
    hyper: &Hyperparameters<'_>,
    dim: usize,
    weights: &dyn WeightSource,
) -> Result<Vec<Layer>, ModelError> {
    let n_layers = hyper.n_layers()?;
    let mixers = GEMMA3N.mixers(hyper, n_layers, dim, weights)?;
    let fed = GEMMA3N.feed_forwards(hyper, n_layers, weights)?;
    let sparsities = sparsities(hyper, n_layers)?;
    let layers = mixers.into_iter().zip(fed).zip(sparsities);
    // The row of the family has neither latents nor mixtures.
    let layers = layers.filter_map(|((mixer, fed), sparsity)| match (mixer, fed) {
        (Mixer::Attention(attention), FeedForward::Dense(feed_forward)) => Some(Layer {
            attention,
            feed_forward,
            sparsity,
        }),
        _ => None,
    });
    Ok(layers.collect())
}

/// The memory of each layer.
fn memory(layers: &[Layer]) -> LayerMap {
    let of = |layer: &Layer| match layer.attention.rows_of {
        Some(owner) => LayerMemory::SharedWith(owner.layer()),
        None => LayerMemory::Attention(layer.attention.memory()),
    };
    LayerMap::new(layers.iter().map(of).collect())
}

impl Architecture for Gemma3nArchitecture {
    fn name(&self) -> &'static str {
        GEMMA3N.name
    }

    fn model(
        &self,
        metadata: &Metadata,
        weights: &dyn WeightSource,
    ) -> Result<Arc<dyn Model>, ModelError> {
        let hyper = Hyperparameters::new(metadata, GEMMA3N.name);
        if hyper.optional::<bool>("attention.causal")? == Some(false) {
            let reason = "false is not supported: tokens of a decoder see no later ones";
            return Err(hyper.wrong("attention.causal", reason.to_owned()));
        }
        let dim = hyper.count("embedding_length")?;
        let norm = GEMMA3N.norm(hyper.norm_eps()?);
        let width = "embedding_length_per_layer_input";
        let per_layer_inputs = GEMMA3N.per_layer_inputs(&hyper, weights, norm)?;
        let per_layer_inputs = per_layer_inputs
            .ok_or_else(|| hyper.wrong(width, "is missing; the model needs it".to_owned()))?;
        let layers = layers(&hyper, dim, weights)?;
        let own_cap = hyper.optional::<f32>(LOGIT_CAP)?;
        Ok(Arc::new(Gemma3n {
            vocab: hyper.vocab(weights, dim)?,
            dim,
            context_length: hyper.count("context_length")?,
            norm,
            alt_up: alt_up(&hyper, dim, norm)?,
            laurel: Laurel {
                rank: laurel_rank(weights, dim)?,
                norm,
            },
            per_layer_inputs,
            memory: memory(&layers),
            layers,
            output_weight: hyper.output_weight(weights)?,
            logit_cap: match own_cap {
                None => Some(USUAL_LOGIT_CAP),
                Some(_) => GEMMA3N.soft_cap(&hyper, LOGIT_CAP)?,
            },
            output: OutputKind::Logits,
        }))
    }

    /// Four layers with the sizes of the smaller published model: windowed, full, and two that
    /// share rows with these.
    fn example(&self) -> Result<Arc<dyn Model>, ModelError> {
        let norm = Norm {
            kind: NormKind::Rms,
            eps: 1e-6,
        };
        let heads = HeadSizes {
            n_heads: 8,
            kv_heads: 2,
            k_dim: 256,
            v_dim: 256,
        };
        let (vocab, dim) = (262_144, 2048);
        let layer = |window, base, sparsity| Layer {
            attention: AttentionBlock {
                scale: 1.0,
                qk_norm: QkNorm::PerHead,
                values: AttentionValues::Normed,
                norm_eps: norm.eps,
                rope: Some(RopeSpec {
                    style: GEMMA3N.rope,
                    n_rot: 256,
                    base,
                    scaling: RopeScaling::None,
                    factors: None,
                }),
                window,
                ..heads.into()
            },
            feed_forward: FeedForwardBlock {
                hidden: 8192,
                activation: Activation::GeluTanh,
                form: FeedForwardForm::Gated,
            },
            sparsity,
        };
        let windowed = |sparsity| layer(Window::Sliding(512), 10_000.0, sparsity);
        let full = |sparsity| layer(Window::Full, 1_000_000.0, sparsity);
        let sparse = Some(1.644_853_6);
        let mut layers = vec![windowed(sparse), full(sparse), windowed(None), full(None)];
        for (layer, owner) in layers.iter_mut().skip(2).zip(0u32..) {
            layer.attention.rows_of = Some(RowsOf::Earlier(LayerIdx(owner)));
        }
        Ok(Arc::new(Gemma3n {
            vocab,
            dim,
            context_length: 32_768,
            norm,
            alt_up: AltUp {
                n_streams: STREAMS,
                active: 0,
                dim,
                norm,
            },
            laurel: Laurel { rank: 64, norm },
            per_layer_inputs: PerLayerInputs {
                vocab,
                n_layers: 4,
                dim: 256,
                activation: Activation::GeluTanh,
                norm,
            },
            memory: memory(&layers),
            layers,
            output_weight: TOKEN_EMBEDDING.to_owned(),
            logit_cap: Some(USUAL_LOGIT_CAP),
            output: OutputKind::Logits,
        }))
    }
}
