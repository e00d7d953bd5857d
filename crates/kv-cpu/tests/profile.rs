//! Profiles of runs: what counts for which kind of steps, and that profiling changes no result.

#![allow(clippy::unwrap_used)] // helpers of tests

use std::sync::Arc;
use std::time::Instant;

use kv_backend::{Backend, Profile, StepKind, StepTime};
use kv_backend::{GraphInputs, GraphOutputs};
use kv_contract::{Scene, Token, tiny_layout, tiny_llama, tiny_weights};
use kv_core::Window;
use kv_cpu::{CpuBackend, CpuConfig};
use kv_graph::{GraphBuilder, GraphShape, Input};
use kv_rows::{KvType, RowLayout};

/// The logits of some tokens of the tiny model, with the steps added to a profile, where there is
/// one.
fn tiny(profile: Option<Arc<Profile>>) -> Vec<f32> {
    let layout = tiny_layout(64, KvType::F16);
    let mut backend = CpuBackend::new(CpuConfig::default()).unwrap();
    if let Some(profile) = profile {
        backend = backend.with_profile(profile);
    }
    let graph = tiny_llama(GraphShape {
        n_tokens: 5,
        n_outputs: 1,
    });
    let weights = backend
        .load_weights(tiny_weights(&graph, 1), Default::default())
        .unwrap();
    let mut program = backend.compile(&graph, &weights, &layout).unwrap();
    let mut rows = backend.allocate(&layout).unwrap();
    let token = |i| Token {
        id: i,
        text: 0,
        pos: i,
        cell: i,
    };
    let tokens: Vec<Token> = (0..5).map(token).collect();
    let step = Scene::default().step(&tokens, Window::Full, &[4]);
    let mut outputs = GraphOutputs::default();
    backend
        .run(&mut program, &mut rows, &step.inputs(), &mut outputs)
        .unwrap();
    outputs.values.swap_remove(0)
}

#[test]
fn kinds_of_a_model_add_up_to_no_more_than_the_run() {
    let profile = Arc::<Profile>::default();
    let started = Instant::now();
    let profiled = tiny(Some(Arc::clone(&profile)));
    let whole = started.elapsed();
    assert_eq!(profiled, tiny(None));
    let kinds = profile.take();
    for kind in [
        StepKind::Matmul,
        StepKind::Attention,
        StepKind::StoreKv,
        StepKind::Embedding,
        StepKind::Elementwise,
    ] {
        assert!(kinds.iter().any(|(k, _)| *k == kind), "{kind}: {kinds:?}");
    }
    for kind in [StepKind::Recurrent, StepKind::Experts, StepKind::Custom] {
        assert!(kinds.iter().all(|(k, _)| *k != kind), "{kind}: {kinds:?}");
    }
    let sum = kinds.iter().map(|(_, t)| t.time).sum();
    assert!(whole >= sum, "{whole:?}: {kinds:?}");
    assert_eq!(profile.take(), []);
}

#[test]
fn bytes_of_matrices_count_once_a_step() {
    let mut b = GraphBuilder::new(GraphShape {
        n_tokens: 3,
        n_outputs: 3,
    });
    let x = b.input(Input::Embeddings { dim: 64 }).unwrap();
    let up = b.linear("up", x, "up.w", 96).unwrap();
    let down = b.linear("down", up, "down.w", 64).unwrap();
    let graph = b.finish(&[down]).unwrap();
    let profile = Arc::<Profile>::default();
    let backend = CpuBackend::new(CpuConfig::default()).unwrap();
    let backend = backend.with_profile(Arc::clone(&profile));
    let layout = RowLayout::default();
    let weights = backend
        .load_weights(tiny_weights(&graph, 1), Default::default())
        .unwrap();
    let mut program = backend.compile(&graph, &weights, &layout).unwrap();
    let mut rows = backend.allocate(&layout).unwrap();
    let embeddings = [0.5; 3 * 64];
    let inputs = GraphInputs {
        embeddings: &embeddings,
        ..GraphInputs::default()
    };
    let mut outputs = GraphOutputs::default();
    for n_runs in [1, 2] {
        for _ in 0..n_runs {
            backend
                .run(&mut program, &mut rows, &inputs, &mut outputs)
                .unwrap();
        }
        let bytes = |(kind, time): (StepKind, StepTime)| {
            (kind == StepKind::Matmul).then_some(time.weight_bytes)
        };
        let counted: Vec<u64> = profile.take().into_iter().filter_map(bytes).collect();
        // Two matrices of single precision.
        assert_eq!(counted, [n_runs * 2 * 64 * 96 * 4]);
    }
}
