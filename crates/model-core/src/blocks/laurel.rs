//! LAuReL: a residual with a learnt low-rank part next to a block (Menghani et al.,
//! arXiv 2411.07501; Gemma 3n).
//!
//! Does not know the block.

use kv_graph::{GraphBuilder, GraphError, NodeId};

use super::Norm;

/// Settings of a learnt residual.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Laurel {
    /// Width between its matrices.
    pub rank: usize,
    /// Norm of its low-rank part.
    pub norm: Norm,
}

impl Laurel {
    /// The rows `x [rows, dim]`, and what two matrices make of them, normed.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn build(&self, b: &mut GraphBuilder, x: NodeId) -> Result<NodeId, GraphError> {
        let dim = b.shape_of(x).last().copied().unwrap_or(0);
        let low = b.linear("laurel_low", x, "laurel_l.weight", self.rank)?;
        let high = b.linear("laurel_high", low, "laurel_r.weight", dim)?;
        let normed = self
            .norm
            .build(b, "laurel_norm", high, "laurel_post_norm")?;
        b.add("laurel_out", x, normed)
    }
}
