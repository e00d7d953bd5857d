//! States that lie: every checksum is right, and what is said is not. Whatever it is, it ends in an
//! error or in a memory that is sound.

#![allow(clippy::unwrap_used)] // a test

use kv_core::{
    batch::{Batch, BatchRules, validate},
    ids::{SeqId, TokenId},
    layers::{AttentionMemory, LayerMap, LayerMemory, RecurrentMemory},
    memory::{Composite, Memory, MemoryConfig, RestoreInto, Seqs, Streams, SwaSize, invariants},
    window::{Causality, PosRange, Window},
};
use kv_graph::weights::MemoryWeights;
use kv_graph::{GraphBuilder, GraphShape};
use kv_rows::{KvType, RowLayout};
use proptest::prelude::*;

use super::frame::{self, FrameWriter, Tag, total};
use super::{Fingerprint, SavedState, SeqTokens, StateError, StateToSave, save};

pub(super) fn layers() -> LayerMap {
    let attention = |window| {
        LayerMemory::Attention(AttentionMemory {
            kv_heads: 1,
            k_dim: 1,
            v_dim: 2,
            window,
        })
    };
    let states = RecurrentMemory {
        conv_row: 1,
        state_row: 2,
    };
    LayerMap::new(vec![
        attention(Window::Full),
        attention(Window::Sliding(4)),
        LayerMemory::Recurrent(states),
    ])
}

/// An empty memory of two windows and states, and its rows.
pub(super) fn memory() -> (Composite, RowLayout) {
    let config = MemoryConfig {
        n_ctx: 12,
        n_seqs: 2,
        streams: Streams::Shared,
        n_ubatch: 4,
        causality: Causality::Causal,
        swa: SwaSize::Window,
        n_snapshots: 1,
        n_active: None,
    };
    let layers = layers();
    let cells = config.cells_per_part(&layers).unwrap();
    let layout = RowLayout::new(&layers, &cells, KvType::F16).unwrap();
    let layout = layout.with_states(&layers, config.n_state_rows()).unwrap();
    (Composite::new(&layers, &config).unwrap(), layout)
}

pub(super) fn fingerprint() -> Fingerprint {
    let shape = GraphShape {
        n_tokens: 1,
        n_outputs: 0,
    };
    let graph = GraphBuilder::new(shape).finish(&[]).unwrap();
    Fingerprint::new("test", 10, &layers(), &graph, &MemoryWeights::new())
}

pub(super) fn state() -> Vec<u8> {
    let (mut memory, layout) = memory();
    let rules = BatchRules {
        n_batch: 16,
        n_seqs: 2,
        n_vocab: 10,
        n_embd: 1,
    };
    let batch = Batch::prompt(SeqId(0), (0..9).map(TokenId));
    let batch = validate(&batch, &rules, |seq| memory.positions(seq)).unwrap();
    let plan = memory.plan(&batch, 4).unwrap();
    for planned in &plan {
        drop(memory.commit(planned));
    }
    drop(memory.copy(SeqId(0), SeqId(1), PosRange::ALL).unwrap());
    let tokens = [SeqTokens {
        seq: SeqId(1),
        evaluated: vec![TokenId(3)],
        pending: vec![TokenId(4)],
    }];
    let state = StateToSave {
        fingerprint: &fingerprint(),
        snapshot: &memory.snapshot(Seqs::All).unwrap(),
        tokens: &tokens,
        layout: &layout,
        kv_type: None,
        state_type: None,
        note: "",
    };
    let mut bytes = Vec::new();
    save(&state, &mut |_, _| Ok(()), &mut bytes).unwrap();
    bytes
}

/// A state of these sections, with every checksum right.
pub(super) fn framed(sections: &[(Tag, Vec<u8>)]) -> Vec<u8> {
    let n_bytes = total(sections.iter().map(|s| s.1.len() as u64)).unwrap();
    let mut bytes = Vec::new();
    let mut frame = FrameWriter::new(&mut bytes, sections.len() as u32, n_bytes).unwrap();
    for (tag, payload) in sections {
        frame.section(*tag, payload).unwrap();
    }
    bytes
}

pub(super) fn sections(bytes: &[u8]) -> Vec<(Tag, Vec<u8>)> {
    let (_, sections) = frame::read(bytes).unwrap();
    let own = |s: &frame::Section<'_>| (s.tag, s.payload.to_vec());
    sections.iter().map(own).collect()
}

/// An engine's reading of a state: it is refused and nothing changes, or a sound one comes.
fn take_in(bytes: &[u8]) {
    let Ok(state) = SavedState::parse(bytes) else {
        return;
    };
    for into in [
        RestoreInto::All,
        RestoreInto::One {
            from: SeqId(0),
            to: SeqId(1),
        },
        RestoreInto::Behind {
            from: SeqId(0),
            to: SeqId(1),
        },
    ] {
        let (mut memory, layout) = memory();
        if state.check_rows(&layout).is_err() {
            continue;
        }
        let before = memory.clone();
        match memory.restore(state.snapshot(), into) {
            Err(_) => assert_eq!(memory, before),
            Ok(restored) => {
                for part in memory.parts() {
                    invariants::check(part).unwrap();
                }
                let mut write = |span: crate::RowSpan, bytes: &[u8]| {
                    assert_eq!(span.byte_range(&layout).unwrap().len(), bytes.len());
                    Ok(())
                };
                state.write_rows(&restored, &layout, &mut write).unwrap();
            }
        }
    }
}

#[test]
fn sections_can_be_put_together_again() {
    let bytes = state();
    assert_eq!(framed(&sections(&bytes)), bytes);
    take_in(&bytes);
}

#[test]
fn a_later_version_is_refused_by_its_number() {
    let mut bytes = state();
    bytes[8] = 2;
    let checksum = super::xxh64::xxh64(&bytes[..24], 0);
    bytes[24..32].copy_from_slice(&checksum.to_le_bytes());
    let error = SavedState::parse(&bytes).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the state has format version 2; versions 1 to 1 can be read"
    );
}

#[test]
fn sections_of_other_kinds_are_refused_unless_they_may_be_skipped() {
    let mut all = sections(&state());
    all.push((*b"LATE", vec![1, 2, 3]));
    let mut bytes = framed(&all);
    let error = SavedState::parse(&bytes).unwrap_err();
    assert!(matches!(error, StateError::UnknownSection { tag } if tag == "LATE"));
    // The flag of the last section, whose frame takes 24 + 3 + 8 bytes.
    let at = bytes.len() - 35;
    bytes[at + 4] = 0;
    let checksum = super::xxh64::xxh64(&bytes[at..at + 16], all.len() as u64 - 1);
    bytes[at + 16..at + 24].copy_from_slice(&checksum.to_le_bytes());
    SavedState::parse(&bytes).unwrap();
}

#[test]
fn sections_that_change_places_are_found() {
    let bytes = state();
    let (_, parsed) = frame::read(&bytes).unwrap();
    // The K and V rows of a layer have frames of their own; exchange two equally long sections.
    let offset = |i: usize| parsed[i].payload.as_ptr() as usize - bytes.as_ptr() as usize - 24;
    let twins = (0..parsed.len() - 1).flat_map(|i| (i + 1..parsed.len()).map(move |j| (i, j)));
    let (i, j) = twins
        .filter(|&(i, j)| parsed[i].payload.len() == parsed[j].payload.len())
        .find(|&(i, j)| parsed[i].tag == parsed[j].tag)
        .unwrap();
    let len = 24 + parsed[i].payload.len() + 8;
    let mut swapped = bytes.clone();
    swapped[offset(i)..offset(i) + len].copy_from_slice(&bytes[offset(j)..offset(j) + len]);
    swapped[offset(j)..offset(j) + len].copy_from_slice(&bytes[offset(i)..offset(i) + len]);
    let error = SavedState::parse(&swapped).unwrap_err();
    assert!(matches!(error, StateError::Checksum { .. }), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn any_word_may_lie(
        edits in prop::collection::vec(
            (any::<prop::sample::Index>(), any::<prop::sample::Index>(), word()),
            1..4,
        ),
    ) {
        let mut all = sections(&state());
        for (section, at, word) in edits {
            let payload = &mut section.get_mut(&mut all).1;
            if payload.len() >= 4 {
                let at = at.index(payload.len() / 4) * 4;
                payload[at..at + 4].copy_from_slice(&word.to_le_bytes());
            }
        }
        take_in(&framed(&all));
    }

    #[test]
    fn any_section_may_be_missing_or_there_twice_or_cut(
        drop in any::<prop::sample::Index>(),
        twice in any::<prop::sample::Index>(),
        cut in prop::option::of((any::<prop::sample::Index>(), 0usize..200)),
    ) {
        let mut all = sections(&state());
        let copy = all[twice.index(all.len())].clone();
        all.remove(drop.index(all.len()));
        all.push(copy);
        if let Some((section, len)) = cut {
            section.get_mut(&mut all).1.truncate(len);
        }
        take_in(&framed(&all));
    }

    #[test]
    fn any_description_may_lie(
        edits in prop::collection::vec((any::<prop::sample::Index>(), b' '..b'~'), 1..4),
    ) {
        let mut all = sections(&state());
        // Digits are what matters most: heads, widths, counts.
        for (at, byte) in edits {
            let digits: Vec<usize> = (0..all[0].1.len()).filter(|&i| all[0].1[i].is_ascii_digit()).collect();
            all[0].1[digits[at.index(digits.len())]] = byte;
        }
        take_in(&framed(&all));
    }
}

/// Numbers near those that mean something.
fn word() -> impl Strategy<Value = u32> {
    prop_oneof![
        4 => 0u32..16,
        1 => 250u32..260,
        1 => Just(i32::MAX as u32),
        1 => Just(u32::MAX),
        1 => any::<u32>(),
    ]
}
