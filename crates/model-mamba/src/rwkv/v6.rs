//! The mixers of RWKV-6 (Finch; Peng et al., arXiv 2404.05892): sums of keys and values, whose
//! decays and mixtures with the row before depend on the row.

use kv_graph::weights::WeightSource;
use kv_graph::{Activation, GraphError, NodeId};
use model_core::architecture::ModelError;
use model_core::hyperparameters::{Hyperparameters, optional_weight};

use super::block::{Block, BlockOp, BlockState, InnerActivation, LowRank};
use super::wkv6::Wkv6;
use super::{Heads, Rwkv, Sizes, Version};

/// The architecture; keys and tensors are GGUF's.
pub(crate) const RWKV6: Rwkv = Rwkv {
    name: "rwkv6",
    read: |hyper, weights| Ok(Version::Six(read(hyper, weights)?)),
    example: || {
        let sizes = Sizes {
            vocab: 65_536,
            dim: 2048,
            hidden: 7168,
            n_blocks: 2,
            norm_eps: 1e-5,
            context_length: 1 << 20,
            rescale_every: None,
            output_weight: "output.weight".to_owned(),
        };
        let decaying = DecayingSums {
            heads: Heads {
                dim: 64,
                norm_eps: 64e-5,
            },
            mix_rank: 32,
            decay_rank: 64,
            shares: Shares::Fused,
        };
        (sizes, Version::Six(decaying))
    },
};

fn read(
    hyper: &Hyperparameters<'_>,
    weights: &dyn WeightSource,
) -> Result<DecayingSums, ModelError> {
    let fused = optional_weight(weights, "blk.0.time_mix_lerp_fused.weight")?;
    Ok(DecayingSums {
        heads: Heads::read(hyper)?,
        mix_rank: hyper.count("time_mix_extra_dim")?,
        decay_rank: hyper.count("time_decay_extra_dim")?,
        shares: match fused {
            Some(_) => Shares::Fused,
            None => Shares::Single,
        },
    })
}

/// Rows that the time mix makes of each, in the order of the files.
const PARTS: [&str; 5] = ["w", "k", "v", "r", "g"];

/// Settings of its time mix.
#[derive(Clone, Copy, Debug)]
pub(super) struct DecayingSums {
    pub(super) heads: Heads,
    /// Values for each part between the matrices that mix.
    mix_rank: usize,
    /// Values between the matrices of decays.
    decay_rank: usize,
    shares: Shares,
}

/// The form of the shares of the row before in a file.
#[derive(Clone, Copy, Debug)]
enum Shares {
    /// In one tensor.
    Fused,
    /// In one for each part.
    Single,
}

impl DecayingSums {
    pub(super) fn build(self, block: &mut Block<'_>, x: NodeId) -> Result<NodeId, GraphError> {
        let normed = block.norm("attn_norm", x)?;
        let mixed = self.time_mix(block, normed)?;
        let x = block.b.add("ffn_inp", mixed, x)?;
        let normed = block.norm("attn_norm_2", x)?;
        let shape: &[usize] = &[block.sizes.dim];
        let before = block.before("channel_mix", BlockState::ChannelShift, normed)?;
        let shares = [
            ("channel_mix_lerp_k.weight", shape),
            ("channel_mix_lerp_r.weight", shape),
        ];
        let mixed = block.lerp("channel_mix_lerp", &shares, &[normed, before])?;
        let parts = block.parts("channel_mix", mixed, ["k", "r"])?;
        let mixed = block.gated_channel_values(parts)?;
        block.b.add("l_out", mixed, x)
    }

    /// The sums of past keys and values, as `r` reads them.
    fn time_mix(self, block: &mut Block<'_>, x: NodeId) -> Result<NodeId, GraphError> {
        let dim = block.sizes.dim;
        let [w, k, v, r, g] = self.mixed(block, x)?;
        let r = block.linear("time_mix_receptance", r, dim)?;
        let k = block.linear("time_mix_key", k, dim)?;
        let v = block.linear("time_mix_value", v, dim)?;
        let g = block.linear("time_mix_gate", g, dim)?;
        let decay = LowRank {
            name: "time_mix_decay_w",
            bias: Some("time_mix_decay"),
            rank: self.decay_rank,
            inner: InnerActivation::Tanh,
        };
        let decay = block.low_rank(&decay, w)?;
        let heads = [dim / self.heads.dim.max(1), self.heads.dim];
        let shape: &[usize] = &[dim];
        let op = BlockOp {
            op: Wkv6::NAME,
            params: &[("eps", self.heads.norm_eps)],
            weights: &[
                ("time_mix_first.weight", &heads),
                ("time_mix_ln.weight", shape),
                ("time_mix_ln.bias", shape),
            ],
            state: Some(BlockState::Sums),
            width: dim,
        };
        let y = block.custom("time_mix_wkv", &op, &[r, k, v, decay])?;
        let gated = block.b.gate("time_mix_gated", Activation::Silu, g, y)?;
        block.linear("time_mix_output", gated, dim)
    }

    /// A mixture of every row and the one before it for each part, whose shares depend on another
    /// mixture of the two.
    fn mixed(self, block: &mut Block<'_>, x: NodeId) -> Result<[NodeId; 5], GraphError> {
        let (dim, n, rank) = (block.sizes.dim, PARTS.len(), self.mix_rank);
        let before = block.before("time_mix", BlockState::TimeShift, x)?;
        let shares: [(&str, &[usize]); 1] = [("time_mix_lerp_x.weight", &[dim])];
        let for_shares = block.lerp("time_mix_xx", &shares, &[x, before])?;
        let low = block
            .b
            .linear("time_mix_low", for_shares, "time_mix_w1.weight", n * rank)?;
        let low = block.b.soft_cap("time_mix_tanh", low, 1.0)?;
        let n_tokens = block.b.shape_of(x).first().copied().unwrap_or(0);
        let low = block
            .b
            .reshape("time_mix_low_parts", low, &[n_tokens, n, rank])?;
        let added = block
            .b
            .head_linear("time_mix_shares", low, "time_mix_w2.weight", dim)?;
        let added = block
            .b
            .reshape("time_mix_shares_flat", added, &[n_tokens, n * dim])?;
        let operands = [x, before, added];
        let mixed = match self.shares {
            Shares::Fused => {
                let shape: &[usize] = &[n, 1, 1, dim];
                let shares = [("time_mix_lerp_fused.weight", shape)];
                block.lerp("time_mix_lerp", &shares, &operands)?
            }
            Shares::Single => {
                let names = PARTS.map(|part| format!("time_mix_lerp_{part}.weight"));
                let shape: &[usize] = &[dim];
                let shares = names.each_ref().map(|name| (name.as_str(), shape));
                block.lerp("time_mix_lerp", &shares, &operands)?
            }
        };
        block.parts("time_mix", mixed, PARTS)
    }
}
