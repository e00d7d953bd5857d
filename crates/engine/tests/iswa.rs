//! An engine with a model whose layers have windows of two kinds: what it allocates, and what is
//! left of a call that fails after windows have slid, and tokens that move to other positions.

#![allow(clippy::unwrap_used)] // a test

use std::sync::atomic::Ordering;

use crate::support::{Moody, NEVER, interleaved};
use cellar_engine::{Engine, EngineConfig};
use kv_core::{
    Pos, PosDelta, PosRange, SeqId, TokenId,
    batch::Batch,
    memory::{Memory, PosChange, Seqs, SwaSize, invariants},
};
use kv_rows::KvType;

/// Of the model, whose layers 0 to 2 see this many tokens and layer 3 everything.
const N_SWA: usize = 64;
const N_UBATCH: usize = 32;
const N_CTX: usize = 512;

fn engine(swa: SwaSize) -> Engine<Moody> {
    let file = interleaved();
    let config = EngineConfig {
        n_ctx: Some(N_CTX as u32),
        n_ubatch: N_UBATCH as u32,
        kv_types: KvType::F32.into(),
        swa,
        ..EngineConfig::default()
    };
    Engine::new(Moody::new(), file.model().clone(), file.weights(), &config).unwrap()
}

fn tokens(n: usize) -> Vec<TokenId> {
    (0..n).map(|i| TokenId((i * 7 % 900) as u32 + 3)).collect()
}

fn feed(engine: &mut Engine<Moody>, tokens: &[TokenId]) -> Vec<f32> {
    let batch = Batch::prompt(SeqId(0), tokens.iter().copied());
    engine.decode(&batch).unwrap().values().to_vec()
}

/// Number of tokens of sequence 0.
fn n_remembered(engine: &Engine<Moody>) -> usize {
    let has = engine.memory().positions(SeqId(0));
    has.map_or(0, |has| has.last.as_usize() + 1)
}

#[test]
fn w2_windowed_layers_have_fewer_rows_unless_told() {
    let n_cells = |swa| {
        let engine = engine(swa);
        let layers = engine.settings().layout.layers().iter();
        layers.map(|layer| layer.n_rows).collect::<Vec<_>>()
    };
    // A window and a ubatch are 96 cells, in steps of 256.
    assert_eq!(n_cells(SwaSize::Window), [256, 256, 256, N_CTX]);
    assert_eq!(n_cells(SwaSize::Full), [N_CTX; 4]);
}

#[test]
fn d6_a_failure_after_the_window_slid_leaves_what_can_go_on() {
    let (n_before, all) = (100, tokens(500));
    let undisturbed = feed(&mut engine(SwaSize::Window), &all);
    // Of the 13 ubatches of the second call, the one that fails; then how many stay.
    for (swa, fails_at, n_kept) in [
        (SwaSize::Window, 0, 0),
        (SwaSize::Window, 5, 0),
        (SwaSize::Window, 6, 1),
        (SwaSize::Window, 12, 7),
        (SwaSize::Full, 12, 0),
    ] {
        let mut engine = engine(swa);
        feed(&mut engine, &all[..n_before]);
        let left = &engine.backend().runs_left;
        left.store(fails_at, Ordering::Relaxed);
        let batch = Batch::prompt(SeqId(0), all[n_before..].iter().copied());
        engine.decode(&batch).unwrap_err();
        engine.backend().runs_left.store(NEVER, Ordering::Relaxed);
        let n = n_remembered(&engine);
        assert_eq!(n, n_before + n_kept * N_UBATCH, "{swa:?}, {fails_at}");
        let again = feed(&mut engine, &all[n..]);
        let pairs = again.iter().zip(&undisturbed);
        let distance = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(distance < 1e-4, "{swa:?}, {fails_at}: off by {distance}");
    }
}

#[test]
fn w6_positions_slide_with_the_window() {
    let mut engine = engine(SwaSize::Window);
    feed(&mut engine, &tokens(400));
    let has = engine.memory().positions(SeqId(0)).unwrap();
    assert_eq!(has.last.as_usize(), 399);
    let oldest_needed = 400 - (N_SWA - 1);
    assert!((1..=oldest_needed).contains(&has.first.as_usize()), "{has}");
}

/// The largest distance between logits.
fn distance(a: &[f32], b: &[f32]) -> f32 {
    let pairs = a.iter().zip(b);
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn layers_of_both_kinds_turn_their_keys_by_their_own_angles() {
    // What matters is how far apart tokens are, so logits stay when all move together. Layers of
    // the two kinds have different bases, and cells of different parts.
    let all = tokens(301);
    let (before, next) = all.split_at(300);
    let next_logits = |delta: i32, moved_from: u32| {
        let mut engine = engine(SwaSize::Window);
        feed(&mut engine, before);
        let range = PosRange::from(Pos(moved_from)..);
        let change = PosChange::Shift(PosDelta(delta));
        let n_moved = engine.reposition(SeqId(0), range, change).unwrap();
        assert_eq!(n_moved, if delta == 0 { 0 } else { 300 - moved_from });
        for part in engine.memory().parts() {
            invariants::check(part).unwrap();
        }
        feed(&mut engine, next)
    };
    let there = next_logits(0, 0);
    let moved = distance(&there, &next_logits(37, 0));
    assert!(moved < 1e-3, "off by {moved}");
    // A gap is seen.
    let apart = distance(&there, &next_logits(37, 280));
    assert!(apart > 0.1, "off by {apart}");
}

#[test]
fn a_context_shift_drops_the_same_tokens_of_both_parts() {
    let all = tokens(500);
    let mut engine = engine(SwaSize::Window);
    feed(&mut engine, &all[..400]);
    assert_eq!(engine.shift_context(SeqId(0), 4).unwrap(), 198);
    let has = engine.memory().positions(SeqId(0)).unwrap();
    assert_eq!(has.last, Pos(201));
    let n_held: Vec<u32> = engine
        .memory()
        .parts()
        .iter()
        .map(|part| part.runs(SeqId(0)).iter().map(|run| run.len).sum())
        .collect();
    assert_eq!(engine.memory().n_tokens(SeqId(0)), 202);
    assert!(n_held[0] < 202 && n_held[1] == 202, "{n_held:?}");
    // Then it goes on, and can be shifted again.
    feed(&mut engine, &all[400..]);
    assert_eq!(engine.shift_context(SeqId(0), 4).unwrap(), 149);
    assert_eq!(
        engine.remove(Seqs::All, PosRange::ALL).unwrap().n_tokens,
        153
    );
}
