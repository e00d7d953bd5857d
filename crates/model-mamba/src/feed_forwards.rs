//! What follows the mixer of each layer: dense blocks and mixtures of experts.
//!
//! Invariant: a layer is a mixture where it has a router, or behind as many dense ones as the file
//! says. Knows no architecture by name.

use kv_graph::weights::WeightSource;
use kv_graph::{Activation, RouteGate, RouteSpec, RouteSum};
use model_core::architecture::ModelError;
use model_core::blocks::{
    ExpertBias, ExpertChoice, ExpertGate, ExpertScaling, ExpertsBlock, FeedForward,
    FeedForwardBlock, FeedForwardForm, SharedExpert, SharedShare,
};
use model_core::hyperparameters::{Hyperparameters, optional_weight};

const ACTIVATION: Activation = Activation::Silu;

/// The way the experts of an architecture are chosen and weighed, where the file does not specify
/// it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Routing {
    /// Makes weights of a router's logits.
    pub(crate) gate: RouteGate,
    /// The sum of the weights of chosen experts.
    pub(crate) sum: RouteSum,
    /// The values by which experts are chosen.
    pub(crate) choice: ExpertChoice,
}

impl Routing {
    /// A softmax over all experts.
    pub(crate) const SOFTMAX: Self = Self {
        gate: RouteGate::Softmax,
        sum: RouteSum::One,
        choice: ExpertChoice::Scores,
    };

    /// Sigmoids, with biases on the choice.
    pub(crate) const BIASED_SIGMOID: Self = Self {
        gate: RouteGate::Sigmoid,
        sum: RouteSum::One,
        choice: ExpertChoice::Biased,
    };
}

/// A gated block of this width.
pub(crate) fn dense(hidden: usize) -> FeedForward {
    FeedForward::Dense(FeedForwardBlock {
        hidden,
        activation: ACTIVATION,
        form: FeedForwardForm::Gated,
    })
}

/// The block after the mixer of each layer: where the layer has a router, a mixture of experts.
pub(crate) fn feed_forwards(
    hyper: &Hyperparameters<'_>,
    weights: &dyn WeightSource,
    routing: Routing,
) -> Result<Vec<FeedForward>, ModelError> {
    let n_dense = hyper.optional::<u32>("leading_dense_block_count")?;
    let layer = |layer: usize| {
        let tensor = |what: &str| optional_weight(weights, &format!("blk.{layer}.{what}.weight"));
        let is_dense = match n_dense {
            Some(n_dense) => layer < n_dense as usize,
            None => tensor("ffn_gate_inp")?.is_none(),
        };
        if is_dense {
            return hyper.count("feed_forward_length").map(dense);
        }
        let shared = tensor("ffn_up_shexp")?.and_then(|up| up.shape.first().copied());
        let share = match tensor("ffn_gate_inp_shexp")? {
            Some(_) => SharedShare::Routed,
            None => SharedShare::Whole,
        };
        Ok(FeedForward::Experts(ExpertsBlock {
            shared: shared.map(|hidden| SharedExpert {
                hidden,
                activation: ACTIVATION,
                form: FeedForwardForm::Gated,
                share,
            }),
            ..experts(hyper, routing)?
        }))
    };
    (0..hyper.n_layers()?).map(layer).collect()
}

/// The mixture that the file describes, without a shared expert.
pub(crate) fn experts(
    hyper: &Hyperparameters<'_>,
    routing: Routing,
) -> Result<ExpertsBlock, ModelError> {
    if routing.choice != ExpertChoice::Biased {
        hyper.refuse_groups()?;
    }
    let gate = route_gate(hyper, routing)?;
    let hidden = match hyper.optional::<u32>("expert_feed_forward_length")? {
        None => hyper.count("feed_forward_length")?,
        Some(_) => hyper.count("expert_feed_forward_length")?,
    };
    let scale = match hyper.optional::<f32>("expert_weights_scale")? {
        None | Some(0.0) => 1.0,
        Some(_) => hyper
            .positive("expert_weights_scale")?
            .map_or(1.0, |scale| scale as f32),
    };
    Ok(ExpertsBlock {
        n_experts: hyper.count("expert_count")?,
        hidden,
        gate: ExpertGate::Activation(ACTIVATION),
        bias: ExpertBias::None,
        route: RouteSpec {
            sum: match hyper.optional::<bool>("expert_weights_norm")? {
                None => routing.sum,
                Some(true) => RouteSum::One,
                Some(false) => RouteSum::Free,
            },
            scale,
            groups: hyper.route_groups(gate)?,
            ..RouteSpec::plain(n_used(hyper)?, gate)
        },
        choice: routing.choice,
        scaling: ExpertScaling::Outputs,
        shared: None,
    })
}

/// The function from a router's logits to weights.
fn route_gate(hyper: &Hyperparameters<'_>, routing: Routing) -> Result<RouteGate, ModelError> {
    let key = "expert_gating_func";
    match hyper.optional::<u32>(key)? {
        None | Some(0) => Ok(routing.gate),
        Some(1) => Ok(RouteGate::Softmax),
        Some(2) => Ok(RouteGate::Sigmoid),
        Some(other) => {
            let reason = format!("{other} is not supported; known are 1 (softmax) and 2 (sigmoid)");
            Err(hyper.wrong(key, reason))
        }
    }
}

/// Experts that a row goes through.
fn n_used(hyper: &Hyperparameters<'_>) -> Result<usize, ModelError> {
    let (n_experts, key) = (hyper.count("expert_count")?, "expert_used_count");
    match hyper.count(key)? {
        n if n > n_experts => {
            Err(hyper.wrong(key, format!("{n} of {n_experts} experts are not possible")))
        }
        n => Ok(n),
    }
}
