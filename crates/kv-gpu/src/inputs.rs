//! [`InputPlan`]: where the inputs of a run are in the one block of words that it uploads.
//!
//! A block has a part of fixed size, whose places kernels are given, and the tables of visibilities
//! and states after it, whose places are in headers in the fixed part. Invariant: the fixed part
//! depends on the graph alone, so launches can be recorded. Angles of rotations are computed here,
//! in `f64`, once for all layers.

use kv_backend::BackendError;
use kv_backend::GraphInputs;
use kv_backend::checks::{batch_visibility, operand, part_inputs, window_of};
use kv_core::{PartIdx, Visibility, Window};
use kv_graph::rope::{RopeSections, RopeSpec};
use kv_graph::{Graph, Input, Node, NodeId, Op};

use crate::kernels::word;
use crate::state_table;
use crate::visibility_table::{self, PieceCounts, PieceLimits};

/// Tables begin at multiples of this many words.
const ALIGN: usize = 4;

/// The places of all inputs, in words.
#[derive(Debug)]
pub(crate) struct InputPlan {
    /// Inputs whose values kernels read, by node.
    values: Vec<(NodeId, Input, usize)>,
    pub(crate) rotations: Vec<Angles>,
    seen: Vec<SeenRows>,
    /// The header of the states.
    states: Option<usize>,
    /// Words of the fixed part.
    len: usize,
    limits: PieceLimits,
}

/// The angles of one rotation: `cos [n, pairs]`, then `sin [n, pairs]`.
#[derive(Debug)]
pub(crate) struct Angles {
    pub(crate) rope: RopeSpec,
    pub(crate) sections: Option<RopeSections>,
    positions: NodeId,
    frequencies: Vec<f64>,
    /// Their first word.
    pub(crate) at: usize,
    n_rows: usize,
}

/// The owner of a visibility.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VisibilitySource {
    Part(PartIdx, Window),
    Batch(Window),
}

#[derive(Debug)]
struct SeenRows {
    by: VisibilitySource,
    /// A node that has it as an operand, and which.
    user: (NodeId, usize),
    header: usize,
}

/// The dependencies of the grids of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RunCounts {
    /// By visibility.
    pub(crate) pieces: Vec<PieceCounts>,
    pub(crate) n_chains: u32,
}

impl RunCounts {
    /// The same, rounded up to powers of two: what recorded grids are for.
    pub(crate) fn rounded(&self) -> Self {
        let up = |n: u32| match n {
            0 => 0,
            n => n.next_power_of_two(),
        };
        let pieces = self.pieces.iter().map(|p| PieceCounts {
            few: up(p.few),
            many: up(p.many),
        });
        Self {
            pieces: pieces.collect(),
            n_chains: up(self.n_chains),
        }
    }
}

impl InputPlan {
    /// The plan for the input nodes of `graph`.
    pub(crate) fn new(graph: &Graph) -> Self {
        let mut plan = Self {
            values: Vec::new(),
            rotations: Vec::new(),
            seen: Vec::new(),
            states: None,
            len: 0,
            limits: PieceLimits::of(graph.shape().n_tokens),
        };
        for (id, node) in numbered(graph) {
            match node.op {
                Op::Input(Input::States) if plan.states.is_none() => {
                    plan.states = Some(plan.take(state_table::HEADER_WORDS));
                }
                Op::Input(
                    Input::Visibility { .. } | Input::BatchVisibility { .. } | Input::States,
                ) => {}
                Op::Input(input) => {
                    let at = plan.take(node.n_values());
                    plan.values.push((id, input, at));
                }
                _ => {}
            }
        }
        plan
    }

    fn take(&mut self, words: usize) -> usize {
        let at = self.len;
        self.len = (at + words).next_multiple_of(ALIGN);
        at
    }

    /// Slots for partial results of attention.
    pub(crate) fn slots(&self, n_rows: usize) -> usize {
        self.limits.slots(n_rows)
    }

    /// Bytes of the fixed part.
    pub(crate) fn fixed_bytes(&self) -> usize {
        self.len * size_of::<u32>()
    }

    /// The first word of an input's values.
    pub(crate) fn value(&self, id: NodeId) -> Option<usize> {
        let found = self.values.iter().find(|(node, ..)| *node == id);
        found.map(|&(_, _, at)| at)
    }

    /// The header of the states' tables.
    pub(crate) fn states(&self) -> Option<usize> {
        self.states
    }

    /// Number and header of the visibility that operand `at` of a node is.
    ///
    /// # Errors
    /// [`BackendError::Input`] where it is none, which no builder lets pass.
    pub(crate) fn visibility(
        &mut self,
        graph: &Graph,
        (id, node): NumberedNode<'_>,
        at: usize,
    ) -> Result<(usize, u32), BackendError> {
        let by = match operand(graph, node, at)?.op {
            Op::Input(Input::BatchVisibility { window }) => VisibilitySource::Batch(window),
            _ => {
                let (part, window) = window_of(graph, node, at)?;
                VisibilitySource::Part(part, window)
            }
        };
        if let Some(number) = self.seen.iter().position(|seen| seen.by == by) {
            return Ok((number, word(self.seen[number].header)?));
        }
        let header = self.take(visibility_table::HEADER_WORDS);
        let user = (id, at);
        self.seen.push(SeenRows { by, user, header });
        Ok((self.seen.len() - 1, word(header)?))
    }

    /// The angles of a rotation whose positions are operand 1 of `node`. `factors` are the values
    /// of the rotation's weight.
    ///
    /// # Errors
    /// [`BackendError::Input`] where the node has no such operand, which no builder lets pass.
    pub(crate) fn angles(
        &mut self,
        node: &Node,
        (rope, sections): (&RopeSpec, Option<RopeSections>),
        factors: Option<&[f32]>,
    ) -> Result<&Angles, BackendError> {
        let positions = node.operands.get(1).copied();
        let positions = positions.ok_or_else(|| BackendError::Input {
            input: "graph",
            reason: format!("node '{}' has no positions", node.name),
        })?;
        let is_it = |a: &Angles| (&a.rope, a.sections, a.positions) == (rope, sections, positions);
        if let Some(known) = self.rotations.iter().position(is_it) {
            return Ok(&self.rotations[known]);
        }
        let frequencies = rope.frequencies(factors);
        let n_rows = node.n_rows();
        let at = self.take(2 * n_rows * frequencies.len());
        self.rotations.push(Angles {
            rope: rope.clone(),
            sections,
            positions,
            frequencies,
            at,
            n_rows,
        });
        Ok(&self.rotations[self.rotations.len() - 1])
    }

    /// Writes the block of a run, whose inputs were checked.
    ///
    /// # Errors
    /// [`BackendError::Input`].
    pub(crate) fn write(
        &self,
        graph: &Graph,
        inputs: &GraphInputs<'_>,
        words: &mut Vec<u32>,
    ) -> Result<RunCounts, BackendError> {
        words.clear();
        words.resize(self.len, 0);
        for &(_, input, at) in &self.values {
            let to = words.get_mut(at..).unwrap_or_default();
            match input {
                Input::Tokens => fill(to, inputs.tokens),
                Input::Positions => fill(to, inputs.positions),
                Input::OutputRows => fill(to, inputs.output_rows),
                Input::Coordinates => fill(to, inputs.coordinates.as_flattened()),
                Input::Embeddings { .. } => fill(to, bytemuck::cast_slice(inputs.embeddings)),
                Input::Cells { part } => {
                    let cells = &part_inputs(inputs, part)?.cells;
                    to.iter_mut().zip(cells).for_each(|(to, cell)| *to = cell.0);
                }
                Input::TokenTypes => fill(to, inputs.token_types),
                Input::Visibility { .. } | Input::BatchVisibility { .. } | Input::States => {}
            }
        }
        for angles in &self.rotations {
            angles.write(graph, inputs, words);
        }
        let mut counts = RunCounts::default();
        for seen in &self.seen {
            let visibility = seen.find(graph, inputs)?;
            let pieces = visibility_table::write(visibility, self.limits, words, seen.header);
            counts.pieces.push(pieces);
        }
        if let Some(header) = self.states {
            counts.n_chains = state_table::write(inputs.states, words, header);
        }
        Ok(counts)
    }
}

impl SeenRows {
    fn find<'a>(
        &self,
        graph: &Graph,
        inputs: &GraphInputs<'a>,
    ) -> Result<&'a Visibility, BackendError> {
        match (self.by, graph.node(self.user.0)) {
            (VisibilitySource::Batch(_), Some(user)) => {
                batch_visibility(graph, user, self.user.1, inputs)
            }
            (VisibilitySource::Part(part, window), _) => {
                Ok(part_inputs(inputs, part)?.seen(window))
            }
            (VisibilitySource::Batch(window), None) => Err(BackendError::Input {
                input: "batch",
                reason: format!("the graph has no user of the window {window}"),
            }),
        }
    }
}

impl Angles {
    fn write(&self, graph: &Graph, inputs: &GraphInputs<'_>, words: &mut [u32]) {
        let n_pairs = self.frequencies.len();
        let len = 2 * self.n_rows * n_pairs;
        let Some(to) = words
            .get_mut(self.at..self.at + len)
            .filter(|to| !to.is_empty())
        else {
            return;
        };
        let (cos, sin) = to.split_at_mut(len / 2);
        let (cos, sin): (&mut [f32], &mut [f32]) =
            (bytemuck::cast_slice_mut(cos), bytemuck::cast_slice_mut(sin));
        let rows = cos
            .chunks_exact_mut(n_pairs)
            .zip(sin.chunks_exact_mut(n_pairs));
        let input = graph.node(self.positions).map(|node| &node.op);
        let list = match input {
            Some(Op::Input(Input::Tokens)) => inputs.tokens,
            Some(Op::Input(Input::OutputRows)) => inputs.output_rows,
            _ => inputs.positions,
        };
        let coordinates = matches!(input, Some(Op::Input(Input::Coordinates)));
        for (row, (cos, sin)) in rows.enumerate() {
            let at = if coordinates {
                inputs.coordinates.get(row).copied().unwrap_or_default()
            } else {
                [list.get(row).copied().unwrap_or_default(); 3]
            };
            match &self.sections {
                Some(sections) => {
                    self.rope
                        .section_angles(&self.frequencies, sections, at, cos, sin);
                }
                None => self.rope.angles(&self.frequencies, at[0], cos, sin),
            }
        }
    }
}

fn fill(to: &mut [u32], from: &[u32]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
}

/// A node with its number.
pub(crate) type NumberedNode<'a> = (NodeId, &'a Node);

/// The nodes of a graph with their numbers.
pub(crate) fn numbered(graph: &Graph) -> impl Iterator<Item = NumberedNode<'_>> {
    (0..).map(NodeId).zip(graph.nodes())
}

/// The same of those after node `id`.
pub(crate) fn after(graph: &Graph, id: NodeId) -> impl Iterator<Item = NumberedNode<'_>> {
    let nodes = graph.nodes().get(id.as_usize() + 1..).unwrap_or_default();
    (id.0 + 1..).map(NodeId).zip(nodes)
}
