//! The operations of recurrent layers: convolutions and scans along each sequence.
//!
//! Invariant: rows of all operands are the tokens of the ubatch. Does not know states' rows.

use crate::graph::op::{ConvSpec, HeadScanSpec, Input, Op, ScanSpec};
use crate::graph::spec::{Inferred, OpScope, OpSpec};
use crate::graph::{Claim, GraphBuilder, GraphError, NodeId};
use crate::ids::LayerIdx;

pub(in crate::graph) fn conv(layer: LayerIdx, conv: &ConvSpec) -> OpSpec<'_> {
    let spec = OpSpec::new("conv", 2, |given| {
        let (width, states) = (conv.width, given.is_input(1, Input::States));
        match *given.shape(0) {
            [n, channels] if n == given.graph.n_tokens && width > 0 && states => {
                let result = Inferred::f32([n, channels]).weight([channels, width]);
                Ok(result.weight_if(conv.bias.as_ref(), [channels]))
            }
            _ => Err("[tokens, channels] and states, with a width above 0".into()),
        }
    });
    spec.scope_of(OpScope::Tokens)
        .setting("layer", layer)
        .setting("width", conv.width)
        .weights_as("w", [&conv.weight])
        .weights_as("b", &conv.bias)
}

pub(in crate::graph) fn scan(layer: LayerIdx, scan: &ScanSpec) -> OpSpec<'_> {
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
        let result = Inferred::f32([n, channels]).weight([channels, d_state]);
        Ok(result.weight([channels]))
    });
    spec.scope_of(OpScope::Tokens)
        .setting("layer", layer)
        .setting("d_state", scan.d_state)
        .weights_as("a", [&scan.a])
        .weights_as("d", [&scan.d])
}

pub(in crate::graph) fn scan_heads(layer: LayerIdx, scan: &HeadScanSpec) -> OpSpec<'_> {
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
        let result = Inferred::f32([n, channels]).weight([n_heads, 1]);
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
            bias: self.optional_weight_name(conv.bias.as_deref()),
        };
        self.push(name, Op::Conv { layer, conv }, &x_states, Claim::default())
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
    use crate::graph::{Activation, Graph, GraphShape};

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
