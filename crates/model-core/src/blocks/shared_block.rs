//! [`SharedBlock`]: attention and a feed-forward block whose matrices several layers share, before
//! the mixer of a layer (Zamba2, arXiv 2411.15242). Does not know the layers around.

use kv_core::LayerIdx;
use kv_graph::{GraphBuilder, GraphError, NodeId};

use super::{AttentionBlock, FeedForwardBlock, LayerContext, Norm};

/// Settings of one layer's shared block. It reads the rows next to those that entered the first
/// layer; nothing inside of it adds to a residual.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedBlock {
    /// Its attention, over rows twice as wide as those between layers.
    pub attention: AttentionBlock,
    /// Its feed-forward block.
    pub feed_forward: FeedForwardBlock,
    /// The layer that the matrices are named after.
    pub weights_of: LayerIdx,
}

impl SharedBlock {
    /// Adds the block: the rows `x` before the layer and the rows `first` before the first layer,
    /// `[tokens, dim]` each, in; `x` and what the block adds to it out, the same shape.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn build(
        &self,
        b: &mut GraphBuilder,
        at: LayerContext,
        norm: Norm,
        [x, first]: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        let dim = b.shape_of(x).last().copied().unwrap_or(0);
        let joined = b.concat("shared_in", x, first)?;
        let fed = self.shared(b, at, norm, joined)?;
        let out = b.linear("shared_out", fed, "shared_out.weight", dim)?;
        b.add("shared_added", out, x)
    }

    /// The result of the shared matrices, for all tokens: the mixer needs them.
    fn shared(
        &self,
        b: &mut GraphBuilder,
        at: LayerContext,
        norm: Norm,
        joined: NodeId,
    ) -> Result<NodeId, GraphError> {
        let b = &mut b.scope_with_weights_of(at.layer, self.weights_of);
        let at = LayerContext {
            output_rows: None,
            ..at
        };
        let normed = norm.build(b, "shared_norm", joined, "shared_norm")?;
        let attended = self.attention.build(b, at, normed)?;
        let normed = norm.build(b, "ffn_norm", attended, "ffn_norm")?;
        self.feed_forward.build(b, normed)
    }
}
