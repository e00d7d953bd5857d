//! Elementwise steps: tasks take pieces of a buffer, or rows of it.
//!
//! Invariant: a value depends on its operands at the same place (and, for rotations, on the other
//! value of its pair) alone.

use kv_backend::BackendError;
use kv_graph::{Activation, ClampedGate, PositionScale};

use crate::kernels::Kernels;
use crate::plan::{Elementwise, Step};
use crate::values::Buf;

use super::{Run, VALUES_PER_TASK, piece};

/// Values of a temporary that lies on the stack.
const STACK_VALUES: usize = 256;

/// The `up` of an activation without a gate.
static ONES: [f32; 256] = [1.0; 256];

/// Combines the first values with the second: `(gate, up)`.
pub(super) type GateKernel = fn(&mut [f32], &[f32]);

/// `gate[i] = activation(gate[i]) * up[i]`.
pub(super) fn gate_kernel(
    kernels: &Kernels,
    activation: Activation,
) -> Result<GateKernel, BackendError> {
    match activation {
        Activation::Silu => Ok(kernels.silu_mul),
        Activation::GeluTanh => Ok(kernels.gelu_tanh_mul),
        Activation::GeluErf => Ok(kernels.gelu_erf_mul),
        Activation::Sigmoid => Ok(kernels.sigmoid_mul),
        Activation::Relu => Ok(relu_mul),
        Activation::ReluSquared => Ok(relu_squared_mul),
        other => Err(BackendError::UnsupportedOp {
            backend: "cpu",
            op: "gate",
            node: other.to_string(),
        }),
    }
}

/// `max(gate, 0) * up`.
fn relu_mul(gate: &mut [f32], up: &[f32]) {
    let pairs = gate.iter_mut().zip(up);
    pairs.for_each(|(gate, up)| *gate = gate.max(0.0) * up);
}

/// `max(gate, 0)^2 * up`.
fn relu_squared_mul(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        let cut = gate.max(0.0);
        *gate = cut * cut * up;
    }
}

impl Run<'_> {
    /// `out = op(x)` or `op(x, other)`; in place where `x` and `out` are one buffer.
    pub(super) fn elementwise(
        &mut self,
        op: Elementwise,
        step: &Step<Buf>,
    ) -> Result<(), BackendError> {
        let (x, other, out) = (step.read(0), step.read(1), step.write());
        match op {
            Elementwise::Rope { table, dim } => return self.rope(table, dim, [x, out]),
            Elementwise::ScaleByPosition(scale) => return self.scale_by_position(scale, [x, out]),
            _ => {}
        }
        let (kernels, frame) = (self.kernels, self.frame);
        let values = frame.write(out);
        let n = out.len();
        self.lead.each(n.div_ceil(VALUES_PER_TASK), &|_, task| {
            let range = piece(task, VALUES_PER_TASK, n);
            // SAFETY: each piece belongs to one task.
            let to = unsafe { values.range(range.clone()) };
            if x.loc != out.loc {
                // SAFETY: another buffer than `out`, which no task writes in this step.
                to.copy_from_slice(unsafe { &frame.read(x)[range.clone()] });
            }
            // SAFETY: allocation gives `out` the buffer of `x` or a new one, never that of `other`.
            let other = || unsafe { &frame.read(other)[range.clone()] };
            match op {
                Elementwise::Add => (kernels.add)(to, other()),
                Elementwise::Mul => (kernels.mul)(to, other()),
                Elementwise::Gate(activation) => gate_kernel(kernels, activation)?(to, other()),
                Elementwise::Activate(activation) => {
                    let gate = gate_kernel(kernels, activation)?;
                    to.chunks_mut(ONES.len())
                        .for_each(|to| gate(to, &ONES[..to.len()]));
                }
                Elementwise::Scale(factor) => (kernels.scale)(to, factor),
                Elementwise::SoftCap(cap) => (kernels.soft_cap)(to, cap),
                Elementwise::Clamp(limit) => {
                    to.iter_mut().for_each(|x| *x = x.max(-limit).min(limit));
                }
                Elementwise::ClampedGate(gate) => clamped_gate(kernels, gate, to, other()),
                Elementwise::Rope { .. } | Elementwise::ScaleByPosition(_) => {}
            }
            Ok(())
        })
    }

    /// Rotates every head of `dim` values by the angles of its row.
    fn rope(&mut self, table: usize, dim: usize, [x, out]: [Buf; 2]) -> Result<(), BackendError> {
        let (spec, angles) = (&self.ropes[table].spec, &self.angles[table]);
        let n = angles.n_pairs;
        let values = self.frame.write(out);
        let frame = self.frame;
        let per_task = (VALUES_PER_TASK / 4 / out.width.max(1)).max(1);
        self.lead.each(out.rows.div_ceil(per_task), &|_, task| {
            for row in piece(task, per_task, out.rows) {
                let range = row * out.width..(row + 1) * out.width;
                // SAFETY: each row belongs to one task.
                let to = unsafe { values.range(range.clone()) };
                if x.loc != out.loc {
                    // SAFETY: another buffer than `out`, which no task writes in this step.
                    to.copy_from_slice(unsafe { &frame.read(x)[range] });
                }
                let (cos, sin) = (&angles.cos[row * n..][..n], &angles.sin[row * n..][..n]);
                to.chunks_exact_mut(dim.max(1))
                    .for_each(|h| spec.rotate_head(h, cos, sin));
            }
            Ok(())
        })
    }

    /// Every row times the factor of its position.
    fn scale_by_position(
        &mut self,
        scale: PositionScale,
        [x, out]: [Buf; 2],
    ) -> Result<(), BackendError> {
        let (kernels, frame, positions) = (self.kernels, self.frame, self.inputs.positions);
        self.rows(out, &|row, to| {
            if x.loc != out.loc {
                // SAFETY: another buffer than `out`, which no task writes in this step.
                to.copy_from_slice(unsafe { &frame.read(x)[row * x.width..][..to.len()] });
            }
            (kernels.scale)(to, scale.at(positions[row]));
            Ok(())
        })
    }
}

/// `gate = g / (1 + e^(-slope g)) * (u + 1)`, where `g` is the gate, at most `limit`, and `u` is
/// `up`, between `-limit` and `limit`.
fn clamped_gate(
    kernels: &Kernels,
    ClampedGate { slope, limit }: ClampedGate,
    gate: &mut [f32],
    up: &[f32],
) {
    let mut factors = [0.0; STACK_VALUES];
    for (gate, up) in gate.chunks_mut(STACK_VALUES).zip(up.chunks(STACK_VALUES)) {
        let factors = &mut factors[..up.len()];
        for (factor, up) in factors.iter_mut().zip(up) {
            *factor = (up.clamp(-limit, limit) + 1.0) / slope;
        }
        // `slope g / (1 + e^(-slope g))` is what the kernel computes.
        gate.iter_mut()
            .for_each(|gate| *gate = gate.min(limit) * slope);
        (kernels.silu_mul)(gate, factors);
    }
}
