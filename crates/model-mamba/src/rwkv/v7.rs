//! The mixers of RWKV-7 (Goose; Peng et al., arXiv 2503.14456): a delta rule with rates for every
//! value of its keys.
//!
//! Invariant: every block adds to its values a share of those of the first block, which has no
//! tensors for that ([`UNREAD`] are in files all the same).

use kv_graph::weights::WeightSource;
use kv_graph::{Activation, GraphError, NodeId};
use model_core::architecture::ModelError;
use model_core::hyperparameters::Hyperparameters;

use super::block::{Block, BlockOp, BlockState, InnerActivation, LowRank};
use super::wkv7::Wkv7;
use super::{Heads, Rwkv, Sizes, Version};

/// The architecture; keys and tensors are GGUF's.
pub(crate) const RWKV7: Rwkv = Rwkv {
    name: "rwkv7",
    read: |hyper, _: &dyn WeightSource| Ok(Version::Seven(read(hyper)?)),
    example: || {
        let sizes = Sizes {
            vocab: 65_536,
            dim: 2048,
            hidden: 8192,
            n_blocks: 2,
            norm_eps: 1e-5,
            context_length: 1 << 20,
            rescale_every: None,
            output_weight: "output.weight".to_owned(),
        };
        let delta = RatedDelta {
            heads: Heads {
                dim: 64,
                norm_eps: 64e-5,
            },
            decay_rank: 96,
            rate_rank: 96,
            value_rank: 64,
            gate_rank: 256,
        };
        (sizes, Version::Seven(delta))
    },
};

fn read(hyper: &Hyperparameters<'_>) -> Result<RatedDelta, ModelError> {
    Ok(RatedDelta {
        heads: Heads::read(hyper)?,
        decay_rank: hyper.count("attention.decay_lora_rank")?,
        rate_rank: hyper.count("attention.iclr_lora_rank")?,
        value_rank: hyper.count("attention.value_residual_mix_lora_rank")?,
        gate_rank: hyper.count("attention.gate_lora_rank")?,
    })
}

/// Rows that the time mix makes of each, in the order of the files.
pub(crate) const PARTS: [&str; 6] = ["r", "w", "k", "v", "a", "g"];

/// The tensors of llama.cpp's files for the share of the first block's values in the first block
/// itself.
pub(super) const UNREAD: [&str; 3] = [
    "blk.0.time_mix_v0.weight",
    "blk.0.time_mix_v1.weight",
    "blk.0.time_mix_v2.weight",
];

/// Settings of its time mix. Ranks are values between two matrices.
#[derive(Clone, Copy, Debug)]
pub(super) struct RatedDelta {
    pub(super) heads: Heads,
    decay_rank: usize,
    rate_rank: usize,
    /// Of the share of the first block's values.
    value_rank: usize,
    gate_rank: usize,
}

impl RatedDelta {
    /// Adds a block; `first_values` are those of the first block, which leaves them there.
    pub(super) fn build(
        self,
        block: &mut Block<'_>,
        x: NodeId,
        first_values: &mut Option<NodeId>,
    ) -> Result<NodeId, GraphError> {
        let normed = block.norm("attn_norm", x)?;
        let mixed = self.time_mix(block, normed, first_values)?;
        let x = block.b.add("ffn_inp", mixed, x)?;
        let normed = block.norm("attn_norm_2", x)?;
        let shares: [(&str, &[usize]); 1] = [("channel_mix_lerp_k.weight", &[block.sizes.dim])];
        let before = block.before("channel_mix", BlockState::ChannelShift, normed)?;
        let mixed = block.lerp("channel_mix_lerp", &shares, &[normed, before])?;
        let mixed = block.channel_values(mixed)?;
        block.b.add("l_out", mixed, x)
    }

    /// The sum that `r` reads of past keys and values.
    fn time_mix(
        self,
        block: &mut Block<'_>,
        x: NodeId,
        first_values: &mut Option<NodeId>,
    ) -> Result<NodeId, GraphError> {
        let dim = block.sizes.dim;
        let before = block.before("time_mix", BlockState::TimeShift, x)?;
        let fused: [(&str, &[usize]); 1] = [("time_mix_lerp_fused.weight", &[6, 1, 1, dim])];
        let mixed = block.lerp("time_mix_lerp", &fused, &[x, before])?;
        let [r, w, k, v, a, g] = block.parts("time_mix", mixed, PARTS)?;
        let r = block.linear("time_mix_receptance", r, dim)?;
        let k = block.linear("time_mix_key", k, dim)?;
        let values = block.linear("time_mix_value", v, dim)?;
        let [w, a, g] = self.low_ranks(block, [w, a, g])?;
        let v = match *first_values {
            None => *first_values.insert(values),
            Some(first) => self.with_first(block, v, [first, values])?,
        };
        let shape: &[usize] = &[dim];
        let op = BlockOp {
            op: Wkv7::NAME,
            params: &[("eps", self.heads.norm_eps)],
            weights: &[
                ("time_mix_k_k.weight", shape),
                ("time_mix_k_a.weight", shape),
                ("time_mix_r_k.weight", shape),
                ("time_mix_ln.weight", shape),
                ("time_mix_ln.bias", shape),
            ],
            state: Some(BlockState::Sums),
            width: dim,
        };
        let y = block.custom("time_mix_wkv", &op, &[r, w, k, v, a])?;
        let gated = block.b.mul("time_mix_gated", g, y)?;
        block.linear("time_mix_output", gated, dim)
    }

    /// Decays before their functions, rates, and the gate.
    fn low_ranks(
        self,
        block: &mut Block<'_>,
        [w, a, g]: [NodeId; 3],
    ) -> Result<[NodeId; 3], GraphError> {
        let decay = LowRank {
            name: "time_mix_w",
            bias: Some("time_mix_w0"),
            rank: self.decay_rank,
            inner: InnerActivation::Tanh,
        };
        let rate = LowRank {
            name: "time_mix_a",
            bias: Some("time_mix_a0"),
            rank: self.rate_rank,
            inner: InnerActivation::Linear,
        };
        let gate = LowRank {
            name: "time_mix_g",
            bias: None,
            rank: self.gate_rank,
            inner: InnerActivation::Sigmoid,
        };
        let w = block.low_rank(&decay, w)?;
        let a = block.low_rank(&rate, a)?;
        let a = block.b.activate("time_mix_rates", Activation::Sigmoid, a)?;
        Ok([w, a, block.low_rank(&gate, g)?])
    }

    /// Values with a share of those of the first block.
    fn with_first(
        self,
        block: &mut Block<'_>,
        x: NodeId,
        [first, values]: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        let share = LowRank {
            name: "time_mix_v",
            bias: Some("time_mix_v0"),
            rank: self.value_rank,
            inner: InnerActivation::Linear,
        };
        let share = block.low_rank(&share, x)?;
        let negative = block.b.scale("time_mix_less_value", values, -1.0)?;
        let delta = block.b.add("time_mix_to_first", first, negative)?;
        let part = block
            .b
            .gate("time_mix_of_first", Activation::Sigmoid, share, delta)?;
        block.b.add("time_mix_mixed_value", values, part)
    }
}
