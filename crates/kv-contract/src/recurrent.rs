//! The contract of recurrent layers: convolutions and scans over ragged groups of rows, and the
//! states that they leave behind.

use std::ops::Range;

use super::compiled::CompiledGraph;
use super::evaluate::{Memory, evaluate};
use super::larger::Program;
use super::ops::{builder, compare, step};
use super::scene::{Step, memory_weights};
use super::{Random, Subject, assert_close};
use kv_backend::{Backend, BackendError, RowKind, RowSpan};
use kv_core::{
    CellIdx, LayerIdx, Pos, PosRange, SeqId, TokenId,
    batch::{Batch, BatchRules, validate},
    layers::{LayerMap, LayerMemory, RecurrentMemory},
    memory::{Memory as _, MemoryInputs, Recurrent, RecurrentConfig, Seqs, StateGroup},
};
use kv_graph::weights::MemoryWeights;
use kv_graph::{Activation, ConvKernels, ConvSpec, Graph, Input, ScanSpec};
use kv_rows::{KvType, RowLayout, StateType};

pub(super) const LAYER: LayerIdx = LayerIdx(1);
const N_SEQS: u32 = 3;

/// A recurrent layer by itself.
pub(super) trait Layer: Copy {
    /// The memory of its layer.
    fn memory(self) -> RecurrentMemory;
    /// Values of an input row.
    fn dim(self) -> usize;
    /// The columns of an input row that are step sizes.
    fn steps(self) -> Range<usize>;
    /// From embedding rows to outputs.
    fn graph(self, n_tokens: usize) -> Graph;
    /// Its weights, with a decay that decays.
    fn weights(self) -> MemoryWeights;

    fn layout(self, n_rows: u32) -> RowLayout {
        let row = LayerMemory::Recurrent(self.memory());
        let map = LayerMap::new(vec![LayerMemory::Nothing, row]);
        let layout = RowLayout::new(&map, &[], KvType::F32).unwrap();
        layout.with_states(&map, n_rows as usize).unwrap()
    }
}

/// Random weights of a graph, but for the decay `a`.
pub(super) fn decaying_weights(graph: &Graph, shape: [usize; 2]) -> MemoryWeights {
    let mut weights = memory_weights(graph, 71);
    let mut random = Random::new(72);
    let n = shape.iter().product();
    let a: Vec<f32> = (0..n).map(|_| -0.1 - 2.0 * random.value().abs()).collect();
    weights.insert_f32("a", &shape, &a).unwrap();
    weights
}

/// Sizes of one recurrent layer.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    channels: usize,
    d_state: usize,
    width: usize,
}

const SMALL: Sizes = Sizes {
    channels: 8,
    d_state: 4,
    width: 4,
};
pub(super) const SIZES: [Sizes; 4] = [
    SMALL,
    Sizes {
        channels: 33,
        d_state: 16,
        width: 4,
    },
    Sizes {
        channels: 5,
        d_state: 3,
        width: 1,
    },
    Sizes {
        channels: 150,
        d_state: 16,
        width: 2,
    },
];

impl Sizes {
    fn conv(self) -> ConvSpec {
        ConvSpec {
            width: self.width,
            weight: "conv.w".into(),
            further: Vec::new(),
            bias: Some("conv.b".into()),
        }
    }

    fn scan(self) -> ScanSpec {
        ScanSpec {
            d_state: self.d_state,
            a: "a".into(),
            d: "d".into(),
        }
    }
}

impl Layer for Sizes {
    fn memory(self) -> RecurrentMemory {
        RecurrentMemory {
            conv_row: (self.width - 1) * self.channels,
            state_row: self.channels * self.d_state,
        }
    }

    /// x, dt, B and C.
    fn dim(self) -> usize {
        2 * (self.channels + self.d_state)
    }

    fn steps(self) -> Range<usize> {
        self.channels..2 * self.channels
    }

    /// Convolution, activation and scan; the outputs are those of convolution and scan.
    fn graph(self, n_tokens: usize) -> Graph {
        let mut b = builder(n_tokens, 0);
        let all = b.input(Input::Embeddings { dim: self.dim() }).unwrap();
        let states = b.input(Input::States).unwrap();
        let (c, s) = (self.channels, self.d_state);
        let x = b.columns("x", all, 0..c).unwrap();
        let dt = b.columns("dt", all, c..2 * c).unwrap();
        let bs = b.columns("B", all, 2 * c..2 * c + s).unwrap();
        let cs = b.columns("C", all, 2 * c + s..2 * (c + s)).unwrap();
        let conv = b.conv("conv", LAYER, &self.conv(), [x, states]).unwrap();
        let u = b.activate("silu", Activation::Silu, conv).unwrap();
        let y = b.scan("scan", LAYER, &self.scan(), [u, dt, bs, cs, states]);
        b.finish(&[conv, y.unwrap()]).unwrap()
    }

    fn weights(self) -> MemoryWeights {
        decaying_weights(&self.graph(1), [self.channels, self.d_state])
    }
}

/// A recurrent memory with rows of a backend and of the evaluator.
pub(super) struct RecurrentPair<'a, B: Backend, L> {
    subject: &'a Subject<B>,
    sizes: L,
    weights: MemoryWeights,
    loaded: B::Weights,
    layout: RowLayout,
    rows: B::Rows,
    memory: Recurrent,
    evaluated: Memory,
    random: Random,
    tolerance: f64,
}

impl<'a, B: Backend, L: Layer> RecurrentPair<'a, B, L> {
    pub(super) fn new(subject: &'a Subject<B>, sizes: L) -> Self {
        Self::with_state_type(subject, sizes, StateType::F32)
    }

    /// The same with states of a type, to which they are rounded after every token: where the last
    /// bits of an operation differ, a value may be rounded one way or the other.
    pub(super) fn with_state_type(
        subject: &'a Subject<B>,
        sizes: L,
        state_type: StateType,
    ) -> Self {
        let memory = Recurrent::new(RecurrentConfig::new(N_SEQS).with_snapshots(2)).unwrap();
        let layout = sizes.layout(memory.config().n_rows());
        let layout = layout.with_state_type(state_type);
        let weights = sizes.weights();
        let backend = &subject.backend;
        Self {
            subject,
            sizes,
            loaded: subject.load(&weights),
            rows: backend.allocate(&layout).unwrap(),
            weights,
            layout,
            memory,
            evaluated: Memory::default(),
            random: Random::new(73),
            tolerance: match state_type {
                StateType::F32 => subject.tolerance.recurrent,
                StateType::F16 => subject.tolerance.recurrent + 2e-3,
                StateType::BF16 => subject.tolerance.recurrent + 1.6e-2,
            },
        }
    }

    /// The same for single tokens, whose values can all be small.
    pub(super) fn by_single_tokens(self) -> Self {
        let tolerance = 10.0 * self.tolerance;
        Self { tolerance, ..self }
    }

    pub(super) fn rows(&self) -> &B::Rows {
        &self.rows
    }

    pub(super) fn evaluated(&self) -> &Memory {
        &self.evaluated
    }

    pub(super) fn memory(&mut self) -> &mut Recurrent {
        &mut self.memory
    }

    /// Prompts and single tokens of several sequences, mixed in any order, run after run.
    pub(super) fn run_mixed(&mut self) {
        for seqs in [
            &[0][..],
            &[1, 1, 0, 1, 1, 2],
            &[2, 1, 0],
            &[0; 20],
            &[0, 1, 0, 2, 2, 0, 1],
            &[2],
        ] {
            let step = self.step(seqs);
            self.run(&step);
        }
    }

    /// The next tokens of these sequences, in this order, as one ubatch.
    pub(super) fn step(&mut self, seqs: &[u32]) -> Step {
        let mut batch = Batch::new();
        for &seq in seqs {
            batch.push_token(TokenId(0)).in_sequence(SeqId(seq));
        }
        let rules = BatchRules {
            n_batch: 512,
            n_seqs: N_SEQS,
            n_vocab: 1,
            n_embd: 1,
        };
        let batch = validate(&batch, &rules, |seq| self.memory.positions(seq)).unwrap();
        let mut inputs = MemoryInputs::default();
        let mut steps = self.memory.begin(&batch, 512).unwrap();
        steps.next(&mut inputs).unwrap();
        let mut step = Step {
            embeddings: self.random.values(seqs.len() * self.sizes.dim()),
            states: inputs.states,
            ..Step::default()
        };
        // Step sizes of all magnitudes, also where softplus is nearly 0 or nearly linear.
        for row in step.embeddings.chunks_exact_mut(self.sizes.dim()) {
            row[self.sizes.steps()]
                .iter_mut()
                .for_each(|dt| *dt = 12.0 * *dt - 2.0);
        }
        step
    }

    /// Runs one step on the backend and compares with the definition.
    pub(super) fn run(&mut self, step: &Step) -> Vec<Vec<f32>> {
        let n_tokens = step.embeddings.len() / self.sizes.dim();
        let (graph, inputs) = (self.sizes.graph(n_tokens), step.inputs());
        let (weights, layout) = (&self.weights, &self.layout);
        let wanted = evaluate(&graph, weights, layout, &mut self.evaluated, &inputs);
        let (loaded, rows) = (&self.loaded, &mut self.rows);
        let outputs = self.subject.run(&graph, loaded, rows, &inputs);
        for (got, want) in outputs.iter().zip(&wanted) {
            let what = format!("{n_tokens} rows of {} values", self.sizes.dim());
            assert_close(&what, got, want, self.tolerance);
        }
        outputs
    }
}

/// Every value through the function.
pub fn activate_activates<B: Backend>(subject: &Subject<B>) {
    for activation in [Activation::Silu, Activation::GeluTanh, Activation::GeluErf] {
        for n in [1, 7, 40] {
            let mut b = builder(n, 0);
            let x = b.input(Input::Embeddings { dim: 300 }).unwrap();
            let y = b.activate("y", activation, x).unwrap();
            let graph = b.finish(&[y, x]).unwrap();
            let tolerance = subject.tolerance.elementwise;
            let inputs = step(n, 0, 300, 1);
            compare(subject, &graph, MemoryWeights::new(), &inputs, tolerance);
        }
    }
}

/// The named columns of every head, and no others.
pub fn columns_of_heads_cut<B: Backend>(subject: &Subject<B>) {
    for n in [1, 5] {
        let mut b = builder(n, 0);
        let x = b.input(Input::Embeddings { dim: 36 }).unwrap();
        let heads = b.reshape("heads", x, &[n, 3, 12]).unwrap();
        let outputs = [0..12, 0..6, 6..12, 5..8].map(|columns| {
            let name = format!("{columns:?}");
            b.columns(&name, heads, columns).unwrap()
        });
        assert_eq!(b.shape_of(outputs[3]), [n, 3, 3]);
        let graph = b.finish(&outputs).unwrap();
        let (weights, step) = (MemoryWeights::new(), step(n, 0, 36, 1));
        compare(subject, &graph, weights, &step, 0.0);
    }
    // Halves of the heads of a product, which backends may compute apart.
    let mut b = builder(3, 0);
    let x = b.input(Input::Embeddings { dim: 32 }).unwrap();
    let all = b.linear("all", x, "w", 64).unwrap();
    let heads = b.reshape("heads", all, &[3, 4, 16]).unwrap();
    let halves = [0..8, 8..16].map(|columns| {
        let name = format!("{columns:?}");
        b.columns(&name, heads, columns).unwrap()
    });
    let graph = b.finish(&halves).unwrap();
    let (weights, step) = (memory_weights(&graph, 83), step(3, 0, 32, 1));
    compare(subject, &graph, weights, &step, subject.tolerance.linear);
}

/// The named columns, and no others.
pub fn columns_cut<B: Backend>(subject: &Subject<B>) {
    for n in [1, 5] {
        let mut b = builder(n, 0);
        let x = b.input(Input::Embeddings { dim: 37 }).unwrap();
        let outputs = [0..37, 0..16, 16..37, 36..37, 3..3].map(|columns| {
            let name = format!("{columns:?}");
            b.columns(&name, x, columns).unwrap()
        });
        let again = b.columns("again", outputs[2], 1..4).unwrap();
        let graph = b.finish(&[&outputs[..], &[again]].concat()).unwrap();
        let (weights, step) = (MemoryWeights::new(), step(n, 0, 37, 1));
        compare(subject, &graph, weights, &step, 0.0);
    }
}

/// A convolution whose kernel is in several weights.
pub fn kernels_of_convolutions_join<B: Backend>(subject: &Subject<B>) {
    for sizes in [
        JoinedKernels { part: 5, width: 4 },
        JoinedKernels { part: 32, width: 2 },
    ] {
        RecurrentPair::new(subject, sizes).run_mixed();
    }
}

/// Three kernels of so many channels.
#[derive(Clone, Copy)]
struct JoinedKernels {
    part: usize,
    width: usize,
}

impl Layer for JoinedKernels {
    fn memory(self) -> RecurrentMemory {
        RecurrentMemory {
            conv_row: (self.width - 1) * self.dim(),
            state_row: 0,
        }
    }

    fn dim(self) -> usize {
        3 * self.part
    }

    fn steps(self) -> Range<usize> {
        0..0
    }

    fn graph(self, n_tokens: usize) -> Graph {
        let mut b = builder(n_tokens, 0);
        let x = b.input(Input::Embeddings { dim: self.dim() }).unwrap();
        let states = b.input(Input::States).unwrap();
        let kernels = ConvKernels {
            width: self.width,
            weights: ["q", "k", "v"].map(str::to_owned),
            shape: vec![1, self.part, 1, self.width],
        };
        let y = b.conv_joined("conv", LAYER, &kernels, [x, states]);
        b.finish(&[y.unwrap()]).unwrap()
    }

    fn weights(self) -> MemoryWeights {
        memory_weights(&self.graph(1), 84)
    }
}

/// States start as zeros; what is written reads back, and nothing else changes.
pub fn fresh_states_are_zero_and_read_back<B: Backend>(subject: &Subject<B>) {
    let (backend, n_rows) = (&subject.backend, 5);
    let layout = SMALL.layout(n_rows);
    let mut rows = backend.allocate(&layout).unwrap();
    for (kind, len) in [(RowKind::Conv, 24), (RowKind::State, 32)] {
        let span = |first, len| RowSpan {
            layer: LAYER,
            kind,
            first: CellIdx(first),
            len,
        };
        let mut all = vec![1; 5 * len * 4];
        backend.read_rows(&rows, span(0, n_rows), &mut all).unwrap();
        assert!(all.iter().all(|&b| b == 0));
        let values = Random::new(74).values(2 * len);
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        backend.write_rows(&mut rows, span(2, 2), &bytes).unwrap();
        backend.read_rows(&rows, span(0, n_rows), &mut all).unwrap();
        assert_eq!(all[2 * len * 4..4 * len * 4], bytes);
        assert!(all[..2 * len * 4].iter().all(|&b| b == 0));
        assert!(all[4 * len * 4..].iter().all(|&b| b == 0));
        let beyond = backend.read_rows(&rows, span(4, 2), &mut bytes.clone());
        let (end, n_rows) = (6, 5);
        assert!(matches!(
            beyond.unwrap_err(),
            BackendError::RowOutOfRange { end: e, n_rows: n, .. } if (e, n) == (end, n_rows)
        ));
        let short = backend.write_rows(&mut rows, span(0, 1), &[0; 3]);
        assert!(matches!(
            short,
            Err(BackendError::WrongLength { got: 3, .. })
        ));
        let other = RowSpan {
            layer: LayerIdx(0),
            ..span(0, 1)
        };
        let none = backend.read_rows(&rows, other, &mut vec![0; len * 4]);
        assert!(matches!(
            none,
            Err(BackendError::NoRows { layer: LayerIdx(0) })
        ));
    }
}

/// Prompts and single tokens of several sequences, mixed in any order, over several runs.
pub fn convolutions_and_scans_compute<B: Backend>(subject: &Subject<B>) {
    for sizes in SIZES {
        RecurrentPair::new(subject, sizes).run_mixed();
    }
}

/// A sequence that went back gives the same bits as one that never went further.
pub fn going_back_to_a_snapshot_is_as_if_nothing_followed<B: Backend>(subject: &Subject<B>) {
    let mut both = RecurrentPair::new(subject, SMALL);
    let prompt = both.step(&[0; 9]);
    both.run(&prompt);
    let copied = both.memory.copy(SeqId(0), SeqId(1), PosRange::ALL);
    copied.map(drop).unwrap();
    let further = both.step(&[0, 0]);
    both.run(&further);
    let back = PosRange::from(Pos(9)..);
    both.memory.remove(Seqs::One(SeqId(0)), back).unwrap();
    // One token of both sequences, which are at the same state again.
    let mut step = both.step(&[0, 1]);
    step.embeddings.copy_within(..SMALL.dim(), SMALL.dim());
    for values in both.run(&step) {
        let (a, b) = values.split_at(values.len() / 2);
        assert_eq!(a, b);
    }
}

/// A graph whose convolution or scan does not fit the layer's states, or has none.
pub fn states_of_another_shape_are_refused<B: Backend>(subject: &Subject<B>) {
    let compile = |layout: &RowLayout| {
        let compiled = subject.compile(&SMALL.graph(2), &SMALL.weights(), layout);
        compiled.err().unwrap()
    };
    let none = compile(&RowLayout::default());
    assert!(matches!(none, BackendError::NoRows { layer: LAYER }));
    let (width, d_state) = (3, 5);
    for other in [Sizes { width, ..SMALL }, Sizes { d_state, ..SMALL }] {
        let error = compile(&other.layout(4));
        assert!(matches!(error, BackendError::RowShape { layer: LAYER, .. }));
    }
}

/// Groups that cannot be computed are refused, and no state has changed.
pub fn unsound_states_are_refused<B: Backend>(subject: &Subject<B>) {
    let mut both = RecurrentPair::new(subject, SMALL);
    let good = both.step(&[0, 1, 0]);
    both.run(&good);
    let backend = &subject.backend;
    let n_rows = both.memory.config().n_rows();
    let dump = |rows: &B::Rows| {
        [(RowKind::Conv, 24), (RowKind::State, 32)].map(|(kind, len)| {
            let mut bytes = vec![0; n_rows as usize * len * 4];
            let span = RowSpan {
                layer: LAYER,
                kind,
                first: CellIdx(0),
                len: n_rows,
            };
            backend.read_rows(rows, span, &mut bytes).unwrap();
            bytes
        })
    };
    let before = dump(&both.rows);
    let graph = SMALL.graph(3);
    let mut compiled = CompiledGraph {
        backend,
        program: Program::compile(backend, &graph, &both.loaded, &both.layout).unwrap(),
        rows: both.rows,
    };
    let changes: [fn(&mut Vec<StateGroup>); 5] = [
        |groups| groups.clear(),
        |groups| groups[1].rows[0] = 2,
        |groups| groups[0].source = Some(CellIdx(999)),
        |groups| groups[0].stores.clear(),
        |groups| groups[1].stores[0].to = groups[0].stores[0].to,
    ];
    for change in changes {
        let mut step = good.clone();
        change(&mut step.states);
        let error = compiled.run(&step.inputs()).unwrap_err();
        assert!(
            matches!(error, BackendError::Input { input: i, .. } if i == "states"),
            "{error}"
        );
        assert!(dump(&compiled.rows) == before);
    }
}
