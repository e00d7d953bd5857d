//! What the recurrences of RWKV-6 and 7 share: a matrix of keys and values for each head, and the
//! norm of what comes out of the heads.
//!
//! Invariant: a head's values follow from its own alone. Knows nothing of sequences or devices.

/// Adds `factor * x` to `y`.
pub(super) fn add_scaled(y: &mut [f32], factor: f32, x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += factor * x;
    }
}

/// `x` without its mean, divided by its deviation, times a gain and plus a bias for each value.
pub(super) fn normalize(x: &mut [f32], [gain, bias]: [&[f32]; 2], eps: f32) {
    let n = x.len() as f32;
    let mean = x.iter().sum::<f32>() / n;
    x.iter_mut().for_each(|x| *x -= mean);
    let variance = x.iter().map(|x| x * x).sum::<f32>() / n;
    let factor = 1.0 / (variance + eps).sqrt();
    for (x, (gain, bias)) in x.iter_mut().zip(gain.iter().zip(bias)) {
        *x = *x * factor * gain + bias;
    }
}

/// Head sizes of a node: `n` values of all heads, and a state of a square matrix for each. `None`
/// where there is no such size.
pub(super) fn head_dim(n: usize, n_state: usize) -> Option<usize> {
    let dim = n_state.checked_div(n)?;
    (dim > 0 && n.is_multiple_of(dim) && n * dim == n_state).then_some(dim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_has_as_many_keys_as_values() {
        assert_eq!(head_dim(64, 1024), Some(16));
        assert_eq!(head_dim(64, 64 * 64), Some(64));
        for (n, n_state) in [(0, 0), (64, 0), (64, 1023), (64, 640), (4, 64)] {
            assert_eq!(head_dim(n, n_state), None, "{n}, {n_state}");
        }
    }

    #[test]
    fn normal_values_have_no_mean_and_a_deviation_of_1() {
        let mut x = [1.0f32, 3.0, 5.0, 7.0];
        normalize(&mut x, [&[1.0, 1.0, 2.0, 1.0], &[0.0, 0.0, 0.0, 10.0]], 0.0);
        let one = 1.0 / 5.0f32.sqrt();
        for (ours, wanted) in x
            .iter()
            .zip([-3.0 * one, -one, 2.0 * one, 3.0 * one + 10.0])
        {
            assert!((ours - wanted).abs() < 1e-6, "{ours}, {wanted}");
        }
    }
}
