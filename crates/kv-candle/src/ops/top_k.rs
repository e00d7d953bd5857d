//! The largest values of rows, found on the host.

use candle_core::{Result, Tensor};
use kv_graph::TopK;

/// `x [n, width]` → `[n, 2 k + 1]`, rows of [`TopK`].
pub(crate) fn top_k(x: &Tensor, k: usize) -> Result<Tensor> {
    let (n, len) = (x.dim(0)?, TopK::row_len(k));
    let mut out = vec![0.0; n * len];
    for (x, out) in x.to_vec2::<f32>()?.iter().zip(out.chunks_exact_mut(len)) {
        TopK::of(x, out);
    }
    Tensor::from_vec(out, (n, len), x.device())
}
