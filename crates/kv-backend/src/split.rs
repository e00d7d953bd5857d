//! [`Split`]: the first blocks of a model on one backend, the others and the output on another, as
//! where a GPU has not room for all.
//!
//! Invariant: rows and states of a layer are where the blocks are that use them, and nowhere else.
//! A run is one of the first backend and then one of the second; between them, the values that go
//! over are on the host. Does not know what either backend is.

use std::sync::Arc;

use kv_core::{
    ids::{LayerIdx, PartIdx},
    memory::{RowCopy, RowShift},
};
use kv_graph::rope::LayerRope;
use kv_graph::weights::WeightSource;
use kv_graph::{Graph, GraphError, GraphShape, SplitOutput, SplitPoint};
use kv_rows::RowLayout;

use crate::copy::check_copies;
use crate::shift::check_shifts;
use crate::{
    Backend, BackendError, BackendInfo, CustomOps, DeviceMemory, ExpertMeter, OnProgress, RowKind,
    RowSpan, RowStorage, check_run,
};
use crate::{GraphInputs, GraphOutputs};

/// The share of a run that is done when the first backend is.
const HALF: f64 = 0.5;

/// Two backends that compute one model.
#[derive(Debug)]
pub struct Split<A, B> {
    first: A,
    second: B,
    point: Arc<SplitPoint>,
}

impl<A: Backend, B: Backend> Split<A, B> {
    /// `first` computes the blocks before the point, `second` the others.
    pub fn new(first: A, second: B, point: SplitPoint) -> Self {
        Self {
            first,
            second,
            point: Arc::new(point),
        }
    }
}

/// Rows of a [`Split`].
#[derive(Debug)]
pub struct SplitRows<A, B> {
    layout: RowLayout,
    point: Arc<SplitPoint>,
    first: A,
    second: B,
}

/// A program of a [`Split`].
#[derive(Debug)]
pub struct SplitProgram<A, B> {
    shape: GraphShape,
    first: Option<A>,
    second: Option<B>,
    /// The graph of the second, whose inputs are checked before the first stores anything.
    graph: Option<Graph>,
    /// Widths of the values that are carried over.
    carried: Vec<usize>,
    outputs: Vec<SplitOutput>,
    /// The result of the halves, and the rows in between: kept for their capacity.
    of_first: GraphOutputs,
    of_second: GraphOutputs,
    rows: Vec<f32>,
}

impl<A: RowStorage, B: RowStorage> RowStorage for SplitRows<A, B> {
    fn layout(&self) -> &RowLayout {
        &self.layout
    }

    fn allocated_bytes(&self, layer: LayerIdx, kind: RowKind) -> Result<usize, BackendError> {
        if self.point.is_first(layer) {
            self.first.allocated_bytes(layer, kind)
        } else {
            self.second.allocated_bytes(layer, kind)
        }
    }
}

impl<A, B> SplitProgram<A, B> {
    /// Hands the results over, and keeps the buffers that were there.
    fn hand_over(&mut self, outputs: &mut GraphOutputs) {
        outputs
            .values
            .resize_with(self.outputs.len(), Default::default);
        for (output, &of) in outputs.values.iter_mut().zip(&self.outputs) {
            let (half, number) = match of {
                SplitOutput::First(number) => (&mut self.of_first, number),
                SplitOutput::Second(number) => (&mut self.of_second, number),
            };
            if let Some(values) = half.values.get_mut(number) {
                std::mem::swap(output, values);
            }
        }
    }
}

/// Concatenates values of each token, of these widths, in its row.
pub(crate) fn join<'a>(
    values: impl IntoIterator<Item = &'a [f32]>,
    widths: &[usize],
    rows: &mut [f32],
) {
    let width: usize = widths.iter().sum();
    let mut at = 0;
    for (values, &len) in values.into_iter().zip(widths) {
        let rows = rows.chunks_exact_mut(width.max(1));
        for (row, value) in rows.zip(values.chunks_exact(len.max(1))) {
            row[at..at + len].copy_from_slice(value);
        }
        at += len;
    }
}

fn cannot_split(error: &GraphError) -> BackendError {
    BackendError::Input {
        input: "graph",
        reason: error.to_string(),
    }
}

/// The copies or shifts of parts in which a half has rows.
fn within<T: Copy>(layout: &RowLayout, edits: &[T], part: fn(&T) -> PartIdx) -> Vec<T> {
    let has = |edit: &&T| layout.layers().iter().any(|l| l.part == part(edit));
    edits.iter().filter(has).copied().collect()
}

impl<A: Backend, B: Backend> Backend for Split<A, B> {
    type Rows = SplitRows<A::Rows, B::Rows>;
    type Weights = (A::Weights, B::Weights);
    type Program = SplitProgram<A::Program, B::Program>;

    fn info(&self) -> BackendInfo {
        let (first, second) = (self.first.info(), self.second.info());
        let n_first = self.point.n_first();
        let both = first.kv_types.into_iter();
        let states = first.state_types.into_iter();
        BackendInfo {
            name: format!("{}+{}", first.name, second.name),
            device: format!(
                "{n_first} layers on {}, the others on {}",
                first.device, second.device
            ),
            kv_types: both.filter(|t| second.kv_types.contains(t)).collect(),
            state_types: states.filter(|t| second.state_types.contains(t)).collect(),
        }
    }

    /// That of both together.
    fn memory(&self) -> Option<DeviceMemory> {
        let (first, second) = (self.first.memory()?, self.second.memory()?);
        Some(DeviceMemory {
            total: first.total.saturating_add(second.total),
            free: first.free.saturating_add(second.free),
        })
    }

    /// That of the first, which has the layers of the host.
    fn expert_meter(&self) -> Option<Arc<ExpertMeter>> {
        self.first.expert_meter()
    }

    fn prefers_candidates(&self) -> bool {
        self.second.prefers_candidates()
    }

    fn program_capacities(&self) -> &'static [usize] {
        let (first, second) = (
            self.first.program_capacities(),
            self.second.program_capacities(),
        );
        if first == second { first } else { &[] }
    }

    fn set_custom_ops(&mut self, ops: CustomOps) -> Result<(), BackendError> {
        self.first.set_custom_ops(ops.clone())?;
        self.second.set_custom_ops(ops)
    }

    fn allocate(&self, layout: &RowLayout) -> Result<Self::Rows, BackendError> {
        let (first, second) = layout.partition(|layer| self.point.is_first(layer));
        Ok(SplitRows {
            layout: layout.clone(),
            point: Arc::clone(&self.point),
            first: self.first.allocate(&first)?,
            second: self.second.allocate(&second)?,
        })
    }

    fn load_weights(
        &self,
        source: Arc<dyn WeightSource>,
        on_progress: OnProgress,
    ) -> Result<Self::Weights, BackendError> {
        Ok((
            self.first
                .load_weights(Arc::clone(&source), on_progress.clone())?,
            self.second.load_weights(source, on_progress)?,
        ))
    }

    fn forget_weights(
        &self,
        (of_first, of_second): &Self::Weights,
        names: &[String],
    ) -> Result<(), BackendError> {
        self.first.forget_weights(of_first, names)?;
        self.second.forget_weights(of_second, names)
    }

    fn compile(
        &self,
        graph: &Graph,
        (of_first, of_second): &Self::Weights,
        layout: &RowLayout,
    ) -> Result<Self::Program, BackendError> {
        let split = graph
            .split(&self.point)
            .map_err(|error| cannot_split(&error))?;
        let (first, second) = layout.partition(|layer| self.point.is_first(layer));
        let compile_first = |graph: Graph| self.first.compile(&graph, of_first, &first);
        let compile_second = |graph: Graph| self.second.compile(&graph, of_second, &second);
        Ok(SplitProgram {
            shape: graph.shape(),
            first: split.first.map(compile_first).transpose()?,
            graph: split.second.clone(),
            second: split.second.map(compile_second).transpose()?,
            carried: split.carried,
            outputs: split.outputs,
            of_first: GraphOutputs::default(),
            of_second: GraphOutputs::default(),
            rows: Vec::new(),
        })
    }

    fn run(
        &self,
        program: &mut Self::Program,
        rows: &mut Self::Rows,
        inputs: &GraphInputs<'_>,
        outputs: &mut GraphOutputs,
    ) -> Result<(), BackendError> {
        let run = inputs.shape_within(program.shape)?;
        let width: usize = program.carried.iter().sum();
        program.rows.resize(run.n_tokens * width, 0.0);
        let (first, second) = match (&mut program.first, &mut program.second) {
            (Some(first), Some(second)) => (first, second),
            (Some(first), None) => return self.first.run(first, &mut rows.first, inputs, outputs),
            (None, Some(second)) => {
                return self.second.run(second, &mut rows.second, inputs, outputs);
            }
            (None, None) => return Ok(()),
        };
        if let Some(graph) = &program.graph {
            let inputs = GraphInputs {
                embeddings: &program.rows,
                ..*inputs
            };
            check_run(graph, rows.second.layout(), &inputs, run)?;
        }
        let progress = inputs.progress.map(|p| p.of_part(0.0..HALF));
        let of_first = GraphInputs {
            progress: progress.as_ref(),
            ..*inputs
        };
        self.first
            .run(first, &mut rows.first, &of_first, &mut program.of_first)?;
        let carried = program.of_first.values.iter().map(Vec::as_slice);
        join(carried, &program.carried, &mut program.rows);
        let progress = inputs.progress.map(|p| p.of_part(HALF..1.0));
        let of_second = GraphInputs {
            progress: progress.as_ref(),
            embeddings: &program.rows,
            ..*inputs
        };
        self.second
            .run(second, &mut rows.second, &of_second, &mut program.of_second)?;
        program.hand_over(outputs);
        Ok(())
    }

    fn finish(&self, rows: &mut Self::Rows) -> Result<(), BackendError> {
        self.first.finish(&mut rows.first)?;
        self.second.finish(&mut rows.second)
    }

    fn read_rows(
        &self,
        rows: &Self::Rows,
        span: RowSpan,
        out: &mut [u8],
    ) -> Result<(), BackendError> {
        if self.point.is_first(span.layer) {
            self.first.read_rows(&rows.first, span, out)
        } else {
            self.second.read_rows(&rows.second, span, out)
        }
    }

    fn write_rows(
        &self,
        rows: &mut Self::Rows,
        span: RowSpan,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        if self.point.is_first(span.layer) {
            self.first.write_rows(&mut rows.first, span, bytes)
        } else {
            self.second.write_rows(&mut rows.second, span, bytes)
        }
    }

    fn copy_rows(&self, rows: &mut Self::Rows, copies: &[RowCopy]) -> Result<(), BackendError> {
        // Of all layers, before the first half changes.
        check_copies(&rows.layout, copies)?;
        let of = |layout: &RowLayout| within(layout, copies, |copy| copy.part);
        let (first, second) = (of(rows.first.layout()), of(rows.second.layout()));
        self.first.copy_rows(&mut rows.first, &first)?;
        self.second.copy_rows(&mut rows.second, &second)
    }

    fn shift_rows(
        &self,
        rows: &mut Self::Rows,
        shifts: &[RowShift],
        ropes: &[LayerRope],
    ) -> Result<(), BackendError> {
        check_shifts(&rows.layout, shifts, ropes)?;
        let of = |layout: &RowLayout| within(layout, shifts, |shift| shift.part);
        let (first, second) = (of(rows.first.layout()), of(rows.second.layout()));
        self.first.shift_rows(&mut rows.first, &first, ropes)?;
        self.second.shift_rows(&mut rows.second, &second, ropes)
    }
}
