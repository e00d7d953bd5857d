//! What every backend has to check: whether a graph fits weights and rows ([`check_weights`],
//! [`check_rows`]) when it is compiled, and whether inputs fit the graph ([`check_inputs`]) before
//! anything is computed.
//!
//! Invariant: after [`check_inputs`] every id is a row of what it selects from, every cell is a row
//! of its part, and visibilities and groups are sound. Knows nothing of devices.

use kv_core::{
    ids::{LayerIdx, PartIdx},
    memory::{PartInputs, check_states as check_groups},
    visibility::Visibility,
    window::Window,
};
use kv_graph::weights::{WeightError, WeightSource};
use kv_graph::{AttendSpec, Graph, GraphShape, IndexSpec, Input, Node, Op};
use kv_rows::{LayerRows, RowLayout, RowShape, StateRows, StateType, ValueRows};

use crate::BackendError;
use crate::GraphInputs;
use crate::rows::RowKind;

/// Checks that `source` has every weight that `graph` names, in its shape.
///
/// # Errors
/// [`BackendError::MissingWeight`], [`BackendError::WeightShape`], or what the source refuses.
pub fn check_weights(graph: &Graph, source: &dyn WeightSource) -> Result<(), BackendError> {
    for weight in graph.weights() {
        let found = source.describe(&weight.name);
        let found = found.map_err(|error| match error {
            WeightError::Missing { name } => BackendError::MissingWeight {
                node: user_of(graph, &name),
                name,
                shape: weight.shape.clone(),
            },
            other => BackendError::Weight(other),
        })?;
        if found.shape != weight.shape {
            return Err(BackendError::WeightShape {
                name: weight.name.clone(),
                wanted: weight.shape.clone(),
                got: found.shape,
            });
        }
    }
    Ok(())
}

/// The first node that names a weight.
fn user_of(graph: &Graph, weight: &str) -> String {
    // Only for a message: an operation's fields are searched in their serialized form.
    fn names(value: &serde_json::Value, weight: &str) -> bool {
        match value {
            serde_json::Value::String(text) => text == weight,
            serde_json::Value::Array(values) => values.iter().any(|v| names(v, weight)),
            serde_json::Value::Object(fields) => fields.values().any(|v| names(v, weight)),
            _ => false,
        }
    }
    let is_user = |node: &&Node| serde_json::to_value(&node.op).is_ok_and(|op| names(&op, weight));
    let node = graph.nodes().iter().find(is_user);
    node.map_or_else(String::new, |node| node.name.clone())
}

/// Checks that the layers of `graph` have rows of its shapes in `layout`, in the part whose cells
/// it stores to.
///
/// # Errors
/// [`BackendError::NoRows`] and [`BackendError::RowShape`]; as [`check_state_types`].
pub fn check_rows(graph: &Graph, layout: &RowLayout) -> Result<(), BackendError> {
    check_state_types(graph, layout)?;
    for node in graph.nodes() {
        match node.op {
            Op::StoreK { layer } => {
                let rows = rows_of(graph, layout, Use { node, layer, at: 1 })?;
                check_owner(rows, layer, ValueRows::InKeys)?;
                check_shape(rows, rows.k, stored_shape(graph, node, 0)?)?;
            }
            Op::StoreKv { layer } => {
                let rows = rows_of(graph, layout, Use { node, layer, at: 2 })?;
                check_owner(rows, layer, ValueRows::Own)?;
                check_shape(rows, rows.k, stored_shape(graph, node, 0)?)?;
                check_shape(rows, rows.v, stored_shape(graph, node, 1)?)?;
            }
            Op::Conv { layer, ref conv } => {
                let len = conv.width.saturating_sub(1) * node.row_len();
                check_state(states_of(layout, layer)?, RowKind::Conv, len)?;
            }
            Op::Scan { layer, ref scan } => {
                let len = scan.d_state * node.row_len();
                check_state(states_of(layout, layer)?, RowKind::State, len)?;
            }
            Op::ScanHeads { layer, ref scan } => {
                let len = scan.d_state * node.row_len();
                check_state(states_of(layout, layer)?, RowKind::State, len)?;
            }
            Op::Delta { layer, ref delta } => {
                let len = delta.k_dim * node.row_len();
                check_state(states_of(layout, layer)?, RowKind::State, len)?;
            }
            Op::Kq { layer, ref spec } => {
                check_table(layout, layer, spec, node)?;
            }
            Op::Kqv { layer, ref spec } => {
                check_table(layout, layer, spec, operand(graph, node, 0)?)?;
            }
            Op::Attend {
                layer, ref spec, ..
            }
            | Op::AttendPartial {
                layer, ref spec, ..
            }
            | Op::AttendSparse { layer, ref spec } => {
                check_spec(rows_of(graph, layout, Use { node, layer, at: 2 })?, spec)?;
            }
            Op::Index { layer, ref index } => {
                let rows = rows_of(graph, layout, Use { node, layer, at: 3 })?;
                check_index(rows, index)?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// Checks that every operation of `graph` can compute with the types of its layer's states: custom
/// operations take `f32` alone.
///
/// # Errors
/// [`BackendError::StateTypeOfOp`], for the first that cannot.
pub fn check_state_types(graph: &Graph, layout: &RowLayout) -> Result<(), BackendError> {
    for node in graph.nodes() {
        let Op::Custom { custom } = &node.op else {
            continue;
        };
        let states = custom.layer().and_then(|layer| layout.state(layer));
        match states {
            Some(states) if states.state_type != StateType::F32 => {
                return Err(BackendError::StateTypeOfOp {
                    layer: states.layer,
                    op: custom.name.clone(),
                    node: node.name.clone(),
                    state_type: states.state_type,
                });
            }
            _ => {}
        }
    }
    Ok(())
}

/// Checks everything that `graph` takes from `inputs`, over rows of `layout`, for a backend whose
/// programs run with the shape of their graph alone.
///
/// # Errors
/// [`BackendError::Input`] with the input's name.
pub fn check_inputs(
    graph: &Graph,
    layout: &RowLayout,
    inputs: &GraphInputs<'_>,
) -> Result<(), BackendError> {
    let (program, run) = (graph.shape(), inputs.shape_within(graph.shape())?);
    if run != program {
        let (n_tokens, n_outputs) = (program.n_tokens, program.n_outputs);
        let reason =
            format!("the program runs with {n_tokens} tokens and {n_outputs} outputs alone");
        return Err(refused("shape", reason));
    }
    check_run(graph, layout, inputs, run)
}

/// The same for a run with so many tokens and outputs, of which the graph may have more
/// ([`Graph::row_counts`]).
///
/// # Errors
/// [`BackendError::Input`] with the input's name.
pub fn check_run(
    graph: &Graph,
    layout: &RowLayout,
    inputs: &GraphInputs<'_>,
    run: GraphShape,
) -> Result<(), BackendError> {
    for node in graph.nodes() {
        match &node.op {
            Op::Input(input) => check_input(layout, input, inputs, run)?,
            Op::KqSoftMax { .. } => {
                let visibility = stored_visibility(graph, node, 1, inputs)?;
                check_visibility(visibility, node.shape.last().copied().unwrap_or(0))?;
            }
            Op::Embed { weight } => {
                let known = graph.weights().iter().find(|w| w.name == *weight);
                let n_rows = known.and_then(|w| w.shape.first()).copied().unwrap_or(0);
                let Ids { input, ids } = ids(graph, node, 0, inputs)?;
                below(input, ids.iter().map(|&i| i as usize), n_rows)?;
            }
            Op::TakeRows => {
                let Ids { input, ids } = ids(graph, node, 1, inputs)?;
                // No run has more rows than its tokens.
                let n_rows = operand(graph, node, 0)?.n_rows().min(run.n_tokens);
                below(input, ids.iter().map(|&i| i as usize), n_rows)?;
            }
            _ => {}
        }
    }
    Ok(())
}

fn check_input(
    layout: &RowLayout,
    input: &Input,
    inputs: &GraphInputs<'_>,
    run: GraphShape,
) -> Result<(), BackendError> {
    let n_tokens = run.n_tokens;
    match input {
        Input::Tokens => lengths("tokens", n_tokens, inputs.tokens.len()),
        Input::Embeddings { dim } => lengths("embeddings", n_tokens * dim, inputs.embeddings.len()),
        Input::Positions => lengths("positions", n_tokens, inputs.positions.len()),
        Input::TokenTypes => lengths("token types", n_tokens, inputs.token_types.len()),
        Input::Coordinates => lengths("coordinates", n_tokens, inputs.coordinates.len()),
        Input::OutputRows => lengths("output_rows", run.n_outputs, inputs.output_rows.len()),
        Input::Cells { part } => {
            let cells = &part_inputs(inputs, *part)?.cells;
            lengths("cells", n_tokens, cells.len())?;
            let n_rows = rows_of_part(layout, *part);
            below("cells", cells.iter().map(|c| c.as_usize()), n_rows)
        }
        Input::Visibility { part, window } => {
            let visibility = part_inputs(inputs, *part)?.seen(*window);
            lengths("visibility", n_tokens, visibility.n_rows as usize)?;
            check_visibility(visibility, rows_of_part(layout, *part))
        }
        Input::BatchVisibility { window } => {
            let visibility = within_batch(inputs, *window)?;
            lengths("visibility", n_tokens, visibility.n_rows as usize)?;
            check_visibility(visibility, n_tokens)
        }
        Input::States => {
            let n_states = layout.states().iter().map(|s| s.n_rows).min().unwrap_or(0);
            let number = |n| u32::try_from(n).unwrap_or(u32::MAX);
            let sound = check_groups(inputs.states, number(n_tokens), number(n_states));
            sound.map_err(|error| refused("states", error.to_string()))
        }
    }
}

/// The node that operand number `at` names.
///
/// # Errors
/// [`BackendError::Input`] where there is none, which no builder lets pass.
pub fn operand<'g>(graph: &'g Graph, node: &Node, at: usize) -> Result<&'g Node, BackendError> {
    let found = node.operands.get(at).and_then(|&id| graph.node(id));
    found.ok_or_else(|| refused("graph", format!("node '{}' has no operand {at}", node.name)))
}

/// Row numbers, tokens or positions that an operand stands for.
#[derive(Clone, Copy, Debug)]
pub struct Ids<'a> {
    /// The name of the input.
    pub input: &'static str,
    /// The numbers.
    pub ids: &'a [u32],
}

/// The numbers that operand number `at` stands for.
///
/// # Errors
/// [`BackendError::Input`] where it is no list of numbers, which no builder lets pass.
pub fn ids<'a>(
    graph: &Graph,
    node: &Node,
    at: usize,
    inputs: &GraphInputs<'a>,
) -> Result<Ids<'a>, BackendError> {
    let (input, ids) = match operand(graph, node, at)?.op {
        Op::Input(Input::Tokens) => ("tokens", inputs.tokens),
        Op::Input(Input::Positions) => ("positions", inputs.positions),
        Op::Input(Input::TokenTypes) => ("token types", inputs.token_types),
        Op::Input(Input::OutputRows) => ("output_rows", inputs.output_rows),
        ref op => return Err(misplaced(node, op, "a list of numbers")),
    };
    Ok(Ids { input, ids })
}

/// The part that operand number `at`, cells or a visibility, belongs to.
///
/// # Errors
/// [`BackendError::Input`] where it is neither, which no builder lets pass.
pub fn part_of(graph: &Graph, node: &Node, at: usize) -> Result<PartIdx, BackendError> {
    match operand(graph, node, at)?.op {
        Op::Input(Input::Cells { part } | Input::Visibility { part, .. }) => Ok(part),
        ref op => Err(misplaced(node, op, "a part of the memory")),
    }
}

/// The visibility of a part of the memory, through the window that operand number `at` names.
///
/// # Errors
/// [`BackendError::Input`] where it was not given.
pub fn stored_visibility<'a>(
    graph: &Graph,
    node: &Node,
    at: usize,
    inputs: &GraphInputs<'a>,
) -> Result<&'a Visibility, BackendError> {
    let (part, window) = window_of(graph, node, at)?;
    Ok(part_inputs(inputs, part)?.seen(window))
}

/// The part of the memory, and the window, whose visibility operand number `at` is.
///
/// # Errors
/// [`BackendError::Input`] where it is none, which no builder lets pass.
pub fn window_of(graph: &Graph, node: &Node, at: usize) -> Result<(PartIdx, Window), BackendError> {
    match operand(graph, node, at)?.op {
        Op::Input(Input::Visibility { part, window }) => Ok((part, window)),
        ref op => Err(misplaced(node, op, "what tokens see of a part")),
    }
}

/// The visibility of the tokens' own ubatch, through the window that operand number `at` names.
///
/// # Errors
/// [`BackendError::Input`] where it was not given.
pub fn batch_visibility<'a>(
    graph: &Graph,
    node: &Node,
    at: usize,
    inputs: &GraphInputs<'a>,
) -> Result<&'a Visibility, BackendError> {
    match operand(graph, node, at)?.op {
        Op::Input(Input::BatchVisibility { window }) => within_batch(inputs, window),
        ref op => Err(misplaced(node, op, "what tokens see of their ubatch")),
    }
}

/// The tokens that are one sequence, for an operation on whole ones.
///
/// # Errors
/// [`BackendError::Input`] where it was not given.
pub fn whole_sequences<'a>(inputs: &GraphInputs<'a>) -> Result<&'a Visibility, BackendError> {
    within_batch(inputs, Window::Full)
}

fn within_batch<'a>(
    inputs: &GraphInputs<'a>,
    window: Window,
) -> Result<&'a Visibility, BackendError> {
    inputs.batch_visibility(window).ok_or_else(|| {
        let reason = format!("the ubatch through {window} is needed and not given");
        refused("batch", reason)
    })
}

/// Cells and visibility of one part.
///
/// # Errors
/// [`BackendError::Input`] where they were not given.
pub fn part_inputs<'a>(
    inputs: &GraphInputs<'a>,
    part: PartIdx,
) -> Result<&'a PartInputs, BackendError> {
    inputs.parts.get(part.as_usize()).ok_or_else(|| {
        let n = inputs.parts.len();
        refused(
            "parts",
            format!("the graph uses part {part}, there are {n}"),
        )
    })
}

/// A use of a layer's rows: operand `at` of `node` belongs to their part.
struct Use<'a> {
    node: &'a Node,
    layer: LayerIdx,
    at: usize,
}

/// The rows that a layer attends over or stores to, in the part that the operand names.
fn rows_of<'l>(
    graph: &Graph,
    layout: &'l RowLayout,
    used: Use<'_>,
) -> Result<&'l LayerRows, BackendError> {
    let layer = used.layer;
    let attended = layout.attended(layer).map(|(_, rows)| rows);
    let rows = attended.ok_or(BackendError::NoRows { layer })?;
    let part = part_of(graph, used.node, used.at)?;
    if part != rows.part {
        let (wanted, got) = (part, rows.part);
        let in_part = |part| format!("rows in part {part}");
        return Err(row_shape(layer, in_part(wanted), in_part(got)));
    }
    Ok(rows)
}

/// Checks that a layer has rows of its own to store to, with its values there.
fn check_owner(rows: &LayerRows, layer: LayerIdx, values: ValueRows) -> Result<(), BackendError> {
    if rows.layer == layer && rows.values == values {
        Ok(())
    } else {
        Err(BackendError::NoRows { layer })
    }
}

/// Heads and width of the values that operand `at` gives to be stored.
fn stored_shape<'g>(graph: &'g Graph, node: &Node, at: usize) -> Result<&'g [usize], BackendError> {
    Ok(operand(graph, node, at)?.shape.get(1..).unwrap_or_default())
}

fn check_shape(rows: &LayerRows, shape: RowShape, wanted: &[usize]) -> Result<(), BackendError> {
    let got = [shape.heads, shape.dim];
    if wanted == got {
        Ok(())
    } else {
        let (wanted, got) = (format!("rows of {wanted:?}"), format!("rows of {got:?}"));
        Err(row_shape(rows.layer, wanted, got))
    }
}

/// Checks that a layer's rows have the heads and widths that an attention wants.
fn check_spec(rows: &LayerRows, spec: &AttendSpec) -> Result<(), BackendError> {
    let grouped = spec.kv_heads > 0 && spec.n_heads.is_multiple_of(spec.kv_heads);
    if grouped && [rows.v.heads, rows.v.dim] == [spec.kv_heads, spec.v_dim] {
        return check_shape(rows, rows.k, &[spec.kv_heads, spec.k_dim]);
    }
    let AttendSpec {
        n_heads,
        kv_heads,
        v_dim,
        ..
    } = spec;
    let wanted = format!("{n_heads} heads over {kv_heads} of {v_dim}");
    let got = format!("{} heads of {}", rows.v.heads, rows.v.dim);
    Err(row_shape(rows.layer, wanted, got))
}

/// Checks that a layer's rows are the keys of an indexer, of no more cells than it can name.
fn check_index(rows: &LayerRows, index: &IndexSpec) -> Result<(), BackendError> {
    if rows.n_rows > IndexSpec::MAX_CELLS {
        let cells = |n| format!("{n} cells");
        let wanted = format!("at most {}", cells(IndexSpec::MAX_CELLS));
        return Err(row_shape(rows.layer, wanted, cells(rows.n_rows)));
    }
    check_shape(rows, rows.k, &[1, index.dim])
}

/// Checks that a table of plain attention reaches no further than the layer's cells.
fn check_table(
    layout: &RowLayout,
    layer: LayerIdx,
    spec: &AttendSpec,
    table: &Node,
) -> Result<(), BackendError> {
    let rows = layout.layer(layer).ok_or(BackendError::NoRows { layer })?;
    check_spec(rows, spec)?;
    let n_kv = table.shape.last().copied().unwrap_or(0);
    if n_kv <= rows.n_rows {
        Ok(())
    } else {
        let cells = |n| format!("{n} cells");
        Err(row_shape(layer, cells(n_kv), cells(rows.n_rows)))
    }
}

fn states_of(layout: &RowLayout, layer: LayerIdx) -> Result<&StateRows, BackendError> {
    layout.state(layer).ok_or(BackendError::NoRows { layer })
}

/// Checks that a layer's states are those of a convolution of this many values, or of a scan.
fn check_state(states: &StateRows, kind: RowKind, wanted: usize) -> Result<(), BackendError> {
    let (got, what) = match kind {
        RowKind::Conv => (states.row.conv_row, "convolution"),
        _ => (states.row.state_row, "scan"),
    };
    if wanted == got {
        Ok(())
    } else {
        let wanted = format!("{wanted} values of {what} state");
        Err(row_shape(states.layer, wanted, got.to_string()))
    }
}

/// Checks that the rules of [`Visibility`] hold over `n_cells` cells.
fn check_visibility(visibility: &Visibility, n_cells: usize) -> Result<(), BackendError> {
    let n_cells = u32::try_from(n_cells).unwrap_or(u32::MAX);
    let sound = visibility.check(n_cells);
    sound.map_err(|error| refused("visibility", error.to_string()))
}

fn rows_of_part(layout: &RowLayout, part: PartIdx) -> usize {
    let layer = layout.layers().iter().find(|l| l.part == part);
    layer.map_or(0, |l| l.n_rows)
}

fn lengths(input: &'static str, wanted: usize, got: usize) -> Result<(), BackendError> {
    if wanted == got {
        Ok(())
    } else {
        let reason = format!("the graph takes {wanted} values, got {got}");
        Err(refused(input, reason))
    }
}

fn below(
    input: &'static str,
    mut ids: impl Iterator<Item = usize>,
    n: usize,
) -> Result<(), BackendError> {
    match ids.find(|&id| id >= n) {
        Some(id) => Err(refused(input, format!("{id} is not below {n}"))),
        None => Ok(()),
    }
}

fn refused(input: &'static str, reason: String) -> BackendError {
    BackendError::Input { input, reason }
}

fn misplaced(node: &Node, op: &Op, wanted: &str) -> BackendError {
    let (name, op) = (&node.name, op.name());
    refused(
        "graph",
        format!("node '{name}' takes {op} where it needs {wanted}"),
    )
}

fn row_shape(layer: LayerIdx, wanted: String, got: String) -> BackendError {
    BackendError::RowShape { layer, wanted, got }
}
