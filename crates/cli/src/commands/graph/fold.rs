//! [`FoldedDiff`]: the differences of two outlines, where layers that differ alike are one block.
//!
//! Invariant: it is empty only where every node of each graph has an equal one in the other.

use std::fmt::{self, Write};
use std::ops::Range;

use kv_graph::{GraphDiff, NodeChange, NodeText};
use serde::Serialize;

use super::outline::{Detail, Outline};

/// The differences between two graphs.
#[derive(Debug, Serialize)]
pub(super) struct FoldedDiff {
    /// Of the nodes that belong to no layer.
    outside: GraphDiff,
    /// Of the layers.
    blocks: Vec<Block>,
}

/// Layers with the same differences.
#[derive(Debug, Serialize)]
struct Block {
    /// The layers of the first graph.
    left: Vec<usize>,
    /// The layers of the second graph.
    right: Vec<usize>,
    /// The layer of the same graph that these equal, where the other graph has fewer layers: their
    /// nodes are not listed.
    like: Option<usize>,
    diff: GraphDiff,
}

/// One graph's layers that are alike.
struct Kind<'a> {
    nodes: &'a [NodeText],
    layers: Vec<usize>,
}

impl FoldedDiff {
    /// The differences of two graphs, outlined with the same detail.
    pub(super) fn new(left: &Outline, right: &Outline, detail: Detail) -> Self {
        let blocks = match detail {
            Detail::Everything => by_number(left, right),
            Detail::Structure => by_kind(left, right),
        };
        Self {
            outside: GraphDiff::of_nodes(&left.outside, &right.outside),
            blocks,
        }
    }

    /// The differences of one layer that both have.
    pub(super) fn of_layer(left: &[NodeText], right: &[NodeText], layer: usize) -> Self {
        Self {
            outside: GraphDiff::default(),
            blocks: vec![Block {
                left: vec![layer],
                right: vec![layer],
                like: None,
                diff: GraphDiff::of_nodes(left, right),
            }],
        }
    }

    /// True if the graphs are alike.
    pub(super) fn is_empty(&self) -> bool {
        self.outside.is_empty() && self.blocks.iter().all(Block::is_same)
    }
}

/// Compares layers of the same number; blocks in order of their first layer.
fn by_number(left: &Outline, right: &Outline) -> Vec<Block> {
    let (left, right) = (&left.layers, &right.layers);
    let common = left.len().min(right.len());
    let mut blocks: Vec<Block> = Vec::new();
    for (layer, (a, b)) in left.iter().zip(right).enumerate() {
        let diff = GraphDiff::of_nodes(a, b);
        match blocks.iter_mut().find(|block| block.diff == diff) {
            Some(block) => {
                block.left.push(layer);
                block.right.push(layer);
            }
            None => blocks.push(Block {
                left: vec![layer],
                right: vec![layer],
                like: None,
                diff,
            }),
        }
    }
    let first = blocks.len();
    for (layers, side) in [(left, Side::Left), (right, Side::Right)] {
        for layer in common..layers.len() {
            let like = layers[..common]
                .iter()
                .position(|nodes| *nodes == layers[layer]);
            let diff = if like.is_some() {
                GraphDiff::default()
            } else {
                side.alone(&layers[layer])
            };
            let mut further = blocks[first..].iter_mut();
            match further.find(|block| block.like == like && block.diff == diff) {
                Some(block) => side.layers(block).push(layer),
                None => {
                    let mut block = Block {
                        left: Vec::new(),
                        right: Vec::new(),
                        like,
                        diff,
                    };
                    side.layers(&mut block).push(layer);
                    blocks.push(block);
                }
            }
        }
    }
    blocks
}

/// Compares kinds of layers: equal ones, then the others in order of their first layer.
fn by_kind(left: &Outline, right: &Outline) -> Vec<Block> {
    let (left, mut right) = (kinds(left), kinds(right));
    let mut pairs: Vec<(Kind<'_>, Option<Kind<'_>>)> = Vec::new();
    for kind in left {
        let equal = right.iter().position(|other| other.nodes == kind.nodes);
        pairs.push((kind, equal.map(|at| right.remove(at))));
    }
    let mut right = right.into_iter();
    let mut blocks = Vec::new();
    for (kind, equal) in pairs {
        let other = equal.or_else(|| right.next());
        let nodes = other.as_ref().map_or(&[][..], |other| other.nodes);
        blocks.push(Block {
            diff: GraphDiff::of_nodes(kind.nodes, nodes),
            left: kind.layers,
            right: other.map_or_else(Vec::new, |other| other.layers),
            like: None,
        });
    }
    blocks.extend(right.map(|kind| Block {
        diff: Side::Right.alone(kind.nodes),
        left: Vec::new(),
        right: kind.layers,
        like: None,
    }));
    blocks
}

fn kinds(outline: &Outline) -> Vec<Kind<'_>> {
    let mut kinds: Vec<Kind<'_>> = Vec::new();
    for (nodes, layer) in outline.layers.iter().zip(0..) {
        match kinds.iter_mut().find(|kind| kind.nodes == nodes) {
            Some(kind) => kind.layers.push(layer),
            None => kinds.push(Kind {
                nodes,
                layers: vec![layer],
            }),
        }
    }
    kinds
}

/// One of the two graphs.
#[derive(Clone, Copy)]
enum Side {
    Left,
    Right,
}

impl Side {
    /// The difference where the other graph has none of these nodes.
    fn alone(self, nodes: &[NodeText]) -> GraphDiff {
        match self {
            Self::Left => GraphDiff::of_nodes(nodes, &[]),
            Self::Right => GraphDiff::of_nodes(&[], nodes),
        }
    }

    fn layers(self, block: &mut Block) -> &mut Vec<usize> {
        match self {
            Self::Left => &mut block.left,
            Self::Right => &mut block.right,
        }
    }
}

impl Block {
    fn is_same(&self) -> bool {
        self.diff.is_empty() && !self.left.is_empty() && !self.right.is_empty()
    }
}

impl fmt::Display for FoldedDiff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for block in &self.blocks {
            writeln!(f, "{block}")?;
            write_diff(f, &block.diff)?;
        }
        if !self.outside.is_empty() {
            writeln!(f, "outside of the layers:")?;
            write_diff(f, &self.outside)?;
        }
        Ok(())
    }
}

/// The line above the differences.
impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.left[..], &self.right[..]) {
            (left, []) => write!(f, "{}: only in LEFT", ranges(left))?,
            ([], right) => write!(f, "{}: only in RIGHT", ranges(right))?,
            (left, right) if left == right => write!(f, "{}:", ranges(left))?,
            (left, right) => write!(f, "LEFT {} and RIGHT {}:", ranges(left), ranges(right))?,
        }
        match self.like {
            Some(layer) => write!(f, ", like its layer {layer}"),
            None if self.is_same() => f.write_str(" the same"),
            None => Ok(()),
        }
    }
}

/// Numbers of layers, in order, such as `layers 0-4, 6`.
fn ranges(layers: &[usize]) -> String {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for &layer in layers {
        match runs.last_mut() {
            Some(run) if run.end == layer => run.end += 1,
            _ => runs.push(layer..layer + 1),
        }
    }
    let text = |run: &Range<usize>| match run.len() {
        1 => run.start.to_string(),
        _ => format!("{}-{}", run.start, run.end - 1),
    };
    let texts: Vec<String> = runs.iter().map(text).collect();
    let noun = if layers.len() == 1 { "layer" } else { "layers" };
    format!("{noun} {}", texts.join(", "))
}

fn write_diff(f: &mut fmt::Formatter<'_>, diff: &GraphDiff) -> fmt::Result {
    for text in &diff.only_left {
        writeln!(f, "  - {text}")?;
    }
    for text in &diff.only_right {
        writeln!(f, "  + {text}")?;
    }
    for NodeChange { left, right, .. } in &diff.changed {
        match in_one_line(left, right) {
            Some(line) => writeln!(f, "  ~ {line}")?,
            None => writeln!(f, "  ~ {left}\n    {right}")?,
        }
    }
    Ok(())
}

/// Two texts as one, where each has as many words: `{a | b}` is where they differ.
fn in_one_line(left: &str, right: &str) -> Option<String> {
    let words = |text| -> Vec<&str> { split_words(text) };
    let (left, right) = (words(left), words(right));
    if left.len() != right.len() {
        return None;
    }
    let mut line = String::new();
    for (a, b) in left.iter().zip(&right) {
        if a == b {
            line.push_str(a);
        } else {
            write!(line, "{{{a} | {b}}}").ok()?;
        }
    }
    Some(line)
}

/// Words and what is between them.
fn split_words(text: &str) -> Vec<&str> {
    let is_between = |c: char| " ,()[]=/:".contains(c);
    text.split_inclusive(is_between)
        .flat_map(|word| {
            let (word, between) = word.split_at(word.trim_end_matches(is_between).len());
            [word, between]
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(text: &str) -> NodeText {
        let (name, _) = text.split_once(':').unwrap();
        NodeText {
            name: name.to_owned(),
            text: text.to_owned(),
        }
    }

    fn outline(layers: &[&str]) -> Outline {
        Outline {
            outside: Vec::new(),
            layers: layers.iter().map(|text| vec![node(text)]).collect(),
        }
    }

    fn diff(left: &[&str], right: &[&str], detail: Detail) -> String {
        FoldedDiff::new(&outline(left), &outline(right), detail).to_string()
    }

    #[test]
    fn layers_that_differ_alike_are_one_block() {
        let (a, b) = ("x: f32[1, 4] = a()", "x: f32[1, 6] = a()");
        assert_eq!(
            diff(&[a, a, b, a], &[a, b, b, b], Detail::Everything),
            "layers 0, 2: the same\nlayers 1, 3:\n  ~ x: f32[1, {4 | 6}] = a()\n"
        );
    }

    #[test]
    fn layers_that_only_one_has_are_named() {
        let (a, b) = ("x: f32 = a()", "y: f32 = b()");
        assert_eq!(
            diff(&[a], &[a, a, b, b], Detail::Everything),
            "layer 0: the same\nlayer 1: only in RIGHT, like its layer 0\n\
             layers 2-3: only in RIGHT\n  + y: f32 = b()\n"
        );
        let fewer = FoldedDiff::new(&outline(&[a, a]), &outline(&[a]), Detail::Everything);
        assert!(!fewer.is_empty());
    }

    #[test]
    fn the_structure_is_the_kinds_of_layers() {
        let (a, b) = ("x: f32 = a()", "y: f32 = b()");
        let same = FoldedDiff::new(&outline(&[a, b]), &outline(&[a, a, b]), Detail::Structure);
        assert!(same.is_empty());
        assert_eq!(
            same.to_string(),
            "LEFT layer 0 and RIGHT layers 0-1: the same\nLEFT layer 1 and RIGHT layer 2: the same\n"
        );
        let text = diff(&[a, a], &[b, a], Detail::Structure);
        assert!(
            text.ends_with("layer 0: only in RIGHT\n  + y: f32 = b()\n"),
            "{text}"
        );
    }

    #[test]
    fn texts_of_other_words_take_two_lines() {
        let (a, b) = ("x: f32 = a(w=v)", "x: f32 = a(w=v, b=c)");
        assert_eq!(
            diff(&[a], &[b], Detail::Everything),
            "layer 0:\n  ~ x: f32 = a(w=v)\n    x: f32 = a(w=v, b=c)\n"
        );
    }
}
