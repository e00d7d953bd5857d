//! A decode loop of a few lines, so that these tests depend on memory, model and backend alone.

#![allow(clippy::unwrap_used)]
#![allow(dead_code)] // each test file uses a part of this

mod cases;

use std::collections::HashMap;
use std::num::NonZero;
use std::sync::Arc;

use kv_candle::CandleBackend;
use kv_core::backend::{Backend, RowKind, RowSpan};
use kv_core::batch::{Batch, BatchRules, validate};
use kv_core::graph::{GraphInputs, GraphOutputs, GraphShape};
use kv_core::layers::RowLayout;
use kv_core::memory::{
    AnyMemory, Memory, MemoryConfig, MemoryInputs, Pair, Streams, SwaSize, Unified,
};
use kv_core::{Causality, CellIdx, KvType, LayerIdx, SeqId, TokenId, Window};
use kv_cpu::{CpuBackend, CpuConfig};
use model_core::architecture::{Model, Registry};
use model_core::gguf::{GgufFile, Metadata};

// As above.
#[allow(unused_imports)]
pub(crate) use cases::{CASES, Case, KeyOrder, Setting};

/// What an independent implementation computed.
pub(crate) struct Reference {
    pub(crate) prompts: Vec<Vec<u32>>,
    /// One row of `vocab` logits for each of the last tokens of each prompt: all of the first.
    pub(crate) logits: Vec<Vec<f32>>,
    /// What follows each prompt.
    pub(crate) greedy: Vec<Vec<u32>>,
    /// Keys and values of the first prompt, by name: width of a head, and values.
    rows: HashMap<String, (usize, Vec<f32>)>,
}

impl Reference {
    /// Keys and values of a layer for the first prompt, where they were recorded.
    pub(crate) fn rows(&self, layer: u32) -> Option<[(usize, Vec<f32>); 2]> {
        let of = |letter: &str| self.rows.get(&format!("{letter}_l{layer}_0")).cloned();
        Some([of("k")?, of("v")?])
    }
}

pub(crate) fn path(file: &str) -> String {
    format!("{}/tests/data/{file}", env!("CARGO_MANIFEST_DIR"))
}

impl Case {
    pub(crate) fn named(name: &str) -> &'static Self {
        CASES.iter().find(|case| case.name == name).unwrap()
    }

    pub(crate) fn open(&self) -> (Arc<GgufFile>, Metadata) {
        let file = Arc::new(GgufFile::open(path(&format!("{}.gguf", self.file))).unwrap());
        let mut metadata = file.metadata().clone();
        for &(key, value) in self.settings {
            match value {
                Setting::Count(n) => metadata.insert(key, n),
                Setting::Number(x) => metadata.insert(key, x),
                Setting::Text(text) => metadata.insert(key, text),
            };
        }
        (file, metadata)
    }

    pub(crate) fn model(&self) -> Arc<dyn Model> {
        let (file, metadata) = self.open();
        registry().model(&metadata, &*file).unwrap()
    }

    pub(crate) fn reference(&self) -> Reference {
        let bytes = std::fs::read(path(&format!("{}.reference.safetensors", self.name))).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let words = |name: &str| -> Vec<[u8; 4]> {
            file.tensor(name)
                .unwrap()
                .data()
                .as_chunks::<4>()
                .0
                .to_vec()
        };
        let ids = |name: &str, i: usize| -> Vec<u32> {
            words(&format!("{name}_{i}"))
                .into_iter()
                .map(u32::from_le_bytes)
                .collect()
        };
        let floats =
            |name: &str| -> Vec<f32> { words(name).into_iter().map(f32::from_le_bytes).collect() };
        let rows = file.names().into_iter().filter(|name| name.contains("_l"));
        let rows = rows.map(|name| {
            let dim = *file.tensor(name).unwrap().shape().last().unwrap();
            (name.to_owned(), (dim, floats(name)))
        });
        Reference {
            prompts: (0..3).map(|i| ids("ids", i)).collect(),
            logits: (0..3).map(|i| floats(&format!("logits_{i}"))).collect(),
            greedy: (0..3).map(|i| ids("greedy", i)).collect(),
            rows: rows.collect(),
        }
    }
}

pub(crate) fn registry() -> Registry {
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    registry
}

pub(crate) fn cpu() -> CpuBackend {
    cpu_with(2)
}

pub(crate) fn cpu_with(n_threads: usize) -> CpuBackend {
    CpuBackend::new(CpuConfig {
        n_threads: NonZero::new(n_threads),
        ..CpuConfig::default()
    })
    .unwrap()
}

pub(crate) fn candle() -> CandleBackend {
    CandleBackend::cpu()
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
    pub(crate) fn new(backend: B, case: &Case, kv_type: KvType, streams: Streams) -> Self {
        let config = MemoryConfig {
            n_ctx: 128,
            streams,
            ..CONFIG
        };
        let memory = |model: &dyn Model| AnyMemory::new(model.layers(), &config).unwrap();
        Self::from_file(backend, case.open(), kv_type, memory)
    }

    pub(crate) fn with_memory(
        backend: B,
        name: &str,
        kv_type: KvType,
        memory: impl FnOnce(&dyn Model) -> AnyMemory,
    ) -> Self {
        let file = Arc::new(GgufFile::open(path(&format!("{name}.gguf"))).unwrap());
        let metadata = file.metadata().clone();
        Self::from_file(backend, (file, metadata), kv_type, memory)
    }

    fn from_file(
        backend: B,
        (file, metadata): (Arc<GgufFile>, Metadata),
        kv_type: KvType,
        memory: impl FnOnce(&dyn Model) -> AnyMemory,
    ) -> Self {
        let model = registry().model(&metadata, &*file).unwrap();
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

    pub(crate) fn n_layers(&self) -> u32 {
        u32::try_from(self.model.layers().iter().count()).unwrap()
    }

    /// Keys or values of a sequence that was fed alone, in order of position.
    pub(crate) fn rows(&self, layer: u32, kind: RowKind) -> Vec<f32> {
        let n_tokens = self.memory.positions(SeqId(0)).unwrap().last.0 + 1;
        let of = LayerIdx(layer);
        let memory = self.model.layers().attention(of).unwrap();
        let dim = match kind {
            RowKind::K => memory.k_dim,
            _ => memory.v_dim,
        };
        let span = RowSpan {
            layer: of,
            kind,
            first: CellIdx(0),
            len: n_tokens,
        };
        let mut bytes = vec![0; n_tokens as usize * memory.kv_heads * dim * 4];
        self.backend
            .read_rows(&self.rows, span, &mut bytes)
            .unwrap();
        let words = bytes.as_chunks::<4>().0.iter();
        words.map(|b| f32::from_le_bytes(*b)).collect()
    }

    /// The likeliest tokens after these, one after the other.
    pub(crate) fn greedy(&mut self, prompt: &[u32], n: usize) -> Vec<u32> {
        let n_vocab = self.model.vocab_size();
        let (mut tokens, mut text) = (prompt.to_vec(), Vec::new());
        while text.len() < n {
            let logits = self.feed(0, &tokens, 512);
            let best = last_rows(&logits, n_vocab).iter().enumerate();
            let best = best.max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
            tokens = vec![u32::try_from(best).unwrap()];
            text.push(tokens[0]);
        }
        text
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

/// The last values, as many as the reference has.
pub(crate) fn last_rows(values: &[f32], n: usize) -> &[f32] {
    &values[values.len() - n..]
}

/// Largest absolute difference.
pub(crate) fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(x, y)| (x - y).abs())
        .fold(0.0, f32::max)
}
