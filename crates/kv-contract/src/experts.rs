//! The contract of mixtures of experts: routes, and what is computed along them.

use super::Subject;
use super::ops::{block_weight, builder, compare, step};
use super::scene::memory_weights;
use kv_core::backend::Backend;
use kv_core::block::BlockFormat;
use kv_core::graph::{
    Activation, Affine, Graph, GraphBuilder, GraphError, Input, NodeId, RouteGate, RouteSpec,
    RouteSum,
};

const ROWS: [usize; 4] = [0, 1, 6, 40];

/// Every kind of route, with `n_used` experts.
fn specs(n_used: usize) -> impl Iterator<Item = RouteSpec> {
    let gates = [RouteGate::Softmax, RouteGate::Sigmoid];
    gates.into_iter().flat_map(move |gate| {
        [RouteSum::Free, RouteSum::One].map(|sum| RouteSpec { n_used, gate, sum })
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
        n_used: 2,
        gate: RouteGate::Softmax,
        sum: RouteSum::One,
    };
    for format in BlockFormat::ALL {
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
