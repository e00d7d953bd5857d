//! The computation of WavTokenizer's decoder: a convolution over tokens, the blocks of the position
//! net, ConvNeXt blocks, and the output matrix.
//!
//! Invariant: everything before the last norm depends on all tokens of a sequence, so rows that are
//! not wanted are dropped there and nowhere else. Knows no file.

use kv_core::Window;
use kv_graph::{
    Activation, Affine, AttendSpec, CustomScope, CustomSizes, CustomSpec, Graph, GraphBuilder,
    GraphError, GraphShape, Input, NodeId, RowGain,
};
use model_core::blocks::{OUTPUT, TOKEN_EMBEDDING};

use super::ops::{DepthwiseConv, EPS, GROUPS, GroupNorm, KERNEL, Neighbors};

/// Tokens that the first convolution and those of ConvNeXt blocks read.
pub(super) const WIDE_KERNEL: usize = 7;
/// Tokens that convolutions of residual blocks read.
pub(super) const RESIDUAL_KERNEL: usize = 3;

/// A block of the position net.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PosNetBlock {
    /// Two norms, each with a convolution, added to the input.
    Residual,
    /// Attention over all tokens with one head, added to the input.
    Attention,
    /// A norm alone.
    Norm,
}

/// The position net.
pub(super) const POS_NET: [PosNetBlock; 6] = [
    PosNetBlock::Residual,
    PosNetBlock::Residual,
    PosNetBlock::Attention,
    PosNetBlock::Residual,
    PosNetBlock::Residual,
    PosNetBlock::Norm,
];

/// Settings of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Decoder {
    /// Codes.
    pub(super) vocab: usize,
    /// Width of a code's row.
    pub(super) features: usize,
    /// Width of all blocks.
    pub(super) dim: usize,
    /// Groups of group norms, which divide the width.
    pub(super) groups: usize,
    pub(super) group_norm_eps: f32,
    pub(super) layer_norm_eps: f32,
    /// ConvNeXt blocks.
    pub(super) n_conv_next: usize,
    /// Width inside a ConvNeXt block.
    pub(super) hidden: usize,
    /// Width of the result: magnitudes, then phases.
    pub(super) output: usize,
    /// The name in the file of the norm that is the last block of the position net.
    pub(super) last_norm: &'static str,
}

impl Decoder {
    /// The computation for a ubatch of `shape`, which gives `[outputs, output]`.
    pub(super) fn graph(&self, shape: GraphShape) -> Result<Graph, GraphError> {
        let mut b = GraphBuilder::new(shape);
        let tokens = b.input(Input::Tokens)?;
        let codes = [self.vocab, self.features];
        let x = b.embed("inp_embd", tokens, TOKEN_EMBEDDING, codes)?;
        let mut x = self.conv(&mut b, "conv1d", x, WIDE_KERNEL)?;
        for (at, block) in POS_NET.iter().enumerate() {
            let name = format!("posnet.{at}");
            x = match block {
                PosNetBlock::Residual => self.residual(&mut b, &name, x)?,
                PosNetBlock::Attention => self.attention(&mut b, &name, x)?,
                PosNetBlock::Norm => {
                    self.group_norm(&mut b, &format!("{name}.{}", self.last_norm), x)?
                }
            };
        }
        x = self.layer_norm(&mut b, "token_embd_norm", x)?;
        for at in 0..self.n_conv_next {
            x = self.conv_next(&mut b, &format!("convnext.{at}"), x)?;
        }
        if shape.n_outputs < shape.n_tokens {
            let wanted = b.input(Input::OutputRows)?;
            x = b.take_rows("wanted", x, wanted)?;
        }
        x = self.layer_norm(&mut b, "output_norm", x)?;
        let output = Affine::new(OUTPUT).bias("output.bias");
        let x = b.affine("result_output", x, output, self.output)?;
        b.finish(&[x])
    }

    /// A custom operation on whole sequences of `x`, with these weights.
    fn custom(
        &self,
        b: &mut GraphBuilder,
        (name, op, params): (&str, &str, &[(&str, f32)]),
        x: NodeId,
        weights: &[(&str, &[usize])],
        width: usize,
    ) -> Result<NodeId, GraphError> {
        let window = Window::Full;
        let sequences = b.input(Input::BatchVisibility { window })?;
        let params = params.iter().map(|&(key, value)| (key.to_owned(), value));
        let spec = CustomSpec {
            params: params.collect(),
            weights: weights.iter().map(|(name, _)| (*name).to_owned()).collect(),
            scope: CustomScope::Sequence,
            ..CustomSpec::new(op)
        };
        let shapes: Vec<&[usize]> = weights.iter().map(|(_, shape)| *shape).collect();
        let sizes = CustomSizes {
            weights: &shapes,
            width,
        };
        b.custom(name, &spec, &[x, sequences], sizes)
    }

    /// A convolution over the `kernel` tokens around each, to the width of all blocks.
    fn conv(
        &self,
        b: &mut GraphBuilder,
        name: &str,
        x: NodeId,
        kernel: usize,
    ) -> Result<NodeId, GraphError> {
        let width = b.shape_of(x).last().copied().unwrap_or(0) * kernel;
        let params = [(KERNEL, kernel as f32)];
        let of = (&*format!("{name}.inp"), Neighbors::NAME, &params[..]);
        let x = self.custom(b, of, x, &[], width)?;
        self.linear(b, name, x, self.dim)
    }

    /// A matrix and a bias of this name.
    fn linear(
        &self,
        b: &mut GraphBuilder,
        name: &str,
        x: NodeId,
        width: usize,
    ) -> Result<NodeId, GraphError> {
        let [weight, bias] = weight_and_bias(name);
        b.affine(name, x, Affine::new(&weight).bias(&bias), width)
    }

    fn group_norm(
        &self,
        b: &mut GraphBuilder,
        name: &str,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let [gain, bias] = weight_and_bias(name);
        let weights: [(&str, &[usize]); 2] = [(&gain, &[self.dim]), (&bias, &[self.dim])];
        let params = [(GROUPS, self.groups as f32), (EPS, self.group_norm_eps)];
        let of = (name, GroupNorm::NAME, &params[..]);
        self.custom(b, of, x, &weights, self.dim)
    }

    fn layer_norm(
        &self,
        b: &mut GraphBuilder,
        name: &str,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let [gain, bias] = weight_and_bias(name);
        b.layer_norm(name, x, Affine::new(&gain).bias(&bias), self.layer_norm_eps)
    }

    fn residual(&self, b: &mut GraphBuilder, name: &str, x: NodeId) -> Result<NodeId, GraphError> {
        let mut y = x;
        for half in 1..=2 {
            y = self.group_norm(b, &format!("{name}.norm{half}"), y)?;
            y = b.activate(&format!("{name}.silu{half}"), Activation::Silu, y)?;
            y = self.conv(b, &format!("{name}.conv{half}"), y, RESIDUAL_KERNEL)?;
        }
        b.add(&format!("{name}.out"), y, x)
    }

    fn attention(&self, b: &mut GraphBuilder, name: &str, x: NodeId) -> Result<NodeId, GraphError> {
        let (dim, n) = (self.dim, b.shape().n_tokens);
        let normed = self.group_norm(b, &format!("{name}.attn_norm"), x)?;
        let mut head = |part: &str| {
            let name = format!("{name}.attn_{part}");
            let flat = self.linear(b, &name, normed, dim)?;
            b.reshape(&format!("{name}.head"), flat, &[n, 1, dim])
        };
        let qkv = [head("q")?, head("k")?, head("v")?];
        let spec = AttendSpec {
            n_heads: 1,
            kv_heads: 1,
            k_dim: dim,
            v_dim: dim,
            scale: 1.0 / (dim as f32).sqrt(),
            soft_cap: None,
            alibi: None,
        };
        let y = b.attend_batch(&format!("{name}.kqv"), spec, qkv, Window::Full)?;
        let y = self.linear(b, &format!("{name}.attn_output"), y, dim)?;
        b.add(&format!("{name}.out"), y, x)
    }

    fn conv_next(&self, b: &mut GraphBuilder, name: &str, x: NodeId) -> Result<NodeId, GraphError> {
        let depthwise = format!("{name}.dw");
        let [kernels, bias] = weight_and_bias(&depthwise);
        let weights: [(&str, &[usize]); 2] =
            [(&kernels, &[self.dim, WIDE_KERNEL]), (&bias, &[self.dim])];
        let params = [(KERNEL, WIDE_KERNEL as f32)];
        let of = (&*depthwise, DepthwiseConv::NAME, &params[..]);
        let y = self.custom(b, of, x, &weights, self.dim)?;
        let y = self.layer_norm(b, &format!("{name}.norm"), y)?;
        let y = self.linear(b, &format!("{name}.pw1"), y, self.hidden)?;
        let y = b.activate(&format!("{name}.gelu"), Activation::GeluErf, y)?;
        let y = self.linear(b, &format!("{name}.pw2"), y, self.dim)?;
        let gamma = format!("{name}.gamma.weight");
        let y = b.gain(&format!("{name}.gamma"), y, RowGain::PerValue(&gamma))?;
        b.add(&format!("{name}.out"), y, x)
    }
}

/// The tensors of a matrix, norm or convolution of this name.
fn weight_and_bias(name: &str) -> [String; 2] {
    ["weight", "bias"].map(|tensor| format!("{name}.{tensor}"))
}
