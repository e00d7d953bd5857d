//! Mixtures of experts, and heads that have a matrix each: the slots of all rows are sorted by
//! expert or head, so that every matrix is read once for all rows that go through it.
//!
//! Invariant: a result depends on its row and its expert alone, bit for bit, not on which rows
//! share the expert, nor on when its matrix was read. Does not know feed-forward blocks.

use std::ops::Range;
use std::sync::Arc;

use expert_cache::Choice;
use kv_backend::BackendError;
use kv_graph::{RouteSpec, slots};

use crate::activations::{ActivationKind, Activations};
use crate::expert_store::ExpertStore;
use crate::kernels::Kernels;
use crate::matrix::Matrix;
use crate::output::SharedOutput;
use crate::plan::{ExpertsOp, Step};
use crate::values::{Buf, SharedValues};

use super::matmul::pieces_of;
use super::{Run, VALUES_PER_TASK, piece};
use crate::team::TeamGuard;

/// The matrices of all experts, with their biases.
#[derive(Debug)]
pub(crate) struct Experts {
    /// Of equal shapes; at least one.
    pub(crate) matrices: ExpertMatrices,
    /// `[experts, out]`.
    pub(crate) bias: Option<Arc<[f32]>>,
}

/// Where the matrices of experts are.
#[derive(Debug)]
pub(crate) enum ExpertMatrices {
    /// All in memory, or in the mapped file.
    Held(Vec<Matrix>),
    /// In memory as long as they are used.
    Read(ReadExperts),
}

/// Experts that a store reads.
#[derive(Debug)]
pub(crate) struct ReadExperts {
    pub(crate) store: Arc<ExpertStore>,
    /// The number of their weight in it.
    pub(crate) stack: u32,
    pub(crate) n_experts: usize,
    /// The first one, as it is in the file: all have its shape.
    pub(crate) first: Matrix,
}

impl Experts {
    fn first(&self) -> Option<&Matrix> {
        match &self.matrices {
            ExpertMatrices::Held(all) => all.first(),
            ExpertMatrices::Read(read) => Some(&read.first),
        }
    }

    /// Number of experts.
    pub(crate) fn len(&self) -> usize {
        match &self.matrices {
            ExpertMatrices::Held(all) => all.len(),
            ExpertMatrices::Read(read) => read.n_experts,
        }
    }

    /// Bytes of all matrices, as they are stored.
    pub(crate) fn stored_bytes(&self) -> usize {
        let n_bytes = |m: &Matrix| m.n_rows() * m.row_bytes();
        self.len() * self.first().map_or(0, n_bytes)
    }

    fn n_rows(&self) -> usize {
        self.first().map_or(0, Matrix::n_rows)
    }

    /// Values of an input.
    pub(crate) fn n_columns(&self) -> usize {
        self.first().map_or(0, Matrix::n_columns)
    }

    /// The kind of activations that all of them read.
    pub(crate) fn activation_kind(&self) -> ActivationKind {
        self.first()
            .map_or(ActivationKind::F32, Matrix::activation_kind)
    }
}

/// Memory for the rows of a mixture in the order of their experts; reused from step to step.
#[derive(Debug, Default)]
pub(crate) struct ExpertBuffers {
    /// The filled slots, counted through all rows, by expert and then by row.
    order: Vec<usize>,
    /// The start of each expert's slots in `order`, and the end of the last.
    starts: Vec<usize>,
    /// The rows of `order` before and after the matrices.
    inputs: Vec<f32>,
    products: Vec<f32>,
}

impl ExpertBuffers {
    /// Bytes of the rows; the lists of slots are small.
    pub(crate) fn n_bytes(&self) -> usize {
        (self.inputs.capacity() + self.products.capacity()) * size_of::<f32>()
    }

    /// Makes room for `n_slots` slots of these experts.
    pub(crate) fn reserve(&mut self, experts: &Experts, n_slots: usize) {
        let (n_out, n_in) = (experts.n_rows(), experts.n_columns());
        let grow = |values: &mut Vec<f32>, len: usize| values.resize(values.len().max(len), 0.0);
        grow(&mut self.inputs, n_slots * n_in);
        grow(&mut self.products, n_slots * n_out);
        self.order.reserve(n_slots);
        self.starts.reserve(experts.len() + 1);
    }

    /// Sorts the heads of `n_rows` rows: a head is the slot of an expert that every row has.
    fn sort_heads(&mut self, n_rows: usize, n_heads: usize) {
        self.starts.clear();
        self.starts.extend((0..=n_heads).map(|head| head * n_rows));
        self.order.clear();
        let rows_of = |head: usize| (0..n_rows).map(move |row| row * n_heads + head);
        self.order.extend((0..n_heads).flat_map(rows_of));
    }

    /// Sorts the slots of `routes [rows, experts]`.
    fn sort(&mut self, routes: &[f32], n_experts: usize, n_used: usize) {
        self.starts.clear();
        self.starts.resize(n_experts + 1, 0);
        let by_row = || routes.chunks_exact(n_experts.max(1)).enumerate();
        for (_, route) in by_row() {
            for (expert, _) in slots(route, n_used) {
                self.starts[expert + 1] += 1;
            }
        }
        for expert in 0..n_experts {
            self.starts[expert + 1] += self.starts[expert];
        }
        self.order.clear();
        self.order.resize(self.starts[n_experts], 0);
        for (row, route) in by_row() {
            for (slot, (expert, _)) in slots(route, n_used).enumerate() {
                self.order[self.starts[expert]] = row * n_used + slot;
                self.starts[expert] += 1;
            }
        }
        // Each start is now the start of the next expert.
        self.starts.rotate_right(1);
        if let Some(first) = self.starts.first_mut() {
            *first = 0;
        }
    }
}

/// Operands and result of a step over slots.
#[derive(Clone, Copy, Debug)]
struct SlotBufs {
    /// `[rows, width]` or `[rows, slots, width]`.
    x: Buf,
    routes: Buf,
    /// `[rows, slots, ..]`.
    out: Buf,
}

impl Run<'_> {
    /// One step of a mixture.
    pub(super) fn experts(&mut self, op: &ExpertsOp, step: &Step<Buf>) -> Result<(), BackendError> {
        let bufs = SlotBufs {
            x: step.read(0),
            routes: step.read(1),
            out: step.write(),
        };
        match op {
            ExpertsOp::Route { spec, bias, gain } => {
                let tables = [bias.as_deref(), gain.as_deref()];
                self.route(spec, tables, [bufs.x, bufs.out])
            }
            ExpertsOp::Linear { experts, n_used } => self.expert_linear(experts, *n_used, bufs),
            ExpertsOp::Heads(heads) => {
                let (n_rows, n_heads) = (bufs.x.rows, heads.len());
                self.experts.sort_heads(n_rows, n_heads);
                self.multiply_sorted(heads, n_heads, [bufs.x, bufs.out])
            }
            ExpertsOp::Scale { n_used } => self.expert_scale(*n_used, bufs),
            ExpertsOp::Sum => self.expert_sum(bufs.x, bufs.out),
        }
    }

    /// The route of every row of logits.
    fn route(
        &mut self,
        spec: &RouteSpec,
        [bias, gain]: [Option<&[f32]>; 2],
        [x, out]: [Buf; 2],
    ) -> Result<(), BackendError> {
        // SAFETY: allocation lets no step write what it reads.
        let logits = unsafe { self.frame.read(x) };
        let width = x.width;
        self.rows(out, &|row, route| {
            spec.route(&logits[row * width..(row + 1) * width], bias, route);
            if let Some(gain) = gain {
                RouteSpec::apply_gain(route, gain);
            }
            Ok(())
        })
    }

    /// Each slot's expert applied to its row of `x`.
    fn expert_linear(
        &mut self,
        experts: &Experts,
        n_used: usize,
        SlotBufs { x, routes, out }: SlotBufs,
    ) -> Result<(), BackendError> {
        // SAFETY: allocation lets no step write what it reads.
        let routes = unsafe { self.frame.read(routes) };
        self.experts.sort(routes, experts.len(), n_used);
        if let ExpertMatrices::Read(read) = &experts.matrices {
            self.tell_choices(read, x.rows);
        }
        if self.experts.order.len() < x.rows * n_used {
            // SAFETY: no task runs yet.
            unsafe { self.frame.write(out).range(0..out.len()) }.fill(0.0);
        }
        self.multiply_sorted(experts, n_used, [x, out])
    }

    /// Tells the store what the rows need.
    fn tell_choices(&self, read: &ReadExperts, n_rows: usize) {
        let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let n_rows_of = self.experts.starts.windows(2).map(|pair| match *pair {
            [start, end] => number(end - start),
            _ => 0,
        });
        let choices = (0..).zip(n_rows_of).filter(|(_, n_rows)| *n_rows > 0);
        let choices = choices.map(|(expert, n_rows)| Choice { expert, n_rows });
        let choices: Vec<_> = choices.collect();
        read.store.routed(read.stack, &choices, number(n_rows));
    }

    /// The sorted slots of `x` through the matrices of their experts.
    fn multiply_sorted(
        &mut self,
        experts: &Experts,
        n_used: usize,
        [x, out]: [Buf; 2],
    ) -> Result<(), BackendError> {
        let n_in = experts.n_columns();
        let kind = experts.activation_kind();
        // SAFETY: allocation lets no step write what it reads.
        let values = unsafe { self.frame.read(x) };
        let n_filled = self.experts.order.len();
        let to = self.frame.write(out);
        let slots_share_rows = x.width == n_in;
        let ExpertBuffers {
            order,
            starts,
            inputs,
            products,
        } = &mut *self.experts;
        let (order, starts) = (&*order, &*starts);
        let input_of = |at: usize| {
            let row = if slots_share_rows {
                order[at] / n_used
            } else {
                order[at]
            };
            &values[row * n_in..(row + 1) * n_in]
        };
        let kernels = self.kernels;
        let per_task = (VALUES_PER_TASK / n_in.max(1)).max(1);
        let mut quantized = self.quantized.iter_mut().find(|rows| rows.kind() == kind);
        {
            let shared = quantized.as_mut().map(|rows| {
                rows.reshape(n_filled, n_in);
                rows.shared()
            });
            let sorted = SharedValues::new(inputs);
            self.lead.each(n_filled.div_ceil(per_task), &|_, task| {
                for at in piece(task, per_task, n_filled) {
                    match shared {
                        None => {
                            // SAFETY: each row belongs to one task.
                            let to = unsafe { sorted.range(at * n_in..(at + 1) * n_in) };
                            to.copy_from_slice(input_of(at));
                        }
                        // SAFETY: each row belongs to one task, and no task reads before all are
                        // done.
                        Some(rows) => unsafe { rows.quantize_row(kernels, at, input_of(at)) },
                    }
                }
                Ok(())
            })?;
        }
        let mut sorted = SortedSlots {
            kernels,
            lead: &mut self.lead,
            n_threads: self.n_threads,
            inputs: quantized.map_or(Activations::F32(inputs), |rows| rows.rows()),
            n_columns: n_in,
            order,
            starts,
            products: SharedValues::new(products),
            to,
        };
        match &experts.matrices {
            ExpertMatrices::Held(all) => sorted.multiply(&|expert| all.get(expert), experts),
            ExpertMatrices::Read(read) => {
                let inputs = self.inputs;
                sorted.multiply_as_read(read, experts, &|| inputs.check_cancelled())
            }
        }
    }

    /// Each slot of `x` times its weight.
    fn expert_scale(
        &mut self,
        n_used: usize,
        SlotBufs { x, routes, out }: SlotBufs,
    ) -> Result<(), BackendError> {
        let dim = out.width / n_used.max(1);
        let slots_share_rows = x.width == dim;
        // SAFETY: allocation lets no step write what it reads.
        let (values, weights) = unsafe { (self.frame.read(x), self.frame.read(routes)) };
        let kernels = self.kernels;
        self.rows(out, &|row, to| {
            let route = &weights[row * routes.width..(row + 1) * routes.width];
            let x = &values[row * x.width..(row + 1) * x.width];
            let mut of_slots = slots(route, n_used);
            for (slot, to) in to.chunks_exact_mut(dim.max(1)).enumerate() {
                match of_slots.next() {
                    Some((_, weight)) => {
                        let first = if slots_share_rows { 0 } else { slot * dim };
                        to.copy_from_slice(&x[first..first + dim]);
                        (kernels.scale)(to, weight);
                    }
                    None => to.fill(0.0),
                }
            }
            Ok(())
        })
    }

    /// The sum of a row's slots, in their order.
    fn expert_sum(&mut self, x: Buf, out: Buf) -> Result<(), BackendError> {
        // SAFETY: allocation lets no step write what it reads.
        let values = unsafe { self.frame.read(x) };
        let kernels = self.kernels;
        self.rows(out, &|row, to| {
            to.fill(0.0);
            let of_row = &values[row * x.width..(row + 1) * x.width];
            let slots = of_row.chunks_exact(to.len().max(1));
            slots.for_each(|slot| (kernels.add)(to, slot));
            Ok(())
        })
    }
}

/// The rows of slots, sorted by expert, on their way through the matrices.
struct SortedSlots<'a, 't> {
    kernels: &'a Kernels,
    lead: &'a mut TeamGuard<'t>,
    n_threads: usize,
    inputs: Activations<'a>,
    /// Values of an input.
    n_columns: usize,
    order: &'a [usize],
    starts: &'a [usize],
    products: SharedValues<'a>,
    to: SharedValues<'a>,
}

impl SortedSlots<'_, '_> {
    /// The rows of one expert, among all that are sorted.
    fn rows_of(&self, expert: usize) -> Range<usize> {
        self.starts[expert]..self.starts[expert + 1]
    }

    /// The rows of experts as their matrices come: first those that are in memory.
    fn multiply_as_read(
        &mut self,
        read: &ReadExperts,
        experts: &Experts,
        check: &dyn Fn() -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let used = (0..experts.len()).filter(|&expert| !self.rows_of(expert).is_empty());
        let mut missing: Vec<usize> = used.collect();
        let mut matrices: Vec<Option<Matrix>> = vec![None; experts.len()];
        while !missing.is_empty() {
            let taken = read.store.take(read.stack, &mut missing, check)?;
            let numbers: Vec<usize> = taken.iter().map(|(expert, _)| *expert).collect();
            for (expert, rows) in taken {
                matrices[expert] = Some(read.first.clone().with_packed(Some(rows)));
            }
            let multiplied = self.multiply(&|expert| matrices[expert].as_ref(), experts);
            matrices.fill(None);
            read.store.release(read.stack, &numbers);
            multiplied?;
        }
        Ok(())
    }

    /// The rows of those experts whose matrices are there.
    fn multiply<'m>(
        &mut self,
        matrix_of: &(dyn Fn(usize) -> Option<&'m Matrix> + Sync),
        experts: &Experts,
    ) -> Result<(), BackendError> {
        let (kernels, n_threads, n_in) = (self.kernels, self.n_threads, self.n_columns);
        let (inputs, order, products, to) = (self.inputs, self.order, self.products, self.to);
        let (starts, n_out) = (self.starts, experts.n_rows());
        let rows_of = |expert: usize| starts[expert]..starts[expert + 1];
        let chosen = || {
            let used = (0..experts.len()).filter(|&expert| !rows_of(expert).is_empty());
            used.filter_map(|expert| Some((expert, matrix_of(expert)?)))
        };
        let n_tasks = chosen()
            .map(|(expert, matrix)| pieces_of(matrix, rows_of(expert).len(), n_threads).0)
            .sum();
        self.lead.each(n_tasks, &|_, mut task| {
            for (expert, matrix) in chosen() {
                let (n, step) = pieces_of(matrix, rows_of(expert).len(), n_threads);
                if task < n {
                    let rows = rows_of(expert);
                    let Some(acts) = inputs.slice(rows.clone(), n_in) else {
                        return Ok(());
                    };
                    let bias = experts.bias.as_deref();
                    let matmul = ExpertMatMul {
                        matrix,
                        acts,
                        bias: bias.map(|b| &b[expert * n_out..(expert + 1) * n_out]),
                        slots: &order[rows.clone()],
                        // SAFETY: the rows of one expert, whose columns belong to one task each.
                        products: unsafe {
                            SharedOutput::from_raw(
                                products.start().add(rows.start * n_out),
                                rows.len(),
                                n_out,
                            )
                        },
                        from: products,
                        first: rows.start,
                        to,
                    };
                    // SAFETY: each piece of an expert's columns belongs to one task.
                    return unsafe { matmul.compute(kernels, piece(task, step, n_out)) };
                }
                task -= n;
            }
            Ok(())
        })
    }
}

/// The multiplication of one expert's matrix with its rows.
struct ExpertMatMul<'a> {
    matrix: &'a Matrix,
    acts: Activations<'a>,
    bias: Option<&'a [f32]>,
    /// The slots of the expert's rows in `to`.
    slots: &'a [usize],
    products: SharedOutput<'a>,
    /// The same products, the expert's from row `first` on.
    from: SharedValues<'a>,
    first: usize,
    to: SharedValues<'a>,
}

impl ExpertMatMul<'_> {
    /// Some columns of all the expert's rows, scattered to their slots.
    ///
    /// # Safety
    /// No other task has these columns of these rows.
    unsafe fn compute(&self, kernels: &Kernels, columns: Range<usize>) -> Result<(), BackendError> {
        let n_out = self.matrix.n_rows();
        // SAFETY: as promised to this function.
        let mut products = unsafe { self.products.columns(columns.clone()) };
        self.matrix.multiply(kernels, self.acts, &mut products)?;
        for (row, slot) in (self.first..).zip(self.slots) {
            let at = |row: usize| row * n_out + columns.start..row * n_out + columns.end;
            // SAFETY: as promised, and each slot has one expert; `products` is written no more.
            let (from, to) = unsafe { (self.from.range(at(row)), self.to.range(at(*slot))) };
            to.copy_from_slice(from);
            if let Some(bias) = self.bias {
                (kernels.add)(to, &bias[columns.clone()]);
            }
        }
        Ok(())
    }
}
