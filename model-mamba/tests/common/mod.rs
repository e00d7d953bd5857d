//! What the tests of this crate share: the models, their references, and a decode loop of a few
//! lines, so that these tests depend on memory, model and backend alone.

// Each test file uses a part of this, and a panic is how a test fails.
#![allow(dead_code, clippy::unwrap_used, clippy::panic)]

use std::collections::HashMap;
use std::num::NonZero;
use std::sync::Arc;

use kv_candle::CandleBackend;
use kv_core::Causality;
use kv_core::backend::{Backend, RowKind, RowSpan};
use kv_core::batch::{Batch, BatchRules, validate};
use kv_core::graph::{GraphInputs, GraphOutputs, GraphShape};
use kv_core::layers::RowLayout;
use kv_core::memory::{AnyMemory, Memory, MemoryConfig, MemoryInputs, Streams, SwaSize};
use kv_core::{CellIdx, KvType, LayerIdx, SeqId, TokenId};
use kv_cpu::{CpuBackend, CpuConfig};
use model_core::architecture::{Model, Registry};
use model_core::gguf::{GgufFile, Metadata};

/// Sequences of every memory here.
const N_SEQS: u32 = 3;

/// How a file's rows of K lie, beside the reference's.
#[derive(Clone, Copy, Debug)]
pub(crate) enum KeyOrder {
    /// The same.
    Same,
    /// The first values, so many of each head, as pairs.
    Pairs(usize),
}

/// A file with a reference.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    /// Name of the reference.
    pub(crate) name: &'static str,
    /// Name of the file.
    pub(crate) file: &'static str,
    /// Settings beside those of the file.
    pub(crate) settings: &'static [(&'static str, f32)],
    pub(crate) keys: KeyOrder,
}

const fn case(name: &'static str) -> Case {
    Case {
        name,
        file: name,
        settings: &[],
        keys: KeyOrder::Same,
    }
}

/// Every model with a reference of logits.
pub(crate) const CASES: &[Case] = &[
    case("mamba"),
    case("mamba_untied"),
    // The same weights with two settings; the file has the same for all norms.
    Case {
        file: "falcon_mamba",
        ..case("falcon_mamba_eps5")
    },
    Case {
        settings: &[("mamba.ssm.dt_b_c_rms_epsilon", 1e-6)],
        ..case("falcon_mamba")
    },
    case("mamba2"),
    Case {
        keys: KeyOrder::Pairs(8),
        ..case("bamba")
    },
    case("falcon_h1"),
    case("jamba"),
    // Its keys do not rotate, but lie as if they did.
    Case {
        keys: KeyOrder::Pairs(16),
        ..case("granitemoehybrid")
    },
];

pub(crate) fn path(file: &str) -> String {
    format!("{}/tests/data/{file}", env!("CARGO_MANIFEST_DIR"))
}

impl Case {
    pub(crate) fn open(&self) -> (Arc<GgufFile>, Metadata) {
        let file = Arc::new(GgufFile::open(path(&format!("{}.gguf", self.file))).unwrap());
        let mut metadata = file.metadata().clone();
        for &(key, value) in self.settings {
            metadata.insert(key, value);
        }
        (file, metadata)
    }

    pub(crate) fn model(&self) -> Arc<dyn Model> {
        let (file, metadata) = self.open();
        registry().model(&metadata, &*file).unwrap()
    }

    pub(crate) fn reference(&self) -> Reference {
        Reference::open(self.name)
    }
}

pub(crate) fn registry() -> Registry {
    let mut registry = Registry::new();
    model_mamba::register(&mut registry);
    registry
}

/// What an independent implementation computed.
pub(crate) struct Reference {
    tensors: HashMap<String, (Vec<usize>, Vec<[u8; 4]>)>,
}

impl Reference {
    fn open(name: &str) -> Self {
        let bytes = std::fs::read(path(&format!("{name}.reference.safetensors"))).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.iter().map(|(name, tensor)| {
            let words = tensor.data().as_chunks::<4>().0.to_vec();
            (name.to_owned(), (tensor.shape().to_vec(), words))
        });
        Self {
            tensors: tensors.collect(),
        }
    }

    fn ids(&self, name: &str) -> Vec<u32> {
        let words = self.tensors[name].1.iter();
        words.map(|b| u32::from_le_bytes(*b)).collect()
    }

    /// All three prompts.
    pub(crate) fn prompts(&self) -> Vec<Vec<u32>> {
        (0..3).map(|i| self.ids(&format!("ids_{i}"))).collect()
    }

    /// What follows a prompt.
    pub(crate) fn greedy(&self, prompt: usize) -> Vec<u32> {
        self.ids(&format!("greedy_{prompt}"))
    }

    /// Logits of the last tokens of a prompt (of all of the first).
    pub(crate) fn logits(&self, prompt: usize) -> Vec<f32> {
        self.values(&format!("logits_{prompt}")).unwrap().1
    }

    /// Shape and values of a tensor, where there is one.
    pub(crate) fn values(&self, name: &str) -> Option<(Vec<usize>, Vec<f32>)> {
        let (shape, words) = self.tensors.get(name)?;
        let values = words.iter().map(|b| f32::from_le_bytes(*b)).collect();
        Some((shape.clone(), values))
    }
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

/// A model on a backend with a memory for three sequences.
pub(crate) struct Runner<B: Backend> {
    backend: B,
    pub(crate) model: Arc<dyn Model>,
    weights: B::Weights,
    rows: B::Rows,
    programs: HashMap<GraphShape, B::Program>,
    pub(crate) memory: AnyMemory,
}

impl<B: Backend> Runner<B> {
    pub(crate) fn new(backend: B, case: &Case, n_snapshots: u32) -> Self {
        let (file, metadata) = case.open();
        let model = registry().model(&metadata, &*file).unwrap();
        let config = MemoryConfig {
            n_ctx: 512,
            n_seqs: N_SEQS,
            streams: Streams::Shared,
            n_ubatch: 512,
            causality: Causality::Causal,
            swa: SwaSize::Window,
            n_snapshots,
        };
        let cells = config.cells_per_part(model.layers()).unwrap();
        let layout = RowLayout::new(model.layers(), &cells, KvType::F32).unwrap();
        let layout = layout
            .with_states(model.layers(), config.n_state_rows())
            .unwrap();
        let memory = AnyMemory::new(model.layers(), &config).unwrap();
        Self {
            weights: backend.load_weights(file).unwrap(),
            rows: backend.allocate(&layout).unwrap(),
            programs: HashMap::new(),
            backend,
            model,
            memory,
        }
    }

    /// Feeds a batch; logits of the wanted entries in order of the batch.
    pub(crate) fn decode(&mut self, batch: &Batch, n_ubatch: u32) -> Vec<Vec<f32>> {
        let n_vocab = self.model.vocab_size();
        let rules = BatchRules {
            n_batch: 512,
            n_seqs: N_SEQS,
            n_vocab: u32::try_from(n_vocab).unwrap(),
            n_embd: u32::try_from(self.model.embedding_dim()).unwrap(),
        };
        let valid = validate(batch, &rules, |seq| self.memory.positions(seq)).unwrap();
        let mut found: Vec<(u32, Vec<f32>)> = Vec::new();
        let (mut inputs, mut outputs) = (MemoryInputs::default(), GraphOutputs::default());
        let layout = self.backend.layout(&self.rows).clone();
        let mut steps = self.memory.begin(&valid, n_ubatch).unwrap();
        while let Some(ubatch) = steps.next(&mut inputs) {
            let shape = GraphShape {
                n_tokens: ubatch.tokens.len(),
                n_outputs: ubatch.output_rows.len(),
            };
            let program = self.programs.entry(shape).or_insert_with(|| {
                let graph = self.model.graph(shape).unwrap();
                let compiled = self.backend.compile(&graph, &self.weights, &layout);
                compiled.unwrap()
            });
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
                .run(program, &mut self.rows, &graph_inputs, &mut outputs)
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

    /// The likeliest tokens after these, one after the other.
    pub(crate) fn greedy(&mut self, prompt: &[u32], n: usize) -> Vec<u32> {
        let (mut tokens, mut text) = (prompt.to_vec(), Vec::new());
        while text.len() < n {
            let logits = self.feed_for_last(0, &tokens);
            let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
            tokens = vec![best.unwrap().0 as u32];
            text.push(tokens[0]);
        }
        text
    }

    /// The rows of one kind that a sequence fed alone left behind: its state, or its keys or values
    /// in order of position.
    pub(crate) fn rows(&self, layer: u32, kind: RowKind) -> Vec<f32> {
        let seq = SeqId(0);
        let n_tokens = self.memory.positions(seq).unwrap().last.0 + 1;
        let of = LayerIdx(layer);
        let (first, n_rows, len) = match kind {
            RowKind::K | RowKind::V => {
                let memory = self.model.layers().attention(of).unwrap();
                let dim = if kind == RowKind::K {
                    memory.k_dim
                } else {
                    memory.v_dim
                };
                (CellIdx(0), n_tokens, memory.kv_heads * dim)
            }
            RowKind::Conv | RowKind::State => {
                let memory = self.model.layers().recurrent(of).unwrap();
                let is_conv = kind == RowKind::Conv;
                let len = if is_conv {
                    memory.conv_row
                } else {
                    memory.state_row
                };
                (self.state_row(seq), 1, len)
            }
        };
        let span = RowSpan {
            layer: of,
            kind,
            first,
            len: n_rows,
        };
        let mut bytes = vec![0; n_rows as usize * len * 4];
        self.backend
            .read_rows(&self.rows, span, &mut bytes)
            .unwrap();
        let words = bytes.as_chunks::<4>().0.iter();
        words.map(|b| f32::from_le_bytes(*b)).collect()
    }

    fn state_row(&self, seq: SeqId) -> CellIdx {
        let states = match &self.memory {
            AnyMemory::Recurrent(memory) => memory,
            AnyMemory::Hybrid(memory) => memory.second(),
            other => panic!("{other:?} has no states"),
        };
        states.states(seq).last().unwrap().row
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
