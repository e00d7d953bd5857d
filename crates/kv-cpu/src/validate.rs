//! Whether the inputs of a run are what its program needs: lengths, ranges, sound visibilities.
//!
//! Invariant: what passes here can neither panic nor reach outside a buffer later, and nothing has
//! been changed before all has passed. Allocates only for the message of an error.

use kv_backend::BackendError;
use kv_backend::GraphInputs;
use kv_core::Visibility;
use kv_core::memory::{PartInputs, StateMarks};
use kv_graph::GraphShape;

use crate::plan::{PartNeeds, RequiredInputs};

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

/// Reusable memory for [`check_inputs`].
#[derive(Default)]
pub(crate) struct InputScratch {
    groups_of_rows: Vec<u32>,
    states: StateMarks,
}

/// Checks all inputs of a run of this shape.
pub(crate) fn check_inputs(
    needs: &RequiredInputs,
    shape: GraphShape,
    inputs: &GraphInputs<'_>,
    marks: &mut InputScratch,
) -> Result<(), BackendError> {
    let GraphShape {
        n_tokens,
        n_outputs,
    } = shape;
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
    if let Some(end) = needs.types_below {
        expect_len("token types", n_tokens, inputs.token_types.len())?;
        expect_below("token types", inputs.token_types, end)?;
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
        check_part(part, given, n_tokens, marks)?;
    }
    for &window in &needs.batch {
        let Some(visibility) = inputs.batch_visibility(window) else {
            let reason = format!("the ubatch through {window} is needed and not given");
            return Err(refuse("batch", reason));
        };
        check_visibility(visibility, n_tokens, n_tokens, marks)?;
    }
    let Some(n_states) = needs.n_states else {
        return Ok(());
    };
    let sound = (marks.states).check(inputs.states, number(n_tokens), number(n_states));
    sound.map_err(|error| refuse("states", error.to_string()))
}

fn check_part(
    part: &PartNeeds,
    given: &PartInputs,
    n_tokens: usize,
    marks: &mut InputScratch,
) -> Result<(), BackendError> {
    if part.cells {
        expect_len("cells", n_tokens, given.cells.len())?;
        if let Some(cell) = given.cells.iter().find(|c| c.as_usize() >= part.n_cells) {
            return Err(refuse("cells", format!("cell {cell} of {}", part.n_cells)));
        }
    }
    let mut seen = part.windows.iter().map(|&window| given.seen(window));
    seen.try_for_each(|seen| check_visibility(seen, n_tokens, part.n_cells, marks))
}

/// Checks that as many rows as there are tokens see cells that are there.
fn check_visibility(
    visibility: &Visibility,
    n_tokens: usize,
    n_cells: usize,
    marks: &mut InputScratch,
) -> Result<(), BackendError> {
    const INPUT: &str = "visibility";
    expect_len(INPUT, n_tokens, visibility.n_rows as usize)?;
    let sound = visibility.check_with(number(n_cells), &mut marks.groups_of_rows);
    sound.map_err(|error| refuse(INPUT, error.to_string()))
}

fn number(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
