//! Encoding into the K formats, and `IQ4_XS`: 256 values a block, whose groups have small scales of
//! their own (layouts: [`k_quants`](super::super::k_quants), [`iq4`](super::super::iq4)).
//!
//! First each group's best scale (and minimum) is searched for, then the block's `d` (and `dmin`)
//! follow from the largest, and at last each group takes that of the neighbouring stored scales
//! (and minima) which leaves the least weighted error. Invariant: finite values read back finite.

use super::fit::{Affine, Group, Minimum, nearest};
use super::{
    ALIKE, IQ4_VALUES, bounds, extreme, half, inverse, joined, mean_square, nearest_iq4,
    representable, stored,
};

/// Encodes one block, with the importance of each value.
pub(super) type Encode<const BYTES: usize> = fn(&[f32; 256], &[f32; 256]) -> [u8; BYTES];

/// Scales and minima of a block: group `g` is `d · scales[g] · q − dmin · mins[g]`.
struct AffineBlock<const GROUPS: usize> {
    d: f32,
    dmin: f32,
    scales: [u8; GROUPS],
    mins: [u8; GROUPS],
    indices: [u8; 256],
}

/// Scales of a block: group `g` is `d · scales[g] · q`.
struct SymmetricBlock {
    d: f32,
    scales: [i8; 16],
    /// From 0.
    indices: [u8; 256],
}

/// `Q2_K`: minima and scales of four bits.
pub(super) fn encode_q2_k(values: &[f32; 256], importance: &[f32; 256]) -> [u8; 84] {
    let block = affine::<16, 16>(values, importance, 3, 15);
    let scales: [u8; 16] = std::array::from_fn(|g| block.scales[g] | (block.mins[g] << 4));
    let qs = two_bits(&block.indices);
    joined(&[&scales, &qs, &half(block.d), &half(block.dmin)])
}

/// `Q3_K`: scales of six bits, no minima.
pub(super) fn encode_q3_k(values: &[f32; 256], importance: &[f32; 256]) -> [u8; 110] {
    let block = symmetric(values, importance, 4, 32);
    let mut hmask = [0; 32];
    for (v, q) in block.indices.iter().enumerate() {
        hmask[v % 32] |= (q >> 2) << (v / 32);
    }
    let mut scales = [0; 12];
    for (g, scale) in block.scales.iter().enumerate() {
        let scale = (scale + 32) as u8;
        scales[g % 8] |= (scale & 15) << (4 * (g / 8));
        scales[8 + g % 4] |= (scale >> 4) << (2 * (g / 4));
    }
    joined(&[&hmask, &two_bits(&block.indices), &scales, &half(block.d)])
}

/// `Q4_K`: scales and minima of six bits.
pub(super) fn encode_q4_k(values: &[f32; 256], importance: &[f32; 256]) -> [u8; 144] {
    let block = affine::<32, 8>(values, importance, 15, 63);
    joined(&[&heads(&block), &nibbles(&block.indices)])
}

/// `Q5_K`: the same with a fifth bit of each value.
pub(super) fn encode_q5_k(values: &[f32; 256], importance: &[f32; 256]) -> [u8; 176] {
    let block = affine::<32, 8>(values, importance, 31, 63);
    let mut qh = [0; 32];
    for (v, q) in block.indices.iter().enumerate() {
        qh[v % 32] |= (q >> 4) << (v / 32);
    }
    joined(&[&heads(&block), &qh, &nibbles(&block.indices)])
}

/// `Q6_K`: scales of eight bits, no minima.
pub(super) fn encode_q6_k(values: &[f32; 256], importance: &[f32; 256]) -> [u8; 210] {
    let block = symmetric(values, importance, 32, 128);
    let (mut ql, mut qh) = ([0; 128], [0; 64]);
    for (v, q) in block.indices.iter().enumerate() {
        let (h, w) = (v / 128, v % 128);
        ql[64 * h + w % 64] |= (q & 15) << (4 * (w / 64));
        qh[32 * h + w % 32] |= (q >> 4) << (2 * (w / 32));
    }
    let scales = block.scales.map(|scale| scale as u8);
    joined(&[&ql, &qh, &scales, &half(block.d)])
}

/// `IQ4_XS`: scales of six bits, and the table of `IQ4_NL`.
pub(super) fn encode_iq4_xs(values: &[f32; 256], importance: &[f32; 256]) -> [u8; 136] {
    let groups: [Group<'_, 32>; 8] = groups(values, importance);
    let fits = groups.each_ref().map(|group| {
        let found = group.table();
        found.unwrap_or_else(|| representable(extreme(group.values) / f32::from(IQ4_VALUES[0])))
    });
    let d = stored(extreme(&fits) / -32.0);
    let (mut high, mut low, mut qs) = (0u16, [0; 4], [0; 128]);
    let qs_of = qs.as_chunks_mut::<16>().0;
    for (g, (group, fit)) in groups.iter().zip(fits).enumerate() {
        let index = |x: f32, scale: f32| nearest_iq4(x * inverse(d * scale));
        let read =
            |x: f32, scale: f32| d * scale * f32::from(IQ4_VALUES[usize::from(index(x, scale))]);
        let scales = neighbours(fit * inverse(d), -32.0, 31.0);
        let scale = least(scales, |scale| group.error(|x| read(x, scale)));
        let number = (scale + 32.0) as u8;
        high |= u16::from(number >> 4) << (2 * g);
        low[g / 2] |= (number & 15) << (4 * (g % 2));
        qs_of[g] = super::nibbles(&group.values.map(|x| index(x, scale)));
    }
    joined(&[&half(d), &high.to_le_bytes(), &low, &qs])
}

/// Groups of `LEN` values with their weights: `σ²` is twice the mean square of the block.
pub(super) fn groups<'a, const LEN: usize, const GROUPS: usize>(
    values: &'a [f32; 256],
    importance: &[f32; 256],
) -> [Group<'a, LEN>; GROUPS] {
    let variance = 2.0 * mean_square(values);
    let importance = if importance.iter().any(|&i| i > 0.0) {
        importance
    } else {
        &ALIKE
    };
    let (values, importance) = (values.as_chunks().0, importance.as_chunks().0);
    std::array::from_fn(|g| Group::new(&values[g], &importance[g], variance))
}

fn affine<const LEN: usize, const GROUPS: usize>(
    values: &[f32; 256],
    importance: &[f32; 256],
    last: u8,
    last_scale: u8,
) -> AffineBlock<GROUPS> {
    let groups: [Group<'_, LEN>; GROUPS] = groups(values, importance);
    let (last, most) = (f32::from(last), f32::from(last_scale));
    let fits: [Affine; GROUPS] = std::array::from_fn(|g| fit(&groups[g], last));
    let largest = |of: fn(&Affine) -> f32| fits.iter().map(of).fold(0.0, f32::max);
    let d = stored(largest(|fit| fit.d) / most);
    let dmin = stored(largest(|fit| -fit.min) / most);
    let mut block = AffineBlock {
        d,
        dmin,
        scales: [0; GROUPS],
        mins: [0; GROUPS],
        indices: [0; 256],
    };
    let indices = block.indices.as_chunks_mut::<LEN>().0;
    for (g, (group, fit)) in groups.iter().zip(fits).enumerate() {
        let scales = neighbours(fit.d * inverse(d), 0.0, most);
        let mins = neighbours(-fit.min * inverse(dmin), 0.0, most);
        let pairs = scales.flat_map(|scale| mins.clone().map(move |min| (scale, min)));
        let index = |x: f32, (scale, min): (f32, f32)| {
            nearest((x + dmin * min) * inverse(d * scale)).clamp(0.0, last)
        };
        let pair = least(pairs, |pair| {
            group.error(|x| d * pair.0 * index(x, pair) - dmin * pair.1)
        });
        (block.scales[g], block.mins[g]) = (pair.0 as u8, pair.1 as u8);
        indices[g] = group.values.map(|x| index(x, pair) as u8);
    }
    block
}

/// The best scale and minimum of a group, or those of its bounds where there is nothing to search
/// for.
fn fit<const LEN: usize>(group: &Group<'_, LEN>, last: f32) -> Affine {
    let found = group.affine(last, Minimum::AtMostZero);
    found.filter(|fit| fit.d > 0.0).unwrap_or_else(|| {
        let (low, high) = bounds(group.values);
        let min = representable(low.min(0.0));
        let d = representable(high / last - min / last);
        Affine { d, min }
    })
}

fn symmetric(
    values: &[f32; 256],
    importance: &[f32; 256],
    end: u8,
    end_scale: u8,
) -> SymmetricBlock {
    let groups: [Group<'_, 16>; 16] = groups(values, importance);
    let (end, most) = (f32::from(end), f32::from(end_scale));
    let fits: [f32; 16] = std::array::from_fn(|g| {
        let found = groups[g].symmetric(end);
        found.unwrap_or_else(|| representable(extreme(groups[g].values) / -end))
    });
    let d = stored(extreme(&fits) / -most);
    let mut block = SymmetricBlock {
        d,
        scales: [0; 16],
        indices: [0; 256],
    };
    let indices = block.indices.as_chunks_mut::<16>().0;
    for (g, (group, fit)) in groups.iter().zip(fits).enumerate() {
        let scales = neighbours(fit * inverse(d), -most, most - 1.0);
        let index = |x: f32, scale: f32| nearest(x * inverse(d * scale)).clamp(-end, end - 1.0);
        let scale = least(scales, |scale| group.error(|x| d * scale * index(x, scale)));
        block.scales[g] = scale as i8;
        indices[g] = group.values.map(|x| (index(x, scale) + end) as u8);
    }
    block
}

/// The nearest integer and its two neighbours, between these bounds.
fn neighbours(x: f32, first: f32, last: f32) -> impl Iterator<Item = f32> + Clone {
    let nearest = nearest(x.clamp(first, last));
    [nearest, nearest - 1.0, nearest + 1.0]
        .into_iter()
        .filter(move |n| (first..=last).contains(n))
}

/// The candidate of least error, the first of several.
fn least<Candidate: Copy + Default>(
    candidates: impl Iterator<Item = Candidate>,
    error: impl Fn(Candidate) -> f32,
) -> Candidate {
    let errors = candidates.map(|candidate| (error(candidate), candidate));
    let best = errors.reduce(|best, next| if next.0 < best.0 { next } else { best });
    best.map(|(_, candidate)| candidate).unwrap_or_default()
}

/// The first 16 bytes of a `Q4_K` or `Q5_K` block.
fn heads(block: &AffineBlock<8>) -> [u8; 16] {
    let mut packed = [0; 12];
    let (scales, mins) = (&block.scales, &block.mins);
    for g in 0..4 {
        packed[g] = scales[g] | ((scales[g + 4] >> 4) << 6);
        packed[g + 4] = mins[g] | ((mins[g + 4] >> 4) << 6);
        packed[g + 8] = (scales[g + 4] & 15) | ((mins[g + 4] & 15) << 4);
    }
    joined(&[&half(block.d), &half(block.dmin), &packed])
}

/// The two low bits of each value, as `Q2_K` and `Q3_K` store them.
fn two_bits(indices: &[u8; 256]) -> [u8; 64] {
    let mut qs = [0; 64];
    for (v, q) in indices.iter().enumerate() {
        qs[32 * (v / 128) + v % 32] |= (q & 3) << (2 * ((v / 32) % 4));
    }
    qs
}

/// The four low bits of each value, as `Q4_K` and `Q5_K` store them.
fn nibbles(indices: &[u8; 256]) -> [u8; 128] {
    let mut qs = [0; 128];
    for (v, q) in indices.iter().enumerate() {
        qs[32 * (v / 64) + v % 32] |= (q & 15) << (4 * ((v / 32) % 2));
    }
    qs
}
