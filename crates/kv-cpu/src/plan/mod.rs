//! A graph becomes a list of steps with their weights and buffers in one arena.
//!
//! Three passes: [`lower`] checks operands, weights and layers and translates each node to a step
//! over values of the graph; [`fuse`] merges steps by a list of peephole rules; [`allocate`] gives
//! every value a buffer by liveness. Invariant: what a step writes overlaps nothing that it reads
//! (other than in place), and nothing that a later step reads. Does not know threads, or how steps
//! are computed.

mod allocate;
mod fuse;
mod lower;
mod step;
mod step_weights;

use kv_backend::BackendError;
use kv_backend::GraphInputs;
use kv_core::Window;
use kv_graph::rope::{RopeSections, RopeSpec};
use kv_graph::{Graph, GraphShape};
use kv_rows::RowLayout;

use crate::values::Buf;
use crate::weights::CpuWeights;

pub(crate) use fuse::MIN_GATE_EPILOGUE_ROWS;
pub(crate) use lower::{
    AttentionOp, CustomState, CustomStep, Elementwise, EmbedBy, ExpertsOp, NormOp,
    PlainAttentionOp, PlainStep, RecurrentOp, RowsOp,
};
pub(crate) use step::{Epilogue, GateEpilogue, MatMul, MatMulOutput, Prologue, Step, StepOp};
pub(crate) use step_weights::{
    ConvKernel, DecayWeights, HeadBuckets, HeadScanWeights, HeadWeights, ScanWeights,
};

/// The angles of one kind of rotation.
#[derive(Clone, Debug)]
pub(crate) struct RopeTable {
    pub(crate) spec: RopeSpec,
    /// The coordinate that rotates each pair, where tokens may be in images.
    pub(crate) sections: Option<RopeSections>,
    pub(crate) frequencies: Vec<f64>,
}

/// The inputs that a run must bring.
#[derive(Clone, Debug, Default)]
pub(crate) struct RequiredInputs {
    /// Tokens, below this number.
    pub(crate) tokens_below: Option<usize>,
    /// Values of an embedding row.
    pub(crate) embedding_dim: Option<usize>,
    pub(crate) positions: bool,
    /// Positions, below this number.
    pub(crate) positions_below: Option<usize>,
    /// Types of tokens, below this number.
    pub(crate) types_below: Option<usize>,
    /// Position, row and column.
    pub(crate) coordinates: bool,
    pub(crate) output_rows: bool,
    pub(crate) parts: Vec<PartNeeds>,
    /// Windows through which tokens see their ubatch.
    pub(crate) batch: Vec<Window>,
    /// Groups of rows over so many states.
    pub(crate) n_states: Option<usize>,
}

/// The inputs that a run must bring for one part of the memory.
#[derive(Clone, Debug)]
pub(crate) struct PartNeeds {
    pub(crate) part: usize,
    /// Rows that the part's layers have.
    pub(crate) n_cells: usize,
    pub(crate) cells: bool,
    /// Windows through which it is seen.
    pub(crate) windows: Vec<Window>,
}

/// A compiled graph, without memory to run in.
#[derive(Debug)]
pub(crate) struct Plan {
    /// The most tokens and outputs of a run.
    pub(crate) capacity: GraphShape,
    /// Those of the present run: the rows of all buffers.
    run: GraphShape,
    /// True if a run may have fewer than `capacity`.
    takes_fewer: bool,
    pub(crate) steps: Vec<Step<Buf>>,
    pub(crate) ropes: Vec<RopeTable>,
    pub(crate) needs: RequiredInputs,
    /// The results for the caller.
    pub(crate) outputs: Vec<Buf>,
    pub(crate) arena_len: usize,
    /// The length of the arena if no two buffers shared memory.
    pub(crate) total_len: usize,
}

impl Plan {
    pub(crate) fn new(
        graph: &Graph,
        weights: &CpuWeights,
        layout: &RowLayout,
    ) -> Result<Self, BackendError> {
        let mut lowered = lower::lower(graph, weights, layout)?;
        fuse::fuse(graph, &mut lowered)?;
        Ok(allocate::allocate(graph, lowered))
    }

    /// Bytes of all intermediate values.
    pub(crate) fn arena_bytes(&self) -> usize {
        self.arena_len * size_of::<f32>()
    }

    /// Gives all buffers the rows of a run: returns its shape.
    pub(crate) fn begin_run(
        &mut self,
        inputs: &GraphInputs<'_>,
    ) -> Result<GraphShape, BackendError> {
        let shape = inputs.shape_within(self.capacity)?;
        if shape == self.run {
            return Ok(shape);
        }
        if !self.takes_fewer {
            let reason = "the graph takes rows of tokens and of outputs together, so its program \
                          runs with the graph's shape alone";
            return Err(BackendError::Input {
                input: "shape",
                reason: reason.into(),
            });
        }
        let of_steps = self.steps.iter_mut();
        let of_steps = of_steps.flat_map(|step| step.reads.iter_mut().chain(&mut step.writes));
        for buf in of_steps.chain(&mut self.outputs) {
            buf.rows = buf.count.of(shape);
        }
        self.run = shape;
        Ok(shape)
    }
}
