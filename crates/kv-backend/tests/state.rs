//! States: what comes back, where it may go, and that whatever is wrong with the bytes changes
//! nothing.

#![allow(clippy::unwrap_used, clippy::panic)] // a test

mod device;
mod images;
mod latents;
mod ranges;
mod state_types;

use device::{Device, FULL, NEAR, RestoreReport, SHAPES, STATES, config, configs, ids};
use kv_backend::RowKind;
use kv_backend::state::{SavedState, StateError, VERSION, check_kv_type};
use kv_core::{
    CellIdx, Pos, PosDelta, PosRange, SeqId, TokenId, Window,
    layers::{AttentionMemory, LayerMemory},
    memory::{
        Memory, MemoryConfig, NoRoom, PosChange, Refusal, RestoreInto, Seqs, Streams, SwaSize,
        TargetRows,
    },
};
use kv_rows::KvType;
use proptest::prelude::*;

const ONE: SeqId = SeqId(1);
const ALL: [SeqId; 3] = [SeqId(0), SeqId(1), SeqId(2)];

/// Two sequences of their own and one that shares the beginning of the first, where it can.
fn lived_in(shape: usize, config: &MemoryConfig) -> Device {
    let mut device = Device::new(SHAPES[shape], config, KvType::F32);
    device.feed(SeqId(0), &ids(0, 13));
    device.feed(ONE, &ids(1, 11));
    let copied = device
        .memory
        .copy(SeqId(0), SeqId(2), PosRange::ALL)
        .unwrap();
    if !copied.row_copies.is_empty() {
        // Rows of another stream: what the sequence has is not looked at.
        device
            .memory
            .remove(Seqs::One(SeqId(2)), PosRange::ALL)
            .unwrap();
    }
    device.feed(SeqId(0), &ids(3, 3));
    device
}

fn refusal(result: Result<RestoreReport, StateError>) -> Refusal {
    match result {
        Err(StateError::Refused(refused)) => refused,
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_memory_comes_back_with_every_row_wherever_it_goes() {
    let more_snapshots = MemoryConfig {
        n_snapshots: 5,
        ..config()
    };
    let places = [&configs()[..], &[more_snapshots]].concat();
    for (shape, layers) in SHAPES.iter().enumerate() {
        for from in &places {
            let lived_in = lived_in(shape, from);
            let bytes = lived_in.save(Seqs::All, None);
            for to in &places {
                let mut device = Device::new(layers, to, KvType::F32);
                // What is there goes, also where it is more.
                device.feed(SeqId(2), &ids(2, 20));
                let restored = device.restore(&bytes, RestoreInto::All).unwrap();
                for seq in ALL {
                    assert_eq!(device.memory.positions(seq), lived_in.memory.positions(seq));
                    if from.n_snapshots <= to.n_snapshots {
                        assert_eq!(
                            device.seen(seq),
                            lived_in.seen(seq),
                            "{shape} {from:?} {to:?}"
                        );
                    }
                }
                assert!(restored.n_tokens >= 27, "{restored:?}");
                // It goes on as it would have.
                let mut other = lived_in.clone();
                for device in [&mut device, &mut other] {
                    device.feed(ONE, &ids(5, 4));
                    device.check();
                }
                if from == to {
                    assert_eq!(device.seen(ONE), other.seen(ONE));
                }
            }
        }
    }
}

#[test]
fn one_sequence_becomes_another_and_the_others_stay() {
    for shape in 0..SHAPES.len() {
        let lived_in = lived_in(shape, &config());
        for bytes in [
            lived_in.save(Seqs::All, None),
            lived_in.save(Seqs::One(ONE), None),
        ] {
            let mut device = lived_in.clone();
            let into = RestoreInto::One {
                from: ONE,
                to: SeqId(2),
            };
            device.restore(&bytes, into).unwrap();
            assert_eq!(device.seen(SeqId(2)), lived_in.seen(ONE));
            assert_eq!(device.seen(SeqId(0)), lived_in.seen(SeqId(0)));
            assert_eq!(device.seen(ONE), lived_in.seen(ONE));
            let missing = RestoreInto::One {
                from: SeqId(7),
                to: ONE,
            };
            let refused = refusal(device.restore(&bytes, missing));
            assert!(matches!(refused, Refusal::NotSaved { seq: SeqId(7), .. }));
            let beyond = RestoreInto::One {
                from: ONE,
                to: SeqId(3),
            };
            let refused = refusal(device.restore(&bytes, beyond));
            assert_eq!(
                refused.to_string(),
                "there is no sequence 3: the memory holds 3, counted from 0"
            );
        }
    }
}

#[test]
fn cells_that_sequences_share_are_saved_once_and_shared_again() {
    let lived_in = lived_in(0, &config());
    assert_eq!(lived_in.memory.n_used(), 13 + 11 + 3);
    let bytes = lived_in.save(Seqs::All, None);
    let state = SavedState::parse(&bytes).unwrap();
    assert_eq!(state.snapshot().parts()[0].cells.len(), 27);
    assert_eq!(state.rows()[0].format.n_rows, 27);
    let mut device = Device::new(SHAPES[0], &config(), KvType::F32);
    device.restore(&bytes, RestoreInto::All).unwrap();
    assert_eq!(device.memory.n_used(), 27);
    // In streams of their own they cannot be.
    let streams = MemoryConfig {
        streams: Streams::PerSequence,
        ..config()
    };
    let mut device = Device::new(SHAPES[0], &streams, KvType::F32);
    device.restore(&bytes, RestoreInto::All).unwrap();
    assert_eq!(device.memory.n_used(), 27 + 13);
    for seq in ALL {
        assert_eq!(device.seen(seq), lived_in.seen(seq));
    }
}

#[test]
fn d12_nothing_pends_when_a_state_is_saved() {
    // A shift is done when it returns: what is saved are the positions and rows of then, and a copy
    // that was made before is not done again.
    let mut device = Device::new(SHAPES[0], &config(), KvType::F32);
    device.feed(ONE, &ids(1, 6));
    let change = PosChange::Shift(PosDelta(3));
    let shifted = device
        .memory
        .reposition(ONE, PosRange::from(Pos(2)..), change)
        .unwrap();
    assert_eq!(shifted.row_shifts.iter().map(|s| s.len).sum::<u32>(), 4);
    let bytes = device.save(Seqs::One(ONE), None);
    let state = SavedState::parse(&bytes).unwrap();
    let positions = state.snapshot().parts()[0]
        .cells
        .iter()
        .map(|t| t.cell.pos.0);
    assert_eq!(positions.collect::<Vec<_>>(), [0, 1, 5, 6, 7, 8]);
    let before = device.clone();
    device
        .restore(&bytes, RestoreInto::One { from: ONE, to: ONE })
        .unwrap();
    assert_eq!(device.seen(ONE), before.seen(ONE));
    assert_eq!(
        device.memory.positions(ONE),
        Some(PosRange::new(Pos(0), Pos(8)))
    );
}

#[test]
fn what_is_replaced_stays_whole_as_long_as_there_is_room_for_both() {
    let mut device = Device::new(
        SHAPES[0],
        &MemoryConfig {
            n_ctx: 20,
            ..config()
        },
        KvType::F32,
    );
    device.feed(ONE, &ids(1, 10));
    let bytes = device.save(Seqs::One(ONE), None);
    let own = RestoreInto::One { from: ONE, to: ONE };
    assert_eq!(
        device.restore(&bytes, own).unwrap().rows_taken,
        TargetRows::Free
    );
    device.feed(ONE, &ids(2, 1));
    assert_eq!(
        device.restore(&bytes, own).unwrap().rows_taken,
        TargetRows::InUse
    );
    let other = RestoreInto::One {
        from: ONE,
        to: SeqId(2),
    };
    assert_eq!(
        device.restore(&bytes, other).unwrap().rows_taken,
        TargetRows::Free
    );
    let third = RestoreInto::One {
        from: ONE,
        to: SeqId(0),
    };
    let before = device.clone();
    assert_eq!(
        refusal(device.restore(&bytes, third)).to_string(),
        "10 saved tokens need as many cells of part 0, stream 0 (full): 0 of 20 are free"
    );
    assert_eq!(device, before);
}

#[test]
fn d18_a_part_without_room_leaves_the_others_as_they_were() {
    // The windowed part, which comes first, has room; the full one has not.
    let large = MemoryConfig {
        n_ctx: 64,
        ..config()
    };
    let mut source = Device::new(&[NEAR, STATES, FULL], &large, KvType::F32);
    source.feed(ONE, &ids(1, 40));
    let bytes = source.save(Seqs::All, None);
    let small = MemoryConfig {
        n_ctx: 30,
        ..config()
    };
    let mut device = Device::new(&[NEAR, STATES, FULL], &small, KvType::F32);
    device.feed(ONE, &ids(2, 7));
    let before = device.clone();
    let refused = refusal(device.restore(&bytes, RestoreInto::All));
    assert!(matches!(
        refused,
        Refusal::NoRoom(NoRoom {
            n_wanted: 40,
            n_free: 30,
            n_cells: 30,
            ..
        })
    ));
    assert_eq!(device, before);
}

#[test]
fn a_windowed_part_brings_what_its_window_needs_where_there_is_no_room_for_more() {
    let wide = MemoryConfig {
        swa: SwaSize::Full,
        ..config()
    };
    let mut source = Device::new(&[NEAR], &wide, KvType::F32);
    source.feed(ONE, &ids(1, 40));
    assert_eq!(
        source.memory.positions(ONE),
        Some(PosRange::new(Pos(0), Pos(39)))
    );
    let bytes = source.save(Seqs::All, None);
    let narrow = MemoryConfig {
        n_ctx: 16,
        ..config()
    };
    let mut device = Device::new(&[NEAR], &narrow, KvType::F32);
    device.restore(&bytes, RestoreInto::All).unwrap();
    // A token at 39 again would see from 32 on.
    assert_eq!(
        device.memory.positions(ONE),
        Some(PosRange::new(Pos(32), Pos(39)))
    );
    assert_eq!(device.seen(ONE)[..], source.seen(ONE)[32 * 2..]);
    // It knows what it has forgotten.
    let behind = PosRange::from(Pos(35)..);
    device.memory.remove(Seqs::One(ONE), behind).unwrap_err();
    source.memory.remove(Seqs::One(ONE), behind).unwrap();
}

#[test]
fn d25_snapshots_come_back_and_can_be_gone_back_to() {
    let lived_in = lived_in(5, &config());
    let bytes = lived_in.save(Seqs::All, None);
    for (n_snapshots, n_back, n_most) in [(2, 2, 2), (5, 2, 2), (1, 1, 1), (0, 0, 0)] {
        let there = MemoryConfig {
            n_snapshots,
            ..config()
        };
        let mut device = Device::new(SHAPES[5], &there, KvType::F32);
        device.restore(&bytes, RestoreInto::All).unwrap();
        let last = device.memory.positions(ONE).unwrap().last.0;
        let too_far = PosRange::from(Pos(last - n_most)..);
        device.memory.remove(Seqs::One(ONE), too_far).unwrap_err();
        let mut other = lived_in.clone();
        for device in [&mut device, &mut other] {
            let back = PosRange::from(Pos(last + 1 - n_back)..);
            device.memory.remove(Seqs::One(ONE), back).unwrap();
            device.feed(ONE, &ids(6, 5));
        }
        let newest = |device: &Device| device.seen(ONE).last().cloned();
        assert_eq!(newest(&device), newest(&other), "{n_snapshots}");
    }
}

#[test]
fn rows_are_converted_on_the_way_out_and_on_the_way_in() {
    for (shape, layers) in SHAPES.into_iter().enumerate() {
        let source = lived_in(shape, &config());
        let f16 = source.save(Seqs::All, Some(KvType::F16));
        let f32 = source.save(Seqs::All, None);
        assert!(f16.len() <= f32.len());
        let values = |device: &Device| device.seen(ONE);
        let restore = |bytes: &[u8], kv_type| {
            let mut device = Device::new(layers, &config(), kv_type);
            device.restore(bytes, RestoreInto::All).unwrap();
            device
        };
        // All values of this test are exact in f16.
        for (bytes, kv_type) in [
            (&f16, KvType::F16),
            (&f16, KvType::F32),
            (&f32, KvType::F16),
        ] {
            assert_eq!(
                values(&restore(bytes, kv_type)),
                values(&source),
                "{shape} {kv_type}"
            );
        }
        // Nothing is converted twice: what was f16 stays, to the bit.
        let again = restore(&f16, KvType::F16).save(Seqs::All, None);
        let rows = |bytes: &[u8]| -> Vec<Vec<u8>> {
            let state = SavedState::parse(bytes).unwrap();
            state
                .rows()
                .iter()
                .map(|rows| rows.bytes.to_vec())
                .collect()
        };
        assert_eq!(rows(&again), rows(&f16));
    }
}

/// The distance of rows from those of `wanted`, by the lengths of the differences.
fn distance(device: &Device, wanted: &Device) -> f64 {
    let values = |device: &Device| -> Vec<f64> {
        let seen = device.seen(ONE);
        let bytes = seen.iter().flat_map(|(_, bytes)| bytes.as_chunks::<4>().0);
        bytes.map(|b| f64::from(f32::from_le_bytes(*b))).collect()
    };
    let length = |values: &[f64]| values.iter().map(|v| v * v).sum::<f64>().sqrt();
    let (got, wanted) = (values(device), values(wanted));
    let off: Vec<f64> = got.iter().zip(&wanted).map(|(a, b)| a - b).collect();
    length(&off) / length(&wanted)
}

#[test]
fn quantised_rows_come_and_go_and_pass_as_they_are_between_their_own_kind() {
    let wide = LayerMemory::Attention(AttentionMemory {
        kv_heads: 2,
        k_dim: 32,
        v_dim: 64,
        window: Window::Full,
    });
    let of = |kv_type| Device::new(&[wide], &config(), kv_type);
    let mut source = of(KvType::F32);
    source.feed(ONE, &ids(1, 20));
    for (quantised, tolerance) in [(KvType::Q8_0, 0.01), (KvType::Q4_0, 0.1)] {
        let bytes = source.save(Seqs::All, Some(quantised));
        assert!(bytes.len() < source.save(Seqs::All, None).len() / 2);
        for kv_type in [KvType::F32, KvType::F16, quantised] {
            let mut device = of(kv_type);
            device.restore(&bytes, RestoreInto::All).unwrap();
            let off = distance(&device, &source);
            assert!(off > 0.0 && off < tolerance, "{quantised} {kv_type}: {off}");
        }
        // What is quantised already is neither decoded nor encoded again.
        let mut device = of(quantised);
        device.restore(&bytes, RestoreInto::All).unwrap();
        for again in [
            device.save(Seqs::All, None),
            device.save(Seqs::All, Some(quantised)),
        ] {
            let (again, first) = (
                SavedState::parse(&again).unwrap(),
                SavedState::parse(&bytes).unwrap(),
            );
            for (a, b) in again.rows().iter().zip(first.rows()) {
                assert_eq!((a.format, a.bytes), (b.format, b.bytes));
            }
        }
        // Saved as it is, and read where nothing is quantised.
        let mut plain = of(KvType::F32);
        plain
            .restore(&device.save(Seqs::All, None), RestoreInto::All)
            .unwrap();
        assert_eq!(plain.seen(ONE), device.seen(ONE));
    }
}

#[test]
fn rows_that_are_no_whole_blocks_cannot_be_saved_quantised() {
    let source = lived_in(0, &config());
    let error = source.try_save(Seqs::All, Some(KvType::Q8_0)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "layer 0: rows of 4 values cannot be saved as q8_0, whose blocks hold 32 values"
    );
    let early = check_kv_type(&source.layout, KvType::Q8_0).unwrap_err();
    assert_eq!(early.to_string(), error.to_string());
    check_kv_type(&source.layout, KvType::BF16).unwrap();
}

#[test]
fn nan_and_every_other_bit_pattern_pass_as_they_are() {
    let mut source = lived_in(0, &config());
    for (i, byte) in source
        .rows
        .get_mut(&(kv_core::LayerIdx(0), RowKind::K))
        .unwrap()
        .iter_mut()
        .enumerate()
    {
        *byte = (i * 37 % 256) as u8;
    }
    let bytes = source.save(Seqs::All, None);
    let state = SavedState::parse(&bytes).unwrap();
    let mut device = Device::new(SHAPES[0], &config(), KvType::F32);
    device.restore(&bytes, RestoreInto::All).unwrap();
    let again = device.save(Seqs::All, None);
    let again = SavedState::parse(&again).unwrap();
    assert_eq!(again.rows()[0].bytes, state.rows()[0].bytes);
    // Sequence 0 comes first, in the order of its positions, in the first cells.
    assert_eq!(device.memory.parts()[0].runs(SeqId(0))[0].cell, CellIdx(0));
}

#[test]
fn tokens_and_what_wrote_it_come_along() {
    let bytes = lived_in(4, &config()).save(Seqs::All, None);
    let state = SavedState::parse(&bytes).unwrap();
    assert_eq!(state.version(), VERSION);
    assert_eq!(state.n_bytes(), bytes.len() as u64);
    assert!(state.written_by().starts_with("cellar "));
    let tokens = &state.tokens()[0];
    assert_eq!((tokens.seq, &tokens.pending[..]), (ONE, &[TokenId(7)][..]));
    assert_eq!(tokens.evaluated, [TokenId(5), TokenId(6)]);
}

#[test]
fn d19_another_model_s_state_is_refused_with_the_difference() {
    let bytes = lived_in(2, &config()).save(Seqs::All, None);
    let mut other = lived_in(4, &config());
    let before = other.clone();
    let error = other.restore(&bytes, RestoreInto::All).unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with("the state is another model's: its layer map is"),
        "{text}"
    );
    assert!(
        text.contains("layers: [Attention(") && text.contains("layers: [Recurrent("),
        "{text}"
    );
    assert_eq!(other, before);
}

/// The result that every damage must come to: an error, and nothing changed.
fn is_refused(device: &mut Device, before: &Device, bytes: &[u8], what: impl Fn() -> String) {
    match device.restore(bytes, RestoreInto::All) {
        Ok(_) => panic!("{}: was read", what()),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    assert_eq!(device, before, "{}", what());
}

#[test]
fn truncation_at_every_offset_changes_nothing() {
    for shape in 0..SHAPES.len() {
        let bytes = lived_in(shape, &config()).save(Seqs::All, None);
        let mut device = lived_in(shape, &config());
        device.feed(ONE, &ids(7, 2));
        let before = device.clone();
        for n in 0..bytes.len() {
            is_refused(&mut device, &before, &bytes[..n], || {
                format!("{n} bytes of {shape}")
            });
        }
        let longer = [&bytes[..], &[0]].concat();
        is_refused(&mut device, &before, &longer, || "a byte more".to_owned());
        device.restore(&bytes, RestoreInto::All).unwrap();
    }
}

#[test]
fn every_single_flipped_bit_changes_nothing() {
    for shape in 0..SHAPES.len() {
        let mut bytes = lived_in(shape, &config()).save(Seqs::All, None);
        let mut device = lived_in(shape, &config());
        device.feed(ONE, &ids(7, 2));
        let before = device.clone();
        for at in 0..bytes.len() {
            for bit in 0..8 {
                bytes[at] ^= 1 << bit;
                is_refused(&mut device, &before, &bytes, || {
                    format!("bit {bit} of byte {at} of {shape}")
                });
                bytes[at] ^= 1 << bit;
            }
        }
        device.restore(&bytes, RestoreInto::All).unwrap();
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(
        mut bytes in prop::collection::vec(any::<u8>(), 0..300),
        keep in 0usize..64,
    ) {
        let state = lived_in(5, &config()).save(Seqs::All, None);
        prop_assert!(SavedState::parse(&bytes).is_err());
        // With the beginning of a state.
        let keep = keep.min(bytes.len());
        bytes[..keep].copy_from_slice(&state[..keep]);
        prop_assert!(SavedState::parse(&bytes).is_err());
    }
}
