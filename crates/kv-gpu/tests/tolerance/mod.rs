//! What a GPU backend declares of its fast precision. kv-cuda's tests compile this file, too.

use kv_contract::Tolerance;

/// That of activations in blocks of int8, and of products of halves, which have 11 bits.
pub(crate) const FAST: Tolerance = Tolerance {
    elementwise: 1e-5,
    attend: 5e-3,
    linear: 5e-3,
    linear_bf16: 5e-3,
    linear_quantised: 0.03,
    recurrent: 1e-5,
    graph: 1e-2,
};
