//! Recurrent layers: tasks take some channels of all rows.
//!
//! Knows neither what a channel computes nor how its state is stored: that is
//! [`crate::recurrent`]'s.

use kv_core::backend::BackendError;

use crate::plan::{Buf, ConvKernel};
use crate::recurrent::{CausalConv, ChannelOp, Scan, ScanVariant, States};
use crate::values::SharedValues;

use super::{ROWS_STEP, Run, TASKS_PER_THREAD, piece};

impl Run<'_> {
    /// The convolution of one layer; what its states keep are inputs.
    pub(super) fn conv(
        &mut self,
        kernel: &ConvKernel,
        states: &mut [f32],
        [x, out]: [Buf; 2],
    ) -> Result<(), BackendError> {
        let conv = CausalConv {
            kernels: self.kernels,
            kernel,
            channels: out.width,
            // SAFETY: the plan lets no step write what it reads.
            x: unsafe { self.frame.read(x) },
            states: SharedValues::new(states),
            out: self.frame.write(out),
        };
        self.channels(out.width, &conv)
    }

    /// The scan of one layer: of x, dt, B and C.
    pub(super) fn scan<V: ScanVariant>(
        &mut self,
        variant: &V,
        states: &mut [f32],
        (inputs, out): ([Buf; 4], Buf),
    ) -> Result<(), BackendError> {
        let scan = Scan {
            kernels: self.kernels,
            variant,
            channels: out.width,
            // SAFETY: the plan lets no step write what it reads.
            inputs: inputs.map(|buf| unsafe { self.frame.read(buf) }),
            states: States {
                row_len: out.width * variant.d_state(),
                values: SharedValues::new(states),
            },
            out: self.frame.write(out),
        };
        self.channels(out.width, &scan)
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
