//! The operations of recurrent layers, added to a graph.
//!
//! Invariant: rows of all operands are the tokens of the ubatch. Knows nothing of states' rows.

use super::{GraphBuilder, GraphError};
use crate::graph::NodeId;
use crate::graph::op::{ConvSpec, DType, HeadScanSpec, Input, Op, ScanSpec};
use crate::ids::LayerIdx;

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
        [x, states]: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        let op = Op::Conv {
            layer,
            conv: conv.clone(),
        };
        let n_tokens = self.graph.shape.n_tokens;
        let channels = match *self.shape_of(x) {
            [n, channels] if n == n_tokens && conv.width > 0 && self.is_states(states) => channels,
            _ => {
                let wanted = "[tokens, channels] and states, with a width above 0";
                return Err(self.misfit(name, &op, wanted, &[x, states]));
            }
        };
        self.declare(&conv.weight, &[channels, conv.width])?;
        if let Some(bias) = &conv.bias {
            self.declare(bias, &[channels])?;
        }
        let shape = vec![n_tokens, channels];
        self.push(name, op, vec![x, states], (shape, DType::F32))
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
        let op = Op::Scan {
            layer,
            scan: scan.clone(),
        };
        let [x, dt, b, c, states] = operands;
        let (n_tokens, d_state) = (self.graph.shape.n_tokens, scan.d_state);
        let channels = self.shape_of(x).last().copied().unwrap_or(0);
        let fits = [x, dt].map(|id| self.shape_of(id)) == [&[n_tokens, channels][..]; 2]
            && [b, c].map(|id| self.shape_of(id)) == [&[n_tokens, d_state][..]; 2]
            && self.is_states(states);
        if !fits {
            let wanted = format!(
                "two of [{n_tokens}, channels], two of [{n_tokens}, {d_state}], and states"
            );
            return Err(self.misfit(name, &op, &wanted, &operands));
        }
        self.declare(&scan.a, &[channels, d_state])?;
        self.declare(&scan.d, &[channels])?;
        let shape = vec![n_tokens, channels];
        self.push(name, op, operands.to_vec(), (shape, DType::F32))
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
        let op = Op::ScanHeads {
            layer,
            scan: scan.clone(),
        };
        let [x, dt, b, c, states] = operands;
        let n_tokens = self.graph.shape.n_tokens;
        let &HeadScanSpec {
            n_heads, n_groups, ..
        } = scan;
        let narrow = n_groups.saturating_mul(scan.d_state);
        let channels = self.shape_of(x).last().copied().unwrap_or(0);
        let divides = |n: usize, of: usize| n > 0 && of.is_multiple_of(n);
        let fits = self.shape_of(x) == [n_tokens, channels]
            && self.shape_of(dt) == [n_tokens, n_heads]
            && [b, c].map(|id| self.shape_of(id)) == [&[n_tokens, narrow][..]; 2]
            && divides(n_heads, channels)
            && divides(n_groups, n_heads)
            && self.is_states(states);
        if !fits {
            let wanted = format!(
                "[{n_tokens}, channels], [{n_tokens}, {n_heads} (divides channels, a multiple of \
                 {n_groups})], two of [{n_tokens}, {narrow}], and states"
            );
            return Err(self.misfit(name, &op, &wanted, &operands));
        }
        self.declare(&scan.a, &[n_heads, 1])?;
        self.declare(&scan.d, &[n_heads, 1])?;
        self.declare(&scan.dt_bias, &[n_heads])?;
        let shape = vec![n_tokens, channels];
        self.push(name, op, operands.to_vec(), (shape, DType::F32))
    }

    pub(in crate::graph) fn is_states(&self, id: NodeId) -> bool {
        let node = self.graph.node(id);
        node.is_some_and(|node| node.op == Op::Input(Input::States))
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
