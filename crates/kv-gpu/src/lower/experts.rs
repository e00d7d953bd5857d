//! Mixtures of experts: routes, products with the matrices of experts, weights and sums of slots.
//! Heads with a matrix each are slots whose experts are the heads in order.
//!
//! Behind the values of a route are its slots: the expert of each, then the weight of each.

use bytemuck::{Pod, Zeroable};
use kv_backend::BackendError;
use kv_graph::{GroupScore, Node, Op, RouteGate, RouteSpec, RouteSum};

use super::linear::{MAX_GEMV_TOKENS, Slots};
use super::{Lower, Result, width, word};
use crate::config::Precision;
use crate::device::Device;
use crate::inputs::NumberedNode;
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

impl<D: Device> Lower<'_, D> {
    /// Lowers a route.
    pub(super) fn route(
        &mut self,
        (id, node): NumberedNode<'_>,
        spec: &RouteSpec,
        [bias, gain]: [Option<&str>; 2],
    ) -> Result<()> {
        let logits = self.operand(node, 0)?;
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
            has_bias: bias.is_some().into(),
            has_gain: gain.is_some().into(),
            n_groups,
            n_used_groups,
            group_score,
        };
        let [bias, gain] = [bias, gain].map(|name| self.floats_or(name, node, &logits));
        let routes = self.result_with(id, slots_at(node) + node.n_rows() * spec.n_used * 8);
        let slots = slots_of(&routes, node)?;
        let grid = Grid::rows(settings.n_rows);
        let operands = vec![logits.clone(), bias?, gain?, routes, slots];
        self.launch("route", grid, operands, &settings)
    }

    /// The slots of the route that is the second operand.
    fn slots(&self, node: &Node) -> Result<Slots<D>> {
        let route = self.operand_node(node, 1)?;
        let Op::Route { spec, .. } = &route.op else {
            return Err(self.unsupported(node));
        };
        Ok(Slots {
            experts: slots_of(&self.operand(node, 1)?, route)?,
            n_used: word(spec.n_used)?,
            n_experts: word(route.row_len())?,
            x_by_slot: self.operand_node(node, 0)?.shape.len() == 3,
        })
    }

    /// Lowers products of slots with the matrices of their experts.
    pub(super) fn expert_linear(&mut self, at: NumberedNode<'_>) -> Result<()> {
        let slots = self.slots(at.1)?;
        self.multiply_slots(at, &slots)
    }

    /// Lowers products of each head with its matrix.
    pub(super) fn head_linear(&mut self, at: NumberedNode<'_>) -> Result<()> {
        let (_, node) = at;
        let n_heads = word(node.shape.get(1).copied().unwrap_or(0))?;
        let n = word(node.n_rows())? * n_heads;
        let experts = self.temporary(n as usize * 4);
        let slots = Slots {
            experts: experts.clone(),
            n_used: n_heads,
            n_experts: n_heads,
            x_by_slot: true,
        };
        let settings = settings(node, &slots)?;
        self.launch("head_slots", Grid::values(n), vec![experts], &settings)?;
        self.multiply_slots(at, &slots)
    }

    /// The products of slots with the matrices of their experts.
    fn multiply_slots(&mut self, at: NumberedNode<'_>, slots: &Slots<D>) -> Result<()> {
        let (_, node) = at;
        let matrices = self.matrices(at, 2)?;
        let many = node.n_rows() > MAX_GEMV_TOKENS;
        if !many || self.context.config.precision == Precision::Precise {
            return self.gemv(node, &matrices, Some(slots));
        }
        let settings = settings(node, slots)?;
        let n_lists = slots.n_experts as usize * (1 + node.n_rows());
        let lists = self.temporary(n_lists * 4);
        let operands = vec![slots.experts.clone(), lists.clone()];
        let grid = Grid::rows(slots.n_experts);
        self.launch("expert_lists", grid, operands, &settings)?;
        for matrix in &matrices {
            let operands = vec![slots.experts.clone(), matrix.y.clone()];
            let settings = Settings {
                dim: matrix.n_rows,
                ..settings
            };
            self.launch("expert_zeros", Grid::rows(settings.n), operands, &settings)?;
            self.gemm(node, matrix, Some((slots, lists.clone())))?;
        }
        Ok(())
    }

    /// Lowers the products of slots with their weights.
    pub(super) fn expert_scale(&mut self, (id, node): NumberedNode<'_>) -> Result<()> {
        let slots = self.slots(node)?;
        let settings = settings(node, &slots)?;
        let operands = vec![self.operand(node, 0)?, slots.experts, self.result(id)];
        let grid = Grid::Fixed([settings.n, settings.dim.div_ceil(256)]);
        self.launch("expert_scale", grid, operands, &settings)
    }

    /// Lowers the sums of tokens' slots.
    pub(super) fn expert_sum(&mut self, (id, node): NumberedNode<'_>) -> Result<()> {
        let x = self.operand_node(node, 0)?;
        let settings = Settings {
            n: word(node.n_rows())?,
            dim: word(node.row_len())?,
            n_used: word(x.shape.get(1).copied().unwrap_or(1))?,
            x_by_slot: 1,
            n_experts: 0,
        };
        let operands = vec![self.operand(node, 0)?, self.result(id)];
        let grid = Grid::Fixed([settings.n, settings.dim.div_ceil(256)]);
        self.launch("expert_sum", grid, operands, &settings)
    }
}

/// The first byte of a route's slots.
fn slots_at(route: &Node) -> usize {
    (route.n_values() * 4).next_multiple_of(16)
}

fn slots_of<D: Device>(routes: &Operand<D>, route: &Node) -> Result<Operand<D>> {
    match routes {
        Operand::Scratch(at) => Ok(Operand::Scratch(at + slots_at(route))),
        _ => Err(BackendError::Input {
            input: "graph",
            reason: format!("the route '{}' was not computed", route.name),
        }),
    }
}

/// Settings of a node whose rows of `dim` values belong to slots.
fn settings<D: Device>(node: &Node, slots: &Slots<D>) -> Result<Settings> {
    Ok(Settings {
        n: word(node.n_rows())? * slots.n_used,
        dim: word(width(node))?,
        n_used: slots.n_used,
        x_by_slot: slots.x_by_slot.into(),
        n_experts: slots.n_experts,
    })
}
