//! Rotary position embedding as data, and its angles.
//!
//! RoPE: Su et al., arXiv 2104.09864. YaRN: Peng et al., arXiv 2309.00071. Invariant: angles are
//! computed in `f64`, so they do not depend on the order in which positions are visited.
//! Knows nothing of tensors: executors rotate by the angles given here.

use kv_core::ids::{LayerIdx, PosDelta};
use serde::{Deserialize, Serialize};

/// The two values of a head that form a pair and are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RopeStyle {
    /// Neighbours: `(x[2i], x[2i + 1])`.
    Norm,
    /// Halves: `(x[i], x[i + n_rot / 2])`.
    Neox,
}

/// The way frequencies are stretched beyond the context a model was trained with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "type")]
pub enum RopeScaling {
    /// Not at all.
    #[default]
    None,
    /// All positions divided by `factor`.
    Linear {
        /// The number of times longer the context is.
        factor: f64,
    },
    /// Low frequencies divided by `factor`, high ones kept, a ramp between; values scaled by
    /// `attention_factor`.
    Yarn {
        /// The number of times longer the context is.
        factor: f64,
        /// Context length of the training, in tokens.
        original_context: u32,
        /// Rotations over the original context from which a frequency is kept.
        beta_fast: f64,
        /// Rotations over the original context up to which a frequency is divided.
        beta_slow: f64,
        /// Factor on the rotated values; `0.1 ln(factor) + 1` in the paper.
        attention_factor: f64,
        /// The start and end of the ramp.
        #[serde(default, skip_serializing_if = "YarnRamp::is_whole")]
        ramp: YarnRamp,
    },
    /// By [`RopeSpec::factors`] alone; values scaled by `attention_factor` (LongRoPE: Ding et al.,
    /// arXiv
    /// 2402.13753).
    LongRope {
        /// Factor on the rotated values.
        attention_factor: f64,
    },
}

/// The start and end of the ramp of YaRN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum YarnRamp {
    /// At whole pairs: its beginning is rounded down and its end up, as YaRN's authors do.
    #[default]
    Whole,
    /// At the exact numbers of rotations (gpt-oss; `truncate: false` in transformers).
    Exact,
}

impl YarnRamp {
    /// True if it is the default.
    pub fn is_whole(&self) -> bool {
        *self == Self::Whole
    }
}

/// The rotary embedding of one layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeSpec {
    /// The way pairs are formed.
    pub style: RopeStyle,
    /// Values at the start of each head that are rotated; the others pass unchanged.
    pub n_rot: usize,
    /// Base of the geometric series of frequencies.
    pub base: f64,
    /// Stretching beyond the trained context.
    #[serde(default)]
    pub scaling: RopeScaling,
    /// Name of a weight of `n_rot / 2` divisors, one for each frequency (Llama 3, LongRoPE).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub factors: Option<String>,
}

impl RopeSpec {
    /// Radians per position of each of the `n_rot / 2` pairs. `factors`, where given, divide the
    /// frequencies; missing ones count as 1.
    pub fn frequencies(&self, factors: Option<&[f32]>) -> Vec<f64> {
        let half = self.n_rot / 2;
        (0..half)
            .map(|i| {
                let own = self.base.powf(-2.0 * i as f64 / self.n_rot as f64);
                let divisor = factors
                    .and_then(|f| f.get(i))
                    .map_or(1.0, |&f| f64::from(f));
                self.scale_frequency(i, own / divisor)
            })
            .collect()
    }

    fn scale_frequency(&self, pair: usize, own: f64) -> f64 {
        match self.scaling {
            RopeScaling::None | RopeScaling::LongRope { .. } => own,
            RopeScaling::Linear { factor } => own / factor,
            RopeScaling::Yarn {
                factor,
                original_context,
                beta_fast,
                beta_slow,
                ramp,
                ..
            } => {
                // Index of the pair that rotates `rotations` times over the original context.
                let pair_of = |rotations: f64| {
                    let wavelength =
                        f64::from(original_context) / (rotations * std::f64::consts::TAU);
                    self.n_rot as f64 * wavelength.ln() / (2.0 * self.base.ln())
                };
                let (low, high) = (pair_of(beta_fast), pair_of(beta_slow));
                let (low, high) = match ramp {
                    YarnRamp::Whole => (low.floor(), high.ceil()),
                    YarnRamp::Exact => (low, high),
                };
                let (low, high) = (low.max(0.0), high.min(self.n_rot as f64 - 1.0));
                let ramp = ((pair as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                own / factor * ramp + own * (1.0 - ramp)
            }
        }
    }

    /// Factor that scales the rotated values: 1 except for YaRN and LongRoPE.
    pub fn magnitude(&self) -> f64 {
        match self.scaling {
            RopeScaling::Yarn {
                attention_factor, ..
            }
            | RopeScaling::LongRope { attention_factor } => attention_factor,
            RopeScaling::None | RopeScaling::Linear { .. } => 1.0,
        }
    }

    /// Cosines and sines of one position, times the magnitude: `cos` and `sin` take one value for
    /// each of `frequencies`.
    pub fn angles(&self, frequencies: &[f64], pos: u32, cos: &mut [f32], sin: &mut [f32]) {
        let magnitude = self.magnitude();
        for ((c, s), frequency) in cos.iter_mut().zip(sin.iter_mut()).zip(frequencies) {
            let (sine, cosine) = (f64::from(pos) * frequency).sin_cos();
            *c = (cosine * magnitude) as f32;
            *s = (sine * magnitude) as f32;
        }
    }

    /// Rotates one head in place: the scalar specification of the rotation. Values beyond
    /// `n_rot` stay as they are.
    pub fn rotate_head(&self, head: &mut [f32], cos: &[f32], sin: &[f32]) {
        let half = (self.n_rot / 2).min(head.len() / 2);
        for i in 0..half.min(cos.len()).min(sin.len()) {
            let (a, b) = match self.style {
                RopeStyle::Norm => (2 * i, 2 * i + 1),
                RopeStyle::Neox => (i, i + half),
            };
            let (x, y) = (head[a], head[b]);
            head[a] = x * cos[i] - y * sin[i];
            head[b] = x * sin[i] + y * cos[i];
        }
    }
}

/// The pairs of a head that rotate with the position, with the row and with the column of a token
/// (M-RoPE: Wang et al., arXiv 2409.12191).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RopeSections {
    /// Pairs that rotate with position, row and column; `n_rot / 2` together.
    pub pairs: [usize; 3],
    /// Their layout.
    pub order: SectionOrder,
}

/// The layout of the pairs of the sections of a rotation in a head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SectionOrder {
    /// One section after the other (Qwen2-VL).
    #[default]
    Consecutive,
    /// Position, row and column in turn while there are pairs of rows and columns left, then the
    /// position's (Qwen3-VL).
    Interleaved,
}

impl RopeSections {
    /// All pairs together.
    pub const fn n_pairs(&self) -> usize {
        self.pairs[0] + self.pairs[1] + self.pairs[2]
    }

    /// The coordinate that pair number `pair` rotates with: 0 the position, 1 the row, 2 the
    /// column.
    pub const fn axis(&self, pair: usize) -> usize {
        let [positions, rows, columns] = self.pairs;
        match self.order {
            SectionOrder::Consecutive if pair < positions => 0,
            SectionOrder::Consecutive if pair < positions + rows => 1,
            SectionOrder::Consecutive => 2,
            SectionOrder::Interleaved if pair % 3 == 1 && pair < 3 * rows => 1,
            SectionOrder::Interleaved if pair % 3 == 2 && pair < 3 * columns => 2,
            SectionOrder::Interleaved => 0,
        }
    }
}

impl RopeSpec {
    /// As [`RopeSpec::angles`], where each pair rotates with one of position, row and column.
    pub fn section_angles(
        &self,
        frequencies: &[f64],
        sections: &RopeSections,
        coordinates: [u32; 3],
        cos: &mut [f32],
        sin: &mut [f32],
    ) {
        let angles = cos.chunks_mut(1).zip(sin.chunks_mut(1));
        for (pair, (frequency, (cos, sin))) in frequencies.chunks(1).zip(angles).enumerate() {
            self.angles(frequency, coordinates[sections.axis(pair)], cos, sin);
        }
    }
}

/// The pure rotation of a rotary embedding: what moves a key from one position to another.
///
/// Rotations add up: `R(d) R(p) = R(p + d)`. The magnitude that YaRN gives a key is in it since it
/// was stored and is not applied again.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotation {
    rope: RopeSpec,
    frequencies: Vec<f64>,
}

impl Rotation {
    /// The rotation of `rope`, whose frequencies `factors` divide, see [`RopeSpec::frequencies`].
    pub fn new(rope: RopeSpec, factors: Option<&[f32]>) -> Self {
        let frequencies = rope.frequencies(factors);
        Self { rope, frequencies }
    }

    /// The embedding that it is the rotation of.
    pub fn rope(&self) -> &RopeSpec {
        &self.rope
    }

    /// Cosines and sines of a move by `delta`, one for each pair of a head.
    pub fn angles(&self, delta: PosDelta) -> (Vec<f32>, Vec<f32>) {
        let angle = |frequency: &f64| (f64::from(delta.0) * frequency).sin_cos();
        let angles = self.frequencies.iter().map(angle);
        angles.map(|(sin, cos)| (cos as f32, sin as f32)).unzip()
    }
}

/// The dependence of the keys of one layer on their positions.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerRope {
    /// The layer that owns the keys.
    pub layer: LayerIdx,
    /// Their rotation; `None` where keys do not depend on positions.
    pub rotation: Option<Rotation>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k53_rotations_add_up_and_d15a_leave_the_magnitude_alone() {
        let mut spec = plain(RopeStyle::Neox, 8);
        spec.scaling = RopeScaling::Yarn {
            factor: 8.0,
            original_context: 64,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: 1.208,
            ramp: YarnRamp::Whole,
        };
        let factors = [1.0, 2.0, 3.0, 4.0];
        let at = |pos| {
            let mut head = [0.3, -1.2, 0.7, 2.0, 0.1, 0.9, -0.4, 1.5, 7.0];
            let (mut cos, mut sin) = ([0.0; 4], [0.0; 4]);
            spec.angles(&spec.frequencies(Some(&factors)), pos, &mut cos, &mut sin);
            spec.rotate_head(&mut head, &cos, &sin);
            head
        };
        let rotation = Rotation::new(spec.clone(), Some(&factors));
        for (from, to) in [(0, 5), (9, 2), (100, 101), (7, 0)] {
            let (cos, sin) = rotation.angles(PosDelta(to - from));
            let mut head = at(from as u32);
            rotation.rope().rotate_head(&mut head, &cos, &sin);
            for (moved, wanted) in head.iter().zip(at(to as u32)) {
                assert!((moved - wanted).abs() < 1e-5, "{from} to {to}: {head:?}");
            }
        }
    }

    #[test]
    fn k53_the_worked_rotation() {
        let spec = plain(RopeStyle::Norm, 2);
        let mut key = [3f32.cos(), 3f32.sin()];
        let (cos, sin) = Rotation::new(spec.clone(), None).angles(PosDelta(-2));
        spec.rotate_head(&mut key, &cos, &sin);
        assert!((key[0] - 1f32.cos()).abs() < 1e-6 && (key[1] - 1f32.sin()).abs() < 1e-6);
    }

    fn plain(style: RopeStyle, n_rot: usize) -> RopeSpec {
        RopeSpec {
            style,
            n_rot,
            base: 10_000.0,
            scaling: RopeScaling::None,
            factors: None,
        }
    }

    #[test]
    fn one_radian_a_position_for_the_first_pair() {
        let spec = plain(RopeStyle::Norm, 2);
        let (mut cos, mut sin) = ([0.0], [0.0]);
        spec.angles(&spec.frequencies(None), 3, &mut cos, &mut sin);
        let mut head = [1.0, 0.0, 7.0];
        spec.rotate_head(&mut head, &cos, &sin);
        assert_eq!(head, [3f32.cos(), 3f32.sin(), 7.0]);
    }

    #[test]
    fn styles_pair_different_values() {
        let (cos, sin) = ([0.0, 0.0], [1.0, 1.0]); // by 90 degrees
        let mut norm = [1.0, 2.0, 3.0, 4.0];
        plain(RopeStyle::Norm, 4).rotate_head(&mut norm, &cos, &sin);
        assert_eq!(norm, [-2.0, 1.0, -4.0, 3.0]);
        let mut neox = [1.0, 2.0, 3.0, 4.0];
        plain(RopeStyle::Neox, 4).rotate_head(&mut neox, &cos, &sin);
        assert_eq!(neox, [-3.0, -4.0, 1.0, 2.0]);
    }

    /// The published gpt-oss: 64 values, base 150000, 4096 tokens stretched 32 times. Between pairs
    /// 8.09 and 17.4 the ramp is linear in the pair's number (transformers,
    /// `_compute_yarn_parameters`).
    #[test]
    fn an_exact_ramp_begins_and_ends_between_pairs() {
        let spec = |ramp| RopeSpec {
            n_rot: 64,
            base: 150_000.0,
            scaling: RopeScaling::Yarn {
                factor: 32.0,
                original_context: 4096,
                beta_fast: 32.0,
                beta_slow: 1.0,
                attention_factor: 1.0,
                ramp,
            },
            factors: None,
            style: RopeStyle::Neox,
        };
        let exact = spec(YarnRamp::Exact).frequencies(None);
        let whole = spec(YarnRamp::Whole).frequencies(None);
        let own = |pair: usize| 150_000f64.powf(-2.0 * pair as f64 / 64.0);
        let (low, high) = (8.092779116, 17.398024502);
        for (pair, got) in exact.iter().enumerate() {
            let ramp = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
            let wanted = own(pair) * (1.0 - ramp) + own(pair) / 32.0 * ramp;
            assert!(
                (got / wanted - 1.0).abs() < 1e-6,
                "pair {pair}: {got} {wanted}"
            );
        }
        // Rounded, the ramp is from 8 to 18.
        assert!((whole[13] / (own(13) * (0.5 + 0.5 / 32.0)) - 1.0).abs() < 1e-9);
        assert!((exact[13] / whole[13] - 1.0).abs() > 0.01);
    }

    #[test]
    fn yarn_keeps_high_and_divides_low_frequencies() {
        let mut spec = plain(RopeStyle::Neox, 64);
        let own = spec.frequencies(None);
        spec.scaling = RopeScaling::Yarn {
            factor: 4.0,
            original_context: 4096,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: 0.1 * 4f64.ln() + 1.0,
            ramp: YarnRamp::Whole,
        };
        let yarn = spec.frequencies(None);
        assert_eq!(yarn[0], own[0]);
        assert_eq!(yarn[31], own[31] / 4.0);
        assert!((spec.magnitude() - 1.138_629_436).abs() < 1e-8);
    }

    #[test]
    fn pairs_of_a_section_rotate_with_its_axis() {
        let axes = |pairs, order| -> Vec<usize> {
            let sections = RopeSections { pairs, order };
            (0..sections.n_pairs()).map(|p| sections.axis(p)).collect()
        };
        let (one, mixed) = (SectionOrder::Consecutive, SectionOrder::Interleaved);
        assert_eq!(axes([2, 3, 3], one), [0, 0, 1, 1, 1, 2, 2, 2]);
        assert_eq!(axes([4, 2, 2], mixed), [0, 1, 2, 0, 1, 2, 0, 0]);
        assert_eq!(axes([3, 2, 1], mixed), [0, 1, 2, 0, 1, 0]);
    }

    #[test]
    fn text_rotates_as_without_sections() {
        let spec = plain(RopeStyle::Neox, 16);
        let frequencies = spec.frequencies(None);
        let sections = RopeSections {
            pairs: [2, 3, 3],
            order: SectionOrder::Consecutive,
        };
        let angles = |coordinates| {
            let (mut cos, mut sin) = ([0.0; 8], [0.0; 8]);
            spec.section_angles(&frequencies, &sections, coordinates, &mut cos, &mut sin);
            (cos, sin)
        };
        let (mut cos, mut sin) = ([0.0; 8], [0.0; 8]);
        spec.angles(&frequencies, 77, &mut cos, &mut sin);
        assert_eq!(angles([77; 3]), (cos, sin));
        let (image, _) = angles([5, 77, 9]);
        assert_ne!(image[..2], cos[..2]);
        assert_eq!(image[2..5], cos[2..5]);
        assert_ne!(image[5..], cos[5..]);
    }

    #[test]
    fn factors_divide_frequencies() {
        let mut spec = plain(RopeStyle::Neox, 4);
        spec.scaling = RopeScaling::Linear { factor: 2.0 };
        assert_eq!(spec.frequencies(Some(&[1.0, 8.0])), [0.5, 0.01 / 16.0]);
    }
}
