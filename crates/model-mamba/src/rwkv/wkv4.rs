//! [`Wkv4`]: the average of values that RWKV-4 has in place of attention, weighed by `e^key` and
//! the less the longer ago they were, computed as a recurrence (Peng et al., arXiv 2305.13048).
//!
//! Numerator and denominator are kept divided by `e^max`, so that no exponential overflows.
//! Invariant: the denominator is at least 1 from the first token on, so a 0 there tells a memory
//! that is new: its maximum is then as good as minus infinity, whatever is stored.

use kv_backend::{CustomOp, CustomRows, CustomShape};

/// For `(k, v)`, `[tokens, width]` each, and the weights decay (the negative number that `max`
/// changes by from token to token) and first (added to the key of the token itself), `[width]`
/// each: the average, `[tokens, width]`. The state is `[numerator, denominator, maximum]`,
/// `[width]` each.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wkv4;

impl Wkv4 {
    pub(super) const NAME: &'static str = "rwkv.wkv4";
}

impl CustomOp for Wkv4 {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn check(&self, node: &CustomShape<'_>) -> Result<(), String> {
        match (node.widths, node.weights) {
            (&[k, v], &[&[decay], &[first]])
                if k > 0 && [v, decay, first, node.width] == [k; 4] && node.n_state == 3 * k =>
            {
                Ok(())
            }
            _ => {
                Err(node
                    .refusal("k and v, decay and first, all as wide, and a state of thrice that"))
            }
        }
    }

    fn rows(
        &self,
        rows: &CustomRows<'_>,
        state: &mut [f32],
        out: &mut [f32],
    ) -> Result<(), String> {
        let [k, v] = rows.all_operands()?;
        let [decay, first] = rows.all_weights()?;
        let width = state.len() / 3;
        let (sums, max) = state.split_at_mut(2 * width);
        let (numerator, denominator) = sums.split_at_mut(width);
        let tokens = k.chunks_exact(width).zip(v.chunks_exact(width));
        for ((k, v), y) in tokens.zip(out.chunks_exact_mut(width)) {
            let inputs = k.iter().zip(v).zip(decay.iter().zip(first.iter()));
            let sums = numerator.iter_mut().zip(&mut *denominator).zip(&mut *max);
            for ((((k, v), (decay, first)), ((numerator, denominator), max)), y) in
                inputs.zip(sums).zip(y)
            {
                let mut channel = Channel::stored([*numerator, *denominator, *max]);
                *y = channel.average_with(k + first, *v);
                channel.max += decay;
                channel.add(*k, *v);
                [*numerator, *denominator, *max] =
                    [channel.numerator, channel.denominator, channel.max];
            }
        }
        Ok(())
    }
}

/// The sums of one channel, divided by `e^max`.
#[derive(Clone, Copy, Debug)]
struct Channel {
    numerator: f32,
    denominator: f32,
    max: f32,
}

impl Channel {
    fn stored([numerator, denominator, max]: [f32; 3]) -> Self {
        let max = if denominator == 0.0 {
            f32::NEG_INFINITY
        } else {
            max
        };
        Self {
            numerator,
            denominator,
            max,
        }
    }

    /// One more value, with the weight `e^k`.
    fn add(&mut self, k: f32, v: f32) {
        let max = self.max.max(k);
        let (old, new) = ((self.max - max).exp(), (k - max).exp());
        self.numerator = old * self.numerator + new * v;
        self.denominator = old * self.denominator + new;
        self.max = max;
    }

    /// The average of the values so far and one more, which is not kept.
    fn average_with(mut self, k: f32, v: f32) -> f32 {
        self.add(k, v);
        self.numerator / self.denominator
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Arc;

    use kv_graph::CustomSpec;

    use super::*;

    /// The sum over all tokens before, written out, in f64.
    fn average(keys: &[f32], values: &[f32], (decay, first): (f64, f64)) -> f64 {
        let now = keys.len() - 1;
        let weigh = |at: usize| {
            if at == now {
                (first + f64::from(keys[at])).exp()
            } else {
                ((now - 1 - at) as f64 * decay + f64::from(keys[at])).exp()
            }
        };
        let sum = |of: &dyn Fn(usize) -> f64| (0..=now).map(|at| weigh(at) * of(at)).sum::<f64>();
        sum(&|at| f64::from(values[at])) / sum(&|_| 1.0)
    }

    #[test]
    fn the_recurrence_is_the_sum_and_large_keys_do_not_overflow() {
        let (decay, first) = (-0.7f32, 0.4f32);
        let weights: [Arc<[f32]>; 2] = [[decay].into(), [first].into()];
        let values = [1.0f32, -2.0, 0.5, 3.0, -1.0];
        for offset in [0.0f32, -50.0, 200.0] {
            let keys = [0.3f32, -1.2, 2.0, 0.1, -0.4].map(|k| k + offset);
            let spec = CustomSpec::new(Wkv4::NAME);
            let rows = CustomRows {
                spec: &spec,
                n_rows: keys.len(),
                operands: &[&keys, &values],
                weights: &weights,
            };
            let (mut state, mut out) = ([0.0; 3], [0.0; 5]);
            Wkv4.rows(&rows, &mut state, &mut out).unwrap();
            for (at, y) in out.iter().enumerate() {
                let settings = (f64::from(decay), f64::from(first));
                let wanted = average(&keys[..=at], &values[..=at], settings);
                assert!((f64::from(*y) - wanted).abs() < 1e-4, "{offset}, {at}: {y}");
            }
            assert!(state[1] >= 1.0, "{state:?}");
        }
    }
}
