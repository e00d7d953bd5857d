//! Checks that a graph from outside is one that the builder would have built.
//!
//! Every node is inferred again from its operation and operands and compared with what the text
//! said, so there is one definition of shapes. Knows no format.

use crate::builder::{GraphBuilder, GraphError};
use crate::{Graph, Node};

/// The same graph, built again.
pub(super) fn rebuild(graph: &Graph) -> Result<Graph, GraphError> {
    let mut b = GraphBuilder::new(graph.shape);
    for (at, node) in graph.nodes.iter().enumerate() {
        let known = node.operands.iter().find(|o| o.as_usize() >= at);
        if let Some(&operand) = known {
            return Err(GraphError::UnknownOperand {
                node: node.name.clone(),
                operand,
            });
        }
        b.copy_node(graph, node, &node.operands)?;
    }
    let rebuilt = b.finish(&graph.outputs)?;
    let differs = |(a, b): (&Node, &Node)| (a != b).then(|| b.name.clone());
    let node = rebuilt.nodes.iter().zip(&graph.nodes).find_map(differs);
    match node {
        Some(node) => Err(GraphError::NotAsBuilt { node }),
        None if rebuilt != *graph => Err(GraphError::NotAsBuilt {
            node: "graph".into(),
        }),
        None => Ok(rebuilt),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, GraphShape, Input, NodeId};

    fn graph() -> Graph {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 2,
            n_outputs: 2,
        });
        let tokens = b.input(Input::Tokens).unwrap();
        let x = b.embed("embd", tokens, "tok", [10, 4]).unwrap();
        let y = b.linear("y", x, "w", 6).unwrap();
        b.finish(&[y]).unwrap()
    }

    fn refused(change: impl Fn(&mut Graph)) -> GraphError {
        let mut graph = graph();
        change(&mut graph);
        Graph::from_json(&graph.to_json().unwrap()).unwrap_err()
    }

    #[test]
    fn what_was_built_reads_back() {
        assert_eq!(Graph::from_json(&graph().to_json().unwrap()), Ok(graph()));
    }

    #[test]
    fn what_could_not_be_built_is_refused() {
        assert!(matches!(
            refused(|g| g.nodes[2].operands.clear()),
            GraphError::OperandCount {
                wanted: 1,
                got: 0,
                ..
            }
        ));
        assert!(matches!(
            refused(|g| g.nodes[1].operands = vec![NodeId(2)]),
            GraphError::UnknownOperand { .. }
        ));
        assert!(matches!(
            refused(|g| g.nodes[1].shape = vec![2, 5]),
            GraphError::NotAsBuilt { .. }
        ));
        assert!(matches!(
            refused(|g| g.nodes[2].dtype = DType::U32),
            GraphError::NotAsBuilt { .. }
        ));
        assert!(matches!(
            refused(|g| g.weights.clear()),
            GraphError::NotAsBuilt { .. }
        ));
        assert!(matches!(
            refused(|g| g.nodes[2].name = "embd".into()),
            GraphError::DuplicateName { .. }
        ));
        for output in [3, 7] {
            assert!(matches!(
                refused(|g| g.outputs = vec![NodeId(output)]),
                GraphError::UnknownOperand { .. }
            ));
        }
        assert!(matches!(
            refused(|g| g.nodes[1].operands = vec![NodeId(1)]),
            GraphError::UnknownOperand { .. }
        ));
        let unused = |g: &mut Graph| {
            let mut further = g.weights[0].clone();
            further.name = "further".into();
            g.weights.push(further);
        };
        let node = "graph".to_owned();
        assert_eq!(refused(unused), GraphError::NotAsBuilt { node });
        assert!(matches!(
            Graph::from_json("{}").unwrap_err(),
            GraphError::Json(_)
        ));
    }
}
