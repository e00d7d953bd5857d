//! The contract of attention: the definition in `f64`, over every kind of visibility.

use super::one_op::read_memory;
use super::scene::{fitting, layout, runs};
use super::{Attend, OneOp, Random, Subject, assert_close};
use kv_backend::{Backend, BackendError};
use kv_core::{Causality, CellIdx, LayerIdx, Pos, PosRange, Visibility, VisibleGroup, Window};
use kv_graph::{Alibi, AttendSpec};
use kv_rows::KvType;

pub(super) const SPEC: AttendSpec = AttendSpec {
    n_heads: 2,
    kv_heads: 2,
    k_dim: 8,
    v_dim: 8,
    scale: 0.35,
    soft_cap: None,
    alibi: None,
};

/// Attention over random rows.
struct Case<'a> {
    spec: AttendSpec,
    visibility: &'a Visibility,
    sinks: Option<&'a [f32]>,
    /// Queries are so many times as large as random values are.
    magnitude: f32,
}

/// Attention without sinks.
fn compare<B: Backend>(subject: &Subject<B>, spec: AttendSpec, visibility: &Visibility) {
    Case::new(spec, visibility).compare(subject);
}

impl<'a> Case<'a> {
    fn new(spec: AttendSpec, visibility: &'a Visibility) -> Self {
        Self {
            spec,
            visibility,
            sinks: None,
            magnitude: 1.0,
        }
    }

    /// Compares a backend with the definition, for every type that it declares.
    fn compare<B: Backend>(&self, subject: &Subject<B>) {
        for kv_type in subject.backend.info().kv_types {
            self.compare_type(subject, kv_type);
        }
    }

    fn compare_type<B: Backend>(&self, subject: &Subject<B>, kv_type: KvType) {
        let (backend, visibility) = (&subject.backend, self.visibility);
        let runs = visibility.groups.iter().flat_map(|group| &group.runs);
        let n_cells = runs.map(|run| run.cell.0 + run.len).max().unwrap_or(0);
        visibility.check(n_cells).unwrap();
        let kv_heads = self.spec.kv_heads;
        let spec = AttendSpec {
            k_dim: fitting(kv_heads, self.spec.k_dim, kv_type),
            v_dim: fitting(kv_heads, self.spec.v_dim, kv_type),
            ..self.spec
        };
        let n_rows = visibility.n_rows;
        let widths = (kv_heads, spec.k_dim, spec.v_dim);
        let layout = layout(2, (n_cells + n_rows) as usize, widths, kv_type);
        let mut rows = backend.allocate(&layout).unwrap();
        super::rows::fill(backend, &mut rows, 11);
        let q = Random::new(12).values(n_rows as usize * spec.n_heads * spec.k_dim);
        let q: Vec<f32> = q.iter().map(|v| v * self.magnitude).collect();
        // Anything does: only distances matter.
        let positions: Vec<u32> = (0..n_rows).map(|row| 37 * row % 61).collect();
        let args = Attend {
            layer: LayerIdx(1),
            spec,
            q: &q,
            visibility,
            positions: &positions,
            sinks: self.sinks,
            spare: CellIdx(n_cells),
        };
        let op = OneOp::attend(&layout, &args);
        let wanted = op.wanted(&layout, &mut read_memory(backend, &rows));
        let got = op.run(backend, &mut rows).unwrap();
        // Scores grow with the magnitude, and so does what rounding does to their differences.
        let allowed = subject.tolerance.attend * f64::from(self.magnitude);
        assert_close(&format!("{kv_type} rows"), &got, &wanted, allowed);
        // Rows that see nothing are zeros, not merely small.
        let width = spec.n_heads * spec.v_dim;
        for (row, (got, wanted)) in got.chunks(width).zip(wanted.chunks(width)).enumerate() {
            if wanted.iter().all(|&v| v == 0.0) {
                assert!(got.iter().all(|&v| v == 0.0), "row {row}: {got:?}");
            }
        }
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
    let sizes = [(1, 1), (1, 31), (1, 32), (1, 33), (1, 130)];
    for (n_rows, n_cells) in sizes.into_iter().chain([(5, 40), (37, 100)]) {
        let cells: Vec<u32> = (0..n_cells).collect();
        let visibility = Visibility::new(n_rows, vec![causal(&cells, n_rows, Window::Full)]);
        compare(subject, SPEC, &visibility);
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
        compare(subject, SPEC, &visibility);
    }
}

/// Cells in random order, with holes in the positions.
pub fn attends_over_scattered_cells<B: Backend>(subject: &Subject<B>) {
    let mut random = Random::new(21);
    let cells = random.permutation(90);
    let visibility = Visibility::new(9, vec![causal(&cells, 9, Window::Full)]);
    compare(subject, SPEC, &visibility);
    // Every third position was removed.
    let holed = cells.into_iter().zip(0..).filter(|(_, pos)| pos % 3 != 1);
    let holed: Vec<(u32, u32)> = holed.collect();
    let limits = (0..9).map(|r| PosRange::new(Pos(5), Pos(70 + 2 * r)));
    let group = VisibleGroup::new((0..9).collect(), runs(&holed), limits.collect());
    compare(subject, SPEC, &Visibility::new(9, vec![group]));
}

/// Several texts that share the cells of their beginning.
pub fn attends_over_shared_cells<B: Backend>(subject: &Subject<B>) {
    let shared: Vec<(u32, u32)> = (0..40).map(|pos| (pos, pos)).collect();
    let text = |rows: [u32; 2], own: u32| {
        let mut cells = shared.clone();
        cells.extend((0..3).map(|i| (own + i, 40 + i)));
        let limits = [41, 42].map(|last| PosRange::new(Pos(0), Pos(last)));
        VisibleGroup::new(rows.to_vec(), runs(&cells), limits.to_vec())
    };
    let groups = vec![text([0, 3], 50), text([1, 5], 43), text([2, 4], 60)];
    compare(subject, SPEC, &Visibility::new(6, groups));
}

/// Several cells at one position, as with images: ties go by cell.
pub fn attends_over_cells_of_one_position<B: Backend>(subject: &Subject<B>) {
    let cells: Vec<(u32, u32)> = (0..80).map(|cell| (cell, 20 + cell / 5)).collect();
    let limits = (0..4).map(|r| PosRange::new(Pos(20 + r), Pos(30 + r)));
    let group = VisibleGroup::new((0..4).collect(), runs(&cells), limits.collect());
    compare(subject, SPEC, &Visibility::new(4, vec![group]));
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
            compare(subject, spec, &visibility);
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
        compare(subject, spec, &visibility);
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
    compare(subject, spec, &visibility);
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
    let one = Visibility::new(1, vec![causal(&cells, 1, Window::Sliding(3))]);
    for visibility in [&visibility, &one] {
        let mut case = Case::new(spec, visibility);
        case.sinks = Some(&[0.0, -3.0, 2.5, 60.0, f32::NEG_INFINITY, -80.0]);
        case.compare(subject);
    }
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
            alibi: Some(Alibi::new(8.0)),
            ..SPEC
        };
        for n_rows in [1, 7] {
            let visibility = Visibility::new(n_rows, vec![causal(&cells, n_rows, Window::Full)]);
            let mut case = Case::new(spec, &visibility);
            case.sinks = sinks;
            case.compare(subject);
        }
    }
}

/// Scores of hundreds, beyond what `exp` can take without the maximum being subtracted.
pub fn attends_with_large_scores<B: Backend>(subject: &Subject<B>) {
    let cells: Vec<u32> = (0..100).collect();
    let visibility = Visibility::new(6, vec![causal(&cells, 6, Window::Full)]);
    let mut case = Case::new(SPEC, &visibility);
    case.magnitude = 300.0;
    case.compare(subject);
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
    compare(subject, SPEC, &visibility);
}

/// Layers, heads, sinks or positions that do not fit are errors, not panics.
pub fn bad_attention_is_refused<B: Backend>(subject: &Subject<B>) {
    let backend = &subject.backend;
    let kv_type: KvType = backend.info().kv_types[0];
    let dim = fitting(2, 8, kv_type);
    let spec = AttendSpec {
        k_dim: dim,
        v_dim: dim,
        ..SPEC
    };
    let layout = layout(1, 22, (2, dim, dim), kv_type);
    let mut rows = backend.allocate(&layout).unwrap();
    let cells: Vec<u32> = (0..20).collect();
    let visibility = Visibility::new(2, vec![causal(&cells, 2, Window::Full)]);
    let q = vec![0.5; 8 * dim];
    let mut attend = |layer, spec: AttendSpec, positions: &[u32], sinks: Option<&[f32]>| {
        let args = Attend {
            layer: LayerIdx(layer),
            spec,
            q: &q[..2 * spec.n_heads * spec.k_dim],
            visibility: &visibility,
            positions,
            sinks,
            spare: CellIdx(20),
        };
        OneOp::attend(&layout, &args).run(backend, &mut rows)
    };
    let biased = AttendSpec {
        alibi: Some(Alibi::new(8.0)),
        ..spec
    };
    attend(0, spec, &[], None).unwrap();
    attend(0, biased, &[18, 19], Some(&[0.5; 2])).unwrap();
    let is = |result: Result<Vec<f32>, BackendError>, right: fn(&BackendError) -> bool| {
        let error = result.unwrap_err();
        assert!(right(&error), "{error:?}");
    };
    is(attend(1, spec, &[], None), |e| {
        matches!(e, BackendError::NoRows { .. })
    });
    let wide = AttendSpec {
        k_dim: 2 * dim,
        ..spec
    };
    is(attend(0, wide, &[], None), |e| {
        matches!(e, BackendError::RowShape { .. })
    });
    is(attend(0, biased, &[18], None), |e| {
        matches!(e, BackendError::Input { .. })
    });
    is(attend(0, spec, &[], Some(&[0.5; 3])), |e| {
        matches!(e, BackendError::WeightShape { .. })
    });
}
