//! The operations of recurrent layers: convolutions and scans along each sequence.
//!
//! Invariant: rows of all operands are the tokens of the ubatch. Does not know states' rows.

use kv_core::ids::LayerIdx;
use serde::{Deserialize, Serialize};

use crate::op::{Input, Op};
use crate::spec::{OpContext, OpResult, OpScope, OpSpec, n_values};
use crate::{Claim, GraphBuilder, GraphError, NodeId};

/// A causal convolution along each sequence, each channel by itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConvSpec {
    /// Inputs that an output depends on: its own and those of the `width - 1` tokens before.
    pub width: usize,
    /// The kernel, `[channels, width]`, oldest input first.
    pub weight: String,
    /// Kernels of the channels after those of `weight`, in order, where files have several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub further: Vec<String>,
    /// Added to every output, `[channels]`, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bias: Option<String>,
}

impl ConvSpec {
    /// The weights that the kernel is made of, in the order of their channels.
    pub fn weights(&self) -> impl Iterator<Item = &String> {
        std::iter::once(&self.weight).chain(&self.further)
    }
}

/// A selective scan: a linear recurrence for each channel, with `d_state` values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScanSpec {
    /// Values of the state of one channel.
    pub d_state: usize,
    /// The decay `A`, negative, `[channels, d_state]`.
    pub a: String,
    /// The share of the input that is added to the output, `[channels]`.
    pub d: String,
}

/// A selective scan with one decay for all channels of a head, as in Mamba-2.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeadScanSpec {
    /// Heads that the channels are divided into, equally.
    pub n_heads: usize,
    /// Groups of neighbouring heads that share B and C; divides `n_heads`.
    pub n_groups: usize,
    /// Values of the state of one channel.
    pub d_state: usize,
    /// The decay `A`, negative, `[heads, 1]`.
    pub a: String,
    /// The share of the input that is added to the output, `[heads, 1]`.
    pub d: String,
    /// Added to step sizes before the softplus, `[heads]`.
    pub dt_bias: String,
}

pub(crate) fn conv(layer: LayerIdx, conv: &ConvSpec) -> OpSpec<'_> {
    let spec = OpSpec::new("conv", 2, |given| {
        let (width, states) = (conv.width, given.is_input(1, Input::States));
        match *given.shape(0) {
            [n, channels] if n == given.graph.n_tokens && width > 0 && states => {
                let result = OpResult::f32([n, channels]);
                let kernels = if conv.further.is_empty() {
                    vec![vec![channels, width]]
                } else {
                    joined_kernels(given, conv, channels)?
                };
                let result = kernels.into_iter().fold(result, OpResult::weight);
                Ok(result.weight_if(conv.bias.as_ref(), [channels]))
            }
            _ => Err("[tokens, channels] and states, with a width above 0".into()),
        }
    });
    spec.scope_of(OpScope::Tokens)
        .setting("layer", layer)
        .setting("width", conv.width)
        .weights_as("w", conv.weights())
        .weights_as("b", &conv.bias)
}

/// The shapes of kernels that together are one of so many channels.
fn joined_kernels(
    given: &OpContext<'_>,
    conv: &ConvSpec,
    channels: usize,
) -> Result<Vec<Vec<usize>>, String> {
    let shapes = (0..conv.weights().count()).map(|at| given.weight(at));
    let wrong = || {
        let width = conv.width;
        format!("kernels of {channels} channels together, of {width} values each")
    };
    let mut n_channels = 0usize;
    for shape in shapes.clone() {
        let n = n_values(shape).filter(|_| shape.last() == Some(&conv.width));
        let n = n.ok_or_else(wrong)? / conv.width;
        n_channels = n_channels.saturating_add(n);
    }
    if n_channels == channels {
        Ok(shapes.map(<[usize]>::to_vec).collect())
    } else {
        Err(wrong())
    }
}

/// Kernels of one shape that make up a convolution's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConvKernels<const N: usize> {
    /// Inputs that an output depends on.
    pub width: usize,
    /// Names of the kernels, in the order of their channels.
    pub weights: [String; N],
    /// The shape of each, which files write in several ways; the last dimension is the width.
    pub shape: Vec<usize>,
}

pub(crate) fn scan(layer: LayerIdx, scan: &ScanSpec) -> OpSpec<'_> {
    let spec = OpSpec::new("scan", 5, |given| {
        let [x, dt, b, c] = given.shapes();
        let (n, d_state) = (given.graph.n_tokens, scan.d_state);
        let channels = x.last().copied().unwrap_or(0);
        let fits = [x, dt] == [&[n, channels][..]; 2]
            && [b, c] == [&[n, d_state][..]; 2]
            && given.is_input(4, Input::States);
        if !fits {
            return Err(format!(
                "two of [{n}, channels], two of [{n}, {d_state}], and states"
            ));
        }
        let result = OpResult::f32([n, channels]).weight([channels, d_state]);
        Ok(result.weight([channels]))
    });
    spec.scope_of(OpScope::Tokens)
        .setting("layer", layer)
        .setting("d_state", scan.d_state)
        .weights_as("a", [&scan.a])
        .weights_as("d", [&scan.d])
}

pub(crate) fn scan_heads(layer: LayerIdx, scan: &HeadScanSpec) -> OpSpec<'_> {
    let &HeadScanSpec {
        n_heads,
        n_groups,
        d_state,
        ..
    } = scan;
    let spec = OpSpec::new("scan_heads", 5, move |given| {
        let [x, dt, b, c] = given.shapes();
        let n = given.graph.n_tokens;
        let group_width = n_groups.saturating_mul(d_state);
        let channels = x.last().copied().unwrap_or(0);
        let divides = |n: usize, of: usize| n > 0 && of.is_multiple_of(n);
        let fits = x == [n, channels]
            && dt == [n, n_heads]
            && [b, c] == [&[n, group_width][..]; 2]
            && divides(n_heads, channels)
            && divides(n_groups, n_heads)
            && given.is_input(4, Input::States);
        if !fits {
            return Err(format!(
                "[{n}, channels], [{n}, {n_heads} (divides channels, a multiple of {n_groups})], \
                 two of [{n}, {group_width}], and states"
            ));
        }
        let result = OpResult::f32([n, channels]).weight([n_heads, 1]);
        Ok(result.weight([n_heads, 1]).weight([n_heads]))
    });
    spec.scope_of(OpScope::Tokens)
        .setting("layer", layer)
        .setting("heads", format!("{n_heads}/{n_groups}"))
        .setting("d_state", d_state)
        .weights_as("a", [&scan.a])
        .weights_as("d", [&scan.d])
        .weights_as("dt_bias", [&scan.dt_bias])
}

impl GraphBuilder {
    /// The causal convolution of `x [tokens, channels]` along each sequence.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where `x` does not have a row for each token, or the kernel no width.
    pub fn conv(
        &mut self,
        name: &str,
        layer: LayerIdx,
        conv: &ConvSpec,
        x_states: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        let conv = ConvSpec {
            width: conv.width,
            weight: self.weight_name(&conv.weight),
            further: conv.further.iter().map(|w| self.weight_name(w)).collect(),
            bias: self.optional_weight_name(conv.bias.as_deref()),
        };
        self.push(name, Op::Conv { layer, conv }, &x_states, Claim::default())
    }

    /// The same with a kernel in several weights, without a bias.
    ///
    /// # Errors
    /// [`GraphError::Shape`] as for [`GraphBuilder::conv`], and where kernels do not make up the
    /// channels of `x`.
    pub fn conv_joined<const N: usize>(
        &mut self,
        name: &str,
        layer: LayerIdx,
        kernels: &ConvKernels<N>,
        x_states: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        let mut weights = kernels.weights.iter().map(|w| self.weight_name(w));
        let conv = ConvSpec {
            width: kernels.width,
            weight: weights.next().unwrap_or_default(),
            further: weights.collect(),
            bias: None,
        };
        let claim = Claim {
            weights: &[&*kernels.shape; N],
            ..Claim::default()
        };
        self.push(name, Op::Conv { layer, conv }, &x_states, claim)
    }

    /// The selective scan of `x [tokens, channels]`; operands as in [`Op::Scan`].
    ///
    /// # Errors
    /// [`GraphError::Shape`] where operands do not have a row for each token, or not these widths.
    pub fn scan(
        &mut self,
        name: &str,
        layer: LayerIdx,
        scan: &ScanSpec,
        operands: [NodeId; 5],
    ) -> Result<NodeId, GraphError> {
        let scan = ScanSpec {
            a: self.weight_name(&scan.a),
            d: self.weight_name(&scan.d),
            ..*scan
        };
        self.push(name, Op::Scan { layer, scan }, &operands, Claim::default())
    }

    /// The scan of `x [tokens, channels]` head by head; operands as in [`Op::ScanHeads`].
    ///
    /// # Errors
    /// [`GraphError::Shape`] where operands do not have a row for each token, or not these widths,
    /// or heads or groups do not divide.
    pub fn scan_heads(
        &mut self,
        name: &str,
        layer: LayerIdx,
        scan: &HeadScanSpec,
        operands: [NodeId; 5],
    ) -> Result<NodeId, GraphError> {
        let scan = HeadScanSpec {
            a: self.weight_name(&scan.a),
            d: self.weight_name(&scan.d),
            dt_bias: self.weight_name(&scan.dt_bias),
            ..*scan
        };
        let op = Op::ScanHeads { layer, scan };
        self.push(name, op, &operands, Claim::default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Activation, Graph, GraphShape};

    #[test]
    fn recurrent_operations_fit_their_operands() {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 1,
        });
        let layer = LayerIdx(0);
        let tokens = b.input(Input::Tokens).unwrap();
        let states = b.input(Input::States).unwrap();
        let x = b.embed("x", tokens, "tok", [10, 6]).unwrap();
        let bc = b.columns("bc", x, 2..4).unwrap();
        assert_eq!(b.shape_of(bc), [3, 2]);
        let conv = ConvSpec {
            width: 4,
            weight: "conv.w".into(),
            further: Vec::new(),
            bias: Some("conv.b".into()),
        };
        let y = b.conv("conv", layer, &conv, [x, states]).unwrap();
        let y = b.activate("silu", Activation::Silu, y).unwrap();
        let scan = ScanSpec {
            d_state: 2,
            a: "a".into(),
            d: "d".into(),
        };
        let refused = [
            b.columns("wide", x, 4..7),
            b.conv("no states", layer, &conv, [x, x]),
            b.conv(
                "width",
                layer,
                &ConvSpec {
                    width: 0,
                    ..conv.clone()
                },
                [x, states],
            ),
            b.scan("narrow", layer, &scan, [y, bc, bc, bc, states]),
            b.scan("wide b", layer, &scan, [y, x, x, bc, states]),
            b.scan("no states", layer, &scan, [y, x, bc, bc, x]),
        ];
        for refused in refused {
            assert!(
                matches!(refused, Err(GraphError::Shape { .. })),
                "{refused:?}"
            );
        }
        let y = b
            .scan("scan", layer, &scan, [y, x, bc, bc, states])
            .unwrap();
        let graph = b.finish(&[y]).unwrap();
        assert_eq!(graph.find("scan").unwrap().1.shape, [3, 6]);
        let text = graph.text().to_string();
        assert!(text.contains("columns(%2, first=2)"), "{text}");
        assert!(
            text.contains("conv(%2, %1, layer=0, width=4, w=conv.w, b=conv.b)"),
            "{text}"
        );
        assert!(
            text.contains("scan(%5, %2, %3, %3, %1, layer=0, d_state=2, a=a, d=d)"),
            "{text}"
        );
        assert_eq!(Graph::from_json(&graph.to_json().unwrap()), Ok(graph));
    }

    #[test]
    fn kernels_join() {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 1,
        });
        let layer = LayerIdx(0);
        let x = b.input(Input::Embeddings { dim: 6 }).unwrap();
        let states = b.input(Input::States).unwrap();
        let kernels = |shape: &[usize]| ConvKernels {
            width: 4,
            weights: ["q", "k", "v"].map(str::to_owned),
            shape: shape.to_vec(),
        };
        for shape in [&[2, 5][..], &[4, 2], &[3, 4], &[4], &[]] {
            let refused = b.conv_joined("refused", layer, &kernels(shape), [x, states]);
            assert!(
                matches!(refused, Err(GraphError::Shape { .. })),
                "{shape:?}"
            );
        }
        let y = b.conv_joined("y", layer, &kernels(&[1, 2, 1, 4]), [x, states]);
        let graph = b.finish(&[y.unwrap()]).unwrap();
        let text = graph.text().to_string();
        assert!(
            text.contains("conv(%0, %1, layer=0, width=4, w=q, w=k, w=v)"),
            "{text}"
        );
        assert_eq!(graph.weights()[1].shape, [1, 2, 1, 4]);
        assert_eq!(Graph::from_json(&graph.to_json().unwrap()), Ok(graph));
    }

    #[test]
    fn heads_and_groups_divide() {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 1,
        });
        let layer = LayerIdx(0);
        let tokens = b.input(Input::Tokens).unwrap();
        let states = b.input(Input::States).unwrap();
        let x = b.embed("x", tokens, "tok", [10, 12]).unwrap();
        let dt = b.columns("dt", x, 0..4).unwrap();
        let bc = b.columns("bc", x, 2..8).unwrap();
        let scan = |n_heads, n_groups, d_state| HeadScanSpec {
            n_heads,
            n_groups,
            d_state,
            a: "a".into(),
            d: "d".into(),
            dt_bias: "dt.b".into(),
        };
        let good = [x, dt, bc, bc, states];
        for (name, spec, operands) in [
            ("no heads", scan(0, 1, 6), good),
            ("no groups", scan(4, 0, 6), good),
            ("groups do not divide", scan(4, 3, 2), good),
            ("heads do not divide", scan(5, 1, 6), good),
            ("narrow b", scan(4, 2, 4), good),
            ("wide dt", scan(4, 2, 3), [x, x, bc, bc, states]),
            ("no states", scan(4, 2, 3), [x, dt, bc, bc, x]),
        ] {
            let refused = b.scan_heads(name, layer, &spec, operands);
            assert!(matches!(refused, Err(GraphError::Shape { .. })), "{name}");
        }
        let y = b.scan_heads("scan", layer, &scan(4, 2, 3), good).unwrap();
        let graph = b.finish(&[y]).unwrap();
        assert_eq!(graph.find("scan").unwrap().1.shape, [3, 12]);
        let text = graph.text().to_string();
        let call =
            "scan_heads(%2, %3, %4, %4, %1, layer=0, heads=4/2, d_state=3, a=a, d=d, dt_bias=dt.b)";
        assert!(text.contains(call), "{text}");
        assert_eq!(Graph::from_json(&graph.to_json().unwrap()), Ok(graph));
    }
}
