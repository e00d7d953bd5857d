//! Which nodes of two graphs differ, matched by name.
//!
//! Operands are compared by name, not by number, so an inserted node does not make all later nodes
//! differ.

use std::collections::HashMap;
use std::fmt;

use serde::Serialize;

use crate::{Graph, Node};

/// A node in words.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NodeText {
    /// Its name, by which it is matched.
    pub name: String,
    /// All of it as text: name, type, operation with operands and attributes.
    pub text: String,
}

/// A node that both graphs have, but not alike.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct NodeChange {
    /// Its name.
    pub name: String,
    /// The first graph's version.
    pub left: String,
    /// The second graph's version.
    pub right: String,
}

/// The differences between two graphs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize)]
pub struct GraphDiff {
    /// Nodes of the first graph only, as text.
    pub only_left: Vec<String>,
    /// Nodes of the second graph only, as text.
    pub only_right: Vec<String>,
    /// Nodes of both that differ.
    pub changed: Vec<NodeChange>,
}

impl GraphDiff {
    pub(super) fn new(left: &Graph, right: &Graph) -> Self {
        let texts = |graph: &Graph| -> Vec<NodeText> {
            let nodes = graph.nodes().iter();
            nodes.map(|node| describe(graph, node)).collect()
        };
        Self::of_nodes(&texts(left), &texts(right))
    }

    /// The differences between two lists of nodes, each with names of its own.
    pub fn of_nodes(left: &[NodeText], right: &[NodeText]) -> Self {
        let by_name = |nodes: &[NodeText]| -> HashMap<String, String> {
            let pairs = nodes.iter().map(|n| (n.name.clone(), n.text.clone()));
            pairs.collect()
        };
        let (in_left, in_right) = (by_name(left), by_name(right));
        let mut diff = Self::default();
        for NodeText { name, text } in left {
            match in_right.get(name) {
                None => diff.only_left.push(text.clone()),
                Some(other) if other == text => {}
                Some(other) => diff.changed.push(NodeChange {
                    name: name.clone(),
                    left: text.clone(),
                    right: other.clone(),
                }),
            }
        }
        let added = right.iter().filter(|n| !in_left.contains_key(&n.name));
        diff.only_right.extend(added.map(|n| n.text.clone()));
        diff
    }

    /// True if the graphs are alike.
    pub fn is_empty(&self) -> bool {
        self.only_left.is_empty() && self.only_right.is_empty() && self.changed.is_empty()
    }
}

impl fmt::Display for GraphDiff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for text in &self.only_left {
            writeln!(f, "- {text}")?;
        }
        for text in &self.only_right {
            writeln!(f, "+ {text}")?;
        }
        for NodeChange { left, right, .. } in &self.changed {
            writeln!(f, "~ {left}\n  {right}")?;
        }
        Ok(())
    }
}

/// A node with its operands by name: independent of numbering.
fn describe(graph: &Graph, node: &Node) -> NodeText {
    let operands = node
        .operands
        .iter()
        .filter_map(|&o| graph.node(o))
        .map(|n| n.name.clone());
    let spec = node.op.spec();
    let attributes = spec.attributes().iter().map(ToString::to_string);
    let args: Vec<String> = operands.chain(attributes).collect();
    let (name, op) = (node.name.clone(), spec.name());
    let (dtype, shape, args) = (node.dtype, &node.shape, args.join(", "));
    let text = format!("{name}: {dtype}{shape:?} = {op}({args})");
    NodeText { name, text }
}

#[cfg(test)]
mod tests {
    use super::super::{GraphBuilder, GraphShape, Input};
    use super::*;

    /// A graph with a product of this width, after one of this name.
    fn graph(before: &str, width: usize) -> Graph {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 2,
            n_outputs: 2,
        });
        let x = b.input(Input::Embeddings { dim: 4 }).unwrap();
        b.scale(before, x, 2.0).unwrap();
        let y = b.linear("y", x, "w", width).unwrap();
        b.finish(&[y]).unwrap()
    }

    #[test]
    fn nodes_are_matched_by_name() {
        let graph_a = graph("a", 4);
        assert!(graph_a.diff(&graph_a).is_empty());
        let other = graph_a.diff(&graph("b", 6));
        let names = |texts: &[String]| {
            let name = |text: &String| text.split(':').next().map(str::to_owned);
            texts.iter().filter_map(name).collect::<Vec<_>>()
        };
        assert_eq!(names(&other.only_left), ["a"]);
        assert_eq!(names(&other.only_right), ["b"]);
        let changed = [&other.changed[0].left, &other.changed[0].right];
        assert_eq!(
            changed,
            [
                "y: f32[2, 4] = linear(inp_embd, w=w)",
                "y: f32[2, 6] = linear(inp_embd, w=w)"
            ]
        );
        let text = other.to_string();
        let signs: Vec<_> = text
            .lines()
            .filter_map(|line| line.chars().next())
            .collect();
        assert_eq!(signs, ['-', '+', '~', ' '], "{text}");
        for one in [graph("b", 4), graph("a", 6)] {
            assert!(!graph_a.diff(&one).is_empty());
        }
        let left = GraphDiff {
            only_left: vec!["x".into()],
            ..GraphDiff::default()
        };
        let right = GraphDiff {
            only_right: vec!["x".into()],
            ..GraphDiff::default()
        };
        assert!(!left.is_empty() && !right.is_empty());
    }
}
