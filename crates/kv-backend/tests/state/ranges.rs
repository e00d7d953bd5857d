//! Ranges of a sequence: each is saved alone, and put behind what is there.

use kv_core::{
    Pos, PosRange, SeqId,
    memory::{Memory, Refusal, RestoreInto, Seqs},
};
use kv_rows::KvType;

use super::device::{Device, SHAPES, configs, ids};
use super::{ALL, ONE, refusal};

/// Whether every layer that remembers sees all tokens.
fn is_full(shape: usize) -> bool {
    // One layer with full attention, alone.
    shape == 0
}

fn range(first: u32, last: u32) -> PosRange {
    PosRange::new(Pos(first), Pos(last))
}

fn behind(to: SeqId) -> RestoreInto {
    RestoreInto::Behind { from: ONE, to }
}

/// A sequence of 30 tokens among others, in a memory of a shape.
fn lived_in(shape: usize, config: &kv_core::memory::MemoryConfig) -> Device {
    let mut device = Device::new(SHAPES[shape], config, KvType::F32);
    device.feed(SeqId(0), &ids(0, 9));
    device.feed(ONE, &ids(1, 17));
    device.feed(SeqId(2), &ids(2, 5));
    device.feed(ONE, &ids(4, 13));
    device.feed(SeqId(0), &ids(3, 2));
    device
}

fn save(device: &Device, range: PosRange) -> Result<Vec<u8>, Refusal> {
    let snapshot = device.memory.snapshot(Seqs::One(ONE)).unwrap();
    let bytes = device.save_snapshot(&snapshot.within(range)?, None);
    Ok(bytes.unwrap())
}

#[test]
fn ranges_that_are_restored_in_order_are_the_sequence() {
    for (shape, of_shape) in SHAPES.into_iter().enumerate() {
        for from in configs() {
            let saved = lived_in(shape, &from);
            let cuts = [[0, 1, 2, 30], [0, 9, 21, 30], [0, 28, 29, 30]];
            for cuts in cuts {
                let ranges = cuts.windows(2).map(|cut| range(cut[0], cut[1] - 1));
                let pieces: Result<Vec<Vec<u8>>, Refusal> =
                    ranges.map(|range| save(&saved, range)).collect();
                let Ok(pieces) = pieces else {
                    assert!(!is_full(shape), "{shape}");
                    continue;
                };
                assert!(is_full(shape), "{shape}");
                for (to, kv_type) in configs().iter().zip([KvType::F32, KvType::F16].repeat(2)) {
                    let mut device = Device::new(of_shape, to, kv_type);
                    device.feed(SeqId(0), &ids(7, 6));
                    let other = device.seen(SeqId(0));
                    for bytes in &pieces {
                        device.restore(bytes, behind(SeqId(2))).unwrap();
                    }
                    // Bits are exact in f16, too.
                    assert_eq!(device.seen(SeqId(2)), saved.seen(ONE));
                    assert_eq!(device.seen(SeqId(0)), other);
                    device.feed(SeqId(2), &ids(8, 3));
                    device.check();
                    assert_eq!(device.memory.positions(SeqId(2)), Some(range(0, 32)));
                }
                // Behind tokens that were computed here, and into the sequence itself.
                let mut device = lived_in(shape, &from);
                let [first, ..] = cuts;
                assert_eq!(first, 0);
                let tail = range(cuts[2], 29);
                device.memory.remove(Seqs::One(ONE), tail).unwrap();
                device.restore(&pieces[2], behind(ONE)).unwrap();
                ALL.iter()
                    .for_each(|seq| assert_eq!(device.seen(*seq), saved.seen(*seq)));
            }
        }
    }
}

#[test]
fn a_range_that_does_not_follow_changes_nothing() {
    let config = &configs()[0];
    let saved = lived_in(0, config);
    let piece = save(&saved, range(10, 19)).unwrap();
    let mut device = Device::new(SHAPES[0], config, KvType::F32);
    device.feed(SeqId(2), &ids(1, 9));
    let before = device.clone();
    let refused = refusal(device.restore(&piece, behind(SeqId(2))));
    assert_eq!(
        refused.to_string(),
        "sequence 2 goes on at position 9, and what was saved begins at 10: restore the ranges in \
         order"
    );
    let refused = refusal(device.restore(&piece, behind(SeqId(0))));
    let is_it = matches!(
        refused,
        Refusal::NotBehind {
            next: Pos(0),
            first: Pos(10),
            ..
        }
    );
    assert!(is_it, "{refused}");
    let missing = RestoreInto::Behind {
        from: SeqId(0),
        to: SeqId(2),
    };
    let refused = refusal(device.restore(&piece, missing));
    assert!(matches!(refused, Refusal::NotSaved { .. }), "{refused}");
    let refused = refusal(device.restore(&piece, behind(SeqId(3))));
    assert!(
        matches!(refused, Refusal::NoSuchSequence { .. }),
        "{refused}"
    );
    assert_eq!(device, before);
    // A full memory.
    device.feed(SeqId(2), &ids(1, 1));
    device.feed(SeqId(0), &ids(0, 50));
    let before = device.clone();
    let refused = refusal(device.restore(&piece, behind(SeqId(2))));
    assert!(matches!(refused, Refusal::NoRoom(_)), "{refused}");
    assert_eq!(device, before);
}

/// What windows and states keep is that of the last token: whole sequences only.
#[test]
fn other_memories_refuse_ranges_and_stay() {
    for shape in (0..SHAPES.len()).filter(|&shape| !is_full(shape)) {
        let saved = lived_in(shape, &configs()[0]);
        let refused = save(&saved, range(0, 9)).unwrap_err();
        assert!(matches!(refused, Refusal::Unsupported { .. }), "{refused}");
        let whole = saved.save(Seqs::One(ONE), None);
        let mut device = Device::new(SHAPES[shape], &configs()[0], KvType::F32);
        let before = device.clone();
        let refused = refusal(device.restore(&whole, behind(SeqId(2))));
        assert!(matches!(refused, Refusal::Unsupported { .. }), "{refused}");
        assert_eq!(device, before);
    }
}
