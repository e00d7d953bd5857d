//! Zamba2 (arXiv 2411.15242): Mamba-2 in every layer, and before some of them attention and a
//! feed-forward block, whose matrices these layers share in turns, each with adapters of its own.
//!
//! Files tell by `attention.head_count_kv`: a layer without key/value heads is Mamba-2 alone. GGUF
//! has no such architecture: its keys are ours.

use kv_core::LayerIdx;
use kv_graph::Activation;
use kv_graph::rope::{RopeScaling, RopeSpec, RopeStyle};
use kv_graph::weights::WeightSource;
use model_core::architecture::ModelError;
use model_core::blocks::{
    Adapter, AttentionBlock, DecoderLayer, FeedForwardBlock, FeedForwardForm, GatedNorm,
    LayerScale, Mixer, Residual, SharedBlock, Ssm2MixerBlock, SsmMixer, TimeSteps,
};
use model_core::hyperparameters::{HeadSizes, Hyperparameters, optional_weight};

use crate::family::{ExampleSizes, MambaLike, WiredLayers};
use crate::hybrids::example_heads;
use crate::read::{example_mamba2_block, mamba2_mixer};

/// Zamba2.
pub(crate) const ZAMBA2: MambaLike = MambaLike {
    name: "zamba2",
    read,
    example,
};

/// The sizes that shared blocks of one model have in common.
struct SharedBlockSizes {
    dim: usize,
    hidden: usize,
    rank: usize,
    /// The adapters of queries, keys and values; the feed-forward block always has them.
    adapts_attention: AdaptedAttention,
    /// The layers that have a block, in order.
    layers: Vec<usize>,
    /// The number of sets of matrices that take turns.
    n_blocks: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AdaptedAttention {
    Yes,
    No,
}

impl SharedBlockSizes {
    /// The block of the layer that is the `index`-th to have one.
    fn block(&self, index: usize, heads: HeadSizes, rope: Option<RopeSpec>) -> SharedBlock {
        let adapter = Adapter {
            rank: self.rank,
            index,
        };
        let owner = self.layers.get(index % self.n_blocks.max(1));
        let block = AttentionBlock::from(heads);
        SharedBlock {
            attention: AttentionBlock {
                scale: 1.0 / (heads.k_dim as f32 / 2.0).sqrt(),
                rope,
                adapter: (self.adapts_attention == AdaptedAttention::Yes).then_some(adapter),
                out_dim: Some(self.dim),
                ..block
            },
            feed_forward: FeedForwardBlock {
                hidden: self.hidden,
                activation: Activation::GeluErf,
                form: FeedForwardForm::FusedGateAdapted(adapter),
            },
            weights_of: LayerIdx(owner.map_or(0, |&owner| owner as u32)),
        }
    }
}

/// A layer of a mixer, behind a shared block where it has one.
fn layer(shared: Option<SharedBlock>, ssm: Ssm2MixerBlock) -> DecoderLayer {
    let ssm = SsmMixer::Mamba2(ssm);
    DecoderLayer {
        mixer: match shared {
            Some(block) => Mixer::Shared(Box::new(block), ssm),
            None => Mixer::Recurrent(ssm),
        },
        feed_forward: None,
        scale: LayerScale::None,
        residual: Residual::Rows,
    }
}

fn read(
    hyper: &Hyperparameters<'_>,
    weights: &dyn WeightSource,
) -> Result<WiredLayers, ModelError> {
    let (n_layers, dim) = (hyper.n_layers()?, hyper.count("embedding_length")?);
    let heads = hyper.heads_where_any(n_layers, dim)?;
    let with_heads = heads
        .iter()
        .enumerate()
        .filter(|(_, heads)| heads.is_some());
    let layers: Vec<usize> = with_heads.map(|(layer, _)| layer).collect();
    let shared = SharedBlockSizes {
        dim,
        hidden: hyper.count("feed_forward_length")?,
        rank: hyper.count("shared_block.lora_rank")?,
        adapts_attention: match hyper.optional("shared_block.attention_lora")? {
            Some(true) => AdaptedAttention::Yes,
            Some(false) | None => AdaptedAttention::No,
        },
        n_blocks: hyper.count("shared_block.count")?,
        layers,
    };
    let rotates = hyper.optional("rope.scaling.finetuned")?.unwrap_or(true);
    let mut index = 0;
    let mut all = Vec::with_capacity(n_layers);
    for (at, heads) in heads.into_iter().enumerate() {
        let ssm = mixer(hyper, weights, at)?;
        let block = match heads {
            None => None,
            Some(heads) => {
                let rope = if rotates {
                    Some(hyper.rope(RopeStyle::Neox, heads.k_dim, weights)?)
                } else {
                    None
                };
                index += 1;
                Some(shared.block(index - 1, heads, rope))
            }
        };
        all.push(layer(block, ssm));
    }
    Ok(all.into())
}

/// The `eps` of the norms behind gates, whatever that of other norms is.
const GATED_NORM_EPS: f32 = 1e-5;

fn mixer(
    hyper: &Hyperparameters<'_>,
    weights: &dyn WeightSource,
    layer: usize,
) -> Result<Ssm2MixerBlock, ModelError> {
    let floor = optional_weight(weights, &format!("blk.{layer}.ssm_dt_floor.weight"))?;
    Ok(Ssm2MixerBlock {
        gated_norm: GatedNorm::PerGroup {
            eps: GATED_NORM_EPS,
        },
        time_steps: match floor {
            Some(_) => TimeSteps::WithFloor,
            None => TimeSteps::Free,
        },
        ..mamba2_mixer(hyper, weights, layer)?
    })
}

/// Three layers of the smallest published sizes.
fn example() -> (ExampleSizes, WiredLayers) {
    let dim = 2048;
    let heads = HeadSizes {
        kv_heads: 32,
        ..example_heads(32, 128)
    };
    let rope = RopeSpec {
        style: RopeStyle::Neox,
        n_rot: 128,
        base: 1e4,
        scaling: RopeScaling::None,
        factors: None,
    };
    let shared = SharedBlockSizes {
        dim,
        hidden: 8192,
        rank: 128,
        adapts_attention: AdaptedAttention::Yes,
        layers: vec![1, 2],
        n_blocks: 1,
    };
    let ssm = Ssm2MixerBlock {
        time_steps: TimeSteps::WithFloor,
        ..example_mamba2_block(4096, 64)
    };
    let layers = vec![
        layer(None, ssm),
        layer(Some(shared.block(0, heads, Some(rope.clone()))), ssm),
        layer(Some(shared.block(1, heads, Some(rope))), ssm),
    ];
    let sizes = ExampleSizes {
        vocab: 32_000,
        dim,
        context_length: 4096,
    };
    (sizes, layers.into())
}
