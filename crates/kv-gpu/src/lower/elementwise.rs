//! Functions of single values.

use bytemuck::{Pod, Zeroable};
use kv_core::backend::BackendError;
use kv_core::graph::{Activation, Node, NodeId, Op};

use super::{Lower, word};
use crate::device::Device;
use crate::program::Grid;

/// Threads of a block of these kernels, and of those of `rows.k` and `rope.k`.
pub(super) const THREADS: u32 = 256;

/// `ElementwiseArgs` of `elementwise.k`.
#[derive(Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
struct Settings {
    n: u32,
    activation: u32,
    n_blocks: u32,
    a: f32,
    b: f32,
}

/// Lowers a function of single values.
pub(super) fn lower<D: Device>(
    lower: &mut Lower<'_, D>,
    id: NodeId,
    node: &Node,
) -> Result<(), BackendError> {
    let mut settings = Settings {
        n: word(node.n_values())?,
        ..Settings::default()
    };
    let kernel = match node.op {
        Op::Add => "add",
        Op::Mul => "mul",
        Op::Gate { activation } => {
            settings.activation = number(activation).ok_or_else(|| lower.unsupported(node))?;
            "gate"
        }
        Op::Activate { activation } => {
            settings.activation = number(activation).ok_or_else(|| lower.unsupported(node))?;
            "activate"
        }
        Op::ClampedGate { slope, limit } => {
            [settings.a, settings.b] = [slope, limit];
            "clamped_gate"
        }
        Op::Clamp { limit } => {
            settings.a = limit;
            "clamp"
        }
        Op::Scale { factor } => {
            settings.a = factor;
            "scale"
        }
        Op::SoftCap { cap } => {
            settings.a = cap;
            "soft_cap"
        }
        _ => return Err(lower.unsupported(node)),
    };
    let operands = (0..node.operands.len()).map(|at| lower.operand(node, at));
    let mut operands = operands.collect::<Result<Vec<_>, _>>()?;
    operands.push(lower.result(id));
    if matches!(kernel, "gate" | "clamped_gate" | "activate") {
        let (blocks, n_blocks) = lower.int8_beside(id, node.n_values())?;
        settings.n_blocks = n_blocks;
        operands.push(blocks);
    }
    let grid = Grid::Fixed([settings.n.div_ceil(THREADS), 1]);
    lower.launch(kernel, grid, operands, &settings)
}

/// What kernels call an activation.
pub(super) fn number(activation: Activation) -> Option<u32> {
    match activation {
        Activation::Silu => Some(0),
        Activation::GeluTanh => Some(1),
        Activation::GeluErf => Some(2),
        Activation::Sigmoid => Some(3),
        Activation::Relu => Some(4),
        Activation::ReluSquared => Some(5),
        _ => None,
    }
}
