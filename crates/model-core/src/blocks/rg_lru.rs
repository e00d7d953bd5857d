//! The mixer of a Griffin layer: a causal convolution and a gated linear recurrence, gated by a
//! second projection of the same rows.
//!
//! The real-gated linear recurrent unit (RG-LRU) of De et al., arXiv 2402.19427, is a custom
//! operation that the block brings along. Does not know the layers around.

use kv_backend::{CustomOp, CustomRows, CustomShape};
use kv_core::layers::RecurrentMemory;
use kv_graph::{
    Activation, Affine, ConvSpec, CustomScope, CustomSizes, CustomSpec, GraphBuilder, GraphError,
    Input, NodeId,
};

use super::LayerContext;

/// Settings of one mixer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RgLruBlock {
    /// Channels of the recurrence.
    pub channels: usize,
    /// Heads that the channels are divided into: the matrices of gates mix within a head.
    pub n_heads: usize,
    /// Width of the convolution.
    pub d_conv: usize,
    /// Applied to the second projection.
    pub activation: Activation,
}

impl RgLruBlock {
    /// The memory of the layer: a value for each channel, and one that tells the state of a text
    /// from none.
    pub fn memory(&self) -> RecurrentMemory {
        RecurrentMemory {
            conv_row: self.d_conv.saturating_sub(1) * self.channels,
            state_row: self.channels + 1,
        }
    }

    /// Adds the block: `x [tokens, dim]` in, `[rows, dim]` out, where `rows` are the layer's output
    /// rows, or else all.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn build(
        &self,
        b: &mut GraphBuilder,
        at: LayerContext,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let channels = self.channels;
        let dim = b.shape_of(x).last().copied().unwrap_or(0);
        let states = b.input(Input::States)?;
        let y = b.affine("lru_y", x, Y, channels)?;
        let x = b.affine("lru_x", x, X, channels)?;
        let conv = ConvSpec {
            width: self.d_conv,
            weight: "lru_conv1d.weight".to_owned(),
            further: Vec::new(),
            bias: Some("lru_conv1d.bias".to_owned()),
        };
        let x = b.conv("lru_conv", at.layer, &conv, [x, states])?;
        let [input, decay] = self.gates(b, x)?;
        let weights = ["lru_input_gate.bias", "lru_decay_gate.bias", "lru_a"];
        let spec = CustomSpec {
            weights: weights.map(str::to_owned).to_vec(),
            scope: CustomScope::State(at.layer),
            ..CustomSpec::new(RgLru::NAME)
        };
        let sizes = CustomSizes {
            weights: &[&[channels], &[channels], &[channels]],
            width: channels,
        };
        let h = b.custom("lru_scan", &spec, &[x, input, decay, states], sizes)?;
        let h = at.take_rows(b, "lru_scan_rows", h)?;
        let y = at.take_rows(b, "lru_y_rows", y)?;
        let gated = b.gate("lru_gated", self.activation, y, h)?;
        b.affine("lru_out", gated, OUT, dim)
    }

    /// The arguments of the sigmoids that give the gates on inputs and on the decay, without their
    /// biases: `[tokens, channels]` each.
    fn gates(&self, b: &mut GraphBuilder, x: NodeId) -> Result<[NodeId; 2], GraphError> {
        let n = b.shape_of(x).first().copied().unwrap_or(0);
        let width = self.channels / self.n_heads.max(1);
        let heads = b.reshape("lru_heads", x, &[n, self.n_heads, width])?;
        let mut gate = |name: &str, weight: &str| {
            let gate = b.head_linear(&format!("{name}_heads"), heads, weight, width)?;
            b.reshape(name, gate, &[n, self.channels])
        };
        Ok([
            gate("lru_input_gate", "lru_input_gate.weight")?,
            gate("lru_decay_gate", "lru_decay_gate.weight")?,
        ])
    }
}

const X: Affine<'static> = Affine {
    weight: "lru_x.weight",
    bias: Some("lru_x.bias"),
};
const Y: Affine<'static> = Affine {
    weight: "lru_y.weight",
    bias: Some("lru_y.bias"),
};
const OUT: Affine<'static> = Affine {
    weight: "lru_out.weight",
    bias: Some("lru_out.bias"),
};

/// The RG-LRU. For inputs `x`, input gates `i` and decay gates `r`, `[tokens, channels]` each, with
/// biases `[channels]` of the gates and rates `a [channels]`, every token does `l = 8 a sigmoid(r +
/// bias_r)`, `h = exp(l) h + sqrt(1 - exp(2 l)) sigmoid(i + bias_i) x` and gives `h`; the first
/// token of a text is not scaled by the root. The rates are at most 0.
///
/// The state is `h [channels]`, then a 1, which tells a state of a text from that of none.
#[derive(Clone, Copy, Debug)]
pub(super) struct RgLru;

impl RgLru {
    const NAME: &'static str = "rg_lru";
}

impl CustomOp for RgLru {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn check(&self, node: &CustomShape<'_>) -> Result<(), String> {
        match *node.widths {
            [x, ..]
                if x > 0
                    && node.widths == [x; 3]
                    && node.weights == [[x].as_slice(); 3]
                    && node.width == x
                    && node.n_state == x + 1 =>
            {
                Ok(())
            }
            _ => Err(node.refusal(
                "x and two gates as wide, two biases and rates as wide, and a state of one more",
            )),
        }
    }

    fn rows(
        &self,
        rows: &CustomRows<'_>,
        state: &mut [f32],
        out: &mut [f32],
    ) -> Result<(), String> {
        let [x, input, decay] = rows.all_operands()?;
        let [input_bias, decay_bias, rates] = rows.all_weights()?;
        let Some((started, h)) = state.split_last_mut() else {
            return Err("no state".to_owned());
        };
        let width = h.len();
        let gates = input.chunks_exact(width).zip(decay.chunks_exact(width));
        let tokens = x.chunks_exact(width).zip(gates);
        for ((x, (input, decay)), y) in tokens.zip(out.chunks_exact_mut(width)) {
            let is_first = *started == 0.0;
            *started = 1.0;
            let biases = input_bias.iter().zip(decay_bias.iter());
            let gates = input.iter().zip(decay).zip(biases).zip(rates.iter());
            for (((h, y), x), (((input, decay), (input_bias, decay_bias)), rate)) in
                h.iter_mut().zip(y).zip(x).zip(gates)
            {
                let log = MOST_STEPS * rate * sigmoid(decay + decay_bias);
                let scale = if is_first {
                    1.0
                } else {
                    (1.0 - (2.0 * log).exp()).sqrt()
                };
                *h = log.exp() * *h + scale * (sigmoid(input + input_bias) * x);
                *y = *h;
            }
        }
        Ok(())
    }
}

/// The number of steps of its rate a channel decays by at most: the `c` of the paper.
const MOST_STEPS: f32 = 8.0;

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const X: [f32; 3] = [1.0, -2.0, 0.5];
    const GATES: [f32; 3] = [0.3, -1.0, 2.0];

    /// All rows at once, or one after the other: what comes out, and the state after.
    fn run(rate: f32, at_once: usize) -> (Vec<f32>, [f32; 2]) {
        let weights: [Arc<[f32]>; 3] = [[0.1].into(), [-0.2].into(), [rate].into()];
        let spec = CustomSpec::new(RgLru::NAME);
        let (mut state, mut all) = ([0.0; 2], Vec::new());
        for (x, gates) in X.chunks(at_once).zip(GATES.chunks(at_once)) {
            let rows = CustomRows {
                spec: &spec,
                n_rows: x.len(),
                operands: &[x, gates, gates],
                weights: &weights,
            };
            let mut out = vec![0.0; x.len()];
            RgLru.rows(&rows, &mut state, &mut out).unwrap();
            all.extend(out);
        }
        (all, state)
    }

    /// Each input's share of each result, in f64.
    #[test]
    fn the_recurrence_is_a_sum_of_decayed_inputs_however_it_is_cut() {
        for rate in [-0.01f32, -0.1, -2.0] {
            let (out, state) = run(rate, 3);
            assert_eq!((out.clone(), state), run(rate, 1));
            let sigmoid = |x: f32| 1.0 / (1.0 + (-f64::from(x)).exp());
            let log = |at: usize| 8.0 * f64::from(rate) * sigmoid(GATES[at] - 0.2);
            for (now, y) in out.iter().enumerate() {
                let share = |then: usize| {
                    let decay: f64 = (then + 1..=now).map(log).sum();
                    let scale = match then {
                        0 => 1.0,
                        _ => (1.0 - (2.0 * log(then)).exp()).sqrt(),
                    };
                    decay.exp() * scale * sigmoid(GATES[then] + 0.1) * f64::from(X[then])
                };
                let wanted: f64 = (0..=now).map(share).sum();
                assert!((f64::from(*y) - wanted).abs() < 1e-5, "{rate}, {now}: {y}");
            }
            assert_eq!(state, [out[2], 1.0]);
        }
    }

    #[test]
    fn nodes_of_other_sizes_are_refused_with_the_numbers() {
        let spec = CustomSpec::new(RgLru::NAME);
        let node = |widths, weights, n_state| CustomShape {
            spec: &spec,
            widths,
            weights,
            width: 4,
            n_state,
        };
        let three: &[&[usize]] = &[&[4], &[4], &[4]];
        assert_eq!(RgLru.check(&node(&[4, 4, 4], three, 5)), Ok(()));
        for wrong in [
            node(&[4, 4, 4], three, 4),
            node(&[4, 4], three, 5),
            node(&[4, 4, 3], three, 5),
            node(&[4, 4, 4], &[&[4], &[4]], 5),
            node(&[4, 4, 4], &[&[4], &[4], &[3]], 5),
            node(&[0, 0, 0], &[&[0], &[0], &[0]], 1),
        ] {
            let error = RgLru.check(&wrong).unwrap_err();
            assert!(error.contains("wanted: x and two gates"), "{error}");
        }
    }
}
