//! [`ClippedMatrices`]: matrices whose inputs and outputs are kept within bounds (Gemma 4).
//!
//! A graph can keep values within equal distances of 0. So bounds around another middle come as
//! three steps: the middle is taken off, values are bounded, and the middle is added again.
//! Invariant: a node keeps its name; what is before and behind it has that name with an ending.
//! Knows no file.

use std::collections::BTreeMap;

use kv_graph::weights::{MemoryWeights, WeightError};
use kv_graph::{Graph, GraphBuilder, GraphError, NodeId, Op, TableRow};

/// The smallest and the largest value that passes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Bounds {
    pub(crate) least: f32,
    pub(crate) most: f32,
}

impl Bounds {
    fn middle(self) -> f32 {
        self.least.midpoint(self.most)
    }

    fn reach(self) -> f32 {
        (self.most - self.least) / 2.0
    }
}

/// The bounds of what goes into a matrix, and of what comes out.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct MatrixBounds {
    pub(crate) input: Option<Bounds>,
    pub(crate) output: Option<Bounds>,
}

/// Matrices by their names, with their bounds.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ClippedMatrices(pub(crate) BTreeMap<String, MatrixBounds>);

impl ClippedMatrices {
    /// The same computation with bounds around these matrices.
    ///
    /// # Errors
    /// [`GraphError`] where a name is taken.
    pub(crate) fn applied(&self, graph: Graph) -> Result<Graph, GraphError> {
        if self.0.is_empty() {
            return Ok(graph);
        }
        let mut b = GraphBuilder::new(graph.shape());
        let mut moved: Vec<NodeId> = Vec::with_capacity(graph.nodes().len());
        for node in graph.nodes() {
            let to = |id: &NodeId| moved.get(id.as_usize()).copied().unwrap_or(*id);
            let mut operands: Vec<NodeId> = node.operands.iter().map(to).collect();
            let clipped = match &node.op {
                Op::Linear { weight, .. } => self.0.get_key_value(weight),
                _ => None,
            };
            if let (
                Some((
                    weight,
                    MatrixBounds {
                        input: Some(input), ..
                    },
                )),
                [x],
            ) = (clipped, operands.as_mut_slice())
            {
                *x = within(&mut b, [&node.name, weight, "input"], *x, *input)?;
            }
            let mut id = b.copy_node(&graph, node, &operands)?;
            if let Some((
                weight,
                MatrixBounds {
                    output: Some(output),
                    ..
                },
            )) = clipped
            {
                id = within(&mut b, [&node.name, weight, "output"], id, *output)?;
            }
            moved.push(id);
        }
        let outputs = graph.outputs().iter();
        let outputs: Vec<NodeId> = outputs
            .filter_map(|id| moved.get(id.as_usize()).copied())
            .collect();
        b.finish(&outputs)
    }

    /// Adds the tensors that [`ClippedMatrices::applied`] names, for matrices of these rows and
    /// columns.
    ///
    /// # Errors
    /// [`WeightError`] where one is too large.
    pub(crate) fn add_middles(
        &self,
        sizes: impl Fn(&str) -> [usize; 2],
        made: &mut MemoryWeights,
    ) -> Result<(), WeightError> {
        for (weight, bounds) in &self.0 {
            let [n_out, n_in] = sizes(weight);
            for (side, bounds, width) in [
                ("input", bounds.input, n_in),
                ("output", bounds.output, n_out),
            ] {
                let Some(middle) = bounds.map(Bounds::middle).filter(|&middle| middle != 0.0)
                else {
                    continue;
                };
                let rows = [vec![-middle; width], vec![middle; width]].concat();
                made.insert_f32(&middles(weight, side), &[2, width], &rows)?;
            }
        }
        Ok(())
    }
}

/// The name of the middle of bounds, and of the same with another sign before it.
fn middles(weight: &str, side: &str) -> String {
    format!("{weight}.{side}_middle")
}

/// The values `x` within bounds: those of this side of the matrix of a node.
fn within(
    b: &mut GraphBuilder,
    [node, weight, side]: [&str; 3],
    x: NodeId,
    bounds: Bounds,
) -> Result<NodeId, GraphError> {
    let name = |what: &str| format!("{node}.{side}_{what}");
    if bounds.middle() == 0.0 {
        return b.clamp(&name("clipped"), x, bounds.reach());
    }
    let table = middles(weight, side);
    let row = |row| TableRow {
        weight: &table,
        row,
        n_rows: 2,
    };
    let x = b.add_row(&name("centred"), x, row(0))?;
    let x = b.clamp(&name("bounded"), x, bounds.reach())?;
    b.add_row(&name("clipped"), x, row(1))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use kv_graph::weights::WeightSource as _;
    use kv_graph::{GraphShape, Input};

    use super::*;

    #[test]
    fn bounds_stand_around_their_matrix() {
        let shape = GraphShape {
            n_tokens: 3,
            n_outputs: 3,
        };
        let mut b = GraphBuilder::new(shape);
        let x = b.input(Input::Embeddings { dim: 4 }).unwrap();
        let y = b.linear("y", x, "m.weight", 2).unwrap();
        let z = b.linear("z", y, "n.weight", 5).unwrap();
        let graph = b.finish(&[z]).unwrap();
        let (even, odd) = (
            Bounds {
                least: -1.0,
                most: 1.0,
            },
            Bounds {
                least: -1.0,
                most: 3.0,
            },
        );
        let bounds = MatrixBounds {
            input: Some(even),
            output: Some(odd),
        };
        let clipped = ClippedMatrices(BTreeMap::from([("m.weight".to_owned(), bounds)]));
        let applied = clipped.applied(graph.clone()).unwrap();
        let names: Vec<&str> = applied.nodes().iter().map(|node| &*node.name).collect();
        let around = [
            "y.input_clipped",
            "y",
            "y.output_centred",
            "y.output_bounded",
            "y.output_clipped",
            "z",
        ];
        assert_eq!(names[1..], around);
        // What follows takes what passed.
        assert_eq!(applied.nodes()[6].operands, [NodeId(5)]);
        let mut made = MemoryWeights::new();
        clipped.add_middles(|_| [2, 4], &mut made).unwrap();
        assert_eq!(made.names(), ["m.weight.output_middle"]);
        let middle = made.get("m.weight.output_middle").unwrap();
        assert_eq!(middle.to_f32(), [-1.0, -1.0, 1.0, 1.0]);
        assert_eq!(
            ClippedMatrices::default().applied(graph.clone()).unwrap(),
            graph
        );
    }
}
