//! [`Outline`]: a graph's nodes in words, layer by layer, read from its text form.
//!
//! Invariant: what a node says does not depend on the number of its layer, so that equal layers
//! have equal texts. Does not know what operations mean.

use std::collections::{HashMap, HashSet};

use anyhow::{Context, ensure};
use kv_graph::NodeText;

/// Which parts of nodes are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Detail {
    /// All of them.
    Everything,
    /// Operations, operands, weights and settings in words: no numbers.
    Structure,
}

/// A graph in words.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Outline {
    /// The nodes that belong to no layer.
    pub(super) outside: Vec<NodeText>,
    /// The nodes of each layer.
    pub(super) layers: Vec<Vec<NodeText>>,
}

/// One line of a graph's text form.
#[derive(Debug)]
struct Node<'a> {
    /// The name without the layer's number.
    stem: &'a str,
    layer: Option<usize>,
    result: &'a str,
    operation: &'a str,
    operands: Vec<usize>,
    attributes: Vec<&'a str>,
}

impl Outline {
    /// The outline of a graph's text form.
    ///
    /// # Errors
    /// The line that is no node, by its number.
    pub(super) fn read(text: &str, detail: Detail) -> anyhow::Result<Self> {
        let mut nodes: Vec<Node<'_>> = Vec::new();
        let mut names = HashSet::new();
        let mut lines = text.lines().zip(1..).skip(1);
        let result = lines.find_map(|(line, number)| {
            if let Some(results) = line.strip_prefix("return ") {
                return Some(numbers(results, nodes.len()).context("the last line"));
            }
            let node = Node::read(line, nodes.len()).filter(|_| names.insert(name_of(line)));
            match node {
                Some(node) => nodes.push(node),
                None => return Some(Err(anyhow::anyhow!("line {number} is no node: {line}"))),
            }
            None
        });
        let results = result.context("the last line, with 'return', is missing")??;
        if let Some((line, number)) = lines.find(|(line, _)| !line.trim().is_empty()) {
            anyhow::bail!("line {number} comes after the last line of the graph: {line}");
        }
        let n_layers = nodes.iter().filter_map(|node| node.layer).max();
        let n_layers = n_layers.map_or(0, |last| last + 1);
        ensure!(
            n_layers <= nodes.len(),
            "layer {} of a graph with only {} nodes",
            n_layers.saturating_sub(1),
            nodes.len()
        );
        let words = Words {
            entries: entries(&nodes),
            nodes,
            n_layers,
            detail,
        };
        Ok(words.outline(&results))
    }
}

/// What a line says up to its type.
fn name_of(line: &str) -> &str {
    let name = line.split_once(' ').map_or(line, |(_, rest)| rest);
    name.split_once(": ").map_or(name, |(name, _)| name)
}

/// The numbers of nodes in a list such as `%3, %4`, all of them below a limit.
fn numbers(list: &str, limit: usize) -> Option<Vec<usize>> {
    let number = |text: &str| text.strip_prefix('%')?.parse().ok();
    list.split(", ")
        .map(|text| number(text).filter(|&n| n < limit))
        .collect()
}

impl<'a> Node<'a> {
    /// Node `number` of a graph, from a line such as
    /// `%4 Qproj-0: f32[1, 64] = linear(%2, w=blk.0.attn_q.weight)`.
    fn read(line: &'a str, number: usize) -> Option<Self> {
        let rest = line.strip_prefix(&format!("%{number} "))?;
        let (name, rest) = rest.split_once(": ")?;
        let (result, call) = rest.split_once(" = ")?;
        let (operation, arguments) = call.strip_suffix(')')?.split_once('(')?;
        let arguments = split_arguments(arguments);
        let is_operand = |text: &&&str| text.starts_with('%');
        let n_operands = arguments.iter().take_while(is_operand).count();
        let (operands, attributes) = arguments.split_at(n_operands);
        let operands = if operands.is_empty() {
            Vec::new()
        } else {
            numbers(&operands.join(", "), number)?
        };
        let layer = name.rsplit_once('-').and_then(|(stem, layer)| {
            let layer = layer.parse::<u32>().ok()?;
            Some((stem, layer as usize))
        });
        Some(Self {
            stem: layer.map_or(name, |(stem, _)| stem),
            layer: layer.map(|(_, layer)| layer),
            result,
            operation,
            operands,
            attributes: attributes.to_vec(),
        })
    }
}

/// The arguments of a call, split at commas outside of brackets.
fn split_arguments(text: &str) -> Vec<&str> {
    let mut arguments = Vec::new();
    let (mut depth, mut start) = (0u32, 0);
    for (at, c) in text.char_indices() {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                arguments.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    let last = text[start..].trim();
    arguments.extend(Some(last).filter(|last| !last.is_empty()));
    arguments
}

/// An operand of a node of layers: the node's stem, and which operand.
type Slot<'a> = (&'a str, usize);

/// What later layers read from the layer before them, where the first reads a node outside of
/// layers.
fn entries<'a>(nodes: &[Node<'a>]) -> HashMap<Slot<'a>, &'a str> {
    let mut entries = HashMap::new();
    for node in nodes {
        for (&operand, at) in node.operands.iter().zip(0..) {
            let from = &nodes[operand];
            if node.layer.is_some() && from.layer.map(|layer| layer + 1) == node.layer {
                entries.entry((node.stem, at)).or_insert(from.stem);
            }
        }
    }
    let is_first = |node: &&Node<'_>| node.layer == Some(0);
    let mut sources: HashMap<&str, usize> = HashMap::new();
    let mut is_unclear = false;
    for node in nodes.iter().filter(is_first) {
        for (&operand, at) in node.operands.iter().zip(0..) {
            let stem = entries.get(&(node.stem, at));
            if let Some(stem) = stem.filter(|_| nodes[operand].layer.is_none()) {
                is_unclear |= *sources.entry(stem).or_insert(operand) != operand;
            }
        }
    }
    if is_unclear {
        entries.clear();
    }
    entries
}

/// Puts nodes into words.
struct Words<'a> {
    nodes: Vec<Node<'a>>,
    n_layers: usize,
    detail: Detail,
    entries: HashMap<Slot<'a>, &'a str>,
}

impl Words<'_> {
    fn outline(&self, results: &[usize]) -> Outline {
        let mut outside = Vec::new();
        let mut layers = vec![Vec::new(); self.n_layers];
        for node in &self.nodes {
            let text = self.text(node);
            match node.layer {
                Some(layer) => layers[layer].push(text),
                None => outside.push(text),
            }
        }
        outside.extend(self.first_sources());
        let results: Vec<String> = results.iter().map(|&n| self.operand(None, n)).collect();
        outside.push(NodeText {
            name: "return".to_owned(),
            text: format!("return {}", results.join(", ")),
        });
        Outline { outside, layers }
    }

    /// What the first layer has in place of a layer before it.
    fn first_sources(&self) -> Vec<NodeText> {
        let mut texts = Vec::new();
        for node in self.nodes.iter().filter(|node| node.layer == Some(0)) {
            for (&operand, at) in node.operands.iter().zip(0..) {
                let source = &self.nodes[operand];
                if source.layer.is_none()
                    && let Some(stem) = self.entries.get(&(node.stem, at))
                {
                    let name = format!("{stem}-prev of layer 0");
                    let text = format!("{name} = {}", source.stem);
                    texts.push(NodeText { name, text });
                }
            }
        }
        texts.dedup();
        texts
    }

    fn text(&self, node: &Node<'_>) -> NodeText {
        let operands = node.operands.iter().zip(0..).map(|(&operand, at)| {
            let entry = self.entries.get(&(node.stem, at));
            let is_first = node.layer == Some(0) && self.nodes[operand].layer.is_none();
            match entry.filter(|_| is_first) {
                Some(stem) => format!("{stem}-prev"),
                None => self.operand(node.layer, operand),
            }
        });
        let attributes = node.attributes.iter();
        let attributes = attributes.filter_map(|attribute| self.attribute(node.layer, attribute));
        let arguments: Vec<String> = operands.chain(attributes).collect();
        let result = match self.detail {
            Detail::Everything => node.result,
            Detail::Structure => node.result.split('[').next().unwrap_or_default(),
        };
        let (stem, operation) = (node.stem, node.operation);
        NodeText {
            name: stem.to_owned(),
            text: format!("{stem}: {result} = {operation}({})", arguments.join(", ")),
        }
    }

    /// A node as one of `layer` names it.
    fn operand(&self, layer: Option<usize>, number: usize) -> String {
        let node = &self.nodes[number];
        let stem = node.stem;
        match (layer, node.layer) {
            (_, None) => stem.to_owned(),
            (Some(own), Some(other)) if own == other => stem.to_owned(),
            (Some(own), Some(other)) if own == other + 1 => format!("{stem}-prev"),
            (None, Some(other)) if other + 1 == self.n_layers => format!("{stem}-last"),
            (_, Some(other)) => format!("{stem}-{other}"),
        }
    }

    /// An attribute without the number of the node's own layer, and without numbers where only the
    /// structure is compared.
    fn attribute(&self, layer: Option<usize>, attribute: &str) -> Option<String> {
        let (key, value) = attribute.split_once('=').unwrap_or(("", attribute));
        if key == "layer" && layer.is_some_and(|layer| value == layer.to_string()) {
            return None;
        }
        let own = layer.map(|layer| format!("blk.{layer}."));
        if let Some(own) =
            own.filter(|own| value.starts_with(own) || value.contains(&format!(".{own}")))
        {
            return Some(attribute.replacen(&own, "blk.*.", 1));
        }
        if self.detail == Detail::Everything {
            return Some(attribute.to_owned());
        }
        let is_number = |c: char| c.is_ascii_digit() || "-+./,[]() ".contains(c);
        if value.starts_with(is_number) {
            return Some(key.to_owned());
        }
        let in_words = value.split_once('(').map_or(value, |(word, _)| word);
        Some(if key.is_empty() {
            in_words.to_owned()
        } else {
            format!("{key}={in_words}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRAPH: &str = "\
graph: 1 tokens, 1 outputs
%0 inp_embd: f32[1, 4] = embed(w=token_embd.weight)
%1 inp_visibility.0: () = visibility(part=0, window=sliding(8))
%2 norm-0: f32[1, 4] = rms_norm(%0, w=blk.0.norm.weight, eps=0.1)
%3 kqv-0: f32[1, 4] = attend(%2, %1, layer=0, heads=4/2)
%4 l_out-0: f32[1, 4] = add(%3, %0)
%5 norm-1: f32[1, 4] = rms_norm(%4, w=blk.1.norm.weight, eps=0.1)
%6 kqv-1: f32[1, 4] = attend(%5, %1, layer=1, heads=4/2)
%7 l_out-1: f32[1, 4] = add(%6, %4)
%8 result: f32[1, 9] = linear(%7, w=output.weight)
return %8
";

    fn texts(nodes: &[NodeText]) -> Vec<&str> {
        nodes.iter().map(|node| node.text.as_str()).collect()
    }

    #[test]
    fn equal_layers_have_equal_texts() {
        let outline = Outline::read(GRAPH, Detail::Everything).unwrap();
        assert_eq!(outline.layers.len(), 2);
        assert_eq!(outline.layers[0], outline.layers[1]);
        assert_eq!(
            texts(&outline.layers[1]),
            [
                "norm: f32[1, 4] = rms_norm(l_out-prev, w=blk.*.norm.weight, eps=0.1)",
                "kqv: f32[1, 4] = attend(norm, inp_visibility.0, heads=4/2)",
                "l_out: f32[1, 4] = add(kqv, l_out-prev)",
            ]
        );
        assert_eq!(
            texts(&outline.outside[2..]),
            [
                "result: f32[1, 9] = linear(l_out-last, w=output.weight)",
                "l_out-prev of layer 0 = inp_embd",
                "return result",
            ]
        );
    }

    #[test]
    fn the_structure_has_no_numbers() {
        let outline = Outline::read(GRAPH, Detail::Structure).unwrap();
        assert_eq!(
            texts(&outline.layers[0])[1],
            "kqv: f32 = attend(norm, inp_visibility.0, heads)"
        );
        assert_eq!(
            outline.outside[1].text,
            "inp_visibility.0: () = visibility(part, window=sliding)"
        );
    }

    /// What the first layer reads is not said to be what later ones read where it is two things.
    #[test]
    fn a_first_layer_that_reads_two_things_differs() {
        let two = GRAPH.replace("add(%3, %0)", "add(%3, %1)");
        let outline = Outline::read(&two, Detail::Everything).unwrap();
        assert!(texts(&outline.layers[0])[0].contains("(inp_embd, "));
        assert!(texts(&outline.layers[0])[2].contains(", inp_visibility.0)"));
    }

    #[test]
    fn what_is_no_graph_is_refused_by_its_line() {
        let cases = [
            ("%3 kqv-0", "%7 kqv-0", "line 5 is no node"),
            ("%3 kqv-0", "%3 norm-0", "line 5 is no node"),
            ("attend(%2", "attend(%3", "line 5 is no node"),
            ("return %8", "return %9", "the last line"),
            ("return %8\n", "", "'return', is missing"),
            ("return %8", "return %8\nmore", "line 12 comes after"),
            ("%8 result", "%8 result-4000000000", "with only 9 nodes"),
        ];
        for (from, to, complaint) in cases {
            let text = GRAPH.replacen(from, to, 1);
            let error = Outline::read(&text, Detail::Everything).unwrap_err();
            assert!(format!("{error:#}").contains(complaint), "{error:#}");
        }
    }
}
