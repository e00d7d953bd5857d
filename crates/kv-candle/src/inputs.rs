//! Inputs of a run: found by node, and checked before anything is computed.
//!
//! Invariant: after [`check`], every id is a row of what it selects from and every cell is a row
//! of its part. Knows nothing of tensors.

use kv_core::backend::BackendError;
use kv_core::graph::{Graph, GraphInputs, Input, Node, Op, PartInputs, check_states};
use kv_core::layers::RowLayout;
use kv_core::{PartIdx, Visibility, Window};

use crate::error::failure;

/// Checks everything that `graph` takes from `inputs`.
pub(crate) fn check(
    graph: &Graph,
    layout: &RowLayout,
    inputs: &GraphInputs<'_>,
) -> Result<(), BackendError> {
    for node in graph.nodes() {
        match &node.op {
            Op::Input(Input::Tokens) => lengths("tokens", node.n_values(), inputs.tokens.len())?,
            Op::Input(Input::Embeddings { .. }) => {
                lengths("embeddings", node.n_values(), inputs.embeddings.len())?;
            }
            Op::Input(Input::Positions) => {
                lengths("positions", node.n_values(), inputs.positions.len())?;
            }
            Op::Input(Input::Coordinates) => {
                lengths("coordinates", node.n_rows(), inputs.coordinates.len())?;
            }
            Op::Input(Input::OutputRows) => {
                lengths("output_rows", node.n_values(), inputs.output_rows.len())?;
            }
            Op::Input(Input::Cells { part }) => {
                let (cells, n_rows) =
                    (&part_inputs(inputs, *part)?.cells, part_rows(layout, *part));
                lengths("cells", node.n_values(), cells.len())?;
                below("cells", cells.iter().map(|c| c.as_usize()), n_rows)?;
            }
            Op::Input(Input::Visibility { part, .. }) => {
                let visibility = &part_inputs(inputs, *part)?.visibility;
                let n_tokens = graph.shape().n_tokens;
                lengths("visibility", n_tokens, visibility.n_rows as usize)?;
                check_visibility(visibility, part_rows(layout, *part))?;
            }
            Op::Input(Input::BatchVisibility { window }) => {
                let visibility = within(inputs, *window)?;
                let n_tokens = graph.shape().n_tokens;
                lengths("visibility", n_tokens, visibility.n_rows as usize)?;
                check_visibility(visibility, n_tokens)?;
            }
            Op::Input(Input::States) => {
                let n_states = layout.states().iter().map(|s| s.n_rows).min().unwrap_or(0);
                let number = |n| u32::try_from(n).unwrap_or(u32::MAX);
                let n_tokens = graph.shape().n_tokens;
                check_states(inputs.states, number(n_tokens), number(n_states)).map_err(
                    |error| BackendError::Input {
                        input: "states",
                        reason: error.to_string(),
                    },
                )?;
            }
            Op::KqSoftMax { .. } => {
                let visibility = &part_inputs(inputs, part_of(graph, node, 1)?)?.visibility;
                check_visibility(visibility, node.shape.last().copied().unwrap_or(0))?;
            }
            Op::Embed { weight } => {
                let known = graph.weights().iter().find(|w| w.name == *weight);
                let n_rows = known.and_then(|w| w.shape.first()).copied().unwrap_or(0);
                let (input, ids) = ids(graph, node, 0, inputs)?;
                below(input, ids.iter().map(|&i| i as usize), n_rows)?;
            }
            Op::TakeRows => {
                let (input, ids) = ids(graph, node, 1, inputs)?;
                let n_rows = operand(graph, node, 0)?.n_rows();
                below(input, ids.iter().map(|&i| i as usize), n_rows)?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// The node that operand number `at` names.
pub(crate) fn operand<'g>(
    graph: &'g Graph,
    node: &Node,
    at: usize,
) -> Result<&'g Node, BackendError> {
    let found = node.operands.get(at).and_then(|&id| graph.node(id));
    found.ok_or_else(|| failure(format!("node '{}' has no operand {at}", node.name)))
}

/// Row numbers, tokens or positions that operand number `at` stands for, and what they are called.
pub(crate) fn ids<'a>(
    graph: &Graph,
    node: &Node,
    at: usize,
    inputs: &GraphInputs<'a>,
) -> Result<(&'static str, &'a [u32]), BackendError> {
    match operand(graph, node, at)?.op {
        Op::Input(Input::Tokens) => Ok(("tokens", inputs.tokens)),
        Op::Input(Input::Positions) => Ok(("positions", inputs.positions)),
        Op::Input(Input::OutputRows) => Ok(("output_rows", inputs.output_rows)),
        ref op => {
            let (name, op) = (&node.name, op.name());
            Err(failure(format!(
                "node '{name}' takes {op} where it needs a list of numbers"
            )))
        }
    }
}

/// The part that operand number `at`, cells or visibility, belongs to.
pub(crate) fn part_of(graph: &Graph, node: &Node, at: usize) -> Result<PartIdx, BackendError> {
    match operand(graph, node, at)?.op {
        Op::Input(Input::Cells { part } | Input::Visibility { part, .. }) => Ok(part),
        ref op => {
            let (name, op) = (&node.name, op.name());
            Err(failure(format!(
                "node '{name}' takes {op} where it needs a part of the memory"
            )))
        }
    }
}

/// What tokens see of their ubatch in an [`Op::AttendBatch`].
pub(crate) fn batch_visibility<'a>(
    graph: &Graph,
    node: &Node,
    inputs: &GraphInputs<'a>,
) -> Result<&'a Visibility, BackendError> {
    match operand(graph, node, 3)?.op {
        Op::Input(Input::BatchVisibility { window }) => within(inputs, window),
        ref op => {
            let (name, op) = (&node.name, op.name());
            Err(failure(format!(
                "node '{name}' takes {op} where it needs what tokens see of their ubatch"
            )))
        }
    }
}

fn within<'a>(inputs: &GraphInputs<'a>, window: Window) -> Result<&'a Visibility, BackendError> {
    let found = inputs.batch_visibility(window);
    found.ok_or_else(|| BackendError::Input {
        input: "batch",
        reason: format!("the graph looks at the ubatch through {window}, which is not given"),
    })
}

/// Cells and visibility of one part.
pub(crate) fn part_inputs<'a>(
    inputs: &GraphInputs<'a>,
    part: PartIdx,
) -> Result<&'a PartInputs, BackendError> {
    inputs
        .parts
        .get(part.as_usize())
        .ok_or_else(|| BackendError::Input {
            input: "parts",
            reason: format!(
                "the graph uses part {part}, there are {}",
                inputs.parts.len()
            ),
        })
}

/// Whether the rules of [`Visibility`] hold over `n_cells` cells.
pub(crate) fn check_visibility(
    visibility: &Visibility,
    n_cells: usize,
) -> Result<(), BackendError> {
    let n_cells = u32::try_from(n_cells).unwrap_or(u32::MAX);
    visibility
        .check(n_cells)
        .map_err(|error| BackendError::Input {
            input: "visibility",
            reason: error.to_string(),
        })
}

fn part_rows(layout: &RowLayout, part: PartIdx) -> usize {
    layout
        .layers()
        .iter()
        .find(|l| l.part == part)
        .map_or(0, |l| l.n_rows)
}

fn lengths(input: &'static str, wanted: usize, got: usize) -> Result<(), BackendError> {
    if wanted == got {
        return Ok(());
    }
    Err(BackendError::Input {
        input,
        reason: format!("the graph takes {wanted}, got {got}"),
    })
}

fn below(
    input: &'static str,
    mut ids: impl Iterator<Item = usize>,
    n: usize,
) -> Result<(), BackendError> {
    match ids.find(|&id| id >= n) {
        Some(id) => Err(BackendError::Input {
            input,
            reason: format!("{id} is not below {n}"),
        }),
        None => Ok(()),
    }
}
