//! The mixer of a layer with a short convolution: two gates around a causal convolution over a few
//! tokens (LFM2, arXiv 2511.23404). Does not know the layers around.

use kv_core::layers::RecurrentMemory;
use kv_graph::{Affine, ConvSpec, GraphBuilder, GraphError, Input, NodeId};

use super::LayerContext;

/// Settings of one mixer, which is as wide as the rows between layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShortConvBlock {
    /// Channels of the convolution.
    pub channels: usize,
    /// Width of the convolution.
    pub width: usize,
    /// Biases.
    pub bias: ShortConvBias,
}

/// The biases of a short convolution and of the projections around it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ShortConvBias {
    /// None.
    #[default]
    None,
    /// One for each of the three.
    All,
}

impl ShortConvBias {
    /// This name, where there are biases.
    fn named(self, name: &str) -> Option<&str> {
        match self {
            Self::None => None,
            Self::All => Some(name),
        }
    }
}

impl ShortConvBlock {
    /// The memory of the layer.
    pub fn memory(&self) -> RecurrentMemory {
        RecurrentMemory {
            conv_row: self.width.saturating_sub(1) * self.channels,
            state_row: 0,
        }
    }

    /// Adds the block: `x [tokens, dim]` in, `[rows, dim]` out, where `rows` are the layer's output
    /// rows, or else all.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn build(
        &self,
        b: &mut GraphBuilder,
        at: LayerContext,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let n = self.channels;
        let dim = b.shape_of(x).last().copied().unwrap_or(0);
        let states = b.input(Input::States)?;
        let weights = Affine {
            weight: "shortconv.in_proj.weight",
            bias: self.bias.named("shortconv.in_proj.bias"),
        };
        let all = b.affine("conv_in", x, weights, 3 * n)?;
        let into = b.columns("conv_B", all, 0..n)?;
        let out_of = b.columns("conv_C", all, n..2 * n)?;
        let x = b.columns("conv_x", all, 2 * n..3 * n)?;
        let x = b.mul("conv_Bx", into, x)?;
        let conv = ConvSpec {
            width: self.width,
            weight: "shortconv.conv.weight".to_owned(),
            further: Vec::new(),
            bias: self.bias.named("shortconv.conv.bias").map(str::to_owned),
        };
        let y = b.conv("conv", at.layer, &conv, [x, states])?;
        let y = at.take_rows(b, "conv_rows", y)?;
        let out_of = at.take_rows(b, "conv_C_rows", out_of)?;
        let y = b.mul("conv_Cy", out_of, y)?;
        let weights = Affine {
            weight: "shortconv.out_proj.weight",
            bias: self.bias.named("shortconv.out_proj.bias"),
        };
        b.affine("conv_out", y, weights, dim)
    }
}
