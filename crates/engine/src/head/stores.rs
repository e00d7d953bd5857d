//! [`stores_alone`]: what a graph stores, without its results. Does not know what for.

use kv_graph::{Graph, GraphBuilder, GraphError, Input, Node, NodeId, Op};

/// The same computation without results: of its nodes those alone that store rows or change
/// states, and what these are computed from.
///
/// # Errors
/// [`GraphError`] where the graph is none that a builder made.
pub(super) fn stores_alone(graph: &Graph) -> Result<Graph, GraphError> {
    let changes = |node: &Node| {
        let takes_states = |id: &NodeId| {
            let operand = graph.node(*id);
            operand.is_some_and(|node| node.op == Op::Input(Input::States))
        };
        matches!(node.op, Op::StoreKv { .. } | Op::StoreK { .. })
            || node.operands.iter().any(takes_states)
    };
    let mut is_needed: Vec<bool> = graph.nodes().iter().map(changes).collect();
    for (at, node) in graph.nodes().iter().enumerate().rev() {
        if is_needed[at] {
            for operand in &node.operands {
                is_needed[operand.as_usize()] = true;
            }
        }
    }
    let mut b = GraphBuilder::new(graph.shape());
    let mut copies = Vec::with_capacity(graph.nodes().len());
    for (node, is_needed) in graph.nodes().iter().zip(is_needed) {
        let copy = if is_needed {
            let operands = node.operands.iter();
            let operands: Option<Vec<NodeId>> = operands
                .map(|id| copies.get(id.as_usize()).copied()?)
                .collect();
            let as_built = || GraphError::NotAsBuilt {
                node: node.name.clone(),
            };
            Some(b.copy_node(graph, node, &operands.ok_or_else(as_built)?)?)
        } else {
            None
        };
        copies.push(copy);
    }
    b.finish(&[])
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use kv_core::{LayerIdx, PartIdx};
    use kv_graph::GraphShape;

    use super::*;

    #[test]
    fn what_is_not_stored_is_not_computed() {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 2,
            n_outputs: 1,
        });
        let x = b.input(Input::Embeddings { dim: 4 }).unwrap();
        let wanted = b.input(Input::OutputRows).unwrap();
        let k = b.linear("k", x, "keys", 4).unwrap();
        let k = b.reshape("k_heads", k, &[2, 1, 4]).unwrap();
        let cells = b.input(Input::Cells { part: PartIdx(0) }).unwrap();
        b.store_kv("stored", LayerIdx(0), [k, k, cells]).unwrap();
        let taken = b.take_rows("taken", x, wanted).unwrap();
        let logits = b.linear("logits", taken, "output", 9).unwrap();
        let whole = b.finish(&[logits]).unwrap();
        let stores = stores_alone(&whole).unwrap();
        let names: Vec<&str> = stores.nodes().iter().map(|node| &*node.name).collect();
        let inputs = ["k", "k_heads", "stored"];
        let named: Vec<&str> = names
            .iter()
            .copied()
            .filter(|n| inputs.contains(n))
            .collect();
        assert_eq!(named, inputs);
        assert_eq!(names.len(), 5, "{names:?}");
        assert!(stores.outputs().is_empty());
        let weights: Vec<&str> = stores.weights().iter().map(|w| &*w.name).collect();
        assert_eq!(weights, ["keys"]);
        assert!(stores.row_counts().is_some());
        assert_eq!(stores_alone(&stores).unwrap(), stores);
    }
}
