//! The feed-forward blocks of a model, layer by layer: dense ones and mixtures of experts.
//!
//! Invariant: a layer is a mixture where the file has experts and the layer a router. Knows nothing
//! of attention.

use kv_graph::weights::WeightSource;
use kv_graph::{RouteGate, RouteGroups, RouteSpec, RouteSum};
use model_core::architecture::ModelError;
use model_core::blocks::{
    DenseAndExperts, ExpertChoice, ExpertGate, ExpertsBlock, FeedForward, FeedForwardBlock,
    FeedForwardForm, SharedExpert, SharedShare, Xielu,
};
use model_core::hyperparameters::{Hyperparameters, optional_weight};

use crate::member::{LlamaLike, Mixture, MixtureRouting, Mixtures, SubNorms};

impl LlamaLike {
    /// The block of every layer after its attention.
    pub(crate) fn feed_forwards(
        &self,
        hyper: &Hyperparameters<'_>,
        n_layers: usize,
        weights: &dyn WeightSource,
    ) -> Result<Vec<FeedForward>, ModelError> {
        let dense = |layer: usize| -> Result<FeedForwardBlock, ModelError> {
            let bias = optional_weight(weights, "blk.0.ffn_up.bias")?;
            let block = FeedForwardBlock {
                hidden: hyper.count_of_layer("feed_forward_length", layer, n_layers)?,
                activation: hyper.activation(self.activation)?,
                form: match (self.feed_forward, bias) {
                    (FeedForwardForm::Plain, Some(_)) => FeedForwardForm::PlainWithBias,
                    (FeedForwardForm::Gated, Some(_)) => FeedForwardForm::GatedWithBias,
                    (FeedForwardForm::PlainXielu(_), _) => {
                        FeedForwardForm::PlainXielu(xielu(hyper, layer, n_layers)?)
                    }
                    (form, _) => form,
                },
            };
            Ok(match self.sub_norms {
                SubNorms::None => block,
                SubNorms::BeforeOutputs => sub_normed(block, hyper.norm_eps()?),
            })
        };
        let share = match self.mixtures {
            Mixtures::Always(mixture) | Mixtures::Allowed(mixture) => mixture.shared,
            Mixtures::WithDense(_) | Mixtures::None => SharedShare::Whole,
        };
        let Some(experts) = self.experts(hyper, weights)? else {
            let blocks = (0..n_layers).map(|layer| dense(layer).map(FeedForward::Dense));
            return blocks.collect();
        };
        let n_dense = hyper.optional::<u32>("leading_dense_block_count")?;
        let layer = |layer: usize| {
            let tensor =
                |what: &str| optional_weight(weights, &format!("blk.{layer}.{what}.weight"));
            if let Mixtures::WithDense(_) = self.mixtures {
                return Ok(FeedForward::Both(DenseAndExperts {
                    dense: dense(layer)?,
                    experts: ExpertsBlock {
                        gate: match (experts.gate, tensor("ffn_gate_up_exps")?) {
                            (ExpertGate::Activation(activation), Some(_)) => {
                                ExpertGate::Fused(activation)
                            }
                            (gate, _) => gate,
                        },
                        ..experts
                    },
                    norm: self.norm(hyper.norm_eps()?),
                }));
            }
            // A layer with neither is a mixture whose router is missed by its name.
            let is_dense = match n_dense {
                Some(n_dense) => layer < n_dense as usize,
                None => tensor("ffn_gate_inp")?.is_none() && tensor("ffn_up")?.is_some(),
            };
            if is_dense {
                return dense(layer).map(FeedForward::Dense);
            }
            let shared = tensor("ffn_up_shexp")?;
            let gate = tensor("ffn_gate_inp_shexp")?;
            Ok(FeedForward::Experts(ExpertsBlock {
                shared: shared.map(|up| SharedExpert {
                    hidden: up.shape.first().copied().unwrap_or(0),
                    activation: self.activation,
                    form: FeedForwardForm::Gated,
                    share: if gate.is_some() {
                        SharedShare::Routed
                    } else {
                        share
                    },
                }),
                ..experts
            }))
        };
        (0..n_layers).map(layer).collect()
    }

    /// The block of the example's layers after their attention.
    pub(crate) fn example_feed_forward(&self) -> FeedForward {
        match self.mixtures {
            Mixtures::Always(mixture) => FeedForward::Experts(ExpertsBlock {
                n_experts: 32,
                hidden: 1024,
                gate: mixture.gate,
                bias: mixture.bias,
                route: RouteSpec {
                    sum: mixture.sum,
                    ..RouteSpec::plain(4, mixture.route)
                },
                choice: mixture.routing.choice(mixture.route),
                scaling: mixture.scaling,
                shared: None,
            }),
            _ => {
                let block = FeedForwardBlock {
                    hidden: 8192,
                    activation: self.activation,
                    form: self.feed_forward,
                };
                FeedForward::Dense(match self.sub_norms {
                    SubNorms::None => block,
                    SubNorms::BeforeOutputs => sub_normed(block, 1e-5),
                })
            }
        }
    }

    /// The mixture that the file describes, or `None` where it has no experts.
    fn experts(
        &self,
        hyper: &Hyperparameters<'_>,
        weights: &dyn WeightSource,
    ) -> Result<Option<ExpertsBlock>, ModelError> {
        let n_experts = match self.mixtures {
            Mixtures::Always(_) => hyper.count("expert_count")?,
            _ => hyper.optional::<u32>("expert_count")?.unwrap_or(0) as usize,
        };
        let Mixture {
            route,
            routing,
            sum,
            scaling,
            gate,
            bias,
            shared: _,
        } = match self.mixtures {
            _ if n_experts == 0 => return Ok(None),
            Mixtures::Allowed(mixture)
            | Mixtures::Always(mixture)
            | Mixtures::WithDense(mixture) => mixture,
            Mixtures::None => {
                let reason = format!("{n_experts} experts; {} has none", self.name);
                return Err(hyper.wrong("expert_count", reason));
            }
        };
        let n_used = hyper.count("expert_used_count")?;
        if n_used > n_experts {
            let reason = format!("{n_used} of {n_experts} experts are not possible");
            return Err(hyper.wrong("expert_used_count", reason));
        }
        let hidden = match hyper.optional::<u32>("expert_feed_forward_length")? {
            None => hyper.count("feed_forward_length")?,
            Some(_) => hyper.count("expert_feed_forward_length")?,
        };
        let route = match hyper.optional::<u32>("expert_gating_func")? {
            None | Some(0) => routing.usual_gate(route, weights),
            Some(1) => RouteGate::Softmax,
            Some(2) => RouteGate::Sigmoid,
            Some(other) => {
                let reason =
                    format!("{other} is not supported; known are 1 (softmax) and 2 (sigmoid)");
                return Err(hyper.wrong("expert_gating_func", reason));
            }
        };
        let route = sparsemixer(hyper, route, n_used)?;
        let sum = match hyper.optional::<bool>("expert_weights_norm")? {
            None => sum,
            Some(true) => RouteSum::One,
            Some(false) => RouteSum::Free,
        };
        Ok(Some(ExpertsBlock {
            n_experts,
            hidden,
            gate,
            bias,
            route: RouteSpec {
                n_used,
                gate: route,
                sum,
                scale: self.route_scale(hyper, routing)?,
                groups: self.route_groups(hyper, routing, route)?,
            },
            choice: routing.choice(route),
            scaling,
            shared: None,
        }))
    }

    /// The factor on the weights of a route.
    fn route_scale(
        &self,
        hyper: &Hyperparameters<'_>,
        routing: MixtureRouting,
    ) -> Result<f32, ModelError> {
        let key = "expert_weights_scale";
        match hyper.optional::<f32>(key)?.filter(|&scale| scale != 0.0) {
            None => Ok(1.0),
            Some(scale) if scale != 1.0 && routing == MixtureRouting::Plain => {
                let reason = format!("{scale}; {} has no such factor", self.name);
                Err(hyper.wrong(key, reason))
            }
            Some(_) => Ok(hyper.positive(key)?.unwrap_or(1.0) as f32),
        }
    }

    /// The groups of experts that the file names, where there is more than one.
    fn route_groups(
        &self,
        hyper: &Hyperparameters<'_>,
        routing: MixtureRouting,
        gate: RouteGate,
    ) -> Result<Option<RouteGroups>, ModelError> {
        if routing == MixtureRouting::Plain {
            hyper.refuse_groups()?;
        }
        hyper.route_groups(gate)
    }
}

/// The block with a norm before its output matrix.
fn sub_normed(block: FeedForwardBlock, eps: f32) -> FeedForwardBlock {
    let form = FeedForwardForm::GatedSubNorm { eps };
    FeedForwardBlock { form, ..block }
}

/// The activation of a layer with learnt slopes. Files have the numbers of which softplus makes the
/// factors, under keys without the architecture's name.
fn xielu(hyper: &Hyperparameters<'_>, layer: usize, n_layers: usize) -> Result<Xielu, ModelError> {
    let number = |key: &str, wanted: &str, is_possible: fn(f32) -> bool| {
        let numbers = hyper.numbers_of(key, n_layers)?;
        let number = numbers.get(layer).copied().unwrap_or(f32::NAN);
        if is_possible(number) {
            return Ok(number);
        }
        Err(ModelError::Setting {
            key: key.to_owned(),
            reason: format!("{number} in layer {layer} is not possible; it must be {wanted}"),
        })
    };
    let softplus = |x: f32| f64::from(x).exp().ln_1p() as f32;
    // Above `eps`, e^x - 1 is that of `eps`: with what files have, -1e-6, no difference in f32.
    number("xielu.eps", "between -1e-5 and 0", |eps| {
        (-1e-5..=0.0).contains(&eps)
    })?;
    let moderate = |x: f32| x.abs() < 80.0;
    let beta = number("xielu.beta", "between -80 and 80", moderate)?;
    let alpha = |key| number(key, "between -80 and 80", moderate).map(softplus);
    Ok(Xielu {
        positive: alpha("xielu.alpha_p")?,
        negative: beta + alpha("xielu.alpha_n")?,
        beta,
    })
}

/// `route` with the file's jitter, where it has one. Files of llama.cpp have none: its router is
/// another one.
fn sparsemixer(
    hyper: &Hyperparameters<'_>,
    route: RouteGate,
    n_used: usize,
) -> Result<RouteGate, ModelError> {
    let RouteGate::Sparsemixer { jitter: usual } = route else {
        return Ok(route);
    };
    if n_used != 2 {
        let reason = format!("{n_used} is not supported: sparsemixer chooses 2");
        return Err(hyper.wrong("expert_used_count", reason));
    }
    let key = "expert_router_jitter";
    match hyper.optional::<f32>(key)?.unwrap_or(usual) {
        jitter if jitter >= 0.0 && jitter.is_finite() => Ok(RouteGate::Sparsemixer { jitter }),
        jitter => Err(hyper.wrong(key, format!("{jitter} must be a number of at least 0"))),
    }
}

impl MixtureRouting {
    /// The gate of a file that names none, where the row has `route`. Biases on the choice come
    /// with sigmoids: files of GLM-4.7 Flash have them without the key.
    fn usual_gate(self, route: RouteGate, weights: &dyn WeightSource) -> RouteGate {
        let is_bias = |name: &String| name.ends_with(".exp_probs_b.bias");
        if self == Self::BiasedAfterSigmoid && weights.names().iter().any(is_bias) {
            RouteGate::Sigmoid
        } else {
            route
        }
    }

    /// The values by which experts are chosen, where `gate` makes weights of logits.
    fn choice(self, gate: RouteGate) -> ExpertChoice {
        match (self, gate) {
            (Self::Plain, _)
            | (Self::BiasedAfterSigmoid, RouteGate::Softmax | RouteGate::Sparsemixer { .. }) => {
                ExpertChoice::Scores
            }
            (Self::Biased, _) | (Self::BiasedAfterSigmoid, RouteGate::Sigmoid) => {
                ExpertChoice::Biased
            }
        }
    }
}
