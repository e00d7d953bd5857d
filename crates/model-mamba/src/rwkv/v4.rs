//! The mixers of RWKV-4 (Peng et al., arXiv 2305.13048): averages of values, weighed by their keys.
//!
//! No GGUF file of another program has this architecture: those are of RWKV-6 and 7.

use kv_graph::weights::WeightSource;
use kv_graph::{Activation, GraphError, NodeId};
use model_core::architecture::ModelError;
use model_core::hyperparameters::Hyperparameters;

use super::block::{Block, BlockOp, BlockState};
use super::wkv4::Wkv4;
use super::{Rwkv, Sizes, Version};

/// The architecture.
pub(crate) const RWKV4: Rwkv = Rwkv {
    name: "rwkv4",
    read: |hyper, _: &dyn WeightSource| Ok(Version::Four(read(hyper)?)),
    example: || {
        let sizes = Sizes {
            vocab: 50_277,
            dim: 768,
            hidden: 3072,
            n_blocks: 2,
            norm_eps: 1e-5,
            context_length: 1024,
            rescale_every: None,
            output_weight: "output.weight".to_owned(),
        };
        (sizes, Version::Four(Averages { inner: 768 }))
    },
};

fn read(hyper: &Hyperparameters<'_>) -> Result<Averages, ModelError> {
    Ok(Averages {
        inner: hyper.count("time_mix.inner_size")?,
    })
}

/// Settings of its time mix.
#[derive(Clone, Copy, Debug)]
pub(super) struct Averages {
    /// Width of the averaged values.
    inner: usize,
}

impl Averages {
    /// Values of its state.
    pub(super) fn n_sums(self) -> usize {
        3 * self.inner
    }

    pub(super) fn build(self, block: &mut Block<'_>, x: NodeId) -> Result<NodeId, GraphError> {
        let normed = block.norm("attn_norm", x)?;
        let mixed = self.time_mix(block, normed)?;
        let x = block.b.add("ffn_inp", mixed, x)?;
        let normed = block.norm("ffn_norm", x)?;
        let state = BlockState::ChannelShift;
        let parts = shifted(block, "channel_mix", state, normed, ["k", "r"])?;
        let mixed = block.gated_channel_values(parts)?;
        block.b.add("l_out", mixed, x)
    }

    /// The average of past values.
    fn time_mix(self, block: &mut Block<'_>, x: NodeId) -> Result<NodeId, GraphError> {
        let (dim, inner) = (block.sizes.dim, self.inner);
        let state = BlockState::TimeShift;
        let [k, v, r] = shifted(block, "time_mix", state, x, ["k", "v", "r"])?;
        let k = block.linear("time_mix_key", k, inner)?;
        let v = block.linear("time_mix_value", v, inner)?;
        let r = block.linear("time_mix_receptance", r, inner)?;
        let shape: &[usize] = &[inner];
        let op = BlockOp {
            op: Wkv4::NAME,
            params: &[],
            weights: &[
                ("time_mix_decay.weight", shape),
                ("time_mix_first.weight", shape),
            ],
            state: Some(BlockState::Sums),
            width: inner,
        };
        let average = block.custom("time_mix_wkv", &op, &[k, v])?;
        let gated = block
            .b
            .gate("time_mix_gated", Activation::Sigmoid, r, average)?;
        block.linear("time_mix_output", gated, dim)
    }
}

/// `x` interpolated with the row before, once for each of the shares named so: those of `x`, where
/// later versions have those of the row before.
fn shifted<const N: usize>(
    block: &mut Block<'_>,
    mix: &str,
    state: BlockState,
    x: NodeId,
    shares: [&str; N],
) -> Result<[NodeId; N], GraphError> {
    let dim = block.sizes.dim;
    let names = shares.map(|share| format!("{mix}_share_{share}.weight"));
    let shape: &[usize] = &[dim];
    let weights = names.each_ref().map(|name| (name.as_str(), shape));
    let before = block.before(mix, state, x)?;
    let mixed = block.lerp(&format!("{mix}_shift"), &weights, &[before, x])?;
    block.parts(mix, mixed, shares)
}
