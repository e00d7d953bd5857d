//! A decode loop of a few lines, so that these tests depend on memory, model and backend alone.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use kv_core::backend::{Backend, RowKind, RowSpan};
use kv_core::batch::{Batch, BatchRules, validate};
use kv_core::graph::{GraphInputs, GraphOutputs, GraphShape};
use kv_core::layers::RowLayout;
use kv_core::memory::{Memory, MemoryInputs, Recurrent, RecurrentConfig};
use kv_core::{KvType, LayerIdx, SeqId, TokenId};
use model_core::architecture::{Model, Registry};
use model_core::gguf::GgufFile;

/// One tensor of a reference file.
pub(crate) fn tensor(name: &str, tensor: &str) -> Vec<f32> {
    let path = format!(
        "{}/tests/data/{name}.reference.safetensors",
        env!("CARGO_MANIFEST_DIR")
    );
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let words = file
        .tensor(tensor)
        .unwrap()
        .data()
        .as_chunks::<4>()
        .0
        .iter();
    words.map(|b| f32::from_le_bytes(*b)).collect()
}

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

/// A model on a backend with a memory for three sequences.
pub(crate) struct Runner<B: Backend> {
    backend: B,
    model: Arc<dyn Model>,
    weights: B::Weights,
    rows: B::Rows,
    pub(crate) memory: Recurrent,
}

impl<B: Backend> Runner<B> {
    pub(crate) fn new(backend: B, name: &str, n_snapshots: u32) -> Self {
        let path = format!("{}/tests/data/{name}.gguf", env!("CARGO_MANIFEST_DIR"));
        let file = Arc::new(GgufFile::open(path).unwrap());
        let mut registry = Registry::new();
        model_mamba::register(&mut registry);
        let model = registry.model(file.metadata(), &*file).unwrap();
        let config = RecurrentConfig::new(3).with_snapshots(n_snapshots);
        let layout = RowLayout::new(model.layers(), &[], KvType::F32).unwrap();
        let layout = layout
            .with_states(model.layers(), config.n_rows() as usize)
            .unwrap();
        let memory = Recurrent::new(config).unwrap();
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

    /// Feeds tokens of one sequence; the logits of the last.
    pub(crate) fn feed_for_last(&mut self, seq: u32, tokens: &[u32]) -> Vec<f32> {
        let mut batch = Batch::new();
        for (at, &token) in tokens.iter().enumerate() {
            let entry = batch.push_token(TokenId(token)).in_sequence(SeqId(seq));
            if at + 1 == tokens.len() {
                entry.with_output();
            }
        }
        self.decode(&batch, 512).concat()
    }

    /// The state that a sequence is at, of one layer.
    pub(crate) fn state(&self, seq: u32, layer: u32, kind: RowKind) -> Vec<f32> {
        let at = self.memory.states(SeqId(seq)).last().unwrap().row;
        let layer = LayerIdx(layer);
        let row = self.model.layers().recurrent(layer).unwrap();
        let len = match kind {
            RowKind::Conv => row.conv_row,
            _ => row.state_row,
        };
        let mut bytes = vec![0; len * 4];
        let span = RowSpan {
            layer,
            kind,
            first: at,
            len: 1,
        };
        self.backend
            .read_rows(&self.rows, span, &mut bytes)
            .unwrap();
        let words = bytes.as_chunks::<4>().0.iter();
        words.map(|b| f32::from_le_bytes(*b)).collect()
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
