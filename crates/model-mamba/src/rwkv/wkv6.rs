//! [`Wkv6`]: the recurrence of RWKV-6: sums of keys and values, whose rows decay by as much as each
//! token says (Peng et al., arXiv 2404.05892).
//!
//! Invariant: rows follow one after the other, so the bits are the same however a sequence is cut
//! up. Knows nothing of sequences or devices.

use kv_backend::{CustomOp, CustomRows, CustomShape};

use super::heads::{add_scaled, head_dim, normalize};

/// For `r`, `k`, `v` and `decay`, `[tokens, heads * dim]` each, and weights first (`u`, `[heads,
/// dim]`), gain and bias (`[heads * dim]`): a head has a state `S [dim, dim]`, keys by values, and
/// every token gives `r (S + diag(u) k v^T)`, less its mean and divided by its deviation (`eps` is
/// added to the variance), times the gain, plus the bias; then `S = diag(exp(-exp(decay))) S + k
/// v^T`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wkv6;

impl Wkv6 {
    pub(super) const NAME: &'static str = "rwkv.wkv6";
}

impl CustomOp for Wkv6 {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn check(&self, node: &CustomShape<'_>) -> Result<(), String> {
        let lens = node
            .weights
            .iter()
            .map(|shape| shape.iter().product::<usize>());
        match *node.widths {
            [r, k, v, decay]
                if [k, v, decay, node.width] == [r; 4]
                    && head_dim(r, node.n_state).is_some()
                    && lens.eq([r; 3])
                    && node.spec.param("eps").is_some() =>
            {
                Ok(())
            }
            _ => Err(node.refusal(
                "r, k, v and decays of heads, first, gain and bias, an output as wide, a matrix \
                 for each head, eps",
            )),
        }
    }

    fn rows(
        &self,
        rows: &CustomRows<'_>,
        state: &mut [f32],
        out: &mut [f32],
    ) -> Result<(), String> {
        let [r, k, v, decay] = rows.all_operands()?;
        let [first, gain, bias] = rows.all_weights()?;
        let Some(dim) = head_dim(first.len(), state.len()) else {
            return Err(format!("a state of {} values", state.len()));
        };
        let eps = rows.spec.param("eps").unwrap_or(0.0);
        let n_heads = first.len() / dim;
        for (at, out) in out.chunks_exact_mut(dim).enumerate() {
            let head = at % n_heads;
            let (here, of_head) = (at * dim..(at + 1) * dim, head * dim..(head + 1) * dim);
            let token = HeadToken {
                r: &r[here.clone()],
                k: &k[here.clone()],
                v: &v[here.clone()],
                decay: &decay[here],
                first: &first[of_head.clone()],
            };
            token.step(&mut state[head * dim * dim..(head + 1) * dim * dim], out);
            normalize(out, [&gain[of_head.clone()], &bias[of_head]], eps);
        }
        Ok(())
    }
}

/// The values of one token for one head.
struct HeadToken<'a> {
    r: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    decay: &'a [f32],
    first: &'a [f32],
}

impl HeadToken<'_> {
    /// Gives the head's output, and brings its state from before the token to after it.
    fn step(&self, state: &mut [f32], out: &mut [f32]) {
        out.fill(0.0);
        for (at, row) in state.chunks_exact_mut(self.v.len()).enumerate() {
            let (r, k) = (self.r[at], self.k[at]);
            let kept = (-self.decay[at].exp()).exp();
            let now = r * self.first[at] * k;
            for ((s, v), y) in row.iter_mut().zip(self.v).zip(&mut *out) {
                *y += r * *s + now * v;
                *s *= kept;
            }
            add_scaled(row, k, self.v);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Arc;

    use kv_graph::CustomSpec;

    use super::super::testing::{DIM, HEADS, N, operands, run_op, spec, weights};
    use super::*;

    fn run(at_once: usize) -> (Vec<f32>, Vec<f32>) {
        run_op::<4, 3>(&Wkv6, at_once)
    }

    /// The sum over all tokens before, written out, in f64.
    fn wanted(now: usize, head: usize) -> Vec<f64> {
        let all = operands::<4>();
        let weights: [Arc<[f32]>; 3] = weights();
        let at = |what: usize, token: usize, c: usize| {
            f64::from(all[what][(token * HEADS + head) * DIM + c])
        };
        let kept = |then: usize, c: usize| -> f64 {
            (then + 1..now)
                .map(|t| (-at(3, t, c).exp()).exp())
                .product()
        };
        let score = |then: usize| -> f64 {
            let of = |c: usize| {
                let weight = if then == now {
                    f64::from(weights[0][head * DIM + c])
                } else {
                    kept(then, c)
                };
                at(0, now, c) * weight * at(1, then, c)
            };
            (0..DIM).map(of).sum()
        };
        let value = |c: usize| -> f64 { (0..=now).map(|then| score(then) * at(2, then, c)).sum() };
        let values: Vec<f64> = (0..DIM).map(value).collect();
        let mean = values.iter().sum::<f64>() / DIM as f64;
        let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / DIM as f64;
        let normed = values.iter().enumerate().map(|(c, x)| {
            let [gain, bias] = [1, 2].map(|w| f64::from(weights[w][head * DIM + c]));
            (x - mean) / (variance + 1e-3).sqrt() * gain + bias
        });
        normed.collect()
    }

    #[test]
    fn the_recurrence_is_attention_with_decays_however_it_is_cut() {
        let whole = run(N);
        for at_once in [1, 2] {
            assert_eq!(whole, run(at_once));
        }
        for (at, ours) in whole.0.chunks(DIM).enumerate() {
            let wanted = wanted(at / HEADS, at % HEADS);
            for (ours, wanted) in ours.iter().zip(&wanted) {
                let off = (f64::from(*ours) - wanted).abs();
                assert!(off < 1e-4, "{at}: {ours}, {wanted}");
            }
        }
    }

    #[test]
    fn nodes_of_other_sizes_are_refused_with_the_numbers() {
        let spec = spec(Wkv6::NAME);
        let three: &[&[usize]] = &[&[2, 3], &[6], &[6]];
        let node = |widths, weights, width, n_state| CustomShape {
            spec: &spec,
            widths,
            weights,
            width,
            n_state,
        };
        assert_eq!(Wkv6.check(&node(&[6; 4], three, 6, 18)), Ok(()));
        for wrong in [
            node(&[6; 4], three, 6, 17),
            node(&[6; 4], three, 5, 18),
            node(&[6; 3], three, 6, 18),
            node(&[6; 4], &three[..2], 6, 18),
            node(&[6, 6, 6, 3], three, 6, 18),
        ] {
            let error = Wkv6.check(&wrong).unwrap_err();
            assert!(error.contains("wanted: r, k, v and decays"), "{error}");
        }
        let without = CustomSpec::new(Wkv6::NAME);
        let node = CustomShape {
            spec: &without,
            ..node(&[6; 4], three, 6, 18)
        };
        assert!(Wkv6.check(&node).is_err());
    }
}
