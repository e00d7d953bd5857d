//! [`RetNetModel`]: sizes from a file, what each layer remembers, and the graph.

use std::sync::Arc;

use kv_core::LayerIdx;
use kv_core::layers::{LayerMap, LayerMemory, RecurrentMemory};
use kv_graph::rope::{RopeScaling, RopeSpec, RopeStyle};
use kv_graph::weights::WeightSource;
use kv_graph::{
    Activation, CustomSizes, Graph, GraphBuilder, GraphError, GraphShape, Input, NodeId,
};
use model_core::architecture::{Architecture, Model, ModelError};
use model_core::gguf::Metadata;
use model_core::hyperparameters::{HeadSizes, Hyperparameters};

use crate::Retention;

/// The architecture: reads a model's sizes from a file.
#[derive(Clone, Copy, Debug)]
pub struct RetNet;

/// Sizes of one model.
#[derive(Clone, Debug, PartialEq)]
pub struct RetNetSizes {
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Width of the rows between layers.
    pub dim: usize,
    /// Width inside the feed-forward blocks.
    pub hidden: usize,
    /// Number of layers.
    pub n_layers: usize,
    /// Heads of the retention.
    pub heads: HeadSizes,
    /// Added to the mean square in every norm.
    pub norm_eps: f32,
    /// Base of the rotation of queries and keys.
    pub rope_base: f64,
    /// Tokens that it was trained with.
    pub context_length: usize,
}

/// A model of these sizes.
#[derive(Clone, Debug)]
pub struct RetNetModel {
    sizes: RetNetSizes,
    layers: LayerMap,
}

impl RetNetModel {
    /// A model of these sizes.
    pub fn new(sizes: RetNetSizes) -> Self {
        let HeadSizes {
            n_heads,
            k_dim,
            v_dim,
            ..
        } = sizes.heads;
        // All that a layer remembers of a text, however long: one matrix a head.
        let memory = LayerMemory::Recurrent(RecurrentMemory {
            conv_row: 0,
            state_row: n_heads * k_dim * v_dim,
        });
        let layers = LayerMap::new(vec![memory; sizes.n_layers]);
        Self { sizes, layers }
    }

    /// One layer, in the scope of its number: nodes and weights get their layer there.
    fn layer(
        &self,
        b: &mut GraphBuilder,
        layer: LayerIdx,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let eps = self.sizes.norm_eps;
        let normed = b.rms_norm("attn_norm", x, "attn_norm.weight", eps)?;
        let kept = self.retention(b, layer, normed)?;
        let x = b.add("ffn_inp", kept, x)?;
        let normed = b.rms_norm("ffn_norm", x, "ffn_norm.weight", eps)?;
        let hidden = self.sizes.hidden;
        let gate = b.linear("ffn_gate", normed, "ffn_gate.weight", hidden)?;
        let up = b.linear("ffn_up", normed, "ffn_up.weight", hidden)?;
        let gated = b.gate("ffn_gated", Activation::Silu, gate, up)?;
        let down = b.linear("ffn_out", gated, "ffn_down.weight", self.sizes.dim)?;
        b.add("l_out", down, x)
    }

    fn retention(
        &self,
        b: &mut GraphBuilder,
        layer: LayerIdx,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let HeadSizes {
            n_heads,
            k_dim,
            v_dim,
            ..
        } = self.sizes.heads;
        let (n, dim) = (b.shape().n_tokens, self.sizes.dim);
        let rope = RopeSpec {
            style: RopeStyle::Neox,
            n_rot: k_dim,
            base: self.sizes.rope_base,
            scaling: RopeScaling::None,
            factors: None,
        };
        let positions = b.input(Input::Positions)?;
        let width = n_heads * k_dim;
        let mut rotated = |letter: &str, weight: &str| {
            let x = b.linear(&format!("{letter}proj"), x, weight, width)?;
            let x = b.reshape(&format!("{letter}heads"), x, &[n, n_heads, k_dim])?;
            let x = b.rope(&format!("{letter}rope"), x, positions, &rope)?;
            b.reshape(&format!("{letter}cur"), x, &[n, width])
        };
        let q = rotated("Q", "attn_q.weight")?;
        let k = rotated("K", "attn_k.weight")?;
        let k = b.scale("Kscaled", k, 1.0 / (k_dim as f32).sqrt())?;
        let width = n_heads * v_dim;
        let v = b.linear("Vcur", x, "attn_v.weight", width)?;
        let states = b.input(Input::States)?;
        let spec = Retention::spec(layer, n_heads);
        let sizes = CustomSizes {
            width,
            ..CustomSizes::default()
        };
        let kept = b.custom("retention", &spec, &[q, k, v, states], sizes)?;
        let heads = b.reshape("ret_heads", kept, &[n, n_heads, v_dim])?;
        let normed = b.rms_norm("ret_norm", heads, "ret_norm.weight", self.sizes.norm_eps)?;
        let normed = b.reshape("ret_rows", normed, &[n, width])?;
        let gate = b.linear("ret_gate", x, "attn_gate.weight", width)?;
        let gated = b.gate("ret_gated", Activation::Silu, gate, normed)?;
        b.linear("ret_out", gated, "attn_output.weight", dim)
    }
}

impl Model for RetNetModel {
    fn architecture(&self) -> &str {
        RetNet.name()
    }

    fn layers(&self) -> &LayerMap {
        &self.layers
    }

    fn vocab_size(&self) -> usize {
        self.sizes.vocab
    }

    fn context_length(&self) -> usize {
        self.sizes.context_length
    }

    fn embedding_dim(&self) -> usize {
        self.sizes.dim
    }

    fn graph(&self, shape: GraphShape) -> Result<Graph, ModelError> {
        let RetNetSizes {
            vocab,
            dim,
            n_layers,
            norm_eps,
            ..
        } = self.sizes;
        let mut b = GraphBuilder::new(shape);
        let tokens = b.input(Input::Tokens)?;
        let mut x = b.embed("inp_embd", tokens, "token_embd.weight", [vocab, dim])?;
        for layer in (0..).map(LayerIdx).take(n_layers) {
            x = self.layer(&mut b.scope(layer), layer, x)?;
        }
        // Logits cost most: only of the rows whose logits are wanted.
        if shape.n_outputs < shape.n_tokens {
            let wanted = b.input(Input::OutputRows)?;
            x = b.take_rows("wanted", x, wanted)?;
        }
        let x = b.rms_norm("result_norm", x, "output_norm.weight", norm_eps)?;
        let logits = b.linear("result_output", x, "token_embd.weight", vocab)?;
        Ok(b.finish(&[logits])?)
    }
}

impl Architecture for RetNet {
    fn name(&self) -> &'static str {
        "retnet"
    }

    fn model(
        &self,
        metadata: &Metadata,
        weights: &dyn WeightSource,
    ) -> Result<Arc<dyn Model>, ModelError> {
        let hyper = Hyperparameters::new(metadata, self.name());
        let (n_layers, dim) = (hyper.n_layers()?, hyper.count("embedding_length")?);
        let heads = hyper.heads(n_layers, dim)?;
        let Some(&first) = heads.first() else {
            return Err(hyper.wrong("block_count", "there is no layer".into()));
        };
        if heads.iter().any(|h| *h != first) {
            let reason = "layers differ in their heads, which RetNet's do not".to_owned();
            return Err(hyper.wrong("attention.head_count", reason));
        }
        Ok(Arc::new(RetNetModel::new(RetNetSizes {
            vocab: hyper.vocab(weights, dim)?,
            dim,
            hidden: hyper.count("feed_forward_length")?,
            n_layers,
            heads: first,
            norm_eps: hyper.norm_eps()?,
            rope_base: hyper.rope_base("rope.freq_base")?.unwrap_or(10_000.0),
            context_length: hyper.count("context_length")?,
        })))
    }

    fn example(&self) -> Result<Arc<dyn Model>, ModelError> {
        let heads = HeadSizes {
            n_heads: 4,
            kv_heads: 4,
            k_dim: 64,
            v_dim: 128,
        };
        Ok(Arc::new(RetNetModel::new(RetNetSizes {
            vocab: 32_000,
            dim: 256,
            hidden: 512,
            n_layers: 2,
            heads,
            norm_eps: 1e-5,
            rope_base: 10_000.0,
            context_length: 2048,
        })))
    }
}
