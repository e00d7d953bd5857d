//! What [`Evaluator`] computes of recurrent layers: convolutions and scans, token by token.
//!
//! Invariant: a group of rows starts from the state that it names, or from zeros, and stores its
//! state after just as many rows as the inputs say. After every row a state is rounded to its type;
//! the row's outputs read it before. Does not know how states are laid out on
//! devices or when one is kept.

use kv_core::LayerIdx;
use kv_graph::{ConvSpec, DecaySpec, DeltaSpec, HeadScanSpec, Node, ScanSpec};
use kv_rows::StateType;

use super::{Evaluator, Memory, StateKind, Value};

/// The states of a layer.
struct States {
    layer: LayerIdx,
    kind: StateKind,
    /// Values of one.
    len: usize,
}

impl Evaluator<'_> {
    /// Walks all groups of rows: `token(state, row)` gives the outputs of a row.
    fn recur(
        &self,
        node: &Node,
        states: States,
        memory: &mut Memory,
        token: impl Fn(&mut Vec<f64>, usize) -> Vec<f64>,
    ) -> Value {
        let mut out = vec![0.0; node.n_values()];
        let state_type = match states.kind {
            StateKind::Conv => StateType::F32,
            StateKind::Scan => self.layout.state(states.layer).unwrap().state_type,
        };
        for group in self.inputs.states {
            let mut state = match group.source {
                None => vec![0.0; states.len],
                Some(row) => memory.states[&(states.layer, states.kind, row)].clone(),
            };
            for (n_rows, &row) in (1u32..).zip(&group.rows) {
                let row = row as usize;
                let result = token(&mut state, row);
                out[row * node.row_len()..][..node.row_len()].copy_from_slice(&result);
                if state_type != StateType::F32 {
                    let round = |s: &mut f64| *s = f64::from(state_type.round(*s as f32));
                    state.iter_mut().for_each(round);
                }
                for store in group.stores.iter().filter(|store| store.n_rows == n_rows) {
                    let key = (states.layer, states.kind, store.to);
                    memory.states.insert(key, state.clone());
                }
            }
        }
        out
    }

    pub(super) fn conv(
        &self,
        node: &Node,
        layer: LayerIdx,
        conv: &ConvSpec,
        memory: &mut Memory,
    ) -> Value {
        let (channels, width) = (node.row_len(), conv.width);
        let weight: Vec<f64> = conv.weights().flat_map(|w| self.weight(w)).collect();
        let bias = conv.bias.as_ref().map(|b| self.weight(b));
        let x = self.operand(node, 0);
        let states = States {
            layer,
            kind: StateKind::Conv,
            len: (width - 1) * channels,
        };
        self.recur(node, states, memory, |state, row| {
            state.extend_from_slice(&x[row * channels..][..channels]);
            let y = (0..channels).map(|i| {
                let taps = (0..width).map(|k| weight[i * width + k] * state[k * channels + i]);
                taps.sum::<f64>() + bias.as_ref().map_or(0.0, |b| b[i])
            });
            let y = y.collect();
            state.drain(..channels);
            y
        })
    }

    pub(super) fn scan(
        &self,
        node: &Node,
        layer: LayerIdx,
        scan: &ScanSpec,
        memory: &mut Memory,
    ) -> Value {
        let (channels, n) = (node.row_len(), scan.d_state);
        let (a, d) = (self.weight(&scan.a), self.weight(&scan.d));
        let [x, dt, b, c] = [0, 1, 2, 3].map(|at| self.operand(node, at));
        let states = States {
            layer,
            kind: StateKind::Scan,
            len: channels * n,
        };
        self.recur(node, states, memory, |state, row| {
            let y = (0..channels).map(|i| {
                let (x, dt) = (x[row * channels + i], dt[row * channels + i]);
                let step = dt.exp().ln_1p();
                let mut y = d[i] * x;
                for k in 0..n {
                    let h = &mut state[i * n + k];
                    *h = *h * (step * a[i * n + k]).exp() + step * b[row * n + k] * x;
                    y += c[row * n + k] * *h;
                }
                y
            });
            y.collect()
        })
    }

    pub(super) fn scan_heads(
        &self,
        node: &Node,
        layer: LayerIdx,
        scan: &HeadScanSpec,
        memory: &mut Memory,
    ) -> Value {
        let (channels, n) = (node.row_len(), scan.d_state);
        let (head_dim, per_group) = (channels / scan.n_heads, scan.n_heads / scan.n_groups);
        let [a, d, bias] = [&scan.a, &scan.d, &scan.dt_bias].map(|name| self.weight(name));
        let [x, dt, b, c] = [0, 1, 2, 3].map(|at| self.operand(node, at));
        let states = States {
            layer,
            kind: StateKind::Scan,
            len: channels * n,
        };
        self.recur(node, states, memory, |state, row| {
            let y = (0..channels).map(|i| {
                let head = i / head_dim;
                let narrow = (row * scan.n_groups + head / per_group) * n;
                let (x, dt) = (x[row * channels + i], dt[row * scan.n_heads + head]);
                let step = (dt + bias[head]).exp().ln_1p();
                let mut y = d[head] * x;
                for k in 0..n {
                    let h = &mut state[i * n + k];
                    *h = *h * (step * a[head]).exp() + step * b[narrow + k] * x;
                    y += c[narrow + k] * *h;
                }
                y
            });
            y.collect()
        })
    }

    pub(super) fn decay(&self, node: &Node, decay: &DecaySpec) -> Value {
        let (a, bias) = (self.weight(&decay.a), self.weight(&decay.dt_bias));
        let columns = node.row_len();
        let per_head = columns / decay.n_heads;
        let values = self.operand(node, 0).iter().enumerate();
        let factor = |(at, x): (usize, &f64)| {
            let i = at % columns;
            (a[i / per_head] * (x + bias[i]).exp().ln_1p()).exp()
        };
        values.map(factor).collect()
    }

    pub(super) fn delta(
        &self,
        node: &Node,
        layer: LayerIdx,
        delta: &DeltaSpec,
        memory: &mut Memory,
    ) -> Value {
        let (channels, n) = (node.row_len(), delta.k_dim);
        let (v_dim, keys) = (channels / delta.n_heads, delta.key_heads * n);
        let [q, k, v, decay, beta] = [0, 1, 2, 3, 4].map(|at| self.operand(node, at));
        let n_decays = self.shape(node.operands[3])[1];
        let states = States {
            layer,
            kind: StateKind::Scan,
            len: channels * n,
        };
        self.recur(node, states, memory, |state, row| {
            let y = (0..channels).map(|i| {
                let head = i / v_dim;
                let first = row * keys + delta.key_head(head) * n;
                let (q, k) = (&q[first..first + n], &k[first..first + n]);
                let s = &mut state[i * n..(i + 1) * n];
                for (at, s) in s.iter_mut().enumerate() {
                    let decays = n_decays / delta.n_heads;
                    *s *= decay[row * n_decays + head * decays + at % decays];
                }
                let known: f64 = s.iter().zip(k).map(|(s, k)| s * k).sum();
                let change = beta[row * delta.n_heads + head] * (v[row * channels + i] - known);
                s.iter_mut().zip(k).for_each(|(s, k)| *s += change * k);
                f64::from(delta.scale) * s.iter().zip(q).map(|(s, q)| s * q).sum::<f64>()
            });
            y.collect()
        })
    }
}
