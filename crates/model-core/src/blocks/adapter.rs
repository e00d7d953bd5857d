//! [`Adapter`]: a product of two narrow matrices that is added to a matrix (LoRA, Hu et al., arXiv
//! 2106.09685), where several layers share the matrix. Does not know the layers around.

use kv_graph::{GraphBuilder, GraphError, NodeId};

/// The adapters of one of the layers that share a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adapter {
    /// Width between the two matrices.
    pub rank: usize,
    /// The number of the layer among those that have the block's matrices or could have them, from
    /// 0: a part of the names of its matrices.
    pub index: usize,
}

impl Adapter {
    /// The projection `y [n, width]` of `x [n, dim]` by the matrix `weight`, in a node named
    /// `name`, and the adapter's added to it: `[n, width]`.
    pub(super) fn added(
        self,
        b: &mut GraphBuilder,
        (name, weight): (&str, &str),
        [x, y]: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        let width = b.shape_of(y).last().copied().unwrap_or(0);
        let matrix = |part: &str| format!("{weight}_lora_{part}.{}.weight", self.index);
        let low = b.linear(&format!("{name}_lora_a"), x, &matrix("a"), self.rank)?;
        let added = b.linear(&format!("{name}_lora_b"), low, &matrix("b"), width)?;
        b.add(&format!("{name}_adapted"), added, y)
    }
}
