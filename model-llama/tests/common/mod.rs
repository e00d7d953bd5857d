//! A decode loop of a few lines, so that these tests depend on memory, model and backend alone.

#![allow(clippy::unwrap_used)]
#![allow(dead_code)] // each test file uses a part of this

use std::sync::Arc;

use kv_core::backend::Backend;
use kv_core::batch::{Batch, BatchRules, validate};
use kv_core::graph::{GraphInputs, GraphOutputs, GraphShape};
use kv_core::layers::RowLayout;
use kv_core::memory::{
    AnyMemory, Memory, MemoryConfig, MemoryInputs, Pair, Streams, SwaSize, Unified,
};
use kv_core::{Causality, KvType, SeqId, TokenId, Window};
use model_core::architecture::{Model, Registry};
use model_core::gguf::GgufFile;

/// Prompts and logits of an independent implementation.
pub(crate) struct Reference {
    pub(crate) prompts: Vec<Vec<u32>>,
    /// One row of `vocab` logits for each token of each prompt.
    pub(crate) logits: Vec<Vec<f32>>,
}

pub(crate) fn reference(name: &str) -> Reference {
    let path = format!(
        "{}/tests/data/{name}.reference.safetensors",
        env!("CARGO_MANIFEST_DIR")
    );
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: &str| -> Vec<[u8; 4]> {
        file.tensor(name)
            .unwrap()
            .data()
            .as_chunks::<4>()
            .0
            .to_vec()
    };
    let ids = |i| {
        words(&format!("ids_{i}"))
            .into_iter()
            .map(u32::from_le_bytes)
            .collect()
    };
    let logits = |i| {
        words(&format!("logits_{i}"))
            .into_iter()
            .map(f32::from_le_bytes)
            .collect()
    };
    Reference {
        prompts: (0..3).map(ids).collect(),
        logits: (0..3).map(logits).collect(),
    }
}

/// A memory for three sequences.
pub(crate) const CONFIG: MemoryConfig = MemoryConfig {
    n_ctx: 512,
    n_seqs: 3,
    streams: Streams::Shared,
    n_ubatch: 512,
    causality: Causality::Causal,
    swa: SwaSize::Window,
    n_snapshots: 0,
};

/// The memory that a model with two windows asks for, with `n_cells` cells for the windowed layers.
pub(crate) fn tight(model: &dyn Model, streams: Streams, n_cells: u32) -> AnyMemory {
    let config = MemoryConfig { streams, ..CONFIG };
    let AnyMemory::Iswa(iswa) = AnyMemory::new(model.layers(), &config).unwrap() else {
        unreachable!("two windows")
    };
    let [first, second] = iswa.parts().map(|part| {
        let mut config = *part.config();
        if config.window != Window::Full {
            config.n_cells = n_cells;
        }
        Unified::new(config).unwrap()
    });
    AnyMemory::Iswa(Pair::new(first, second).unwrap())
}

/// A model on a backend with a memory for three sequences.
pub(crate) struct Runner<B: Backend> {
    backend: B,
    model: Arc<dyn Model>,
    weights: B::Weights,
    rows: B::Rows,
    memory: AnyMemory,
}

impl<B: Backend> Runner<B> {
    pub(crate) fn new(backend: B, name: &str, kv_type: KvType, streams: Streams) -> Self {
        let config = MemoryConfig {
            n_ctx: 128,
            streams,
            ..CONFIG
        };
        let memory = |model: &dyn Model| AnyMemory::new(model.layers(), &config).unwrap();
        Self::with_memory(backend, name, kv_type, memory)
    }

    pub(crate) fn with_memory(
        backend: B,
        name: &str,
        kv_type: KvType,
        memory: impl FnOnce(&dyn Model) -> AnyMemory,
    ) -> Self {
        let path = format!("{}/tests/data/{name}.gguf", env!("CARGO_MANIFEST_DIR"));
        let file = Arc::new(GgufFile::open(path).unwrap());
        let mut registry = Registry::new();
        model_llama::register(&mut registry);
        let model = registry.model(file.metadata(), &*file).unwrap();
        let memory = memory(&*model);
        let mut cells = vec![0; model.layers().parts().len()];
        for part in memory.attention_parts() {
            cells[part.config().part.as_usize()] = part.n_cells() as usize;
        }
        let layout = RowLayout::new(model.layers(), &cells, kv_type).unwrap();
        let (weights, rows) = (
            backend.load_weights(file).unwrap(),
            backend.allocate(&layout).unwrap(),
        );
        Self {
            backend,
            model,
            weights,
            rows,
            memory,
        }
    }

    /// Feeds a batch; logits of the wanted entries in order of the batch.
    pub(crate) fn decode(&mut self, batch: &Batch, n_ubatch: u32) -> Vec<Vec<f32>> {
        let n_vocab = self.model.vocab_size();
        let rules = BatchRules {
            n_batch: 512,
            n_seqs: 3,
            n_vocab: u32::try_from(n_vocab).unwrap(),
            n_embd: u32::try_from(self.model.embedding_dim()).unwrap(),
        };
        let valid = validate(batch, &rules, |seq| self.memory.positions(seq)).unwrap();
        let mut found: Vec<(u32, Vec<f32>)> = Vec::new();
        let (mut inputs, mut outputs) = (MemoryInputs::default(), GraphOutputs::default());
        let mut steps = self.memory.begin(&valid, n_ubatch).unwrap();
        while let Some(ubatch) = steps.next(&mut inputs) {
            let shape = GraphShape {
                n_tokens: ubatch.tokens.len(),
                n_outputs: ubatch.output_rows.len(),
            };
            let graph = self.model.graph(shape).unwrap();
            let layout = self.backend.layout(&self.rows).clone();
            let mut program = self
                .backend
                .compile(&graph, &self.weights, &layout)
                .unwrap();
            let graph_inputs = GraphInputs {
                tokens: &ubatch.tokens,
                embeddings: &ubatch.embeddings,
                positions: &ubatch.positions,
                output_rows: &ubatch.output_rows,
                parts: &inputs.parts,
                states: &inputs.states,
                ..GraphInputs::default()
            };
            self.backend
                .run(&mut program, &mut self.rows, &graph_inputs, &mut outputs)
                .unwrap();
            let entries = ubatch
                .output_rows
                .iter()
                .map(|&row| ubatch.entries[row as usize]);
            found.extend(entries.zip(outputs.first().chunks(n_vocab).map(<[f32]>::to_vec)));
        }
        found.sort_by_key(|(entry, _)| *entry);
        found.into_iter().map(|(_, logits)| logits).collect()
    }

    /// Feeds tokens of one sequence, all logits wanted.
    pub(crate) fn feed(&mut self, seq: u32, tokens: &[u32], n_ubatch: u32) -> Vec<f32> {
        let mut batch = Batch::new();
        for &token in tokens {
            batch
                .push_token(TokenId(token))
                .in_sequence(SeqId(seq))
                .with_output();
        }
        self.decode(&batch, n_ubatch).concat()
    }
}

/// Largest absolute difference.
pub(crate) fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(x, y)| (x - y).abs())
        .fold(0.0, f32::max)
}
