//! Attention in three steps: tasks take rows.
//!
//! Knows nothing of what a step computes: that is [`PlainAttention`]'s.

use std::sync::PoisonError;

use kv_core::backend::BackendError;

use crate::attend::{PlainAttention, SoftmaxRow};
use crate::plan::{self, Buf, PlainStep};
use crate::storage::CpuRows;

use super::{Run, VALUES_PER_TASK, piece};

impl Run<'_> {
    /// One step of one layer.
    pub(super) fn plain(
        &mut self,
        of: &plan::PlainAttention,
        rows: &CpuRows,
        [x, out]: [Buf; 2],
    ) -> Result<(), BackendError> {
        let plain = PlainAttention {
            kernels: self.kernels,
            spec: &of.spec,
            n_kv: of.n_kv,
        };
        // SAFETY: the plan lets no step write what it reads.
        let values = unsafe { self.frame.read(x) };
        let of_row = |row: usize| &values[row * x.width..(row + 1) * x.width];
        let layer = match &of.step {
            PlainStep::SoftMax { part, beside } => {
                let score_mods = self.score_mods(beside);
                let visibility = &self.inputs.parts[*part].visibility;
                return self.rows(out, &|row, to| {
                    let softmax = SoftmaxRow {
                        visibility,
                        row: row as u32,
                        score_mods,
                    };
                    plain.softmax(softmax, of_row(row), to);
                    Ok(())
                });
            }
            PlainStep::Scores { layer } | PlainStep::Sum { layer } => *layer,
        };
        let Some([keys, stored_values]) = rows.stored(layer) else {
            return Ok(());
        };
        let (to, scratch) = (self.frame.write(out), self.scratch);
        // A row reads every cell.
        let per_row = of.n_kv * of.spec.n_heads;
        let per_task = (VALUES_PER_TASK / per_row.max(1)).max(1);
        self.lead
            .each(out.rows.div_ceil(per_task), &|thread, task| {
                let mut scratch = scratch[thread]
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner);
                for row in piece(task, per_task, out.rows) {
                    // SAFETY: each row belongs to one task, and the plan lets no step read what it
                    // writes.
                    let to = unsafe { to.range(row * out.width..(row + 1) * out.width) };
                    match of.step {
                        PlainStep::Sum { .. } => {
                            plain.weighted_sum(stored_values, of_row(row), to, &mut scratch);
                        }
                        _ => plain.scores(keys, of_row(row), to, &mut scratch),
                    }
                }
                Ok(())
            })
    }
}
