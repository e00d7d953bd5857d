//! A mixture of experts in the place of a feed-forward block: a router chooses, for each row, some
//! of many gated blocks, whose results are weighed and added.
//!
//! Shazeer et al., arXiv 1701.06538; with a block for every row beside it as in Dai et al.,
//! arXiv 2401.06066. Knows nothing of the layers around.

use kv_core::LayerIdx;
use kv_core::graph::{Activation, GraphBuilder, GraphError, NodeId, RouteSpec};

use super::{FeedForwardBlock, FeedForwardForm};

/// Settings of one mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsBlock {
    /// How many there are.
    pub n_experts: usize,
    /// Width between the matrices of one expert.
    pub hidden: usize,
    /// What an expert does with its gate.
    pub gate: ExpertGate,
    /// Biases of the router and of the experts.
    pub bias: ExpertBias,
    /// How many a row goes through, and their weights.
    pub route: RouteSpec,
    /// What the weights are applied to.
    pub weighed: Weighed,
    /// The block that every row goes through, where there is one.
    pub shared: Option<SharedExpert>,
}

/// What an expert does with its gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ExpertGate {
    /// `activation(gate) * up`.
    Activation(Activation),
    /// The clamped gate of gpt-oss.
    Clamped {
        /// How steep the curve is.
        slope: f32,
        /// The bound.
        limit: f32,
    },
}

/// Biases of a mixture of experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertBias {
    /// None.
    #[default]
    None,
    /// The router and every matrix of every expert.
    All,
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

/// The block of a mixture that every row goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedExpert {
    /// Width between its matrices.
    pub hidden: usize,
    /// Applied to its gate.
    pub activation: Activation,
}

/// The mixture of one layer under construction.
struct At<'a> {
    block: &'a ExpertsBlock,
    layer: LayerIdx,
    routes: NodeId,
}

impl ExpertsBlock {
    /// Adds the block: `x [rows, dim]` in, the same shape out. Matrices of all experts are
    /// `[n_experts, out, in]`, biases `[n_experts, out]`.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn build(
        &self,
        b: &mut GraphBuilder,
        layer: LayerIdx,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let name = |what: &str| format!("ffn_moe_{what}-{layer}");
        let router = [".weight", ".bias"].map(|end| format!("blk.{layer}.ffn_gate_inp{end}"));
        let bias = (self.bias == ExpertBias::All).then_some(&*router[1]);
        let logits = b.affine(&name("logits"), x, (&router[0], bias), self.n_experts)?;
        let routes = b.route(&name("route"), logits, self.route)?;
        let at = At {
            block: self,
            layer,
            routes,
        };
        let out = at.chosen(b, x)?;
        let Some(SharedExpert { hidden, activation }) = self.shared else {
            return Ok(out);
        };
        let shared = FeedForwardBlock {
            hidden,
            activation,
            form: FeedForwardForm::Gated,
        };
        let shared = shared.build_named(b, layer, x, "_shexp")?;
        b.add(&format!("ffn_out-{layer}"), shared, out)
    }
}

impl At<'_> {
    fn name(&self, what: &str) -> String {
        format!("ffn_moe_{what}-{}", self.layer)
    }

    /// The weighed sum of what the chosen experts make of `x`.
    fn chosen(&self, b: &mut GraphBuilder, x: NodeId) -> Result<NodeId, GraphError> {
        let (block, routes) = (self.block, self.routes);
        let dim = b.shape_of(x).last().copied().unwrap_or(0);
        let x = match block.weighed {
            Weighed::Outputs => x,
            Weighed::Inputs => b.expert_weigh(&self.name("inp"), [x, routes])?,
        };
        let gate = self.matrices(b, "gate", x, block.hidden)?;
        let up = self.matrices(b, "up", x, block.hidden)?;
        let name = self.name("gate_par");
        let gated = match block.gate {
            ExpertGate::Activation(activation) => b.gate(&name, activation, gate, up)?,
            ExpertGate::Clamped { slope, limit } => {
                b.clamped_gate(&name, (slope, limit), [gate, up])?
            }
        };
        let down = self.matrices(b, "down", gated, dim)?;
        let weighed = match block.weighed {
            Weighed::Outputs => b.expert_weigh(&self.name("weighed"), [down, routes])?,
            Weighed::Inputs => down,
        };
        b.expert_sum(&self.name("out"), weighed)
    }

    /// One matrix of every expert.
    fn matrices(
        &self,
        b: &mut GraphBuilder,
        what: &str,
        x: NodeId,
        n_out: usize,
    ) -> Result<NodeId, GraphError> {
        let [weight, bias] =
            [".weight", ".bias"].map(|end| format!("blk.{}.ffn_{what}_exps{end}", self.layer));
        let bias = (self.block.bias == ExpertBias::All).then_some(&*bias);
        b.expert_linear(&self.name(what), [x, self.routes], (&weight, bias), n_out)
    }
}
