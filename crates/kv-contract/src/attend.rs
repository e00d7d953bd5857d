//! The contract of attention: the definition in `f64`, over every kind of visibility.

use super::scene::{fitting, layout, runs};
use super::{Random, Subject, assert_close, attend_by_definition};
use kv_core::backend::{Attend, Backend, BackendError};
use kv_core::graph::{Alibi, AttendSpec};
use kv_core::{
    Causality, CellIdx, CellRun, KvType, LayerIdx, Pos, PosRange, Visibility, VisibleGroup, Window,
};

pub(super) const SPEC: AttendSpec = AttendSpec {
    n_heads: 2,
    kv_heads: 2,
    k_dim: 8,
    v_dim: 8,
    scale: 0.35,
    soft_cap: None,
    alibi: None,
};

/// Compares `attend` with its definition on random rows, for every type that is declared.
/// Rows `0..n_rows` of the queries are those of `visibility`.
fn compare<B: Backend>(
    subject: &Subject<B>,
    spec: AttendSpec,
    (visibility, n_cells): (&Visibility, u32),
) {
    compare_with(subject, spec, (visibility, n_cells), None);
}

/// The same with sinks, where given.
fn compare_with<B: Backend>(
    subject: &Subject<B>,
    spec: AttendSpec,
    (visibility, n_cells): (&Visibility, u32),
    sinks: Option<&[f32]>,
) {
    visibility.check(n_cells).unwrap();
    let backend = &subject.backend;
    // Anything does: only distances matter.
    let positions: Vec<u32> = (0..visibility.n_rows).map(|row| 37 * row % 61).collect();
    for kv_type in backend.info().kv_types {
        let spec = AttendSpec {
            k_dim: fitting(spec.kv_heads, spec.k_dim, kv_type),
            v_dim: fitting(spec.kv_heads, spec.v_dim, kv_type),
            ..spec
        };
        let layout = layout(
            2,
            n_cells as usize,
            (spec.kv_heads, spec.k_dim, spec.v_dim),
            kv_type,
        );
        let mut rows = backend.allocate(&layout).unwrap();
        super::rows::fill(backend, &mut rows, 11);
        let n_rows = visibility.n_rows as usize;
        let mut random = Random::new(12);
        let q: Vec<f32> = random.values(n_rows * spec.n_heads * spec.k_dim);
        let args = Attend {
            layer: LayerIdx(1),
            spec,
            q: &q,
            visibility,
            positions: &positions,
            sinks,
        };
        // What was in the output before must not matter.
        let mut got = vec![f32::NAN; n_rows * spec.n_heads * spec.v_dim];
        backend.attend(&rows, args, &mut got).unwrap();
        let mut wanted = vec![0.0; got.len()];
        attend_by_definition(backend, &rows, args, &mut wanted).unwrap();
        let wanted: Vec<f64> = wanted.iter().map(|&w| f64::from(w)).collect();
        assert_close(
            &format!("{kv_type} rows"),
            &got,
            &wanted,
            subject.tolerance.attend,
        );
    }
}

/// `n_rows` rows at the last positions of `cells` (which lists the cell of each position).
fn causal(cells: &[u32], n_rows: u32, window: Window) -> VisibleGroup {
    let cells: Vec<(u32, u32)> = cells.iter().copied().zip(0..).collect();
    let first = cells.len() as u32 - n_rows;
    let limits = (0..n_rows).map(|r| window.visible_keys(Pos(first + r), Causality::Causal));
    VisibleGroup::new((0..n_rows).collect(), runs(&cells), limits.collect())
}

/// One row and many, few cells and many, in order.
pub fn attends_over_everything<B: Backend>(subject: &Subject<B>) {
    for (n_rows, n_cells) in [
        (1, 1),
        (1, 31),
        (1, 32),
        (1, 33),
        (1, 130),
        (5, 40),
        (37, 100),
    ] {
        let cells: Vec<u32> = (0..n_cells).collect();
        let visibility = Visibility::new(n_rows, vec![causal(&cells, n_rows, Window::Full)]);
        compare(subject, SPEC, (&visibility, n_cells));
    }
}

/// Every kind of window.
pub fn attends_through_windows<B: Backend>(subject: &Subject<B>) {
    let cells: Vec<u32> = (0..100).collect();
    for window in [
        Window::Sliding(7),
        Window::Sliding(40),
        Window::Chunked(16),
        Window::Symmetric(9),
    ] {
        let visibility = Visibility::new(35, vec![causal(&cells, 35, window)]);
        compare(subject, SPEC, (&visibility, 100));
    }
}

/// Cells in random order, with holes in the positions.
pub fn attends_over_scattered_cells<B: Backend>(subject: &Subject<B>) {
    let mut random = Random::new(21);
    let cells = random.permutation(90);
    let visibility = Visibility::new(9, vec![causal(&cells, 9, Window::Full)]);
    compare(subject, SPEC, (&visibility, 90));
    // Every third position was removed.
    let holed: Vec<(u32, u32)> = cells
        .iter()
        .copied()
        .zip(0..)
        .filter(|(_, pos)| pos % 3 != 1)
        .collect();
    let limits = (0..9)
        .map(|r| PosRange::new(Pos(5), Pos(70 + 2 * r)))
        .collect();
    let group = VisibleGroup::new((0..9).collect(), runs(&holed), limits);
    compare(subject, SPEC, (&Visibility::new(9, vec![group]), 90));
}

/// Several texts that share the cells of their beginning.
pub fn attends_over_shared_cells<B: Backend>(subject: &Subject<B>) {
    let shared: Vec<(u32, u32)> = (0..40).map(|pos| (pos, pos)).collect();
    let text = |rows: [u32; 2], own: u32| {
        let mut cells = shared.clone();
        cells.extend((0..3).map(|i| (own + i, 40 + i)));
        let limits = [41, 42]
            .map(|last| PosRange::new(Pos(0), Pos(last)))
            .to_vec();
        VisibleGroup::new(rows.to_vec(), runs(&cells), limits)
    };
    let visibility = Visibility::new(
        6,
        vec![text([0, 3], 50), text([1, 5], 43), text([2, 4], 60)],
    );
    compare(subject, SPEC, (&visibility, 64));
}

/// Several cells at one position, as with images: ties go by cell.
pub fn attends_over_cells_of_one_position<B: Backend>(subject: &Subject<B>) {
    let cells: Vec<(u32, u32)> = (0..80).map(|cell| (cell, 20 + cell / 5)).collect();
    let limits = (0..4)
        .map(|r| PosRange::new(Pos(20 + r), Pos(30 + r)))
        .collect();
    let group = VisibleGroup::new((0..4).collect(), runs(&cells), limits);
    compare(subject, SPEC, (&Visibility::new(4, vec![group]), 80));
}

/// Several query heads on one key/value head.
pub fn attends_with_grouped_heads<B: Backend>(subject: &Subject<B>) {
    let cells: Vec<u32> = (0..70).collect();
    for (n_heads, kv_heads) in [(4, 1), (6, 2), (14, 2), (9, 3)] {
        let spec = AttendSpec {
            n_heads,
            kv_heads,
            ..SPEC
        };
        for n_rows in [1, 11] {
            let visibility = Visibility::new(n_rows, vec![causal(&cells, n_rows, Window::Full)]);
            compare(subject, spec, (&visibility, 70));
        }
    }
}

/// Values wider or narrower than keys, and widths that fill no vector register.
pub fn attends_with_other_value_widths<B: Backend>(subject: &Subject<B>) {
    let cells: Vec<u32> = (0..50).collect();
    for (k_dim, v_dim) in [(64, 32), (16, 48), (5, 3), (96, 128), (1, 1), (20, 72)] {
        let spec = AttendSpec {
            n_heads: 4,
            k_dim,
            v_dim,
            ..SPEC
        };
        let visibility = Visibility::new(6, vec![causal(&cells, 6, Window::Full)]);
        compare(subject, spec, (&visibility, 50));
    }
}

/// A soft cap on the scores.
pub fn attends_with_a_soft_cap<B: Backend>(subject: &Subject<B>) {
    let spec = AttendSpec {
        soft_cap: Some(2.5),
        scale: 1.5,
        ..SPEC
    };
    let cells: Vec<u32> = (0..50).collect();
    let visibility = Visibility::new(6, vec![causal(&cells, 6, Window::Full)]);
    compare(subject, spec, (&visibility, 50));
}

/// Sinks: small ones, large ones, and none at all (`-inf`); with rows that see nothing.
pub fn attends_with_sinks<B: Backend>(subject: &Subject<B>) {
    let cells: Vec<u32> = (0..70).collect();
    let mut group = causal(&cells, 9, Window::Full);
    group.limits[4] = PosRange::EMPTY;
    let visibility = Visibility::new(9, vec![group]);
    let spec = AttendSpec {
        n_heads: 6,
        soft_cap: Some(3.0),
        ..SPEC
    };
    let sinks = [0.0, -3.0, 2.5, 60.0, f32::NEG_INFINITY, -80.0];
    compare_with(subject, spec, (&visibility, 70), Some(&sinks));
    let one = Visibility::new(1, vec![causal(&cells, 1, Window::Sliding(3))]);
    compare_with(subject, spec, (&one, 70), Some(&sinks));
}

/// Linear biases, for numbers of heads that are powers of two and others, on keys before and behind
/// the query.
pub fn attends_with_linear_biases<B: Backend>(subject: &Subject<B>) {
    let cells: Vec<u32> = Random::new(22).permutation(90);
    for (n_heads, kv_heads, sinks) in [
        (1, 1, None),
        (6, 2, None),
        (12, 3, Some(&[0.4; 12][..])),
        (8, 1, None),
    ] {
        let spec = AttendSpec {
            n_heads,
            kv_heads,
            alibi: Some(Alibi { max_bias: 8.0 }),
            ..SPEC
        };
        for n_rows in [1, 7] {
            let visibility = Visibility::new(n_rows, vec![causal(&cells, n_rows, Window::Full)]);
            compare_with(subject, spec, (&visibility, 90), sinks);
        }
    }
}

/// Scores of hundreds, beyond what `exp` can take without the maximum being subtracted.
pub fn attends_with_large_scores<B: Backend>(subject: &Subject<B>) {
    let cells: Vec<u32> = (0..100).collect();
    let visibility = Visibility::new(6, vec![causal(&cells, 6, Window::Full)]);
    // Scores grow with the magnitude, and so does what rounding does to their differences.
    let subject = &subject;
    let magnitude = 300.0;
    let backend = &subject.backend;
    for kv_type in backend.info().kv_types {
        let dim = fitting(2, 8, kv_type);
        let layout = layout(1, 100, (2, dim, dim), kv_type);
        let mut rows = backend.allocate(&layout).unwrap();
        super::rows::fill(backend, &mut rows, 13);
        let q = Random::new(14).values(6 * 2 * dim);
        let q: Vec<f32> = q.iter().map(|v| v * magnitude).collect();
        let args = Attend {
            layer: LayerIdx(0),
            spec: AttendSpec {
                k_dim: dim,
                v_dim: dim,
                ..SPEC
            },
            q: &q,
            visibility: &visibility,
            positions: &[],
            sinks: None,
        };
        let mut got = vec![f32::NAN; q.len()];
        backend.attend(&rows, args, &mut got).unwrap();
        let mut wanted = vec![0.0; got.len()];
        attend_by_definition(backend, &rows, args, &mut wanted).unwrap();
        let wanted: Vec<f64> = wanted.iter().map(|&w| f64::from(w)).collect();
        let allowed = subject.tolerance.attend * f64::from(magnitude);
        assert_close(&format!("{kv_type} rows"), &got, &wanted, allowed);
    }
}

/// Rows with no run, with runs outside their limits, and in no group at all give zeros.
pub fn a_row_that_sees_nothing_is_zero<B: Backend>(subject: &Subject<B>) {
    let cells: Vec<(u32, u32)> = (0..20).map(|i| (i, 30 + i)).collect();
    let within = PosRange::new(Pos(0), Pos(40));
    let before = PosRange::new(Pos(0), Pos(29));
    let seeing = VisibleGroup::new(
        vec![0, 2, 4],
        runs(&cells),
        vec![within, before, PosRange::EMPTY],
    );
    let blind = VisibleGroup::new(vec![1, 3], vec![], vec![within, PosRange::ALL]);
    let visibility = Visibility::new(5, vec![seeing, blind]);
    compare(subject, SPEC, (&visibility, 20));
    let backend = &subject.backend;
    let mut rows = backend
        .allocate(&layout(1, 20, (2, 8, 8), backend.info().kv_types[0]))
        .unwrap();
    super::rows::fill(backend, &mut rows, 15);
    let q = Random::new(16).values(5 * 16);
    let mut out = vec![f32::NAN; 5 * 16];
    let args = Attend {
        layer: LayerIdx(0),
        spec: SPEC,
        q: &q,
        visibility: &visibility,
        positions: &[],
        sinks: None,
    };
    backend.attend(&rows, args, &mut out).unwrap();
    assert!(out[..16].iter().any(|&v| v != 0.0));
    assert!(out[16..].iter().all(|&v| v == 0.0), "{out:?}");
}

/// Queries, outputs, cells or heads that do not fit are errors, not panics.
pub fn bad_attention_is_refused<B: Backend>(subject: &Subject<B>) {
    let backend = &subject.backend;
    let kv_type: KvType = backend.info().kv_types[0];
    let rows = backend
        .allocate(&layout(1, 20, (2, 8, 8), kv_type))
        .unwrap();
    let cells: Vec<u32> = (0..20).collect();
    let good = Visibility::new(2, vec![causal(&cells, 2, Window::Full)]);
    let mut outside = good.clone();
    outside.groups[0].runs[0] = CellRun {
        cell: CellIdx(1),
        pos: Pos(0),
        len: 20,
    };
    let mut too_many = good.clone();
    too_many.groups[0].rows[1] = 2;
    let attend = |layer: u32, spec, visibility: &Visibility, n_q: usize, n_out: usize| {
        let (q, mut out) = (vec![0.5; n_q], vec![0.0; n_out]);
        let args = Attend {
            layer: LayerIdx(layer),
            spec,
            q: &q,
            visibility,
            positions: &[],
            sinks: None,
        };
        backend.attend(&rows, args, &mut out)
    };
    attend(0, SPEC, &good, 32, 32).unwrap();
    let is = |result: Result<(), BackendError>, right: fn(&BackendError) -> bool| {
        let error = result.unwrap_err();
        assert!(right(&error), "{error:?}");
    };
    is(attend(0, SPEC, &good, 32, 31), |e| {
        matches!(e, BackendError::WrongLength { .. })
    });
    is(attend(0, SPEC, &good, 16, 16), |e| {
        matches!(
            e,
            BackendError::WrongLength { .. } | BackendError::Input { .. }
        )
    });
    is(attend(0, SPEC, &too_many, 32, 32), |e| {
        matches!(
            e,
            BackendError::WrongLength { .. } | BackendError::Input { .. }
        )
    });
    is(attend(0, SPEC, &outside, 32, 32), |e| {
        matches!(
            e,
            BackendError::RowOutOfRange { .. } | BackendError::Input { .. }
        )
    });
    is(attend(1, SPEC, &good, 32, 32), |e| {
        matches!(e, BackendError::NoRows { .. })
    });
    let (q, mut out) = ([0.5; 32], [0.0; 32]);
    let mut beside = |spec, positions: &[u32], sinks: Option<&[f32]>| {
        let args = Attend {
            layer: LayerIdx(0),
            spec,
            q: &q,
            visibility: &good,
            positions,
            sinks,
        };
        backend.attend(&rows, args, &mut out)
    };
    let biased = AttendSpec {
        alibi: Some(Alibi { max_bias: 8.0 }),
        ..SPEC
    };
    beside(biased, &[18, 19], Some(&[0.5; 2])).unwrap();
    is(beside(biased, &[18], None), |e| {
        matches!(e, BackendError::WrongLength { .. })
    });
    is(beside(SPEC, &[], Some(&[0.5; 3])), |e| {
        matches!(e, BackendError::WrongLength { .. })
    });
    let wide = AttendSpec { k_dim: 16, ..SPEC };
    is(attend(0, wide, &good, 64, 32), |e| {
        matches!(e, BackendError::RowShape { .. })
    });
}
