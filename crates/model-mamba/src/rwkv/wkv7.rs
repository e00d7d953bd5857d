//! [`Wkv7`]: the recurrence of RWKV-7: a delta rule whose removal has a key of its own, and rates
//! and decays for every key value (Peng et al., arXiv 2503.14456).
//!
//! It is not [`Op::Delta`](kv_graph::Op::Delta), which removes after the decay, with the key
//! that it adds and one rate for a head. Invariant: rows follow one after the other, so the bits
//! are the same however a sequence is cut up. Knows nothing of sequences or devices.

use kv_backend::{CustomOp, CustomRows, CustomShape};

use super::heads::{add_scaled, head_dim, normalize};

/// The largest decay: `exp(-exp(-1/2))` is the least factor of a state.
const DECAY: f32 = -0.606_530_66;

/// Lengths below this do not divide.
const LEAST_LENGTH: f32 = 1e-12;

/// For `r`, `w`, `k`, `v` and rates `a`, `[tokens, heads * dim]` each, and the weights `k_k`,
/// `k_a`, `r_k`, gain and bias, `[heads * dim]` each: a head has a state `S [dim, dim]`, keys by
/// values. With `x = k k_k` brought to length 1 and `k' = k (1 + (a - 1) k_a)`, every token does `S
/// = diag(exp(-e^(-1/2) sigmoid(w))) S - (a x) (x S) + k' v^T` and gives `r S`, less its mean and
/// divided by its deviation (`eps` is added to the variance), times the gain, plus the bias, plus
/// `sum(r k' r_k) v`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wkv7;

impl Wkv7 {
    pub(super) const NAME: &'static str = "rwkv.wkv7";
}

impl CustomOp for Wkv7 {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn check(&self, node: &CustomShape<'_>) -> Result<(), String> {
        let lens = node
            .weights
            .iter()
            .map(|shape| shape.iter().product::<usize>());
        match *node.widths {
            [r, w, k, v, a]
                if [w, k, v, a, node.width] == [r; 5]
                    && head_dim(r, node.n_state).is_some()
                    && lens.eq([r; 5])
                    && node.spec.param("eps").is_some() =>
            {
                Ok(())
            }
            _ => Err(node.refusal(
                "r, w, k, v and rates of heads, k_k, k_a, r_k, gain and bias, an output as wide, \
                 a matrix for each head, eps",
            )),
        }
    }

    fn rows(
        &self,
        rows: &CustomRows<'_>,
        state: &mut [f32],
        out: &mut [f32],
    ) -> Result<(), String> {
        let operands: [&[f32]; 5] = rows.all_operands()?;
        let weights = rows.all_weights::<5>()?;
        let n = weights[0].len();
        let Some(dim) = head_dim(n, state.len()) else {
            return Err(format!("a state of {} values", state.len()));
        };
        let eps = rows.spec.param("eps").unwrap_or(0.0);
        let mut scratch = Scratch::new(dim);
        for (at, out) in out.chunks_exact_mut(dim).enumerate() {
            let head = at % (n / dim);
            let [r, w, k, v, a] = operands.map(|x| &x[at * dim..(at + 1) * dim]);
            let [k_k, k_a, r_k, gain, bias] =
                weights.each_ref().map(|x| &x[head * dim..(head + 1) * dim]);
            scratch.prepare(k, a, [k_k, k_a]);
            let state = &mut state[head * dim * dim..(head + 1) * dim * dim];
            scratch.step(state, [r, w, v], out);
            normalize(out, [gain, bias], eps);
            let keys = r.iter().zip(&scratch.added).zip(r_k);
            let bonus = keys.map(|((r, k), r_k)| r * k * r_k).sum();
            add_scaled(out, bonus, v);
        }
        Ok(())
    }
}

/// Keys of one token and head, and what the removal key finds.
struct Scratch {
    removed: Vec<f32>,
    /// `removed` times the rates.
    rated: Vec<f32>,
    added: Vec<f32>,
    found: Vec<f32>,
}

impl Scratch {
    fn new(dim: usize) -> Self {
        let zeros = || vec![0.0; dim];
        Self {
            removed: zeros(),
            rated: zeros(),
            added: zeros(),
            found: zeros(),
        }
    }

    /// Both keys of a token.
    fn prepare(&mut self, k: &[f32], a: &[f32], [k_k, k_a]: [&[f32]; 2]) {
        for (x, (k, k_k)) in self.removed.iter_mut().zip(k.iter().zip(k_k)) {
            *x = k * k_k;
        }
        let square: f32 = self.removed.iter().map(|x| x * x).sum();
        let factor = 1.0 / square.sqrt().max(LEAST_LENGTH);
        for (at, (k, a)) in k.iter().zip(a).enumerate() {
            self.removed[at] *= factor;
            self.rated[at] = a * self.removed[at];
            self.added[at] = k * (1.0 + (a - 1.0) * k_a[at]);
        }
    }

    /// Brings a state from before the token to after it, and gives the head's output.
    fn step(&mut self, state: &mut [f32], [r, w, v]: [&[f32]; 3], out: &mut [f32]) {
        let dim = v.len();
        self.found.fill(0.0);
        for (row, x) in state.chunks_exact(dim).zip(&self.removed) {
            add_scaled(&mut self.found, *x, row);
        }
        out.fill(0.0);
        for (at, row) in state.chunks_exact_mut(dim).enumerate() {
            let kept = (DECAY / (1.0 + (-w[at]).exp())).exp();
            let (rated, added) = (self.rated[at], self.added[at]);
            for ((s, found), v) in row.iter_mut().zip(&self.found).zip(v) {
                *s = kept * *s - rated * found + added * v;
            }
            add_scaled(out, r[at], row);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use kv_graph::CustomSpec;

    use super::super::testing::{DIM, HEADS, N, operands, run_op, spec, weights};
    use super::*;

    fn run(at_once: usize) -> (Vec<f32>, Vec<f32>) {
        run_op::<5, 5>(&Wkv7, at_once)
    }

    /// The states of a head after each token, `S = S (diag(w) - x^T (a x)) + v^T k'` with values by
    /// keys and whole matrices, in f64.
    fn wanted_states(head: usize) -> Vec<[[f64; DIM]; DIM]> {
        let all = operands::<5>();
        let weights = weights::<5>();
        let weight = |which: usize, c: usize| f64::from(weights[which][head * DIM + c]);
        let mut s = [[0.0; DIM]; DIM];
        let after = |token: usize| {
            let at = |what: usize, c: usize| f64::from(all[what][(token * HEADS + head) * DIM + c]);
            let length = (0..DIM)
                .map(|c| (at(2, c) * weight(0, c)).powi(2))
                .sum::<f64>()
                .sqrt();
            let x = |c: usize| at(2, c) * weight(0, c) / length;
            let key = |c: usize| at(2, c) * (1.0 + (at(4, c) - 1.0) * weight(1, c));
            let kept = |c: usize| (-(-0.5f64).exp() / (1.0 + (-at(1, c)).exp())).exp();
            let transition = |from: usize, to: usize| {
                let decay = if from == to { kept(to) } else { 0.0 };
                decay - x(from) * at(4, to) * x(to)
            };
            let old = s;
            for (value, row) in s.iter_mut().enumerate() {
                for (to, new) in row.iter_mut().enumerate() {
                    let moved = (0..DIM).map(|from| old[value][from] * transition(from, to));
                    *new = moved.sum::<f64>() + at(3, value) * key(to);
                }
            }
            s
        };
        (0..N).map(after).collect()
    }

    #[test]
    fn states_are_those_of_the_matrix_recurrence_however_it_is_cut() {
        let (out, state) = run(N);
        for at_once in [1, 2] {
            assert_eq!((out.clone(), state.clone()), run(at_once));
        }
        for head in 0..HEADS {
            let wanted = wanted_states(head);
            for (key, row) in state[head * DIM * DIM..].chunks(DIM).take(DIM).enumerate() {
                for (value, ours) in row.iter().enumerate() {
                    let wanted = wanted[N - 1][value][key];
                    assert!((f64::from(*ours) - wanted).abs() < 1e-5, "{ours}, {wanted}");
                }
            }
        }
    }

    /// The output of a token, from the state after it.
    #[test]
    fn outputs_are_normal_values_and_a_bonus() {
        let (out, _) = run(N);
        let all = operands::<5>();
        let weights = weights::<5>();
        for (at, ours) in out.chunks(DIM).enumerate() {
            let (token, head) = (at / HEADS, at % HEADS);
            let s = wanted_states(head)[token];
            let at = |what: usize, c: usize| f64::from(all[what][(token * HEADS + head) * DIM + c]);
            let weight = |which: usize, c: usize| f64::from(weights[which][head * DIM + c]);
            let y = s.map(|row| (0..DIM).map(|c| row[c] * at(0, c)).sum::<f64>());
            let mean = y.iter().sum::<f64>() / DIM as f64;
            let variance = y.iter().map(|y| (y - mean).powi(2)).sum::<f64>() / DIM as f64;
            let key = |c: usize| at(2, c) * (1.0 + (at(4, c) - 1.0) * weight(1, c));
            let bonus: f64 = (0..DIM).map(|c| at(0, c) * key(c) * weight(2, c)).sum();
            for (c, ours) in ours.iter().enumerate() {
                let normed = (y[c] - mean) / (variance + 1e-3).sqrt();
                let wanted = normed * weight(3, c) + weight(4, c) + bonus * at(3, c);
                assert!((f64::from(*ours) - wanted).abs() < 1e-4, "{ours}, {wanted}");
            }
        }
    }

    #[test]
    fn nodes_of_other_sizes_are_refused_with_the_numbers() {
        let spec = spec(Wkv7::NAME);
        let five: &[&[usize]] = &[&[6], &[6], &[6], &[6], &[6]];
        let node = |widths, weights, width, n_state| CustomShape {
            spec: &spec,
            widths,
            weights,
            width,
            n_state,
        };
        assert_eq!(Wkv7.check(&node(&[6; 5], five, 6, 18)), Ok(()));
        for wrong in [
            node(&[6; 5], five, 6, 17),
            node(&[6; 5], five, 5, 18),
            node(&[6; 4], five, 6, 18),
            node(&[6; 5], &five[..4], 6, 18),
            node(&[6, 6, 6, 6, 3], five, 6, 18),
        ] {
            let error = Wkv7.check(&wrong).unwrap_err();
            assert!(error.contains("wanted: r, w, k, v and rates"), "{error}");
        }
        let without = CustomSpec::new(Wkv7::NAME);
        let node = CustomShape {
            spec: &without,
            ..node(&[6; 5], five, 6, 18)
        };
        assert!(Wkv7.check(&node).is_err());
    }
}
