//! Mixtures of experts: routes, products with the matrices of experts, weights and sums of slots.
//! Heads with a matrix each are slots whose experts are the heads in order.
//!
//! Behind the values of a route are its slots: the expert of each, then the weight of each.

use bytemuck::{Pod, Zeroable};
use kv_core::backend::BackendError;
use kv_core::graph::{GroupScore, Node, NodeId, Op, RouteGate, RouteSpec, RouteSum};

use super::elementwise::THREADS;
use super::linear::{
    MAX_GEMV_TOKENS, Matrix, Slots, format_of, gemm, gemv, matrix, same_activations,
};
use super::{Lower, word};
use crate::config::Precision;
use crate::device::Device;
use crate::program::{Grid, Operand};

/// `RouteArgs` of `experts.k`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RouteSettings {
    n_rows: u32,
    n_experts: u32,
    n_used: u32,
    gate: u32,
    sum: u32,
    scale: f32,
    jitter: f32,
    has_bias: u32,
    has_gain: u32,
    n_groups: u32,
    n_used_groups: u32,
    group_score: u32,
}

/// `ExpertArgs` of `experts.k`: `n` slots of all tokens, rows of `dim` values.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Settings {
    n: u32,
    dim: u32,
    n_used: u32,
    x_by_slot: u32,
    n_experts: u32,
}

/// Lowers an operation on experts.
pub(super) fn lower<D: Device>(
    lower: &mut Lower<'_, D>,
    id: NodeId,
    node: &Node,
) -> Result<(), BackendError> {
    match &node.op {
        Op::Route { spec, bias, gain } => {
            route(lower, (id, node), spec, [bias, gain].map(Option::as_deref))
        }
        Op::ExpertLinear { .. } => linear(lower, id, node),
        Op::HeadLinear { .. } => head_linear(lower, id, node),
        Op::ExpertScale => scale(lower, id, node),
        Op::ExpertSum => sum(lower, id, node),
        _ => Err(lower.unsupported(node)),
    }
}

fn route<D: Device>(
    lower: &mut Lower<'_, D>,
    (id, node): (NodeId, &Node),
    spec: &RouteSpec,
    bias_and_gain: [Option<&str>; 2],
) -> Result<(), BackendError> {
    let logits = lower.operand(node, 0)?;
    let (n_groups, n_used_groups, group_score) = match spec.groups {
        None => (0, 0, 0),
        Some(groups) => {
            let score = match groups.score {
                GroupScore::Max => 0,
                GroupScore::TopTwo => 1,
            };
            (word(groups.n_groups)?, word(groups.n_used)?, score)
        }
    };
    let settings = RouteSettings {
        n_rows: word(node.n_rows())?,
        n_experts: word(node.row_len())?,
        n_used: word(spec.n_used)?,
        gate: match spec.gate {
            RouteGate::Softmax => 0,
            RouteGate::Sigmoid => 1,
            RouteGate::Sparsemixer { .. } => 2,
        },
        sum: match spec.sum {
            RouteSum::Free => 0,
            RouteSum::One => 1,
        },
        scale: spec.scale,
        jitter: match spec.gate {
            RouteGate::Sparsemixer { jitter } => jitter,
            RouteGate::Softmax | RouteGate::Sigmoid => 0.0,
        },
        has_bias: bias_and_gain[0].is_some().into(),
        has_gain: bias_and_gain[1].is_some().into(),
        n_groups,
        n_used_groups,
        group_score,
    };
    let [bias, gain] = bias_and_gain.map(|name| match name {
        Some(name) => lower.floats(name, node),
        None => Ok(logits.clone()),
    });
    let routes = lower.result_with(id, slots_at(node) + node.n_rows() * spec.n_used * 8);
    let slots = slots_of(&routes, node)?;
    let grid = Grid::Fixed([settings.n_rows, 1]);
    let operands = vec![logits.clone(), bias?, gain?, routes, slots];
    lower.launch("route", grid, operands, &settings)
}

/// The first byte of a route's slots.
fn slots_at(route: &Node) -> usize {
    (route.n_values() * 4).next_multiple_of(16)
}

fn slots_of<D: Device>(routes: &Operand<D>, route: &Node) -> Result<Operand<D>, BackendError> {
    match routes {
        Operand::Scratch(at) => Ok(Operand::Scratch(at + slots_at(route))),
        _ => Err(BackendError::Input {
            input: "graph",
            reason: format!("the route '{}' was not computed", route.name),
        }),
    }
}

/// The slots of the route that is the second operand.
fn slots<D: Device>(lower: &Lower<'_, D>, node: &Node) -> Result<Slots<D>, BackendError> {
    let route = lower.operand_node(node, 1)?;
    let Op::Route { spec, .. } = &route.op else {
        return Err(lower.unsupported(node));
    };
    Ok(Slots {
        experts: slots_of(&lower.operand(node, 1)?, route)?,
        n_used: word(spec.n_used)?,
        n_experts: word(route.row_len())?,
        x_by_slot: lower.operand_node(node, 0)?.shape.len() == 3,
    })
}

/// Settings of a node whose rows of `dim` values belong to slots.
fn settings<D: Device>(node: &Node, slots: &Slots<D>) -> Result<Settings, BackendError> {
    Ok(Settings {
        n: word(node.n_rows())? * slots.n_used,
        dim: word(node.shape.last().copied().unwrap_or(1))?,
        n_used: slots.n_used,
        x_by_slot: slots.x_by_slot.into(),
        n_experts: slots.n_experts,
    })
}

fn linear<D: Device>(
    lower: &mut Lower<'_, D>,
    id: NodeId,
    node: &Node,
) -> Result<(), BackendError> {
    let slots = slots(lower, node)?;
    multiply(lower, id, node, &slots)
}

/// Each head times its matrix.
fn head_linear<D: Device>(
    lower: &mut Lower<'_, D>,
    id: NodeId,
    node: &Node,
) -> Result<(), BackendError> {
    let n_heads = word(node.shape.get(1).copied().unwrap_or(0))?;
    let n = word(node.n_rows())? * n_heads;
    let experts = lower.temporary(n as usize * 4);
    let slots = Slots {
        experts: experts.clone(),
        n_used: n_heads,
        n_experts: n_heads,
        x_by_slot: true,
    };
    let settings = settings(node, &slots)?;
    let grid = Grid::Fixed([n.div_ceil(THREADS), 1]);
    lower.launch("head_slots", grid, vec![experts], &settings)?;
    multiply(lower, id, node, &slots)
}

/// The products of slots with the matrices of their experts.
fn multiply<D: Device>(
    lower: &mut Lower<'_, D>,
    id: NodeId,
    node: &Node,
    slots: &Slots<D>,
) -> Result<(), BackendError> {
    let format = format_of(lower, node)?;
    let mut matrices: Vec<Matrix<D>> = vec![matrix(lower, id, node)?];
    for (other, other_node) in same_activations(lower, id, node) {
        if matrices.len() < 2 && format_of(lower, other_node)? == format {
            matrices.push(matrix(lower, other, other_node)?);
            lower.done[other.as_usize()] = true;
        }
    }
    let many = node.n_rows() > MAX_GEMV_TOKENS;
    if !many || lower.context.config.precision == Precision::Precise {
        return gemv(lower, node, &matrices, Some(slots));
    }
    let settings = settings(node, slots)?;
    let n_lists = slots.n_experts as usize * (1 + node.n_rows());
    let lists = lower.temporary(n_lists * 4);
    let operands = vec![slots.experts.clone(), lists.clone()];
    let grid = Grid::Fixed([slots.n_experts, 1]);
    lower.launch("expert_lists", grid, operands, &settings)?;
    for matrix in &matrices {
        let operands = vec![slots.experts.clone(), matrix.y.clone()];
        let settings = Settings {
            dim: matrix.n_rows,
            ..settings
        };
        let grid = Grid::Fixed([settings.n, 1]);
        lower.launch("expert_zeros", grid, operands, &settings)?;
        gemm(lower, node, matrix, Some((slots, lists.clone())))?;
    }
    Ok(())
}

fn scale<D: Device>(lower: &mut Lower<'_, D>, id: NodeId, node: &Node) -> Result<(), BackendError> {
    let slots = slots(lower, node)?;
    let settings = settings(node, &slots)?;
    let operands = vec![lower.operand(node, 0)?, slots.experts, lower.result(id)];
    let grid = Grid::Fixed([settings.n, settings.dim.div_ceil(256)]);
    lower.launch("expert_scale", grid, operands, &settings)
}

fn sum<D: Device>(lower: &mut Lower<'_, D>, id: NodeId, node: &Node) -> Result<(), BackendError> {
    let x = lower.operand_node(node, 0)?;
    let settings = Settings {
        n: word(node.n_rows())?,
        dim: word(node.row_len())?,
        n_used: word(x.shape.get(1).copied().unwrap_or(1))?,
        x_by_slot: 1,
        n_experts: 0,
    };
    let operands = vec![lower.operand(node, 0)?, lower.result(id)];
    let grid = Grid::Fixed([settings.n, settings.dim.div_ceil(256)]);
    lower.launch("expert_sum", grid, operands, &settings)
}
