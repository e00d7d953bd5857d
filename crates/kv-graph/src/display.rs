//! Text and DOT forms of a graph.
//!
//! Text is one node a line: number, name, type and shape, operation with operands and attributes.
//! It is what snapshots hold, so it changes only when the graph does.

use std::fmt;

use crate::spec::OpScope;
use crate::{Graph, Node, NodeId};

/// Displays a graph as text.
#[derive(Clone, Copy, Debug)]
pub struct Text<'a>(pub(super) &'a Graph);

/// Displays a graph in the DOT language.
#[derive(Clone, Copy, Debug)]
pub struct Dot<'a>(pub(super) &'a Graph);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "%{}", self.0)
    }
}

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let graph = self.0;
        let shape = graph.shape();
        writeln!(
            f,
            "graph: {} tokens, {} outputs",
            shape.n_tokens, shape.n_outputs
        )?;
        for (node, id) in graph.nodes().iter().zip(0..) {
            let (name, call) = (&node.name, call(node));
            writeln!(f, "{} {name}: {} = {call}", NodeId(id), type_of(node))?;
        }
        let outputs: Vec<_> = graph.outputs().iter().map(ToString::to_string).collect();
        writeln!(f, "return {}", outputs.join(", "))
    }
}

impl fmt::Display for Dot<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let graph = self.0;
        writeln!(f, "digraph cellar {{")?;
        writeln!(
            f,
            "  rankdir=TB; node [shape=box, fontname=\"monospace\", fontsize=10];"
        )?;
        for (node, id) in graph.nodes().iter().zip(0u32..) {
            let label = format!(
                "{}\\n{} {}",
                escape(&node.name),
                node.op.name(),
                type_of(node)
            );
            let style = match node.op.spec().scope() {
                OpScope::Input => ", shape=ellipse",
                OpScope::Row => "",
                OpScope::Tokens => ", style=filled, fillcolor=lightyellow",
            };
            writeln!(f, "  n{id} [label=\"{label}\"{style}];")?;
            for operand in &node.operands {
                writeln!(f, "  n{} -> n{id};", operand.0)?;
            }
        }
        for output in graph.outputs() {
            writeln!(f, "  n{} [peripheries=2];", output.0)?;
        }
        writeln!(f, "}}")
    }
}

fn escape(name: &str) -> String {
    name.replace('\\', "\\\\").replace('"', "\\\"")
}

fn type_of(node: &Node) -> String {
    if node.shape.is_empty() {
        return node.dtype.to_string();
    }
    format!("{}{:?}", node.dtype, node.shape)
}

/// The operation with operands and attributes, for example `linear(%4, w=blk.0.attn_q.weight)`.
fn call(node: &Node) -> String {
    let mut args: Vec<String> = node.operands.iter().map(ToString::to_string).collect();
    let spec = node.op.spec();
    args.extend(spec.attributes().iter().map(ToString::to_string));
    format!("{}({})", spec.name(), args.join(", "))
}

#[cfg(test)]
mod tests {
    use crate::{GraphBuilder, GraphShape, Input};
    use kv_core::ids::{LayerIdx, PartIdx};

    #[test]
    fn a_graph_in_dot() {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 2,
            n_outputs: 2,
        });
        let x = b.input(Input::Embeddings { dim: 4 }).unwrap();
        let cells = b.input(Input::Cells { part: PartIdx(0) }).unwrap();
        let x = b.reshape("a \"head\"", x, &[2, 1, 4]).unwrap();
        b.store_kv("stored", LayerIdx(0), [x, x, cells]).unwrap();
        insta::assert_snapshot!(b.finish(&[x]).unwrap().dot().to_string());
    }
}
