//! What is written comes back: windows, sequences without tokens, large rows in pieces, and types.

#![allow(clippy::unwrap_used)] // a test

use std::sync::LazyLock;

use kv_core::{
    cells::Cell,
    ids::{CellIdx, LayerIdx, PartIdx, Pos, SeqId},
    layers::{AttentionMemory, LayerMap, LayerMemory, RecurrentMemory},
    memory::{CellRecord, PartSnapshot, Restoration, RowWrite, Snapshot},
    seq_set::SeqSet,
    window::Window,
};
use kv_rows::{HeadRotation, KvRotation, KvType, KvTypes, MAX_GROUP, RowLayout, RowShape};

use super::frame::{FrameWriter, Section, read};
use super::rows::{RowEncoding, RowFormat, formats};
use super::snapshot::{decode_part, encode_part};
use super::tests::{fingerprint, framed, sections};
use super::write::{META, PART};
use super::{
    Fingerprint, SavedState, StateError, StateToSave, check_kv_type, check_state_type, save,
};
use crate::{RowKind, RowSpan};

static MODEL: LazyLock<Fingerprint> = LazyLock::new(fingerprint);

fn part(window: Window, n_cells: u32) -> PartSnapshot {
    let record = |row| CellRecord {
        row: CellIdx(row),
        cell: Cell::new(Pos(row), SeqSet::one(SeqId(0))),
    };
    PartSnapshot {
        part: PartIdx(0),
        window,
        cells: (0..n_cells).map(record).collect(),
        forgotten: Vec::new(),
    }
}

/// The section that holds these bytes.
fn decoded(payload: Vec<u8>) -> Result<PartSnapshot, StateError> {
    let bytes = framed(&[(PART, payload)]);
    let (_, sections) = read(&bytes)?;
    let section: Section<'_> = sections[0];
    decode_part(&section)
}

#[test]
fn windows_keep_their_numbers_and_come_back() {
    let cases: [(Window, &[u32]); 8] = [
        (Window::Full, &[0, 0]),
        (Window::Sliding(5), &[1, 5]),
        (Window::Chunked(6), &[2, 6]),
        (Window::Symmetric(7), &[3, 7]),
        (Window::Source, &[4, 0]),
        (Window::Older { by: 8, from: 2 }, &[5, 8, 2]),
        (Window::Ends { first: 3, last: 9 }, &[6, 9, 3]),
        (Window::First { n: 4, by: 10 }, &[7, 10, 4]),
    ];
    for (window, words) in cases {
        let bytes = encode_part(&part(window, 1));
        let written: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!(bytes[4..4 + written.len()], written, "{window}");
        assert_eq!(decoded(bytes).unwrap(), part(window, 1));
    }
    // A source has no width.
    let mut wide = encode_part(&part(Window::Source, 1));
    wide[8] = 1;
    let error = decoded(wide).unwrap_err().to_string();
    assert!(error.contains("no window of kind 4"), "{error}");
}

#[test]
fn sections_are_as_long_as_announced() {
    let mut bytes = Vec::new();
    let mut frame = FrameWriter::new(&mut bytes, 1, 100).unwrap();
    let mut section = frame.begin(META, 3).unwrap();
    assert!(section.write(b"four").is_err());
    section.write(b"tw").unwrap();
    assert!(section.end().is_err());
}

/// A layer of one head for keys of `k_dim` values and values of `v_dim`.
fn attention(k_dim: usize, v_dim: usize) -> LayerMemory {
    LayerMemory::Attention(AttentionMemory {
        kv_heads: 1,
        k_dim,
        v_dim,
        window: Window::Full,
    })
}

fn layout(layer: LayerMemory, n_rows: usize, types: impl Into<KvTypes>) -> RowLayout {
    let map = LayerMap::new(vec![layer]);
    let is_recurrent = map.recurrent(LayerIdx(0)).is_some();
    let cells = if is_recurrent { vec![] } else { vec![n_rows] };
    let layout = RowLayout::new(&map, &cells, types).unwrap();
    layout.with_states(&map, n_rows).unwrap()
}

fn to_save<'a>(snapshot: &'a Snapshot, layout: &'a RowLayout) -> StateToSave<'a> {
    StateToSave {
        fingerprint: &MODEL,
        snapshot,
        tokens: &[],
        layout,
        kv_type: None,
        state_type: None,
        note: "",
    }
}

/// The way the rows of each kind are saved.
fn saved_as(state: &StateToSave<'_>) -> Vec<(RowKind, RowEncoding)> {
    let mut bytes = Vec::new();
    save(state, &mut |_, _| Ok(()), &mut bytes).unwrap();
    let state = SavedState::parse(&bytes).unwrap();
    let formats = state.rows().iter().map(|rows| rows.format);
    formats.map(|rows| (rows.kind, rows.stored)).collect()
}

#[test]
fn sequences_without_tokens_come_back_as_such() {
    let empty: SeqSet = [1, 3, 4, 6].into_iter().map(SeqId).collect();
    let all = SeqSet::one(SeqId(0)).union(&empty);
    let snapshot = Snapshot::new(vec![part(Window::Full, 2)], None);
    let snapshot = snapshot.unwrap().of_seqs(&all);
    let layout = layout(attention(2, 1), 2, KvType::F16);
    let mut bytes = Vec::new();
    save(&to_save(&snapshot, &layout), &mut |_, _| Ok(()), &mut bytes).unwrap();
    let state = SavedState::parse(&bytes).unwrap();
    assert_eq!(*state.snapshot().empty_seqs(), empty);
    let meta = String::from_utf8(sections(&bytes)[0].1.clone()).unwrap();
    assert!(meta.contains(r#""empty":[[1,1],[3,4],[6,6]]"#), "{meta}");
}

#[test]
fn large_rows_pass_in_pieces() {
    // Two and a half rows of keys are a piece, and a row of values is more than one.
    let (k_dim, v_dim, n_rows) = (105_000, 300_000, 7u32);
    let layout = layout(attention(k_dim, v_dim), n_rows as usize, KvType::F32);
    let snapshot = Snapshot::new(vec![part(Window::Full, n_rows)], None).unwrap();
    let dim = |kind| if kind == RowKind::K { k_dim } else { v_dim };
    let row = |kind, row: u32| -> Vec<u8> {
        let value = |i: usize| (i % 1000 + 1000 * row as usize % 7) as f32;
        (0..dim(kind))
            .flat_map(|i| value(i).to_le_bytes())
            .collect()
    };
    let rows = |span: RowSpan| -> Vec<u8> {
        assert!(span.len == 1 || span.len as usize * dim(span.kind) * 4 <= 1 << 20);
        let rows = (span.first.0..span.first.0 + span.len).map(|r| row(span.kind, r));
        rows.flatten().collect()
    };
    let write = |from: u32, to: u32, len| RowWrite {
        part: PartIdx(0),
        from: CellIdx(from),
        to: CellIdx(to),
        len,
    };
    let restored = Restoration {
        row_writes: vec![write(0, 0, 5), write(5, 5, 2)],
        ..Restoration::default()
    };
    for kv_type in [None, Some(KvType::F16)] {
        let state = StateToSave {
            kv_type,
            ..to_save(&snapshot, &layout)
        };
        let mut bytes = Vec::new();
        let mut n_reads = 0;
        let mut read = |span, out: &mut [u8]| {
            n_reads += 1;
            out.copy_from_slice(&rows(span));
            Ok(())
        };
        save(&state, &mut read, &mut bytes).unwrap();
        assert_eq!(n_reads, 4 + 7);
        let state = SavedState::parse(&bytes).unwrap();
        let mut n_writes = 0;
        let mut write = |span: RowSpan, bytes: &[u8]| {
            n_writes += 1;
            let wanted = match kv_type {
                // What is stored in the same way is not copied.
                None => (0..span.len)
                    .flat_map(|i| row(span.kind, span.first.0 + i))
                    .collect(),
                Some(_) => rows(span),
            };
            assert!(bytes == wanted, "{span:?}");
            Ok(())
        };
        state.write_rows(&restored, &layout, &mut write).unwrap();
        assert_eq!(n_writes, if kv_type.is_none() { 4 } else { 4 + 7 });
        // Rows that the state does not have.
        let beyond = Restoration {
            row_writes: vec![RowWrite {
                part: PartIdx(0),
                from: CellIdx(6),
                to: CellIdx(0),
                len: 2,
            }],
            ..Restoration::default()
        };
        let mut never = |_, _: &[u8]| Ok(());
        assert!(state.write_rows(&beyond, &layout, &mut never).is_err());
    }
}

#[test]
fn rows_are_saved_as_a_memory_of_that_type_holds_them() {
    let heads = |stored: RowEncoding| match stored {
        RowEncoding::Heads { shape, .. } => (shape.kv_type, shape.rotation),
        other => panic!("{other:?}"),
    };
    let snapshot = Snapshot::new(vec![part(Window::Full, 2)], None).unwrap();
    let saved = |layout: &RowLayout, kv_type| {
        let state = StateToSave {
            kv_type: Some(kv_type),
            ..to_save(&snapshot, layout)
        };
        heads(saved_as(&state)[0].1)
    };
    let group = HeadRotation::Hadamard { group: 64 };
    let f32 = layout(attention(64, 32), 2, KvType::F32);
    assert_eq!(saved(&f32, KvType::F16), (KvType::F16, HeadRotation::None));
    assert_eq!(saved(&f32, KvType::Q8_0), (KvType::Q8_0, group));
    // What has the type already stays as it is.
    let types = KvTypes {
        rotation: KvRotation::Off,
        ..KvTypes::from(KvType::Q8_0)
    };
    let unrotated = layout(attention(64, 32), 2, types);
    let as_it_is = (KvType::Q8_0, HeadRotation::None);
    assert_eq!(saved(&unrotated, KvType::Q8_0), as_it_is);
}

#[test]
fn types_are_checked_before_anything_is_saved() {
    let states = |conv_row, state_row| {
        LayerMemory::Recurrent(RecurrentMemory {
            conv_row,
            state_row,
        })
    };
    let layout = |layer| layout(layer, 2, KvType::F32);
    check_state_type(&layout(states(3, 64)), KvType::Q8_0).unwrap();
    check_kv_type(&layout(states(3, 33)), KvType::Q8_0).unwrap();
    let refused = check_state_type(&layout(states(3, 33)), KvType::Q8_0).unwrap_err();
    assert!(matches!(refused, StateError::RowType { len: 33, .. }));
    // Rows without values are none.
    let kinds = |layer| {
        let rows = formats(&layout(layer), |_| 2);
        rows.iter().map(|rows| rows.kind).collect::<Vec<_>>()
    };
    assert_eq!(kinds(states(3, 33)), [RowKind::Conv, RowKind::State]);
    assert_eq!(kinds(states(0, 33)), [RowKind::State]);
    assert_eq!(kinds(attention(2, 1)), [RowKind::K, RowKind::V]);
}

#[test]
fn rows_are_described_and_measured() {
    let rows = |heads, dim, kv_type, rotation| RowFormat {
        layer: LayerIdx(0),
        kind: RowKind::K,
        n_rows: 3,
        stored: RowEncoding::Heads {
            part: PartIdx(0),
            shape: RowShape {
                heads,
                dim,
                kv_type,
                rotation,
            },
        },
    };
    let plain = |heads, dim| rows(heads, dim, KvType::F16, HeadRotation::None);
    assert_eq!(plain(2, 5).row_bytes(), Some(20));
    assert_eq!(plain(2, 5).n_bytes(), Some(60));
    assert_eq!(plain(2, 5).describe(), "2 heads of 5 values in f16");
    assert_eq!(plain(1, 1 << 28).row_bytes(), Some(1 << 29));
    assert_eq!(plain(1, (1 << 28) + 1).row_bytes(), None);
    assert_eq!(plain(usize::MAX, 2).row_bytes(), None);
    let rotated = |dim, group| {
        let rotation = HeadRotation::Hadamard { group };
        rows(1, dim, KvType::Q8_0, rotation).row_bytes()
    };
    assert_eq!(rotated(64, 64), Some(2 * 34));
    assert_eq!(rotated(256, MAX_GROUP), Some(8 * 34));
    // No power of two, too large, no whole groups of a head, no whole blocks of a group.
    for (dim, group) in [(96, 96), (512, 512), (96, 64), (64, 16), (64, 0)] {
        assert_eq!(rotated(dim, group), None, "{dim} {group}");
    }
    let floats = |stored| RowFormat {
        stored,
        ..plain(1, 1)
    };
    assert_eq!(floats(RowEncoding::Floats(4)).describe(), "4 floats");
    let (len, kv_type) = (4, KvType::F16);
    let values = floats(RowEncoding::Values { len, kv_type });
    assert_eq!(values.describe(), "4 values in f16");
}
