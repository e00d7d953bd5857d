//! Recurrent layers: tasks take some channels of all rows.
//!
//! Does not know what a channel computes or how its state is stored: that is
//! [`crate::recurrent`]'s.

use kv_backend::BackendError;
use kv_graph::DeltaSpec;

use crate::plan::{ConvKernel, RecurrentOp, Step};
use crate::recurrent::{CausalConv, ChannelOp, Delta, Scan, ScanVariant, StateValue, States};
use crate::storage::{CpuRows, RecurrentMut, StatesMut};
use crate::values::{Buf, SharedValues};

use super::{ROWS_STEP, Run, TASKS_PER_THREAD, piece};

impl Run<'_> {
    /// The convolution or scan of one step.
    pub(super) fn recurrent(
        &mut self,
        op: &RecurrentOp,
        step: &Step<Buf>,
        rows: &mut CpuRows,
    ) -> Result<(), BackendError> {
        let (RecurrentOp::Conv { layer, .. }
        | RecurrentOp::Scan { layer, .. }
        | RecurrentOp::ScanHeads { layer, .. }
        | RecurrentOp::Delta { layer, .. }) = op;
        let Some(RecurrentMut { conv, states }) = rows.states_mut(*layer) else {
            return Ok(());
        };
        match states {
            StatesMut::F32(states) => self.recurrent_op(op, conv, states, step),
            StatesMut::F16(states) => self.recurrent_op(op, conv, states, step),
            StatesMut::Bf16(states) => self.recurrent_op(op, conv, states, step),
        }
    }

    /// One operation, over the inputs of convolutions and the states of its layer.
    fn recurrent_op<T: StateValue>(
        &mut self,
        op: &RecurrentOp,
        conv: &mut [f32],
        states: &mut [T],
        step: &Step<Buf>,
    ) -> Result<(), BackendError> {
        match op {
            RecurrentOp::Conv { kernel, .. } => self.conv(kernel, conv, step),
            RecurrentOp::Scan { weights, .. } => self.scan(&**weights, states, step),
            RecurrentOp::ScanHeads { weights, .. } => self.scan(&**weights, states, step),
            RecurrentOp::Delta { delta, .. } => self.delta(delta, states, step),
        }
    }

    /// The convolution of one layer, whose states hold inputs.
    fn conv(
        &mut self,
        kernel: &ConvKernel,
        states: &mut [f32],
        step: &Step<Buf>,
    ) -> Result<(), BackendError> {
        let (x, out) = (step.read(0), step.write());
        let conv = CausalConv {
            kernels: self.kernels,
            kernel,
            channels: out.width,
            // SAFETY: allocation lets no step write what it reads.
            x: unsafe { self.frame.read(x) },
            states: SharedValues::new(states),
            out: self.frame.write(out),
        };
        self.channels(out.width, &conv)
    }

    /// The scan of one layer: of x, dt, B and C.
    fn scan<V: ScanVariant, T: StateValue>(
        &mut self,
        variant: &V,
        states: &mut [T],
        step: &Step<Buf>,
    ) -> Result<(), BackendError> {
        let (inputs, out) = ([0, 1, 2, 3].map(|at| step.read(at)), step.write());
        let scan = Scan {
            kernels: self.kernels,
            variant,
            channels: out.width,
            // SAFETY: allocation lets no step write what it reads.
            inputs: inputs.map(|buf| unsafe { self.frame.read(buf) }),
            states: States {
                kernels: self.kernels,
                row_len: out.width * variant.d_state(),
                values: SharedValues::new(states),
            },
            out: self.frame.write(out),
        };
        self.channels(out.width, &scan)
    }

    /// The delta rule of one layer: of queries, keys, values, decays and learning rates.
    fn delta<T: StateValue>(
        &mut self,
        spec: &DeltaSpec,
        states: &mut [T],
        step: &Step<Buf>,
    ) -> Result<(), BackendError> {
        let (inputs, out) = ([0, 1, 2, 3, 4].map(|at| step.read(at)), step.write());
        let delta = Delta {
            kernels: self.kernels,
            spec,
            channels: out.width,
            decays: inputs[3].width,
            // SAFETY: allocation lets no step write what it reads.
            inputs: inputs.map(|buf| unsafe { self.frame.read(buf) }),
            states: States {
                kernels: self.kernels,
                row_len: out.width * spec.k_dim,
                values: SharedValues::new(states),
            },
            out: self.frame.write(out),
        };
        self.channels(out.width, &delta)
    }

    /// All channels of a layer, divided among the team.
    fn channels(&mut self, n: usize, layer: &impl ChannelOp) -> Result<(), BackendError> {
        let groups = self.inputs.states;
        let share = n.div_ceil(self.n_threads * TASKS_PER_THREAD);
        let step = share.max(1).next_multiple_of(ROWS_STEP);
        self.lead.each(n.div_ceil(step), &|_, task| {
            // SAFETY: the groups were checked; each channel belongs to one task.
            unsafe { layer.run(groups, piece(task, step, n)) };
            Ok(())
        })
    }
}
