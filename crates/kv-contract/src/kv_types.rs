//! The contract of stored types: every pair of K and V types, rotated and not, holds the very bytes
//! of the scalar specification, and is attended in place as what these bytes stand for.

use super::one_op::read_memory;
use super::rows::{dump, fill};
use super::scene::{layout, runs};
use super::{Attend, OneOp, Random, StoreRows, Subject, assert_close};
use kv_backend::Backend;
use kv_core::{CellIdx, LayerIdx, Pos, PosRange, Visibility, VisibleGroup};
use kv_graph::AttendSpec;
use kv_rows::{KvRotation, KvTypes};

/// Every pair of types that the backend declares, with and without rotation.
fn pairs<B: Backend>(backend: &B) -> Vec<KvTypes> {
    let types = backend.info().kv_types;
    let pairs = types
        .iter()
        .flat_map(|&k| types.iter().map(move |&v| (k, v)));
    let both = [KvRotation::On, KvRotation::Off];
    pairs
        .flat_map(|(k, v)| both.map(|r| KvTypes::new(k, v).with_rotation(r)))
        .filter(|t| t.rotation == KvRotation::On || t.k.is_quantised() || t.v.is_quantised())
        .collect()
}

/// Rows of `n` values that are hard to encode.
fn hard_rows(n: usize) -> Vec<Vec<f32>> {
    let mut random = Random::new(71);
    let mut rows: Vec<Vec<f32>> = [
        0.0,
        -0.0,
        1.0,
        -2.5,
        1e-42,
        -f32::MIN_POSITIVE,
        3e-8,
        65504.0,
        -8.4e6,
        1e30,
        -f32::MAX / 512.0,
    ]
    .map(|v| vec![v; n])
    .to_vec();
    // Random values of every magnitude, also mixed, and with one value that is far off.
    for magnitude in [1e-44, 1e-20, 1e-5, 1.0, 300.0, 1e7, 1e30] {
        rows.push(random.values(n).iter().map(|v| v * magnitude).collect());
    }
    let exponents: Vec<i32> = (0..n).map(|_| random.below(80) as i32 - 40).collect();
    let mixed = random.values(n);
    let mixed = mixed.iter().zip(exponents).map(|(v, e)| v * 2f32.powi(e));
    rows.push(mixed.collect());
    for outlier in [-1e4, 1e4, -1.0000001] {
        let mut row = random.values(n);
        row[n / 3] = outlier;
        rows.push(row);
    }
    // Equal extremes of both signs, ties of every step, and steps themselves.
    rows.push(
        (0..n)
            .map(|i| if i % 2 == 0 { -1.0 } else { 1.0 })
            .collect(),
    );
    rows.push((0..n).map(|i| (i % 32) as f32 - 15.5).collect());
    rows.push((0..n).map(|i| (i % 32) as f32 * 0.5 - 8.0).collect());
    rows
}

/// Rows that are hard to encode are stored with the bytes of
/// [`RowShape::encode`](kv_rows::RowShape::encode), and decode to finite values.
pub fn hard_rows_are_encoded_bit_for_bit<B: Backend>(subject: &Subject<B>) {
    let backend = &subject.backend;
    let dims = [(2, 64, 32), (4, 16, 8), (1, 96, 128), (4, 24, 40)];
    for (types, (heads, k_dim, v_dim)) in subject.combine(&pairs(backend), &dims) {
        let (k, v) = (hard_rows(heads * k_dim), hard_rows(heads * v_dim));
        let layout = layout(1, k.len(), (heads, k_dim, v_dim), &types);
        let mut rows = backend.allocate(&layout).unwrap();
        let cells: Vec<CellIdx> = (0..k.len() as u32).rev().map(CellIdx).collect();
        let args = StoreRows {
            layer: LayerIdx(0),
            k: &k.concat(),
            v: &v.concat(),
            cells: &cells,
        };
        let stored = OneOp::store(&layout, &args).run(backend, &mut rows);
        assert!(stored.unwrap().is_empty());
        let got = dump(backend, &rows);
        let of_layer = layout.layers()[0];
        for (got, shape, values) in [(&got[0], of_layer.k, &k), (&got[1], of_layer.v, &v)] {
            let mut wanted = vec![0; shape.bytes()];
            let mut back = vec![0.0; shape.len()];
            for (got, values) in got.chunks_exact(shape.bytes()).rev().zip(values) {
                shape.encode(values, &mut wanted);
                assert_eq!(got, wanted, "{types}: {shape:?}: {values:?}");
                shape.decode(got, &mut back);
                let cut = !shape.kv_type.is_quantised();
                assert!(
                    cut || back.iter().all(|v| v.is_finite()),
                    "{types}: {values:?}"
                );
            }
        }
    }
}

/// Attention over every pair of types is that of the values which the rows decode to, whether one
/// row asks or many, for heads that are whole blocks and heads that begin inside one.
pub fn attends_over_every_pair_of_types<B: Backend>(subject: &Subject<B>) {
    let backend = &subject.backend;
    let spec = |n_heads, kv_heads, k_dim, v_dim| AttendSpec {
        n_heads,
        kv_heads,
        k_dim,
        v_dim,
        scale: 0.3,
        ..super::attend::SPEC
    };
    let cells: Vec<(u32, u32)> = Random::new(72)
        .permutation(45)
        .into_iter()
        .zip(0..)
        .collect();
    let limits = [2, 37, 44].map(|last| PosRange::new(Pos(1), Pos(last)));
    let group = VisibleGroup::new(vec![0, 1, 2], runs(&cells), limits.to_vec());
    let visibility = Visibility::new(3, vec![group]);
    let specs = [
        spec(4, 2, 64, 32),
        spec(4, 4, 16, 24),
        spec(3, 1, 96, 64),
        spec(2, 2, 48, 80),
    ];
    for (types, spec) in subject.combine(&pairs(backend), &specs) {
        let layout = layout(1, 48, (spec.kv_heads, spec.k_dim, spec.v_dim), &types);
        let mut rows = backend.allocate(&layout).unwrap();
        fill(backend, &mut rows, 73);
        let q = Random::new(74).values(3 * spec.n_heads * spec.k_dim);
        let args = Attend {
            layer: LayerIdx(0),
            spec,
            q: &q,
            visibility: &visibility,
            positions: &[],
            sinks: None,
            spare: CellIdx(45),
        };
        let op = OneOp::attend(&layout, &args);
        let wanted = op.wanted(&layout, &mut read_memory(backend, &rows));
        let got = op.run(backend, &mut rows).unwrap();
        let what = format!("{types}, {:?}, {spec:?}", types.rotation);
        assert_close(&what, &got, &wanted, subject.tolerance.attend);
    }
}
