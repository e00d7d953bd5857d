//! What [`Evaluator`] computes of recurrent layers: convolutions and scans, token by token.
//!
//! Invariant: a group of rows starts from the state that it names, or from zeros, and stores its
//! state after just as many rows as the inputs say. Does not know how states are laid out on
//! devices or when one is kept.

use kv_core::LayerIdx;
use kv_core::graph::{ConvSpec, HeadScanSpec, Node, ScanSpec};

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
        for group in self.inputs.states {
            let mut state = match group.source {
                None => vec![0.0; states.len],
                Some(row) => memory.states[&(states.layer, states.kind, row)].clone(),
            };
            for (n_rows, &row) in (1u32..).zip(&group.rows) {
                let row = row as usize;
                let result = token(&mut state, row);
                out[row * node.row_len()..][..node.row_len()].copy_from_slice(&result);
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
        let weight = self.weight(&conv.weight);
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
}
