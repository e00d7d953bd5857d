//! The contract of layer norms and elementwise operations.

use super::Subject;
use super::ops::{alone, compare, step};
use super::scene::memory_weights;
use kv_backend::Backend;
use kv_graph::{Activation, Affine, ClampedGate, PositionScale, RowGain, TableRow};

fn clamped(slope: f32, limit: f32) -> ClampedGate {
    ClampedGate { slope, limit }
}

/// A row of a weight of three.
fn row(row: usize) -> TableRow<'static> {
    TableRow {
        weight: "w",
        n_rows: 3,
        row,
    }
}

/// `LayerNorm` with and without a bias and a gain, over rows and over heads.
pub fn layer_norm_centres<B: Backend>(subject: &Subject<B>) {
    let tolerance = subject.tolerance.elementwise;
    for bias in [None, Some("b")] {
        alone(subject, 40, tolerance, |b, x| {
            b.layer_norm("y", x, Affine { weight: "w", bias }, 1e-6)
                .unwrap()
        });
        alone(subject, 40, tolerance, |b, x| {
            let n = b.shape().n_tokens;
            let heads = b.reshape("heads", x, &[n, 5, 8]).unwrap();
            b.layer_norm("y", heads, Affine { weight: "w", bias }, 0.5)
                .unwrap()
        });
    }
    alone(subject, 40, tolerance, |b, x| {
        let n = b.shape().n_tokens;
        let rows = b.plain_layer_norm("rows", x, 1e-6).unwrap();
        let heads = b.reshape("heads", rows, &[n, 5, 8]).unwrap();
        let normed = b.plain_layer_norm("normed", heads, 0.5).unwrap();
        b.gain("y", normed, RowGain::PerGroup("g")).unwrap()
    });
}

/// `SoftCap`, far into both tails.
pub fn soft_cap_bends<B: Backend>(subject: &Subject<B>) {
    for factor in [0.1, 6.0, 300.0] {
        alone(subject, 24, subject.tolerance.elementwise, |b, x| {
            let x = b.scale("x", x, factor).unwrap();
            b.soft_cap("y", x, 5.0).unwrap()
        });
    }
}

/// `Clamp`, within its bound and beyond.
pub fn clamp_bounds<B: Backend>(subject: &Subject<B>) {
    for factor in [0.1, 6.0] {
        alone(subject, 24, subject.tolerance.elementwise, |b, x| {
            let x = b.scale("x", x, factor).unwrap();
            b.clamp("y", x, 1.25).unwrap()
        });
    }
}

/// ReLU and its square, alone and as gates.
pub fn rectifiers_cut<B: Backend>(subject: &Subject<B>) {
    for activation in [Activation::Relu, Activation::ReluSquared] {
        alone(subject, 24, subject.tolerance.elementwise, |b, x| {
            b.activate("y", activation, x).unwrap()
        });
        alone(subject, 24, subject.tolerance.elementwise, |b, x| {
            let up = b.scale("up", x, -0.5).unwrap();
            b.gate("y", activation, x, up).unwrap()
        });
    }
}

/// `ClampedGate` inside and outside its limits.
pub fn clamped_gate_clamps<B: Backend>(subject: &Subject<B>) {
    for factors in [[1.0, 1.0], [6.0, 0.5], [40.0, 40.0]] {
        alone(subject, 24, subject.tolerance.elementwise, |b, x| {
            let gate = b.scale("gate", x, factors[0]).unwrap();
            let up = b.scale("up", x, -factors[1]).unwrap();
            b.clamped_gate("y", clamped(1.702, 7.0), [gate, up])
                .unwrap()
        });
    }
}

/// `AddRow` adds the row that it names to all rows.
pub fn rows_of_a_weight_add<B: Backend>(subject: &Subject<B>) {
    alone(subject, 24, subject.tolerance.elementwise, |b, x| {
        let y = b.add_row("y", x, row(2)).unwrap();
        let z = b.add_row("z", y, row(0)).unwrap();
        b.add("sum", z, x).unwrap()
    });
}

/// `Gain` of rows and of heads, by one factor and by one for each value.
pub fn gains_multiply<B: Backend>(subject: &Subject<B>) {
    alone(subject, 24, subject.tolerance.elementwise, |b, x| {
        let n = b.shape().n_tokens;
        let y = b.gain("y", x, RowGain::PerValue("w")).unwrap();
        let one = b.gain("one", y, RowGain::One("s")).unwrap();
        let heads = b.reshape("heads", one, &[n, 4, 6]).unwrap();
        let heads = b.gain("z", heads, RowGain::PerValue("h")).unwrap();
        let z = b.reshape("flat", heads, &[n, 24]).unwrap();
        b.add("sum", z, x).unwrap()
    });
}

/// `Mix` of some parts to more and to fewer, and as a dot product.
pub fn parts_of_rows_mix<B: Backend>(subject: &Subject<B>) {
    for (inputs, outputs) in [(4, 4), (1, 5), (3, 1), (24, 1)] {
        alone(subject, 24, subject.tolerance.linear, |b, x| {
            let n = b.shape().n_tokens;
            let parts = b.reshape("parts", x, &[n, inputs, 24 / inputs]).unwrap();
            let flat = b.linear("flat", x, "w", outputs * inputs).unwrap();
            let coefficients = b.reshape("coefficients", flat, &[n, outputs, inputs]);
            b.mix("y", parts, coefficients.unwrap()).unwrap()
        });
    }
}

/// `GaussianTopK`, with most and with few of the values left.
pub fn gaussian_top_k_cuts<B: Backend>(subject: &Subject<B>) {
    for deviations in [-1.0, 0.0, 1.5] {
        alone(subject, 40, subject.tolerance.elementwise, |b, x| {
            let y = b.gaussian_top_k("y", x, deviations).unwrap();
            b.add("sum", y, x).unwrap()
        });
    }
}

/// `ScaleByPosition` of rows and of heads.
pub fn positions_scale<B: Backend>(subject: &Subject<B>) {
    scales(subject, 1);
}

/// `ScaleByPosition` where the first position counts as 0.
pub fn positions_scale_from_zero<B: Backend>(subject: &Subject<B>) {
    scales(subject, 0);
}

fn scales<B: Backend>(subject: &Subject<B>, offset: u32) {
    let scale = PositionScale {
        every: 4,
        strength: 0.3,
        offset,
    };
    alone(subject, 24, subject.tolerance.elementwise, |b, x| {
        let n = b.shape().n_tokens;
        let positions = b.input(kv_graph::Input::Positions).unwrap();
        let rows = b.scale_by_position("rows", scale, [x, positions]).unwrap();
        let heads = b.reshape("heads", rows, &[n, 4, 6]).unwrap();
        b.scale_by_position("y", scale, [heads, positions]).unwrap()
    });
}

/// A node of these in place of an operand that is used again.
pub fn elementwise_nodes_leave_operands_alone<B: Backend>(subject: &Subject<B>) {
    let mut b = super::ops::builder(5, 0);
    let x = b.input(kv_graph::Input::Embeddings { dim: 24 }).unwrap();
    let a = b.scale("a", x, 2.0).unwrap();
    let c = b.soft_cap("c", a, 3.0).unwrap();
    let d = b.clamped_gate("d", clamped(1.7, 2.0), [a, c]).unwrap();
    let e = b.layer_norm("e", a, Affine::new("w"), 1e-5).unwrap();
    let g = b.add("g", d, e).unwrap();
    let h = b.add("h", c, a).unwrap();
    let y = b.add("y", g, h).unwrap();
    let graph = b.finish(&[y]).unwrap();
    let weights = memory_weights(&graph, 61);
    let step = step(5, 0, 24, 1);
    compare(subject, &graph, weights, &step, subject.tolerance.graph);
}
