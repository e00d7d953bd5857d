//! Norms and elementwise functions that some architectures have, made of the table's kernels.
//!
//! Invariant: an element's result depends on its row alone (norms) or on itself alone. Knows nothing
//! of threads.

use crate::kernels::Kernels;

/// Values of a temporary that lies on the stack.
const PIECE: usize = 256;

/// `(x - mean(x)) / sqrt(variance(x) + eps) * w + b` (Ba et al., arXiv 1607.06450).
pub(crate) fn layer_norm(
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
