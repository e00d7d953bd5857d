//! [`Rwkv`]: RWKV-4 (Peng et al., arXiv 2305.13048), whose blocks mix each token with the one
//! before it and average values by a recurrence.
//!
//! A block has three states, each a layer of the memory, because each has its own operation that
//! reads and writes it: the row before, of the time mix and of the channel mix, `[dim]` each, and
//! the average, `[3 * inner]`. The operations are custom ones that the model registers. Directories
//! may name a `rescale_every`: it halves rows between blocks, and weights with them, against
//! overflows of f16. Norms undo it, so results are equal up to the norms' eps, and it is not
//! computed here, where rows are f32.

mod ops;
mod wkv;

use std::sync::Arc;

use kv_core::LayerIdx;
use kv_core::backend::CustomOps;
use kv_core::graph::{
    Affine, CustomSizes, CustomSpec, Graph, GraphBuilder, GraphError, GraphShape, Input, NodeId,
    Scope,
};
use kv_core::layers::{LayerMap, LayerMemory, RecurrentMemory};
use kv_core::weights::WeightSource;
use model_core::architecture::{Architecture, Model, ModelError, OutputKind};
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
    /// Width of the averaged values.
    inner: usize,
    /// Width inside the channel mix.
    hidden: usize,
    n_blocks: usize,
    norm_eps: f32,
    context_length: usize,
    output_weight: String,
}

/// The states of one block, in the order of the layers of its memory.
#[derive(Clone, Copy, Debug)]
enum BlockState {
    TimeShift,
    Average,
    ChannelShift,
}

impl BlockState {
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
    output: OutputKind,
}

impl RwkvModel {
    fn new(sizes: Sizes) -> Self {
        let of_block = BlockState::ALL.map(|state| state.memory(&sizes));
        let layers = LayerMap::new(of_block.repeat(sizes.n_blocks));
        Self {
            sizes,
            layers,
            output: OutputKind::Logits,
        }
    }
}

/// The builder in the scope of one block.
struct Block<'a> {
    sizes: &'a Sizes,
    b: Scope<'a>,
    index: u32,
}

impl Block<'_> {
    fn norm(&mut self, name: &str, x: NodeId) -> Result<NodeId, GraphError> {
        let (gain, bias) = (format!("{name}.weight"), format!("{name}.bias"));
        let weights = Affine::new(&gain).bias(&bias);
        self.b.layer_norm(name, x, weights, self.sizes.norm_eps)
    }

    fn linear(&mut self, name: &str, x: NodeId, width: usize) -> Result<NodeId, GraphError> {
        self.b.linear(name, x, &format!("{name}.weight"), width)
    }

    /// `x` interpolated with the row before, once for each of the shares named so.
    fn token_shift<const N: usize>(
        &mut self,
        mix: &str,
        state: BlockState,
        x: NodeId,
        shares: [&str; N],
    ) -> Result<[NodeId; N], GraphError> {
        let dim = self.sizes.dim;
        let weights = shares.map(|share| format!("{mix}_share_{share}.weight"));
        let spec = CustomSpec {
            weights: weights.to_vec(),
            layer: Some(state.layer(self.index)),
            ..CustomSpec::new(Shift::NAME)
        };
        let states = self.b.input(Input::States)?;
        let shape = [dim];
        let shapes: [&[usize]; N] = [&shape; N];
        let sizes = CustomSizes {
            weights: &shapes,
            width: N * dim,
        };
        let name = format!("{mix}_shift");
        let mixed = self.b.custom(&name, &spec, &[x, states], sizes)?;
        let mut parts = [mixed; N];
        for (at, (part, share)) in parts.iter_mut().zip(shares).enumerate() {
            let name = format!("{mix}_x{share}");
            *part = self.b.columns(&name, mixed, at * dim..(at + 1) * dim)?;
        }
        Ok(parts)
    }

    fn gated(&mut self, name: &str, gate: NodeId, x: NodeId) -> Result<NodeId, GraphError> {
        let sizes = CustomSizes {
            width: self.b.shape_of(x).last().copied().unwrap_or(0),
            ..CustomSizes::default()
        };
        let spec = CustomSpec::new(Gate::NAME);
        self.b.custom(name, &spec, &[gate, x], sizes)
    }

    /// The block's average of past values.
    fn time_mix(&mut self, x: NodeId) -> Result<NodeId, GraphError> {
        let Sizes { dim, inner, .. } = *self.sizes;
        let shares = ["k", "v", "r"];
        let [k, v, r] = self.token_shift("time_mix", BlockState::TimeShift, x, shares)?;
        let k = self.linear("time_mix_key", k, inner)?;
        let v = self.linear("time_mix_value", v, inner)?;
        let r = self.linear("time_mix_receptance", r, inner)?;
        let weights = ["time_mix_decay.weight", "time_mix_first.weight"];
        let spec = CustomSpec {
            weights: weights.map(str::to_owned).to_vec(),
            layer: Some(BlockState::Average.layer(self.index)),
            ..CustomSpec::new(Wkv::NAME)
        };
        let states = self.b.input(Input::States)?;
        let sizes = CustomSizes {
            weights: &[&[inner], &[inner]],
            width: inner,
        };
        let average = self
            .b
            .custom("time_mix_wkv", &spec, &[k, v, states], sizes)?;
        let gated = self.gated("time_mix_gated", r, average)?;
        self.linear("time_mix_output", gated, dim)
    }

    /// The feed-forward part.
    fn channel_mix(&mut self, x: NodeId) -> Result<NodeId, GraphError> {
        let Sizes { dim, hidden, .. } = *self.sizes;
        let state = BlockState::ChannelShift;
        let [k, r] = self.token_shift("channel_mix", state, x, ["k", "r"])?;
        let k = self.linear("channel_mix_key", k, hidden)?;
        let spec = CustomSpec::new(SquaredRelu::NAME);
        let sizes = CustomSizes {
            width: hidden,
            ..CustomSizes::default()
        };
        let squared = self.b.custom("channel_mix_squared", &spec, &[k], sizes)?;
        let v = self.linear("channel_mix_value", squared, dim)?;
        let r = self.linear("channel_mix_receptance", r, dim)?;
        self.gated("channel_mix_gated", r, v)
    }

    fn build(&mut self, x: NodeId) -> Result<NodeId, GraphError> {
        let normed = self.norm("attn_norm", x)?;
        let mixed = self.time_mix(normed)?;
        let x = self.b.add("ffn_inp", mixed, x)?;
        let normed = self.norm("ffn_norm", x)?;
        let mixed = self.channel_mix(normed)?;
        self.b.add("l_out", mixed, x)
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

    fn output(&self) -> OutputKind {
        self.output
    }

    fn without_head(&self) -> Option<Arc<dyn Model>> {
        match self.output {
            OutputKind::Logits => Some(Arc::new(Self {
                output: OutputKind::Embeddings,
                ..self.clone()
            })),
            _ => None,
        }
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
        let weights = Affine::new("token_embd_norm.weight").bias("token_embd_norm.bias");
        let mut x = b.layer_norm("inp_norm", x, weights, eps)?;
        for index in (0..).take(sizes.n_blocks) {
            let b = b.scope(LayerIdx(index));
            x = Block { sizes, b, index }.build(x)?;
        }
        if shape.n_outputs < shape.n_tokens {
            let wanted = b.input(Input::OutputRows)?;
            x = b.take_rows("wanted", x, wanted)?;
        }
        let weights = Affine::new("output_norm.weight").bias("output_norm.bias");
        let x = b.layer_norm("result_norm", x, weights, eps)?;
        let x = match self.output {
            OutputKind::Logits => {
                b.linear("result_output", x, &sizes.output_weight, sizes.vocab)?
            }
            _ => x,
        };
        Ok(b.finish(&[x])?)
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
