//! Runs custom operations: rows without state divided among the team, states one after the other.
//!
//! Invariant: an operation is called for ranges of rows that depend on their number alone, so results
//! do not depend on threads. Knows nothing of what is computed.

use kv_core::backend::{BackendError, CustomCall, CustomStates, MAX_CUSTOM_OPERANDS};
use kv_core::graph::StateGroup;

use crate::plan::{Buf, CustomStep};
use crate::storage::CpuRows;
use crate::team::Lead;
use crate::values::Frame;

/// Rows that are worth a task of their own, at the least.
const ROWS_PER_TASK: usize = 4;

/// Computes one step; its states, if any, are in `rows`.
pub(crate) fn run(
    (step, inputs, out): (&CustomStep, &[Buf], Buf),
    (frame, lead): (Frame<'_>, &mut Lead<'_>),
    (rows, groups): (&mut CpuRows, &[StateGroup]),
) -> Result<(), BackendError> {
    let mut operands: [&[f32]; MAX_CUSTOM_OPERANDS] = [&[]; MAX_CUSTOM_OPERANDS];
    for (operand, input) in operands.iter_mut().zip(inputs) {
        // SAFETY: the plan lets no step write what it reads.
        *operand = unsafe { frame.read(*input) };
    }
    let call = CustomCall {
        op: &*step.op,
        spec: &step.spec,
        node: &step.node,
        operands: &operands[..inputs.len().min(MAX_CUSTOM_OPERANDS)],
        weights: &step.weights,
        n_rows: out.rows,
    };
    let values = frame.write(out);
    if let Some((layer, n_state)) = step.state {
        let Some([_, states]) = rows.states_mut(layer) else {
            return Ok(());
        };
        // SAFETY: the plan gives `out` a place that this step does not read; one thread is here.
        let out = unsafe { values.range(0..out.len()) };
        return call.recur(
            groups,
            CustomStates {
                values: states,
                n_state,
            },
            out,
        );
    }
    lead.each(out.rows.div_ceil(ROWS_PER_TASK), &|_, task| {
        let rows = task * ROWS_PER_TASK..((task + 1) * ROWS_PER_TASK).min(out.rows);
        // SAFETY: each row belongs to one task.
        let to = unsafe { values.range(rows.start * out.width..rows.end * out.width) };
        call.rows(rows, to)
    })
}
