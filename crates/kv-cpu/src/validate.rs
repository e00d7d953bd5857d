//! Whether the inputs of a run are what its program needs: lengths, ranges, sound visibilities.
//!
//! Invariant: what passes here can neither panic nor reach outside a buffer later, and nothing has
//! been changed before all has passed. Allocates only for the message of an error.

use kv_core::backend::BackendError;
use kv_core::graph::{GraphInputs, PartInputs, StateMarks};
use kv_core::{CellRun, Visibility};

use crate::plan::{Needs, PartNeeds};

fn refuse(input: &'static str, reason: String) -> BackendError {
    BackendError::Input { input, reason }
}

fn expect_len(input: &'static str, wanted: usize, got: usize) -> Result<(), BackendError> {
    if wanted == got {
        Ok(())
    } else {
        Err(refuse(input, format!("wanted {wanted} values, got {got}")))
    }
}

fn expect_below(input: &'static str, values: &[u32], end: usize) -> Result<(), BackendError> {
    match values.iter().enumerate().find(|(_, v)| **v as usize >= end) {
        Some((at, v)) => Err(refuse(
            input,
            format!("value {at} is {v}, must be below {end}"),
        )),
        None => Ok(()),
    }
}

/// Checks all inputs; `seen` has room for a mark for each token.
pub(crate) fn inputs(
    needs: &Needs,
    (n_tokens, n_outputs): (usize, usize),
    inputs: &GraphInputs<'_>,
    seen: &mut [bool],
) -> Result<(), BackendError> {
    if let Some(end) = needs.tokens_below {
        expect_len("tokens", n_tokens, inputs.tokens.len())?;
        expect_below("tokens", inputs.tokens, end)?;
    }
    if let Some(dim) = needs.embedding_dim {
        expect_len("embeddings", n_tokens * dim, inputs.embeddings.len())?;
    }
    if needs.positions {
        expect_len("positions", n_tokens, inputs.positions.len())?;
        if let Some(end) = needs.positions_below {
            expect_below("positions", inputs.positions, end)?;
        }
    }
    if needs.coordinates {
        expect_len("coordinates", n_tokens, inputs.coordinates.len())?;
    }
    if needs.output_rows {
        expect_len("output rows", n_outputs, inputs.output_rows.len())?;
        expect_below("output rows", inputs.output_rows, n_tokens)?;
    }
    for part in &needs.parts {
        let Some(given) = inputs.parts.get(part.part) else {
            let n = inputs.parts.len();
            return Err(refuse(
                "parts",
                format!("part {} is needed, {n} are given", part.part),
            ));
        };
        check_part(part, given, seen)?;
    }
    for &window in &needs.batch {
        let Some(visibility) = inputs.batch_visibility(window) else {
            let reason = format!("the ubatch through {window} is needed and not given");
            return Err(refuse("batch", reason));
        };
        self::visibility(visibility, n_tokens, seen)?;
    }
    Ok(())
}

/// Checks the groups of rows of recurrent layers; `marks` is memory for that.
pub(crate) fn states(
    needs: &Needs,
    n_tokens: usize,
    inputs: &GraphInputs<'_>,
    marks: &mut StateMarks,
) -> Result<(), BackendError> {
    let Some(n_states) = needs.n_states else {
        return Ok(());
    };
    let number = |n| u32::try_from(n).unwrap_or(u32::MAX);
    marks
        .check(inputs.states, number(n_tokens), number(n_states))
        .map_err(|error| refuse("states", error.to_string()))
}

fn check_part(part: &PartNeeds, given: &PartInputs, seen: &mut [bool]) -> Result<(), BackendError> {
    if part.cells {
        expect_len("cells", seen.len(), given.cells.len())?;
        if let Some(cell) = given.cells.iter().find(|c| c.as_usize() >= part.n_cells) {
            return Err(refuse("cells", format!("cell {cell} of {}", part.n_cells)));
        }
    }
    if part.visibility {
        visibility(&given.visibility, part.n_cells, seen)?;
    }
    Ok(())
}

/// The rules of [`Visibility::check`], without allocating: `seen` has a mark for each row.
pub(crate) fn visibility(
    visibility: &Visibility,
    n_cells: usize,
    seen: &mut [bool],
) -> Result<(), BackendError> {
    const INPUT: &str = "visibility";
    expect_len(INPUT, seen.len(), visibility.n_rows as usize)?;
    seen.fill(false);
    for (number, group) in visibility.groups.iter().enumerate() {
        let (n_rows, n_limits) = (group.rows.len(), group.limits.len());
        if n_rows != n_limits {
            let reason = format!("group {number} has {n_rows} rows but {n_limits} limits");
            return Err(refuse(INPUT, reason));
        }
        for &row in &group.rows {
            match seen.get_mut(row as usize) {
                Some(mark) if !*mark => *mark = true,
                Some(_) => return Err(refuse(INPUT, format!("row {row} occurs twice"))),
                None => {
                    let reason = format!("row {row} of {}", visibility.n_rows);
                    return Err(refuse(INPUT, reason));
                }
            }
        }
        let mut previous: Option<CellRun> = None;
        for &run in &group.runs {
            let end = run.cell.as_usize() + run.len as usize;
            if run.len == 0 || end > n_cells || run.pos.checked_add(run.len).is_none() {
                let reason = format!("group {number}: run {run} does not lie in {n_cells} cells");
                return Err(refuse(INPUT, reason));
            }
            if let Some(previous) = previous
                && (run.pos, run.cell) <= (previous.last_pos(), previous.last_cell())
            {
                let reason = format!("group {number}: run {run} does not follow run {previous}");
                return Err(refuse(INPUT, reason));
            }
            previous = Some(run);
        }
    }
    match seen.iter().position(|seen| !seen) {
        Some(row) => Err(refuse(INPUT, format!("row {row} is in no group"))),
        None => Ok(()),
    }
}
