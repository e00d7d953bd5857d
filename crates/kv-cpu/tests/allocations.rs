//! A run allocates nothing after the first.

#![allow(clippy::unwrap_used)] // helpers of tests

use std::alloc::{GlobalAlloc, Layout, System};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kv_backend::GraphOutputs;
use kv_backend::{Backend, Profile};
use kv_contract::{Scene, Token, tiny_layout, tiny_llama, tiny_weights};
use kv_core::Window;
use kv_cpu::{CpuBackend, CpuConfig};
use kv_graph::{Graph, GraphShape};
use kv_rows::{KvType, RowLayout};

struct CountingHeap;

static N_ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is the system allocator's, and counted.
unsafe impl GlobalAlloc for CountingHeap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        N_ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingHeap = CountingHeap;

// One test only: others would allocate meanwhile.
#[test]
fn a_run_allocates_nothing_once_warm() {
    let layout = tiny_layout(256, KvType::F16);
    for (n_tokens, n_threads) in [(1, 1), (1, 2), (40, 2)] {
        let config = CpuConfig {
            n_threads: NonZeroUsize::new(n_threads),
            ..CpuConfig::default()
        };
        let profile = Arc::<Profile>::default();
        let backend = CpuBackend::new(config).unwrap().with_profile(profile);
        let shape = GraphShape {
            n_tokens,
            n_outputs: 1,
        };
        let fused = tiny_llama(shape);
        let plain = fused.with_plain_attention(|_| 256).unwrap();
        for graph in [fused, plain] {
            no_allocation_of(&backend, &graph, &layout);
        }
    }
}

fn no_allocation_of(backend: &CpuBackend, graph: &Graph, layout: &RowLayout) {
    let n_tokens = graph.shape().n_tokens;
    let weights = backend
        .load_weights(tiny_weights(graph, 1), Default::default())
        .unwrap();
    let mut program = backend.compile(graph, &weights, layout).unwrap();
    let mut rows = backend.allocate(layout).unwrap();
    let mut outputs = GraphOutputs::default();
    let (mut scene, mut steps) = (Scene::default(), Vec::new());
    for round in 0..4u32 {
        let first = round * n_tokens as u32;
        let token = |i| Token {
            id: i % 96,
            text: 0,
            pos: i,
            cell: i,
        };
        let tokens: Vec<Token> = (first..first + n_tokens as u32).map(token).collect();
        steps.push(scene.step(&tokens, Window::Full, &[0]));
    }
    // Helper threads allocate when they start, which may take them a while.
    for _ in 0..4 {
        let inputs = steps[0].inputs();
        backend
            .run(&mut program, &mut rows, &inputs, &mut outputs)
            .unwrap();
        std::thread::sleep(std::time::Duration::from_millis(25));
    }
    let before = N_ALLOCATIONS.load(Ordering::SeqCst);
    for step in &steps[1..] {
        backend
            .run(&mut program, &mut rows, &step.inputs(), &mut outputs)
            .unwrap();
    }
    let n = N_ALLOCATIONS.load(Ordering::SeqCst) - before;
    assert_eq!(n, 0, "{n_tokens} tokens, {backend:?}");
}
