//! [`Runner`]: a model on a backend with a memory for three sequences.

use std::collections::HashMap;
use std::sync::Arc;

use kv_backend::{Backend, RowKind, RowSpan, RowStorage};
use kv_backend::{GraphInputs, GraphOutputs};
use kv_core::{
    Causality, CellIdx, LayerIdx, SeqId, TokenId,
    batch::{Batch, BatchRules, PositionRule, validate_with},
    layers::RecentTokens,
    memory::{Composite, Memory, MemoryConfig, MemoryInputs, Streams, SwaSize},
};
use kv_graph::{GraphShape, Input, Op};
use kv_rows::{KvType, KvTypes, OldKvTypes, RowLayout};
use model_core::aged::with_layers;
use model_core::architecture::Model;

use crate::{Case, best};

/// Sequences of every memory here.
const N_SEQS: u32 = 3;

/// The settings of a model's memory.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Type of keys and values.
    pub kv_type: KvType,
    /// Types of those of old tokens, where they have their own.
    pub old: Option<OldKvTypes>,
    /// Sizes.
    pub memory: MemoryConfig,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            kv_type: KvType::F32,
            old: None,
            memory: MemoryConfig {
                n_ctx: 512,
                n_seqs: N_SEQS,
                streams: Streams::Shared,
                n_ubatch: 512,
                causality: Causality::Causal,
                swa: SwaSize::Window,
                n_snapshots: 0,
                n_active: None,
            },
        }
    }
}

impl Setup {
    /// The usual one with this type of keys and values.
    pub fn with_type(kv_type: KvType) -> Self {
        Self {
            kv_type,
            ..Self::default()
        }
    }

    /// The usual one, where all but these tokens of a sequence have this type.
    pub fn with_old(old: KvType, recent: RecentTokens) -> Self {
        Self {
            old: Some(OldKvTypes {
                k: old,
                v: old,
                recent,
            }),
            ..Self::default()
        }
    }

    /// The usual one with these streams.
    pub fn with_streams(streams: Streams) -> Self {
        let mut setup = Self::default();
        setup.memory.streams = streams;
        setup
    }

    /// The usual one, in which windows drop no rows and states are kept.
    pub fn that_keeps_all_rows() -> Self {
        let mut setup = Self::with_snapshots(3);
        setup.memory.swa = SwaSize::Full;
        setup
    }

    /// The usual one with so many earlier states of each sequence.
    pub fn with_snapshots(n_snapshots: u32) -> Self {
        let mut setup = Self::default();
        setup.memory.n_snapshots = n_snapshots;
        setup
    }
}

/// A model on a backend with a memory for three sequences.
pub struct Runner<B: Backend> {
    backend: B,
    /// The model.
    pub model: Arc<dyn Model>,
    weights: B::Weights,
    rows: B::Rows,
    /// By shape, and whether rows are given in place of tokens.
    programs: HashMap<(GraphShape, bool), B::Program>,
    position_rule: PositionRule,
    plain_attention: Option<usize>,
    /// The memory of the sequences.
    pub memory: Composite,
}

impl<B: Backend> Runner<B> {
    /// The memory that the model's layers ask for.
    pub fn new(backend: B, case: &Case, setup: &Setup) -> Self {
        let memory = |model: &dyn Model| Composite::new(model.layers(), &setup.memory).unwrap();
        Self::with_memory(backend, case, setup, memory)
    }

    /// Another memory than that.
    pub fn with_memory(
        mut backend: B,
        case: &Case,
        setup: &Setup,
        memory: impl FnOnce(&dyn Model) -> Composite,
    ) -> Self {
        let (file, metadata) = case.open();
        let model = case.model_of(&metadata, &*file);
        let types = KvTypes {
            old: setup.old,
            ..setup.kv_type.into()
        };
        let model = match types.old.map(|old| model.layers().with_recent(old.recent)) {
            Some(aged) => with_layers(model, &aged.unwrap()),
            None => model,
        };
        let memory = memory(&*model);
        let custom_ops = model.custom_ops();
        if !custom_ops.is_empty() {
            backend.set_custom_ops(custom_ops).unwrap();
        }
        let mut cells = vec![0; model.layers().parts().len()];
        for part in memory.parts() {
            cells[part.config().part.as_usize()] = part.n_cells() as usize;
        }
        let layout = RowLayout::new(model.layers(), &cells, types).unwrap();
        let n_states = setup.memory.n_state_rows();
        let layout = layout.with_states(model.layers(), n_states).unwrap();
        let is_coordinates = |op: &Op| matches!(op, Op::Input(Input::Coordinates));
        let one = GraphShape {
            n_tokens: 1,
            n_outputs: 1,
        };
        let graph = model.graph(one).unwrap();
        let position_rule = if graph.nodes().iter().any(|n| is_coordinates(&n.op)) {
            PositionRule::Grid
        } else {
            PositionRule::Linear
        };
        Self {
            position_rule,
            weights: backend.load_weights(file, Default::default()).unwrap(),
            rows: backend.allocate(&layout).unwrap(),
            programs: HashMap::new(),
            plain_attention: None,
            backend,
            model,
            memory,
        }
    }

    /// Forgets what was compiled, so that the next batch is compiled anew.
    pub fn forget_programs(&mut self) {
        self.programs.clear();
    }

    /// The same with another model of the same weights and memory.
    #[must_use]
    pub fn with_model(self, model: Arc<dyn Model>) -> Self {
        Self { model, ..self }
    }

    /// The same with attention in three steps over the first `n_kv` cells of every part.
    #[must_use]
    pub fn with_plain_attention(self, n_kv: usize) -> Self {
        Self {
            plain_attention: Some(n_kv),
            ..self
        }
    }

    /// Feeds a batch; logits of the wanted entries in order of the batch.
    pub fn decode(&mut self, batch: &Batch, n_ubatch: u32) -> Vec<Vec<f32>> {
        let n_vocab = self.model.vocab_size();
        let rules = BatchRules {
            n_batch: 512,
            n_seqs: N_SEQS,
            n_vocab: u32::try_from(n_vocab).unwrap(),
            n_embd: u32::try_from(self.model.given_dim()).unwrap(),
        };
        let positions = |seq| self.memory.positions(seq);
        let valid = validate_with(batch, &rules, self.position_rule, positions).unwrap();
        let mut found: Vec<(u32, Vec<f32>)> = Vec::new();
        let (mut inputs, mut outputs) = (MemoryInputs::default(), GraphOutputs::default());
        let layout = self.rows.layout().clone();
        let mut steps = self.memory.begin(&valid, n_ubatch).unwrap();
        while let Some(ubatch) = steps.next(&mut inputs) {
            let shape = GraphShape {
                n_tokens: ubatch.n_tokens() as usize,
                n_outputs: ubatch.output_rows.len(),
            };
            let given_rows = !ubatch.embeddings.is_empty();
            let compiled_for = compiled_for(&self.backend, shape);
            let key = (compiled_for, given_rows);
            let program = self.programs.entry(key).or_insert_with(|| {
                let of_rows = given_rows.then(|| self.model.of_rows().unwrap());
                let model = of_rows.as_ref().unwrap_or(&self.model);
                let mut graph = model.graph(compiled_for).unwrap();
                assert!(
                    graph.row_counts().is_some(),
                    "rows of tokens and outputs meet"
                );
                if let Some(n_kv) = self.plain_attention {
                    graph = graph.with_plain_attention(|_| n_kv).unwrap();
                }
                let compiled = self.backend.compile(&graph, &self.weights, &layout);
                compiled.unwrap()
            });
            let coordinates: Vec<[u32; 3]> = ubatch.coordinates().collect();
            let graph_inputs = GraphInputs {
                shape: Some(shape),
                coordinates: match self.position_rule {
                    PositionRule::Grid => &coordinates,
                    PositionRule::Linear => &[],
                },
                tokens: &ubatch.tokens,
                embeddings: &ubatch.embeddings,
                positions: &ubatch.positions,
                output_rows: &ubatch.output_rows,
                parts: &inputs.parts,
                states: &inputs.states,
                cancel: None,
                ..GraphInputs::default()
            };
            self.backend
                .run(program, &mut self.rows, &graph_inputs, &mut outputs)
                .unwrap();
            let rows = ubatch.output_rows.iter();
            let entries = rows.map(|&row| ubatch.entries[row as usize]);
            found.extend(entries.zip(outputs.first().chunks(n_vocab).map(<[f32]>::to_vec)));
        }
        found.sort_by_key(|(entry, _)| *entry);
        found.into_iter().map(|(_, logits)| logits).collect()
    }

    /// Feeds tokens of one sequence, all logits wanted.
    pub fn feed(&mut self, seq: u32, tokens: &[u32], n_ubatch: u32) -> Vec<f32> {
        let mut batch = Batch::new();
        for &token in tokens {
            let entry = batch.push_token(TokenId(token)).in_sequence(SeqId(seq));
            entry.with_output();
        }
        self.decode(&batch, n_ubatch).concat()
    }

    /// Feeds tokens of one sequence; the logits of the last.
    pub fn feed_for_last(&mut self, seq: u32, tokens: &[u32]) -> Vec<f32> {
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
    pub fn greedy(&mut self, prompt: &[u32], n: usize) -> Vec<u32> {
        let (mut tokens, mut text) = (prompt.to_vec(), Vec::new());
        while text.len() < n {
            tokens = vec![best(&self.feed_for_last(0, &tokens))];
            text.push(tokens[0]);
        }
        text
    }

    /// The number of values [`Self::rows`] gives: `None` where the layer has no such rows.
    pub fn n_values(&self, layer: LayerIdx, kind: RowKind) -> Option<usize> {
        let n_rows = match kind {
            RowKind::K | RowKind::V => self.n_tokens(),
            RowKind::Conv | RowKind::State => 1,
        };
        Some(n_rows as usize * self.row_len(layer, kind)?)
    }

    /// True if a layer has keys alone: those of an indexer.
    pub fn is_indexer(&self, layer: LayerIdx) -> bool {
        let memory = self.model.layers().attention(layer);
        memory.is_some_and(|memory| memory.v_dim == 0)
    }

    fn n_tokens(&self) -> u32 {
        let positions = self.memory.positions(SeqId(0)).unwrap();
        positions.last.0 + 1
    }

    fn row_len(&self, layer: LayerIdx, kind: RowKind) -> Option<usize> {
        let layers = self.model.layers();
        let attention = layers.attention(layer);
        let recurrent = layers.recurrent(layer);
        match kind {
            RowKind::K => attention.map(|memory| memory.kv_heads * memory.k_dim),
            RowKind::V => attention.map(|memory| memory.kv_heads * memory.v_dim),
            RowKind::Conv => recurrent.map(|memory| memory.conv_row),
            RowKind::State => recurrent.map(|memory| memory.state_row),
        }
    }

    /// The rows of one kind that a sequence fed alone left behind: its state, or its keys or values
    /// in order of position.
    pub fn rows(&self, layer: LayerIdx, kind: RowKind) -> Vec<f32> {
        self.rows_of(layer, kind, self.n_tokens())
    }

    /// The same for a sequence of so many tokens, of which some may share a position.
    pub fn rows_of(&self, layer: LayerIdx, kind: RowKind, n_tokens: u32) -> Vec<f32> {
        let (first, n_rows) = match kind {
            RowKind::K | RowKind::V => (CellIdx(0), n_tokens),
            RowKind::Conv | RowKind::State => (self.state_row(), 1),
        };
        let span = RowSpan {
            layer,
            kind,
            first,
            len: n_rows,
        };
        let row_len = self.row_len(layer, kind).unwrap();
        let mut bytes = vec![0; n_rows as usize * row_len * 4];
        self.backend
            .read_rows(&self.rows, span, &mut bytes)
            .unwrap();
        let words = bytes.as_chunks::<4>().0.iter();
        words.map(|b| f32::from_le_bytes(*b)).collect()
    }

    fn state_row(&self) -> CellIdx {
        let states = self.memory.states().unwrap();
        states.states(SeqId(0)).last().unwrap().row
    }
}

/// The shape of the program for a ubatch: a larger one where the backend runs it with fewer tokens
/// and outputs, so that all models are computed so.
fn compiled_for(backend: &impl Backend, ubatch: GraphShape) -> GraphShape {
    let GraphShape {
        n_tokens,
        n_outputs,
    } = ubatch;
    if backend.program_capacities().is_empty() || n_tokens == 1 {
        return ubatch;
    }
    GraphShape {
        n_tokens: n_tokens + 33,
        // Graphs that give all outputs select no rows.
        n_outputs: if n_outputs == n_tokens {
            n_tokens + 33
        } else {
            n_outputs + 2
        },
    }
}
