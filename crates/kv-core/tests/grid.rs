//! Tokens of images: which positions may follow which, who sees whom at one position, and that
//! cells keep rows and columns whatever happens to them.
#![allow(clippy::unwrap_used, clippy::panic)] // a test

use std::collections::BTreeMap;

use kv_core::batch::{
    Batch, BatchError, BatchRules, PositionRule, ValidBatch, validate, validate_with,
};
use kv_core::cells::Cell;
use kv_core::memory::{
    Memory, MemoryInputs, Refusal, RowsWritten, Seqs, Streams, Unified, UnifiedConfig, invariants,
};
use kv_core::{
    Causality, CellIdx, GridPos, PartIdx, Pos, PosDelta, PosRange, SeqId, TokenId, Window,
};

const RULES: BatchRules = BatchRules {
    n_batch: 64,
    n_seqs: 3,
    n_vocab: 10,
    n_embd: 1,
};

/// A token: its position, and row and column where it is one of an image.
type Token = (u32, Option<(u32, u32)>);

fn text(pos: u32) -> Token {
    (pos, None)
}

fn image(pos: u32, y: u32, x: u32) -> Token {
    (pos, Some((y, x)))
}

fn batch(seq: u32, tokens: &[Token]) -> Batch {
    let mut batch = Batch::new();
    for &(pos, grid) in tokens {
        let entry = batch.push_token(TokenId(1)).in_sequence(SeqId(seq));
        match grid {
            Some((y, x)) => entry.at_grid(Pos(pos), GridPos { y, x }),
            None => entry.at(Pos(pos)),
        };
    }
    batch
}

fn checked(batch: &Batch, last: Option<u32>) -> Result<ValidBatch, BatchError> {
    let held = |_| last.map(|last| PosRange::new(Pos(0), Pos(last)));
    validate_with(batch, &RULES, PositionRule::Grid, held)
}

fn memory(streams: Streams, window: Window) -> Unified {
    Unified::new(UnifiedConfig {
        part: PartIdx(0),
        n_seqs: 3,
        n_cells: 24,
        streams,
        window,
        causality: Causality::Causal,
    })
    .unwrap()
}

/// Evaluates tokens; gives what the last ubatch needs to know.
fn feed(memory: &mut Unified, seq: u32, tokens: &[Token], n_ubatch: u32) -> MemoryInputs {
    let rule = PositionRule::Grid;
    let valid = validate_with(&batch(seq, tokens), &RULES, rule, |seq| {
        memory.positions(seq)
    })
    .unwrap();
    let mut inputs = MemoryInputs::default();
    let mut steps = memory.begin(&valid, n_ubatch).unwrap();
    while steps.next(&mut inputs).is_some() {}
    let mut groups = inputs.parts.iter().flat_map(|part| &part.visibility.groups);
    assert!(groups.all(|group| !group.rows.is_empty()));
    invariants::check(memory).unwrap();
    inputs
}

/// Position, row and column of everything that a sequence has, in order.
fn held(memory: &Unified, seq: u32) -> Vec<[u32; 3]> {
    let cells = memory.runs(SeqId(seq)).iter().flat_map(|run| run.iter());
    let mut held: Vec<[u32; 3]> = cells
        .map(|(cell, _)| coordinates(&memory.cell(cell).unwrap()))
        .collect();
    held.sort_unstable();
    held
}

fn coordinates(cell: &Cell) -> [u32; 3] {
    GridPos::coordinates(cell.pos, cell.grid)
}

#[test]
fn b29_positions_of_images_jump_and_overlap() {
    let ok = |tokens: &[Token], last| checked(&batch(0, tokens), last).map(|_| ());
    // The three lines of the table of the rules for several positions.
    assert_eq!(ok(&[text(10)], Some(4)), Ok(()));
    assert_eq!(ok(&[image(4, 0, 0)], Some(4)), Ok(()));
    assert!(matches!(
        ok(&[text(4)], Some(4)),
        Err(BatchError::NotConsecutive { last: Pos(4), .. })
    ));
    assert!(ok(&[image(3, 0, 0)], Some(4)).is_err());
    assert_eq!(
        ok(&[text(0), image(1, 1, 1), image(1, 1, 2), text(4)], None),
        Ok(())
    );
    assert!(matches!(
        ok(&[text(3), text(2)], None),
        Err(BatchError::WentBack { .. })
    ));
    let refused = validate(&batch(0, &[text(0), image(1, 2, 3)]), &RULES, |_| None);
    assert_eq!(
        refused.unwrap_err().to_string(),
        "entry 1 lies at (2, 3) in an image, but the model takes text only"
    );
}

#[test]
fn b21_ubatches_carry_coordinates() {
    let valid = checked(&batch(0, &[text(10), image(11, 5, 7)]), None).unwrap();
    let memory = memory(Streams::Shared, Window::Full);
    let plan = memory.plan(&valid, 8).unwrap();
    let got: Vec<[u32; 3]> = plan[0].ubatch.coordinates().collect();
    assert_eq!(got, [[10, 10, 10], [11, 5, 7]]);
}

#[test]
fn k44_tokens_at_one_position_see_each_other_in_reading_order() {
    // The worked example: the query is at t = 4, y = 5, x = 5.
    let keys = [
        image(4, 4, 9),
        image(4, 5, 5),
        image(4, 5, 6),
        image(4, 6, 0),
    ];
    let mut memory = memory(Streams::Shared, Window::Full);
    feed(&mut memory, 0, &[text(2), image(3, 90, 90)], 8);
    let inputs = feed(&mut memory, 0, &keys, 8);
    let seen = |row: u32| -> Vec<[u32; 3]> {
        let cells = inputs.parts[0].visibility.row(row);
        let mut seen: Vec<[u32; 3]> = cells
            .map(|(cell, _)| coordinates(&memory.cell(cell).unwrap()))
            .collect();
        seen.sort_unstable();
        seen
    };
    let before = [[2, 2, 2], [3, 90, 90]];
    assert_eq!(seen(1), [&before[..], &[[4, 4, 9], [4, 5, 5]]].concat());
    assert_eq!(seen(0), [&before[..], &[[4, 4, 9]]].concat());
    assert_eq!(seen(3).len(), 6);
    inputs.parts[0].visibility.check(24).unwrap();
}

#[test]
fn text_behind_an_image_sees_all_of_it() {
    let mut memory = memory(Streams::Shared, Window::Full);
    feed(
        &mut memory,
        0,
        &[image(0, 0, 0), image(0, 0, 1), image(0, 1, 0)],
        2,
    );
    let inputs = feed(&mut memory, 0, &[text(2), text(3)], 8);
    let n_seen = |row| inputs.parts[0].visibility.row(row).count();
    assert_eq!((n_seen(0), n_seen(1)), (4, 5));
    assert_eq!(
        inputs.parts[0].visibility.groups.len(),
        1,
        "rows stay together"
    );
}

const PICTURE: [Token; 6] = [
    (0, None),
    (1, Some((1, 1))),
    (1, Some((1, 2))),
    (1, Some((2, 1))),
    (1, Some((2, 2))),
    (3, None),
];

fn all() -> Vec<[u32; 3]> {
    let at = |&(pos, grid): &Token| {
        let grid = grid.map(|(y, x)| GridPos { y, x });
        GridPos::coordinates(Pos(pos), grid)
    };
    PICTURE.iter().map(at).collect()
}

#[test]
fn cells_keep_rows_and_columns_when_they_are_copied_and_moved() {
    for streams in [Streams::Shared, Streams::PerSequence] {
        let mut memory = memory(streams, Window::Full);
        feed(&mut memory, 1, &[text(0), text(1), text(2)], 8);
        feed(&mut memory, 0, &PICTURE, 4);
        let copied = memory.copy(SeqId(0), SeqId(2), PosRange::ALL).unwrap();
        assert_eq!(copied.n_tokens, 6);
        assert_eq!(held(&memory, 2), all());
        memory.remove(Seqs::One(SeqId(1)), PosRange::ALL).unwrap();
        memory
            .remove(Seqs::One(SeqId(0)), PosRange::from(Pos(0)..Pos(1)))
            .unwrap();
        while memory.n_holes() > 0 {
            assert!(memory.compact().unwrap().n_cells > 0);
        }
        invariants::check(&memory).unwrap();
        assert_eq!(held(&memory, 0), all()[1..]);
        assert_eq!(held(&memory, 2), all());
        memory.keep_only(SeqId(2)).unwrap();
        assert_eq!(held(&memory, 2), all());
        memory.clear();
        // What is put there next is text again.
        feed(&mut memory, 0, &[text(0), text(1)], 8);
        assert_eq!(held(&memory, 0), [[0; 3], [1; 3]]);
    }
}

#[test]
fn a_copy_onto_itself_changes_nothing() {
    let mut memory = memory(Streams::Shared, Window::Full);
    let _inputs = feed(
        &mut memory,
        0,
        &[text(0), image(1, 1, 1), image(1, 1, 2)],
        8,
    );
    let before = memory.clone();
    let copied = memory.copy(SeqId(0), SeqId(0), PosRange::ALL).unwrap();
    assert_eq!((copied.n_tokens, &memory), (0, &before));
}

#[test]
fn images_do_not_move_and_text_does() {
    let mut memory = memory(Streams::Shared, Window::Full);
    feed(&mut memory, 0, &PICTURE, 8);
    let before = memory.clone();
    let refused = memory
        .shift(SeqId(0), PosRange::from(Pos(1)..), PosDelta(5))
        .unwrap_err();
    let (pos, grid) = (Pos(1), GridPos { y: 1, x: 1 });
    assert!(
        matches!(refused, Refusal::Image { pos: p, grid: g, .. } if p == pos && g == grid),
        "{refused}"
    );
    assert_eq!(memory, before);
    let shifted = memory
        .shift(SeqId(0), PosRange::from(Pos(2)..), PosDelta(5))
        .unwrap();
    assert_eq!(shifted.n_tokens, 1);
    let mut wanted = all();
    wanted[5] = [8; 3];
    assert_eq!(held(&memory, 0), wanted);
}

#[test]
fn a_failed_step_gives_images_back() {
    // The window's cells are recycled by a long text, and that is undone.
    let mut memory = memory(Streams::Shared, Window::Sliding(3));
    feed(&mut memory, 0, &PICTURE, 8);
    let (before, had) = (memory.clone(), held(&memory, 0));
    let tokens: Vec<Token> = (6..28).map(text).collect();
    for rows in [RowsWritten::No, RowsWritten::Perhaps] {
        let mut memory = before.clone();
        feed(&mut memory, 0, &[text(6)], 8);
        let rule = PositionRule::Grid;
        let later = validate_with(&batch(0, &tokens[1..]), &RULES, rule, |seq| {
            memory.positions(seq)
        });
        let at_six = memory.clone();
        let mut inputs = MemoryInputs::default();
        let mut steps = memory.begin(&later.unwrap(), 32).unwrap();
        steps.next(&mut inputs).unwrap();
        assert!(steps.memory().positions(SeqId(0)).unwrap().first > Pos(0));
        steps.undo_last(rows);
        invariants::check(&memory).unwrap();
        if rows == RowsWritten::No {
            assert_eq!(memory, at_six);
            memory
                .remove(Seqs::One(SeqId(0)), PosRange::from(Pos(6)..))
                .unwrap();
            assert_eq!(held(&memory, 0), had);
        }
    }
}

/// Position by position what the rows of the last ubatch see.
fn positions_seen(inputs: &MemoryInputs, row: u32) -> Vec<u32> {
    let cells = inputs.parts[0].visibility.row(row);
    let mut seen: Vec<u32> = cells.map(|(_, pos)| pos.0).collect();
    seen.dedup();
    seen
}

#[test]
fn an_image_that_goes_on_in_a_later_batch_misses_nothing_of_its_window() {
    // 24 cells: four positions of text, then 20 tokens of an image at position 4.
    let text: Vec<Token> = (0..4).map(self::text).collect();
    let part = |range: std::ops::Range<u32>| -> Vec<Token> {
        range.map(|i| image(4, 4 + i / 8, 4 + i % 8)).collect()
    };
    let full = || {
        let mut memory = memory(Streams::Shared, Window::Sliding(4));
        feed(&mut memory, 0, &text, 8);
        feed(&mut memory, 0, &part(0..19), 8);
        memory
    };
    let mut memory = full();
    // Position 0 is beyond the window of 4 and goes; position 1 is seen from there.
    let inputs = feed(&mut memory, 0, &part(19..21), 8);
    assert_eq!(positions_seen(&inputs, 1), [1, 2, 3, 4]);
    let rule = PositionRule::Grid;
    let next = |memory: &Unified, seq, tokens: &[Token]| {
        let held = |seq| memory.positions(seq);
        validate_with(&batch(seq, tokens), &RULES, rule, held).unwrap()
    };
    // Neither another token of the image nor somebody else gets the cell of position 1.
    for (seq, token) in [(0, part(21..22)[0]), (1, self::text(0))] {
        let refused = memory.plan(&next(&memory, seq, &[token]), 8).unwrap_err();
        assert!(matches!(refused, Refusal::NoRoom(_)), "{refused}");
    }
    // Text behind the image does, since it is certain then that the image has ended.
    let inputs = feed(&mut memory, 0, &[self::text(5)], 8);
    assert_eq!(positions_seen(&inputs, 0), [2, 3, 4, 5]);
    // Cut back to the image, it cannot go on there, but behind it.
    memory
        .remove(Seqs::One(SeqId(0)), PosRange::from(Pos(5)..))
        .unwrap();
    let refused = memory
        .plan(&next(&memory, 0, &part(21..22)), 8)
        .unwrap_err();
    assert_eq!(
        refused.to_string(),
        "sequence 0 cannot go on at position 4: it needs sliding(4) from 1 on, but everything up to 1 \
         is forgotten"
    );
    assert!(memory.plan(&next(&memory, 0, &[self::text(5)]), 8).is_ok());
    // The same where an image would begin at the position of the text before it.
    let mut after_text = self::memory(Streams::Shared, Window::Sliding(4));
    let text: Vec<Token> = (0..25).map(self::text).collect();
    text.chunks(5).for_each(|text| {
        feed(&mut after_text, 0, text, 8);
    });
    let more = feed(&mut after_text, 0, &[image(24, 24, 25)], 8);
    assert_eq!(positions_seen(&more, 0), [21, 22, 23, 24]);
}

/// The contents of a naive memory of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct NaiveToken {
    at: [u32; 3],
    number: u32,
}

#[test]
fn random_images_are_seen_as_a_naive_memory_says() {
    let mut seed = 12345u32;
    let mut random = move |n: u32| {
        // Numerical Recipes' generator, upper bits.
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 16) % n
    };
    for round in 0..60 {
        let window = [Window::Full, Window::Sliding(5)][round % 2];
        let mut memory = memory(
            [Streams::Shared, Streams::PerSequence][round / 2 % 2],
            window,
        );
        let mut naive: [Vec<NaiveToken>; 3] = Default::default();
        let mut number_of: BTreeMap<CellIdx, u32> = BTreeMap::new();
        let mut next_number = 0;
        for _ in 0..12 {
            let seq = random(2) as usize;
            let last = naive[seq].last().map(|held| held.at[0]);
            let mut pos = last.map_or(0, |last| last + 1 + random(3));
            let mut tokens = Vec::new();
            let is_image = random(2) == 0;
            for i in 0..1 + random(5) {
                if is_image {
                    tokens.push(image(pos, 10 + i / 2, 10 + (i * 7 + 3) % 5));
                } else {
                    tokens.push(text(pos));
                    pos += 1 + random(2);
                }
            }
            let rule = PositionRule::Grid;
            let of = batch(seq as u32, &tokens);
            let valid = validate_with(&of, &RULES, rule, |seq| memory.positions(seq)).unwrap();
            let Ok(mut steps) = memory.begin(&valid, 1 + random(4)) else {
                memory.clear();
                naive = Default::default();
                continue;
            };
            let mut inputs = MemoryInputs::default();
            let mut rows: Vec<(NaiveToken, Vec<u32>)> = Vec::new();
            while let Some(ubatch) = steps.next(&mut inputs) {
                let part = &inputs.parts[0];
                let coordinates: Vec<[u32; 3]> = ubatch.coordinates().collect();
                let first = next_number;
                for (at, cell) in coordinates.iter().zip(&part.cells) {
                    number_of.insert(*cell, next_number);
                    let number = next_number;
                    naive[seq].push(NaiveToken { at: *at, number });
                    next_number += 1;
                }
                part.visibility.check(3 * 24).unwrap();
                for (row, at) in (0u32..).zip(coordinates) {
                    let cells = part.visibility.row(row).map(|(cell, _)| number_of[&cell]);
                    let number = first + row;
                    rows.push((NaiveToken { at, number }, cells.collect()));
                }
                // Rows are compared at once: later ubatches may recycle what they saw.
                for (query, mut seen) in rows.drain(..) {
                    let oldest = window.oldest_key(Pos(query.at[0])).0;
                    let sees = |key: &&NaiveToken| key.at[0] >= oldest && key.at <= query.at;
                    let mut wanted: Vec<u32> = naive[seq]
                        .iter()
                        .filter(sees)
                        .map(|key| key.number)
                        .collect();
                    wanted.sort_unstable();
                    seen.sort_unstable();
                    assert_eq!(seen, wanted, "round {round}: {query:?}");
                }
            }
            invariants::check(&memory).unwrap();
            if random(4) == 0 {
                let compacted = memory.compact().unwrap();
                for copy in compacted.row_copies {
                    for i in 0..copy.len {
                        let number = number_of[&copy.from.offset(i)];
                        number_of.insert(copy.to.offset(i), number);
                    }
                }
            }
        }
    }
}

/// Tokens that see each other do so in windows, and in full layers where these are not causal.
#[test]
fn later_tokens_are_seen_in_windows_alone() {
    let (both, windows) = (Causality::Causal, Causality::CausalInFull);
    let (full, sliding) = (Window::Full, Window::Sliding(2));
    for (window, causality, wanted) in [
        (full, both, [1, 4, 4, 4, 5]),
        (full, windows, [1, 2, 3, 4, 5]),
        (sliding, both, [1, 4, 3, 2, 2]),
        (sliding, windows, [1, 4, 3, 2, 2]),
    ] {
        let config = UnifiedConfig {
            causality,
            ..*memory(Streams::Shared, window).config()
        };
        let mut memory = Unified::new(config).unwrap();
        let mut batch = Batch::new();
        for pos in 0..5 {
            let entry = batch.push_token(TokenId(1)).at(Pos(pos));
            if (1..4).contains(&pos) {
                entry.seeing_to(Pos(3));
            }
        }
        let valid = validate(&batch, &RULES, |seq| memory.positions(seq)).unwrap();
        let mut inputs = MemoryInputs::default();
        let mut steps = memory.begin(&valid, 8).unwrap();
        while steps.next(&mut inputs).is_some() {}
        let seen = [0, 1, 2, 3, 4].map(|row| inputs.parts[0].visibility.row(row).count());
        assert_eq!(seen, wanted, "{window}, {causality}");
    }
}
