//! [`Graph::mixtures`] and [`Graph::without`]: the experts of mixtures in graphs of their own, for
//! another device, and the graph that is left.
//!
//! A mixture is its route and what depends on it, up to the sum over slots. Invariant: its graph
//! computes of the rows that it takes what its nodes compute; what is left has one custom operation
//! in their place, which takes those rows. The router's product stays in the graph, its choice is
//! the mixture's: of a token, logits, the row of experts and the sum cross over, and no slots.
//! Knows no device.

use std::collections::BTreeSet;

use crate::ops::custom::{CustomSizes, CustomSpec};
use crate::spec::{DType, OpScope};
use crate::split::Half;
use crate::{Graph, GraphError, GraphShape, Node, NodeId, Op};

/// The experts of one mixture in a graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Mixture {
    /// Their own graph: a row of its embeddings is those of the operands, concatenated.
    graph: Graph,
    /// The nodes of the graph that they are.
    nodes: BTreeSet<NodeId>,
    /// The nodes that they read, ascending.
    operands: Vec<NodeId>,
    /// Values of a row of each.
    widths: Vec<usize>,
    /// Those of them that others read, or that are results of the graph, ascending.
    results: Vec<NodeId>,
}

impl Mixture {
    /// The graph of the experts: a row of its embeddings is those of the operands, concatenated;
    /// its outputs are the columns of the operation that stands for it.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Values of a row of each operand.
    pub fn operand_widths(&self) -> &[usize] {
        &self.widths
    }

    /// A name for the operation that stands for it.
    fn name(&self, graph: &Graph) -> String {
        let node = |id: &NodeId| graph.node(*id);
        match self.results.iter().filter_map(node).collect::<Vec<_>>()[..] {
            [sum] if sum.shape.len() == 2 => sum.name.clone(),
            _ => {
                let route = self.nodes.first().and_then(node);
                format!("{}.experts", route.map_or("", |route| &route.name))
            }
        }
    }
}

impl Graph {
    /// The mixtures of which a matrix of experts is wanted, and rows are to be computed.
    ///
    /// # Errors
    /// [`GraphError::CannotDetach`] where what a route chooses is used by more than rows of
    /// experts.
    pub fn mixtures(&self, is_wanted: impl Fn(&str) -> bool) -> Result<Vec<Mixture>, GraphError> {
        let wanted = self.matmul_inputs().filter(|of| is_wanted(of.weight));
        let routes: BTreeSet<NodeId> = wanted.filter_map(|of| of.routes).collect();
        let with_rows = routes
            .into_iter()
            .filter(|&id| self.node(id).is_some_and(|route| route.n_rows() > 0));
        with_rows.map(|route| self.mixture(route)).collect()
    }

    /// The graph with a custom operation in the place of each of its mixtures: `op` names that of
    /// one by its number.
    ///
    /// # Errors
    /// [`GraphError`] where a mixture is not one of this graph.
    pub fn without(
        &self,
        mixtures: &[Mixture],
        op: impl Fn(usize) -> CustomSpec,
    ) -> Result<Self, GraphError> {
        let mut rest = Half::new(self);
        for (id, node) in self.numbered() {
            match mixtures.iter().position(|of| of.nodes.contains(&id)) {
                None if matches!(node.op, Op::Input(_)) => {}
                None => {
                    rest.copy_one(id, node)?;
                }
                Some(at) if mixtures[at].nodes.last() == Some(&id) => {
                    self.stand_in(&mut rest, &mixtures[at], &op(at))?;
                }
                Some(_) => {}
            }
        }
        rest.finish(self.outputs.iter())
    }

    /// Adds the operation that stands for a mixture.
    fn stand_in(
        &self,
        rest: &mut Half<'_>,
        mixture: &Mixture,
        op: &CustomSpec,
    ) -> Result<(), GraphError> {
        let operands = mixture.operands.iter().map(|&id| rest.own(id));
        let operands = operands.collect::<Result<Vec<_>, _>>()?;
        let sizes = CustomSizes {
            weights: &[],
            width: mixture.results.iter().map(|&id| self.row_len(id)).sum(),
        };
        let name = mixture.name(self);
        let all = rest.builder.custom(&name, op, &operands, sizes)?;
        rest.take_columns(all, &mixture.results)
    }

    /// The mixture of a route.
    fn mixture(&self, route: NodeId) -> Result<Mixture, GraphError> {
        let name = |id: NodeId| self.node(id).map_or("", |node| &node.name);
        let refuse = |reason| GraphError::CannotDetach {
            route: name(route).to_owned(),
            reason,
        };
        let n_rows = self.node(route).map_or(0, Node::n_rows);
        let is_row = |node: &Node| node.dtype == DType::F32 && node.n_rows() == n_rows;
        let (mut nodes, mut sums) = (BTreeSet::from([route]), BTreeSet::new());
        for (id, node) in self.numbered().skip(route.as_usize() + 1) {
            let is_slot = |id: &NodeId| nodes.contains(id) && !sums.contains(id);
            if !node.operands.iter().any(is_slot) {
                continue;
            }
            let is_of_rows = node.op.spec().scope() == OpScope::Row && is_row(node);
            if !is_of_rows || matches!(node.op, Op::Custom { .. }) {
                let (name, op) = (&node.name, node.op.name());
                return Err(refuse(format!("'{name}' ({op}) uses its slots")));
            }
            nodes.insert(id);
            if matches!(node.op, Op::ExpertSum) {
                sums.insert(id);
            }
        }
        let read_by = |id: &NodeId| self.node(*id).map_or(&[][..], |node| &node.operands);
        let read: BTreeSet<NodeId> = nodes.iter().flat_map(read_by).copied().collect();
        let operands: Vec<NodeId> = read.difference(&nodes).copied().collect();
        for &id in &operands {
            if !self.node(id).is_some_and(is_row) {
                let name = name(id);
                return Err(refuse(format!(
                    "it needs '{name}', which is no row of f32 for each of its {n_rows}"
                )));
            }
        }
        let others = self.numbered().filter(|(id, _)| !nodes.contains(id));
        let read_by_others = others.flat_map(|(_, node)| &node.operands);
        let used = read_by_others.chain(&self.outputs).copied();
        let used: BTreeSet<NodeId> = used.collect();
        let results: Vec<NodeId> = used.intersection(&nodes).copied().collect();
        let shape = GraphShape {
            n_tokens: n_rows,
            n_outputs: n_rows,
        };
        let mut part = Half::with_shape(self, shape);
        part.take_rows(&operands)?;
        for &id in &nodes {
            if let Some(node) = self.node(id) {
                part.copy_one(id, node)?;
            }
        }
        Ok(Mixture {
            graph: part.finish(results.iter())?,
            widths: operands.iter().map(|&id| self.row_len(id)).collect(),
            nodes,
            operands,
            results,
        })
    }

    /// The nodes with their numbers.
    fn numbered(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        (0u32..).map(NodeId).zip(&self.nodes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Activation, Affine, GraphBuilder, Input, RouteGate, RouteSpec};
    use kv_core::ids::LayerIdx;

    const DIM: usize = 4;
    const N_EXPERTS: usize = 3;

    fn add_mixture(b: &mut GraphBuilder, x: NodeId) -> NodeId {
        let logits = b.linear("logits", x, "router", N_EXPERTS).unwrap();
        let spec = RouteSpec::plain(2, RouteGate::Softmax);
        let routes = b.route("route", logits, spec).unwrap();
        let up = b.expert_linear("up", [x, routes], Affine::new("up"), 6);
        let hidden = b.activate("act", Activation::Silu, up.unwrap()).unwrap();
        let down = b.expert_linear("down", [hidden, routes], Affine::new("down"), DIM);
        let scaled = b.expert_scale("scaled", [down.unwrap(), routes]).unwrap();
        let sum = b.expert_sum("sum", scaled).unwrap();
        b.add("out", x, sum).unwrap()
    }

    fn with_shape(n_tokens: usize, n_outputs: usize) -> Graph {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens,
            n_outputs,
        });
        let tokens = b.input(Input::Tokens).unwrap();
        let mut x = b.embed("inp_embd", tokens, "token_embd", [9, DIM]).unwrap();
        x = add_mixture(&mut b.scope(LayerIdx(0)), x);
        let wanted = b.input(Input::OutputRows).unwrap();
        x = b.take_rows("taken", x, wanted).unwrap();
        x = add_mixture(&mut b.scope(LayerIdx(1)), x);
        b.finish(&[x]).unwrap()
    }

    fn op(at: usize) -> CustomSpec {
        CustomSpec::new(format!("other{at}"))
    }

    #[test]
    fn experts_are_in_graphs_of_their_own() {
        let graph = with_shape(5, 2);
        let mixtures = graph.mixtures(|_| true).unwrap();
        let rows: Vec<usize> = mixtures
            .iter()
            .map(|m| m.graph().shape().n_tokens)
            .collect();
        assert_eq!(rows, [5, 2]);
        assert_eq!(mixtures[1].operand_widths(), [DIM, N_EXPERTS]);
        let own: Vec<_> = mixtures
            .iter()
            .map(|m| m.graph().text().to_string())
            .collect();
        for line in [
            "inp_embd: f32[2, 7]",
            "route-1: f32[2, 3] = route(%2, used=2",
            "up-1: f32[2, 2, 6] = expert_linear(%1, %3, w=blk.1.up)",
            "sum-1: f32[2, 4] = expert_sum(",
        ] {
            assert!(own[1].contains(line), "{line}: {}", own[1]);
        }
        let rest = graph.without(&mixtures, op).unwrap();
        let text = rest.text().to_string();
        for line in [
            "logits-1: f32[2, 3] = linear(",
            "sum-0: f32[5, 4] = custom(%1, %2, other0)",
            "sum-1: f32[2, 4] = custom(%6, %7, other1)",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        assert!(
            !text.contains("expert") && !text.contains(" route("),
            "{text}"
        );
        assert!(rest.row_counts().is_some());
        let names = |graph: &Graph| -> BTreeSet<String> {
            graph.weights().iter().map(|w| w.name.clone()).collect()
        };
        let mut all = names(&rest);
        for mixture in &mixtures {
            let own = names(mixture.graph());
            assert!(all.is_disjoint(&own), "{own:?}");
            all.extend(own);
        }
        assert_eq!(all, names(&graph));
    }

    #[test]
    fn some_layers_stay() {
        let graph = with_shape(5, 2);
        let one = graph.mixtures(|weight| weight == "blk.1.down").unwrap();
        assert_eq!(one.len(), 1);
        let rest = graph.without(&one, op).unwrap().text().to_string();
        assert!(
            rest.contains("up-0: f32[5, 2, 6] = expert_linear"),
            "{rest}"
        );
        assert!(rest.contains("sum-1: f32[2, 4] = custom("), "{rest}");
        assert_eq!(graph.mixtures(|_| false).unwrap(), []);
        assert_eq!(graph.without(&[], op).unwrap().outputs().len(), 1);
        // Without rows, nothing is to be computed.
        let without_outputs = with_shape(5, 0).mixtures(|_| true).unwrap();
        assert_eq!(without_outputs.len(), 1);
    }

    /// As where the inputs of matrices are recorded.
    #[test]
    fn slots_may_be_results() {
        let graph = with_shape(5, 2);
        let slots = ["act-0", "route-0"].map(|name| graph.find(name).unwrap().0);
        let graph = graph.with_outputs(&slots).unwrap();
        let mixtures = graph.mixtures(|_| true).unwrap();
        let rest = graph.without(&mixtures, op).unwrap();
        let shapes = rest.outputs().iter().map(|&id| rest.node(id).unwrap());
        let shapes: Vec<_> = shapes.map(|node| node.shape.clone()).collect();
        assert_eq!(shapes, [vec![2, 4], vec![5, 2, 6], vec![5, 3]]);
        let text = rest.text().to_string();
        assert!(
            text.contains("route-0.experts: f32[5, 19] = custom("),
            "{text}"
        );
    }

    #[test]
    fn slots_that_others_use_are_refused() {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 5,
            n_outputs: 2,
        });
        let x = b.input(Input::Embeddings { dim: DIM }).unwrap();
        let logits = b.linear("logits", x, "router", N_EXPERTS).unwrap();
        let spec = RouteSpec::plain(2, RouteGate::Softmax);
        let routes = b.route("route", logits, spec).unwrap();
        let up = b.expert_linear("up", [x, routes], Affine::new("up"), 6);
        let wanted = b.input(Input::OutputRows).unwrap();
        let taken = b.take_rows("taken", up.unwrap(), wanted).unwrap();
        let graph = b.finish(&[taken]).unwrap();
        let refused = graph.mixtures(|_| true).unwrap_err().to_string();
        assert!(
            refused.contains("'taken' (take_rows) uses its slots"),
            "{refused}"
        );
    }
}
