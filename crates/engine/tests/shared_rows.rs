//! An engine with models whose last layers attend over the keys and values of earlier ones: what is
//! planned, saved, copied and moved is that of the owners, once.

#![allow(clippy::unwrap_used)] // a test

use cellar_engine::{Engine, EngineConfig, SaveOptions};
use kv_backend::state::SavedState;
use kv_core::{
    LayerIdx, Pos, PosDelta, PosRange, SeqId, TokenId,
    batch::Batch,
    memory::{PosChange, RestoreInto, Seqs, Streams, SwaSize},
};
use kv_cpu::CpuBackend;
use kv_rows::KvType;
use model_tests::{Case, cpu, distance};

const A: SeqId = SeqId(0);
const B: SeqId = SeqId(1);
const N_CTX: u32 = 512;

/// A model, the layers that own rows, and the bytes of a token's rows.
struct Shared {
    case: Case,
    owners: &'static [u32],
    token_bytes: usize,
}

/// Two heads of 12 values in windowed layers and of 16 in full ones; two of 14 in all layers.
fn models() -> Vec<Shared> {
    let of = |name, token_bytes| Shared {
        case: Case::recipe(name, model_llama::register),
        owners: &[0, 1, 2, 3],
        token_bytes,
    };
    vec![
        of("gemma4_e", 2 * 2 * 4 * (3 * 12 + 16)),
        of("gemma3n", 2 * 2 * 4 * (4 * 14)),
    ]
}

fn config() -> EngineConfig {
    EngineConfig {
        n_ctx: Some(N_CTX),
        n_seqs: 2,
        n_ubatch: 16,
        kv_types: KvType::F32.into(),
        swa: SwaSize::Full,
        streams: Streams::Shared,
        ..EngineConfig::default()
    }
}

fn engine_with(model: &Shared, config: &EngineConfig) -> Engine<CpuBackend> {
    let (weights, _) = model.case.open();
    Engine::new(cpu(), model.case.model(), weights, config).unwrap()
}

fn engine(model: &Shared) -> Engine<CpuBackend> {
    engine_with(model, &config())
}

fn tokens(seed: usize, n: usize) -> Vec<TokenId> {
    (0..n)
        .map(|i| TokenId(((i + seed) * 7 % 500) as u32 + 3))
        .collect()
}

/// The logits of the last of these tokens.
fn feed(engine: &mut Engine<CpuBackend>, seq: SeqId, tokens: &[TokenId]) -> Vec<f32> {
    let batch = Batch::prompt(seq, tokens.iter().copied());
    engine.decode(&batch).unwrap().last().unwrap().to_vec()
}

#[test]
fn plans_and_storage_count_shared_rows_once() {
    for model in models() {
        let engine = engine(&model);
        let layout = &engine.settings().layout;
        let owners: Vec<LayerIdx> = layout.layers().iter().map(|rows| rows.layer).collect();
        let wanted: Vec<LayerIdx> = model.owners.iter().map(|&at| LayerIdx(at)).collect();
        assert_eq!(owners, wanted, "{}", model.case.name);
        let n_layers = model.case.model().layers().n_layers();
        assert!(n_layers > owners.len());
        for at in owners.len()..n_layers {
            let layer = LayerIdx(at as u32);
            assert_eq!(layout.layer(layer), None);
            assert!(layout.attended(layer).is_some(), "{layer}");
        }
        let bytes = N_CTX as usize * model.token_bytes;
        assert_eq!(
            engine.settings().memory_plan().bytes(),
            bytes as u64,
            "{}",
            model.case.name
        );
    }
}

#[test]
fn states_hold_shared_rows_once_and_come_back_elsewhere() {
    let n = 60;
    for model in models() {
        let mut first = engine(&model);
        feed(&mut first, A, &tokens(0, n));
        let options = SaveOptions {
            seqs: Seqs::One(A),
            tokens: &[],
            kv_type: None,
            state_type: None,
        };
        let mut bytes = Vec::new();
        first.save_state(&options, &mut bytes).unwrap();
        let rows = n * model.token_bytes;
        // Less than a layer more.
        assert!(
            (rows..rows + rows / 8).contains(&bytes.len()),
            "{}: {} bytes for {rows} of rows",
            model.case.name,
            bytes.len()
        );
        let wanted = feed(&mut first, A, &tokens(3, 5));
        let others = [
            EngineConfig {
                n_ctx: Some(1024),
                n_ubatch: 64,
                ..config()
            },
            EngineConfig {
                streams: Streams::PerSequence,
                ..config()
            },
        ];
        for other in others {
            let mut engine = engine_with(&model, &other);
            feed(&mut engine, A, &tokens(9, 20));
            let state = SavedState::parse(&bytes).unwrap();
            let into = RestoreInto::One { from: A, to: B };
            engine.restore_state(&state, into).unwrap();
            assert_eq!(feed(&mut engine, B, &tokens(3, 5)), wanted, "{other:?}");
        }
    }
}

#[test]
fn copies_and_removals_are_as_if_nothing_else_had_been() {
    for (model, streams) in models()
        .iter()
        .flat_map(|model| [Streams::Shared, Streams::PerSequence].map(|s| (model, s)))
    {
        let config = EngineConfig {
            streams,
            ..config()
        };
        // No more than a window of 8 tokens remembers to go back.
        let (prompt, more, other) = (tokens(0, 40), tokens(8, 7), tokens(21, 2));
        let mut alone = engine_with(model, &config);
        feed(&mut alone, A, &prompt);
        let wanted = feed(&mut alone, A, &more);
        let mut engine = engine_with(model, &config);
        feed(&mut engine, A, &prompt);
        assert_eq!(engine.copy(A, B, PosRange::ALL).unwrap(), 40);
        // The copies go apart.
        feed(&mut engine, A, &other);
        assert_eq!(feed(&mut engine, B, &more), wanted, "{}", model.case.name);
        engine
            .remove(Seqs::One(A), PosRange::from(Pos(40)..))
            .unwrap();
        assert_eq!(feed(&mut engine, A, &more), wanted, "{}", model.case.name);
    }
}

/// Keys of owners are rotated once, whichever layers attend over them: what matters is how far
/// apart tokens are.
#[test]
fn shifts_rotate_shared_keys_once() {
    for model in models() {
        let (before, next) = (tokens(0, 60), tokens(70, 1));
        let next_logits = |delta: i32, from: u32| {
            let mut engine = engine(&model);
            feed(&mut engine, A, &before);
            let change = PosChange::Shift(PosDelta(delta));
            let range = PosRange::from(Pos(from)..);
            engine.reposition(A, range, change).unwrap();
            feed(&mut engine, A, &next)
        };
        let there = next_logits(0, 0);
        let moved = distance(&there, &next_logits(37, 0));
        assert!(moved < 1e-2, "{}: off by {moved}", model.case.name);
        // A gap is seen.
        let apart = distance(&there, &next_logits(37, 55));
        assert!(apart > 0.1, "{}: off by {apart}", model.case.name);
    }
}
