//! What rows of one sequence get from each other, which graphs have no operation for:
//! [`Neighbors`], [`DepthwiseConv`] and [`GroupNorm`].
//!
//! A convolution over tokens is [`Neighbors`] and then a matrix, so backends compute it with their
//! GEMM. Invariant: each is called for a whole sequence, whose ends are padded with zeros. Knows
//! nothing of batches or devices.

use kv_backend::{CustomOp, CustomRows, CustomShape};
use kv_graph::CustomScope;

/// Setting: how many tokens a convolution reads, an odd number.
pub(super) const KERNEL: &str = "kernel";
/// Setting: groups of values that are normed together.
pub(super) const GROUPS: &str = "groups";
/// Setting: added to the variance.
pub(super) const EPS: &str = "eps";

/// For `x [tokens, dim]`: for each token the values of the `kernel` tokens around it,
/// `[tokens, dim * kernel]`, those of one channel behind each other (im2col).
#[derive(Clone, Copy, Debug)]
pub(super) struct Neighbors;

/// For `x [tokens, dim]` and weights `[dim, kernel]` and `[dim]`: each channel's convolution over
/// the `kernel` tokens around each, plus a bias.
#[derive(Clone, Copy, Debug)]
pub(super) struct DepthwiseConv;

/// For `x [tokens, dim]` and weights `[dim]` and `[dim]`: each of `groups` runs of channels minus
/// its mean over all tokens, divided by its deviation, times a gain, plus a bias (Wu and He, arXiv
/// 1803.08494).
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupNorm;

impl Neighbors {
    pub(super) const NAME: &'static str = "conv.neighbors";
}

impl DepthwiseConv {
    pub(super) const NAME: &'static str = "conv.depthwise";
}

impl GroupNorm {
    pub(super) const NAME: &'static str = "group_norm";
}

/// A setting that is a whole number above 0.
fn whole_number(shape: &CustomShape<'_>, name: &str) -> Option<usize> {
    let value = shape.spec.param(name).filter(|x| *x >= 1.0);
    value.map(|x| x as usize)
}

fn sees_sequences(shape: &CustomShape<'_>) -> bool {
    shape.spec.scope == CustomScope::Sequence
}

fn has_kernel(shape: &CustomShape<'_>, n_taps: usize) -> bool {
    whole_number(shape, KERNEL) == Some(n_taps) && n_taps % 2 == 1 && sees_sequences(shape)
}

/// The rows around number `at` that a convolution of `K` reads; `padding` stands for those that are
/// not there.
fn around<'a, const K: usize>(x: &'a [f32], at: usize, padding: &'a [f32]) -> [&'a [f32]; K] {
    let dim = padding.len();
    std::array::from_fn(|tap| {
        let row = (at + tap).checked_sub(K / 2);
        let row = row.and_then(|row| x.get(row * dim..(row + 1) * dim));
        row.unwrap_or(padding)
    })
}

/// Writes the rows around every token, `K` values of each channel.
fn gather<const K: usize>(x: &[f32], dim: usize, out: &mut [f32]) {
    let padding = vec![0.0; dim];
    for (at, out) in out.chunks_exact_mut(dim * K).enumerate() {
        let rows: [&[f32]; K] = around(x, at, &padding);
        for (channel, out) in out.as_chunks_mut::<K>().0.iter_mut().enumerate() {
            *out = rows.map(|row| row[channel]);
        }
    }
}

impl CustomOp for Neighbors {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn check(&self, node: &CustomShape<'_>) -> Result<(), String> {
        match *node.widths {
            [dim]
                if dim > 0
                    && node.weights.is_empty()
                    && [3, 7].contains(&(node.width / dim))
                    && node.width.is_multiple_of(dim)
                    && has_kernel(node, node.width / dim) =>
            {
                Ok(())
            }
            _ => Err(node.refusal("x of whole sequences, and a result 3 or 7 times as wide")),
        }
    }

    fn rows(&self, rows: &CustomRows<'_>, _: &mut [f32], out: &mut [f32]) -> Result<(), String> {
        let [x] = rows.all_operands()?;
        let dim = x.len() / rows.n_rows.max(1);
        match rows.spec.param(KERNEL) {
            _ if dim == 0 => {}
            Some(3.0) => gather::<3>(x, dim, out),
            Some(7.0) => gather::<7>(x, dim, out),
            other => return Err(format!("kernel {other:?}, not 3 or 7")),
        }
        Ok(())
    }
}

impl CustomOp for DepthwiseConv {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn check(&self, node: &CustomShape<'_>) -> Result<(), String> {
        match (node.widths, node.weights) {
            (&[dim], &[&[rows, n_taps], &[n]])
                if dim > 0 && [rows, n, node.width] == [dim; 3] && has_kernel(node, n_taps) =>
            {
                Ok(())
            }
            _ => Err(node.refusal("x of whole sequences, a kernel for each channel, and a bias")),
        }
    }

    fn rows(&self, rows: &CustomRows<'_>, _: &mut [f32], out: &mut [f32]) -> Result<(), String> {
        let ([x], [kernels, bias]) = (rows.all_operands()?, rows.all_weights()?);
        let dim = bias.len();
        if dim == 0 {
            return Ok(());
        }
        let n_taps = kernels.len() / dim;
        // By tap, so that the innermost loop runs over channels that lie together.
        let mut by_tap = vec![0.0; kernels.len()];
        for (channel, kernel) in kernels.chunks_exact(n_taps).enumerate() {
            for (tap, weight) in kernel.iter().enumerate() {
                by_tap[tap * dim + channel] = *weight;
            }
        }
        for (at, out) in out.chunks_exact_mut(dim).enumerate() {
            out.copy_from_slice(bias);
            for (tap, weights) in by_tap.chunks_exact(dim).enumerate() {
                let row = (at + tap).checked_sub(n_taps / 2);
                let Some(x) = row.and_then(|row| x.get(row * dim..(row + 1) * dim)) else {
                    continue;
                };
                for ((y, x), weight) in out.iter_mut().zip(x).zip(weights) {
                    *y += x * weight;
                }
            }
        }
        Ok(())
    }
}

/// For each of `n_groups` runs of `of_group` channels, the sum of a term over all tokens.
fn sums(
    x: &[f32],
    (n_groups, of_group): (usize, usize),
    term: impl Fn(usize, f64) -> f64,
) -> Vec<f64> {
    let mut sums = vec![0.0; n_groups];
    for x in x.chunks_exact(n_groups * of_group) {
        for (group, (sum, x)) in sums.iter_mut().zip(x.chunks_exact(of_group)).enumerate() {
            *sum += x.iter().map(|&x| term(group, f64::from(x))).sum::<f64>();
        }
    }
    sums
}

impl CustomOp for GroupNorm {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn check(&self, node: &CustomShape<'_>) -> Result<(), String> {
        let groups = whole_number(node, GROUPS);
        match (node.widths, node.weights) {
            (&[dim], &[&[gain], &[bias]])
                if dim > 0
                    && [gain, bias, node.width] == [dim; 3]
                    && groups.is_some_and(|n| dim.is_multiple_of(n))
                    && sees_sequences(node) =>
            {
                Ok(())
            }
            _ => Err(node
                .refusal("x of whole sequences in groups of as many channels, a gain and a bias")),
        }
    }

    fn rows(&self, rows: &CustomRows<'_>, _: &mut [f32], out: &mut [f32]) -> Result<(), String> {
        let ([x], [gain, bias]) = (rows.all_operands()?, rows.all_weights()?);
        let param = |name| rows.spec.param(name).ok_or(format!("no {name}"));
        let (n_groups, eps) = (param(GROUPS)? as usize, f64::from(param(EPS)?));
        let dim = gain.len();
        let of_group = dim / n_groups.max(1);
        if of_group == 0 {
            return Ok(());
        }
        let n = (rows.n_rows * of_group) as f64;
        let groups = (n_groups, of_group);
        let mut means = sums(x, groups, |_, x| x);
        means.iter_mut().for_each(|mean| *mean /= n);
        let mut factors = sums(x, groups, |group, x| (x - means[group]).powi(2));
        let factor = |square: &mut f64| *square = 1.0 / (*square / n + eps).sqrt();
        factors.iter_mut().for_each(factor);
        for (x, out) in x.chunks_exact(dim).zip(out.chunks_exact_mut(dim)) {
            for (channel, (y, x)) in out.iter_mut().zip(x).enumerate() {
                let group = channel / of_group;
                let normed = ((f64::from(*x) - means[group]) * factors[group]) as f32;
                *y = normed * gain[channel] + bias[channel];
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Arc;

    use kv_graph::CustomSpec;

    use super::*;

    fn spec(name: &str, params: &[(&str, f32)]) -> CustomSpec {
        CustomSpec {
            params: params.iter().map(|&(k, v)| (k.to_owned(), v)).collect(),
            scope: CustomScope::Sequence,
            ..CustomSpec::new(name)
        }
    }

    fn computed(op: &dyn CustomOp, spec: &CustomSpec, x: &[f32], width: usize) -> Vec<f32> {
        computed_with(op, spec, x, &[], [2, width])
    }

    fn computed_with(
        op: &dyn CustomOp,
        spec: &CustomSpec,
        x: &[f32],
        weights: &[Arc<[f32]>],
        [dim, width]: [usize; 2],
    ) -> Vec<f32> {
        let n_rows = x.len() / dim;
        let rows = CustomRows {
            spec,
            n_rows,
            operands: &[x],
            weights,
        };
        let mut out = vec![f32::NAN; n_rows * width];
        op.rows(&rows, &mut [], &mut out).unwrap();
        out
    }

    #[test]
    fn neighbors_of_the_first_and_last_token_are_zeros() {
        let x = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let got = computed(&Neighbors, &spec(Neighbors::NAME, &[(KERNEL, 3.0)]), &x, 6);
        let wanted = [
            [0.0, 1.0, 3.0, 0.0, 2.0, 4.0],
            [1.0, 3.0, 5.0, 2.0, 4.0, 6.0],
            [3.0, 5.0, 0.0, 4.0, 6.0, 0.0],
        ];
        assert_eq!(got, wanted.concat());
        let wide = spec(Neighbors::NAME, &[(KERNEL, 7.0)]);
        let alone = computed(&Neighbors, &wide, &x[..2], 14);
        let mut wanted = [0.0; 14];
        (wanted[3], wanted[10]) = (1.0, 2.0);
        assert_eq!(alone, wanted);
    }

    #[test]
    fn channels_are_convolved_alone() {
        let x = [1.0, 10.0, 2.0, 20.0, 3.0, 30.0];
        let weights: [Arc<[f32]>; 2] = [
            [1.0, 2.0, 3.0, 0.5, 0.0, -1.0].into(),
            [100.0, 200.0].into(),
        ];
        let spec = spec(DepthwiseConv::NAME, &[(KERNEL, 3.0)]);
        let got = computed_with(&DepthwiseConv, &spec, &x, &weights, [2, 2]);
        assert_eq!(got, [108.0, 180.0, 114.0, 175.0, 108.0, 210.0]);
    }

    #[test]
    fn groups_are_normed_over_all_tokens() {
        // Mean and variance: 3 and 5; 10 and 0.
        let x = [0.0, 2.0, 10.0, 4.0, 6.0, 10.0];
        let x: Vec<f32> = x.chunks(3).flat_map(|x| [x[0], x[1], x[2], x[2]]).collect();
        let weights: [Arc<[f32]>; 2] = [[1.0, 1.0, 1.0, 2.0].into(), [0.0, 0.0, 0.5, -1.0].into()];
        let spec = spec(GroupNorm::NAME, &[(GROUPS, 2.0), (EPS, 4.0)]);
        let got = computed_with(&GroupNorm, &spec, &x, &weights, [4, 4]);
        let wanted = [-1.0, -1.0 / 3.0, 0.5, -1.0, 1.0 / 3.0, 1.0, 0.5, -1.0];
        for (got, wanted) in got.iter().zip(wanted) {
            assert!((got - wanted).abs() < 1e-6, "{got}, not {wanted}");
        }
    }

    #[test]
    fn nodes_of_other_sizes_are_refused_with_the_numbers() {
        let taps = spec("any", &[(KERNEL, 3.0), (GROUPS, 2.0)]);
        let by_rows = CustomSpec {
            scope: CustomScope::Row,
            ..taps.clone()
        };
        let node = |spec, weights, width| CustomShape {
            spec,
            widths: &[4],
            weights,
            width,
            n_state: 0,
        };
        let vectors: &[&[usize]] = &[&[4], &[4]];
        let kernels: &[&[usize]] = &[&[4, 3], &[4]];
        let even: &[&[usize]] = &[&[4, 2], &[4]];
        assert_eq!(Neighbors.check(&node(&taps, &[], 12)), Ok(()));
        assert_eq!(DepthwiseConv.check(&node(&taps, kernels, 4)), Ok(()));
        assert_eq!(GroupNorm.check(&node(&taps, vectors, 4)), Ok(()));
        let thirds = spec("any", &[(GROUPS, 3.0)]);
        let refused = [
            Neighbors.check(&node(&by_rows, &[], 12)),
            Neighbors.check(&node(&taps, &[], 28)),
            Neighbors.check(&node(&taps, &[], 13)),
            DepthwiseConv.check(&node(&by_rows, kernels, 4)),
            DepthwiseConv.check(&node(&taps, even, 4)),
            DepthwiseConv.check(&node(&taps, kernels, 5)),
            GroupNorm.check(&node(&by_rows, vectors, 4)),
            GroupNorm.check(&node(&thirds, vectors, 4)),
            GroupNorm.check(&node(&taps, kernels, 4)),
        ];
        for error in refused {
            let error = error.unwrap_err();
            assert!(error.contains("wanted: x of whole sequences"), "{error}");
        }
    }
}
