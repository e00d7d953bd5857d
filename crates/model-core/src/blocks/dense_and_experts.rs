//! A dense block and a mixture of experts next to each other, each with norms of its own (Gemma 4).
//!
//! Does not know the layers around.

use kv_graph::{GraphBuilder, GraphError, NodeId};

use super::experts::RouterInput;
use super::{ExpertsBlock, FeedForwardBlock, Norm};

/// Gain of the norm of what the router reads, `[dim]`.
const ROUTER_GAIN: &str = "ffn_gate_inp.scale";

/// Factors on the weights of experts, `[experts]`.
const EXPERT_GAIN: &str = "ffn_down_exps.scale";

/// Settings of both.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DenseAndExperts {
    /// The block that every row goes through.
    pub dense: FeedForwardBlock,
    /// The mixture.
    pub experts: ExpertsBlock,
    /// The norms after both, before the mixture and before its router.
    pub norm: Norm,
}

impl DenseAndExperts {
    /// Adds both: `normed [rows, dim]`, for the dense block, and the rows `x` before that norm in,
    /// the same shape out.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn build(
        &self,
        b: &mut GraphBuilder,
        normed: NodeId,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let dim = b.shape_of(x).last().copied().unwrap_or(0);
        let dense = self.dense.build(b, normed)?;
        let dense = self.norm.build(b, "ffn_mlp", dense, "post_ffw_norm_1")?;
        let of_experts = self.norm.build(b, "ffn_norm_2", x, "pre_ffw_norm_2")?;
        let name = "ffn_moe_router_norm";
        let of_router = self.norm.build_with(b, name, x, ROUTER_GAIN)?;
        let factor = 1.0 / (dim as f32).sqrt();
        let router = RouterInput {
            x: b.scale("ffn_moe_router_inp", of_router, factor)?,
            gain: Some(EXPERT_GAIN),
        };
        let experts = self.experts.build_routed(b, of_experts, router)?;
        let experts = self.norm.build(b, "ffn_moe", experts, "post_ffw_norm_2")?;
        b.add("ffn_moe_combined", dense, experts)
    }
}
