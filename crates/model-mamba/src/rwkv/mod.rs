//! [`Rwkv`]: RWKV-4, 6 and 7, whose blocks mix each token with the one before it and sum up keys
//! and values by a recurrence.
//!
//! A block has three states, each a layer of the memory, because each has its own operation that
//! reads and writes it: the row before, of the time mix and of the channel mix, and what the time
//! mix sums up. The operations are custom ones that the model registers. Directories may name a
//! `rescale_every`: it halves rows between blocks, and weights with them, against overflows of f16.
//! Norms undo it, so results are equal up to the norms' eps, and it is not computed there, where
//! rows are f32. GGUF files of RWKV-6 have such weights, so their rows are halved.

mod block;
mod heads;
mod ops;
#[cfg(test)]
mod testing;
mod v4;
mod v6;
mod v7;
mod wkv4;
mod wkv6;
mod wkv7;

use std::sync::Arc;

use kv_backend::CustomOps;
use kv_core::LayerIdx;
use kv_core::layers::LayerMap;
use kv_graph::weights::WeightSource;
use kv_graph::{Affine, Graph, GraphBuilder, GraphError, GraphShape, Input, NodeId};
use model_core::architecture::{Architecture, Model, ModelError, OutputKind};
use model_core::blocks::TOKEN_EMBEDDING;
use model_core::gguf::Metadata;
use model_core::hyperparameters::Hyperparameters;

use block::{Block, BlockState};

pub(crate) use v4::RWKV4;
pub(crate) use v6::RWKV6;
pub(crate) use v7::{PARTS as RWKV7_PARTS, RWKV7};

/// The versions.
pub const RWKV: &[Rwkv] = &[RWKV4, RWKV6, RWKV7];

/// Added to the variance in the norm of heads, where a file does not say: `1e-5 * 8^2`.
const HEAD_NORM_EPS: f32 = 64e-5;

/// An architecture: one version.
#[derive(Clone, Copy, Debug)]
pub struct Rwkv {
    /// The name in `general.architecture`.
    pub name: &'static str,
    /// Its mixers, from a file.
    read: fn(&Hyperparameters<'_>, &dyn WeightSource) -> Result<Version, ModelError>,
    /// Two blocks with settings of the usual size.
    example: fn() -> (Sizes, Version),
}

/// The mixers, in which the versions differ.
#[derive(Clone, Copy, Debug)]
enum Version {
    Four(v4::Averages),
    Six(v6::DecayingSums),
    Seven(v7::RatedDelta),
}

/// Heads of RWKV-6 and 7.
#[derive(Clone, Copy, Debug)]
struct Heads {
    /// Values of a head.
    dim: usize,
    /// Added to the variance in the norm of heads.
    norm_eps: f32,
}

impl Heads {
    fn read(hyper: &Hyperparameters<'_>) -> Result<Self, ModelError> {
        let (key, width) = ("wkv.head_size", hyper.count("embedding_length")?);
        let dim = hyper.count(key)?;
        if !width.is_multiple_of(dim) {
            let reason = format!("heads of {dim} values do not divide {width}");
            return Err(hyper.wrong(key, reason));
        }
        if let Some(n) = hyper
            .optional::<u32>("token_shift_count")?
            .filter(|&n| n != 2)
        {
            let reason = format!("{n} rows of a block are kept; 2 are supported");
            return Err(hyper.wrong("token_shift_count", reason));
        }
        let eps = hyper.positive("attention.group_norm_epsilon")?;
        Ok(Self {
            dim,
            norm_eps: eps.map_or(HEAD_NORM_EPS, |eps| eps as f32),
        })
    }

    /// Values of their states, a matrix for each, where rows have `dim` values.
    fn n_sums(self, dim: usize) -> usize {
        dim * self.dim
    }
}

/// Sizes of one model.
#[derive(Clone, Debug)]
struct Sizes {
    vocab: usize,
    /// Width of the rows between blocks.
    dim: usize,
    /// Width inside the channel mix.
    hidden: usize,
    n_blocks: usize,
    norm_eps: f32,
    context_length: usize,
    /// After every so many blocks rows are halved.
    rescale_every: Option<u32>,
    output_weight: String,
}

/// A model of some sizes.
#[derive(Clone, Debug)]
struct RwkvModel {
    name: &'static str,
    sizes: Sizes,
    version: Version,
    layers: LayerMap,
    output: OutputKind,
}

impl RwkvModel {
    fn new(name: &'static str, sizes: Sizes, version: Version) -> Self {
        let dim = sizes.dim;
        let n_sums = match version {
            Version::Four(averages) => averages.n_sums(),
            Version::Six(sums) => sums.heads.n_sums(dim),
            Version::Seven(delta) => delta.heads.n_sums(dim),
        };
        let of_block = BlockState::ALL.map(|state| state.memory(dim, n_sums));
        let layers = LayerMap::new(of_block.repeat(sizes.n_blocks));
        Self {
            name,
            sizes,
            version,
            layers,
            output: OutputKind::Logits,
        }
    }

    /// All blocks.
    fn blocks(&self, b: &mut GraphBuilder, mut x: NodeId) -> Result<NodeId, GraphError> {
        let sizes = &self.sizes;
        let mut first_values = None;
        for index in (0..).take(sizes.n_blocks) {
            let b = b.scope(LayerIdx(index));
            let mut block = Block { sizes, b, index };
            x = match self.version {
                Version::Four(averages) => averages.build(&mut block, x)?,
                Version::Six(sums) => sums.build(&mut block, x)?,
                Version::Seven(delta) => delta.build(&mut block, x, &mut first_values)?,
            };
            let is_halved = |n: u32| (index + 1).is_multiple_of(n);
            if sizes.rescale_every.is_some_and(is_halved) {
                x = block.b.scale("l_out_half", x, 0.5)?;
            }
        }
        Ok(x)
    }
}

impl Model for RwkvModel {
    fn architecture(&self) -> &str {
        self.name
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

    fn has_no_use_for(&self, tensor: &str) -> bool {
        matches!(self.version, Version::Seven(_)) && v7::UNREAD.contains(&tensor)
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
        let mixing = CustomOps::new().with(ops::PreviousRows).with(ops::Lerp);
        match self.version {
            Version::Four(_) => mixing.with(wkv4::Wkv4),
            Version::Six(_) => mixing.with(wkv6::Wkv6),
            Version::Seven(_) => mixing.with(wkv7::Wkv7),
        }
    }

    fn graph(&self, shape: GraphShape) -> Result<Graph, ModelError> {
        let sizes = &self.sizes;
        let eps = sizes.norm_eps;
        let mut b = GraphBuilder::new(shape);
        let tokens = b.input(Input::Tokens)?;
        let matrix = [sizes.vocab, sizes.dim];
        let x = b.embed("inp_embd", tokens, TOKEN_EMBEDDING, matrix)?;
        let weights = Affine::new("token_embd_norm.weight").bias("token_embd_norm.bias");
        let x = b.layer_norm("inp_norm", x, weights, eps)?;
        let mut x = self.blocks(&mut b, x)?;
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
        self.name
    }

    fn model(
        &self,
        metadata: &Metadata,
        weights: &dyn WeightSource,
    ) -> Result<Arc<dyn Model>, ModelError> {
        let hyper = Hyperparameters::new(metadata, self.name);
        let dim = hyper.count("embedding_length")?;
        let rescale = hyper.optional::<u32>("rescale_every_n_layers")?;
        let sizes = Sizes {
            vocab: hyper.vocab(weights, dim)?,
            dim,
            hidden: hyper.count("feed_forward_length")?,
            n_blocks: hyper.n_layers()?,
            norm_eps: hyper.layer_norm_eps()?,
            context_length: hyper.count("context_length")?,
            rescale_every: rescale.filter(|&n| n > 0),
            output_weight: hyper.output_weight(weights)?,
        };
        let version = (self.read)(&hyper, weights)?;
        Ok(Arc::new(RwkvModel::new(self.name, sizes, version)))
    }

    fn example(&self) -> Result<Arc<dyn Model>, ModelError> {
        let (sizes, version) = (self.example)();
        Ok(Arc::new(RwkvModel::new(self.name, sizes, version)))
    }
}
