//! A mixture of experts in the place of a feed-forward block: a router chooses, for each row, some
//! of many gated blocks, whose results are weighed and added.
//!
//! Shazeer et al., arXiv 1701.06538; with a block for every row beside it as in Dai et al.,
//! arXiv 2401.06066. Knows nothing of the layers around.

use kv_core::LayerIdx;
use kv_core::graph::{Activation, GraphBuilder, GraphError, NodeId, RouteSpec};

use super::FeedForwardBlock;

/// Settings of one mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertsBlock {
    /// How many there are.
    pub n_experts: usize,
    /// Width between the matrices of one expert.
    pub hidden: usize,
    /// Applied to the gate.
    pub activation: Activation,
    /// How many a row goes through, and their weights.
    pub route: RouteSpec,
    /// What the weights are applied to.
    pub weighed: Weighed,
    /// Width of the block that every row goes through, where there is one.
    pub shared_hidden: Option<usize>,
}

/// What the weights of chosen experts are applied to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Weighed {
    /// What comes out of an expert.
    #[default]
    Outputs,
    /// What goes into it (Llama 4).
    Inputs,
}

impl ExpertsBlock {
    /// Adds the block: `x [rows, dim]` in, the same shape out. Matrices of all experts are
    /// `[n_experts, out, in]`.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn build(
        &self,
        b: &mut GraphBuilder,
        layer: LayerIdx,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let dim = b.shape_of(x).last().copied().unwrap_or(0);
        let name = |what: &str| format!("ffn_moe_{what}-{layer}");
        let weight = |what: &str| format!("blk.{layer}.ffn_{what}.weight");
        let logits = b.linear(&name("logits"), x, &weight("gate_inp"), self.n_experts)?;
        let routes = b.route(&name("route"), logits, self.route)?;
        let input = match self.weighed {
            Weighed::Outputs => x,
            Weighed::Inputs => b.expert_weigh(&name("inp"), [x, routes])?,
        };
        let matrices = |b: &mut GraphBuilder, what: &str, x: NodeId, n_out: usize| {
            let weight = weight(&format!("{what}_exps"));
            b.expert_linear(&name(what), [x, routes], (&weight, None), n_out)
        };
        let gate = matrices(b, "gate", input, self.hidden)?;
        let up = matrices(b, "up", input, self.hidden)?;
        let gated = b.gate(&name("gate_par"), self.activation, gate, up)?;
        let down = matrices(b, "down", gated, dim)?;
        let weighed = match self.weighed {
            Weighed::Outputs => b.expert_weigh(&name("weighed"), [down, routes])?,
            Weighed::Inputs => down,
        };
        let out = b.expert_sum(&name("out"), weighed)?;
        let Some(hidden) = self.shared_hidden else {
            return Ok(out);
        };
        let shared = FeedForwardBlock {
            hidden,
            activation: self.activation,
        };
        let shared = shared.build_named(b, layer, x, "_shexp")?;
        b.add(&format!("ffn_out-{layer}"), shared, out)
    }
}
