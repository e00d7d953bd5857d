//! Recurrent states of every type: how far their logits are from those of `f32`, on both backends,
//! and which models are refused.

#![allow(clippy::unwrap_used, clippy::panic)] // a test

use std::sync::Arc;

use cellar_engine::{ConfigError, Engine, EngineConfig};
use kv_backend::Backend;
use kv_candle::CandleBackend;
use kv_core::{SeqId, TokenId, batch::Batch};
use kv_rows::{KvType, KvTypes, MemoryPlan, PlannedKind, StateType};
use model_core::architecture::Registry;
use model_core::directory::HfDirectory;
use model_tests::{Recipe, cpu};

/// Delta rules by head and by key, the scans of Mamba-2 and of Mamba, lightning attention.
const MODELS: [&str; 5] = ["qwen3_next", "kimi_linear", "mamba2", "mamba", "minimax"];
const N_TOKENS: u32 = 60;

fn directory(name: &str) -> HfDirectory {
    let mut registry = Registry::new();
    model_mamba::register(&mut registry);
    Recipe::named(name).directory(&registry).unwrap()
}

fn config(state_type: StateType) -> EngineConfig {
    EngineConfig {
        n_ctx: Some(64),
        kv_types: KvTypes::from(KvType::F32).with_state(state_type),
        ..EngineConfig::default()
    }
}

/// Logarithms of what each token makes likely.
fn log_softmax(backend: impl Backend, name: &str, state_type: StateType) -> Vec<Vec<f64>> {
    let file = directory(name);
    let (model, weights) = (file.model().clone(), Arc::clone(file.weights()));
    let mut engine = Engine::new(backend, model, weights, &config(state_type)).unwrap();
    let mut batch = Batch::new();
    for i in 0..N_TOKENS {
        let token = batch.push_token(TokenId(3 + i * 37 % 240));
        token.in_sequence(SeqId(0)).with_output();
    }
    let n_vocab = engine.model().vocab_size();
    let logits = engine.decode(&batch).unwrap().values().to_vec();
    let rows = logits.chunks(n_vocab).map(|row| {
        let row: Vec<f64> = row.iter().map(|&x| f64::from(x)).collect();
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum = row.iter().map(|x| (x - max).exp()).sum::<f64>().ln() + max;
        row.iter().map(|x| x - sum).collect()
    });
    rows.collect()
}

/// Mean over all tokens of `KL(P || Q)`, in nats.
fn mean_kl(p: &[Vec<f64>], q: &[Vec<f64>]) -> f64 {
    let of_row = |(p, q): (&Vec<f64>, &Vec<f64>)| {
        let terms = p.iter().zip(q).map(|(p, q)| p.exp() * (p - q));
        terms.sum::<f64>()
    };
    p.iter().zip(q).map(of_row).sum::<f64>() / p.len() as f64
}

fn check<B: Backend>(backend: impl Fn() -> B) {
    for name in MODELS {
        let exact = log_softmax(backend(), name, StateType::F32);
        for (state_type, allowed) in [(StateType::F16, 2e-5), (StateType::BF16, 2e-2)] {
            let rounded = log_softmax(backend(), name, state_type);
            let kl = mean_kl(&exact, &rounded);
            println!("{name} {state_type}: {kl:.1e}");
            assert!(
                rounded != exact,
                "{name}: nothing is rounded to {state_type}"
            );
            assert!(kl.abs() < allowed, "{name} {state_type}: {kl}");
        }
    }
}

#[test]
fn kl_of_rounded_states_is_small_on_the_cpu() {
    check(cpu);
}

#[test]
fn kl_of_rounded_states_is_small_on_candle() {
    check(CandleBackend::cpu);
}

#[test]
fn states_of_two_bytes_take_half_the_memory() {
    for name in MODELS {
        let file = directory(name);
        let bytes = |state_type, kind| {
            let settings = config(state_type).settings(&**file.model()).unwrap();
            MemoryPlan::new(&settings.layout).bytes_of_kind(kind)
        };
        for state_type in [StateType::F16, StateType::BF16] {
            for (kind, by) in [(PlannedKind::State, 2), (PlannedKind::Conv, 1)] {
                let exact = bytes(StateType::F32, kind);
                assert_eq!(exact, by * bytes(state_type, kind), "{name}");
            }
        }
    }
}

/// Operations of their own keep their states as floats.
#[test]
fn models_that_cannot_round_their_states_are_refused_by_name() {
    for name in ["xlstm", "rwkv4", "rwkv6", "rwkv7", "recurrent_gemma"] {
        let file = directory(name);
        config(StateType::F32).settings(&**file.model()).unwrap();
        let error = config(StateType::BF16).settings(&**file.model());
        let error = error.unwrap_err();
        let text = error.to_string();
        let ConfigError::StateType {
            architecture,
            op,
            state_type: StateType::BF16,
            ..
        } = error
        else {
            panic!("{name}: {text}");
        };
        for part in [&architecture, &op, "bf16", "--state-type f32"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
