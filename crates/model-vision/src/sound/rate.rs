//! [`resampled`]: a sound at another rate, by a windowed sinc (Smith, "Digital audio resampling",
//! 2002).
//!
//! What is higher than the lower of both rates can hold is taken away. Invariant: a constant stays
//! what it is away from the ends, behind which there is silence. Knows no file.

use std::f64::consts::PI;

/// Zero crossings of the sinc on each side of its middle.
const N_CROSSINGS: usize = 48;

/// Values of the table between two zero crossings. Between two values it is a line, which is off by
/// less than 5e-6.
const PER_CROSSING: usize = 512;

/// The part of the frequencies that pass: the rest is where the window falls off.
const PASSED: f64 = 0.95;

/// The steepness of Kaiser's window.
const BETA: f64 = 9.0;

/// The samples of a sound at the rate `from`, at the rate `to`.
pub(super) fn resampled(samples: &[f32], from: u32, to: u32) -> Vec<f32> {
    let table = table();
    let (from, to) = (f64::from(from), f64::from(to));
    // Of the frequencies that samples at `from` can hold.
    let cutoff = PASSED * (to / from).min(1.0);
    let reach = N_CROSSINGS as f64 / cutoff;
    let n = (samples.len() as f64 * to / from).round() as usize;
    let sample = |at: usize| {
        let middle = at as f64 * from / to;
        let first = (middle - reach).ceil().max(0.0) as usize;
        let end = ((middle + reach).floor() + 1.0).max(0.0) as usize;
        let taken = samples.get(first..end.min(samples.len()));
        let sum: f64 = (first..)
            .zip(taken.unwrap_or_default())
            .map(|(place, &sample)| {
                let distance = (place as f64 - middle).abs() * cutoff;
                value(&table, distance) * f64::from(sample)
            })
            .sum();
        (sum * cutoff) as f32
    };
    (0..n).map(sample).collect()
}

/// The windowed sinc at so many zero crossings from its middle.
fn value(table: &[f64], distance: f64) -> f64 {
    let at = distance * PER_CROSSING as f64;
    let number = at as usize;
    match table.get(number..number + 2) {
        Some([a, b]) => a + (b - a) * (at - number as f64),
        _ => 0.0,
    }
}

/// Half of the windowed sinc.
fn table() -> Vec<f64> {
    let n = N_CROSSINGS * PER_CROSSING;
    let at = |number: usize| {
        let x = number as f64 / PER_CROSSING as f64;
        let sinc = if number == 0 {
            1.0
        } else {
            (PI * x).sin() / (PI * x)
        };
        let place = number as f64 / n as f64;
        sinc * bessel(BETA * (1.0 - place * place).max(0.0).sqrt()) / bessel(BETA)
    };
    (0..=n).map(at).collect()
}

/// The modified Bessel function of order 0, by its series.
fn bessel(x: f64) -> f64 {
    let (mut sum, mut term) = (1.0, 1.0);
    for k in 1..64 {
        term *= (x / (2.0 * f64::from(k))).powi(2);
        sum += term;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tone(hertz: f64, rate: u32, n: usize) -> Vec<f32> {
        let step = 2.0 * PI * hertz / f64::from(rate);
        (0..n).map(|at| (step * at as f64).sin() as f32).collect()
    }

    /// The largest difference away from the ends.
    fn off(a: &[f32], b: &[f32]) -> f32 {
        let inner = 400..a.len().min(b.len()) - 400;
        let pairs = a[inner.clone()].iter().zip(&b[inner]);
        pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    }

    #[test]
    fn tones_stay_what_they_are() {
        for rate in [8000, 11_025, 22_050, 44_100, 48_000, 44_101] {
            for hertz in [100.0, 1000.0, 3300.0] {
                let got = resampled(&tone(hertz, rate, rate as usize), rate, 16_000);
                assert_eq!(got.len(), 16_000, "{rate}");
                let off = off(&got, &tone(hertz, 16_000, 16_000));
                assert!(off < 1e-4, "{hertz} Hz at {rate}: off by {off}");
            }
        }
    }

    #[test]
    fn what_is_too_high_goes() {
        let got = resampled(&tone(9000.0, 48_000, 48_000), 48_000, 16_000);
        let off = off(&got, &vec![0.0; 16_000]);
        assert!(off < 1e-3, "off by {off}");
    }
}
