//! Mixtures of experts: [`RouteSpec`], how a router's logits choose experts, and the operations
//! that compute with the chosen ones.
//!
//! A token's *route* is one weight for each expert, 0 for those that are not chosen; its *slots*
//! are the chosen experts in ascending order ([`slots`]), so results do not depend on which was
//! likeliest. Shazeer et al., arXiv 1701.06538. Does not know feed-forward blocks or devices.

use serde::{Deserialize, Serialize};

use crate::graph::op::Op;
use crate::graph::spec::{Given, Inferred, OpSpec};
use crate::graph::{Affine, Claim, GraphBuilder, GraphError, NodeId};

/// How the logits of a router become a route.
///
/// The experts with the `n_used` largest logits are chosen; of equal ones the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RouteSpec {
    /// Experts that a token goes through; at least 1, at most all.
    pub n_used: usize,
    /// What makes weights of logits.
    pub gate: RouteGate,
    /// What the weights of the chosen experts add up to.
    pub sum: RouteSum,
}

/// What makes weights of a router's logits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RouteGate {
    /// `e^x / sum(e^x)` over all experts.
    #[default]
    Softmax,
    /// `1 / (1 + e^-x)`, each expert by itself.
    Sigmoid,
}

/// What the weights of a token's chosen experts add up to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RouteSum {
    /// Whatever the gate gives.
    #[default]
    Free,
    /// 1: they are divided by their sum. After a softmax this is the softmax over the chosen ones.
    One,
}

impl RouteSpec {
    /// The route of one token, from as many logits as it has weights.
    pub fn route(&self, logits: &[f32], route: &mut [f32]) {
        debug_assert_eq!(logits.len(), route.len());
        route.fill(0.0);
        let mut largest = f32::NEG_INFINITY;
        for _ in 0..self.n_used.min(logits.len()) {
            let mut best: Option<(usize, f32)> = None;
            for (expert, (&logit, &taken)) in logits.iter().zip(&*route).enumerate() {
                if taken == 0.0 && best.is_none_or(|(_, other)| logit > other) {
                    best = Some((expert, logit));
                }
            }
            if let Some((expert, logit)) = best {
                largest = largest.max(logit);
                route[expert] = 1.0;
            }
        }
        let weight = |logit: f32| match self.gate {
            RouteGate::Softmax => (logit - largest).exp(),
            RouteGate::Sigmoid => 1.0 / (1.0 + (-logit).exp()),
        };
        for (route, &logit) in route.iter_mut().zip(logits) {
            if *route != 0.0 {
                *route = weight(logit);
            }
        }
        let sum: f32 = match (self.sum, self.gate) {
            (RouteSum::One, _) => route.iter().sum(),
            (RouteSum::Free, RouteGate::Softmax) => logits.iter().map(|&x| weight(x)).sum(),
            (RouteSum::Free, RouteGate::Sigmoid) => 1.0,
        };
        route.iter_mut().for_each(|route| *route /= sum);
    }
}

/// The slots of a token: `(expert, weight)` of the first `n_used` weights that are not 0.
pub fn slots(route: &[f32], n_used: usize) -> impl Iterator<Item = (usize, f32)> + '_ {
    let chosen = route.iter().copied().enumerate();
    chosen.filter(|&(_, weight)| weight != 0.0).take(n_used)
}

/// Sizes of an operation on slots.
struct Slots {
    n_rows: usize,
    n_experts: usize,
    n_used: usize,
    /// Values of one slot, or of the row that all slots share.
    width: usize,
}

/// Reads the sizes off `x [n, dim]` or `x [n, slots, dim]` and a route.
fn slots_of(given: &Given<'_>) -> Result<Slots, String> {
    let wanted = || "[n, dim] or [n, slots, dim], and a route [n, experts] of as many slots".into();
    let (Some(Op::Route { spec }), [x, &[n_rows, n_experts]]) = (given.op(1), given.shapes())
    else {
        return Err(wanted());
    };
    let n_used = spec.n_used;
    let width = match *x {
        [rows, width] if rows == n_rows => width,
        [rows, slots, width] if rows == n_rows && slots == n_used => width,
        _ => return Err(wanted()),
    };
    Ok(Slots {
        n_rows,
        n_experts,
        n_used,
        width,
    })
}

pub(in crate::graph) fn route<'a>(route: RouteSpec) -> OpSpec<'a> {
    let spec = OpSpec::new("route", 1, move |given| match *given.shape(0) {
        [n, experts] if (1..=experts).contains(&route.n_used) => Ok(Inferred::f32([n, experts])),
        _ => Err(format!(
            "[n, at least {}], at least 1 of them",
            route.n_used.max(1)
        )),
    });
    spec.setting("used", route.n_used)
        .setting("gate", format!("{:?}", route.gate).to_lowercase())
        .setting("sum", format!("{:?}", route.sum).to_lowercase())
}

pub(in crate::graph) fn expert_linear<'a>(
    weight: &'a String,
    bias: Option<&'a String>,
) -> OpSpec<'a> {
    let spec = OpSpec::new("expert_linear", 2, move |given| {
        let (slots, n_out) = (slots_of(given)?, given.width());
        let result = Inferred::f32([slots.n_rows, slots.n_used, n_out]);
        let result = result.weight([slots.n_experts, n_out, slots.width]);
        Ok(result.weight_if(bias, [slots.n_experts, n_out]))
    });
    spec.weights_as("w", [weight]).weights_as("b", bias)
}

pub(in crate::graph) fn expert_scale<'a>() -> OpSpec<'a> {
    OpSpec::new("expert_scale", 2, |given| {
        let slots = slots_of(given)?;
        Ok(Inferred::f32([slots.n_rows, slots.n_used, slots.width]))
    })
}

pub(in crate::graph) fn expert_sum<'a>() -> OpSpec<'a> {
    OpSpec::new("expert_sum", 1, |given| match *given.shape(0) {
        [n, _, dim] => Ok(Inferred::f32([n, dim])),
        _ => Err("[n, slots, dim]".into()),
    })
}

impl GraphBuilder {
    /// The route of every token, `[n, experts]`, from the router's `logits [n, experts]`.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where there are fewer experts than are to be chosen, or none are.
    pub fn route(
        &mut self,
        name: &str,
        logits: NodeId,
        spec: RouteSpec,
    ) -> Result<NodeId, GraphError> {
        self.push(name, Op::Route { spec }, &[logits], Claim::default())
    }

    /// Each slot's expert applied: `x [n, in]` (the same for all slots) or `[n, slots, in]` in,
    /// `[n, slots, n_out]` out, with matrices `[experts, n_out, in]` and biases `[experts, n_out]`.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where `routes` is no route of as many rows, or `x` has other slots.
    pub fn expert_linear(
        &mut self,
        name: &str,
        x_routes: [NodeId; 2],
        weights: Affine<'_>,
        n_out: usize,
    ) -> Result<NodeId, GraphError> {
        let op = Op::ExpertLinear {
            weight: self.weight_name(weights.weight),
            bias: self.optional_weight_name(weights.bias),
        };
        self.push(name, op, &x_routes, Claim::shape(&[n_out]))
    }

    /// Each slot of `x` times its weight: `[n, dim]` or `[n, slots, dim]` in, `[n, slots, dim]`
    /// out.
    ///
    /// # Errors
    /// As [`GraphBuilder::expert_linear`].
    pub fn expert_scale(
        &mut self,
        name: &str,
        x_routes: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        self.push(name, Op::ExpertScale, &x_routes, Claim::default())
    }

    /// The sum of a token's slots, `[n, slots, dim]` in, `[n, dim]` out.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where `x` has no slots.
    pub fn expert_sum(&mut self, name: &str, x: NodeId) -> Result<NodeId, GraphError> {
        self.push(name, Op::ExpertSum, &[x], Claim::default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Graph, GraphShape, Input};

    fn routed(spec: RouteSpec, logits: &[f32]) -> Vec<f32> {
        let mut route = vec![7.0; logits.len()];
        spec.route(logits, &mut route);
        route
    }

    #[test]
    fn the_largest_logits_are_chosen() {
        let logits = [0.0, 3f32.ln(), -40.0, 2f32.ln(), 2f32.ln()];
        let spec = |gate, sum| RouteSpec {
            n_used: 2,
            gate,
            sum,
        };
        let close = |spec, wanted: [f32; 5]| {
            let got = routed(spec, &logits);
            let near = got.iter().zip(wanted).all(|(g, w)| (g - w).abs() < 1e-6);
            assert!(near, "{spec:?}: {got:?}");
        };
        // Of two equal logits the first.
        close(
            spec(RouteGate::Softmax, RouteSum::One),
            [0.0, 0.6, 0.0, 0.4, 0.0],
        );
        close(
            spec(RouteGate::Softmax, RouteSum::Free),
            [0.0, 0.375, 0.0, 0.25, 0.0],
        );
        close(
            spec(RouteGate::Sigmoid, RouteSum::Free),
            [0.0, 0.75, 0.0, 2.0 / 3.0, 0.0],
        );
        let sum = 0.75 + 2.0 / 3.0;
        close(
            spec(RouteGate::Sigmoid, RouteSum::One),
            [0.0, 0.75 / sum, 0.0, 2.0 / 3.0 / sum, 0.0],
        );
        let all = RouteSpec {
            n_used: 5,
            ..spec(RouteGate::Softmax, RouteSum::One)
        };
        assert!((routed(all, &logits).iter().sum::<f32>() - 1.0).abs() < 1e-6);
    }

    #[test]
    fn a_weight_that_underflows_has_no_slot() {
        let spec = RouteSpec {
            n_used: 2,
            gate: RouteGate::Softmax,
            sum: RouteSum::One,
        };
        let route = routed(spec, &[-200.0, -300.0, 0.0]);
        assert_eq!(slots(&route, 2).collect::<Vec<_>>(), [(2, 1.0)]);
        assert_eq!(
            slots(&[0.5, 0.0, 0.25, 0.25], 2).collect::<Vec<_>>(),
            [(0, 0.5), (2, 0.25)]
        );
    }

    #[test]
    fn operations_on_slots_fit_their_route() {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 3,
        });
        let spec = |n_used| RouteSpec {
            n_used,
            gate: RouteGate::Softmax,
            sum: RouteSum::One,
        };
        let x = b.input(Input::Embeddings { dim: 4 }).unwrap();
        let logits = b.linear("logits", x, "router", 5).unwrap();
        for n_used in [0, 6] {
            assert!(matches!(
                b.route("bad", logits, spec(n_used)),
                Err(GraphError::Shape { .. })
            ));
        }
        let routes = b.route("route", logits, spec(2)).unwrap();
        let up = b
            .expert_linear("up", [x, routes], Affine::new("up.w").bias("up.b"), 6)
            .unwrap();
        assert_eq!(b.shape_of(up), [3, 2, 6]);
        let three = b.reshape("three", x, &[3, 1, 4]).unwrap();
        for operands in [[x, logits], [three, routes], [routes, x]] {
            let refused = b.expert_scale("bad", operands).unwrap_err();
            assert!(matches!(refused, GraphError::Shape { .. }), "{refused}");
        }
        assert!(matches!(
            b.expert_sum("bad", x),
            Err(GraphError::Shape { .. })
        ));
        let scaled = b.expert_scale("scaled", [up, routes]).unwrap();
        let sum = b.expert_sum("sum", scaled).unwrap();
        let graph = b.finish(&[sum]).unwrap();
        let text = graph.text().to_string();
        for line in [
            "route: f32[3, 5] = route(%1, used=2, gate=softmax, sum=one)",
            "up: f32[3, 2, 6] = expert_linear(%0, %2, w=up.w, b=up.b)",
            "scaled: f32[3, 2, 6] = expert_scale(%3, %2)",
            "sum: f32[3, 6] = expert_sum(%5)",
        ] {
            assert!(text.contains(line), "{text}");
        }
        let weights: Vec<_> = graph.weights().iter().map(|w| w.shape.clone()).collect();
        assert_eq!(weights, [vec![5, 4], vec![5, 6, 4], vec![5, 6]]);
        assert_eq!(Graph::from_json(&graph.to_json().unwrap()), Ok(graph));
    }
}
