//! Mixtures of experts: the operations that choose experts and compute with the chosen ones.
//!
//! A token's *route* is one weight for each expert, 0 for those that are not chosen; its *slots*
//! are the chosen experts in ascending order ([`slots`]), so results do not depend on which was
//! likeliest. Shazeer et al., arXiv 1701.06538. Does not know feed-forward blocks or devices.

use super::route::{MAX_ROUTE_GROUPS, RouteGate, RouteSpec, Routing};
use crate::op::Op;
use crate::spec::{OpContext, OpResult, OpSpec};
use crate::{Affine, Claim, GraphBuilder, GraphError, NodeId};

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
fn slots_of(given: &OpContext<'_>) -> Result<Slots, String> {
    let wanted = || "[n, dim] or [n, slots, dim], and a route [n, experts] of as many slots".into();
    let (Some(Op::Route { spec, .. }), [x, &[n_rows, n_experts]]) = (given.op(1), given.shapes())
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

/// The shape of the logits of a route.
fn routed(
    given: &OpContext<'_>,
    route: &RouteSpec,
    bias: Option<&String>,
) -> Result<OpResult, String> {
    let n_used = route.n_used;
    let &[n, experts] = given.shape(0) else {
        return Err(format!("[n, at least {}]", n_used.max(1)));
    };
    let is_sparsemixer = matches!(route.gate, RouteGate::Sparsemixer { .. });
    if is_sparsemixer && (route.groups.is_some() || bias.is_some()) {
        return Err("neither groups nor biases where sparsemixer weighs experts".into());
    }
    if let Some(groups) = route.groups {
        let wanted = format!(
            "as many experts in each of {} groups (1 to {MAX_ROUTE_GROUPS}), and 1 to {} of them \
             with the {n_used} experts to choose",
            groups.n_groups, groups.n_groups
        );
        let group = match groups.n_groups {
            0 => return Err(wanted),
            n_groups => experts / n_groups,
        };
        let fits = (1..=groups.n_groups).contains(&groups.n_used)
            && groups.n_groups <= MAX_ROUTE_GROUPS
            && experts.is_multiple_of(groups.n_groups)
            && n_used <= groups.n_used.saturating_mul(group);
        if !fits {
            return Err(wanted);
        }
    }
    if (1..=experts).contains(&n_used) {
        Ok(OpResult::f32([n, experts]).weight_if(bias, [experts]))
    } else {
        Err(format!(
            "[n, at least {}], at least 1 of them",
            n_used.max(1)
        ))
    }
}

pub(crate) fn route<'a>(
    route: RouteSpec,
    bias: Option<&'a String>,
    gain: Option<&'a String>,
) -> OpSpec<'a> {
    let spec = OpSpec::new("route", 1, move |given| {
        let routed = routed(given, &route, bias)?;
        let n_experts = given.shape(0).last().copied().unwrap_or(0);
        Ok(routed.weight_if(gain, [n_experts]))
    });
    let spec = spec
        .setting("used", route.n_used)
        .setting("gate", route.gate)
        .setting("sum", format!("{:?}", route.sum).to_lowercase())
        .optional("scale", (route.scale != 1.0).then_some(route.scale));
    let spec = match route.groups {
        None => spec,
        Some(groups) => spec
            .setting("groups", format!("{}/{}", groups.n_used, groups.n_groups))
            .setting("group_score", groups.score),
    };
    spec.weights_as("bias", bias).weights_as("gain", gain)
}

pub(crate) fn expert_linear<'a>(weight: &'a String, bias: Option<&'a String>) -> OpSpec<'a> {
    let spec = OpSpec::new("expert_linear", 2, move |given| {
        let (slots, n_out) = (slots_of(given)?, given.width());
        let result = OpResult::f32([slots.n_rows, slots.n_used, n_out]);
        let result = result.weight([slots.n_experts, n_out, slots.width]);
        Ok(result.weight_if(bias, [slots.n_experts, n_out]))
    });
    spec.weights_as("w", [weight]).weights_as("b", bias)
}

pub(crate) fn expert_scale<'a>() -> OpSpec<'a> {
    OpSpec::new("expert_scale", 2, |given| {
        let slots = slots_of(given)?;
        Ok(OpResult::f32([slots.n_rows, slots.n_used, slots.width]))
    })
}

pub(crate) fn expert_sum<'a>() -> OpSpec<'a> {
    OpSpec::new("expert_sum", 1, |given| match *given.shape(0) {
        [n, _, dim] => Ok(OpResult::f32([n, dim])),
        _ => Err("[n, slots, dim]".into()),
    })
}

impl GraphBuilder {
    /// The route of every token, `[n, experts]`, from the router's `logits [n, experts]`.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where there are fewer experts than are to be chosen, or none are, or
    /// they cannot be divided into the groups.
    pub fn route<'a>(
        &mut self,
        name: &str,
        logits: NodeId,
        routing: impl Into<Routing<'a>>,
    ) -> Result<NodeId, GraphError> {
        let Routing { spec, bias, gain } = routing.into();
        let op = Op::Route {
            spec,
            bias: self.optional_weight_name(bias),
            gain: self.optional_weight_name(gain),
        };
        self.push(name, op, &[logits], Claim::default())
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
    use crate::{Graph, GraphShape, GroupScore, Input, RouteGroups, RouteSum};

    #[test]
    fn a_token_has_no_more_slots_than_it_uses() {
        assert_eq!(
            slots(&[0.5, 0.0, 0.25, 0.25], 2).collect::<Vec<_>>(),
            [(0, 0.5), (2, 0.25)]
        );
    }

    #[test]
    fn a_route_prints_what_it_differs_in() {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 3,
        });
        let x = b.input(Input::Embeddings { dim: 8 }).unwrap();
        let spec = RouteSpec {
            sum: RouteSum::One,
            scale: 2.5,
            groups: Some(RouteGroups {
                n_groups: 4,
                n_used: 2,
                score: GroupScore::TopTwo,
            }),
            ..RouteSpec::plain(3, RouteGate::Sigmoid)
        };
        let biased = Routing {
            spec,
            bias: Some("exp_probs_b.bias"),
            gain: None,
        };
        let routes = b.route("route", x, biased).unwrap();
        let graph = b.finish(&[routes]).unwrap();
        let text = graph.text().to_string();
        let line = "route(%0, used=3, gate=sigmoid, sum=one, scale=2.5, groups=2/4, \
                    group_score=top_two, bias=exp_probs_b.bias)";
        assert!(text.contains(line), "{text}");
        assert_eq!(graph.weights()[0].shape, [8]);
        assert_eq!(Graph::from_json(&graph.to_json().unwrap()), Ok(graph));
    }

    #[test]
    fn operations_on_slots_fit_their_route() {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 3,
        });
        let spec = |n_used| RouteSpec {
            sum: RouteSum::One,
            ..RouteSpec::plain(n_used, RouteGate::Softmax)
        };
        let x = b.input(Input::Embeddings { dim: 4 }).unwrap();
        let logits = b.linear("logits", x, "router", 5).unwrap();
        for n_used in [0, 6] {
            assert!(matches!(
                b.route("bad", logits, spec(n_used)),
                Err(GraphError::Shape { .. })
            ));
        }
        let sparse = RouteSpec::plain(2, RouteGate::Sparsemixer { jitter: 0.01 });
        let biased = Routing {
            bias: Some("bias"),
            ..Routing::from(sparse)
        };
        let refused = b.route("bad", logits, biased);
        assert!(matches!(refused, Err(GraphError::Shape { .. })));
        for (n_groups, n_used) in [(0, 1), (2, 1), (5, 0), (5, 6), (5, 1), (65, 1)] {
            let groups = RouteGroups {
                n_groups,
                n_used,
                score: GroupScore::Max,
            };
            let spec = RouteSpec {
                groups: Some(groups),
                ..spec(2)
            };
            let refused = b.route("bad", logits, spec).unwrap_err();
            assert!(matches!(refused, GraphError::Shape { .. }), "{refused}");
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
