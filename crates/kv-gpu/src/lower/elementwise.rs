//! Functions of single values.

use bytemuck::{Pod, Zeroable};
use kv_graph::{Activation, Op};

use super::{Lower, Result, word};
use crate::device::Device;
use crate::inputs::NumberedNode;
use crate::program::Grid;

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

impl<D: Device> Lower<'_, D> {
    /// Lowers a function of single values.
    pub(super) fn elementwise(&mut self, (id, node): NumberedNode<'_>) -> Result<()> {
        let mut settings = Settings {
            n: word(node.n_values())?,
            ..Settings::default()
        };
        let kernel = match node.op {
            Op::Add => "add",
            Op::Mul => "mul",
            Op::Gate { activation } => {
                settings.activation = number(activation).ok_or_else(|| self.unsupported(node))?;
                "gate"
            }
            Op::Activate { activation } => {
                settings.activation = number(activation).ok_or_else(|| self.unsupported(node))?;
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
            _ => return Err(self.unsupported(node)),
        };
        let mut operands = self.operands(node, node.operands.len())?;
        operands.push(self.result(id));
        if matches!(kernel, "gate" | "clamped_gate" | "activate") {
            let (blocks, n_blocks) = self.with_int8(id, node.n_values())?;
            settings.n_blocks = n_blocks;
            operands.push(blocks);
        }
        self.launch(kernel, Grid::values(settings.n), operands, &settings)
    }
}

/// The number of an activation in kernels.
fn number(activation: Activation) -> Option<u32> {
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
