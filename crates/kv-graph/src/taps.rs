//! Graphs that give more results than a model's: [`Graph::with_outputs`], and which nodes the
//! inputs of matrix products are. Does not know what callers do with the values.

use crate::op::Op;
use crate::{Graph, GraphError, NodeId};

/// The input of a product with a weight matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatMulInput<'a> {
    /// Name of the matrix, `[out, in]`, or of the matrices of experts or heads, `[experts, out,
    /// in]`.
    pub weight: &'a str,
    /// The rows that are multiplied, `[n, in]`, or `[n, slots, in]`, where each slot of a token has
    /// its own; of heads `[n, heads, in]`.
    pub x: NodeId,
    /// The route `[n, experts]` of the rows, where the matrices are those of experts.
    pub routes: Option<NodeId>,
}

impl Graph {
    /// The same computation with the results of these nodes as further outputs, after its own.
    ///
    /// # Errors
    /// [`GraphError::UnknownOperand`] where there is no such node.
    pub fn with_outputs(&self, nodes: &[NodeId]) -> Result<Self, GraphError> {
        let unknown = nodes.iter().find(|&&id| self.node(id).is_none());
        if let Some(&operand) = unknown {
            return Err(GraphError::UnknownOperand {
                node: "output".into(),
                operand,
            });
        }
        let mut graph = self.clone();
        graph.outputs.extend_from_slice(nodes);
        Ok(graph)
    }

    /// The inputs of all products with weight matrices, in the order of execution.
    pub fn matmul_inputs(&self) -> impl Iterator<Item = MatMulInput<'_>> {
        self.nodes().iter().filter_map(|node| {
            let (weight, n_operands) = match &node.op {
                Op::Linear { weight, .. } | Op::HeadLinear { weight } => (weight, 1),
                Op::ExpertLinear { weight, .. } => (weight, 2),
                _ => return None,
            };
            let mut operands = node.operands.iter().copied().take(n_operands);
            Some(MatMulInput {
                weight,
                x: operands.next()?,
                routes: operands.next(),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Affine, GraphBuilder, GraphShape, Input, RouteGate, RouteSpec, RouteSum, TableRow,
    };

    #[test]
    fn matrix_products_are_found_and_their_inputs_become_outputs() {
        let shape = GraphShape {
            n_tokens: 3,
            n_outputs: 3,
        };
        let mut b = GraphBuilder::new(shape);
        let x = b.input(Input::Embeddings { dim: 4 }).unwrap();
        let table = TableRow {
            weight: "rows",
            n_rows: 2,
            row: 1,
        };
        let x = b.add_row("moved", x, table).unwrap();
        let logits = b.linear("logits", x, "router", 5).unwrap();
        let spec = RouteSpec {
            sum: RouteSum::One,
            ..RouteSpec::plain(2, RouteGate::Softmax)
        };
        let routes = b.route("route", logits, spec).unwrap();
        let up = Affine::new("up");
        let y = b.expert_linear("y", [x, routes], up, 6).unwrap();
        let y = b.expert_sum("sum", y).unwrap();
        let heads = b.reshape("heads", y, &[3, 2, 3]).unwrap();
        let of_heads = b.head_linear("of_heads", heads, "k_b", 4).unwrap();
        let graph = b.finish(&[y, of_heads]).unwrap();
        let inputs: Vec<MatMulInput<'_>> = graph.matmul_inputs().collect();
        let input = |weight, routes| MatMulInput { weight, x, routes };
        assert_eq!(
            inputs,
            [
                input("router", None),
                input("up", Some(routes)),
                MatMulInput {
                    x: heads,
                    ..input("k_b", None)
                }
            ],
            "a row of a table is no product"
        );
        let tapped = graph.with_outputs(&[x, routes]).unwrap();
        assert_eq!(tapped.outputs(), [y, of_heads, x, routes]);
        assert_eq!(tapped.nodes(), graph.nodes());
        assert_eq!(
            graph.with_outputs(&[x, NodeId(99)]).unwrap_err(),
            GraphError::UnknownOperand {
                node: "output".into(),
                operand: NodeId(99)
            }
        );
    }
}
