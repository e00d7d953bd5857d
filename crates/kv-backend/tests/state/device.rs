//! A memory of any layers with the rows of a simulated backend: what a state is saved from and
//! restored into.

use std::collections::BTreeMap;

use kv_backend::state::{Fingerprint, SavedState, SeqTokens, StateError, StateToSave, save};
use kv_backend::{BackendError, RowKind, RowSpan};
use kv_core::{
    Causality, CellIdx, LayerIdx, PartIdx, Pos, SeqId, TokenId, Window,
    batch::{Batch, BatchRules, PositionRule, UBatch, validate_with},
    layers::{AttentionMemory, LayerMap, LayerMemory, RecurrentMemory},
    memory::{
        Composite, Memory, MemoryConfig, MemoryInputs, RestoreInto, RowCopy, Seqs, Snapshot,
        Streams, SwaSize, TargetRows, invariants,
    },
};
use kv_graph::weights::MemoryWeights;
use kv_graph::{GraphBuilder, GraphShape};
use kv_rows::{KvType, LayerRows, RowLayout, RowShape, StateType};

pub(crate) const FULL: LayerMemory = attention(Window::Full);
pub(crate) const NEAR: LayerMemory = attention(Window::Sliding(8));
pub(crate) const STATES: LayerMemory = LayerMemory::Recurrent(RecurrentMemory {
    conv_row: 3,
    state_row: 4,
});

/// The layers of every shape of memory.
pub(crate) const SHAPES: [&[LayerMemory]; 8] = [
    &[FULL],
    &[NEAR, NEAR],
    &[FULL, NEAR, LayerMemory::Nothing],
    &[STATES, STATES],
    &[STATES, FULL],
    &[NEAR, STATES, FULL],
    // Values in keys, and rows of other layers.
    &[latent(Window::Full), NEAR, shared_with(0), shared_with(1)],
    &[latent(Window::Sliding(8)), STATES, FULL, shared_with(0)],
];

const fn attention(window: Window) -> LayerMemory {
    LayerMemory::Attention(AttentionMemory {
        kv_heads: 2,
        k_dim: 2,
        v_dim: 3,
        window,
    })
}

const fn latent(window: Window) -> LayerMemory {
    LayerMemory::Latent(AttentionMemory {
        kv_heads: 1,
        k_dim: 5,
        v_dim: 4,
        window,
    })
}

const fn shared_with(layer: u32) -> LayerMemory {
    LayerMemory::SharedWith(LayerIdx(layer))
}

pub(crate) fn config() -> MemoryConfig {
    MemoryConfig {
        n_ctx: 64,
        n_seqs: 3,
        streams: Streams::Shared,
        n_ubatch: 16,
        causality: Causality::Causal,
        swa: SwaSize::Window,
        n_snapshots: 2,
        n_active: None,
    }
}

/// That, and larger, in streams, and small with all rows of windowed layers.
pub(crate) fn configs() -> [MemoryConfig; 4] {
    [
        config(),
        MemoryConfig {
            n_ctx: 300,
            ..config()
        },
        MemoryConfig {
            streams: Streams::PerSequence,
            ..config()
        },
        MemoryConfig {
            swa: SwaSize::Full,
            n_ctx: 50,
            ..config()
        },
    ]
}

/// Tokens whose ids differ from sequence to sequence.
pub(crate) fn ids(seq: u32, n: u32) -> Vec<u32> {
    (0..n).map(|i| 100 * seq + i).collect()
}

/// The rows that a layer stores.
fn stored(layer: &LayerRows) -> impl Iterator<Item = (RowKind, RowShape)> {
    let v = layer.stored_v().map(|v| (RowKind::V, v));
    [(RowKind::K, layer.k)].into_iter().chain(v)
}

/// The result of a restoration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RestoreReport {
    pub(crate) n_tokens: u32,
    pub(crate) rows_taken: TargetRows,
}

/// A memory, and rows by layer and kind.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Device {
    pub(crate) memory: Composite,
    pub(crate) layout: RowLayout,
    pub(crate) rows: BTreeMap<(LayerIdx, RowKind), Vec<u8>>,
    /// The type of its saved states.
    pub(crate) saved_state_type: Option<KvType>,
    layers: LayerMap,
}

impl Device {
    pub(crate) fn new(layers: &[LayerMemory], config: &MemoryConfig, kv_type: KvType) -> Self {
        let layers = LayerMap::new(layers.to_vec());
        let cells = config.cells_per_part(&layers).unwrap();
        let layout = RowLayout::new(&layers, &cells, kv_type).unwrap();
        let layout = layout.with_states(&layers, config.n_state_rows()).unwrap();
        Self::with_layout(layers, config, layout)
    }

    /// The same with states of another type.
    pub(crate) fn with_state_type(
        layers: &[LayerMemory],
        config: &MemoryConfig,
        state_type: StateType,
    ) -> Self {
        let plain = Self::new(layers, config, KvType::F16);
        let layout = plain.layout.with_state_type(state_type);
        Self::with_layout(plain.layers, config, layout)
    }

    fn with_layout(layers: LayerMap, config: &MemoryConfig, layout: RowLayout) -> Self {
        let mut rows = BTreeMap::new();
        for l in layout.layers() {
            for (kind, shape) in stored(l) {
                rows.insert((l.layer, kind), vec![0xee; l.n_rows * shape.bytes()]);
            }
        }
        for s in layout.states() {
            rows.insert(
                (s.layer, RowKind::Conv),
                vec![0xee; s.n_rows * s.conv_bytes()],
            );
            rows.insert(
                (s.layer, RowKind::State),
                vec![0xee; s.n_rows * s.state_bytes()],
            );
        }
        Self {
            memory: Composite::new(&layers, config).unwrap(),
            layout,
            rows,
            saved_state_type: None,
            layers,
        }
    }

    pub(crate) fn fingerprint(&self) -> Fingerprint {
        let shape = GraphShape {
            n_tokens: 1,
            n_outputs: 0,
        };
        let graph = GraphBuilder::new(shape).finish(&[]).unwrap();
        Fingerprint::new("test", 1000, &self.layers, &graph, &MemoryWeights::new())
    }

    pub(crate) fn read(&self, span: RowSpan) -> &[u8] {
        let range = span.byte_range(&self.layout).unwrap();
        &self.rows[&(span.layer, span.kind)][range]
    }

    pub(crate) fn write(&mut self, span: RowSpan, bytes: &[u8]) {
        let range = span.byte_range(&self.layout).unwrap();
        let rows = self.rows.get_mut(&(span.layer, span.kind)).unwrap();
        rows[range].copy_from_slice(bytes);
    }

    fn span(layer: LayerIdx, kind: RowKind, row: CellIdx) -> RowSpan {
        RowSpan {
            layer,
            kind,
            first: row,
            len: 1,
        }
    }

    /// Evaluates tokens of text.
    pub(crate) fn feed(&mut self, seq: SeqId, tokens: &[u32]) {
        let batch = Batch::prompt(seq, tokens.iter().copied().map(TokenId));
        self.evaluate(&batch, PositionRule::Linear);
    }

    /// Evaluates tokens: a key tells its token and its layer, a state the tokens that went into it.
    /// Gives what the last ubatch was told.
    pub(crate) fn evaluate(&mut self, batch: &Batch, rule: PositionRule) -> MemoryInputs {
        let rules = BatchRules {
            n_batch: 64,
            n_seqs: 3,
            n_vocab: 1000,
            n_embd: 1,
        };
        let batch = validate_with(batch, &rules, rule, |seq| self.memory.positions(seq)).unwrap();
        let plan = self.memory.plan(&batch, 5).unwrap();
        let mut inputs = MemoryInputs::default();
        for planned in &plan {
            drop(self.memory.commit(planned));
            self.memory.inputs(planned, &mut inputs);
            self.store_rows(&planned.ubatch, &inputs);
            self.store_states(&planned.ubatch, &inputs);
        }
        inputs
    }

    fn store_rows(&mut self, ubatch: &UBatch, inputs: &MemoryInputs) {
        for layer in self.layout.layers().to_vec() {
            let cells = &inputs.parts[layer.part.as_usize()].cells;
            for (&cell, &token) in cells.iter().zip(&ubatch.tokens) {
                for (kind, shape) in stored(&layer) {
                    let sign = if kind == RowKind::K { 1.0 } else { -1.0 };
                    // Exact in f16, too.
                    let base = (token % 13) as f32 + (token / 100) as f32 / 64.0;
                    let base = base + layer.layer.0 as f32 / 4.0;
                    let own = |i: usize| sign * (base + i as f32 / 32.0);
                    let values: Vec<f32> = (0..shape.len()).map(own).collect();
                    let mut bytes = vec![0; shape.bytes()];
                    shape.encode(&values, &mut bytes);
                    self.write(Self::span(layer.layer, kind, cell), &bytes);
                }
            }
        }
    }

    fn store_states(&mut self, ubatch: &UBatch, inputs: &MemoryInputs) {
        for states in self.layout.states().to_vec() {
            for (kind, row_bytes) in [
                (RowKind::Conv, states.conv_bytes()),
                (RowKind::State, states.state_bytes()),
            ] {
                for group in &inputs.states {
                    let mut state = vec![0u8; row_bytes];
                    if let Some(row) = group.source {
                        state.copy_from_slice(self.read(Self::span(states.layer, kind, row)));
                    }
                    for (n_rows, &row) in (1u32..).zip(&group.rows) {
                        let token = ubatch.tokens[row as usize];
                        for byte in state.iter_mut() {
                            *byte = byte
                                .wrapping_mul(31)
                                .wrapping_add(token as u8 ^ states.layer.0 as u8);
                        }
                        if let Some(store) = group.stores.iter().find(|s| s.n_rows == n_rows) {
                            self.write(Self::span(states.layer, kind, store.to), &state);
                        }
                    }
                }
            }
        }
    }

    /// Does to rows what a copy or a compaction left to do.
    pub(crate) fn copy_rows(&mut self, copies: &[RowCopy]) {
        for copy in copies {
            for layer in self.layout.layers().to_vec() {
                for (kind, shape) in stored(&layer).filter(|_| layer.part == copy.part) {
                    let at = |cell: CellIdx| cell.as_usize() * shape.bytes();
                    let len = copy.len as usize * shape.bytes();
                    let rows = self.rows.get_mut(&(layer.layer, kind)).unwrap();
                    rows.copy_within(at(copy.from)..at(copy.from) + len, at(copy.to));
                }
            }
        }
    }

    /// The key of the first layer of a part, as it is stored.
    pub(crate) fn key(&self, part: PartIdx, cell: CellIdx) -> Vec<u8> {
        let mut layers = self.layout.layers().iter();
        let layer = layers.find(|layer| layer.part == part).unwrap().layer;
        self.read(Self::span(layer, RowKind::K, cell)).to_vec()
    }

    pub(crate) fn save(&self, seqs: Seqs, kv_type: Option<KvType>) -> Vec<u8> {
        self.try_save(seqs, kv_type).unwrap()
    }

    pub(crate) fn try_save(
        &self,
        seqs: Seqs,
        kv_type: Option<KvType>,
    ) -> Result<Vec<u8>, StateError> {
        self.save_snapshot(&self.memory.snapshot(seqs).unwrap(), kv_type)
    }

    pub(crate) fn save_snapshot(
        &self,
        snapshot: &Snapshot,
        kv_type: Option<KvType>,
    ) -> Result<Vec<u8>, StateError> {
        let tokens = [SeqTokens {
            seq: SeqId(1),
            evaluated: vec![TokenId(5), TokenId(6)],
            pending: vec![TokenId(7)],
        }];
        let state = StateToSave {
            fingerprint: &self.fingerprint(),
            snapshot,
            tokens: &tokens,
            layout: &self.layout,
            kv_type,
            state_type: self.saved_state_type,
            note: "",
        };
        let mut bytes = Vec::new();
        let mut read = |span: RowSpan, out: &mut [u8]| -> Result<(), BackendError> {
            out.copy_from_slice(self.read(span));
            Ok(())
        };
        let n = save(&state, &mut read, &mut bytes)?;
        assert_eq!(n, bytes.len() as u64);
        Ok(bytes)
    }

    /// The steps of an engine.
    pub(crate) fn restore(
        &mut self,
        bytes: &[u8],
        into: RestoreInto,
    ) -> Result<RestoreReport, StateError> {
        let state = SavedState::parse(bytes)?;
        self.fingerprint().check(state.fingerprint())?;
        state.check_rows(&self.layout)?;
        let restored = self.memory.restore(state.snapshot(), into)?;
        let layout = self.layout.clone();
        let mut write = |span: RowSpan, bytes: &[u8]| -> Result<(), BackendError> {
            self.write(span, bytes);
            Ok(())
        };
        state.write_rows(&restored, &layout, &mut write).unwrap();
        self.check();
        Ok(RestoreReport {
            n_tokens: restored.n_tokens,
            rows_taken: restored.rows_taken,
        })
    }

    pub(crate) fn check(&self) {
        for part in self.memory.parts() {
            invariants::check(part).unwrap();
        }
    }

    /// Everything that a sequence remembers, whichever rows it is in: by part the positions with
    /// the values of their keys and values, then its states.
    pub(crate) fn seen(&self, seq: SeqId) -> Vec<(Pos, Vec<u8>)> {
        let snapshot = self.memory.snapshot(Seqs::One(seq)).unwrap();
        let mut seen = Vec::new();
        for part in snapshot.parts() {
            let mut tokens = part.cells.clone();
            tokens.sort_by_key(|t| t.cell.pos);
            for token in tokens {
                for layer in self.layout.layers().iter().filter(|l| l.part == part.part) {
                    for (kind, shape) in stored(layer) {
                        let bytes = self.read(Self::span(layer.layer, kind, token.row));
                        let mut values = vec![0.0; shape.len()];
                        shape.decode(bytes, &mut values);
                        let values = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                        seen.push((token.cell.pos, values));
                    }
                }
            }
        }
        for state in snapshot
            .states()
            .unwrap_or_default()
            .iter()
            .flat_map(|c| &c.states)
        {
            for layer in self.layout.states() {
                for kind in [RowKind::Conv, RowKind::State] {
                    let bytes = self.read(Self::span(layer.layer, kind, state.row));
                    seen.push((state.pos, bytes.to_vec()));
                }
            }
        }
        seen
    }
}
