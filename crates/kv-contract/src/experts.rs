//! The contract of mixtures of experts: routes, and what is computed along them.

use super::Subject;
use super::ops::{block_weight, builder, compare, step};
use super::scene::memory_weights;
use kv_backend::Backend;
use kv_graph::{
    Activation, Affine, Graph, GraphBuilder, GraphError, GroupScore, Input, NodeId, RouteGate,
    RouteGroups, RouteSpec, RouteSum, Routing,
};

const ROWS: [usize; 4] = [0, 1, 6, 40];

/// Every kind of route, with `n_used` experts.
fn specs(n_used: usize) -> impl Iterator<Item = RouteSpec> {
    let gates = [RouteGate::Softmax, RouteGate::Sigmoid];
    gates.into_iter().flat_map(move |gate| {
        [RouteSum::Free, RouteSum::One].map(|sum| RouteSpec {
            sum,
            ..RouteSpec::plain(n_used, gate)
        })
    })
}

/// A graph over `n_tokens` rows of `dim` values.
fn graph(
    n_tokens: usize,
    dim: usize,
    build: impl FnOnce(&mut GraphBuilder, NodeId) -> Result<NodeId, GraphError>,
) -> Graph {
    let mut b = builder(n_tokens, 0);
    let x = b.input(Input::Embeddings { dim }).unwrap();
    let y = build(&mut b, x).unwrap();
    b.finish(&[y]).unwrap()
}

/// Routes choose the likeliest experts and weigh them.
pub fn routes_choose_and_weigh<B: Backend>(subject: &Subject<B>) {
    for (n_experts, n_used) in [(1, 1), (4, 2), (7, 7), (60, 4)] {
        for (n, spec) in ROWS
            .into_iter()
            .flat_map(|n| specs(n_used).map(move |s| (n, s)))
        {
            let graph = graph(n, 24, |b, x| {
                let logits = b.linear("logits", x, "router", n_experts)?;
                b.route("route", logits, spec)
            });
            let weights = memory_weights(&graph, 51);
            let step = step(n, 0, 24, 1);
            compare(subject, &graph, weights, &step, subject.tolerance.linear);
        }
    }
}

/// The sum of an expert layer's results, each scaled by its route's weight.
fn scaled_sum(
    b: &mut GraphBuilder,
    x: NodeId,
    logits: NodeId,
    routing: Routing<'_>,
) -> Result<NodeId, GraphError> {
    let routes = b.route("route", logits, routing)?;
    let up = b.expert_linear("up", [x, routes], Affine::new("u"), 20)?;
    let scaled = b.expert_scale("scaled", [up, routes])?;
    b.expert_sum("sum", scaled)
}

/// Routes whose experts share with those that are near to them: with a jitter that leaves most far,
/// and with one that leaves none of the same sign.
pub fn routes_share_among_near_ties<B: Backend>(subject: &Subject<B>) {
    for jitter in [0.05, 0.5] {
        for (n_experts, n_used, n) in [(1, 1, 1), (5, 2, 6), (7, 7, 40), (60, 2, 40)] {
            for (sum, scale) in [(RouteSum::Free, 1.0), (RouteSum::One, 2.5)] {
                let spec = RouteSpec {
                    sum,
                    scale,
                    ..RouteSpec::plain(n_used, RouteGate::Sparsemixer { jitter })
                };
                let graph = graph(n, 24, |b, x| {
                    let logits = b.linear("logits", x, "router", n_experts)?;
                    let routing = Routing {
                        gain: Some("gain"),
                        ..Routing::from(spec)
                    };
                    scaled_sum(b, x, logits, routing)
                });
                let weights = memory_weights(&graph, 58);
                let step = step(n, 0, 24, 1);
                compare(subject, &graph, weights, &step, subject.tolerance.graph);
            }
        }
    }
}

/// Routes with a bias on the choice, a factor on the weights, and groups of experts.
pub fn routes_choose_from_groups<B: Backend>(subject: &Subject<B>) {
    let none = [(1, 1, GroupScore::Max)];
    let some = [
        (4, 2, GroupScore::Max),
        (4, 2, GroupScore::TopTwo),
        (20, 7, GroupScore::TopTwo),
        (20, 20, GroupScore::Max),
    ];
    let groups = none
        .into_iter()
        .chain(some)
        .map(|(n_groups, n_used, score)| RouteGroups {
            n_groups,
            n_used,
            score,
        });
    let specs: Vec<_> = groups
        .flat_map(|g| specs(4).map(move |spec| (g, spec)))
        .collect();
    let cases = [
        (None, 1.0, 6),
        (None, 2.5, 40),
        (Some("bias"), 1.0, 1),
        (Some("bias"), 0.7, 40),
    ];
    for ((groups, spec), (bias, scale, n)) in subject.combine(&specs, &cases) {
        let spec = RouteSpec {
            scale,
            groups: (groups.n_groups > 1).then_some(groups),
            ..spec
        };
        let graph = graph(n, 24, |b, x| {
            let logits = b.linear("logits", x, "router", 40)?;
            let routing = Routing {
                bias,
                ..Routing::from(spec)
            };
            scaled_sum(b, x, logits, routing)
        });
        let weights = memory_weights(&graph, 55);
        let step = step(n, 0, 24, 1);
        compare(subject, &graph, weights, &step, subject.tolerance.graph);
    }
}

/// Routes whose weights are multiplied with a gain of each expert.
pub fn routes_have_gains<B: Backend>(subject: &Subject<B>) {
    for (n, spec) in ROWS
        .into_iter()
        .flat_map(|n| specs(3).map(move |spec| (n, spec)))
    {
        let graph = graph(n, 24, |b, x| {
            let logits = b.linear("logits", x, "router", 9)?;
            let routing = Routing {
                gain: Some("gain"),
                ..Routing::from(spec)
            };
            scaled_sum(b, x, logits, routing)
        });
        let weights = memory_weights(&graph, 57);
        let step = step(n, 0, 24, 1);
        compare(subject, &graph, weights, &step, subject.tolerance.graph);
    }
}

/// A whole block: experts with biases, whose results are scaled.
pub fn experts_compute<B: Backend>(subject: &Subject<B>) {
    for (n_experts, n_used) in [(1, 1), (4, 2), (9, 3)] {
        for (n, spec) in ROWS
            .into_iter()
            .flat_map(|n| specs(n_used).map(move |s| (n, s)))
        {
            let graph = graph(n, 24, |b, x| {
                let logits = b.affine(
                    "logits",
                    x,
                    Affine::new("router").bias("router.b"),
                    n_experts,
                )?;
                let routes = b.route("route", logits, spec)?;
                let gate =
                    b.expert_linear("gate", [x, routes], Affine::new("g").bias("g.b"), 20)?;
                let up = b.expert_linear("up", [x, routes], Affine::new("u"), 20)?;
                let hidden = b.gate("hidden", Activation::Silu, gate, up)?;
                let down =
                    b.expert_linear("down", [hidden, routes], Affine::new("d").bias("d.b"), 24)?;
                let scaled = b.expert_scale("scaled", [down, routes])?;
                let sum = b.expert_sum("sum", scaled)?;
                b.add("y", sum, x)
            });
            let weights = memory_weights(&graph, 52);
            let step = step(n, 0, 24, 1);
            compare(subject, &graph, weights, &step, subject.tolerance.graph);
        }
    }
}

/// Experts whose inputs are scaled, each slot by its own weight.
pub fn experts_on_scaled_inputs_compute<B: Backend>(subject: &Subject<B>) {
    for (n, spec) in ROWS.into_iter().flat_map(|n| specs(2).map(move |s| (n, s))) {
        let graph = graph(n, 33, |b, x| {
            let logits = b.linear("logits", x, "router", 5)?;
            let routes = b.route("route", logits, spec)?;
            let scaled = b.expert_scale("scaled", [x, routes])?;
            let y = b.expert_linear("up", [scaled, routes], Affine::new("u"), 18)?;
            b.expert_sum("sum", y)
        });
        let weights = memory_weights(&graph, 53);
        let step = step(n, 0, 33, 1);
        compare(subject, &graph, weights, &step, subject.tolerance.graph);
    }
}

/// Matrices of experts are read in every block format.
pub fn experts_on_blocks<B: Backend>(subject: &Subject<B>) {
    let spec = RouteSpec {
        sum: RouteSum::One,
        ..RouteSpec::plain(2, RouteGate::Softmax)
    };
    for format in subject.formats() {
        let tolerance = subject.tolerance.linear_of(format);
        for n in [1, 13] {
            let graph = graph(n, 512, |b, x| {
                let logits = b.linear("logits", x, "router", 3)?;
                let routes = b.route("route", logits, spec)?;
                b.expert_linear("y", [x, routes], Affine::new("w"), 21)
            });
            let mut weights = memory_weights(&graph, 54);
            weights.insert(block_weight("w", &[3, 21, 512], format));
            compare(subject, &graph, weights, &step(n, 0, 512, 1), tolerance);
        }
    }
}
