//! The contract of stored rows: what is written comes back, and nothing else changes.

use super::scene::{fitting, layout};
use super::{OneOp, Random, StoreRows, Subject};
use kv_backend::{Backend, BackendError, RowKind, RowSpan, RowStorage};
use kv_core::{
    CellIdx, LayerIdx, PartIdx, Window,
    layers::{AttentionMemory, LayerMap, LayerMemory},
    memory::RowCopy,
};
use kv_rows::{KvType, LayerRows, MemoryPlan, PlannedKind, RowLayout, RowShape};

const KINDS: [RowKind; 2] = [RowKind::K, RowKind::V];

fn shape(layer: &LayerRows, kind: RowKind) -> RowShape {
    match kind {
        RowKind::K => layer.k,
        RowKind::V => layer.v,
        other => panic!("{other:?} rows belong to recurrent layers"),
    }
}

/// Three heads of 10 and 6 values, or what rows of `kv_type` can have.
fn dims(kv_type: KvType) -> (usize, usize, usize) {
    (3, fitting(3, 10, kv_type), fitting(3, 6, kv_type))
}

fn span(layer: u32, kind: RowKind, first: u32, len: u32) -> RowSpan {
    RowSpan {
        layer: LayerIdx(layer),
        kind,
        first: CellIdx(first),
        len,
    }
}

/// All bytes of all rows, layer after layer, K before V.
pub(super) fn dump<B: Backend>(backend: &B, rows: &B::Rows) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for layer in rows.layout().layers() {
        for kind in KINDS {
            let mut bytes = vec![0xaa; shape(layer, kind).bytes() * layer.n_rows];
            let span = span(layer.layer.0, kind, 0, layer.n_rows as u32);
            backend.read_rows(rows, span, &mut bytes).unwrap();
            all.push(bytes);
        }
    }
    all
}

/// Fills all rows with encoded random values and returns what [`dump`] must give.
pub(super) fn fill<B: Backend>(backend: &B, rows: &mut B::Rows, seed: u64) -> Vec<Vec<u8>> {
    let mut random = Random::new(seed);
    let layers = rows.layout().layers().to_vec();
    let mut all = Vec::new();
    for layer in &layers {
        for kind in KINDS {
            let shape = shape(layer, kind);
            let mut bytes = vec![0; shape.bytes() * layer.n_rows];
            for row in bytes.chunks_exact_mut(shape.bytes()) {
                shape.encode(&random.values(shape.len()), row);
            }
            let span = span(layer.layer.0, kind, 0, layer.n_rows as u32);
            backend.write_rows(rows, span, &bytes).unwrap();
            all.push(bytes);
        }
    }
    all
}

/// The backend has a name and a device, and stores at least one type, each named once.
pub fn info_names_the_backend_and_its_types<B: Backend>(subject: &Subject<B>) {
    let info = subject.backend.info();
    assert!(!info.name.is_empty() && !info.device.is_empty(), "{info:?}");
    let mut types = info.kv_types.clone();
    types.sort_unstable();
    types.dedup();
    assert!(
        !types.is_empty() && types.len() == info.kv_types.len(),
        "{info:?}"
    );
}

/// New rows hold zeros, and the layout comes back.
pub fn fresh_rows_are_zero<B: Backend>(subject: &Subject<B>) {
    for kv_type in subject.backend.info().kv_types {
        let layout = layout(2, 5, dims(kv_type), kv_type);
        let rows = subject.backend.allocate(&layout).unwrap();
        assert_eq!(rows.layout(), &layout);
        assert!(
            dump(&subject.backend, &rows)
                .iter()
                .flatten()
                .all(|&b| b == 0),
            "{kv_type}"
        );
    }
    let nothing = subject.backend.allocate(&RowLayout::default()).unwrap();
    assert!(dump(&subject.backend, &nothing).is_empty());
}

/// The storage takes what the plan said, layer by layer and kind by kind.
pub fn allocated_bytes_are_as_planned<B: Backend>(subject: &Subject<B>) {
    let backend = &subject.backend;
    for kv_type in backend.info().kv_types {
        let layout = layout(2, 7, dims(kv_type), kv_type);
        let rows = backend.allocate(&layout).unwrap();
        let plan = MemoryPlan::new(&layout);
        for planned in plan.rows() {
            let kind = match planned.kind {
                PlannedKind::K => RowKind::K,
                _ => RowKind::V,
            };
            let bytes = rows.allocated_bytes(planned.layer, kind).unwrap();
            assert_eq!(bytes as u64, planned.bytes(), "{planned:?}");
        }
        assert_eq!(plan.rows().len(), 4);
        let none = LayerIdx(2);
        assert!(matches!(
            rows.allocated_bytes(none, RowKind::K),
            Err(BackendError::NoRows { layer }) if layer == none
        ));
    }
}

/// Written bytes are read back, whole and in parts.
pub fn written_rows_read_back<B: Backend>(subject: &Subject<B>) {
    let backend = &subject.backend;
    for kv_type in backend.info().kv_types {
        let layout = layout(2, 9, dims(kv_type), kv_type);
        let mut rows = backend.allocate(&layout).unwrap();
        let wanted = fill(backend, &mut rows, 1);
        assert_eq!(dump(backend, &rows), wanted);
        let row = layout.layers()[1].v.bytes();
        let mut part = vec![0; 3 * row];
        backend
            .read_rows(&rows, span(1, RowKind::V, 4, 3), &mut part)
            .unwrap();
        assert_eq!(part, wanted[3][4 * row..7 * row]);
        backend
            .write_rows(&mut rows, span(1, RowKind::V, 0, 3), &part)
            .unwrap();
        let mut expected = wanted;
        expected[3][..3 * row].copy_from_slice(&part);
        assert_eq!(dump(backend, &rows), expected);
    }
}

fn stored<B: Backend>(subject: &Subject<B>, kv_type: KvType) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let backend = &subject.backend;
    let layout = layout(2, 11, dims(kv_type), kv_type);
    let mut rows = backend.allocate(&layout).unwrap();
    let mut wanted = fill(backend, &mut rows, 2);
    let mut random = Random::new(3);
    let cells = [CellIdx(7), CellIdx(0), CellIdx(10), CellIdx(8)];
    let [n_k, n_v] = [layout.layers()[1].k.len(), layout.layers()[1].v.len()];
    let (mut k, mut v) = (random.values(4 * n_k), random.values(4 * n_v));
    // Values that round: ties of f16, subnormals, an infinity of f16, signed zero.
    k[..6].copy_from_slice(&[2049.0, 2051.0, 5e-8, 1e-42, 1e9, -0.0]);
    v[..3].copy_from_slice(&[-65520.0, 65519.0, 0.1]);
    let args = StoreRows {
        layer: LayerIdx(1),
        k: &k,
        v: &v,
        cells: &cells,
    };
    OneOp::store(&layout, &args)
        .run(backend, &mut rows)
        .unwrap();
    for (at, cell) in cells.iter().enumerate() {
        for (values, shape, bytes) in [(&k, layout.layers()[1].k, 2), (&v, layout.layers()[1].v, 3)]
        {
            let (n, size) = (shape.len(), shape.bytes());
            let row = &mut wanted[bytes][cell.as_usize() * size..][..size];
            shape.encode(&values[at * n..][..n], row);
        }
    }
    (dump(backend, &rows), wanted)
}

/// Stored rows hold exactly the bytes of [`RowShape::encode`].
pub fn stored_rows_are_encoded_bit_for_bit<B: Backend>(subject: &Subject<B>) {
    for kv_type in subject.backend.info().kv_types {
        let (got, wanted) = stored(subject, kv_type);
        let (heads, k_dim, v_dim) = dims(kv_type);
        let [k, v] = [k_dim, v_dim].map(|dim| kv_type.row_bytes(heads * dim));
        for cell in [7, 0, 10, 8] {
            assert_eq!(
                got[2][cell * k..][..k],
                wanted[2][cell * k..][..k],
                "{kv_type} K {cell}"
            );
            assert_eq!(
                got[3][cell * v..][..v],
                wanted[3][cell * v..][..v],
                "{kv_type} V {cell}"
            );
        }
    }
}

/// Storing changes the named rows of the named layer only.
pub fn storing_touches_no_other_row<B: Backend>(subject: &Subject<B>) {
    for kv_type in subject.backend.info().kv_types {
        let (got, wanted) = stored(subject, kv_type);
        assert!(got == wanted, "{kv_type}: another row changed");
    }
}

/// Two layers of one part around one of another part.
fn two_parts(kv_type: KvType) -> RowLayout {
    let layer = |window| {
        LayerMemory::Attention(AttentionMemory {
            kv_heads: 2,
            k_dim: fitting(2, 6, kv_type),
            v_dim: fitting(2, 4, kv_type),
            window,
        })
    };
    let windows = [Window::Full, Window::Sliding(4), Window::Full];
    RowLayout::new(
        &LayerMap::new(windows.map(layer).to_vec()),
        &[8, 6],
        kv_type,
    )
    .unwrap()
}

/// A copy moves K and V of every layer of its part, and nothing else.
pub fn copies_move_whole_rows_of_one_part<B: Backend>(subject: &Subject<B>) {
    let backend = &subject.backend;
    for kv_type in backend.info().kv_types {
        let mut rows = backend.allocate(&two_parts(kv_type)).unwrap();
        let mut wanted = fill(backend, &mut rows, 4);
        let copy = RowCopy {
            part: PartIdx(0),
            from: CellIdx(1),
            to: CellIdx(5),
            len: 3,
        };
        backend.copy_rows(&mut rows, &[copy]).unwrap();
        let [k, v] = [6, 4].map(|dim| kv_type.row_bytes(2 * fitting(2, dim, kv_type)));
        for (bytes, row) in [(0, k), (1, v), (4, k), (5, v)] {
            wanted[bytes].copy_within(row..4 * row, 5 * row);
        }
        assert_eq!(dump(backend, &rows), wanted, "{kv_type}");
    }
}

/// A later copy sees what an earlier one wrote; none at all is fine, too.
pub fn copies_happen_in_order<B: Backend>(subject: &Subject<B>) {
    let backend = &subject.backend;
    for kv_type in backend.info().kv_types {
        let mut rows = backend.allocate(&two_parts(kv_type)).unwrap();
        let mut wanted = fill(backend, &mut rows, 5);
        let copy = |from, to, len| RowCopy {
            part: PartIdx(1),
            from: CellIdx(from),
            to: CellIdx(to),
            len,
        };
        backend
            .copy_rows(&mut rows, &[copy(0, 3, 2), copy(3, 1, 1), copy(2, 5, 0)])
            .unwrap();
        backend.copy_rows(&mut rows, &[]).unwrap();
        let [k, v] = [6, 4].map(|dim| kv_type.row_bytes(2 * fitting(2, dim, kv_type)));
        for (bytes, row) in [(2, k), (3, v)] {
            wanted[bytes].copy_within(..2 * row, 3 * row);
            wanted[bytes].copy_within(3 * row..4 * row, row);
        }
        assert_eq!(dump(backend, &rows), wanted, "{kv_type}");
    }
}

/// Rows beyond the last, and layers without rows, are errors with numbers; nothing changes.
pub fn rows_out_of_range_are_refused<B: Backend>(subject: &Subject<B>) {
    let backend = &subject.backend;
    let kv_type = backend.info().kv_types[0];
    let mut rows = backend.allocate(&layout(1, 4, (1, 4, 4), kv_type)).unwrap();
    let wanted = fill(backend, &mut rows, 6);
    let mut bytes = vec![0; kv_type.row_bytes(4) * 2];
    for (layer, first) in [(0, 3), (0, 4), (0, u32::MAX), (1, 0)] {
        let span = span(layer, RowKind::K, first, 2);
        let read = backend.read_rows(&rows, span, &mut bytes).unwrap_err();
        let written = backend.write_rows(&mut rows, span, &bytes).unwrap_err();
        for error in [read, written] {
            let right = match layer {
                0 => matches!(error, BackendError::RowOutOfRange { n_rows: 4, .. }),
                _ => matches!(error, BackendError::NoRows { layer: LayerIdx(1) }),
            };
            assert!(right, "{span:?}: {error}");
        }
    }
    for (from, to) in [(3, 0), (0, 3), (u32::MAX, 0)] {
        let copy = RowCopy {
            part: PartIdx(0),
            from: CellIdx(from),
            to: CellIdx(to),
            len: 2,
        };
        let error = backend.copy_rows(&mut rows, &[copy]).unwrap_err();
        assert!(
            matches!(error, BackendError::RowOutOfRange { n_rows: 4, .. }),
            "{error}"
        );
    }
    assert_eq!(dump(backend, &rows), wanted);
}

/// Buffers that do not fit their span are errors.
pub fn buffers_of_the_wrong_length_are_refused<B: Backend>(subject: &Subject<B>) {
    let backend = &subject.backend;
    let kv_type = backend.info().kv_types[0];
    let mut rows = backend.allocate(&layout(1, 4, (1, 4, 6), kv_type)).unwrap();
    let wanted = fill(backend, &mut rows, 7);
    let is_length = |error: BackendError| {
        assert!(matches!(error, BackendError::WrongLength { .. }), "{error}");
    };
    for n in [0, 7, 9, 16] {
        let mut bytes = vec![0; kv_type.row_bytes(n)];
        let span = span(0, RowKind::K, 0, 2);
        is_length(backend.read_rows(&rows, span, &mut bytes).unwrap_err());
        is_length(backend.write_rows(&mut rows, span, &bytes).unwrap_err());
    }
    assert_eq!(dump(backend, &rows), wanted);
}

/// A type that the backend does not declare is refused by name; declared ones are stored.
pub fn undeclared_kv_types_are_refused<B: Backend>(subject: &Subject<B>) {
    let declared = subject.backend.info().kv_types;
    for kv_type in KvType::ALL {
        let dim = fitting(1, 4, kv_type);
        let layout = layout(1, 2, (1, dim, dim), kv_type);
        match subject.backend.allocate(&layout) {
            Ok(_) => assert!(
                declared.contains(&kv_type),
                "{kv_type} works but is not declared"
            ),
            Err(BackendError::UnsupportedKvType { kv_type: named, .. }) => {
                assert!(
                    named == kv_type && !declared.contains(&kv_type),
                    "{kv_type} is declared"
                );
            }
            Err(error) => panic!("{kv_type}: {error}"),
        }
    }
}
