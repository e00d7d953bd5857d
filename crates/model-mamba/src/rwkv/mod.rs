//! [`Rwkv`]: RWKV-4 (Peng et al., arXiv 2305.13048), whose blocks mix each token with the one before it
//! and average values by a recurrence.
//!
//! A block remembers three things, each an own layer of the memory, because each has an operation
//! of its own that reads and writes it: the row before, of the time mix and of the channel mix,
//! `[dim]` each, and the average, `[3 * inner]`. The operations are custom ones that the model
//! brings along. Directories may name a `rescale_every`: it halves rows between blocks, and weights
//! with them, against overflows of f16. Norms undo it, so results are equal up to the norms' eps,
//! and it is not computed here, where rows are f32.

mod ops;
mod wkv;

use std::sync::Arc;

use kv_core::LayerIdx;
use kv_core::backend::CustomOps;
use kv_core::graph::{CustomSpec, Graph, GraphBuilder, GraphError, GraphShape, Input, NodeId};
use kv_core::layers::{LayerMap, LayerMemory, RecurrentMemory};
use kv_core::weights::WeightSource;
use model_core::architecture::{Architecture, Model, ModelError};
use model_core::blocks::TOKEN_EMBEDDING;
use model_core::gguf::Metadata;
use model_core::hyperparameters::Hyperparameters;

use ops::{Gate, Shift, SquaredRelu};
use wkv::Wkv;

/// The name of the architecture. No GGUF file of another program has it: those are of RWKV-6 and 7.
pub(crate) const NAME: &str = "rwkv4";

/// The architecture: reads a model's sizes.
#[derive(Clone, Copy, Debug)]
pub struct Rwkv;

/// Sizes of one model.
#[derive(Clone, Debug)]
struct Sizes {
    vocab: usize,
    /// Width of the rows between blocks.
    dim: usize,
    /// Width of what is averaged.
    inner: usize,
    /// Width inside the channel mix.
    hidden: usize,
    n_blocks: usize,
    norm_eps: f32,
    context_length: usize,
    output_weight: String,
}

/// What one block remembers, in order of the layers of its memory.
#[derive(Clone, Copy, Debug)]
enum Remembered {
    TimeShift,
    Average,
    ChannelShift,
}

impl Remembered {
    const ALL: [Self; 3] = [Self::TimeShift, Self::Average, Self::ChannelShift];

    fn memory(self, sizes: &Sizes) -> LayerMemory {
        LayerMemory::Recurrent(RecurrentMemory {
            conv_row: 0,
            state_row: match self {
                Self::TimeShift | Self::ChannelShift => sizes.dim,
                Self::Average => 3 * sizes.inner,
            },
        })
    }

    fn layer(self, block: u32) -> LayerIdx {
        LayerIdx(block * Self::ALL.len() as u32 + self as u32)
    }
}

/// A model of some sizes.
#[derive(Clone, Debug)]
struct RwkvModel {
    sizes: Sizes,
    layers: LayerMap,
}

impl RwkvModel {
    fn new(sizes: Sizes) -> Self {
        let of_block = Remembered::ALL.map(|what| what.memory(&sizes));
        let layers = LayerMap::new(of_block.repeat(sizes.n_blocks));
        Self { sizes, layers }
    }
}

/// A block's nodes under construction.
struct Block<'a> {
    sizes: &'a Sizes,
    b: &'a mut GraphBuilder,
    index: u32,
}

impl Block<'_> {
    fn name(&self, what: &str) -> String {
        format!("{what}-{}", self.index)
    }

    fn weight(&self, what: &str) -> String {
        format!("blk.{}.{what}.weight", self.index)
    }

    fn norm(&mut self, what: &str, x: NodeId) -> Result<NodeId, GraphError> {
        let (gain, bias) = (self.weight(what), format!("blk.{}.{what}.bias", self.index));
        let name = self.name(what);
        self.b
            .layer_norm(&name, x, (&gain, Some(&bias)), self.sizes.norm_eps)
    }

    fn linear(&mut self, what: &str, x: NodeId, width: usize) -> Result<NodeId, GraphError> {
        let (name, weight) = (self.name(what), self.weight(what));
        self.b.linear(&name, x, &weight, width)
    }

    /// `x` mixed with the row before, once for each of the shares named so.
    fn shifted<const N: usize>(
        &mut self,
        mix: &str,
        remembered: Remembered,
        x: NodeId,
        shares: [&str; N],
    ) -> Result<[NodeId; N], GraphError> {
        let dim = self.sizes.dim;
        let weights = shares.map(|share| self.weight(&format!("{mix}_share_{share}")));
        let spec = CustomSpec {
            weights: weights.to_vec(),
            layer: Some(remembered.layer(self.index)),
            ..CustomSpec::new(Shift::NAME)
        };
        let states = self.b.input(Input::States)?;
        let name = self.name(&format!("{mix}_shift"));
        let shape = [dim];
        let shapes: [&[usize]; N] = [&shape; N];
        let mixed = self
            .b
            .custom(&name, &spec, &[x, states], (&shapes, N * dim))?;
        let mut parts = [mixed; N];
        for (at, (part, share)) in parts.iter_mut().zip(shares).enumerate() {
            let name = self.name(&format!("{mix}_x{share}"));
            *part = self.b.columns(&name, mixed, at * dim..(at + 1) * dim)?;
        }
        Ok(parts)
    }

    fn gated(&mut self, what: &str, gate: NodeId, x: NodeId) -> Result<NodeId, GraphError> {
        let (name, width) = (self.name(what), self.b.shape_of(x).last().copied());
        let spec = CustomSpec::new(Gate::NAME);
        self.b
            .custom(&name, &spec, &[gate, x], (&[], width.unwrap_or(0)))
    }

    /// What the block averages of the past.
    fn time_mix(&mut self, x: NodeId) -> Result<NodeId, GraphError> {
        let Sizes { dim, inner, .. } = *self.sizes;
        let shares = ["k", "v", "r"];
        let [k, v, r] = self.shifted("time_mix", Remembered::TimeShift, x, shares)?;
        let k = self.linear("time_mix_key", k, inner)?;
        let v = self.linear("time_mix_value", v, inner)?;
        let r = self.linear("time_mix_receptance", r, inner)?;
        let spec = CustomSpec {
            weights: vec![self.weight("time_mix_decay"), self.weight("time_mix_first")],
            layer: Some(Remembered::Average.layer(self.index)),
            ..CustomSpec::new(Wkv::NAME)
        };
        let states = self.b.input(Input::States)?;
        let name = self.name("time_mix_wkv");
        let shape = [inner];
        let shapes: [&[usize]; 2] = [&shape; 2];
        let average = self
            .b
            .custom(&name, &spec, &[k, v, states], (&shapes, inner))?;
        let gated = self.gated("time_mix_gated", r, average)?;
        self.linear("time_mix_output", gated, dim)
    }

    /// The feed-forward part.
    fn channel_mix(&mut self, x: NodeId) -> Result<NodeId, GraphError> {
        let Sizes { dim, hidden, .. } = *self.sizes;
        let shares = ["k", "r"];
        let [k, r] = self.shifted("channel_mix", Remembered::ChannelShift, x, shares)?;
        let k = self.linear("channel_mix_key", k, hidden)?;
        let (name, spec) = (
            self.name("channel_mix_squared"),
            CustomSpec::new(SquaredRelu::NAME),
        );
        let squared = self.b.custom(&name, &spec, &[k], (&[], hidden))?;
        let v = self.linear("channel_mix_value", squared, dim)?;
        let r = self.linear("channel_mix_receptance", r, dim)?;
        self.gated("channel_mix_gated", r, v)
    }

    fn rows(&mut self, x: NodeId) -> Result<NodeId, GraphError> {
        let normed = self.norm("attn_norm", x)?;
        let mixed = self.time_mix(normed)?;
        let name = self.name("ffn_inp");
        let x = self.b.add(&name, mixed, x)?;
        let normed = self.norm("ffn_norm", x)?;
        let mixed = self.channel_mix(normed)?;
        let name = self.name("l_out");
        self.b.add(&name, mixed, x)
    }
}

impl Model for RwkvModel {
    fn architecture(&self) -> &str {
        NAME
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

    fn custom_ops(&self) -> CustomOps {
        ops::ops()
    }

    fn graph(&self, shape: GraphShape) -> Result<Graph, ModelError> {
        let sizes = &self.sizes;
        let eps = sizes.norm_eps;
        let mut b = GraphBuilder::new(shape);
        let tokens = b.input(Input::Tokens)?;
        let matrix = [sizes.vocab, sizes.dim];
        let x = b.embed("inp_embd", tokens, TOKEN_EMBEDDING, matrix)?;
        let weights = ("token_embd_norm.weight", Some("token_embd_norm.bias"));
        let mut x = b.layer_norm("inp_norm", x, weights, eps)?;
        for index in (0..).take(sizes.n_blocks) {
            let b = &mut b;
            x = Block { sizes, b, index }.rows(x)?;
        }
        if shape.n_outputs < shape.n_tokens {
            let wanted = b.input(Input::OutputRows)?;
            x = b.take_rows("wanted", x, wanted)?;
        }
        let weights = ("output_norm.weight", Some("output_norm.bias"));
        let x = b.layer_norm("result_norm", x, weights, eps)?;
        let logits = b.linear("result_output", x, &sizes.output_weight, sizes.vocab)?;
        Ok(b.finish(&[logits])?)
    }
}

impl Architecture for Rwkv {
    fn name(&self) -> &'static str {
        NAME
    }

    fn model(
        &self,
        metadata: &Metadata,
        weights: &dyn WeightSource,
    ) -> Result<Arc<dyn Model>, ModelError> {
        let hyper = Hyperparameters::new(metadata, NAME);
        let dim = hyper.count("embedding_length")?;
        Ok(Arc::new(RwkvModel::new(Sizes {
            vocab: hyper.vocab(weights, dim)?,
            dim,
            inner: hyper.count("time_mix.inner_size")?,
            hidden: hyper.count("feed_forward_length")?,
            n_blocks: hyper.n_layers()?,
            norm_eps: hyper.layer_norm_eps()?,
            context_length: hyper.count("context_length")?,
            output_weight: hyper.output_weight(weights)?,
        })))
    }

    fn example(&self) -> Result<Arc<dyn Model>, ModelError> {
        Ok(Arc::new(RwkvModel::new(Sizes {
            vocab: 50_277,
            dim: 768,
            inner: 768,
            hidden: 3072,
            n_blocks: 2,
            norm_eps: 1e-5,
            context_length: 1024,
            output_weight: "output.weight".to_owned(),
        })))
    }
}
