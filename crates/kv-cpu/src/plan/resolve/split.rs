//! A matrix of whose product only parts are read becomes a matrix for each part.
//!
//! Models whose files have one matrix for several projections (Mamba's input and gate, fused queries,
//! keys and values) read columns of its product. Here every such [`Op::Columns`] gets the weight rows
//! that it reads, so nothing is copied. The bits are the same: an output depends on its own weight
//! row.

use std::ops::Range;
use std::sync::Arc;

use kv_core::backend::BackendError;
use kv_core::graph::{Node, NodeId, Op};

use super::{Resolver, Value};
use crate::matrix::Matrix;
use crate::plan::Product;

impl<'a> Resolver<'a> {
    /// The nodes that read columns of the product `id`, and which; `None` where anything else reads
    /// it, or parts overlap, or one is empty.
    fn parts_of(&self, id: NodeId) -> Option<Vec<(NodeId, Range<usize>)>> {
        let nodes = self.graph.nodes().iter().enumerate();
        let mut parts = Vec::new();
        for (at, node) in nodes.skip(id.as_usize() + 1) {
            if let (Op::Columns { first }, &[x]) = (&node.op, &*node.operands)
                && x == id
            {
                let end = first.checked_add(node.row_len())?;
                parts.push((NodeId(u32::try_from(at).ok()?), *first..end));
            }
        }
        let all = self.n_uses.get(&id) == Some(&parts.len());
        let mut ranges: Vec<_> = parts.iter().map(|(_, range)| range.clone()).collect();
        ranges.sort_by_key(|range| range.start);
        let apart = ranges.windows(2).all(|pair| pair[0].end <= pair[1].start);
        let whole = ranges.iter().all(|range| !range.is_empty());
        (all && apart && whole && !parts.is_empty()).then_some(parts)
    }

    /// The products of a matrix, one for each of its parts; none where it is not read in parts.
    pub(super) fn split(
        &mut self,
        id: NodeId,
        (matrix, bias): (&Matrix, Option<&Arc<[f32]>>),
        node: &'a Node,
    ) -> Result<Vec<Product<Value>>, BackendError> {
        let Some(parts) = self.parts_of(id) else {
            return Ok(Vec::new());
        };
        let n_out = matrix.n_rows();
        if node.row_len() != n_out || parts.iter().any(|(_, range)| range.end > n_out) {
            return Ok(Vec::new());
        }
        let mut products = Vec::with_capacity(parts.len());
        for (part, range) in parts {
            products.push(Product {
                matrix: Arc::new(matrix.rows(range.clone())?),
                bias: bias.map(|bias| bias[range].into()),
                gates: None,
                residual: None,
                out: Value::Node(part),
            });
            self.finished.insert(part);
            self.stands_for.insert(part, Value::Node(part));
        }
        self.finished.insert(id);
        Ok(products)
    }
}
