//! Texts longer than their context: shifts and groups, with the stored keys of layer 0 against keys
//! computed at the new positions.
//!
//! In layer 0 a key depends on its token and its position only, so it can be computed alone. (In
//! later layers it also depends on what the token saw when it was evaluated.)

#![allow(clippy::unwrap_used, clippy::panic)] // a test

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;

use crate::support::text::{Writer, greedy};
use crate::support::{Moody, engine, ids, references, stories};
use cellar_engine::session::{ServiceError, Session, TextRequest, TextStream};
use cellar_engine::{Engine, EngineConfig, EngineError, FinishReason, GroupAttention, LongContext};
use kv_backend::{RowKind, RowSpan};
use kv_core::{
    CellIdx, LayerIdx, Pos, PosDelta, PosRange, SeqId, TokenId,
    batch::Batch,
    memory::{Division, Memory, NoRoom, PosChange, Refusal, Seqs, Streams, invariants},
};
use kv_rows::KvType;
use model_tests::{Case, cpu};

const SEQ: SeqId = SeqId(0);

fn f32_config(n_ctx: u32) -> EngineConfig {
    EngineConfig {
        n_ctx: Some(n_ctx),
        n_seqs: 2,
        kv_types: KvType::F32.into(),
        ..EngineConfig::default()
    }
}

/// 64 tokens of a text.
fn tokens() -> Vec<TokenId> {
    let reference = &references()[0];
    let all = reference.ids.iter().chain(&reference.greedy_ids);
    let all: Vec<u32> = all.copied().cycle().take(64).collect();
    ids(&all)
}

fn feed(engine: &mut Engine<Moody>, seq: SeqId, tokens: &[TokenId]) {
    let mut batch = Batch::new();
    for &token in tokens {
        batch.push_token(token).in_sequence(seq);
    }
    engine.decode(&batch).unwrap();
}

/// The stored key of a cell in layer 0.
fn key(engine: &Engine<Moody>, cell: CellIdx) -> Vec<f32> {
    let layer = LayerIdx(0);
    let shape = engine.settings().layout.layer(layer).unwrap().k;
    let (mut bytes, mut values) = (vec![0; shape.bytes()], vec![0.0; shape.len()]);
    let span = RowSpan {
        layer,
        kind: RowKind::K,
        first: cell,
        len: 1,
    };
    engine.read_rows(span, &mut bytes).unwrap();
    shape.decode(&bytes, &mut values);
    assert!(values.iter().any(|value| *value != 0.0), "cell {cell}");
    values
}

/// Keys of layer 0 as the model computes them at a position.
#[derive(Default)]
struct Computed(HashMap<(TokenId, Pos), Vec<f32>>);

impl Computed {
    fn key(&mut self, token: TokenId, pos: Pos) -> &[f32] {
        self.0.entry((token, pos)).or_insert_with(|| {
            let mut engine = engine(&f32_config(1));
            let mut batch = Batch::new();
            batch.push_token(token).in_sequence(SEQ).at(pos);
            engine.decode(&batch).unwrap();
            key(&engine, CellIdx(0))
        })
    }
}

/// Asserts that a sequence holds these tokens at these positions, with the keys that belong there.
fn assert_holds(engine: &Engine<Moody>, seq: SeqId, wanted: &[(TokenId, u32)]) {
    let parts = engine.memory().parts();
    assert_eq!(parts.len(), 1);
    invariants::check(&parts[0]).unwrap();
    let runs = parts[0].runs(seq).iter();
    let cells: Vec<(CellIdx, Pos)> = runs.flat_map(|run| run.iter()).collect();
    let positions: Vec<u32> = cells.iter().map(|c| c.1.0).collect();
    assert_eq!(positions, wanted.iter().map(|w| w.1).collect::<Vec<_>>());
    let mut computed = Computed::default();
    // Tokens at one position are listed by cell.
    for chunk in cells
        .iter()
        .zip(wanted)
        .collect::<Vec<_>>()
        .chunk_by(|a, b| a.1.1 == b.1.1)
    {
        let mut unmatched: Vec<TokenId> = chunk.iter().map(|c| c.1.0).collect();
        for &(&(cell, pos), _) in chunk {
            let stored = key(engine, cell);
            let matches = |token: TokenId, computed: &mut Computed| {
                let wanted = computed.key(token, pos).iter();
                wanted.zip(&stored).all(|(w, s)| (w - s).abs() < 1e-5)
            };
            let at = unmatched
                .iter()
                .position(|&token| matches(token, &mut computed));
            let at = at.unwrap_or_else(|| panic!("the key in cell {cell} at position {pos}"));
            unmatched.remove(at);
        }
    }
}

fn numbered(tokens: impl IntoIterator<Item = TokenId>) -> Vec<(TokenId, u32)> {
    tokens.into_iter().zip(0..).collect()
}

#[test]
fn shifted_keys_are_those_of_the_new_positions() {
    let tokens = tokens();
    let mut engine = engine(&f32_config(64));
    feed(&mut engine, SEQ, &tokens);
    let gone = PosRange::from(Pos(4)..Pos(24));
    engine.remove(Seqs::One(SEQ), gone).unwrap();
    let change = PosChange::Shift(PosDelta(-20));
    let n_moved = engine
        .reposition(SEQ, PosRange::from(Pos(24)..), change)
        .unwrap();
    assert_eq!(n_moved, 40);
    let kept: Vec<TokenId> = [&tokens[..4], &tokens[24..]].concat();
    assert_holds(&engine, SEQ, &numbered(kept));
}

#[test]
fn d15b_divided_keys_are_those_of_the_new_positions() {
    let tokens = tokens();
    let mut engine = engine(&f32_config(64));
    feed(&mut engine, SEQ, &tokens[..30]);
    let change = PosChange::Divide(Division::by(3));
    engine.reposition(SEQ, PosRange::ALL, change).unwrap();
    let wanted: Vec<_> = tokens[..30]
        .iter()
        .copied()
        .zip((0..30).map(|p| p / 3))
        .collect();
    assert_holds(&engine, SEQ, &wanted);
}

#[test]
fn d14_a_shift_leaves_those_who_share_alone() {
    let tokens = tokens();
    let mut engine = engine(&f32_config(64));
    feed(&mut engine, SEQ, &tokens[..12]);
    engine.copy(SEQ, SeqId(1), PosRange::ALL).unwrap();
    let change = PosChange::Shift(PosDelta(7));
    engine
        .reposition(SeqId(1), PosRange::from(Pos(5)..), change)
        .unwrap();
    assert_holds(&engine, SEQ, &numbered(tokens[..12].to_vec()));
    let moved = (0..12).map(|p| if p < 5 { p } else { p + 7 });
    let wanted: Vec<_> = tokens[..12].iter().copied().zip(moved).collect();
    assert_holds(&engine, SeqId(1), &wanted);
}

#[test]
fn s21_half_of_what_is_not_kept_is_dropped() {
    let tokens = tokens();
    let mut engine = engine(&f32_config(64));
    feed(&mut engine, SEQ, &tokens[..31]);
    assert_eq!(engine.shift_context(SEQ, 5).unwrap(), 13);
    let kept = [&tokens[..5], &tokens[18..31]].concat();
    assert_holds(&engine, SEQ, &numbered(kept));
    let error = engine.shift_context(SEQ, 17).unwrap_err();
    let numbers = (18, 17);
    assert!(
        matches!(error, EngineError::NothingToDiscard { n_tokens, n_keep, .. }
            if (n_tokens, n_keep) == numbers),
        "{error}"
    );
}

#[test]
fn tokens_are_counted_where_positions_do_not_begin_at_0() {
    let tokens = tokens();
    let mut engine = engine(&f32_config(64));
    feed(&mut engine, SEQ, &tokens[..32]);
    // A sequence at positions 20 to 31, with a hole at 24 and 25.
    for gone in [PosRange::from(..Pos(20)), PosRange::from(Pos(24)..Pos(26))] {
        engine.remove(Seqs::One(SEQ), gone).unwrap();
    }
    // Ten tokens: two are kept, four are dropped (22, 23, 26, 27), four move down.
    assert_eq!(engine.shift_context(SEQ, 2).unwrap(), 4);
    let wanted: Vec<_> = [20, 21, 28, 29, 30, 31].into_iter().zip(20..).collect();
    let wanted: Vec<_> = wanted
        .into_iter()
        .map(|(i, pos)| (tokens[i], pos))
        .collect();
    assert_holds(&engine, SEQ, &wanted);
}

#[test]
fn a_shift_of_a_sequence_that_is_not_there_says_so() {
    let mut engine = engine(&f32_config(64));
    let error = engine.shift_context(SeqId(2), 0).unwrap_err();
    let EngineError::Refused(Refusal::NoSuchSequence { seq, n_seqs }) = error else {
        panic!("{error}");
    };
    assert_eq!((seq, n_seqs), (SeqId(2), 2));
    let error = engine.shift_context(SEQ, 0).unwrap_err();
    assert!(
        matches!(error, EngineError::NothingToDiscard { n_tokens: 0, .. }),
        "{error}"
    );
}

#[test]
fn keeping_one_sequence_removes_the_others() {
    let tokens = tokens();
    let mut engine = engine(&f32_config(64));
    feed(&mut engine, SEQ, &tokens[..5]);
    feed(&mut engine, SeqId(1), &tokens[..3]);
    assert_eq!(engine.keep_only(SeqId(1)).unwrap().n_tokens, 5);
    assert_eq!(engine.memory().positions(SEQ), None);
    assert_holds(&engine, SeqId(1), &numbered(tokens[..3].to_vec()));
    let error = engine.keep_only(SeqId(2)).unwrap_err();
    assert!(
        matches!(error, EngineError::Refused(Refusal::NoSuchSequence { .. })),
        "{error}"
    );
}

#[test]
fn compaction_changes_no_logits() {
    let tokens = tokens();
    let mut engine = engine(&f32_config(64));
    feed(&mut engine, SEQ, &tokens[..6]);
    feed(&mut engine, SeqId(1), &tokens[..20]);
    feed(&mut engine, SEQ, &tokens[6..9]);
    engine
        .remove(Seqs::One(SeqId(1)), PosRange::from(Pos(2)..Pos(15)))
        .unwrap();
    let next = |engine: &mut Engine<Moody>| {
        let mut batch = Batch::new();
        for seq in [SEQ, SeqId(1)] {
            batch.push_token(tokens[9]).in_sequence(seq).with_output();
        }
        engine.decode(&batch).unwrap().values().to_vec()
    };
    let before = next(&mut engine);
    for (seq, last) in [(SEQ, 9), (SeqId(1), 20)] {
        engine
            .remove(Seqs::One(seq), PosRange::from(Pos(last)..))
            .unwrap();
    }
    assert!(engine.compact().unwrap() > 0);
    assert_eq!(engine.memory().n_holes(), 0);
    assert_holds(&engine, SEQ, &numbered(tokens[..9].to_vec()));
    for (a, b) in before.iter().zip(next(&mut engine)) {
        assert!((a - b).abs() < 1e-4);
    }
}

/// A text that was generated, and what with.
#[derive(Debug)]
struct Generated {
    session: Session<Moody>,
    prompt: Vec<TokenId>,
    tokens: Vec<TokenId>,
    finish: FinishReason,
    /// What is in the memory belongs to it.
    _stream: TextStream,
}

fn generate(
    n_ctx: u32,
    n_predict: usize,
    long_context: LongContext,
) -> Result<Generated, ServiceError> {
    let file = stories();
    let prompt = ids(&references()[0].ids);
    let request = TextRequest {
        long_context: Some(long_context),
        ..greedy(prompt.clone(), n_predict)
    };
    let engine = engine(&f32_config(n_ctx));
    let text = Writer::new(engine, file.tokenizer(), request)?.finish();
    Ok(Generated {
        finish: text.finish_reason(),
        session: text.session,
        prompt,
        tokens: text.tokens,
        _stream: text.stream,
    })
}

#[test]
fn a_text_goes_on_when_its_context_is_shifted() {
    let (n_ctx, n_keep) = (24, 3);
    let Generated { tokens, finish, .. } = generate(n_ctx, 60, LongContext::Stop).unwrap();
    let first_part = tokens;
    assert_eq!(finish, FinishReason::ContextFull);
    let shift = LongContext::Shift { n_keep };
    let Generated {
        session,
        prompt,
        tokens,
        _stream,
        ..
    } = generate(n_ctx, 60, shift).unwrap();
    assert!(
        tokens.len() > first_part.len() + 20,
        "{} tokens",
        tokens.len()
    );
    assert_eq!(tokens[..first_part.len()], first_part);
    // What is remembered by then; the last token is chosen, but not evaluated.
    let mut remembered: Vec<TokenId> = Vec::new();
    for &token in prompt.iter().chain(&tokens[..tokens.len() - 1]) {
        if remembered.len() == n_ctx as usize {
            let n_discard = (remembered.len() - n_keep as usize) / 2;
            remembered.drain(n_keep as usize..n_keep as usize + n_discard);
        }
        remembered.push(token);
    }
    assert_holds(session.engine(), SEQ, &numbered(remembered));
}

#[test]
fn self_extend_lets_older_tokens_share_positions() {
    let group = GroupAttention::new(2, 8).unwrap();
    let Generated {
        session,
        prompt,
        tokens,
        _stream,
        ..
    } = generate(64, 30, LongContext::Group(group)).unwrap();
    let fed: Vec<TokenId> = prompt
        .iter()
        .chain(&tokens[..tokens.len() - 1])
        .copied()
        .collect();
    // The same by the definition, token for token after the prompt.
    let (mut positions, mut grouped_to): (Vec<u32>, u32) = (Vec::new(), 0);
    for n in std::iter::once(prompt.len()).chain(std::iter::repeat_n(1, fed.len() - prompt.len())) {
        let end = |positions: &[u32]| positions.last().map_or(0, |last| last + 1);
        while end(&positions) >= grouped_to + 8 {
            for pos in &mut positions {
                *pos = match *pos {
                    p if p < grouped_to => p,
                    p if p < grouped_to + 8 => grouped_to + (p - grouped_to) / 2,
                    p => p - 4,
                };
            }
            grouped_to += 4;
        }
        let first = end(&positions);
        positions.extend(first..first + n as u32);
    }
    assert!(grouped_to > 8 && positions.last() < Some(&(fed.len() as u32 - 10)));
    let wanted: Vec<_> = fed.into_iter().zip(positions).collect();
    assert_holds(session.engine(), SEQ, &wanted);
    let Generated { tokens: alone, .. } = generate(64, 30, LongContext::Stop).unwrap();
    assert_eq!(tokens[..2], alone[..2], "nothing was grouped by then");
}

#[test]
fn a_factor_of_one_groups_nothing() {
    let group = GroupAttention::new(1, 4).unwrap();
    let Generated { tokens, .. } = generate(64, 30, LongContext::Group(group)).unwrap();
    let Generated { tokens: alone, .. } = generate(64, 30, LongContext::Stop).unwrap();
    assert_eq!(tokens, alone);
}

#[test]
fn groups_that_cannot_be_are_refused_with_numbers() {
    for (factor, width) in [(0, 8), (2, 0), (3, 8), (8, 4), (1, u32::MAX)] {
        let error = GroupAttention::new(factor, width).unwrap_err();
        let wanted = (factor, width);
        assert!(
            matches!(error, EngineError::GroupAttention { factor, width } if (factor, width) == wanted)
        );
    }
}

#[test]
fn a_context_that_is_kept_whole_cannot_be_shifted() {
    for n_keep in [15, 16, u32::MAX] {
        let Generated { finish, .. } = generate(16, 60, LongContext::Shift { n_keep }).unwrap();
        assert_eq!(finish, FinishReason::ContextFull, "{n_keep}");
    }
}

#[test]
fn a_refused_shift_changes_nothing() {
    let tokens = tokens();
    let mut engine = engine(&f32_config(16));
    feed(&mut engine, SEQ, &tokens[..12]);
    engine.copy(SEQ, SeqId(1), PosRange::ALL).unwrap();
    let before = engine.memory().clone();
    // Six tokens would need cells of their own, and four are free.
    let error = engine.shift_context(SEQ, 1).unwrap_err();
    assert!(
        matches!(
            error,
            EngineError::Refused(Refusal::NoRoom(NoRoom {
                n_wanted: 6,
                n_free: 4,
                ..
            }))
        ),
        "{error}"
    );
    assert_eq!(*engine.memory(), before);
}

#[test]
fn d15e_a_sequence_whose_keys_could_not_be_moved_is_forgotten() {
    let tokens = tokens();
    let mut engine = engine(&f32_config(64));
    feed(&mut engine, SEQ, &tokens[..12]);
    feed(&mut engine, SeqId(1), &tokens[..5]);
    engine.backend().writes_left.store(1, Ordering::Relaxed);
    let change = PosChange::Shift(PosDelta(1));
    let error = engine
        .reposition(SEQ, PosRange::from(Pos(3)..), change)
        .unwrap_err();
    assert!(matches!(error, EngineError::Backend(_)), "{error}");
    assert_eq!(engine.memory().positions(SEQ), None);
    assert_holds(&engine, SeqId(1), &numbered(tokens[..5].to_vec()));
}

#[test]
fn a_panic_while_keys_move_forgets_the_sequence() {
    let tokens = tokens();
    let mut engine = engine(&f32_config(64));
    feed(&mut engine, SEQ, &tokens[..12]);
    feed(&mut engine, SeqId(1), &tokens[..5]);
    engine.backend().panics.store(true, Ordering::Relaxed);
    engine.backend().writes_left.store(1, Ordering::Relaxed);
    let change = PosChange::Shift(PosDelta(1));
    let moved = catch_unwind(AssertUnwindSafe(|| {
        engine.reposition(SEQ, PosRange::from(Pos(3)..), change)
    }));
    assert!(moved.is_err());
    assert_eq!(engine.memory().positions(SEQ), None);
    assert_holds(&engine, SeqId(1), &numbered(tokens[..5].to_vec()));
}

#[test]
fn a_failed_compaction_changes_nothing() {
    let tokens = tokens();
    let mut engine = engine(&f32_config(64));
    feed(&mut engine, SEQ, &tokens[..12]);
    engine
        .remove(Seqs::One(SEQ), PosRange::from(Pos(3)..Pos(6)))
        .unwrap();
    engine.backend().copies_left.store(0, Ordering::Relaxed);
    assert!(engine.compact().is_err());
    let kept = (0..12).filter(|p| !(3..6).contains(p));
    let wanted: Vec<_> = kept.map(|p| (tokens[p as usize], p)).collect();
    assert_holds(&engine, SEQ, &wanted);
    // All tokens behind the hole move up.
    assert_eq!(engine.memory().n_holes(), 6);
}

/// Rows of positions were added before the keys were made.
#[test]
fn keys_that_cannot_be_moved_are_refused_and_stay() {
    let case = Case::recipe("gpt2", model_llama::register);
    let (weights, _) = case.open();
    let mut engine = Engine::new(cpu(), case.model(), weights, &f32_config(64)).unwrap();
    let tokens = (3..15).map(TokenId);
    engine.decode(&Batch::prompt(SEQ, tokens)).unwrap();
    let before = engine.memory().clone();
    let group = GroupAttention::new(2, 8).unwrap();
    let change = PosChange::Shift(PosDelta(-1));
    let last = PosRange::from(Pos(5)..);
    let refused = [
        engine.check_shift().err(),
        engine.check_long_context(LongContext::Group(group)).err(),
        engine.reposition(SEQ, last, change).err(),
        engine.shift_context(SEQ, 2).err(),
        engine.group(SEQ, Pos(0), group).err(),
    ];
    for error in refused {
        assert!(
            matches!(error, Some(EngineError::CannotShift(_))),
            "{error:?}"
        );
    }
    assert_eq!(*engine.memory(), before);
    engine.check_long_context(LongContext::Stop).unwrap();
}

#[test]
fn a_failed_copy_forgets_the_copy_and_keeps_the_original() {
    let tokens = tokens();
    let mut engine = engine(&EngineConfig {
        streams: Streams::PerSequence,
        ..f32_config(64)
    });
    feed(&mut engine, SEQ, &tokens[..5]);
    feed(&mut engine, SeqId(1), &tokens[..9]);
    engine.backend().copies_left.store(0, Ordering::Relaxed);
    let error = engine.copy(SEQ, SeqId(1), PosRange::ALL).unwrap_err();
    assert!(matches!(error, EngineError::Backend(_)), "{error}");
    assert_eq!(engine.memory().positions(SeqId(1)), None);
    assert_eq!(engine.memory().n_tokens(SEQ), 5);
}

#[test]
fn one_of_two_tokens_is_dropped() {
    let tokens = tokens();
    let mut engine = engine(&f32_config(64));
    feed(&mut engine, SEQ, &tokens[..10]);
    assert_eq!(engine.shift_context(SEQ, 8).unwrap(), 1);
    let kept = [&tokens[..8], &tokens[9..10]].concat();
    assert_holds(&engine, SEQ, &numbered(kept));
}

/// Tokens at one position are kept or dropped together.
#[test]
fn tokens_that_share_a_position_with_one_that_is_kept_are_kept() {
    let mut engine = engine(&f32_config(64));
    feed(&mut engine, SEQ, &tokens()[..12]);
    let change = PosChange::Divide(Division::by(12));
    engine.reposition(SEQ, PosRange::ALL, change).unwrap();
    let error = engine.shift_context(SEQ, 1).unwrap_err();
    assert!(
        matches!(error, EngineError::NothingToDiscard { n_tokens: 12, .. }),
        "{error}"
    );
    assert_eq!(engine.memory().n_tokens(SEQ), 12);
}

#[test]
fn a_compaction_counts_the_tokens_that_moved() {
    let mut engine = engine(&f32_config(64));
    feed(&mut engine, SEQ, &tokens()[..12]);
    let gone = PosRange::from(Pos(3)..Pos(6));
    engine.remove(Seqs::One(SEQ), gone).unwrap();
    assert_eq!(engine.compact().unwrap(), 6);
    assert_eq!(engine.compact().unwrap(), 0);
}
