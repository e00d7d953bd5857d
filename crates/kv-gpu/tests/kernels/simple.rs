//! Norms, gains, mixes and rotations at sizes that the contract suite does not have, and what is
//! fused.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;

use kv_backend::GraphInputs;
use kv_backend::{Backend, BackendError};
use kv_contract::Random;
use kv_gpu::Precision;
use kv_graph::rope::{RopeScaling, RopeSpec, RopeStyle};
use kv_graph::{Affine, Graph, Input, NormGain, RowGain};
use kv_rows::RowLayout;

use crate::devices::backends;
use crate::support::{Case, graph, weights};

/// Runs a graph on `n` random rows of `dim` values, often enough that launches are replayed;
/// returns its number of steps.
fn check(n: usize, dim: usize, graph: &Graph) -> usize {
    let mut random = Random::new(3);
    let positions: Vec<u32> = (0..n).map(|_| random.below(5000) as u32).collect();
    let runs: Vec<Vec<f32>> = (0..3).map(|_| random.values(n * dim)).collect();
    let steps: Vec<GraphInputs<'_>> = runs
        .iter()
        .map(|embeddings| GraphInputs {
            embeddings,
            positions: &positions,
            ..GraphInputs::default()
        })
        .collect();
    let case = Case {
        graph,
        weights: &weights(graph, 1.0),
        layout: &RowLayout::default(),
    };
    case.check(&steps, 1e-5)
}

/// Kernels number them by 32 bits.
#[test]
fn values_of_too_many_elements_are_refused() {
    let n = 1 << 16;
    let graph = graph(n, 1, |b, x| vec![b.linear("wide", x, "w", n).unwrap()]);
    let backend = backends(Precision::Precise).remove(0);
    let source = Arc::new(weights(&graph, 0.0));
    let loaded = backend.load_weights(source, Default::default()).unwrap();
    let refused = backend.compile(&graph, &loaded, &RowLayout::default());
    let error = refused.err().unwrap().to_string();
    let wanted =
        "node 'wide' has 4294967296 values, and a kernel counts up to 4294966271; fewer tokens";
    assert!(error.contains(wanted), "{error}");
}

#[test]
fn rows_of_any_length_are_normed() {
    for (n, dim) in [(1, 1), (3, 33), (9, 256), (2, 257), (1, 1100)] {
        let graph = graph(n, dim, |b, x| {
            let groups = b.reshape("groups", x, &[n, 1, dim]).unwrap();
            let gain = NormGain::PerGroup("groups.w");
            let bias = Affine::new("l").bias("b");
            vec![
                b.rms_norm("rms", x, "w", 1e-6).unwrap(),
                b.rms_norm_with("grouped", groups, gain, 1e-3).unwrap(),
                b.layer_norm("layer", x, bias, 1e-5).unwrap(),
            ]
        });
        assert_eq!(check(n, dim, &graph), 3);
    }
}

#[test]
fn rows_of_any_length_are_multiplied_and_cut() {
    for (n, dim) in [(1, 1), (3, 33), (2, 257), (1, 1100)] {
        let graph = graph(n, 2 * dim, |b, x| {
            let heads = b.reshape("heads", x, &[n, 2, dim]).unwrap();
            vec![
                b.gain("gain", heads, RowGain::PerValue("w")).unwrap(),
                b.gain("same", heads, RowGain::One("one")).unwrap(),
                b.gaussian_top_k("few", x, 1.3).unwrap(),
                b.gaussian_top_k("most", x, -0.7).unwrap(),
            ]
        });
        assert_eq!(check(n, 2 * dim, &graph), 4);
    }
}

/// Of long parts and of short ones, which two kernels mix.
#[test]
fn parts_of_any_number_are_mixed() {
    for (n, inputs, outputs, dim) in [
        (1, 1, 1, 1),
        (3, 4, 4, 70),
        (2, 5, 3, 300),
        (2, 333, 2, 1),
        (5, 40, 7, 3),
        (1, 2048, 1, 1),
    ] {
        let width = inputs * dim + outputs * inputs;
        let graph = graph(n, width, |b, x| {
            let parts = b.columns("x", x, 0..inputs * dim).unwrap();
            let parts = b.reshape("parts", parts, &[n, inputs, dim]).unwrap();
            let by = b.columns("by", x, inputs * dim..width).unwrap();
            let by = b.reshape("rows", by, &[n, outputs, inputs]).unwrap();
            vec![b.mix("mixed", parts, by).unwrap()]
        });
        assert_eq!(check(n, width, &graph), 3);
    }
}

#[test]
fn a_sum_and_its_norm_are_one_launch() {
    for (n, dim) in [(1, 700), (5, 31)] {
        // The sum has other readers, one of which is a second norm.
        let fused = graph(n, dim, |b, x| {
            let twice = b.scale("twice", x, 2.0).unwrap();
            let sum = b.add("sum", x, twice).unwrap();
            let other = b.mul("other", twice, x).unwrap();
            let normed = b.rms_norm("normed", sum, "w", 1e-6).unwrap();
            let gain = NormGain::None;
            let again = b.rms_norm_with("again", sum, gain, 1e-2).unwrap();
            let y = b.mul("y", normed, sum).unwrap();
            let z = b.add("z", other, again).unwrap();
            vec![b.add("all", y, z).unwrap()]
        });
        // Without `normed`, which is computed with `sum`.
        assert_eq!(check(n, dim, &fused), 7);
        let reshaped = graph(n, 2 * dim, |b, x| {
            let sum = b.add("sum", x, x).unwrap();
            let heads = b.reshape("heads", sum, &[n, 2, dim]).unwrap();
            vec![b.rms_norm("normed", heads, "w", 1e-6).unwrap()]
        });
        assert_eq!(check(n, 2 * dim, &reshaped), 2);
    }
}

fn rope(style: RopeStyle, n_rot: usize) -> RopeSpec {
    RopeSpec {
        style,
        n_rot,
        base: 10_000.0,
        scaling: RopeScaling::LongRope {
            attention_factor: 1.25,
        },
        factors: Some("factors".into()),
    }
}

#[test]
fn queries_and_keys_are_rotated_in_one_launch() {
    for (n, style, n_rot) in [
        (1, RopeStyle::Neox, 10),
        (7, RopeStyle::Norm, 6),
        (3, RopeStyle::Neox, 0),
    ] {
        let (dim, rope) = (10, rope(style, n_rot));
        // Keys are normed after queries are rotated, but before both are used.
        let graph = graph(n, 4 * dim, |b, x| {
            let positions = b.input(Input::Positions).unwrap();
            let k = b.columns("k", x, dim..2 * dim).unwrap();
            let q = b.reshape("q", x, &[n, 4, dim]).unwrap();
            let q = b.rope("q.rope", q, positions, &rope).unwrap();
            let k = b.reshape("k.heads", k, &[n, 1, dim]).unwrap();
            let k = b.rms_norm("k.norm", k, "w", 1e-5).unwrap();
            let k = b.rope("k.rope", k, positions, &rope).unwrap();
            let later = b.rope("later", q, positions, &rope).unwrap();
            vec![q, k, later]
        });
        assert_eq!(check(n, 4 * dim, &graph), 4);
    }
}

/// A product for each head of each token has a thread block in the second dimension.
#[test]
fn grids_beyond_the_bound_are_refused_with_their_size() {
    let heads = |n_tokens: usize| {
        graph(n_tokens, 128, |b, x| {
            let x = b.reshape("heads", x, &[n_tokens, 128, 1]).unwrap();
            vec![b.head_linear("y", x, "w", 1).unwrap()]
        })
    };
    let (fits, too_many) = (heads(511), heads(512));
    for backend in backends(Precision::Precise) {
        let compile = |graph: &Graph| {
            let loaded = Arc::new(weights(graph, 0.0));
            let loaded = backend.load_weights(loaded, Default::default()).unwrap();
            backend.compile(graph, &loaded, &RowLayout::default())
        };
        compile(&fits).unwrap();
        let error = compile(&too_many).unwrap_err().to_string();
        assert!(error.contains("65536 thread blocks"), "{error}");
        assert!(error.contains("at most 65535"), "{error}");
    }
}

/// A part of a row, 4096 columns, in which every token is forbidden.
#[test]
fn parts_without_a_value_add_nothing_to_the_logarithm() {
    let graph = graph(1, 5000, |b, x| vec![b.top_k("largest", x, 2).unwrap()]);
    let mut embeddings = vec![f32::NEG_INFINITY; 4096];
    embeddings.resize(5000, -1000.0);
    let inputs = GraphInputs {
        embeddings: &embeddings,
        ..GraphInputs::default()
    };
    let case = Case {
        graph: &graph,
        weights: &weights(&graph, 0.0),
        layout: &RowLayout::default(),
    };
    let ran = case.run(&[inputs], Precision::Precise);
    let [a, b, _, _, logarithm] = ran.outputs[0][0][..] else {
        panic!("{:?}", ran.outputs)
    };
    assert_eq!([a, b], [-1000.0; 2]);
    assert!(
        (logarithm + 1000.0 - 904f32.ln()).abs() < 1e-3,
        "{logarithm}"
    );
}

/// Kernels keep at most 1024 values of a row.
#[test]
fn sizes_without_a_kernel_are_refused_by_their_operation() {
    let graph = graph(1, 2000, |b, x| vec![b.top_k("largest", x, 1025).unwrap()]);
    for backend in backends(Precision::Precise) {
        let loaded = Arc::new(weights(&graph, 0.0));
        let loaded = backend.load_weights(loaded, Default::default()).unwrap();
        let error = backend.compile(&graph, &loaded, &RowLayout::default());
        let error = error.unwrap_err();
        let is_op = matches!(&error, BackendError::UnsupportedOp { node, .. } if node == "largest");
        assert!(is_op, "{error}");
    }
}
