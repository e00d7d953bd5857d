//! Requests that share a service while a GPU (the simulator) computes a mixture and the CPU its
//! experts, are preempted and cancelled: each text is what it is alone, and what they took is free.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::num::NonZeroU32;

use cellar_engine::sampler::SamplerConfig;
use cellar_engine::serve::{
    FinishedText, PrefixCaching, Service, ServiceConfig, TextRequest, TextStream,
};
use cellar_engine::{CompletionOptions, Engine, EngineConfig, FinishReason};
use kv_backend::DetachedExperts;
use kv_core::TokenId;
use kv_cpu::CpuBackend;
use kv_gpu::sim::{Order, Sim};
use kv_gpu::{GpuBackend, GpuConfig, Precision};
use kv_rows::KvType;
use model_core::model_file::ModelFile;
use model_tests::checks::expert_share;
use model_tests::{Case, cpu_with};

use crate::gpu;

type Shared = DetachedExperts<GpuBackend<Sim>, CpuBackend>;

/// A mixture whose experts of all layers, or of this one alone, are the CPU's.
#[derive(Clone, Copy)]
enum HostLayers {
    All,
    Only(u32),
}

fn engine(layers: HostLayers, n_seqs: u32, n_ctx: u32) -> Engine<Shared> {
    let case = Case::recipe("mixtral", gpu::register);
    let share = expert_share(&case, |layer| match layers {
        HostLayers::All => true,
        HostLayers::Only(only) => layer == only,
    });
    assert!(share.n_layers > 0);
    let precision = Precision::Precise;
    let gpu = GpuBackend::new(Sim::new(Order::Forward), GpuConfig { precision });
    let backend = DetachedExperts::new(gpu, cpu_with(1), share).unwrap();
    let config = EngineConfig {
        n_ctx: Some(n_ctx),
        n_seqs,
        n_ubatch: 16,
        kv_types: KvType::F32.into(),
        ..EngineConfig::default()
    };
    Engine::new(backend, case.model(), case.open().0, &config).unwrap()
}

/// A service whose tokens are read with the tokenizer of another model.
fn service(engine: Engine<Shared>, config: &ServiceConfig) -> Service<Shared> {
    let file = model_tests::fixture("../../models/stories-llama-f16.gguf");
    let file = ModelFile::open(file, &Case::recipe("mixtral", gpu::register).registry());
    Service::start(engine, file.unwrap().tokenizer(), config).unwrap()
}

/// The number of the request that is cancelled in its text.
const CANCELLED: u32 = 1;

fn request(number: u32) -> TextRequest {
    let prompt = (0..9 + 3 * number).map(|at| TokenId(3 + (number * 61 + at * at * 7) % 490));
    TextRequest {
        prompt: prompt.collect(),
        options: CompletionOptions {
            sampler: SamplerConfig::greedy(),
            n_predict: Some(match number {
                CANCELLED => 40,
                _ => 8 + number as usize % 3,
            }),
            ..CompletionOptions::default()
        },
        ..TextRequest::default()
    }
}

/// Six requests in the memory of two: every third step one is preempted, and two are cancelled,
/// one in its text and one that waits.
fn check(layers: HostLayers) {
    const N: u32 = 6;
    let alone = service(engine(layers, 1, 256), &ServiceConfig::default());
    let alone = (0..N).map(|number| alone.submit(request(number)).unwrap().finish().unwrap());
    let alone: Vec<FinishedText> = alone.collect();
    let config = ServiceConfig {
        preempt_every: NonZeroU32::new(3),
        // What was preempted is computed again.
        prefix_cache: PrefixCaching::Off,
        headroom: 1,
        ..ServiceConfig::default()
    };
    let together = service(engine(layers, 3, 64), &config);
    let streams = (0..N).map(|number| together.submit(request(number)).unwrap());
    let mut streams: Vec<TextStream> = streams.collect();
    let waiting = streams.pop().unwrap();
    drop(waiting);
    let mut in_text = streams.remove(CANCELLED as usize);
    let begun = in_text.next_piece().unwrap().unwrap();
    in_text.cancel();
    let cancelled = in_text.finish().unwrap();
    assert_eq!(cancelled.finish, FinishReason::Cancelled);
    let whole = &alone[CANCELLED as usize];
    assert!(whole.text.starts_with(&(begun + &cancelled.text)));
    assert!(whole.tokens.starts_with(&cancelled.tokens));
    for (stream, number) in streams.into_iter().zip([0, 2, 3, 4]) {
        let text = stream.finish().unwrap();
        let wanted: &FinishedText = &alone[number];
        assert_eq!(
            (text.text, text.tokens, text.finish),
            (
                wanted.text.clone(),
                wanted.tokens.clone(),
                wanted.finish.clone()
            ),
            "request {number}"
        );
    }
    let n_preemptions = together.counters().n_preemptions;
    assert!(n_preemptions > 0);
    let engine = together.stop().unwrap();
    assert_eq!(engine.memory().n_used(), 0, "cells are in use");
}

#[test]
fn texts_are_what_they_are_alone_with_experts_on_the_cpu() {
    check(HostLayers::All);
}

#[test]
fn texts_are_what_they_are_alone_with_the_experts_of_a_layer_on_the_cpu() {
    check(HostLayers::Only(1));
}
