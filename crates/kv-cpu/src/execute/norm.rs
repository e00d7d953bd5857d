//! Norms: tasks take rows, or heads of rows.
//!
//! Invariant: a result depends on its row or head alone.

use kv_backend::BackendError;

use crate::kernels::Kernels;
use crate::plan::{NormOp, Step};
use crate::values::Buf;

use super::Run;

/// A layer norm's gain and bias, `[dim]` each, where it has them.
#[derive(Clone, Copy)]
struct LayerNorm<'a> {
    gain: Option<&'a [f32]>,
    bias: Option<&'a [f32]>,
    dim: usize,
    eps: f32,
}

/// `out` as rows of `dim` values.
fn groups(out: Buf, dim: usize) -> Buf {
    Buf {
        rows: out.len() / dim.max(1),
        width: dim,
        ..out
    }
}

impl Run<'_> {
    /// The norm of one step.
    pub(super) fn norm(&mut self, op: &NormOp, step: &Step<Buf>) -> Result<(), BackendError> {
        let bufs = [step.read(0), step.write()];
        match op {
            NormOp::Rms { gain, dim, eps } => self.rms_norm(gain, *dim, *eps, bufs),
            NormOp::Layer {
                gain,
                bias,
                dim,
                eps,
            } => {
                let norm = LayerNorm {
                    gain: gain.as_deref(),
                    bias: bias.as_deref(),
                    dim: *dim,
                    eps: *eps,
                };
                self.layer_norm(norm, bufs)
            }
        }
    }

    /// RMS norm of every `dim` values, with gains that begin again after the last.
    fn rms_norm(
        &mut self,
        gain: &[f32],
        dim: usize,
        eps: f32,
        [x, out]: [Buf; 2],
    ) -> Result<(), BackendError> {
        // SAFETY: allocation lets no step write what it reads.
        let x = unsafe { self.frame.read(x) };
        let kernels = self.kernels;
        let n_groups = gain.len() / dim;
        self.rows(groups(out, dim), &|row, values| {
            let gain = &gain[row % n_groups * dim..][..dim];
            (kernels.rms_norm)(&x[row * dim..(row + 1) * dim], gain, eps, values);
            Ok(())
        })
    }

    /// Layer norm of every `dim` values.
    fn layer_norm(&mut self, norm: LayerNorm<'_>, [x, out]: [Buf; 2]) -> Result<(), BackendError> {
        // SAFETY: allocation lets no step write what it reads.
        let x = unsafe { self.frame.read(x) };
        let (kernels, dim) = (self.kernels, norm.dim);
        self.rows(groups(out, dim), &|row, values| {
            norm.compute(kernels, &x[row * dim..(row + 1) * dim], values);
            Ok(())
        })
    }
}

impl LayerNorm<'_> {
    /// `(x - mean(x)) / sqrt(variance(x) + eps) * w + b` (Ba et al., arXiv 1607.06450).
    fn compute(&self, kernels: &Kernels, x: &[f32], out: &mut [f32]) {
        let n = x.len().max(1) as f32;
        let mean = x.iter().sum::<f32>() / n;
        for (out, x) in out.iter_mut().zip(x) {
            *out = x - mean;
        }
        let variance = (kernels.dot_f32)(out, out) / n;
        (kernels.scale)(out, 1.0 / (variance + self.eps).sqrt());
        if let Some(gain) = self.gain {
            (kernels.mul)(out, gain);
        }
        if let Some(bias) = self.bias {
            (kernels.add)(out, bias);
        }
    }
}
