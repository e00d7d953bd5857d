//! Custom operations: without a state, tasks take rows; with one, or on whole sequences, sequences
//! run one after the other.
//!
//! Invariant: an operation is called for ranges of rows that depend on their number alone, so
//! results do not depend on threads. Does not know what is computed.

use kv_backend::checks::whole_sequences;
use kv_backend::{BackendError, CustomCall, CustomStates, MAX_CUSTOM_OPERANDS};
use kv_core::LayerIdx;
use kv_graph::CustomScope;

use crate::plan::{CustomState, CustomStep, Step};
use crate::storage::{CpuRows, RecurrentMut, StatesMut};
use crate::values::Buf;

use super::{Run, piece};

/// Rows that are worth a task of their own, at the least.
const ROWS_PER_TASK: usize = 4;

impl Run<'_> {
    /// Computes one step; its states, if any, are in `rows`.
    pub(super) fn custom(
        &mut self,
        call: &CustomStep,
        step: &Step<Buf>,
        rows: &mut CpuRows,
    ) -> Result<(), BackendError> {
        let out = step.write();
        let mut operands: [&[f32]; MAX_CUSTOM_OPERANDS] = [&[]; MAX_CUSTOM_OPERANDS];
        for (operand, input) in operands.iter_mut().zip(&step.reads) {
            // SAFETY: allocation lets no step write what it reads.
            *operand = unsafe { self.frame.read(*input) };
        }
        let node = CustomCall {
            op: &*call.op,
            spec: &call.spec,
            node: &call.node,
            operands: &operands[..step.reads.len().min(MAX_CUSTOM_OPERANDS)],
            weights: &call.weights,
            n_rows: out.rows,
        };
        let values = self.frame.write(out);
        if let Some(CustomState { layer, n_values }) = call.state {
            let Some(RecurrentMut {
                states: StatesMut::F32(states),
                ..
            }) = rows.states_mut(layer)
            else {
                // No program is compiled for other states.
                let layer = call.spec.layer().unwrap_or(LayerIdx(0));
                return Err(BackendError::NoRows { layer });
            };
            // SAFETY: allocation gives `out` memory that this step does not read; no task runs.
            let out = unsafe { values.range(0..out.len()) };
            let states = CustomStates {
                values: states,
                n_state: n_values,
            };
            return node.recur(self.inputs.states, states, out);
        }
        if call.spec.scope == CustomScope::Sequence {
            let seen = whole_sequences(self.inputs)?;
            // SAFETY: allocation gives `out` memory that this step does not read; no task runs.
            let out = unsafe { values.range(0..out.len()) };
            return node.sequences(seen, out);
        }
        let n_tasks = out.rows.div_ceil(ROWS_PER_TASK);
        self.lead.each(n_tasks, &|_, task| {
            let rows = piece(task, ROWS_PER_TASK, out.rows);
            // SAFETY: each row belongs to one task.
            let to = unsafe { values.range(rows.start * out.width..rows.end * out.width) };
            node.rows(rows, to)
        })
    }
}
