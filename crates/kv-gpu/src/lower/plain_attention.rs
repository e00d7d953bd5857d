//! Attention in three steps: scores, softmax and weighted sum as tables over a part's first cells.

use bytemuck::{Pod, Zeroable};
use kv_core::backend::BackendError;
use kv_core::graph::{AttendSpec, Node, NodeId, Op};

use super::attend::{Attended, PIECES, Settings, rotate_back, rotated_queries};
use super::{Lower, word};
use crate::device::Device;
use crate::program::{Grid, Operand};

/// `PlainArgs` of `plain_attention.k`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct PlainSettings {
    attend: Settings,
    n_kv: u32,
}

/// Lowers one of the three steps.
pub(super) fn lower<D: Device>(
    lower: &mut Lower<'_, D>,
    id: NodeId,
    node: &Node,
) -> Result<(), BackendError> {
    let n = lower.context.graph.shape().n_tokens;
    match &node.op {
        Op::Kq { layer, spec } => {
            let attended = Attended::of_layer(lower, *layer)?;
            let q = rotated_queries(lower, node, &attended, n * spec.n_heads * spec.k_dim)?;
            let n_kv = word(node.row_len() / spec.n_heads.max(1))?;
            let attend = Settings::new(&attended, spec)?;
            let y = lower.result(id);
            let grid = Grid::Fixed([word(n * spec.n_heads)?, n_kv.div_ceil(256)]);
            let settings = PlainSettings { attend, n_kv };
            lower.launch("plain_kq", grid, vec![q, attended.k, y], &settings)
        }
        Op::KqSoftMax { spec, sinks } => soft_max(lower, (id, node), spec, sinks.as_deref()),
        Op::Kqv { layer, spec } => {
            let attended = Attended::of_layer(lower, *layer)?;
            let weights = lower.operand(node, 0)?;
            let n_kv = lower.operand_node(node, 0)?.row_len() / spec.n_heads.max(1);
            let settings = PlainSettings {
                attend: Settings::new(&attended, spec)?,
                n_kv: word(n_kv)?,
            };
            let y = lower.result(id);
            let columns = word(spec.v_dim)?.div_ceil(256);
            let grid = Grid::Fixed([word(n * spec.n_heads)?, columns]);
            let operands = vec![weights, attended.v.clone(), y.clone()];
            lower.launch("plain_kqv", grid, operands, &settings)?;
            rotate_back(lower, &attended, y, (word(node.n_values())?, 0))
        }
        _ => Err(lower.unsupported(node)),
    }
}

/// Hides all cells, shows those that rows see, and makes weights of them.
fn soft_max<D: Device>(
    lower: &mut Lower<'_, D>,
    (id, node): (NodeId, &Node),
    spec: &AttendSpec,
    sinks: Option<&str>,
) -> Result<(), BackendError> {
    let graph = lower.context.graph;
    let (visibility, header) = lower.inputs.visibility(graph, (id, node), 1)?;
    let kq = lower.operand(node, 0)?;
    let mut attend = Settings::of_spec(spec)?;
    attend.header = word(header)?;
    attend.sums = u32::from(sinks.is_some());
    if spec.alibi.is_some() {
        attend.positions = lower.input_word(node, node.operands.last().copied())?;
    }
    let n_kv = word(node.row_len() / spec.n_heads.max(1))?;
    let mut settings = PlainSettings { attend, n_kv };
    let sinks = match sinks {
        Some(name) => lower.floats(name, node)?,
        None => Operand::Inputs(0),
    };
    let y = lower.result(id);
    let n_heads = settings.attend.n_heads;
    let n = word(graph.shape().n_tokens * spec.n_heads)?;
    let all = Grid::Fixed([n, settings.n_kv.div_ceil(256)]);
    lower.launch("plain_hide", all, vec![y.clone()], &settings)?;
    let operands = vec![kq, Operand::Inputs(0), y.clone()];
    for (many, n_rows) in PIECES {
        settings.attend.many = many;
        let grid = Grid::pieces(many, n_heads * n_rows, visibility);
        lower.launch("plain_mask", grid, operands.clone(), &settings)?;
    }
    lower.launch(
        "plain_soft_max",
        Grid::Fixed([n, 1]),
        vec![y, sinks],
        &settings,
    )
}
