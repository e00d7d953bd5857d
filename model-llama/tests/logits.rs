//! Logits of every member against an independent implementation (transformers, f32), on both
//! backends, whichever way the tokens come in.

#![allow(clippy::unwrap_used)]

mod common;

use std::num::NonZero;

use common::{Runner, distance, reference};
use kv_candle::CandleBackend;
use kv_core::backend::Backend;
use kv_core::batch::Batch;
use kv_core::memory::Streams;
use kv_core::{KvType, SeqId, TokenId};
use kv_cpu::{CpuBackend, CpuConfig};

/// Largest difference from the reference that f32 arithmetic in another order may make.
const TOLERANCE: f32 = 1e-4;

const MODELS: [&str; 9] = [
    "llama_gqa_tied",
    "llama_gqa_untied",
    "llama_rope_linear",
    "llama_rope_llama3",
    "llama_rope_yarn",
    "qwen2",
    "gemma3_iswa8",
    "mixtral",
    "qwen3_moe",
];

fn cpu() -> CpuBackend {
    CpuBackend::new(CpuConfig {
        n_threads: NonZero::new(2),
        ..CpuConfig::default()
    })
    .unwrap()
}

fn candle() -> CandleBackend {
    CandleBackend::cpu()
}

/// Each prompt alone, whole.
fn alone<B: Backend>(backend: impl Fn() -> B, name: &str) -> Vec<Vec<f32>> {
    let one = |prompt: &Vec<u32>| {
        Runner::new(backend(), name, KvType::F32, Streams::Shared).feed(0, prompt, 512)
    };
    reference(name).prompts.iter().map(one).collect()
}

/// All three prompts in one batch, their tokens interleaved.
fn together<B: Backend>(backend: B, name: &str, streams: Streams, n_ubatch: u32) -> Vec<Vec<f32>> {
    let prompts = reference(name).prompts;
    let mut runner = Runner::new(backend, name, KvType::F32, streams);
    let (mut batch, mut owners) = (Batch::new(), Vec::new());
    for at in 0..prompts.iter().map(Vec::len).max().unwrap() {
        for (seq, prompt) in prompts.iter().enumerate().filter(|(_, p)| at < p.len()) {
            batch
                .push_token(TokenId(prompt[at]))
                .in_sequence(SeqId(u32::try_from(seq).unwrap()))
                .with_output();
            owners.push(seq);
        }
    }
    let mut logits = vec![Vec::new(); 3];
    for (owner, row) in owners.into_iter().zip(runner.decode(&batch, n_ubatch)) {
        logits[owner].extend(row);
    }
    logits
}

/// Each prompt alone, cut into pieces.
fn in_pieces<B: Backend>(backend: impl Fn() -> B, name: &str, piece: usize) -> Vec<Vec<f32>> {
    let one = |prompt: &Vec<u32>| {
        let mut runner = Runner::new(backend(), name, KvType::F32, Streams::Shared);
        prompt
            .chunks(piece)
            .flat_map(|tokens| runner.feed(0, tokens, 512))
            .collect()
    };
    reference(name).prompts.iter().map(one).collect()
}

fn assert_close(name: &str, how: &str, logits: &[Vec<f32>]) {
    for (i, (ours, theirs)) in logits.iter().zip(&reference(name).logits).enumerate() {
        let distance = distance(ours, theirs);
        assert!(
            distance < TOLERANCE,
            "{name}, prompt {i}, {how}: off by {distance}"
        );
    }
}

#[test]
fn cpu_agrees_with_the_reference_and_bit_for_bit_with_itself() {
    for name in MODELS {
        let whole = alone(cpu, name);
        assert_close(name, "alone", &whole);
        for n_ubatch in [512, 7] {
            for streams in [Streams::Shared, Streams::PerSequence] {
                let mixed = together(cpu(), name, streams, n_ubatch);
                assert!(
                    mixed == whole,
                    "{name}: together, {streams:?}, ubatch {n_ubatch}"
                );
            }
        }
        for piece in [1, 7, 27] {
            assert!(
                in_pieces(cpu, name, piece) == whole,
                "{name}: pieces of {piece}"
            );
        }
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let with = |threads| {
        let backend = || {
            CpuBackend::new(CpuConfig {
                n_threads: NonZero::new(threads),
                ..CpuConfig::default()
            })
            .unwrap()
        };
        alone(backend, "qwen2")
    };
    let one = with(1);
    assert!(with(2) == one && with(3) == one);
}

#[test]
fn candle_agrees_with_the_reference() {
    for name in MODELS {
        assert_close(name, "alone", &alone(candle, name));
        assert_close(
            name,
            "together",
            &together(candle(), name, Streams::Shared, 512),
        );
        assert_close(
            name,
            "streams",
            &together(candle(), name, Streams::PerSequence, 7),
        );
        assert_close(name, "pieces of 7", &in_pieces(candle, name, 7));
        assert_close(name, "token by token", &in_pieces(candle, name, 1));
    }
}

#[test]
fn f16_rows_stay_near_the_reference() {
    // 11 bits of mantissa in K and V move these logits (spread 3) by a few hundredths.
    for name in MODELS {
        let reference = reference(name);
        let f16 = |b: &mut dyn FnMut(&[u32]) -> Vec<f32>| b(&reference.prompts[0]);
        let on_cpu =
            f16(&mut |p| Runner::new(cpu(), name, KvType::F16, Streams::Shared).feed(0, p, 512));
        let on_candle =
            f16(&mut |p| Runner::new(candle(), name, KvType::F16, Streams::Shared).feed(0, p, 512));
        assert!(distance(&on_cpu, &reference.logits[0]) < 0.05, "{name}");
        assert!(
            distance(&on_cpu, &on_candle) < 5e-3,
            "{name}: backends round alike"
        );
    }
}
