//! Lowers recurrent layers: finds their weights, and the states that the layout has for them.

use std::sync::Arc;

use kv_backend::BackendError;
use kv_core::LayerIdx;
use kv_graph::{ConvSpec, DeltaSpec, HeadScanSpec, Input, Node, Op, ScanSpec};
use kv_rows::{StateRows, StateType};

use super::{Call, Lowering, Value, unsupported};
use crate::kernels::{F32x16, MAX_DELTA_KEYS, SCAN_WIDTH};
use crate::plan::{ConvKernel, HeadScanWeights, ScanWeights, StepOp};
use crate::recurrent::MAX_HALF_ROW;

fn other_state(layer: LayerIdx, what: &str, wanted: usize, got: usize) -> BackendError {
    BackendError::RowShape {
        layer,
        wanted: format!("{wanted} values of {what} state"),
        got: format!("{got}"),
    }
}

/// `a`, `[channels, d_state]`, for powers of 2 instead of e, tile by tile.
fn rates(a: &[f32], d_state: usize) -> Vec<F32x16> {
    let n = d_state.max(1);
    let tile = |channels: &[f32]| -> Vec<F32x16> {
        let mut lanes = vec![[0.0; SCAN_WIDTH]; n];
        for (lane, a) in channels.chunks_exact(n).enumerate() {
            for (lanes, a) in lanes.iter_mut().zip(a) {
                lanes[lane] = a * std::f32::consts::LOG2_E;
            }
        }
        lanes
    };
    a.chunks(SCAN_WIDTH * n).flat_map(tile).collect()
}

/// An operation on the states of the `layer`-th recurrent layer of the layout.
#[derive(Clone, Debug)]
pub(crate) enum RecurrentOp {
    /// `(x)`.
    Conv {
        layer: usize,
        kernel: Arc<ConvKernel>,
    },
    /// `(x, dt, B, C)`.
    Scan {
        layer: usize,
        weights: Arc<ScanWeights>,
    },
    /// `(x, dt, B, C)`.
    ScanHeads {
        layer: usize,
        weights: Arc<HeadScanWeights>,
    },
    /// `(q, k, v, decay, beta)`.
    Delta { layer: usize, delta: DeltaSpec },
}

/// An operation and the values that it reads.
type RecurrentCall = (RecurrentOp, Vec<Value>);

impl<'a> Lowering<'a> {
    pub(super) fn recurrent(&mut self, node: &'a Node) -> Result<Option<Call>, BackendError> {
        let call = match &node.op {
            Op::Conv { layer, conv } => self.conv(node, *layer, conv),
            Op::Scan { layer, scan } => self.scan(node, *layer, scan),
            Op::ScanHeads { layer, scan } => self.scan_heads(node, *layer, scan),
            Op::Delta { layer, delta } => self.delta(node, *layer, *delta),
            _ => return Ok(None),
        };
        call.map(|(op, reads)| Some((StepOp::Recurrent(op), reads)))
    }

    fn conv(
        &mut self,
        node: &'a Node,
        layer: LayerIdx,
        conv: &'a ConvSpec,
    ) -> Result<RecurrentCall, BackendError> {
        let (x, channels, width) = (self.operand(node, 0)?, node.row_len(), conv.width);
        self.operand_input(node, 1, |i| matches!(i, Input::States))?;
        self.whole_ubatch(node, x, channels)?;
        let (at, states) = self.state(layer)?;
        let wanted = width.saturating_sub(1) * channels;
        let got = states.row.conv_row;
        if got != wanted {
            return Err(other_state(layer, "convolution", wanted, got));
        }
        let mut weight = Vec::with_capacity(channels * width);
        for name in conv.weights() {
            weight.extend_from_slice(&self.vector(name, node)?);
        }
        let bias = conv.bias.as_ref().map(|b| self.vector(b, node));
        // Tap by tap: a kernel iterates over neighbouring channels.
        let taps = (0..width).flat_map(|k| weight.iter().skip(k).step_by(width.max(1)));
        let kernel = ConvKernel {
            taps: taps.copied().collect(),
            width,
            bias: bias.transpose()?,
        };
        let kernel = Arc::new(kernel);
        Ok((RecurrentOp::Conv { layer: at, kernel }, vec![x]))
    }

    fn scan(
        &mut self,
        node: &'a Node,
        layer: LayerIdx,
        scan: &'a ScanSpec,
    ) -> Result<RecurrentCall, BackendError> {
        let (channels, d_state) = (node.row_len(), scan.d_state);
        let inputs = self.scan_inputs(node, [channels, channels, d_state, d_state])?;
        let at = self.scan_state(node, layer, d_state)?;
        let weights = ScanWeights {
            d_state,
            rates: rates(&self.vector(&scan.a, node)?, d_state),
            d: self.vector(&scan.d, node)?,
        };
        if d_state == 0 || weights.d.len() != channels {
            return Err(unsupported(node));
        }
        let weights = Arc::new(weights);
        Ok((RecurrentOp::Scan { layer: at, weights }, inputs))
    }

    fn scan_heads(
        &mut self,
        node: &'a Node,
        layer: LayerIdx,
        scan: &'a HeadScanSpec,
    ) -> Result<RecurrentCall, BackendError> {
        let &HeadScanSpec {
            n_heads,
            n_groups,
            d_state,
            ..
        } = scan;
        let (channels, group_width) = (node.row_len(), n_groups * d_state);
        let divides = |n: usize, of: usize| n > 0 && of.is_multiple_of(n);
        if !divides(n_heads, channels) || !divides(n_groups, n_heads) || d_state == 0 {
            return Err(unsupported(node));
        }
        let inputs = self.scan_inputs(node, [channels, n_heads, group_width, group_width])?;
        let at = self.scan_state(node, layer, d_state)?;
        let weights = HeadScanWeights {
            n_groups,
            d_state,
            a: self.vector(&scan.a, node)?,
            d: self.vector(&scan.d, node)?,
            dt_bias: self.vector(&scan.dt_bias, node)?,
        };
        if [&weights.a, &weights.d, &weights.dt_bias].map(|w| w.len()) != [n_heads; 3] {
            return Err(unsupported(node));
        }
        let weights = Arc::new(weights);
        Ok((RecurrentOp::ScanHeads { layer: at, weights }, inputs))
    }

    fn delta(
        &mut self,
        node: &'a Node,
        layer: LayerIdx,
        delta: DeltaSpec,
    ) -> Result<RecurrentCall, BackendError> {
        let DeltaSpec {
            n_heads,
            key_heads,
            k_dim,
            ..
        } = delta;
        let (channels, keys) = (node.row_len(), key_heads * k_dim);
        let divides = |n: usize, of: usize| n > 0 && of.is_multiple_of(n);
        let (_, decays) = self.operand(node, 3)?.shape(self.graph);
        let fits = divides(n_heads, channels)
            && divides(key_heads, n_heads)
            && (1..=MAX_DELTA_KEYS).contains(&k_dim)
            && (decays == n_heads || decays == n_heads * k_dim);
        if !fits {
            return Err(unsupported(node));
        }
        let inputs = self.scan_inputs(node, [keys, keys, channels, decays, n_heads])?;
        let layer = self.scan_state(node, layer, k_dim)?;
        Ok((RecurrentOp::Delta { layer, delta }, inputs))
    }

    /// The operands of a scan, of these widths, before the states.
    fn scan_inputs<const N: usize>(
        &self,
        node: &Node,
        widths: [usize; N],
    ) -> Result<Vec<Value>, BackendError> {
        self.operand_input(node, N, |i| matches!(i, Input::States))?;
        let inputs = widths.into_iter().enumerate().map(|(at, width)| {
            let input = self.operand(node, at)?;
            self.whole_ubatch(node, input, width).map(|()| input)
        });
        inputs.collect()
    }

    /// The index of a layer whose states have `n` values for each value of a node's rows.
    fn scan_state(&self, node: &Node, layer: LayerIdx, n: usize) -> Result<usize, BackendError> {
        let (at, states) = self.state(layer)?;
        let (wanted, got) = (node.row_len() * n, states.row.state_row);
        match states.state_type {
            _ if wanted != got => Err(other_state(layer, "scan", wanted, got)),
            StateType::F16 | StateType::BF16 if n > MAX_HALF_ROW => Err(unsupported(node)),
            _ => Ok(at),
        }
    }

    /// An operand must have a row of this width for each token.
    fn whole_ubatch(&self, node: &Node, x: Value, width: usize) -> Result<(), BackendError> {
        if x.shape(self.graph) == (self.graph.shape().n_tokens, width) {
            Ok(())
        } else {
            Err(unsupported(node))
        }
    }

    pub(super) fn state(&self, layer: LayerIdx) -> Result<(usize, &'a StateRows), BackendError> {
        let mut states = self.layout.states().iter().enumerate();
        let found = states.find(|(_, s)| s.layer == layer);
        found.ok_or(BackendError::NoRows { layer })
    }
}
