//! [`CustomOp`]: an operation that a program or a model brings, and [`CustomCall`], which calls it.
//!
//! An implementation sees consecutive rows of **one** sequence, and the state before them. It is
//! called for as many rows at once as happen to lie together, so its results must not depend on how
//! a sequence is cut up: then they do not depend on batches, and rollback, copies and snapshots of
//! its state work without its knowing of them. An operation on whole sequences
//! ([`CustomScope::Sequence`]) is called once for each, with all its rows, for models whose tokens
//! are all in one ubatch. Knows nothing of devices: values are on the host.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use kv_core::ids::CellIdx;
use kv_core::memory::StateGroup;
use kv_core::visibility::{Visibility, VisibleGroup};
use kv_graph::{CustomScope, CustomSpec, Node};

use crate::GraphInputs;
use crate::checks::whole_sequences;
use crate::error::BackendError;

/// Operands that a custom operation may have, the states not counted.
pub const MAX_CUSTOM_OPERANDS: usize = 16;

/// An operation on rows that no backend has of its own.
pub trait CustomOp: fmt::Debug + Send + Sync {
    /// The name that graphs call it by ([`CustomSpec::name`]).
    fn name(&self) -> &str;

    /// True if the host computes it on purpose: a device does not warn that values cross over.
    fn is_of_host(&self) -> bool {
        false
    }

    /// Checks that it can compute such a node; called when a graph is compiled.
    ///
    /// # Errors
    /// A reason as text, with the numbers.
    fn check(&self, node: &CustomShape<'_>) -> Result<(), String>;

    /// Computes consecutive rows of one sequence: reads [`CustomRows`], brings `state` from before
    /// the first to after the last row (empty for an operation without one), and fills `out`,
    /// `[n_rows, width]`.
    ///
    /// # Errors
    /// A reason as text. The batch fails then and is undone.
    fn rows(&self, rows: &CustomRows<'_>, state: &mut [f32], out: &mut [f32])
    -> Result<(), String>;
}

/// The sizes of a node that is to be computed.
#[derive(Clone, Debug)]
pub struct CustomShape<'a> {
    /// The operation as the graph names it.
    pub spec: &'a CustomSpec,
    /// Values of one row of each operand.
    pub widths: &'a [usize],
    /// The weights' shapes.
    pub weights: &'a [&'a [usize]],
    /// Values of one row of the result.
    pub width: usize,
    /// Values of the layer's state; 0 without one.
    pub n_state: usize,
}

/// Rows to compute.
#[derive(Clone, Copy, Debug)]
pub struct CustomRows<'a> {
    /// The operation as the graph names it.
    pub spec: &'a CustomSpec,
    /// Number of rows.
    pub n_rows: usize,
    /// The operands, `[n_rows, ..]` each.
    pub operands: &'a [&'a [f32]],
    /// The weights' values.
    pub weights: &'a [Arc<[f32]>],
}

impl CustomShape<'_> {
    /// A message for [`CustomOp::check`]: the sizes of the node, and the wanted ones in words.
    pub fn refusal(&self, wanted: &str) -> String {
        format!(
            "operands of {:?} values to {}, with weights {:?} and a state of {}; wanted: {wanted}",
            self.widths, self.width, self.weights, self.n_state
        )
    }
}

impl<'a> CustomRows<'a> {
    /// The operands of an operation that has `N`.
    ///
    /// # Errors
    /// That there is another number, which [`CustomOp::check`] let pass.
    pub fn all_operands<const N: usize>(&self) -> Result<[&'a [f32]; N], String> {
        let n = self.operands.len();
        let all = self.operands.try_into();
        all.map_err(|_| format!("{n} operands, not {N}"))
    }

    /// The weights of an operation that has `N`.
    ///
    /// # Errors
    /// That there is another number, which [`CustomOp::check`] let pass.
    pub fn all_weights<const N: usize>(&self) -> Result<&'a [Arc<[f32]>; N], String> {
        let n = self.weights.len();
        let all = self.weights.try_into();
        all.map_err(|_| format!("{n} weights, not {N}"))
    }
}

/// Implementations by name. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct CustomOps(Arc<HashMap<String, Arc<dyn CustomOp>>>);

impl CustomOps {
    /// None.
    pub fn new() -> Self {
        Self::default()
    }

    /// True if there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The same and `op`, which replaces one of its name.
    #[must_use]
    pub fn with(mut self, op: impl CustomOp + 'static) -> Self {
        // Plans need none: what computes its rows is left out of such a program.
        if !cfg!(cellar_plans_only) {
            Arc::make_mut(&mut self.0).insert(op.name().to_owned(), Arc::new(op));
        }
        self
    }

    /// Takes others too, which replace those of their names.
    pub fn extend(&mut self, others: &Self) {
        let others = others
            .0
            .iter()
            .map(|(name, op)| (name.clone(), Arc::clone(op)));
        Arc::make_mut(&mut self.0).extend(others);
    }

    /// The implementation of `node`, which can compute it.
    ///
    /// # Errors
    /// [`BackendError::CustomOp`] where there is none, or it refuses.
    pub fn find(
        &self,
        node: &Node,
        shape: &CustomShape<'_>,
    ) -> Result<Arc<dyn CustomOp>, BackendError> {
        let name = &shape.spec.name;
        let failed = |reason| custom_error(shape.spec, &node.name, reason);
        let Some(op) = self.0.get(name) else {
            let mut known: Vec<&str> = self.0.keys().map(String::as_str).collect();
            known.sort_unstable();
            let known = if known.is_empty() {
                "none is".to_owned()
            } else {
                format!("known are: {}", known.join(", "))
            };
            return Err(failed(format!(
                "not registered with this backend ({known})"
            )));
        };
        if shape.widths.len() > MAX_CUSTOM_OPERANDS {
            let n = shape.widths.len();
            return Err(failed(format!(
                "{n} operands; there may be {MAX_CUSTOM_OPERANDS}"
            )));
        }
        op.check(shape).map_err(failed)?;
        Ok(Arc::clone(op))
    }
}

fn custom_error(spec: &CustomSpec, node: &str, reason: String) -> BackendError {
    BackendError::CustomOp {
        op: spec.name.clone(),
        node: node.to_owned(),
        reason,
    }
}

/// The states of a layer.
#[derive(Debug)]
pub struct CustomStates<'a> {
    /// All of them, `[n_states, n_state]`.
    pub values: &'a mut [f32],
    /// Values of one state.
    pub n_state: usize,
}

/// A node with its operands, ready to be computed.
#[derive(Clone, Copy, Debug)]
pub struct CustomCall<'a> {
    /// The implementation.
    pub op: &'a dyn CustomOp,
    /// The operation as the graph names it.
    pub spec: &'a CustomSpec,
    /// The node's name.
    pub node: &'a str,
    /// The operands, all rows of each.
    pub operands: &'a [&'a [f32]],
    /// The weights' values.
    pub weights: &'a [Arc<[f32]>],
    /// Rows of the ubatch.
    pub n_rows: usize,
}

impl CustomCall<'_> {
    /// Computes these rows of an operation without state into `out`, `[rows, width]`.
    ///
    /// # Errors
    /// [`BackendError::CustomOp`] where the implementation fails.
    pub fn rows(&self, rows: Range<usize>, out: &mut [f32]) -> Result<(), BackendError> {
        self.call(rows, &mut [], out)
    }

    /// Computes all rows of an operation without state, whether on rows or on whole sequences.
    ///
    /// # Errors
    /// As [`Self::rows`] and [`Self::sequences`]; [`BackendError::Input`] where the inputs do not
    /// say what is a sequence.
    pub fn without_state(
        &self,
        inputs: &GraphInputs<'_>,
        out: &mut [f32],
    ) -> Result<(), BackendError> {
        match self.spec.scope {
            CustomScope::Sequence => self.sequences(whole_sequences(inputs)?, out),
            CustomScope::Row | CustomScope::State(_) => self.rows(0..self.n_rows, out),
        }
    }

    /// Computes all rows of an operation on whole sequences: one call for each, with its rows by
    /// position.
    ///
    /// # Errors
    /// [`BackendError::CustomOp`] where the implementation fails; [`BackendError::Input`] where a
    /// token sees others than those of its sequence, and not all of them.
    pub fn sequences(&self, seen: &Visibility, out: &mut [f32]) -> Result<(), BackendError> {
        let width = out.len() / self.n_rows.max(1);
        for group in &seen.groups {
            let rows = sequence(group)?;
            let Some(&first) = rows.first() else {
                continue;
            };
            let range = first..first + rows.len();
            if rows.iter().copied().eq(range.clone()) {
                let n = out.len();
                let to = out.get_mut(range.start * width..range.end * width);
                let to = to.ok_or_else(|| too_short(range.end * width, n))?;
                self.call(range, &mut [], to)?;
            } else {
                self.scattered(&rows, width, out)?;
            }
        }
        Ok(())
    }

    /// Computes one sequence whose rows do not lie together.
    fn scattered(&self, rows: &[usize], width: usize, out: &mut [f32]) -> Result<(), BackendError> {
        let gather = |all: &&[f32]| {
            let width = all.len() / self.n_rows.max(1);
            let row = |&row: &usize| all.get(row * width..(row + 1) * width).unwrap_or_default();
            rows.iter().flat_map(row).copied().collect::<Vec<f32>>()
        };
        let operands: Vec<Vec<f32>> = self.operands.iter().map(gather).collect();
        let operands: Vec<&[f32]> = operands.iter().map(Vec::as_slice).collect();
        let mut together = vec![0.0; rows.len() * width];
        let alone = CustomCall {
            operands: &operands,
            n_rows: rows.len(),
            ..*self
        };
        alone.call(0..rows.len(), &mut [], &mut together)?;
        let n = out.len();
        for (&row, from) in rows.iter().zip(together.chunks_exact(width.max(1))) {
            let to = out.get_mut(row * width..(row + 1) * width);
            to.ok_or_else(|| too_short((row + 1) * width, n))?
                .copy_from_slice(from);
        }
        Ok(())
    }

    /// Computes all rows of an operation with states, group by group, and stores the states that
    /// the groups name. The groups were checked for these rows and states.
    ///
    /// # Errors
    /// [`BackendError::CustomOp`] where the implementation fails; [`BackendError::WrongLength`]
    /// where a group names a state or row that is not there.
    pub fn recur(
        &self,
        groups: &[StateGroup],
        states: CustomStates<'_>,
        out: &mut [f32],
    ) -> Result<(), BackendError> {
        let CustomStates {
            values: states,
            n_state,
        } = states;
        let width = out.len() / self.n_rows.max(1);
        for group in groups {
            let Some(last) = group.stores.last() else {
                continue;
            };
            // The state under way lives where the group stores its last one.
            let here = span(last.to, n_state, states.len())?;
            match group.source {
                Some(source) => {
                    states.copy_within(span(source, n_state, states.len())?, here.start)
                }
                None => states[here.clone()].fill(0.0),
            }
            let mut done = 0;
            for store in &group.stores {
                let until = store.n_rows as usize;
                let rows = group.rows.get(done..until).unwrap_or_default();
                for run in rows.chunk_by(|a, b| a + 1 == *b) {
                    let first = run.first().map_or(0, |&row| row as usize);
                    let rows = first..first + run.len();
                    let n = out.len();
                    let to = out.get_mut(rows.start * width..rows.end * width);
                    let to = to.ok_or_else(|| too_short(rows.end * width, n))?;
                    self.call(rows, &mut states[here.clone()], to)?;
                }
                done = until;
                if store.to != last.to {
                    let to = span(store.to, n_state, states.len())?;
                    states.copy_within(here.clone(), to.start);
                }
            }
        }
        Ok(())
    }

    fn call(
        &self,
        rows: Range<usize>,
        state: &mut [f32],
        out: &mut [f32],
    ) -> Result<(), BackendError> {
        let mut operands: [&[f32]; MAX_CUSTOM_OPERANDS] = [&[]; MAX_CUSTOM_OPERANDS];
        for (here, &all) in operands.iter_mut().zip(self.operands) {
            let width = all.len() / self.n_rows.max(1);
            let values = all.get(rows.start * width..rows.end * width);
            *here = values.ok_or_else(|| too_short(rows.end * width, all.len()))?;
        }
        let n_operands = self.operands.len().min(MAX_CUSTOM_OPERANDS);
        let rows = CustomRows {
            spec: self.spec,
            n_rows: rows.len(),
            operands: &operands[..n_operands],
            weights: self.weights,
        };
        let done = self.op.rows(&rows, state, out);
        done.map_err(|reason| custom_error(self.spec, self.node, reason))
    }
}

/// The rows of the sequence that a group is, by position.
fn sequence(group: &VisibleGroup) -> Result<Vec<usize>, BackendError> {
    let all: Vec<usize> = group.cells_of(0).map(|(cell, _)| cell.as_usize()).collect();
    let mut ascending = all.clone();
    ascending.sort_unstable();
    let own = group.rows.iter().map(|&row| row as usize);
    let sees_all = |at| group.cells_of(at).count() == all.len();
    if own.eq(ascending) && (1..group.rows.len()).all(sees_all) {
        Ok(all)
    } else {
        Err(BackendError::Input {
            input: "visibility",
            reason: format!(
                "rows {:?} of the ubatch see others than all rows of one sequence, which an \
                 operation on whole sequences needs",
                group.rows
            ),
        })
    }
}

fn too_short(wanted: usize, got: usize) -> BackendError {
    BackendError::WrongLength {
        what: "values of a custom operation",
        wanted,
        got,
    }
}

fn span(state: CellIdx, n_state: usize, n_values: usize) -> Result<Range<usize>, BackendError> {
    let first = state.as_usize() * n_state;
    if first + n_state <= n_values {
        Ok(first..first + n_state)
    } else {
        Err(too_short(first + n_state, n_values))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_core::ids::Pos;
    use kv_core::visibility::CellRun;
    use kv_core::window::PosRange;

    fn group(rows: &[u32], runs: &[(u32, u32)], last: u32) -> VisibleGroup {
        let run = |&(cell, len)| CellRun {
            cell: CellIdx(cell),
            pos: Pos(0),
            len,
        };
        let limits = vec![PosRange::new(Pos(0), Pos(last)); rows.len()];
        VisibleGroup::new(rows.to_vec(), runs.iter().map(run).collect(), limits)
    }

    #[test]
    fn a_sequence_is_all_that_its_rows_see() {
        let rows = sequence(&group(&[2, 3, 4], &[(2, 3)], 9)).unwrap();
        assert_eq!(rows, [2, 3, 4]);
        for (rows, last) in [(&[2, 3][..], 9), (&[2, 3, 4], 1), (&[1, 2, 3], 9)] {
            let error = sequence(&group(rows, &[(2, 3)], last)).unwrap_err();
            let error = error.to_string();
            assert!(
                error.contains("others than all rows of one sequence"),
                "{error}"
            );
        }
    }
}
