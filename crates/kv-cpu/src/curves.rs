//! Norms and elementwise functions that some architectures have, made of the table's kernels.
//!
//! Invariant: an element's result depends on its row alone (norms) or on itself alone. Knows nothing
//! of graphs.

use kv_core::backend::BackendError;
use kv_core::graph::PositionScale;

use crate::execute::Run;
use crate::kernels::Kernels;
use crate::plan::Buf;

/// Values of a temporary that lies on the stack.
const PIECE: usize = 256;

impl Run<'_> {
    /// Layer norm of every group of as many values as the gain has.
    pub(crate) fn layer_norm(
        &mut self,
        (gain, bias): (&[f32], Option<&[f32]>),
        eps: f32,
        [x, out]: [Buf; 2],
    ) -> Result<(), BackendError> {
        // SAFETY: the plan lets no step write what it reads.
        let x = unsafe { self.frame.read(x) };
        let (kernels, dim) = (self.kernels, gain.len());
        let groups = Buf {
            rows: out.len() / dim.max(1),
            width: dim,
            ..out
        };
        self.rows(groups, &|row, values| {
            let x = &x[row * dim..(row + 1) * dim];
            layer_norm(kernels, x, (gain, bias), eps, values);
            Ok(())
        })
    }

    /// Every row plus `added`.
    pub(crate) fn add_row(&mut self, x: Buf, added: &[f32], out: Buf) -> Result<(), BackendError> {
        // SAFETY: the plan lets no step write what it reads.
        let values = unsafe { self.frame.read(x) };
        let (kernels, width) = (self.kernels, out.width);
        self.rows(out, &|row, to| {
            to.copy_from_slice(&values[row * width..(row + 1) * width]);
            (kernels.add)(to, added);
            Ok(())
        })
    }

    /// Every row times the factor of its position.
    pub(crate) fn scale_by_position(
        &mut self,
        x: Buf,
        scale: PositionScale,
        out: Buf,
    ) -> Result<(), BackendError> {
        let (kernels, frame, positions) = (self.kernels, self.frame, self.inputs.positions);
        self.rows(out, &|row, to| {
            if x.place != out.place {
                // SAFETY: another buffer than `out`, which nobody writes in this step.
                to.copy_from_slice(unsafe { &frame.read(x)[row * x.width..][..to.len()] });
            }
            (kernels.scale)(to, scale.at(positions[row]));
            Ok(())
        })
    }
}

/// `(x - mean(x)) / sqrt(variance(x) + eps) * w + b` (Ba et al., arXiv 1607.06450).
fn layer_norm(
    kernels: &Kernels,
    x: &[f32],
    (weight, bias): (&[f32], Option<&[f32]>),
    eps: f32,
    out: &mut [f32],
) {
    let n = x.len().max(1) as f32;
    let mean = x.iter().sum::<f32>() / n;
    for (out, x) in out.iter_mut().zip(x) {
        *out = x - mean;
    }
    let variance = (kernels.dot_f32)(out, out) / n;
    (kernels.scale)(out, 1.0 / (variance + eps).sqrt());
    (kernels.mul)(out, weight);
    if let Some(bias) = bias {
        (kernels.add)(out, bias);
    }
}

/// `gate = g / (1 + e^(-slope g)) * (u + 1)`, where `g` is the gate, at most `limit`, and `u` is `up`,
/// between `-limit` and `limit`.
pub(crate) fn clamped_gate(
    kernels: &Kernels,
    (slope, limit): (f32, f32),
    gate: &mut [f32],
    up: &[f32],
) {
    let mut factors = [0.0; PIECE];
    for (gate, up) in gate.chunks_mut(PIECE).zip(up.chunks(PIECE)) {
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
