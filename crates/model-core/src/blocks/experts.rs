//! A mixture of experts in the place of a feed-forward block: a router chooses, for each row, some
//! of many gated blocks, and the weighted sum of their results is returned.
//!
//! Shazeer et al., arXiv 1701.06538; with a shared expert for every row as in Dai et al.,
//! arXiv 2401.06066. Does not know the layers around.

use kv_graph::{
    Activation, Affine, ClampedGate, GraphBuilder, GraphError, NodeId, RouteGate, RouteSpec,
    Routing, TableRow,
};

use super::{FeedForwardBlock, FeedForwardForm};

/// Settings of one mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsBlock {
    /// Their number.
    pub n_experts: usize,
    /// Width between the matrices of one expert.
    pub hidden: usize,
    /// The gate of an expert.
    pub gate: ExpertGate,
    /// Biases of the router and of the experts.
    pub bias: ExpertBias,
    /// The number of a row's experts, and their weights.
    pub route: RouteSpec,
    /// The values by which experts are chosen.
    pub choice: ExpertChoice,
    /// The rows that the weights of the route scale.
    pub scaling: ExpertScaling,
    /// The block that every row goes through, where there is one.
    pub shared: Option<SharedExpert>,
}

/// The gate of an expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ExpertGate {
    /// `activation(gate) * up`.
    Activation(Activation),
    /// The clamped gate of gpt-oss.
    Clamped(ClampedGate),
    /// `activation(gate) * up`, where gate and up are in one matrix, in this order (Gemma 4).
    Fused(Activation),
    /// Not at all: `activation(up)` (Nomic Embed v2).
    Ungated(Activation),
}

/// Biases of a mixture of experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertBias {
    /// None.
    #[default]
    None,
    /// The router and every matrix of every expert.
    All,
    /// One row, which is added to the weighted sum (Nomic Embed v2).
    Sum,
}

/// The values by which experts are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertChoice {
    /// Their scores.
    #[default]
    Scores,
    /// Their scores with a bias that was learnt for each, which takes no part in their weights
    /// (DeepSeek-V3, arXiv 2412.19437).
    Biased,
}

/// The rows that the weights of chosen experts scale.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertScaling {
    /// The results of experts.
    #[default]
    Outputs,
    /// Their inputs (Llama 4).
    Inputs,
}

/// The block of a mixture that every row goes through.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SharedExpert {
    /// Width between its matrices.
    pub hidden: usize,
    /// Applied to its gate, or to what there is where there is none.
    pub activation: Activation,
    /// Its matrices.
    pub form: FeedForwardForm,
    /// The weight of the shared expert.
    pub share: SharedShare,
}

/// The weight of the expert of every row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SharedShare {
    /// All of its result.
    #[default]
    Whole,
    /// Its result times the sigmoid of a projection of the row (Qwen 2 MoE): the route of a mixture
    /// of one expert.
    Routed,
    /// The mean of its result and of the weighted sum of the others (Command A's mixtures).
    Mean,
}

/// The projection whose sigmoid a shared expert is multiplied with, `[1, dim]`.
const SHARED_ROUTER: &str = "ffn_gate_inp_shexp.weight";

/// The row that is added to the weighted sum, `[1, dim]`.
const SUM_BIAS: &str = "ffn_exps_sum.bias";

/// The input of a router, and the factor on the weights of its routes.
pub(super) struct RouterInput<'a> {
    /// Rows, `[rows, dim]`.
    pub(super) x: NodeId,
    /// Weight of `[experts]`, where there is one.
    pub(super) gain: Option<&'a str>,
}

/// A mixture and the route of its rows, while its nodes are added.
struct RoutedMixture<'a> {
    block: &'a ExpertsBlock,
    routes: NodeId,
}

impl ExpertsBlock {
    /// Adds the block: `x [rows, dim]` in, the same shape out. Matrices of all experts are
    /// `[n_experts, out, in]`, biases `[n_experts, out]`.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn build(&self, b: &mut GraphBuilder, x: NodeId) -> Result<NodeId, GraphError> {
        self.build_routed(b, x, RouterInput { x, gain: None })
    }

    /// As [`ExpertsBlock::build`], with other rows for the router than for the experts.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub(super) fn build_routed(
        &self,
        b: &mut GraphBuilder,
        x: NodeId,
        input: RouterInput<'_>,
    ) -> Result<NodeId, GraphError> {
        let router = Affine {
            weight: "ffn_gate_inp.weight",
            bias: (self.bias == ExpertBias::All).then_some("ffn_gate_inp.bias"),
        };
        let logits = b.affine("ffn_moe_logits", input.x, router, self.n_experts)?;
        let routing = Routing {
            bias: (self.choice == ExpertChoice::Biased).then_some("exp_probs_b.bias"),
            gain: input.gain,
            ..Routing::from(self.route)
        };
        let routes = b.route("ffn_moe_route", logits, routing)?;
        let routed = RoutedMixture {
            block: self,
            routes,
        };
        let out = routed.build(b, x)?;
        match self.shared {
            None => Ok(out),
            Some(shared) => {
                let result = shared.build(b, x)?;
                let sum = b.add("ffn_out", result, out)?;
                if shared.share == SharedShare::Mean {
                    b.scale("ffn_mean", sum, 0.5)
                } else {
                    Ok(sum)
                }
            }
        }
    }
}

impl SharedExpert {
    /// The sum for `x [rows, dim]`.
    fn build(self, b: &mut GraphBuilder, x: NodeId) -> Result<NodeId, GraphError> {
        let block = FeedForwardBlock {
            hidden: self.hidden,
            activation: self.activation,
            form: self.form,
        };
        let out = block.build_named(b, x, "_shexp")?;
        match self.share {
            SharedShare::Whole | SharedShare::Mean => Ok(out),
            SharedShare::Routed => {
                let logits = b.linear("ffn_shexp_logits", x, SHARED_ROUTER, 1)?;
                let spec = RouteSpec::plain(1, RouteGate::Sigmoid);
                let routes = b.route("ffn_shexp_route", logits, spec)?;
                let scaled = b.expert_scale("ffn_shexp_weighed", [out, routes])?;
                b.expert_sum("ffn_shexp_sum", scaled)
            }
        }
    }
}

impl RoutedMixture<'_> {
    /// The weighted sum of what the chosen experts compute of `x`.
    fn build(&self, b: &mut GraphBuilder, x: NodeId) -> Result<NodeId, GraphError> {
        let (block, routes) = (self.block, self.routes);
        let dim = b.shape_of(x).last().copied().unwrap_or(0);
        let x = match block.scaling {
            ExpertScaling::Outputs => x,
            ExpertScaling::Inputs => b.expert_scale("ffn_moe_inp", [x, routes])?,
        };
        let gated = self.gated(b, x)?;
        let down = self.matrices(b, "down", gated, dim)?;
        let scaled = match block.scaling {
            ExpertScaling::Outputs => b.expert_scale("ffn_moe_weighed", [down, routes])?,
            ExpertScaling::Inputs => down,
        };
        match block.bias {
            ExpertBias::None | ExpertBias::All => b.expert_sum("ffn_moe_out", scaled),
            ExpertBias::Sum => {
                let sum = b.expert_sum("ffn_moe_sum", scaled)?;
                let bias = TableRow {
                    weight: SUM_BIAS,
                    n_rows: 1,
                    row: 0,
                };
                b.add_row("ffn_moe_out", sum, bias)
            }
        }
    }

    /// The rows that the down matrices of the chosen experts are applied to.
    fn gated(&self, b: &mut GraphBuilder, x: NodeId) -> Result<NodeId, GraphError> {
        let hidden = self.block.hidden;
        let name = "ffn_moe_gate_par";
        let gate = match self.block.gate {
            ExpertGate::Ungated(activation) => {
                let up = self.matrices(b, "up", x, hidden)?;
                return b.activate("ffn_moe_act", activation, up);
            }
            ExpertGate::Fused(activation) => {
                let both = self.matrices(b, "gate_up", x, 2 * hidden)?;
                let gate = b.columns("ffn_moe_gate", both, 0..hidden)?;
                let up = b.columns("ffn_moe_up", both, hidden..2 * hidden)?;
                return b.gate(name, activation, gate, up);
            }
            _ => self.matrices(b, "gate", x, hidden)?,
        };
        let up = self.matrices(b, "up", x, hidden)?;
        match self.block.gate {
            ExpertGate::Clamped(clamped) => b.clamped_gate(name, clamped, [gate, up]),
            ExpertGate::Activation(activation)
            | ExpertGate::Fused(activation)
            | ExpertGate::Ungated(activation) => b.gate(name, activation, gate, up),
        }
    }

    /// One matrix of every expert.
    fn matrices(
        &self,
        b: &mut GraphBuilder,
        what: &str,
        x: NodeId,
        n_out: usize,
    ) -> Result<NodeId, GraphError> {
        let [weight, bias] = ["weight", "bias"].map(|end| format!("ffn_{what}_exps.{end}"));
        let weights = Affine {
            weight: &weight,
            bias: (self.block.bias == ExpertBias::All).then_some(&*bias),
        };
        b.expert_linear(&format!("ffn_moe_{what}"), [x, self.routes], weights, n_out)
    }
}
