//! [`erfc`]: the complementary error function in `f64`.
//!
//! Formulas: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.6 and 7.1.14. Knows
//! nothing of graphs.

/// `2 / sqrt(pi)` times the integral of `e^(-t^2)` from `x` to infinity.
pub(super) fn erfc(x: f64) -> f64 {
    let slope = std::f64::consts::FRAC_2_SQRT_PI;
    let small = (-x * x).exp();
    if x.abs() < 2.5 {
        // The series `x e^(-x^2) sum of (2 x^2)^n / (1 3 5 … (2 n + 1))`, whose terms have one
        // sign.
        let (mut term, mut sum, mut odd) = (x, x, 1.0);
        while term.abs() > 1e-18 * sum.abs() {
            odd += 2.0;
            term *= 2.0 * x * x / odd;
            sum += term;
        }
        return 1.0 - slope * small * sum;
    }
    // The continued fraction `x + (1/2) / (x + 1 / (x + (3/2) / (x + …)))`.
    let size = x.abs();
    let fraction = (1..=80)
        .rev()
        .fold(size, |rest, k| size + f64::from(k) / 2.0 / rest);
    let tail = slope / 2.0 * small / fraction;
    if x > 0.0 { tail } else { 2.0 - tail }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_the_tables() {
        // Abramowitz and Stegun, tables 7.1 and 7.3, and the complement for negative arguments.
        for (x, wanted) in [
            (0.0, 1.0),
            (0.5, 1.0 - 0.520_499_877_8),
            (1.0, 1.0 - 0.842_700_792_9),
            (2.0, 0.004_677_734_981),
            (2.499_999, 0.000_406_954_5),
            (2.500_001, 0.000_406_950_2),
            (3.0, 2.209_049_7e-5),
            (5.0, 1.537_459_8e-12),
            (-1.0, 1.842_700_792_9),
            (-4.0, 2.0 - 1.541_726e-8),
        ] {
            let (got, off) = (erfc(x), (erfc(x) - wanted).abs());
            assert!(
                off <= 1e-6 * wanted.min(1.0),
                "erfc({x}) is {got}, not {wanted}"
            );
        }
        assert_eq!(erfc(40.0), 0.0);
    }
}
