//! Rows of old tokens with types of their own: the same bits whichever way tokens come, what they
//! take, and what is refused.

#![allow(clippy::unwrap_used, clippy::panic)] // a test

use crate::support::{interleaved, stories};
use cellar_engine::{ConfigError, Engine, EngineConfig, EngineError, SaveOptions};
use kv_backend::state::SavedState;
use kv_core::{
    Pos, PosDelta, PosRange, SeqId, TokenId, Window,
    batch::Batch,
    layers::RecentTokens,
    memory::{PosChange, RestoreInto, Seqs, Streams},
};
use kv_cpu::{CpuBackend, CpuConfig};
use kv_rows::{KvType, KvTypes, OldKvTypes};
use model_core::model_file::ModelFile;

const A: SeqId = SeqId(0);
const B: SeqId = SeqId(1);
const N_RECENT: u32 = 40;
/// More than a split of attention, and than the cells of recent rows.
const N_TOKENS: usize = 350;

fn config(types: KvTypes) -> EngineConfig {
    EngineConfig {
        n_ctx: Some(2000),
        n_ubatch: 64,
        n_seqs: 2,
        kv_types: types,
        ..EngineConfig::default()
    }
}

fn aged(recent: KvType, k: KvType, v: KvType) -> EngineConfig {
    let old = OldKvTypes {
        k,
        v,
        recent: RecentTokens::last(N_RECENT),
    };
    config(KvTypes::from(recent).with_old(old))
}

/// Narrow types of old rows.
fn narrow() -> EngineConfig {
    aged(KvType::F16, KvType::Q8_0, KvType::Q4_0)
}

/// The same, where so many tokens are recent at the beginning.
fn with_first(n_first: u32, config: EngineConfig) -> EngineConfig {
    let old = config.kv_types.old.unwrap();
    let recent = RecentTokens {
        n_first,
        ..old.recent
    };
    EngineConfig {
        kv_types: config.kv_types.with_old(OldKvTypes { recent, ..old }),
        ..config
    }
}

fn try_engine(file: &ModelFile, config: &EngineConfig) -> Result<Engine<CpuBackend>, EngineError> {
    let backend = CpuBackend::new(CpuConfig::default()).unwrap();
    Engine::new(backend, file.model().clone(), file.weights(), config)
}

fn engine(file: &ModelFile, config: &EngineConfig) -> Engine<CpuBackend> {
    try_engine(file, config).unwrap()
}

fn tokens(seed: usize, n: usize) -> Vec<TokenId> {
    let token = |i| TokenId(((i + seed) * 7 % 900) as u32 + 3);
    (0..n).map(token).collect()
}

/// The logits after the last of these tokens.
fn feed(engine: &mut Engine<CpuBackend>, seq: SeqId, tokens: &[TokenId]) -> Vec<f32> {
    let batch = Batch::prompt(seq, tokens.iter().copied());
    let logits = engine.decode(&batch).unwrap();
    logits.last().unwrap().to_vec()
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    let pairs = a.iter().zip(b);
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn rows_of_one_type_give_what_they_give_together() {
    let types = [KvType::F32, KvType::F16, KvType::Q8_0];
    for (file, kv_type) in types
        .map(|t| (stories(), t))
        .into_iter()
        .chain([(interleaved(), KvType::F32)])
    {
        let all = tokens(0, N_TOKENS);
        let wanted = feed(&mut engine(&file, &config(kv_type.into())), A, &all);
        for n_first in [0, 4] {
            let config = with_first(n_first, aged(kv_type, kv_type, kv_type));
            let apart = feed(&mut engine(&file, &config), A, &all);
            let off = distance(&apart, &wanted);
            assert!(
                off < 2e-3 && off > 0.0,
                "{kv_type}, {n_first}: off by {off}"
            );
        }
    }
}

#[test]
fn what_is_old_is_stored_in_its_type() {
    let file = stories();
    let types = |recent| {
        [
            config(KvTypes::from(recent)),
            aged(recent, KvType::Q4_0, KvType::Q4_0),
        ]
    };
    let [exact, narrow_old] = types(KvType::F32);
    let [narrow, _] = types(KvType::Q4_0);
    let all = tokens(0, N_RECENT as usize + 12);
    let off = |config: &EngineConfig, n: usize| {
        let with = |config| feed(&mut engine(&file, config), A, &all[..n]);
        distance(&with(config), &with(&exact))
    };
    // Nothing is old yet, or twelve tokens are.
    let young = off(&narrow_old, N_RECENT as usize);
    assert!(young < 1e-4, "off by {young}");
    // All those are among the first.
    let first = off(&with_first(12, narrow_old.clone()), all.len());
    assert!(first < 1e-4, "off by {first}");
    let [of_old, of_all] = [&narrow_old, &narrow].map(|config| off(config, all.len()));
    assert!(
        of_old > 1e-3 && of_old < of_all,
        "off by {of_old} and {of_all}"
    );
}

#[test]
fn bits_are_the_same_whichever_way_tokens_come() {
    for (file, n_first) in [(stories(), 0), (stories(), 4), (interleaved(), 4)] {
        let narrow = || with_first(n_first, narrow());
        let (a, b) = (tokens(0, N_TOKENS), tokens(5, N_TOKENS));
        let whole = feed(&mut engine(&file, &narrow()), A, &a);
        for (streams, n_piece, n_ubatch) in [
            (Streams::Shared, 1, 64),
            (Streams::PerSequence, 7, 64),
            (Streams::Shared, 64, 64),
            (Streams::PerSequence, N_TOKENS, 17),
        ] {
            let config = EngineConfig {
                streams,
                n_ubatch,
                ..narrow()
            };
            let mut engine = engine(&file, &config);
            let mut last = Vec::new();
            for (a, b) in a.chunks(n_piece).zip(b.chunks(n_piece)) {
                let mut batch = Batch::new();
                for (&a, &b) in a.iter().zip(b) {
                    batch.push_token(b).in_sequence(B);
                    batch.push_token(a).in_sequence(A).with_output();
                }
                last = engine.decode(&batch).unwrap().last().unwrap().to_vec();
            }
            assert!(last == whole, "pieces of {n_piece}, ubatches of {n_ubatch}");
        }
    }
}

#[test]
fn states_come_back_to_the_bit() {
    for n_first in [0, 4] {
        let narrow = || with_first(n_first, narrow());
        let file = stories();
        let mut first = engine(&file, &narrow());
        feed(&mut first, A, &tokens(0, N_TOKENS));
        let mut bytes = Vec::new();
        let options = SaveOptions {
            seqs: Seqs::One(A),
            tokens: &[],
            kv_type: None,
            state_type: None,
        };
        first.save_state(&options, &mut bytes).unwrap();
        let wanted = feed(&mut first, A, &tokens(3, 9));
        let mut second = engine(&file, &narrow());
        feed(&mut second, A, &tokens(2, 40));
        let state = SavedState::parse(&bytes).unwrap();
        let into = RestoreInto::One { from: A, to: B };
        second.restore_state(&state, into).unwrap();
        assert!(feed(&mut second, B, &tokens(3, 9)) == wanted);
        // An engine that keeps no rows apart has no place for them.
        let mut plain = engine(&file, &config(KvType::F16.into()));
        let refused = plain.restore_state(&state, into).unwrap_err();
        let text = refused.to_string();
        assert!(text.contains("old rows"), "{text}");
    }
}

#[test]
fn tokens_keep_their_ages_when_they_move() {
    // What matters is how far apart tokens are, so logits stay when all move together.
    let file = stories();
    let next = |by: i32| {
        let mut engine = engine(&file, &aged(KvType::F32, KvType::F32, KvType::F32));
        feed(&mut engine, A, &tokens(0, N_TOKENS));
        let change = PosChange::Shift(PosDelta(by));
        let moved = engine.reposition(A, PosRange::from(Pos(0)..), change);
        assert_eq!(moved.unwrap(), if by == 0 { 0 } else { N_TOKENS as u32 });
        feed(&mut engine, A, &tokens(3, 5))
    };
    let off = distance(&next(0), &next(100));
    assert!(off < 1e-3, "off by {off}");
}

/// The beginning is where much attention goes: it stays when the context shifts.
#[test]
fn first_tokens_stay_when_the_context_shifts() {
    let file = stories();
    let same_types = || aged(KvType::F32, KvType::F32, KvType::F32);
    let next = |config: EngineConfig, n_keep| {
        let mut engine = engine(&file, &config);
        feed(&mut engine, A, &tokens(0, N_TOKENS));
        let removed = engine.shift_context(A, n_keep).unwrap();
        assert_eq!(removed, (N_TOKENS as u32 - 6) / 2);
        feed(&mut engine, A, &tokens(3, 5))
    };
    let wanted = next(config(KvType::F32.into()), 6);
    for n_keep in [0, 6] {
        let off = distance(&next(with_first(6, same_types()), n_keep), &wanted);
        assert!(off < 1e-3, "off by {off}");
    }
    // Nor can others take their place.
    let mut engine = engine(&file, &with_first(6, same_types()));
    feed(&mut engine, A, &tokens(0, N_TOKENS));
    engine
        .remove(Seqs::One(A), PosRange::from(Pos(0)..Pos(100)))
        .unwrap();
    let down = PosChange::Shift(PosDelta(-100));
    let refused = engine.reposition(A, PosRange::from(Pos(100)..), down);
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("the first 6 positions"), "{refused}");
}

#[test]
fn recent_rows_are_those_of_a_window() {
    let file = stories();
    let parts = |engine: &Engine<CpuBackend>| -> Vec<(Window, u32)> {
        let parts = engine.memory().parts().iter();
        parts.map(|p| (p.config().window, p.n_cells())).collect()
    };
    let ends = parts(&engine(&file, &with_first(80, narrow())));
    let wanted = Window::Ends {
        first: 80,
        last: N_RECENT,
    };
    assert_eq!(ends[1], (wanted, 512));
    let engine = engine(&file, &narrow());
    let parts = parts(&engine);
    // Of both sequences, and a ubatch, in steps of 256.
    let older = Window::Older {
        by: N_RECENT,
        from: 0,
    };
    let wanted = [(older, 2000), (Window::Sliding(N_RECENT), 256)];
    assert_eq!(parts, wanted);
    let layers = engine.settings().layout.layers().iter();
    let bytes: u64 = layers.map(|layer| layer.bytes()).sum();
    // 6 layers of 64 values of K and of V.
    let old = 6 * 2000 * (KvType::Q8_0.row_bytes(64) + KvType::Q4_0.row_bytes(64));
    let recent = 6 * 256 * 2 * KvType::F16.row_bytes(64);
    assert_eq!(bytes, (old + recent) as u64);
}

#[test]
fn numbers_of_recent_tokens_that_make_no_sense_are_refused() {
    let file = stories();
    let with = |n_last, n_first| {
        let [k, v] = [KvType::Q8_0; 2];
        let recent = RecentTokens { n_last, n_first };
        let types = KvTypes::from(KvType::F16).with_old(OldKvTypes { k, v, recent });
        try_engine(&file, &config(types)).map(drop)
    };
    for got in [0, 2000, u32::MAX] {
        let refused = with(got, 0).unwrap_err();
        let text = refused.to_string();
        let wanted = format!("the number of recent tokens is {got}: it must be between 1 and 1999");
        assert_eq!(text, wanted);
    }
    let refused = with(1, 2000).unwrap_err().to_string();
    let wanted = "the number of first tokens is 2000: it must be between 1 and 1999";
    assert_eq!(refused, wanted);
    with(1, 0).unwrap();
    with(1999, 1999).unwrap();
}

#[test]
fn models_without_old_tokens_are_refused() {
    let mut registry = model_core::architecture::Registry::new();
    model_mamba::register(&mut registry);
    let path = "../../tests/fixtures/stories/stories-mamba-f16.gguf";
    let file = ModelFile::open(path, &registry).unwrap();
    let refused = try_engine(&file, &narrow()).map(drop).unwrap_err();
    let is_right = matches!(refused, EngineError::Config(ConfigError::NothingGetsOld));
    assert!(is_right, "{refused}");
}
