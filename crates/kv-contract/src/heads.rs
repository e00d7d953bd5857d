//! The contract of operations on heads: a matrix for each, their columns, and two put together.

use super::Subject;
use super::ops::{alone, block_weight, builder, compare, step};
use super::scene::memory_weights;
use kv_backend::Backend;
use kv_graph::Input;

/// `HeadLinear` multiplies each head with its own matrix.
pub fn heads_have_matrices<B: Backend>(subject: &Subject<B>) {
    for (heads, n_in, n_out) in [(1, 24, 33), (5, 12, 24), (3, 40, 7), (16, 32, 48)] {
        alone(subject, heads * n_in, subject.tolerance.linear, |b, x| {
            let n = b.shape().n_tokens;
            let x = b.reshape("x", x, &[n, heads, n_in]).unwrap();
            let y = b.head_linear("y", x, "w", n_out).unwrap();
            b.reshape("flat", y, &[n, heads * n_out]).unwrap()
        });
    }
}

/// Matrices of heads are read in every block format.
pub fn heads_on_blocks<B: Backend>(subject: &Subject<B>) {
    for format in subject.formats() {
        let tolerance = subject.tolerance.linear_of(format);
        for n in [1, 13] {
            let mut b = builder(n, 0);
            let x = b.input(Input::Embeddings { dim: 3 * 256 }).unwrap();
            let x = b.reshape("x", x, &[n, 3, 256]).unwrap();
            let y = b.head_linear("y", x, "w", 21).unwrap();
            let graph = b.finish(&[y]).unwrap();
            let mut weights = memory_weights(&graph, 56);
            weights.insert(block_weight("w", &[3, 21, 256], format));
            compare(subject, &graph, weights, &step(n, 0, 768, 1), tolerance);
        }
    }
}

/// `Columns` of heads, and `Concat` of heads and of rows.
pub fn heads_are_cut_and_joined<B: Backend>(subject: &Subject<B>) {
    let tolerance = subject.tolerance.elementwise;
    for (heads, width, cut) in [(1, 28, 20), (7, 18, 10), (4, 33, 1)] {
        alone(subject, heads * width, tolerance, |b, flat| {
            let n = b.shape().n_tokens;
            let x = b.reshape("x", flat, &[n, heads, width]).unwrap();
            let first = b.columns("first", x, 0..cut).unwrap();
            let last = b.columns("last", x, cut..width).unwrap();
            let scaled = b.scale("scaled", last, 3.0).unwrap();
            let joined = b.concat("joined", scaled, first).unwrap();
            let joined = b.concat("twice", x, joined).unwrap();
            let rows = b.reshape("rows", joined, &[n, 2 * heads * width]).unwrap();
            b.concat("y", flat, rows).unwrap()
        });
    }
}
