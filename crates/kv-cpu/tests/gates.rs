//! Gates of two products with biases, and the matrix that reads them: computed with their products
//! for many rows and for one, which is rounded meanwhile, and where rows are rounded for a few. The
//! bits are the same.

#![allow(clippy::unwrap_used)]

use std::num::NonZeroUsize;
use std::sync::Arc;

use kv_backend::Backend;
use kv_backend::{GraphInputs, GraphOutputs};
use kv_block::BlockFormat;
use kv_contract::{Random, in_blocks, tiny_weights};
use kv_cpu::activations::ActivationKind;
use kv_cpu::isa::Isa;
use kv_cpu::{ActivationChoice, CpuBackend, CpuConfig};
use kv_graph::weights::{MemoryWeights, Weight, WeightSource};
use kv_graph::{Activation, Affine, Graph, GraphBuilder, GraphShape, Input};
use kv_rows::RowLayout;

/// Columns of the rows that are multiplied.
const COLUMNS: usize = 256;
const N_TOKENS: usize = 70;

/// The width of gated rows, their activation, and their use.
#[derive(Clone, Copy, Debug)]
enum Case {
    /// They are what is wanted.
    Output(Activation, usize),
    /// Two matrices read them.
    Read(Activation, usize),
}

impl Case {
    fn graph(self, n_tokens: usize) -> Graph {
        let (Self::Output(activation, width) | Self::Read(activation, width)) = self;
        let n_outputs = n_tokens;
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens,
            n_outputs,
        });
        let x = b.input(Input::Embeddings { dim: COLUMNS }).unwrap();
        let gate = b
            .affine("gate", x, Affine::new("wg").bias("bg"), width)
            .unwrap();
        let up = b
            .affine("up", x, Affine::new("wu").bias("bu"), width)
            .unwrap();
        let gated = b.gate("gated", activation, gate, up).unwrap();
        if matches!(self, Self::Output(..)) {
            return b.finish(&[gated]).unwrap();
        }
        let first = b.linear("first", gated, "w1", 40).unwrap();
        let second = b.linear("second", gated, "w2", 16).unwrap();
        b.finish(&[first, second]).unwrap()
    }

    /// The bits of all rows, so many at once.
    fn bits(
        self,
        backend: &CpuBackend,
        source: &Arc<dyn WeightSource>,
        at_once: usize,
    ) -> Vec<Vec<u32>> {
        let weights = backend
            .load_weights(Arc::clone(source), Default::default())
            .unwrap();
        let layout = RowLayout::default();
        let mut rows = backend.allocate(&layout).unwrap();
        let x = Random::new(9).values(N_TOKENS * COLUMNS);
        let mut all: Vec<Vec<u32>> = Vec::new();
        for x in x.chunks(at_once * COLUMNS) {
            let graph = self.graph(x.len() / COLUMNS);
            let mut program = backend.compile(&graph, &weights, &layout).unwrap();
            let inputs = GraphInputs {
                embeddings: x,
                ..GraphInputs::default()
            };
            let mut outputs = GraphOutputs::default();
            let run = backend.run(&mut program, &mut rows, &inputs, &mut outputs);
            run.unwrap();
            all.resize(outputs.values.len(), Vec::new());
            for (all, values) in all.iter_mut().zip(&outputs.values) {
                all.extend(values.iter().map(|v| v.to_bits()));
            }
        }
        all
    }
}

/// Random weights; in long blocks, which nothing makes of numbers, random bytes (clear bits bound
/// their scales).
fn weights(graph: &Graph, format: BlockFormat) -> Arc<dyn WeightSource> {
    let plain = tiny_weights(graph, 5);
    if format.block_len() <= 32 {
        return in_blocks(&*plain, format);
    }
    let mut random = Random::new(17);
    let mut weights = MemoryWeights::new();
    for weight in plain.names().iter().map(|name| plain.get(name).unwrap()) {
        let shape = weight.shape().to_vec();
        weights.insert(match shape.len() {
            1 => weight,
            _ => {
                let n = format.row_bytes(shape.iter().product()).unwrap();
                let bytes: Vec<u8> = (0..n).map(|_| random.bits() as u8 & 0xb7).collect();
                Weight::new(weight.name(), shape, format, bytes.into()).unwrap()
            }
        });
    }
    Arc::new(weights)
}

fn backend(isa: Isa, n_threads: usize) -> CpuBackend {
    CpuBackend::new(CpuConfig {
        n_threads: NonZeroUsize::new(n_threads),
        isa: Some(isa),
        activations: ActivationChoice::Always(ActivationKind::Int8),
        ..CpuConfig::default()
    })
    .unwrap()
}

fn same_bits(format: BlockFormat, cases: &[Case]) {
    for (isa, &case) in Isa::all_available()
        .into_iter()
        .flat_map(|isa| cases.iter().map(move |case| (isa, case)))
    {
        let source = weights(&case.graph(1), format);
        let whole = case.bits(&backend(isa, 2), &source, N_TOKENS);
        for values in &whole {
            let numbers = values.iter().map(|b| f32::from_bits(*b));
            assert!(numbers.clone().all(f32::is_finite) && numbers.clone().any(|v| v != 0.0));
        }
        for (n_threads, at_once) in [(1, 1), (3, 1), (3, 2), (3, 33)] {
            let got = case.bits(&backend(isa, n_threads), &source, at_once);
            assert!(
                got == whole,
                "{isa}, {case:?}: {at_once} at once, {n_threads} threads"
            );
        }
    }
}

#[test]
fn of_plain_weights() {
    let cases = [
        Case::Output(Activation::Silu, 40),
        Case::Output(Activation::GeluTanh, 224),
        Case::Read(Activation::GeluTanh, 224),
    ];
    same_bits(BlockFormat::F32, &cases);
    // Rounded, where there are products of it.
    let more = [Case::Read(Activation::Silu, 1312)];
    same_bits(BlockFormat::BF16, &[&cases[..], &more].concat());
}

/// Rows that are less than one part which is rounded by itself, and no whole number of them.
#[test]
fn of_blocks_with_a_scale_each() {
    let cases = [
        Case::Output(Activation::Silu, 40),
        Case::Output(Activation::GeluTanh, 224),
        Case::Read(Activation::GeluTanh, 224),
        Case::Read(Activation::Silu, 1312),
    ];
    same_bits(BlockFormat::Q8_0, &cases);
}

#[test]
fn of_long_blocks() {
    let cases = [
        Case::Output(Activation::Silu, 256),
        Case::Read(Activation::Silu, 1280),
    ];
    same_bits(BlockFormat::Q4_K, &cases);
}
