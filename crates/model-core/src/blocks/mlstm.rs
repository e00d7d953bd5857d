//! The mixer of an xLSTM layer: linear attention with exponential gates, whose keys and values are
//! summed in a matrix for each head, a norm of heads, and a gate on what comes out.
//!
//! The matrix LSTM (mLSTM) of Beck et al., arXiv 2405.04517, is a custom operation that the block
//! brings along. Does not know the layers around.

use kv_backend::{CustomOp, CustomRows, CustomShape};
use kv_core::layers::RecurrentMemory;
use kv_graph::{
    Activation, Affine, CustomScope, CustomSizes, CustomSpec, GraphBuilder, GraphError, Input,
    NodeId, RowGain,
};

use super::LayerContext;

/// Settings of one mixer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MLstmBlock {
    /// Number of heads.
    pub n_heads: usize,
    /// Values of one query or key.
    pub k_dim: usize,
    /// Values of one value.
    pub v_dim: usize,
    /// The bound on the gates before their functions.
    pub gate_cap: f32,
    /// Added to the divisor of outputs.
    pub eps: f32,
    /// Added to the variance in the norm of heads.
    pub norm_eps: f32,
}

impl MLstmBlock {
    /// The memory of the layer: for each head a matrix `[k_dim, v_dim]`, its normaliser `[k_dim]`
    /// and the exponent that both are divided by.
    pub fn memory(&self) -> RecurrentMemory {
        RecurrentMemory {
            conv_row: 0,
            state_row: self
                .n_heads
                .saturating_mul(head_len(self.k_dim, self.v_dim)),
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
        let dim = b.shape_of(x).last().copied().unwrap_or(0);
        let (keys, values) = (self.n_heads * self.k_dim, self.n_heads * self.v_dim);
        let states = b.input(Input::States)?;
        let q = b.linear("mlstm_q", x, "mlstm_q.weight", keys)?;
        let k = b.linear("mlstm_k", x, "mlstm_k.weight", keys)?;
        let v = b.linear("mlstm_v", x, "mlstm_v.weight", values)?;
        let o = b.linear("mlstm_o_gate", x, "mlstm_o_gate.weight", values)?;
        let i = self.gate(b, "mlstm_i_gate", x)?;
        let f = self.gate(b, "mlstm_f_gate", x)?;
        let params = [("eps", self.eps), ("norm_eps", self.norm_eps)];
        let spec = CustomSpec {
            params: params.map(|(name, x)| (name.to_owned(), x)).into(),
            scope: CustomScope::State(at.layer),
            ..CustomSpec::new(MLstm::NAME)
        };
        let sizes = CustomSizes {
            width: values,
            ..CustomSizes::default()
        };
        let h = b.custom("mlstm_scan", &spec, &[q, k, v, i, f, states], sizes)?;
        let h = at.take_rows(b, "mlstm_scan_rows", h)?;
        let o = at.take_rows(b, "mlstm_o_gate_rows", o)?;
        let normed = b.gain("mlstm_normed", h, RowGain::PerValue("mlstm_norm.weight"))?;
        let gated = b.gate("mlstm_gated", Activation::Sigmoid, o, normed)?;
        b.linear("mlstm_out", gated, "mlstm_out.weight", dim)
    }

    /// A gate for each head, before its function: `[tokens, heads]`.
    fn gate(&self, b: &mut GraphBuilder, name: &str, x: NodeId) -> Result<NodeId, GraphError> {
        let (weight, bias) = (format!("{name}.weight"), format!("{name}.bias"));
        let gate = b.affine(name, x, Affine::new(&weight).bias(&bias), self.n_heads)?;
        b.soft_cap(&format!("{name}_capped"), gate, self.gate_cap)
    }
}

/// Values of the state of a head.
const fn head_len(k_dim: usize, v_dim: usize) -> usize {
    k_dim * v_dim + k_dim + 1
}

/// The mLSTM. A head has a state of `C [k_dim, v_dim]`, `n [k_dim]` and `m`, all of them divided by
/// `e^m`, so that no exponential overflows. For `q` and `k [tokens, heads * k_dim]`,
/// `v [tokens, heads * v_dim]`, and `i` and `f [tokens, heads]`, every token does
/// `m' = max(ln sigmoid(f) + m, i)`, `C = e^(ln sigmoid(f) + m - m') C + e^(i - m') k v^T`, `n`
/// likewise with `k`, and gives `q C / (max(|q n|, e^-m') + eps)`, where `q` has the factor
/// `1 / sqrt(k_dim)`, less its mean and divided by its deviation (`norm_eps` is added to the
/// variance).
#[derive(Clone, Copy, Debug)]
pub(super) struct MLstm;

impl MLstm {
    const NAME: &'static str = "mlstm";
}

/// The values of one token for one head.
struct HeadToken<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    i: f32,
    f: f32,
}

impl HeadToken<'_> {
    /// Brings a state from before the token to after it, and gives the head's output.
    fn step(&self, state: &mut [f32], eps: f32, out: &mut [f32]) {
        let v_dim = self.v.len();
        let scale = 1.0 / (self.k.len() as f32).sqrt();
        let (c, rest) = state.split_at_mut(self.k.len() * v_dim);
        let Some((m, n)) = rest.split_last_mut() else {
            return;
        };
        let kept = log_sigmoid(self.f) + *m;
        let max = kept.max(self.i);
        let (old, new) = ((kept - max).exp(), (self.i - max).exp());
        *m = max;
        out.fill(0.0);
        let mut along = 0.0;
        let keys = self.q.iter().zip(self.k).zip(n);
        for (((q, k), n), c) in keys.zip(c.chunks_exact_mut(v_dim)) {
            let (q, k) = (scale * q, new * k);
            *n = old * *n + k;
            along += q * *n;
            for ((c, v), y) in c.iter_mut().zip(self.v).zip(&mut *out) {
                *c = old * *c + k * v;
                *y += q * *c;
            }
        }
        let divisor = along.abs().max((-max).exp()) + eps;
        out.iter_mut().for_each(|y| *y /= divisor);
    }
}

/// Without its mean, divided by its deviation.
fn normalize(x: &mut [f32], eps: f32) {
    let n = x.len() as f32;
    let mean = x.iter().sum::<f32>() / n;
    x.iter_mut().for_each(|x| *x -= mean);
    let variance = x.iter().map(|x| x * x).sum::<f32>() / n;
    let factor = 1.0 / (variance + eps).sqrt();
    x.iter_mut().for_each(|x| *x *= factor);
}

fn log_sigmoid(x: f32) -> f32 {
    x.min(0.0) - (-x.abs()).exp().ln_1p()
}

impl CustomOp for MLstm {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn check(&self, node: &CustomShape<'_>) -> Result<(), String> {
        let has_params = ["eps", "norm_eps"].map(|name| node.spec.param(name).is_some());
        match *node.widths {
            [q, k, v, i, f]
                if i > 0
                    && [q, k, v].iter().all(|&n| n > 0 && n.is_multiple_of(i))
                    && (q, i, v) == (k, f, node.width)
                    && node.n_state == i * head_len(k / i, v / i)
                    && node.weights.is_empty()
                    && has_params == [true; 2] =>
            {
                Ok(())
            }
            _ => Err(node.refusal(
                "queries, keys and values of heads, two gates for each head, an output as wide as \
                 values, a state of C, n and m for each head, eps and norm_eps",
            )),
        }
    }

    fn rows(
        &self,
        rows: &CustomRows<'_>,
        state: &mut [f32],
        out: &mut [f32],
    ) -> Result<(), String> {
        let [q, k, v, i, f] = rows.all_operands()?;
        let n_gates = i.len();
        if n_gates == 0 {
            return Ok(());
        }
        let (k_dim, v_dim) = (k.len() / n_gates, v.len() / n_gates);
        let [eps, norm_eps] = ["eps", "norm_eps"].map(|name| rows.spec.param(name).unwrap_or(0.0));
        let vectors = q
            .chunks_exact(k_dim)
            .zip(k.chunks_exact(k_dim))
            .zip(v.chunks_exact(v_dim));
        let heads = vectors
            .zip(i.iter().zip(f))
            .zip(out.chunks_exact_mut(v_dim));
        let len = head_len(k_dim, v_dim);
        let n_heads = (state.len() / len).max(1);
        for (at, ((((q, k), v), (&i, &f)), out)) in heads.enumerate() {
            let first = at % n_heads * len;
            let token = HeadToken { q, k, v, i, f };
            token.step(&mut state[first..first + len], eps, out);
            normalize(out, norm_eps);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three tokens of two heads, of keys of 2 and values of 3 values.
    const N: usize = 3;
    const HEADS: usize = 2;
    const K: usize = 2;
    const V: usize = 3;

    fn values(seed: usize, n: usize) -> Vec<f32> {
        let value = |at: usize| ((at * 7 + seed * 13) % 19) as f32 / 6.0 - 1.5;
        (0..n).map(value).collect()
    }

    /// All rows at once, or one after the other: what comes out, and the state after.
    fn run(offset: f32, at_once: usize) -> (Vec<f32>, Vec<f32>) {
        let widths = [HEADS * K, HEADS * K, HEADS * V, HEADS, HEADS];
        let mut all: Vec<Vec<f32>> = (0..5).map(|at| values(at, N * widths[at])).collect();
        all[3].iter_mut().for_each(|i| *i += offset);
        let params = [("eps", 1e-6), ("norm_eps", 1e-5)].map(|(n, x)| (n.to_owned(), x));
        let spec = CustomSpec {
            params: params.into(),
            ..CustomSpec::new(MLstm::NAME)
        };
        let mut state = vec![0.0; HEADS * head_len(K, V)];
        let mut out = Vec::new();
        for first in (0..N).step_by(at_once) {
            let cut: Vec<&[f32]> = all
                .iter()
                .zip(widths)
                .map(|(x, width)| &x[first * width..(first + at_once) * width])
                .collect();
            let rows = CustomRows {
                spec: &spec,
                n_rows: at_once,
                operands: &cut,
                weights: &[],
            };
            let mut here = vec![0.0; at_once * HEADS * V];
            MLstm.rows(&rows, &mut state, &mut here).unwrap();
            out.extend(here);
        }
        (out, state)
    }

    /// The sum over all tokens before, written out, in f64.
    fn wanted(offset: f32, now: usize, head: usize) -> Vec<f64> {
        let at = |seed: usize, width: usize, token: usize, column: usize| {
            f64::from(values(seed, N * width)[token * width + column])
        };
        let key = |seed: usize, token: usize, c: usize| at(seed, HEADS * K, token, head * K + c);
        let forget = |token: usize| -(-at(4, HEADS, token, head)).exp().ln_1p();
        let weight = |then: usize| {
            let input = at(3, HEADS, then, head) + f64::from(offset);
            (input + (then + 1..=now).map(forget).sum::<f64>()).exp()
        };
        let score = |then: usize| {
            let product: f64 = (0..K).map(|c| key(0, now, c) * key(1, then, c)).sum();
            weight(then) * product / (K as f64).sqrt()
        };
        let sum: f64 = (0..=now).map(score).sum();
        let value = |c: usize| {
            let of = |then: usize| score(then) * at(2, HEADS * V, then, head * V + c);
            (0..=now).map(of).sum::<f64>() / sum.abs().max(1.0)
        };
        let values: Vec<f64> = (0..V).map(value).collect();
        let mean = values.iter().sum::<f64>() / V as f64;
        let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / V as f64;
        let normed = values.iter().map(|x| (x - mean) / (variance + 1e-5).sqrt());
        normed.collect()
    }

    #[test]
    fn the_recurrence_is_attention_with_decays_however_it_is_cut() {
        for offset in [0.0f32, -3.0, 60.0] {
            let (out, state) = run(offset, N);
            assert_eq!((out.clone(), state.clone()), run(offset, 1));
            for (at, ours) in out.chunks(V).enumerate() {
                let wanted = wanted(offset, at / HEADS, at % HEADS);
                for (ours, wanted) in ours.iter().zip(&wanted) {
                    let off = (f64::from(*ours) - wanted).abs();
                    assert!(off < 1e-3, "{offset}, {at}: {ours}, {wanted}");
                }
            }
            assert!(state.iter().all(|x| x.is_finite()), "{state:?}");
        }
    }

    #[test]
    fn nodes_of_other_sizes_are_refused_with_the_numbers() {
        let params = [("eps", 1e-6), ("norm_eps", 1e-5)].map(|(n, x)| (n.to_owned(), x));
        let spec = CustomSpec {
            params: params.into(),
            ..CustomSpec::new(MLstm::NAME)
        };
        let node = |widths, width, n_state| CustomShape {
            spec: &spec,
            widths,
            weights: &[],
            width,
            n_state,
        };
        let n_state = 2 * head_len(2, 3);
        assert_eq!(MLstm.check(&node(&[4, 4, 6, 2, 2], 6, n_state)), Ok(()));
        for wrong in [
            node(&[4, 4, 6, 2, 2], 6, n_state + 1),
            node(&[4, 4, 6, 2, 2], 5, n_state),
            node(&[4, 4, 6, 2, 1], 6, n_state),
            node(&[4, 6, 6, 2, 2], 6, n_state),
            node(&[4, 4, 6, 0, 0], 6, 0),
            node(&[4, 4, 6, 2], 6, n_state),
        ] {
            let error = MLstm.check(&wrong).unwrap_err();
            assert!(error.contains("wanted: queries, keys"), "{error}");
        }
        let without = CustomSpec::new(MLstm::NAME);
        let node = CustomShape {
            spec: &without,
            ..node(&[4, 4, 6, 2, 2], 6, n_state)
        };
        assert!(MLstm.check(&node).is_err());
    }
}
