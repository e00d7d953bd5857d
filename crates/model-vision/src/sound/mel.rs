//! [`LogMel`]: frames of a sound's spectrogram, as Whisper's processor makes them (Radford et al.,
//! arXiv 2212.04356).
//!
//! A frame is the power of 400 samples under Hann's window, in bins that are equally wide on
//! Slaney's scale, as logarithms within 8 of the largest. Invariant: a frame does not depend on how
//! many frames are asked for, as far as the sound reaches. Knows no model.

use std::f64::consts::PI;

/// Samples of a second.
pub(crate) const SAMPLE_RATE: u32 = 16_000;

/// Samples of a frame.
pub(crate) const FRAME: usize = 400;

/// Samples from the beginning of a frame to that of the next.
pub(crate) const HOP: usize = 160;

/// The power that counts as none.
const FLOOR: f64 = 1e-10;

/// The number of powers of a frame's frequencies.
pub(crate) const N_POWERS: usize = FRAME / 2 + 1;

/// The weights of a bin: the first frequency that counts, and those from there on.
struct Bin {
    first: usize,
    weights: Vec<f64>,
}

/// Makes frames of so many bins.
pub(crate) struct LogMel {
    bins: Vec<Bin>,
    transform: Transform,
}

impl LogMel {
    /// One of so many bins.
    pub(crate) fn new(n_bins: usize) -> Self {
        let highest = to_mel(f64::from(SAMPLE_RATE) / 2.0);
        let edge = |number: usize| to_hertz(highest * number as f64 / (n_bins + 1) as f64);
        let bin = |number: usize| {
            let [low, middle, high] = [edge(number), edge(number + 1), edge(number + 2)];
            let weight = |power: usize| {
                let hertz = power as f64 * f64::from(SAMPLE_RATE) / FRAME as f64;
                let rising = (hertz - low) / (middle - low);
                let falling = (high - hertz) / (high - middle);
                // Each bin has the same area.
                rising.min(falling).max(0.0) * 2.0 / (high - low)
            };
            let weights: Vec<f64> = (0..N_POWERS).map(weight).collect();
            let counts = |weight: &f64| *weight > 0.0;
            let first = weights.iter().position(counts).unwrap_or(0);
            let end = weights.iter().rposition(counts).map_or(0, |last| last + 1);
            Bin {
                first,
                weights: weights.get(first..end).unwrap_or_default().to_vec(),
            }
        };
        Self {
            bins: (0..n_bins).map(bin).collect(),
            transform: Transform::new(),
        }
    }

    /// The first frames of a sound behind which there is silence, up to `n_padded` samples. The
    /// largest value is that of all these samples.
    pub(crate) fn frames(&self, samples: &[f32], n_padded: usize, n_frames: usize) -> Vec<f32> {
        let mut frame = [0.0; FRAME];
        let window: Vec<f64> = (0..FRAME)
            .map(|at| 0.5 - 0.5 * (2.0 * PI * at as f64 / FRAME as f64).cos())
            .collect();
        // What the sound does not reach is as low as can be.
        let mut largest = FLOOR.log10();
        let n_reached = (samples.len() + FRAME / 2).div_ceil(HOP) + 1;
        let n_computed = n_frames.max(n_reached.min(n_padded / HOP));
        let mut values = Vec::with_capacity(n_computed * self.bins.len());
        for number in 0..n_computed {
            let start = (number * HOP) as i64 - (FRAME / 2) as i64;
            for ((at, window), to) in (start..).zip(&window).zip(&mut frame) {
                *to = window * f64::from(mirrored(samples, n_padded, at));
            }
            let powers = self.transform.powers(&frame);
            for bin in &self.bins {
                let powers = powers.iter().skip(bin.first);
                let sum: f64 = powers.zip(&bin.weights).map(|(p, weight)| p * weight).sum();
                let log = sum.max(FLOOR).log10();
                largest = largest.max(log);
                values.push(log);
            }
        }
        values.truncate(n_frames * self.bins.len());
        let scaled = values
            .iter()
            .map(|&log| (log.max(largest - 8.0) + 4.0) / 4.0);
        scaled.map(|value| value as f32).collect()
    }
}

/// The discrete Fourier transform of a frame, as sums: a tower takes a hundred times as long, and
/// the length is no power of two. Samples that lie symmetrically are added first.
struct Transform {
    /// For each sample of the first half, the cosine and the sine of each frequency.
    rows: Vec<[[f64; N_POWERS]; 2]>,
}

impl Transform {
    fn new() -> Self {
        let turn = |sample: usize, power: usize| {
            // Whole turns do not count.
            let part = (sample * power % FRAME) as f64 / FRAME as f64;
            2.0 * PI * part
        };
        let row = |sample: usize| {
            let turns: [f64; N_POWERS] = std::array::from_fn(|power| turn(sample, power));
            [turns.map(f64::cos), turns.map(f64::sin)]
        };
        Self {
            rows: (0..N_POWERS).map(row).collect(),
        }
    }

    /// The powers of a frame's frequencies.
    fn powers(&self, frame: &[f64; FRAME]) -> [f64; N_POWERS] {
        let (mut real, mut imaginary) = ([0.0; N_POWERS], [0.0; N_POWERS]);
        for (at, [cosines, sines]) in self.rows.iter().enumerate() {
            let this = frame[at];
            // The first and the middle one are their own other side.
            let other = match at {
                0 => 0.0,
                at if 2 * at == FRAME => 0.0,
                at => frame[FRAME - at],
            };
            let (sum, difference) = (this + other, this - other);
            for (to, cosine) in real.iter_mut().zip(cosines) {
                *to += sum * cosine;
            }
            for (to, sine) in imaginary.iter_mut().zip(sines) {
                *to += difference * sine;
            }
        }
        let mut powers = real;
        for (power, imaginary) in powers.iter_mut().zip(imaginary) {
            *power = *power * *power + imaginary * imaginary;
        }
        powers
    }
}

/// The sample at this place: before the first and behind the last of `n_padded` they come in the
/// other order.
fn mirrored(samples: &[f32], n_padded: usize, at: i64) -> f32 {
    let last = n_padded as i64 - 1;
    let at = at.abs();
    let at = if at > last { 2 * last - at } else { at };
    let at = usize::try_from(at).unwrap_or(usize::MAX);
    samples.get(at).copied().unwrap_or(0.0)
}

/// Slaney's scale: in steps of 200/3 Hz up to 1000 Hz, then of 6.4 times in 27 steps.
const STEP_HERTZ: f64 = 200.0 / 3.0;
const LINEAR_HERTZ: f64 = 1000.0;
const LINEAR_STEPS: f64 = LINEAR_HERTZ / STEP_HERTZ;

fn log_step() -> f64 {
    6.4f64.ln() / 27.0
}

fn to_mel(hertz: f64) -> f64 {
    if hertz < LINEAR_HERTZ {
        hertz / STEP_HERTZ
    } else {
        LINEAR_STEPS + (hertz / LINEAR_HERTZ).ln() / log_step()
    }
}

fn to_hertz(mel: f64) -> f64 {
    if mel < LINEAR_STEPS {
        mel * STEP_HERTZ
    } else {
        LINEAR_HERTZ * ((mel - LINEAR_STEPS) * log_step()).exp()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use model_tests::distance;
    use model_tests::sound::samples;
    use model_tests::vision::{HEARING, SIZES, recipe};

    use super::*;

    #[test]
    fn frames_are_those_of_whisper() {
        let reference = recipe(HEARING[0].0).reference();
        let samples = samples(SIZES[0]);
        let samples: Vec<f32> = samples.iter().map(|&s| f32::from(s) / 32_768.0).collect();
        for n_bins in [80, 128] {
            let n_padded = 30 * SAMPLE_RATE as usize;
            let frames = LogMel::new(n_bins).frames(&samples, n_padded, 61);
            let frame = |number: usize| &frames[number * n_bins..(number + 1) * n_bins];
            let (shape, wanted) = reference.values(&format!("mel_{n_bins}")).unwrap();
            assert_eq!(shape, [3, n_bins]);
            let off = distance(&[frame(0), frame(30), frame(60)].concat(), &wanted);
            assert!(off < 1e-4, "{n_bins}: off by {off}");
        }
    }

    #[test]
    fn silence_is_as_low_as_can_be() {
        let frames = LogMel::new(80).frames(&[0.0; 4000], 16_000, 100);
        assert_eq!(frames, vec![-1.5; 8000]);
    }
}
