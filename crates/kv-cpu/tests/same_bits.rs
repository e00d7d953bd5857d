//! The same tokens give the same bits, however they are batched, wherever their cells are, and for
//! any number of threads.

#![allow(clippy::unwrap_used)] // helpers of tests

use std::num::NonZeroUsize;
use std::sync::Arc;

use kv_backend::Backend;
use kv_backend::GraphOutputs;
use kv_block::BlockFormat;
use kv_contract::{Scene, Token, in_blocks, tiny_layout, tiny_llama, tiny_weights};
use kv_core::Window;
use kv_cpu::activations::ActivationKind;
use kv_cpu::isa::Isa;
use kv_cpu::{ActivationChoice, CpuBackend, CpuConfig};
use kv_graph::GraphShape;
use kv_graph::weights::WeightSource;
use kv_rows::KvType;

const N_CELLS: usize = 256;
const VOCAB: usize = 96;

fn backend(isa: Isa, n_threads: usize) -> CpuBackend {
    let n_threads = NonZeroUsize::new(n_threads);
    CpuBackend::new(CpuConfig {
        n_threads,
        isa: Some(isa),
        activations: ActivationChoice::Always(ActivationKind::Int8),
        ..CpuConfig::default()
    })
    .unwrap()
}

/// The weights of the small model, its matrices in `Q8_0`: activations are quantized to int8.
fn quantized() -> Arc<dyn WeightSource> {
    let plain = tiny_weights(
        &tiny_llama(GraphShape {
            n_tokens: 1,
            n_outputs: 1,
        }),
        7,
    );
    in_blocks(&*plain, BlockFormat::Q8_0)
}

/// `n` tokens of one text, in cells `first_cell + pos * stride`.
fn text(text: usize, n: u32, first_cell: u32, stride: u32) -> Vec<Token> {
    let id = |pos: u32| (pos * 31 + 17 * text as u32 + pos * pos) % VOCAB as u32;
    let token = |pos| Token {
        id: id(pos),
        text,
        pos,
        cell: first_cell + pos * stride,
    };
    (0..n).map(token).collect()
}

/// The logits of all tokens as bits, evaluated batch by batch.
fn bits(
    backend: &CpuBackend,
    weights: &Arc<dyn WeightSource>,
    kv_type: KvType,
    batches: &[&[Token]],
) -> Vec<(Token, Vec<u32>)> {
    let layout = tiny_layout(N_CELLS, kv_type);
    let loaded = backend
        .load_weights(Arc::clone(weights), Default::default())
        .unwrap();
    let mut rows = backend.allocate(&layout).unwrap();
    let mut scene = Scene::default();
    let mut all = Vec::new();
    for batch in batches {
        let n = batch.len();
        let graph = tiny_llama(GraphShape {
            n_tokens: n,
            n_outputs: n,
        });
        let mut program = backend.compile(&graph, &loaded, &layout).unwrap();
        let wanted: Vec<u32> = (0..n as u32).collect();
        let step = scene.step(batch, Window::Full, &wanted);
        let mut outputs = GraphOutputs::default();
        backend
            .run(&mut program, &mut rows, &step.inputs(), &mut outputs)
            .unwrap();
        let logits = outputs.first().chunks_exact(VOCAB);
        all.extend(
            batch
                .iter()
                .zip(logits)
                .map(|(t, l)| (*t, l.iter().map(|v| v.to_bits()).collect())),
        );
    }
    all
}

#[test]
fn batches_and_other_sequences_change_no_bit() {
    let weights = [
        tiny_weights(
            &tiny_llama(GraphShape {
                n_tokens: 1,
                n_outputs: 1,
            }),
            7,
        ),
        quantized(),
    ];
    for isa in Isa::all_available() {
        let backend = backend(isa, 2);
        for (weights, kv_type) in weights.iter().zip([KvType::F32, KvType::F16]) {
            let tokens = text(0, 70, 0, 1);
            let whole = bits(&backend, weights, kv_type, &[&tokens]);
            assert!(
                whole
                    .iter()
                    .flat_map(|(_, l)| l)
                    .all(|&b| f32::from_bits(b).is_finite())
            );
            let chunks: Vec<&[Token]> = tokens.chunks(13).collect();
            assert!(
                bits(&backend, weights, kv_type, &chunks) == whole,
                "{isa}: chunks"
            );
            let single: Vec<&[Token]> = tokens.chunks(1).collect();
            assert!(
                bits(&backend, weights, kv_type, &single) == whole,
                "{isa}: single tokens"
            );
            // In other cells, interleaved with two other texts, in batches of 50.
            let mut mixed = [text(0, 70, 3, 3), text(1, 60, 4, 3), text(2, 40, 5, 3)].concat();
            mixed.sort_by_key(|t| (t.pos, t.text));
            let batches: Vec<&[Token]> = mixed.chunks(50).collect();
            let own = bits(&backend, weights, kv_type, &batches);
            let own = own
                .iter()
                .filter(|(t, _)| t.text == 0)
                .map(|(_, logits)| logits);
            assert!(
                own.eq(whole.iter().map(|(_, logits)| logits)),
                "{isa}: with other texts"
            );
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    for isa in Isa::all_available() {
        let weights = quantized();
        let tokens = text(0, 90, 0, 2);
        let batches: Vec<&[Token]> = vec![&tokens[..80], &tokens[80..81], &tokens[81..]];
        let one = bits(&backend(isa, 1), &weights, KvType::F16, &batches);
        for n_threads in [2, 3, 5] {
            let some = bits(&backend(isa, n_threads), &weights, KvType::F16, &batches);
            assert!(some == one, "{isa}: {n_threads} threads");
        }
    }
}
