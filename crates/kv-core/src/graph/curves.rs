//! Builder's nodes for norms and elementwise functions that some architectures have.
//!
//! Knows nothing of architectures.

use serde::{Deserialize, Serialize};

use super::NodeId;
use super::builder::{GraphBuilder, GraphError};
use super::op::{DType, Op};

/// A factor that grows with the position: `1 + strength * ln(1 + floor((pos + 1) / every))`, which
/// keeps attention sharp over long contexts (Llama 4; Nakanishi, arXiv 2501.19399).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PositionScale {
    /// After how many positions it grows.
    pub every: u32,
    /// How much.
    pub strength: f32,
}

impl PositionScale {
    /// The factor at a position.
    pub fn at(&self, position: u32) -> f32 {
        let steps = (u64::from(position) + 1) / u64::from(self.every.max(1));
        (1.0 + f64::from(self.strength) * (1.0 + steps as f64).ln()) as f32
    }
}

impl GraphBuilder {
    /// Layer norm over the last dimension, with weights `(gain [dim], bias [dim])`.
    ///
    /// # Errors
    /// [`GraphError`] where `x` has no dimension.
    pub fn layer_norm(
        &mut self,
        name: &str,
        x: NodeId,
        (weight, bias): (&str, Option<&str>),
        eps: f32,
    ) -> Result<NodeId, GraphError> {
        let op = Op::LayerNorm {
            weight: weight.to_owned(),
            bias: bias.map(str::to_owned),
            eps,
        };
        let shape = self.shape_of(x).to_vec();
        let Some(&dim) = shape.last() else {
            return Err(self.misfit(name, &op, "[.., dim]", &[x]));
        };
        for weight in std::iter::once(weight).chain(bias) {
            self.declare(weight, &[dim])?;
        }
        self.push(name, op, vec![x], (shape, DType::F32))
    }

    /// Every row of `x [n, dim]` plus the `row`-th of `n_rows` rows of a weight.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where `x` is no matrix, or the weight has no such row.
    pub fn add_row(
        &mut self,
        name: &str,
        x: NodeId,
        (weight, n_rows): (&str, usize),
        row: usize,
    ) -> Result<NodeId, GraphError> {
        let op = Op::AddRow {
            weight: weight.to_owned(),
            row,
        };
        let shape = self.shape_of(x).to_vec();
        match *shape {
            [_, dim] if row < n_rows => self.declare(weight, &[n_rows, dim])?,
            _ => {
                let wanted = format!("[n, dim] and a row below {n_rows} (it is {row})");
                return Err(self.misfit(name, &op, &wanted, &[x]));
            }
        }
        self.push(name, op, vec![x], (shape, DType::F32))
    }

    /// `cap * tanh(x / cap)`.
    ///
    /// # Errors
    /// [`GraphError`] as for every node.
    pub fn soft_cap(&mut self, name: &str, x: NodeId, cap: f32) -> Result<NodeId, GraphError> {
        let shape = self.shape_of(x).to_vec();
        self.push(name, Op::SoftCap { cap }, vec![x], (shape, DType::F32))
    }

    /// The clamped gate of gpt-oss; see [`Op::ClampedGate`].
    ///
    /// # Errors
    /// [`GraphError::Shape`] where the shapes differ.
    pub fn clamped_gate(
        &mut self,
        name: &str,
        (slope, limit): (f32, f32),
        [gate, up]: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        let op = Op::ClampedGate { slope, limit };
        let shape = self.shape_of(gate).to_vec();
        if shape != self.shape_of(up) {
            return Err(self.misfit(name, &op, "two equal shapes", &[gate, up]));
        }
        self.push(name, op, vec![gate, up], (shape, DType::F32))
    }

    /// Every row of `x [tokens, ..]` times a factor of its position.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where there is not one position for each row.
    pub fn scale_by_position(
        &mut self,
        name: &str,
        scale: PositionScale,
        [x, positions]: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        let op = Op::ScaleByPosition { scale };
        let shape = self.shape_of(x).to_vec();
        if shape
            .first()
            .is_none_or(|&n| self.shape_of(positions) != [n])
        {
            return Err(self.misfit(name, &op, "[tokens, ..], [tokens]", &[x, positions]));
        }
        self.push(name, op, vec![x, positions], (shape, DType::F32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Graph, GraphShape, Input};

    #[test]
    fn the_factor_grows_in_steps() {
        let scale = PositionScale {
            every: 8,
            strength: 0.5,
        };
        assert_eq!(scale.at(0), 1.0);
        assert_eq!(scale.at(6), 1.0);
        assert_eq!(scale.at(7), 1.0 + 0.5 * 2f32.ln());
        assert_eq!(scale.at(14), scale.at(7));
        assert_eq!(
            scale.at(u32::MAX),
            (1.0 + 0.5 * (1.0 + 2f64.powi(29)).ln()) as f32
        );
    }

    #[test]
    fn nodes_fit_their_operands_and_survive_json() {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 1,
        });
        let x = b.input(Input::Embeddings { dim: 4 }).unwrap();
        let positions = b.input(Input::Positions).unwrap();
        let scale = PositionScale {
            every: 8192,
            strength: 0.1,
        };
        let narrow = b.columns("narrow", x, 0..2).unwrap();
        let wanted = b.input(Input::OutputRows).unwrap();
        let refused = [
            b.clamped_gate("bad", (1.0, 7.0), [x, narrow]),
            b.scale_by_position("bad", scale, [x, wanted]),
            b.add_row("bad", x, ("types", 2), 2),
            b.add_row("bad", positions, ("types", 2), 0),
        ];
        for refused in refused {
            assert!(
                matches!(refused, Err(GraphError::Shape { .. })),
                "{refused:?}"
            );
        }
        let y = b.layer_norm("norm", x, ("w", Some("b")), 1e-5).unwrap();
        let y = b.clamped_gate("gate", (1.702, 7.0), [y, x]).unwrap();
        let y = b.scale_by_position("sharp", scale, [y, positions]).unwrap();
        let y = b.soft_cap("cap", y, 30.0).unwrap();
        let y = b.add_row("type", y, ("types", 2), 1).unwrap();
        let graph = b.finish(&[y]).unwrap();
        let text = graph.text().to_string();
        for line in [
            "layer_norm(%0, w=w, b=b, eps=0.00001)",
            "clamped_gate(%4, %0, slope=1.702, limit=7)",
            "scale_by_position(%5, %1, every=8192, strength=0.1)",
            "soft_cap(%6, cap=30)",
            "add_row(%7, w=types, row=1)",
        ] {
            assert!(text.contains(line), "{text}");
        }
        assert_eq!(Graph::from_json(&graph.to_json().unwrap()), Ok(graph));
    }
}
