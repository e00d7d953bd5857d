//! Generation with stored types: what they keep of the text, on both backends, alone and mixed by
//! kind and layer.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use cellar_engine::{Engine, EngineConfig};
use kv_backend::Backend;
use kv_candle::CandleBackend;
use kv_core::{SeqId, TokenId, batch::Batch};
use kv_cpu::{CpuBackend, CpuConfig};
use kv_rows::{KvRotation, KvType, KvTypes};
use model_core::model_file::ModelFile;

use crate::support::{ids, interleaved, references, stories};

/// Two best tokens that are nearer than this may change places.
const NEAR_TIE: f32 = 0.05;

const N_TOKENS: usize = 60;

fn cpu() -> CpuBackend {
    CpuBackend::new(CpuConfig::default()).unwrap()
}

fn engine<B: Backend>(backend: B, file: &ModelFile, kv_types: KvTypes) -> Engine<B> {
    let config = EngineConfig {
        kv_types,
        ..EngineConfig::default()
    };
    Engine::new(backend, file.model().clone(), file.weights(), &config).unwrap()
}

/// The likeliest token after `tokens`, and how far the second is behind.
fn next<B: Backend>(engine: &mut Engine<B>, tokens: &[TokenId]) -> (TokenId, f32) {
    let batch = Batch::prompt(SeqId(0), tokens.iter().copied());
    let logits = engine.decode(&batch).unwrap();
    let mut all: Vec<(f32, u32)> = logits.last().unwrap().iter().copied().zip(0..).collect();
    all.sort_by(|a, b| b.0.total_cmp(&a.0));
    (TokenId(all[0].1), all[0].0 - all[1].0)
}

/// The greedy texts of both, up to the first near tie of `f32`; gives how many tokens were the
/// same.
fn same_text<B: Backend>(
    backend: impl Fn() -> B,
    file: &ModelFile,
    types: &KvTypes,
    prompt: &[TokenId],
) -> usize {
    let mut exact = engine(backend(), file, KvType::F32.into());
    let mut stored = engine(backend(), file, types.clone());
    let (mut of_exact, mut of_stored) = (prompt.to_vec(), prompt.to_vec());
    for n in 0..N_TOKENS {
        let (token, margin) = next(&mut exact, &of_exact);
        let (own, _) = next(&mut stored, &of_stored);
        if own != token {
            assert!(margin < NEAR_TIE, "{types}: token {n}, margin {margin}");
            return n;
        }
        (of_exact, of_stored) = (vec![token], vec![own]);
    }
    N_TOKENS
}

fn check<B: Backend>(backend: impl Fn() -> B) {
    let q8 = KvTypes::from(KvType::Q8_0);
    let all = [
        q8.clone(),
        q8.clone().with_rotation(KvRotation::Off),
        KvTypes::new(KvType::Q8_0, KvType::F16).with_layers("1-2=f32/q8_0".parse().unwrap()),
        KvTypes::from(KvType::BF16),
    ];
    for file in [stories(), interleaved()] {
        for types in &all {
            let mut n_same = 0;
            for reference in references() {
                n_same += same_text(&backend, &file, types, &ids(&reference.ids));
            }
            // Near ties are rare: most of the text must have been compared.
            assert!(n_same > N_TOKENS, "{types}: {n_same} tokens");
        }
    }
}

#[test]
fn q8_0_keeps_the_greedy_text_on_the_cpu() {
    check(cpu);
}

#[test]
fn q8_0_keeps_the_greedy_text_on_candle() {
    check(CandleBackend::cpu);
}

/// Narrow types still give text, and a memory of the size that the layout says.
#[test]
fn every_type_runs_in_the_bytes_it_should() {
    let file = stories();
    for kv_type in KvType::ALL {
        let mut engine = engine(cpu(), &file, kv_type.into());
        // 6 layers, K and V, 4 heads of 16 values a cell.
        let bytes = 6 * 2 * kv_type.row_bytes(64);
        let config = EngineConfig {
            kv_types: kv_type.into(),
            ..EngineConfig::default()
        };
        let settings = config.settings(&**file.model()).unwrap();
        let wanted = u64::from(settings.n_ctx) * bytes as u64;
        assert_eq!(settings.layout.bytes(), wanted);
        let (_, margin) = next(&mut engine, &ids(&references()[0].ids));
        assert!(margin.is_finite(), "{kv_type}");
    }
}
