//! [`Block`]: the builder in the scope of one block, and [`BlockState`], what a block remembers.
//!
//! Knows what all versions have; their mixers are in their own files.

use kv_core::LayerIdx;
use kv_core::layers::{LayerMemory, RecurrentMemory};
use kv_graph::{
    Activation, Affine, CustomScope, CustomSizes, CustomSpec, GraphError, Input, NodeId, Scope,
};

use super::Sizes;
use super::ops::{Lerp, PreviousRows};

/// The states of one block, in the order of the layers of its memory.
#[derive(Clone, Copy, Debug)]
pub(super) enum BlockState {
    /// The last input of the time mix.
    TimeShift,
    /// The sums of the time mix.
    Sums,
    /// The last input of the channel mix.
    ChannelShift,
}

impl BlockState {
    pub(super) const ALL: [Self; 3] = [Self::TimeShift, Self::Sums, Self::ChannelShift];

    pub(super) fn memory(self, dim: usize, sums: usize) -> LayerMemory {
        LayerMemory::Recurrent(RecurrentMemory {
            conv_row: 0,
            state_row: match self {
                Self::TimeShift | Self::ChannelShift => dim,
                Self::Sums => sums,
            },
        })
    }

    fn layer(self, block: u32) -> LayerIdx {
        LayerIdx(block * Self::ALL.len() as u32 + self as u32)
    }
}

/// The builder in the scope of one block.
pub(super) struct Block<'a> {
    pub(super) sizes: &'a Sizes,
    pub(super) b: Scope<'a>,
    pub(super) index: u32,
}

/// A custom operation of a block.
pub(super) struct BlockOp<'a> {
    /// The operation's name.
    pub(super) op: &'static str,
    pub(super) params: &'a [(&'static str, f32)],
    pub(super) weights: &'a [(&'a str, &'a [usize])],
    /// The state that it reads and writes, where it does.
    pub(super) state: Option<BlockState>,
    /// Width of its result.
    pub(super) width: usize,
}

impl Block<'_> {
    pub(super) fn norm(&mut self, name: &str, x: NodeId) -> Result<NodeId, GraphError> {
        let (gain, bias) = (format!("{name}.weight"), format!("{name}.bias"));
        let weights = Affine::new(&gain).bias(&bias);
        self.b.layer_norm(name, x, weights, self.sizes.norm_eps)
    }

    pub(super) fn linear(
        &mut self,
        name: &str,
        x: NodeId,
        width: usize,
    ) -> Result<NodeId, GraphError> {
        self.b.linear(name, x, &format!("{name}.weight"), width)
    }

    /// Adds a custom operation, which gets the states behind its operands where it has one.
    pub(super) fn custom(
        &mut self,
        name: &str,
        op: &BlockOp<'_>,
        operands: &[NodeId],
    ) -> Result<NodeId, GraphError> {
        let params = op.params.iter().map(|&(name, x)| (name.to_owned(), x));
        let names = op.weights.iter().map(|(name, _)| (*name).to_owned());
        let shapes: Vec<&[usize]> = op.weights.iter().map(|&(_, shape)| shape).collect();
        let spec = CustomSpec {
            params: params.collect(),
            weights: names.collect(),
            scope: match op.state {
                Some(state) => CustomScope::State(state.layer(self.index)),
                None => CustomScope::Row,
            },
            ..CustomSpec::new(op.op)
        };
        let sizes = CustomSizes {
            weights: &shapes,
            width: op.width,
        };
        let mut operands = operands.to_vec();
        if op.state.is_some() {
            operands.push(self.b.input(Input::States)?);
        }
        self.b.custom(name, &spec, &operands, sizes)
    }

    /// The row before each of `x`.
    pub(super) fn before(
        &mut self,
        mix: &str,
        state: BlockState,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let op = BlockOp {
            op: PreviousRows::NAME,
            params: &[],
            weights: &[],
            state: Some(state),
            width: self.sizes.dim,
        };
        self.custom(&format!("{mix}_before"), &op, &[x])
    }

    /// `x (1 - share) + before share` for the shares of these weights, one behind the other; a
    /// third operand is added to the shares.
    pub(super) fn lerp(
        &mut self,
        name: &str,
        weights: &[(&str, &[usize])],
        operands: &[NodeId],
    ) -> Result<NodeId, GraphError> {
        let lens = weights
            .iter()
            .map(|(_, shape)| shape.iter().product::<usize>());
        let op = BlockOp {
            op: Lerp::NAME,
            params: &[],
            weights,
            state: None,
            width: lens.sum(),
        };
        self.custom(name, &op, operands)
    }

    /// The rows of `mixed`, which has one for each of these names, one behind the other.
    pub(super) fn parts<const N: usize>(
        &mut self,
        mix: &str,
        mixed: NodeId,
        names: [&str; N],
    ) -> Result<[NodeId; N], GraphError> {
        let dim = self.sizes.dim;
        let mut parts = [mixed; N];
        for (at, (part, name)) in parts.iter_mut().zip(names).enumerate() {
            let name = format!("{mix}_x{name}");
            *part = self.b.columns(&name, mixed, at * dim..(at + 1) * dim)?;
        }
        Ok(parts)
    }

    /// The feed-forward part of `x`, which is mixed for its keys.
    pub(super) fn channel_values(&mut self, x: NodeId) -> Result<NodeId, GraphError> {
        let Sizes { dim, hidden, .. } = *self.sizes;
        let k = self.linear("channel_mix_key", x, hidden)?;
        let squared = self
            .b
            .activate("channel_mix_squared", Activation::ReluSquared, k)?;
        self.linear("channel_mix_value", squared, dim)
    }

    /// The same, gated: of keys and of what gates.
    pub(super) fn gated_channel_values(
        &mut self,
        [k, r]: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        let v = self.channel_values(k)?;
        let r = self.linear("channel_mix_receptance", r, self.sizes.dim)?;
        self.b.gate("channel_mix_gated", Activation::Sigmoid, r, v)
    }

    /// `x` through two matrices, with a function between them, and a bias where there is one.
    pub(super) fn low_rank(&mut self, low: &LowRank<'_>, x: NodeId) -> Result<NodeId, GraphError> {
        let name = low.name;
        let [first, second] = [1, 2].map(|n| format!("{name}{n}.weight"));
        let inner = self.b.linear(&format!("{name}_low"), x, &first, low.rank)?;
        let inner = match low.inner {
            InnerActivation::Linear => inner,
            InnerActivation::Tanh => self.b.soft_cap(&format!("{name}_tanh"), inner, 1.0)?,
            InnerActivation::Sigmoid => {
                self.b
                    .activate(&format!("{name}_sigmoid"), Activation::Sigmoid, inner)?
            }
        };
        let bias = low.bias.map(|bias| format!("{bias}.weight"));
        let mut weights = Affine::new(&second);
        if let Some(bias) = &bias {
            weights = weights.bias(bias);
        }
        self.b.affine(name, inner, weights, self.sizes.dim)
    }
}

/// Two matrices of low rank, one behind the other.
pub(super) struct LowRank<'a> {
    /// Their tensors are called so, with 1 and 2 behind it.
    pub(super) name: &'a str,
    /// Name of the tensor that is added, where there is one, without `.weight`.
    pub(super) bias: Option<&'a str>,
    pub(super) rank: usize,
    pub(super) inner: InnerActivation,
}

/// The function between two matrices.
#[derive(Clone, Copy, Debug)]
pub(super) enum InnerActivation {
    Linear,
    Tanh,
    Sigmoid,
}
