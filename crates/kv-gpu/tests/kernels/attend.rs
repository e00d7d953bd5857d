//! Attention by tensor cores, of many rows and of groups of heads: every type of K and V, widths of
//! heads, what rows see, and values that halves do not hold, against the definition.
#![allow(clippy::unwrap_used)]

use kv_backend::Backend;
use kv_contract::evaluate::Memory;
use kv_contract::{Attend, OneOp, Random, StoreRows, assert_close};
use kv_core::{
    Causality, CellIdx, CellRun, LayerIdx, Pos, PosRange, Visibility, VisibleGroup, Window,
    layers::{AttentionMemory, LayerMap, LayerMemory},
};
use kv_gpu::{Device, Precision};
use kv_graph::{Alibi, AttendSpec};
use kv_rows::{KvType, KvTypes, RowLayout};

use crate::devices::backends;

/// Weights and queries are halves with 11 bits.
const TOLERANCE: f64 = 4e-3;

const SPEC: AttendSpec = AttendSpec {
    n_heads: 2,
    kv_heads: 2,
    k_dim: 32,
    v_dim: 32,
    scale: 0.2,
    soft_cap: None,
    alibi: None,
};

struct Case<'a> {
    spec: AttendSpec,
    types: KvTypes,
    visibility: Visibility,
    sinks: Option<&'a [f32]>,
    /// By how much queries, keys and values are larger than random values.
    magnitudes: [f32; 3],
}

/// Results by the definition, on tensor cores, and in floats.
struct Attended {
    wanted: Vec<f64>,
    fast: Vec<f32>,
    precise: Vec<f32>,
}

impl Case<'_> {
    fn new(spec: AttendSpec, types: impl Into<KvTypes>, visibility: Visibility) -> Self {
        Self {
            spec,
            types: types.into(),
            visibility,
            sinks: None,
            magnitudes: [1.0; 3],
        }
    }

    /// Compares tensor cores with the definition.
    fn check(&self) {
        let what = format!("{}, {:?}", self.types, self.spec);
        let Attended {
            wanted,
            fast,
            precise,
        } = self.attended();
        assert_close(&what, &fast, &wanted, TOLERANCE);
        // Else tensor cores had nothing to do with it. One row uses them where there are any.
        let device = backends(Precision::Fast).swap_remove(0);
        if self.visibility.n_rows >= 8 || device.device().has_tensor_cores() {
            assert_ne!(fast, precise, "{what}");
        }
    }

    fn attended(&self) -> Attended {
        let (spec, n_rows) = (self.spec, self.visibility.n_rows as usize);
        let runs = self.visibility.groups.iter().flat_map(|group| &group.runs);
        let n_cells = runs.map(|run| run.cell.0 + run.len).max().unwrap_or(0);
        let memory = AttentionMemory {
            kv_heads: spec.kv_heads,
            k_dim: spec.k_dim,
            v_dim: spec.v_dim,
            window: Window::Full,
        };
        let map = LayerMap::new(vec![LayerMemory::Attention(memory)]);
        let layout = RowLayout::new(&map, &[n_cells as usize + n_rows], &self.types).unwrap();
        let mut random = Random::new(31);
        let mut values = |n: usize, magnitude: f32| -> Vec<f32> {
            let values = random.values(n);
            values.iter().map(|v| v * magnitude).collect()
        };
        let n = n_cells as usize * spec.kv_heads;
        let [q, k, v] = [
            (n_rows * spec.n_heads * spec.k_dim, 0),
            (n * spec.k_dim, 1),
            (n * spec.v_dim, 2),
        ]
        .map(|(n, i)| values(n, self.magnitudes[i]));
        let store = OneOp::store(
            &layout,
            &StoreRows {
                layer: LayerIdx(0),
                k: &k,
                v: &v,
                cells: &(0..n_cells).map(CellIdx).collect::<Vec<_>>(),
            },
        );
        let positions: Vec<u32> = (0..n_rows as u32).map(|row| 37 * row % 61).collect();
        let attend = OneOp::attend(
            &layout,
            &Attend {
                layer: LayerIdx(0),
                spec,
                q: &q,
                visibility: &self.visibility,
                positions: &positions,
                sinks: self.sinks,
                spare: CellIdx(n_cells),
            },
        );
        let mut memory = Memory::default();
        store.wanted(&layout, &mut memory);
        let wanted = attend.wanted(&layout, &mut memory);
        let run = |precision| {
            let run_on = |backend| {
                let mut rows = Backend::allocate(&backend, &layout).unwrap();
                store.run(&backend, &mut rows).unwrap();
                attend.run(&backend, &mut rows).unwrap()
            };
            let mut results = backends(precision).into_iter().map(run_on);
            let first: Vec<f32> = results.next().unwrap();
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert!(
                results.all(|other| bits(&other) == bits(&first)),
                "the order of threads matters"
            );
            first
        };
        Attended {
            wanted,
            fast: run(Precision::Fast),
            precise: run(Precision::Precise),
        }
    }
}

/// `n_rows` rows at the last of `n` positions, whose cells are three runs, the last one first.
fn visibility(n_rows: u32, n: u32, window: Window) -> Visibility {
    let lens = [n / 3, n / 2 - n / 3, n - n / 2];
    let (mut pos, mut runs) = (0, Vec::new());
    for len in lens {
        runs.push(CellRun {
            cell: CellIdx(n - pos - len),
            pos: Pos(pos),
            len,
        });
        pos += len;
    }
    let limits =
        (0..n_rows).map(|row| window.visible_keys(Pos(n - n_rows + row), Causality::Causal));
    let group = VisibleGroup::new((0..n_rows).collect(), runs, limits.collect());
    Visibility::new(n_rows, vec![group])
}

#[test]
fn all_types_and_widths_are_attended() {
    let types = KvType::ALL;
    let dims = [(16, 40), (64, 64), (72, 128), (128, 96), (256, 192)];
    let cases = types
        .iter()
        .zip(0..)
        .flat_map(|(&k, i)| [(k, i, 9), (k, i + 2, 2)]);
    for (k, i, n_rows) in cases {
        let (k_dim, v_dim) = dims[i % dims.len()];
        let spec = AttendSpec {
            n_heads: if n_rows == 9 { 4 } else { 12 },
            kv_heads: 4,
            k_dim,
            v_dim,
            ..SPEC
        };
        for v in [k, types[(i + 1) % types.len()]] {
            let types = KvTypes {
                k,
                v,
                ..KvTypes::from(k)
            };
            let seen = visibility(n_rows, 75, Window::Full);
            Case::new(spec, types, seen).check();
        }
    }
}

#[test]
fn all_that_rows_see_is_attended() {
    // More than a tile of queries, groups that tiles cut, pieces that are merged.
    for (n_heads, kv_heads, n_rows, n, window) in [
        (1, 1, 70, 130, Window::Full),
        (14, 2, 11, 64, Window::Full),
        (9, 3, 40, 41, Window::Sliding(7)),
        (4, 1, 8, 1100, Window::Sliding(600)),
        (4, 2, 33, 200, Window::Chunked(16)),
        (2, 2, 20, 100, Window::Symmetric(9)),
        // A row by itself: groups of more heads than a block has, tiles of which warps see nothing.
        (40, 2, 1, 130, Window::Full),
        (14, 2, 3, 700, Window::Full),
        (6, 2, 5, 300, Window::Sliding(90)),
        (8, 1, 2, 19, Window::Full),
    ] {
        let spec = AttendSpec {
            n_heads,
            kv_heads,
            ..SPEC
        };
        Case::new(spec, KvType::F16, visibility(n_rows, n, window)).check();
        Case::new(spec, KvType::Q8_0, visibility(n_rows, n, window)).check();
    }
}

#[test]
fn rows_of_several_texts_are_attended() {
    // Each text sees its own cells; one row sees nothing.
    let text = |rows: std::ops::Range<u32>, first_cell: u32| {
        let runs = vec![CellRun {
            cell: CellIdx(first_cell),
            pos: Pos(3),
            len: 50,
        }];
        let limits = rows
            .clone()
            .map(|row| PosRange::new(Pos(row), Pos(20 + row)));
        VisibleGroup::new(rows.collect(), runs, limits.collect())
    };
    let mut groups = vec![text(0..10, 0), text(10..12, 60), text(12..30, 120)];
    groups[2].limits[4] = PosRange::EMPTY;
    Case::new(SPEC, KvType::BF16, Visibility::new(30, groups)).check();
}

#[test]
fn caps_biases_and_sinks_are_applied() {
    let spec = AttendSpec { n_heads: 6, ..SPEC };
    let capped = AttendSpec {
        soft_cap: Some(1.5),
        scale: 0.5,
        ..spec
    };
    let biased = AttendSpec {
        alibi: Some(Alibi::new(8.0)),
        ..spec
    };
    let sinks = [0.0, -3.0, 2.5, 6.0, f32::NEG_INFINITY, -80.0];
    for spec in [spec, capped, biased] {
        for n_rows in [12, 3] {
            let case = Case::new(spec, KvType::F16, visibility(n_rows, 90, Window::Full));
            Case {
                sinks: Some(&sinks),
                ..case
            }
            .check();
        }
    }
}

#[test]
fn scores_that_are_no_numbers_are_seen() {
    for magnitudes in [[f32::NAN, 1.0, 1.0], [1.0, f32::NAN, 1.0]] {
        for n_rows in [9, 2] {
            let seen = visibility(n_rows, 75, Window::Full);
            let spec = AttendSpec { n_heads: 6, ..SPEC };
            let case = Case::new(spec, KvType::F32, seen);
            let got = Case { magnitudes, ..case }.attended();
            for (what, values) in [("fast", got.fast), ("precise", got.precise)] {
                assert!(values.iter().all(|y| y.is_nan()), "{what}, {magnitudes:?}");
            }
        }
    }
}

/// Halves end at 65504 and have few bits below 2^-14.
#[test]
fn values_that_halves_do_not_hold_are_attended() {
    for types in [KvType::F32, KvType::BF16] {
        for magnitudes in [
            [1e6, 1e-6, 1e7],
            [1e-9, 1e9, 1e-7],
            [3e20, 3e-21, 1e30],
            [1.0, 1.0, 1e-30],
        ] {
            let spec = AttendSpec { n_heads: 6, ..SPEC };
            for n_rows in [9, 2] {
                let case = Case::new(spec, types, visibility(n_rows, 140, Window::Full));
                Case { magnitudes, ..case }.check();
            }
        }
    }
}
