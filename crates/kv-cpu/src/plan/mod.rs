//! A graph becomes a list of steps with resolved weights and buffers in one arena.
//!
//! Three passes: [`resolve`] checks operands, weights and rows and makes symbolic steps (fusing
//! matrices of one input, norms and gates before them, residual sums and gates after); [`place`] gives every value its buffer by liveness.
//! Invariant: what a step writes overlaps nothing that it reads, and nothing that a later step
//! reads. Knows nothing of threads or of how steps are computed.

mod beside;
mod place;
mod resolve;
mod step_kind;
mod visit;

use std::sync::Arc;

use kv_core::Window;
use kv_core::backend::{BackendError, CustomOp};
use kv_core::graph::{Activation, AttendSpec, CustomSpec, Graph, PositionScale, RouteSpec};
use kv_core::layers::RowLayout;
use kv_core::rope::{RopeSections, RopeSpec};

use crate::activations::ActivationKind;
use crate::experts::Experts;
use crate::matrix::Matrix;
use crate::weights::CpuWeights;

pub(crate) use beside::{ConvKernel, HeadScanWeights, HeadValues, ScanWeights};

/// Where the values of a buffer are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// In the arena, from this value on.
    Arena(usize),
    /// In the caller's buffer for this output.
    Output(usize),
    /// In the caller's embedding rows.
    Embeddings,
}

/// `rows` rows of `width` values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Buf {
    pub(crate) place: Place,
    pub(crate) rows: usize,
    pub(crate) width: usize,
}

impl Buf {
    pub(crate) fn len(&self) -> usize {
        self.rows * self.width
    }
}

/// One of several matrices that are multiplied with the same rows.
#[derive(Clone, Debug)]
pub(crate) struct Product<V> {
    pub(crate) matrix: Arc<Matrix>,
    pub(crate) bias: Option<Arc<[f32]>>,
    /// What the product gates, where that was fused.
    pub(crate) gates: Option<Gated>,
    /// Added to the product, where a sum was fused.
    pub(crate) residual: Option<V>,
    pub(crate) out: V,
}

impl<V> Product<V> {
    /// Whether a matrix wants its activations to be of this kind.
    pub(crate) fn takes(&self, kind: ActivationKind) -> bool {
        let gated = self.gates.as_ref().map(|gated| &gated.matrix);
        let mut matrices = std::iter::once(&self.matrix).chain(gated);
        matrices.any(|matrix| matrix.activation_kind() == kind)
    }
}

/// The product of another matrix of the same shape with the same rows, which nothing but a gate reads.
#[derive(Clone, Debug)]
pub(crate) struct Gated {
    pub(crate) activation: Activation,
    pub(crate) matrix: Arc<Matrix>,
    pub(crate) bias: Option<Arc<[f32]>>,
    /// How the result is rounded at once, where it is one row that only matrices of such rows read.
    pub(crate) rounded: Option<ActivationKind>,
}

/// How rows become what matrices are multiplied with, where nothing else reads the result.
#[derive(Clone, Debug)]
pub(crate) enum Before<V> {
    /// They are.
    Nothing,
    /// The norm of whole rows.
    RmsNorm { gain: Arc<[f32]>, eps: f32 },
    /// Gated by the other.
    Gate(Activation, V),
    /// They were rounded by the step before, which gated them.
    Rounded,
}

/// An operation that changes values in place.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Change<V> {
    Add(V),
    Mul(V),
    Gate(Activation, V),
    Scale(f32),
    Activate(Activation),
    SoftCap(f32),
    /// Clamped and gated by the other: slope and limit.
    ClampedGate((f32, f32), V),
    /// A factor for each row by its position.
    ScaleByPosition(PositionScale),
    /// Rotation of heads of this many values by the angles of a table.
    Rope {
        table: usize,
        dim: usize,
    },
}

/// One step, over values of type `V`: nodes while planning, buffers in the end.
#[derive(Clone, Debug)]
pub(crate) enum Step<V> {
    Embed {
        matrix: Arc<Matrix>,
        by: EmbedBy,
        out: V,
    },
    /// `out = x + added`, row by row.
    AddRow {
        x: V,
        added: Arc<[f32]>,
        out: V,
    },
    Linear {
        x: V,
        before: Before<V>,
        products: Vec<Product<V>>,
    },
    /// The norm of every `dim` values, with gains that begin again after the last.
    RmsNorm {
        x: V,
        gain: Arc<[f32]>,
        dim: usize,
        eps: f32,
        out: V,
    },
    LayerNorm {
        x: V,
        gain: Arc<[f32]>,
        bias: Option<Arc<[f32]>>,
        eps: f32,
        out: V,
    },
    /// `out = change(x)`; where both are one buffer, nothing is copied.
    Change {
        x: V,
        change: Change<V>,
        out: V,
    },
    /// Rows of K and V into the `layer`-th layer of the layout; of K alone where values are in it.
    Store {
        layer: usize,
        part: usize,
        k: V,
        v: Option<V>,
    },
    Attend {
        layer: usize,
        part: usize,
        spec: AttendSpec,
        beside: HeadValues,
        q: V,
        out: V,
    },
    /// Attention among the tokens of the ubatch.
    AttendBatch {
        window: Window,
        spec: AttendSpec,
        beside: HeadValues,
        /// Queries, keys and values.
        qkv: [V; 3],
        out: V,
    },
    /// One of the three steps of plain attention.
    Plain {
        of: PlainAttention,
        x: V,
        out: V,
    },
    TakeRows {
        x: V,
        out: V,
    },
    /// Columns of every row, from `first` on.
    Columns {
        x: V,
        first: usize,
        out: V,
    },
    /// The convolution of the `layer`-th recurrent layer of the layout.
    Conv {
        layer: usize,
        kernel: Arc<ConvKernel>,
        x: V,
        out: V,
    },
    /// The scan of the `layer`-th recurrent layer of the layout.
    Scan {
        layer: usize,
        weights: Arc<ScanWeights>,
        /// x, dt, B and C.
        inputs: [V; 4],
        out: V,
    },
    /// The route of every row of logits.
    Route {
        x: V,
        spec: RouteSpec,
        out: V,
    },
    /// Each slot's matrix applied to its row.
    ExpertLinear {
        x: V,
        routes: V,
        experts: Arc<Experts>,
        n_used: usize,
        out: V,
    },
    /// Each slot times its weight.
    ExpertWeigh {
        x: V,
        routes: V,
        n_used: usize,
        out: V,
    },
    /// The sum of each row's slots.
    ExpertSum {
        x: V,
        out: V,
    },
    /// The scan by heads of the `layer`-th recurrent layer of the layout.
    ScanHeads {
        layer: usize,
        weights: Arc<HeadScanWeights>,
        /// x, dt, B and C.
        inputs: [V; 4],
        out: V,
    },
    Copy {
        x: V,
        out: V,
    },
    /// An operation that was registered, over rows or over states of the `layer`-th recurrent layer.
    Custom {
        call: Arc<CustomStep>,
        inputs: Vec<V>,
        out: V,
    },
}

/// What says which row of a matrix a row is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EmbedBy {
    /// The token.
    Token,
    /// Its position.
    Position,
}

/// A custom operation with its weights.
#[derive(Debug)]
pub(crate) struct CustomStep {
    pub(crate) op: Arc<dyn CustomOp>,
    pub(crate) spec: CustomSpec,
    pub(crate) node: String,
    pub(crate) weights: Vec<Arc<[f32]>>,
    /// The recurrent layer, by its place in the layout, and the values of its state.
    pub(crate) state: Option<(usize, usize)>,
}

/// A step of plain attention over the first `n_kv` cells.
#[derive(Clone, Debug)]
pub(crate) struct PlainAttention {
    pub(crate) step: PlainStep,
    pub(crate) spec: AttendSpec,
    pub(crate) n_kv: usize,
}

/// Which step of plain attention, and of which layer of the layout or part of the memory.
#[derive(Clone, Debug)]
pub(crate) enum PlainStep {
    /// Queries become scores.
    Scores { layer: usize },
    /// Scores become weights.
    SoftMax { part: usize, beside: HeadValues },
    /// Weights become results.
    Sum { layer: usize },
}

/// The angles of one kind of rotation.
#[derive(Clone, Debug)]
pub(crate) struct RopeTable {
    pub(crate) spec: RopeSpec,
    /// What pairs turn with, where tokens may be in images.
    pub(crate) sections: Option<RopeSections>,
    pub(crate) frequencies: Vec<f64>,
}

/// What a run must bring.
#[derive(Clone, Debug, Default)]
pub(crate) struct Needs {
    /// Tokens, below this number.
    pub(crate) tokens_below: Option<usize>,
    /// Values of an embedding row.
    pub(crate) embedding_dim: Option<usize>,
    pub(crate) positions: bool,
    /// Positions, below this number.
    pub(crate) positions_below: Option<usize>,
    /// Position, row and column.
    pub(crate) coordinates: bool,
    pub(crate) output_rows: bool,
    pub(crate) parts: Vec<PartNeeds>,
    /// Windows through which tokens see their ubatch.
    pub(crate) batch: Vec<Window>,
    /// Groups of rows over so many states.
    pub(crate) n_states: Option<usize>,
}

/// What a run must bring for one part of the memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartNeeds {
    pub(crate) part: usize,
    /// Rows that the part's layers have.
    pub(crate) n_cells: usize,
    pub(crate) cells: bool,
    pub(crate) visibility: bool,
}

/// A compiled graph, without memory to run in.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) n_tokens: usize,
    pub(crate) n_outputs: usize,
    pub(crate) steps: Vec<Step<Buf>>,
    pub(crate) ropes: Vec<RopeTable>,
    pub(crate) needs: Needs,
    /// Values of each output.
    pub(crate) output_lens: Vec<usize>,
    pub(crate) arena_len: usize,
    /// What the arena would hold if no place were used twice.
    pub(crate) total_len: usize,
}

impl Plan {
    pub(crate) fn new(
        graph: &Graph,
        weights: &CpuWeights,
        layout: &RowLayout,
    ) -> Result<Self, BackendError> {
        let resolved = resolve::Resolved::new(graph, weights, layout)?;
        Ok(place::place(graph, resolved))
    }
}
