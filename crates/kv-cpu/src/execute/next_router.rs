//! [`NextRouter`]: what the next layer's router will choose, likely, from the rows that this
//! layer's router has seen.
//!
//! A layer adds little to a row, so the next router, applied to the row before that, mostly chooses
//! what it will choose. Invariant: results do not depend on it; whether it is right is counted
//! elsewhere.

use std::sync::Arc;

use kv_backend::BackendError;
use kv_graph::{RouteSpec, slots};

use crate::kernels::Kernels;
use crate::matrix::Matrix;
use crate::operands::Activations;
use crate::output::SharedOutput;

/// For more rows, nothing is foretold: they use almost all experts.
pub(crate) const MAX_ROWS: usize = 8;

/// The router of the next layer.
#[derive(Debug)]
pub(crate) struct NextRouter {
    /// The number of its layer's first weight of experts.
    pub(crate) stack: u32,
    /// `[experts, dim]`, which takes `f32`.
    pub(crate) matrix: Arc<Matrix>,
    /// How it chooses.
    pub(crate) spec: RouteSpec,
    /// Added to scores to choose by, `[experts]`.
    pub(crate) bias: Option<Arc<[f32]>>,
    /// The gain of the norm before it, by that of the norm before this layer's, `[dim]`.
    pub(crate) gain: Option<Arc<[f32]>>,
}

impl NextRouter {
    /// The experts that it would choose for these rows, in ascending order.
    ///
    /// # Errors
    /// As of [`Matrix::multiply`].
    pub(crate) fn choices(
        &self,
        kernels: &Kernels,
        rows: &[f32],
    ) -> Result<Vec<u32>, BackendError> {
        let (dim, n_experts) = (self.matrix.n_columns(), self.matrix.n_rows());
        let mut rows = rows.to_vec();
        if let Some(gain) = &self.gain {
            for row in rows.chunks_exact_mut(dim.max(1)) {
                row.iter_mut().zip(&**gain).for_each(|(x, gain)| *x *= gain);
            }
        }
        let mut logits = vec![0.0; rows.len() / dim.max(1) * n_experts];
        {
            let shared = SharedOutput::new(&mut logits, n_experts);
            // SAFETY: nothing else has any of its columns.
            let mut columns = unsafe { shared.columns(0..n_experts) };
            let acts = Activations::F32(&rows);
            self.matrix.multiply(kernels, acts, &mut columns)?;
        }
        let mut is_chosen = vec![false; n_experts];
        let mut route = vec![0.0; n_experts];
        for logits in logits.chunks_exact(n_experts.max(1)) {
            self.spec.route(logits, self.bias.as_deref(), &mut route);
            for (expert, _) in slots(&route, self.spec.n_used) {
                is_chosen[expert] = true;
            }
        }
        let numbers = (0..).zip(is_chosen);
        Ok(numbers.filter_map(|(n, is)| is.then_some(n)).collect())
    }
}
