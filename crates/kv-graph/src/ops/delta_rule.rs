//! The gated delta rule along each sequence, and the decay factors that it takes.
//!
//! Invariant: rows of all operands are the tokens of the ubatch. Does not know states' rows.

use kv_core::ids::LayerIdx;
use serde::{Deserialize, Serialize};

use crate::op::{Input, Op};
use crate::spec::{OpResult, OpScope, OpSpec, n_values};
use crate::{Claim, GraphBuilder, GraphError, NodeId};

/// Decays of the heads of a linear attention: see [`Op::Decay`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecaySpec {
    /// Heads that the columns are divided into, equally.
    pub n_heads: usize,
    /// The rate `A`, negative, one for each head.
    pub a: String,
    /// Added to step sizes before the softplus, `[columns]`.
    pub dt_bias: String,
}

/// A gated delta rule: a matrix for each value head, which keys address. See [`Op::Delta`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeltaSpec {
    /// Heads that values and outputs are divided into, equally.
    pub n_heads: usize,
    /// Heads of queries and keys; divides `n_heads`.
    pub key_heads: usize,
    /// Values of one query or key head.
    pub k_dim: usize,
    /// The value that heads share a key head.
    #[serde(default)]
    pub sharing: KeySharing,
    /// Factor on outputs, usually `1 / sqrt(k_dim)`.
    pub scale: f32,
}

/// The value that heads share a query and key head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeySharing {
    /// Neighbours: head `j` has key head `j / (n_heads / key_heads)`.
    #[default]
    Neighbours,
    /// Every `key_heads`-th: head `j` has key head `j % key_heads`.
    Interleaved,
}

impl DeltaSpec {
    /// The key head of a value head.
    pub fn key_head(&self, head: usize) -> usize {
        let key_heads = self.key_heads.max(1);
        match self.sharing {
            KeySharing::Neighbours => head / (self.n_heads / key_heads).max(1),
            KeySharing::Interleaved => head % key_heads,
        }
    }
}

/// True if `n` things of equal size make up `of`.
fn divides(n: usize, of: usize) -> bool {
    n > 0 && of.is_multiple_of(n)
}

pub(crate) fn decay(decay: &DecaySpec) -> OpSpec<'_> {
    let n_heads = decay.n_heads;
    let spec = OpSpec::new("decay", 1, move |given| {
        let rates = given.weight(0);
        match *given.shape(0) {
            [n, columns] if divides(n_heads, columns) && n_values(rates) == Some(n_heads) => {
                Ok(OpResult::f32([n, columns]).weight(rates).weight([columns]))
            }
            _ => Err(format!(
                "[tokens, columns] of {n_heads} heads, as many rates"
            )),
        }
    });
    spec.setting("heads", n_heads)
        .weights_as("a", [&decay.a])
        .weights_as("dt_bias", [&decay.dt_bias])
}

pub(crate) fn delta<'a>(layer: LayerIdx, delta: &DeltaSpec) -> OpSpec<'a> {
    let &DeltaSpec {
        n_heads,
        key_heads,
        k_dim,
        sharing,
        scale,
    } = delta;
    let spec = OpSpec::new("delta", 6, move |given| {
        let [q, k, v, decay, beta] = given.shapes();
        let (n, keys) = (given.graph.n_tokens, key_heads.saturating_mul(k_dim));
        let channels = v.last().copied().unwrap_or(0);
        let by_key = n_heads.saturating_mul(k_dim);
        let fits = [q, k] == [&[n, keys][..]; 2]
            && v == [n, channels]
            && (decay == [n, n_heads] || decay == [n, by_key])
            && beta == [n, n_heads]
            && k_dim > 0
            && divides(n_heads, channels)
            && divides(key_heads, n_heads)
            && given.is_input(5, Input::States);
        if fits {
            Ok(OpResult::f32([n, channels]))
        } else {
            Err(format!(
                "two of [{n}, {keys}], [{n}, channels of {n_heads} heads], \
                 [{n}, {n_heads} or {by_key}], [{n}, {n_heads}], and states"
            ))
        }
    });
    let spec = spec
        .scope_of(OpScope::Tokens)
        .setting("layer", layer)
        .setting("heads", format!("{n_heads}/{key_heads}"))
        .setting("k_dim", k_dim);
    let spec = match sharing {
        KeySharing::Neighbours => spec,
        KeySharing::Interleaved => spec.setting("sharing", "interleaved"),
    };
    spec.setting("scale", scale)
}

impl GraphBuilder {
    /// Decay factors from step sizes `x [n, columns]`; see [`Op::Decay`]. `a_shape` is the shape of
    /// the rates, which files write in several ways.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where `x` is no matrix, or heads do not divide its columns, or there
    /// are not as many rates.
    pub fn decay(
        &mut self,
        name: &str,
        x: NodeId,
        decay: &DecaySpec,
        a_shape: &[usize],
    ) -> Result<NodeId, GraphError> {
        let decay = DecaySpec {
            n_heads: decay.n_heads,
            a: self.weight_name(&decay.a),
            dt_bias: self.weight_name(&decay.dt_bias),
        };
        let claim = Claim {
            weights: &[a_shape],
            ..Claim::default()
        };
        self.push(name, Op::Decay { decay }, &[x], claim)
    }

    /// The gated delta rule: of queries, keys, values, decay factors, learning rates and states, as
    /// in [`Op::Delta`].
    ///
    /// # Errors
    /// [`GraphError::Shape`] where operands do not have a row for each token, or not these widths,
    /// or heads do not divide.
    pub fn delta(
        &mut self,
        name: &str,
        layer: LayerIdx,
        delta: DeltaSpec,
        operands: [NodeId; 6],
    ) -> Result<NodeId, GraphError> {
        let op = Op::Delta { layer, delta };
        self.push(name, op, &operands, Claim::default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Graph, GraphShape};

    const LAYER: LayerIdx = LayerIdx(0);
    const SPEC: DeltaSpec = DeltaSpec {
        n_heads: 4,
        key_heads: 2,
        k_dim: 3,
        sharing: KeySharing::Interleaved,
        scale: 0.5,
    };

    #[test]
    fn key_heads_are_shared_by_neighbours_or_interleaved() {
        let heads = |sharing| {
            let spec = DeltaSpec { sharing, ..SPEC };
            [0, 1, 2, 3].map(|head| spec.key_head(head))
        };
        assert_eq!(heads(KeySharing::Neighbours), [0, 0, 1, 1]);
        assert_eq!(heads(KeySharing::Interleaved), [0, 1, 0, 1]);
    }

    #[test]
    fn one_key_head_is_of_all_and_as_many_are_one_each() {
        for sharing in [KeySharing::Neighbours, KeySharing::Interleaved] {
            let heads = |key_heads| {
                let spec = DeltaSpec {
                    key_heads,
                    sharing,
                    ..SPEC
                };
                [0, 1, 2, 3].map(|head| spec.key_head(head))
            };
            assert_eq!([heads(1), heads(4)], [[0; 4], [0, 1, 2, 3]], "{sharing:?}");
        }
    }

    #[test]
    fn delta_operands_fit() {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 1,
        });
        let tokens = b.input(Input::Tokens).unwrap();
        let states = b.input(Input::States).unwrap();
        let x = b.embed("x", tokens, "tok", [10, 12]).unwrap();
        let k = b.columns("k", x, 0..6).unwrap();
        let beta = b.columns("beta", x, 2..6).unwrap();
        let spec = DecaySpec {
            n_heads: 4,
            a: "a".into(),
            dt_bias: "dt.b".into(),
        };
        let g = b.decay("g", beta, &spec, &[4]).unwrap();
        let other = DecaySpec {
            n_heads: 4,
            a: "a2".into(),
            dt_bias: "dt2.b".into(),
        };
        let by_key = b.decay("by key", x, &other, &[1, 4, 1]).unwrap();
        let good = [k, k, x, g, beta, states];
        let with = |at: usize, node: NodeId| {
            let mut operands = good;
            operands[at] = node;
            operands
        };
        let heads = |n_heads, key_heads, k_dim| DeltaSpec {
            n_heads,
            key_heads,
            k_dim,
            ..SPEC
        };
        let refused = [
            b.decay("too few rates", beta, &spec, &[3]),
            b.decay("heads", k, &spec, &[4]),
            b.delta("no heads", LAYER, heads(0, 2, 3), good),
            b.delta("no key heads", LAYER, heads(4, 0, 3), good),
            b.delta("key heads do not divide", LAYER, heads(4, 3, 2), good),
            b.delta("heads do not divide", LAYER, heads(5, 1, 6), good),
            b.delta("no keys", LAYER, heads(4, 2, 0), good),
            b.delta("wide q", LAYER, SPEC, with(0, x)),
            b.delta("narrow k", LAYER, SPEC, with(1, beta)),
            b.delta("decay", LAYER, SPEC, with(3, k)),
            b.delta("beta", LAYER, SPEC, with(4, k)),
            b.delta("no states", LAYER, SPEC, with(5, x)),
        ];
        for refused in refused {
            assert!(
                matches!(refused, Err(GraphError::Shape { .. })),
                "{refused:?}"
            );
        }
        let y = b.delta("y", LAYER, SPEC, good).unwrap();
        let z = b.delta("z", LAYER, SPEC, with(3, by_key)).unwrap();
        let graph = b.finish(&[y, z]).unwrap();
        assert_eq!(graph.find("y").unwrap().1.shape, [3, 12]);
        let text = graph.text().to_string();
        let decay = "decay(%4, heads=4, a=a, dt_bias=dt.b)";
        assert!(text.contains(decay), "{text}");
        let delta = "delta(%3, %3, %2, %5, %4, %1, layer=0, heads=4/2, k_dim=3, \
                     sharing=interleaved, scale=0.5)";
        assert!(text.contains(delta), "{text}");
        assert_eq!(Graph::from_json(&graph.to_json().unwrap()), Ok(graph));
    }
}
