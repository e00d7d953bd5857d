//! Elementwise operations, and factors by position.

use serde::{Deserialize, Serialize};

use crate::op::{Activation, Op};
use crate::spec::{OpContext, OpResult, OpSpec};
use crate::{Claim, GraphBuilder, GraphError, NodeId};

/// A factor that grows with the position: `1 + strength * ln(1 + floor((pos + offset) / every))`,
/// which keeps attention sharp over long contexts (Llama 4; Nakanishi, arXiv 2501.19399).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PositionScale {
    /// After how many positions it grows.
    pub every: u32,
    /// The strength of the change.
    pub strength: f32,
    /// The number of the first position: 1 (Llama 4) or 0 (Ministral 3).
    #[serde(default = "first_counts", skip_serializing_if = "counts_first")]
    pub offset: u32,
}

const fn first_counts() -> u32 {
    1
}

fn counts_first(offset: &u32) -> bool {
    *offset == first_counts()
}

impl PositionScale {
    /// The factor at a position.
    pub fn at(&self, position: u32) -> f32 {
        let steps = (u64::from(position) + u64::from(self.offset)) / u64::from(self.every.max(1));
        (1.0 + f64::from(self.strength) * (1.0 + steps as f64).ln()) as f32
    }
}

/// The gate of gpt-oss: see [`Op::ClampedGate`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClampedGate {
    /// Factor on the gate inside of the sigmoid.
    pub slope: f32,
    /// Bound of gate and `up`.
    pub limit: f32,
}

/// The shape of the one operand.
fn same_shape(given: &OpContext<'_>) -> Result<OpResult, String> {
    Ok(OpResult::f32(given.shape(0)))
}

/// The shape of both operands.
fn equal_shapes(given: &OpContext<'_>) -> Result<OpResult, String> {
    let [a, b] = given.shapes();
    if a == b {
        Ok(OpResult::f32(a))
    } else {
        Err("two equal shapes".into())
    }
}

pub(crate) fn add<'a>() -> OpSpec<'a> {
    OpSpec::new("add", 2, equal_shapes)
}

pub(crate) fn mul<'a>() -> OpSpec<'a> {
    OpSpec::new("mul", 2, equal_shapes)
}

pub(crate) fn scale<'a>(factor: f32) -> OpSpec<'a> {
    OpSpec::new("scale", 1, same_shape).setting("factor", factor)
}

pub(crate) fn gate<'a>(activation: Activation) -> OpSpec<'a> {
    OpSpec::new("gate", 2, equal_shapes).setting("activation", activation)
}

pub(crate) fn activate<'a>(activation: Activation) -> OpSpec<'a> {
    OpSpec::new("activate", 1, same_shape).setting("activation", activation)
}

pub(crate) fn soft_cap<'a>(cap: f32) -> OpSpec<'a> {
    OpSpec::new("soft_cap", 1, same_shape).setting("cap", cap)
}

pub(crate) fn clamp<'a>(limit: f32) -> OpSpec<'a> {
    OpSpec::new("clamp", 1, same_shape).setting("limit", limit)
}

pub(crate) fn clamped_gate<'a>(slope: f32, limit: f32) -> OpSpec<'a> {
    let spec = OpSpec::new("clamped_gate", 2, equal_shapes);
    spec.setting("slope", slope).setting("limit", limit)
}

pub(crate) fn scale_by_position<'a>(scale: PositionScale) -> OpSpec<'a> {
    let spec = OpSpec::new("scale_by_position", 2, |given| match given.shapes() {
        [x @ [n, ..], &[n_positions]] if *n == n_positions => Ok(OpResult::f32(x)),
        _ => Err("[tokens, ..], [tokens]".into()),
    });
    spec.setting("every", scale.every)
        .setting("strength", scale.strength)
        .optional(
            "offset",
            Some(scale.offset).filter(|offset| !counts_first(offset)),
        )
}

impl GraphBuilder {
    /// Elementwise sum.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where the shapes differ.
    pub fn add(&mut self, name: &str, a: NodeId, b: NodeId) -> Result<NodeId, GraphError> {
        self.push(name, Op::Add, &[a, b], Claim::default())
    }

    /// Elementwise product.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where the shapes differ.
    pub fn mul(&mut self, name: &str, a: NodeId, b: NodeId) -> Result<NodeId, GraphError> {
        self.push(name, Op::Mul, &[a, b], Claim::default())
    }

    /// Every value times `factor`.
    ///
    /// # Errors
    /// [`GraphError`] as for every node.
    pub fn scale(&mut self, name: &str, x: NodeId, factor: f32) -> Result<NodeId, GraphError> {
        self.push(name, Op::Scale { factor }, &[x], Claim::default())
    }

    /// `activation(gate) * up`.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where the shapes differ.
    pub fn gate(
        &mut self,
        name: &str,
        activation: Activation,
        gate: NodeId,
        up: NodeId,
    ) -> Result<NodeId, GraphError> {
        let op = Op::Gate { activation };
        self.push(name, op, &[gate, up], Claim::default())
    }

    /// `activation(x)`.
    ///
    /// # Errors
    /// [`GraphError`] as for every node.
    pub fn activate(
        &mut self,
        name: &str,
        activation: Activation,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        self.push(name, Op::Activate { activation }, &[x], Claim::default())
    }

    /// Every value, at least `-limit` and at most `limit`.
    ///
    /// # Errors
    /// [`GraphError`] where the operand does not exist.
    pub fn clamp(&mut self, name: &str, x: NodeId, limit: f32) -> Result<NodeId, GraphError> {
        self.push(name, Op::Clamp { limit }, &[x], Claim::default())
    }

    /// `cap * tanh(x / cap)`.
    ///
    /// # Errors
    /// [`GraphError`] as for every node.
    pub fn soft_cap(&mut self, name: &str, x: NodeId, cap: f32) -> Result<NodeId, GraphError> {
        self.push(name, Op::SoftCap { cap }, &[x], Claim::default())
    }

    /// The clamped gate of gpt-oss; see [`Op::ClampedGate`].
    ///
    /// # Errors
    /// [`GraphError::Shape`] where the shapes differ.
    pub fn clamped_gate(
        &mut self,
        name: &str,
        ClampedGate { slope, limit }: ClampedGate,
        operands: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        let op = Op::ClampedGate { slope, limit };
        self.push(name, op, &operands, Claim::default())
    }

    /// Every row of `x [tokens, ..]` times a factor of its position.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where there is not one position for each row.
    pub fn scale_by_position(
        &mut self,
        name: &str,
        scale: PositionScale,
        operands: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        let op = Op::ScaleByPosition { scale };
        self.push(name, op, &operands, Claim::default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Affine, Graph, GraphShape, Input, TableRow};

    #[test]
    fn the_factor_grows_in_steps() {
        let scale = PositionScale {
            every: 8,
            strength: 0.5,
            offset: 1,
        };
        assert_eq!(scale.at(0), 1.0);
        assert_eq!(scale.at(6), 1.0);
        assert_eq!(scale.at(7), 1.0 + 0.5 * 2f32.ln());
        assert_eq!(scale.at(14), scale.at(7));
        assert_eq!(
            scale.at(u32::MAX),
            (1.0 + 0.5 * (1.0 + 2f64.powi(29)).ln()) as f32
        );
        let from_zero = PositionScale { offset: 0, ..scale };
        assert_eq!(from_zero.at(7), 1.0);
        assert_eq!(from_zero.at(8), 1.0 + 0.5 * 2f32.ln());
        let every = PositionScale {
            every: 1,
            ..from_zero
        };
        assert_eq!(every.at(1), 1.0 + 0.5 * 2f32.ln());
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
            offset: 1,
        };
        let gate = ClampedGate {
            slope: 1.702,
            limit: 7.0,
        };
        let row = |row| TableRow {
            weight: "types",
            n_rows: 2,
            row,
        };
        let narrow = b.columns("narrow", x, 0..2).unwrap();
        let wanted = b.input(Input::OutputRows).unwrap();
        let refused = [
            b.clamped_gate("bad", gate, [x, narrow]),
            b.scale_by_position("bad", scale, [x, wanted]),
            b.add_row("bad", x, row(2)),
            b.add_row("bad", positions, row(0)),
        ];
        for refused in refused {
            assert!(
                matches!(refused, Err(GraphError::Shape { .. })),
                "{refused:?}"
            );
        }
        let y = b
            .layer_norm("norm", x, Affine::new("w").bias("b"), 1e-5)
            .unwrap();
        let y = b.clamped_gate("gate", gate, [y, x]).unwrap();
        let y = b.scale_by_position("sharp", scale, [y, positions]).unwrap();
        let from_zero = PositionScale { offset: 0, ..scale };
        let y = b.scale_by_position("from zero", from_zero, [y, positions]);
        let y = b.soft_cap("cap", y.unwrap(), 30.0).unwrap();
        let y = b.add_row("type", y, row(1)).unwrap();
        let graph = b.finish(&[y]).unwrap();
        let text = graph.text().to_string();
        for line in [
            "layer_norm(%0, w=w, b=b, eps=0.00001)",
            "clamped_gate(%4, %0, slope=1.702, limit=7)",
            "scale_by_position(%5, %1, every=8192, strength=0.1)",
            "scale_by_position(%6, %1, every=8192, strength=0.1, offset=0)",
            "soft_cap(%7, cap=30)",
            "add_row(%8, w=types, row=1)",
        ] {
            assert!(text.contains(line), "{text}");
        }
        assert_eq!(Graph::from_json(&graph.to_json().unwrap()), Ok(graph));
    }
}
