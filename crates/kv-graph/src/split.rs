//! [`Graph::split`]: a graph in two, some first blocks of a model and the others, for two devices.
//!
//! Invariant: run one after the other, the halves compute what the graph computes. Each node is in
//! one of them, and an input in each that reads it; what the second half needs of the first is an
//! output of the first, and goes into the second as the rows of its embeddings. Knows no device.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use kv_core::ids::LayerIdx;

use crate::op::{Input, Op};
use crate::spec::DType;
use crate::{Graph, GraphBuilder, GraphError, GraphShape, Node, NodeId, RowCount};

/// A graph in two.
#[derive(Clone, Debug, PartialEq)]
pub struct SplitGraph {
    /// The first half: its outputs are the values that are carried over, then those of the graph
    /// that it computes. `None` where all is computed after it.
    pub first: Option<Graph>,
    /// The second half: a row of its embeddings is the carried values of a token, concatenated.
    /// `None` where nothing is left.
    pub second: Option<Graph>,
    /// Widths of the values that are carried over: a row of each for each token.
    pub carried: Vec<usize>,
    /// The place of each output of the graph.
    pub outputs: Vec<SplitOutput>,
}

/// The place of an output of a graph in two: the output's number in one half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SplitOutput {
    /// In the first half.
    First(usize),
    /// In the second half.
    Second(usize),
}

/// The place where graphs of one model are split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SplitPoint {
    /// The number of the model's blocks in the first half.
    n_first: u32,
    /// The layers of the memory whose rows and states they use. A block may have several.
    layers: BTreeSet<LayerIdx>,
}

impl SplitPoint {
    /// The point after the first `n_first` blocks of a model, of which `graph` computes all: blocks
    /// are the numbers of the scopes in which nodes were named.
    ///
    /// # Errors
    /// [`GraphError::CannotSplit`] where the graph does not compute one block after the other, or a
    /// later block uses what cannot be carried over, above all rows that an earlier one stores.
    pub fn new(graph: &Graph, n_first: u32) -> Result<Self, GraphError> {
        let nodes = graph.nodes();
        let cut = cut_by_name(nodes, n_first).unwrap_or(nodes.len());
        let used = |nodes: &[Node]| nodes.iter().filter_map(|n| n.op.used_layer()).collect();
        let (layers, later): (BTreeSet<_>, BTreeSet<_>) =
            (used(&nodes[..cut]), used(&nodes[cut..]));
        let point = Self { n_first, layers };
        let is_mixed = nodes[cut..]
            .iter()
            .any(|node| named_block(node).is_some_and(|block| block < n_first));
        if is_mixed || !point.layers.is_disjoint(&later) {
            return Err(point.refuse("the graph does not compute one block after the other"));
        }
        graph.split(&point)?;
        Ok(point)
    }

    /// The number of the model's blocks in the first half.
    pub fn n_first(&self) -> u32 {
        self.n_first
    }

    /// True if the rows and states of this layer are used by the blocks that come first.
    pub fn is_first(&self, layer: LayerIdx) -> bool {
        self.layers.contains(&layer)
    }

    /// The number of the first node of the second half.
    fn cut(&self, nodes: &[Node]) -> Option<usize> {
        let by_rows = |node: &Node| node.op.used_layer().is_some_and(|of| !self.is_first(of));
        // An encoder's blocks have numbers of their own, before it stores rows of the decoder's.
        let cuts = [
            cut_by_name(nodes, self.n_first),
            nodes.iter().position(by_rows),
            Some(nodes.len()),
        ];
        cuts.into_iter().flatten().find(|&cut| {
            let is_first = |node: &Node| node.op.used_layer().map(|of| self.is_first(of));
            let (before, after) = nodes.split_at(cut);
            before.iter().all(|n| is_first(n) != Some(false))
                && after.iter().all(|n| is_first(n) != Some(true))
        })
    }

    fn refuse(&self, reason: impl Into<String>) -> GraphError {
        GraphError::CannotSplit {
            n_first: self.n_first,
            reason: reason.into(),
        }
    }
}

impl Graph {
    /// Number of the model's blocks that the graph computes: scopes in which nodes were named.
    pub fn n_blocks(&self) -> u32 {
        let blocks = self.nodes.iter().filter_map(named_block);
        blocks.max().map_or(0, |last| last.saturating_add(1))
    }

    /// The graph in two: the blocks before the point in the first half, the others and what comes
    /// after all blocks in the second.
    ///
    /// # Errors
    /// [`GraphError::CannotSplit`] where a node of the second half uses what cannot be carried
    /// over.
    pub fn split(&self, point: &SplitPoint) -> Result<SplitGraph, GraphError> {
        match point.cut(&self.nodes) {
            Some(cut) => self.split_at(cut, point),
            None => Err(point.refuse("the graph does not compute one block after the other")),
        }
    }

    fn split_at(&self, cut: usize, point: &SplitPoint) -> Result<SplitGraph, GraphError> {
        let computes = |nodes: &[Node]| nodes.iter().any(|n| !matches!(n.op, Op::Input(_)));
        let (before, after) = self.nodes.split_at(cut);
        if !computes(before) || !computes(after) {
            let is_second = computes(after);
            let output = if is_second {
                SplitOutput::Second
            } else {
                SplitOutput::First
            };
            return Ok(SplitGraph {
                first: (!is_second).then(|| self.clone()),
                second: is_second.then(|| self.clone()),
                carried: Vec::new(),
                outputs: (0..self.outputs.len()).map(output).collect(),
            });
        }
        let carried = self.carried(cut, point)?;
        let first = self.first_half(cut, &carried)?;
        let second = self.second_half(cut, &carried)?;
        let (mut n_first, mut n_second) = (carried.len(), 0);
        let outputs = self.outputs.iter().map(|id| {
            let (half, n): (fn(usize) -> SplitOutput, _) = if id.as_usize() < cut {
                (SplitOutput::First, &mut n_first)
            } else {
                (SplitOutput::Second, &mut n_second)
            };
            *n += 1;
            half(*n - 1)
        });
        Ok(SplitGraph {
            outputs: outputs.collect(),
            carried: carried.iter().map(|&id| self.row_len(id)).collect(),
            first: Some(first),
            second: Some(second),
        })
    }

    pub(crate) fn row_len(&self, id: NodeId) -> usize {
        self.node(id).map_or(0, Node::row_len)
    }

    /// The nodes before number `cut` whose values nodes from it on read, in order.
    fn carried(&self, cut: usize, point: &SplitPoint) -> Result<Vec<NodeId>, GraphError> {
        let counts = self.row_counts();
        let mut carried: Vec<NodeId> = Vec::new();
        for user in &self.nodes[cut..] {
            for id in user.operands.iter().filter(|id| id.as_usize() < cut) {
                let id = self.carried_for(*id);
                let Some(node) = self.node(id).filter(|node| !is_shared_input(&node.op)) else {
                    continue;
                };
                let of_tokens = match &counts {
                    Some(counts) => counts[id.as_usize()] == RowCount::Tokens,
                    None => node.n_rows() == self.shape.n_tokens,
                };
                let (user, name) = (&user.name, &node.name);
                match (node.op.used_layer(), node.dtype) {
                    (Some(of), DType::None) => {
                        return Err(point.refuse(format!(
                            "'{user}' uses the rows of layer {of}, which '{name}' stores: both must \
                             be on one side"
                        )));
                    }
                    (_, DType::F32) if of_tokens => carried.push(id),
                    _ => {
                        return Err(point.refuse(format!(
                            "'{user}' needs '{name}', which is no row of f32 for each token"
                        )));
                    }
                }
            }
        }
        carried.sort_unstable();
        carried.dedup();
        Ok(carried)
    }

    /// The node whose rows are carried over where one is read: routes are computed again, of their
    /// logits.
    fn carried_for(&self, id: NodeId) -> NodeId {
        let route = self.node(id).filter(|node| is_route(&node.op));
        let logits = route.and_then(|node| node.operands.first());
        logits.copied().unwrap_or(id)
    }

    fn first_half(&self, cut: usize, carried: &[NodeId]) -> Result<Self, GraphError> {
        let mut half = Half::new(self);
        half.copy(0..cut)?;
        let own = self.outputs.iter().filter(|id| id.as_usize() < cut);
        half.finish(carried.iter().chain(own))
    }

    fn second_half(&self, cut: usize, carried: &[NodeId]) -> Result<Self, GraphError> {
        let mut half = Half::new(self);
        half.take_rows(carried)?;
        half.copy(cut..self.nodes.len())?;
        let own = self.outputs.iter().filter(|id| id.as_usize() >= cut);
        half.finish(own)
    }
}

/// A part of a graph while it is built: one half, or what another device computes.
pub(crate) struct Half<'g> {
    graph: &'g Graph,
    pub(crate) builder: GraphBuilder,
    /// By its number in the graph, which node of the half it is.
    known: HashMap<NodeId, NodeId>,
}

impl<'g> Half<'g> {
    pub(crate) fn new(graph: &'g Graph) -> Self {
        Self::with_shape(graph, graph.shape)
    }

    /// A part with other rows in and out than the graph.
    pub(crate) fn with_shape(graph: &'g Graph, shape: GraphShape) -> Self {
        Self {
            graph,
            builder: GraphBuilder::new(shape),
            known: HashMap::new(),
        }
    }

    /// Takes the values of these nodes out of the rows of its embeddings, concatenated.
    pub(crate) fn take_rows(&mut self, ids: &[NodeId]) -> Result<(), GraphError> {
        if ids.is_empty() {
            return Ok(());
        }
        let dim = ids.iter().map(|&id| self.graph.row_len(id)).sum();
        let rows = self.builder.input(Input::Embeddings { dim })?;
        self.take_columns(rows, ids)
    }

    /// The same out of the rows of a node of this part.
    pub(crate) fn take_columns(&mut self, rows: NodeId, ids: &[NodeId]) -> Result<(), GraphError> {
        let width: usize = ids.iter().map(|&id| self.graph.row_len(id)).sum();
        let mut first = 0;
        for &id in ids {
            let Some(node) = self.graph.node(id) else {
                continue;
            };
            let b = &mut self.builder;
            let columns = first..first + node.row_len();
            first = columns.end;
            let row = if columns.len() == width {
                rows
            } else {
                b.columns(&format!("{}.row", node.name), rows, columns)?
            };
            let value = match node.shape.len() {
                2 => row,
                _ => b.reshape(&format!("{}.in", node.name), row, &node.shape)?,
            };
            self.known.insert(id, value);
        }
        Ok(())
    }

    /// Adds some of the graph's nodes, and the inputs that they read.
    fn copy(&mut self, nodes: Range<usize>) -> Result<(), GraphError> {
        let ids = (0u32..).map(NodeId).zip(&self.graph.nodes);
        for (id, node) in ids.skip(nodes.start).take(nodes.len()) {
            if matches!(node.op, Op::Input(_)) {
                continue;
            }
            self.copy_one(id, node)?;
        }
        Ok(())
    }

    pub(crate) fn copy_one(&mut self, id: NodeId, node: &Node) -> Result<NodeId, GraphError> {
        let operands = node.operands.iter().map(|&id| self.own(id));
        let operands: Vec<NodeId> = operands.collect::<Result<_, _>>()?;
        let own = self.builder.copy_node(self.graph, node, &operands)?;
        self.known.insert(id, own);
        Ok(own)
    }

    /// A node of the graph in this half; an input, or a route, comes with its first use.
    pub(crate) fn own(&mut self, id: NodeId) -> Result<NodeId, GraphError> {
        if let Some(&own) = self.known.get(&id) {
            return Ok(own);
        }
        match self.graph.node(id).map(|node| (node, &node.op)) {
            Some((_, &Op::Input(input))) => self.builder.input(input),
            Some((node, op)) if is_route(op) => self.copy_one(id, node),
            _ => Err(GraphError::UnknownOperand {
                node: "half".to_owned(),
                operand: id,
            }),
        }
    }

    pub(crate) fn finish<'a>(
        mut self,
        outputs: impl Iterator<Item = &'a NodeId>,
    ) -> Result<Graph, GraphError> {
        let outputs = outputs.map(|&id| self.own(id));
        let outputs: Vec<NodeId> = outputs.collect::<Result<_, _>>()?;
        self.builder.finish(&outputs)
    }
}

/// True if both halves can read it. Embeddings of the graph are those of the first half alone: the
/// second has its own.
fn is_shared_input(op: &Op) -> bool {
    matches!(op, Op::Input(input) if !matches!(input, Input::Embeddings { .. }))
}

fn is_route(op: &Op) -> bool {
    matches!(op, Op::Route { .. })
}

/// The block in whose scope a node was named.
fn named_block(node: &Node) -> Option<u32> {
    node.name.rsplit_once('-')?.1.parse().ok()
}

/// The first node of a block that does not come first.
fn cut_by_name(nodes: &[Node], n_first: u32) -> Option<usize> {
    let is_later = |node: &Node| named_block(node).is_some_and(|block| block >= n_first);
    nodes.iter().position(is_later)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AttendSpec;
    use kv_core::ids::PartIdx;
    use kv_core::window::Window;

    const DIM: usize = 4;

    /// Blocks that attend over the rows of these layers, which those store that are named first.
    fn graph(rows_of: &[u32]) -> Graph {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 2,
        });
        let (part, window) = (PartIdx(0), Window::Full);
        let tokens = b.input(Input::Tokens).unwrap();
        let cells = b.input(Input::Cells { part }).unwrap();
        let sees = b.input(Input::Visibility { part, window }).unwrap();
        let mut x = b.embed("inp_embd", tokens, "token_embd", [9, DIM]).unwrap();
        for (block, &of) in (0u32..).zip(rows_of) {
            let mut b = b.scope(LayerIdx(block));
            let heads = b.reshape("heads", x, &[3, 1, DIM]).unwrap();
            let stored = if of == block {
                b.store_k("stored", LayerIdx(of), [heads, cells])
            } else {
                b.stored(LayerIdx(of))
            };
            let spec = AttendSpec {
                n_heads: 1,
                kv_heads: 1,
                k_dim: DIM,
                v_dim: DIM,
                scale: 0.5,
                soft_cap: None,
                alibi: None,
            };
            let operands = [heads, stored.unwrap(), sees];
            let seen = b.attend("attn", LayerIdx(block), spec, operands).unwrap();
            x = b.add("l_out", x, seen).unwrap();
        }
        let rows = b.input(Input::OutputRows).unwrap();
        let last = b.take_rows("result", x, rows).unwrap();
        b.finish(&[x, last]).unwrap()
    }

    #[test]
    fn the_second_half_takes_what_the_first_gives() {
        let graph = graph(&[0, 1, 2]);
        assert_eq!(graph.n_blocks(), 3);
        let point = SplitPoint::new(&graph, 2).unwrap();
        assert!(point.is_first(LayerIdx(1)) && !point.is_first(LayerIdx(2)));
        assert_eq!(point.n_first(), 2);
        let split = graph.split(&point).unwrap();
        let (first, second) = (split.first.unwrap(), split.second.unwrap());
        assert_eq!(split.carried, [DIM]);
        assert_eq!(
            split.outputs,
            [SplitOutput::Second(0), SplitOutput::Second(1)]
        );
        insta::assert_snapshot!(format!("{}\n{}", first.text(), second.text()));
    }

    #[test]
    fn where_nothing_is_on_one_side_the_other_is_the_graph() {
        let graph = graph(&[0, 1]);
        let point = SplitPoint::new(&graph, 2).unwrap();
        let split = graph.split(&point).unwrap();
        assert_eq!((split.second, split.carried.len()), (None, 0));
        assert_eq!(
            split.outputs,
            [SplitOutput::First(0), SplitOutput::First(1)]
        );
        assert_eq!(split.first.as_ref(), Some(&graph));
    }

    #[test]
    fn rows_are_used_where_they_are_stored() {
        let graph = graph(&[0, 1, 1, 3]);
        for n_first in [1, 3] {
            assert!(SplitPoint::new(&graph, n_first).is_ok(), "{n_first}");
        }
        assert_eq!(
            SplitPoint::new(&graph, 2).unwrap_err().to_string(),
            "the graph cannot be split after 2 blocks: 'attn-2' uses the rows of layer 1, which \
             'stored-1' stores: both must be on one side"
        );
    }

    #[test]
    fn several_values_are_carried_as_columns_in_their_order() {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 3,
        });
        let tokens = b.input(Input::Tokens).unwrap();
        let wide = b.embed("wide", tokens, "wide", [9, 6]).unwrap();
        let x = b.embed("x", tokens, "x", [9, DIM]).unwrap();
        let mut scope = b.scope(LayerIdx(0));
        let early = scope.linear("early", x, "w0", DIM).unwrap();
        drop(scope);
        let mut scope = b.scope(LayerIdx(1));
        // Reads them in another order than that in which they were computed.
        let y = scope.linear("y", early, "w1", 6).unwrap();
        let sum = scope.add("sum", y, wide).unwrap();
        drop(scope);
        let graph = b.finish(&[early, y, wide, sum]).unwrap();
        let point = SplitPoint::new(&graph, 1).unwrap();
        let split = graph.split(&point).unwrap();
        assert_eq!(split.carried, [6, DIM]);
        use SplitOutput::{First, Second};
        assert_eq!(split.outputs, [First(2), Second(0), First(3), Second(1)]);
        let (first, second) = (split.first.unwrap(), split.second.unwrap());
        assert_eq!((first.outputs().len(), second.outputs().len()), (4, 2));
        let text = second.text().to_string();
        for columns in ["wide.row: f32[3, 6] = columns(%0, first=0)", "first=6)"] {
            assert!(text.contains(columns), "{text}");
        }
    }

    #[test]
    fn blocks_that_go_on_after_a_later_one_began_are_refused() {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 3,
        });
        let mut x = b.input(Input::Embeddings { dim: DIM }).unwrap();
        for (number, block) in [0, 1, 0].into_iter().enumerate() {
            let mut b = b.scope(LayerIdx(block));
            x = b.linear(&format!("x{number}"), x, "w", DIM).unwrap();
        }
        let graph = b.finish(&[x]).unwrap();
        let refused = SplitPoint::new(&graph, 1).unwrap_err().to_string();
        assert!(refused.contains("one block after the other"), "{refused}");
    }

    #[test]
    fn only_rows_of_tokens_are_carried() {
        let split = |carries_outputs: bool| {
            // As many outputs as tokens: shapes do not tell them apart.
            let mut b = GraphBuilder::new(GraphShape {
                n_tokens: 3,
                n_outputs: 3,
            });
            let x = b.input(Input::Embeddings { dim: DIM }).unwrap();
            let rows = b.input(Input::OutputRows).unwrap();
            let mut scope = b.scope(LayerIdx(0));
            let y = scope.linear("y", x, "w0", DIM).unwrap();
            let taken = scope.take_rows("taken", y, rows).unwrap();
            drop(scope);
            let mut scope = b.scope(LayerIdx(1));
            let z = if carries_outputs {
                scope.linear("z", taken, "w1", DIM)
            } else {
                // A sum of both kinds: then shapes decide.
                scope.add("z", y, taken)
            };
            drop(scope);
            let graph = b.finish(&[z.unwrap()]).unwrap();
            SplitPoint::new(&graph, 1)
        };
        let refused = split(true).unwrap_err().to_string();
        let reason = "'z-1' needs 'taken-0', which is no row of f32 for each token";
        assert!(refused.ends_with(reason), "{refused}");
        assert!(split(false).is_ok());
    }

    /// Blocks of an encoder have numbers of their own: what it stores for the decoder decides.
    #[test]
    fn an_encoder_is_split_by_the_rows_that_it_stores() {
        let decoder = graph(&[0, 1]);
        let point = SplitPoint::new(&decoder, 1).unwrap();
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 0,
        });
        let mut x = b.input(Input::Embeddings { dim: DIM }).unwrap();
        for block in 0..3 {
            let mut b = b.scope(LayerIdx(block));
            x = b.linear("x", x, "w", DIM).unwrap();
        }
        let cells = b.input(Input::Cells { part: PartIdx(1) }).unwrap();
        let heads = b.reshape("heads", x, &[3, 1, DIM]).unwrap();
        for layer in [0, 1] {
            let name = format!("stored.{layer}");
            b.store_kv(&name, LayerIdx(layer), [heads, heads, cells])
                .unwrap();
        }
        let split = b.finish(&[]).unwrap().split(&point).unwrap();
        let stored = |half: Graph| {
            let layers = half.nodes().iter().filter_map(|n| n.op.used_layer());
            layers.collect::<Vec<_>>()
        };
        assert_eq!(stored(split.first.unwrap()), [LayerIdx(0)]);
        assert_eq!(stored(split.second.unwrap()), [LayerIdx(1)]);
        assert_eq!(split.carried, [DIM]);
    }
}
