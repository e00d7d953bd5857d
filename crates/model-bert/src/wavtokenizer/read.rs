//! How a GGUF file makes a [`Decoder`].
//!
//! Invariant: a convolution whose weight has another shape, or whose values are no floats, is an
//! error that names it.

use kv_graph::weights::{WeightError, WeightSource};
use model_core::architecture::ModelError;
use model_core::hyperparameters::{Hyperparameters, optional_weight};

use super::graph::{Decoder, POS_NET, PosNetBlock, RESIDUAL_KERNEL, WIDE_KERNEL};
use crate::read::refuse_causal;

const POS_NET_WIDTH: &str = "posnet.embedding_length";
const POS_NET_BLOCKS: &str = "posnet.block_count";
const CONV_NEXT_WIDTH: &str = "convnext.embedding_length";
const CONV_NEXT_BLOCKS: &str = "convnext.block_count";
const OUTPUT_WIDTH: &str = "embedding_length_out";
const GROUPS: &str = "attention.group_norm_groups";
const GROUP_NORM_EPS: &str = "attention.group_norm_epsilon";

/// More blocks than any model has; a larger count is a broken file.
const MAX_BLOCKS: usize = 1024;

impl Decoder {
    /// Reads the settings.
    pub(super) fn read(
        hyper: &Hyperparameters<'_>,
        weights: &dyn WeightSource,
    ) -> Result<Self, ModelError> {
        refuse_causal(hyper)?;
        let dim = hyper.count(POS_NET_WIDTH)?;
        let n_pos_net = hyper.count(POS_NET_BLOCKS)?;
        if n_pos_net != POS_NET.len() {
            let reason = format!("{n_pos_net} blocks; {} are supported", POS_NET.len());
            return Err(hyper.wrong(POS_NET_BLOCKS, reason));
        }
        let conv_next_dim = hyper.count(CONV_NEXT_WIDTH)?;
        if conv_next_dim != dim {
            let reason = format!("{conv_next_dim}, but {} is {dim}", hyper.key(POS_NET_WIDTH));
            return Err(hyper.wrong(CONV_NEXT_WIDTH, reason));
        }
        let n_conv_next = hyper.count(CONV_NEXT_BLOCKS)?;
        if n_conv_next > MAX_BLOCKS {
            let reason = format!("{n_conv_next} blocks; at most {MAX_BLOCKS} are read");
            return Err(hyper.wrong(CONV_NEXT_BLOCKS, reason));
        }
        let groups = hyper.count(GROUPS)?;
        if !dim.is_multiple_of(groups) {
            let reason = format!("{groups} groups do not divide the width {dim}");
            return Err(hyper.wrong(GROUPS, reason));
        }
        let group_norm_eps = hyper.positive(GROUP_NORM_EPS)?;
        let absent = || hyper.wrong(GROUP_NORM_EPS, "it has to be there".to_owned());
        let features = hyper.count("features_length")?;
        // Files name the width of the result after that of other models' embeddings.
        let output = if hyper.has(OUTPUT_WIDTH) {
            hyper.count(OUTPUT_WIDTH)?
        } else {
            hyper.count("embedding_length")?
        };
        let decoder = Self {
            vocab: hyper.vocab(weights, features)?,
            features,
            dim,
            groups,
            group_norm_eps: group_norm_eps.ok_or_else(absent)? as f32,
            layer_norm_eps: hyper.layer_norm_eps()?,
            n_conv_next,
            hidden: hyper.count("feed_forward_length")?,
            output,
            last_norm: last_norm(weights)?,
        };
        for conv in decoder.convolutions() {
            conv.check(weights)?;
        }
        Ok(decoder)
    }

    /// All convolutions, those of one token in the attention too.
    fn convolutions(&self) -> Vec<Convolution> {
        let dim = self.dim;
        let conv = |name: String, inputs, kernel| Convolution {
            weight: format!("{name}.weight"),
            shape: [dim, inputs, kernel],
        };
        let mut all = vec![conv("conv1d".to_owned(), self.features, WIDE_KERNEL)];
        for (at, block) in POS_NET.iter().enumerate() {
            let (names, kernel): (&[&str], _) = match block {
                PosNetBlock::Residual => (&["conv1", "conv2"], RESIDUAL_KERNEL),
                PosNetBlock::Attention => (&["attn_q", "attn_k", "attn_v", "attn_output"], 1),
                PosNetBlock::Norm => (&[], 1),
            };
            let names = names.iter().map(|name| format!("posnet.{at}.{name}"));
            all.extend(names.map(|name| conv(name, dim, kernel)));
        }
        let depthwise = (0..self.n_conv_next).map(|at| format!("convnext.{at}.dw"));
        all.extend(depthwise.map(|name| conv(name, 1, WIDE_KERNEL)));
        all
    }
}

/// The weight of a convolution.
struct Convolution {
    weight: String,
    /// Outputs, inputs and tokens.
    shape: [usize; 3],
}

impl Convolution {
    /// That it is there, as floats in its shape, which files are read as a matrix with.
    fn check(self, weights: &dyn WeightSource) -> Result<(), ModelError> {
        let Self { weight, shape } = self;
        let info = match weights.describe(&weight) {
            Ok(info) => info,
            Err(WeightError::Missing { name }) => {
                let shape = shape.to_vec();
                return Err(ModelError::MissingTensor { name, shape });
            }
            Err(other) => return Err(ModelError::Weight(other)),
        };
        if info.format.block_len() > 1 {
            let format = info.format;
            return Err(ModelError::TensorFormat {
                name: weight,
                format,
            });
        }
        let [outputs, inputs, kernel] = shape;
        if info.shape == [outputs, inputs * kernel] {
            Ok(())
        } else {
            Err(ModelError::TensorShape {
                name: weight,
                wanted: shape.to_vec(),
                got: match *info.shape {
                    [rows, n] if n.is_multiple_of(kernel) => vec![rows, n / kernel, kernel],
                    _ => info.shape,
                },
            })
        }
    }
}

/// Name of the last block's norm: llama.cpp's converter gives it that of an attention's, because
/// the published weights call both `norm`.
fn last_norm(weights: &dyn WeightSource) -> Result<&'static str, ModelError> {
    let own = optional_weight(
        weights,
        &format!("posnet.{}.norm.weight", POS_NET.len() - 1),
    )?;
    Ok(match own {
        Some(_) => "norm",
        None => "attn_norm",
    })
}
