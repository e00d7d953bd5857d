//! States with tokens of images: rows and columns come back with their tokens, wherever those go,
//! and what is done to them afterwards is done as if they had never been away.

use kv_backend::state::SavedState;
use kv_core::{
    CellIdx, GridPos, Pos, PosDelta, PosRange, SeqId, TokenId,
    batch::{Batch, PositionRule},
    layers::{LayerMap, LayerMemory},
    memory::{Division, Memory, MemoryConfig, MemoryInputs, PosChange, Refusal, RestoreInto, Seqs},
};
use kv_rows::KvType;

use super::device::{Device, NEAR, SHAPES, config, configs};

/// A token: its id, its position, and row and column where it is one of an image.
type Token = (u32, u32, Option<(u32, u32)>);

const TWO: SeqId = SeqId(2);

/// Text, six tokens of an image in two rows, text behind a jump.
const PICTURE: [Token; 11] = [
    (0, 0, None),
    (1, 1, None),
    (2, 2, None),
    (3, 3, Some((3, 3))),
    (4, 3, Some((3, 4))),
    (5, 3, Some((3, 5))),
    (6, 3, Some((4, 3))),
    (7, 3, Some((4, 4))),
    (8, 3, Some((4, 5))),
    (9, 6, None),
    (10, 7, None),
];

/// It begins with an image and ends within one.
const UNFINISHED: [Token; 8] = [
    (100, 0, Some((0, 0))),
    (101, 0, Some((0, 1))),
    (102, 0, Some((1, 0))),
    (103, 2, None),
    (104, 3, Some((3, 3))),
    (105, 3, Some((4, 3))),
    (106, 3, Some((4, 7))),
    (107, 3, Some((5, 3))),
];

/// The rest of the unfinished image, out of reading order, and text behind it.
const REST: [Token; 4] = [
    (108, 3, Some((4, 5))),
    (109, 3, Some((3, 9))),
    (110, 3, Some((6, 0))),
    (111, 7, None),
];

fn batch(seq: SeqId, tokens: &[Token]) -> Batch {
    let mut batch = Batch::new();
    for &(id, pos, grid) in tokens {
        let entry = batch.push_token(TokenId(id)).in_sequence(seq);
        match grid {
            Some((y, x)) => entry.at_grid(Pos(pos), GridPos { y, x }),
            None => entry.at(Pos(pos)),
        };
    }
    batch
}

fn feed(device: &mut Device, seq: SeqId, tokens: &[Token]) -> MemoryInputs {
    device.evaluate(&batch(seq, tokens), PositionRule::Grid)
}

/// Sequences 0 and 1, and 2, which has what 0 has: in the same cells where it can.
fn lived_in(shape: usize, config: &MemoryConfig) -> Device {
    let mut device = Device::new(SHAPES[shape], config, KvType::F32);
    feed(&mut device, SeqId(0), &PICTURE);
    feed(&mut device, SeqId(1), &UNFINISHED);
    let copied = device.memory.copy(SeqId(0), TWO, PosRange::ALL).unwrap();
    device.copy_rows(&copied.row_copies);
    device
}

/// Position, row and column of everything that a sequence has in each part, in order.
fn places(device: &Device, seq: SeqId) -> Vec<Vec<[u32; 3]>> {
    let snapshot = device.memory.snapshot(Seqs::One(seq)).unwrap();
    let parts = snapshot.parts().iter().map(|part| {
        let tokens = part.cells.iter();
        let places = tokens.map(|t| GridPos::coordinates(t.cell.pos, t.cell.grid));
        let mut places: Vec<_> = places.collect();
        places.sort_unstable();
        places
    });
    parts.collect()
}

fn all(tokens: &[Token]) -> Vec<[u32; 3]> {
    let place = |&(_, pos, grid): &Token| {
        let grid = grid.map(|(y, x)| GridPos { y, x });
        GridPos::coordinates(Pos(pos), grid)
    };
    let mut all: Vec<_> = tokens.iter().map(place).collect();
    all.sort_unstable();
    all
}

/// Whom the rows of the last ubatch see in each part: places with their keys, in order.
fn sees(device: &Device, inputs: &MemoryInputs) -> Vec<Vec<([u32; 3], Vec<u8>)>> {
    let mut seen = Vec::new();
    for part in device.memory.parts() {
        let number = part.config().part;
        let visibility = &inputs.parts[number.as_usize()].visibility;
        for row in 0..visibility.n_rows {
            let token = |(cell, _): (CellIdx, Pos)| {
                let held = part.cell(cell).unwrap();
                let place = GridPos::coordinates(held.pos, held.grid);
                (place, device.key(number, cell))
            };
            let mut own: Vec<_> = visibility.row(row).map(token).collect();
            own.sort_unstable();
            seen.push(own);
        }
    }
    seen
}

#[test]
fn images_come_back_wherever_they_go_and_go_on() {
    for (shape, layers) in SHAPES.iter().enumerate() {
        for (from, to) in configs()
            .into_iter()
            .flat_map(|from| configs().map(|to| (from, to)))
        {
            let lived_in = lived_in(shape, &from);
            for part in places(&lived_in, TWO) {
                assert_eq!(part, all(&PICTURE), "{shape} {from:?}");
            }
            let bytes = lived_in.save(Seqs::All, None);
            let mut device = Device::new(layers, &to, KvType::F32);
            feed(&mut device, TWO, &UNFINISHED);
            device.restore(&bytes, RestoreInto::All).unwrap();
            for seq in [0, 1, 2].map(SeqId) {
                assert_eq!(places(&device, seq), places(&lived_in, seq));
                assert_eq!(device.seen(seq), lived_in.seen(seq), "{shape} {to:?}");
            }
            // A second time into another sequence, and the image is finished in both.
            let into = RestoreInto::One {
                from: SeqId(1),
                to: SeqId(0),
            };
            device.restore(&bytes, into).unwrap();
            let mut other = lived_in.clone();
            let wanted = feed(&mut other, SeqId(1), &REST);
            let wanted = sees(&other, &wanted);
            for seq in [1, 0].map(SeqId) {
                let inputs = feed(&mut device, seq, &REST);
                assert_eq!(sees(&device, &inputs), wanted, "{shape} {from:?} {to:?}");
                for part in places(&device, seq) {
                    assert_eq!(part, all(&[&UNFINISHED[..], &REST].concat()));
                }
                device.check();
            }
            // Its first token is beyond the window of the next one, so its cell may have been
            // needed.
            for part in places(&device, TWO) {
                assert!(part.len() >= 10 && all(&PICTURE).ends_with(&part));
            }
        }
    }
}

#[test]
fn images_that_came_back_are_copied_compacted_and_saved_again() {
    for (shape, layers) in SHAPES.iter().enumerate() {
        for to in configs() {
            let bytes = lived_in(shape, &config()).save(Seqs::All, None);
            let mut device = Device::new(layers, &to, KvType::F32);
            device.restore(&bytes, RestoreInto::All).unwrap();
            let (memory, one) = (&mut device.memory, SeqId(1));
            memory.remove(Seqs::One(SeqId(0)), PosRange::ALL).unwrap();
            let copied = memory.copy(one, SeqId(0), PosRange::ALL).unwrap();
            device.copy_rows(&copied.row_copies);
            device.memory.remove(Seqs::One(one), PosRange::ALL).unwrap();
            let before = [SeqId(0), TWO].map(|seq| (places(&device, seq), device.seen(seq)));
            for part in &before[0].0 {
                assert_eq!(*part, all(&UNFINISHED));
            }
            let compacted = device.memory.compact().unwrap();
            device.copy_rows(&compacted.row_copies);
            device.check();
            let after = [SeqId(0), TWO].map(|seq| (places(&device, seq), device.seen(seq)));
            assert_eq!(before, after, "{shape} {to:?}");
            let again = device.save(Seqs::All, None);
            let mut last = Device::new(layers, &config(), KvType::F32);
            last.restore(&again, RestoreInto::All).unwrap();
            let last = [SeqId(0), TWO].map(|seq| (places(&last, seq), last.seen(seq)));
            assert_eq!(before, last, "{shape} {to:?}");
        }
    }
}

/// True if a shape remembers tokens, and no states.
fn attends_only(layers: &[LayerMemory]) -> bool {
    let map = LayerMap::new(layers.to_vec());
    let recurs = map.iter().any(|(layer, _)| map.recurrent(layer).is_some());
    !map.parts().is_empty() && !recurs
}

#[test]
fn images_that_came_back_do_not_move_and_text_behind_them_does() {
    for (shape, layers) in SHAPES.iter().enumerate() {
        let bytes = lived_in(shape, &config()).save(Seqs::All, None);
        let mut device = Device::new(layers, &config(), KvType::F32);
        device.restore(&bytes, RestoreInto::All).unwrap();
        if !attends_only(layers) {
            continue;
        }
        let before = device.memory.clone();
        for (first, change) in [
            (1, PosChange::Shift(PosDelta(4))),
            (0, PosChange::Divide(Division::by(2))),
        ] {
            let range = PosRange::from(Pos(first)..);
            let refused = device.memory.reposition(SeqId(0), range, change);
            let refused = refused.unwrap_err();
            let (pos, grid) = (Pos(3), GridPos { y: 3, x: 3 });
            assert!(
                matches!(refused, Refusal::Image { pos: p, grid: g, .. } if (p, g) == (pos, grid)),
                "{shape}: {refused}"
            );
            assert!(device.memory == before);
        }
        let behind = PosRange::from(Pos(6)..);
        let change = PosChange::Shift(PosDelta(10));
        let shifted = device.memory.reposition(SeqId(0), behind, change).unwrap();
        device.copy_rows(&shifted.row_copies);
        device.check();
        assert_eq!(shifted.n_tokens, 2);
        let mut wanted = all(&PICTURE);
        wanted[9..].copy_from_slice(&[[16; 3], [17; 3]]);
        for part in places(&device, SeqId(0)) {
            assert_eq!(part, wanted, "{shape}");
        }
        for part in places(&device, TWO) {
            assert_eq!(part, all(&PICTURE), "who shares them stays: {shape}");
        }
    }
}

#[test]
fn what_a_window_recycled_of_an_image_stays_away() {
    let mut source = Device::new(&[NEAR], &config(), KvType::F32);
    feed(&mut source, SeqId(0), &PICTURE);
    let text: Vec<Token> = (0..60).map(|i| (200 + i, 8 + i, None)).collect();
    for text in text.chunks(10) {
        feed(&mut source, SeqId(0), text);
    }
    let [part] = &places(&source, SeqId(0))[..] else {
        panic!("one part");
    };
    assert!(part[0][0] > 3, "the image was recycled: {part:?}");
    let bytes = source.save(Seqs::All, None);
    let state = SavedState::parse(&bytes).unwrap();
    let forgotten = &state.snapshot().parts()[0].forgotten[0].1;
    assert_eq!(forgotten[0].first, Pos(0), "{forgotten:?}");
    let mut device = Device::new(&[NEAR], &config(), KvType::F32);
    // The rows that it gets held an image before.
    feed(&mut device, SeqId(0), &PICTURE);
    device.restore(&bytes, RestoreInto::All).unwrap();
    assert_eq!(places(&device, SeqId(0)), places(&source, SeqId(0)));
    let inputs = [&mut device, &mut source].map(|device| {
        let inputs = feed(device, SeqId(0), &[(300, 68, Some((68, 69)))]);
        sees(device, &inputs)
    });
    assert_eq!(inputs[0], inputs[1]);
}
