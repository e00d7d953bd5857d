//! Dot products, sums and conversions, some values at a time. Knows no function of a real number.

use half::f16;

use super::slices::{LaneStorage, map, padded, zip};
use super::{Vector, Vector8};

#[inline(always)]
pub(in crate::kernels) fn dot_f32<E: Vector8>(e: E, a: &[f32], b: &[f32]) -> f32 {
    dot(e, a, b)
}

#[inline(always)]
pub(in crate::kernels) fn dot_f16<E: Vector8>(e: E, a: &[f32], b: &[f16]) -> f32 {
    dot(e, a, b)
}

/// Four accumulators hide the latency of the additions; what is left after whole groups of 32
/// values goes to the first.
#[inline(always)]
fn dot<E: Vector8, B: LaneStorage>(e: E, a: &[f32], b: &[B]) -> f32 {
    debug_assert_eq!(a.len(), b.len());
    let n = a.len().min(b.len());
    let (a, a_rest) = a[..n].as_chunks::<8>();
    let (b, b_rest) = b[..n].as_chunks::<8>();
    let (a, a_single) = a.as_chunks::<4>();
    let (b, b_single) = b.as_chunks::<4>();
    let mut acc = [e.splat(0.0); 4];
    for (a, b) in a.iter().zip(b) {
        for i in 0..4 {
            acc[i] = e.mul_add(e.load(&a[i]), B::load(e, &b[i]), acc[i]);
        }
    }
    for (a, b) in a_single.iter().zip(b_single) {
        acc[0] = e.mul_add(e.load(a), B::load(e, b), acc[0]);
    }
    if !a_rest.is_empty() {
        let (a, b) = (padded(a_rest, 0.0), padded(b_rest, B::default()));
        acc[0] = e.mul_add(e.load(&a), B::load(e, &b), acc[0]);
    }
    let [a, b, c, d] = acc;
    e.sum(e.add(e.add(a, b), e.add(c, d)))
}

#[inline(always)]
pub(in crate::kernels) fn axpy_f32<const N: usize, E: Vector<N>>(
    e: E,
    acc: &mut [f32],
    w: f32,
    v: &[f32],
) {
    axpy(e, acc, w, v);
}

#[inline(always)]
pub(in crate::kernels) fn axpy_f16<const N: usize, E: Vector<N>>(
    e: E,
    acc: &mut [f32],
    w: f32,
    v: &[f16],
) {
    axpy(e, acc, w, v);
}

#[inline(always)]
fn axpy<const N: usize, E: Vector<N>, V: LaneStorage>(e: E, acc: &mut [f32], w: f32, v: &[V]) {
    let w = e.splat(w);
    zip(
        e,
        acc,
        v,
        #[inline(always)]
        |acc, v| e.mul_add(w, v, acc),
    );
}

#[inline(always)]
pub(in crate::kernels) fn scale<const N: usize, E: Vector<N>>(e: E, x: &mut [f32], factor: f32) {
    let factor = e.splat(factor);
    map(
        e,
        x,
        0.0,
        #[inline(always)]
        |x| e.mul(x, factor),
    );
}

#[inline(always)]
pub(in crate::kernels) fn add<const N: usize, E: Vector<N>>(e: E, a: &mut [f32], b: &[f32]) {
    zip(
        e,
        a,
        b,
        #[inline(always)]
        |a, b| e.add(a, b),
    );
}

#[inline(always)]
pub(in crate::kernels) fn mul<const N: usize, E: Vector<N>>(e: E, a: &mut [f32], b: &[f32]) {
    zip(
        e,
        a,
        b,
        #[inline(always)]
        |a, b| e.mul(a, b),
    );
}

#[inline(always)]
pub(in crate::kernels) fn multiply_add<const N: usize, E: Vector<N>>(
    e: E,
    acc: &mut [f32],
    a: &[f32],
    b: &[f32],
) {
    debug_assert!(acc.len() == a.len() && a.len() == b.len());
    let n = acc.len().min(a.len()).min(b.len());
    let (acc, acc_rest) = acc[..n].as_chunks_mut::<N>();
    let (a, a_rest) = a[..n].as_chunks::<N>();
    let (b, b_rest) = b[..n].as_chunks::<N>();
    for ((acc, a), b) in acc.iter_mut().zip(a).zip(b) {
        let sum = e.mul_add(e.load(a), e.load(b), e.load(acc));
        e.store(acc, sum);
    }
    for ((acc, a), b) in acc_rest.iter_mut().zip(a_rest).zip(b_rest) {
        *acc = a.mul_add(*b, *acc);
    }
}

#[inline(always)]
pub(in crate::kernels) fn max<const N: usize, E: Vector<N>>(e: E, x: &[f32]) -> f32 {
    let (whole, rest) = x.as_chunks::<N>();
    // What is no number gives way to the maximum so far.
    let mut most = e.splat(f32::NEG_INFINITY);
    for x in whole {
        most = e.max(e.load(x), most);
    }
    most = e.max(e.load(&padded(rest, f32::NEG_INFINITY)), most);
    let mut lanes = [0.0; N];
    e.store(&mut lanes, most);
    lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
}

#[inline(always)]
pub(in crate::kernels) fn rms_norm<E: Vector8>(
    e: E,
    x: &[f32],
    w: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    debug_assert!(x.len() == w.len() && x.len() == out.len());
    let n = x.len().min(out.len());
    let mean = dot_f32(e, x, x) / x.len().max(1) as f32;
    let inverse = e.splat(1.0 / (mean + eps).sqrt());
    out[..n].copy_from_slice(&x[..n]);
    zip(
        e,
        &mut out[..n],
        w,
        #[inline(always)]
        |x, w| e.mul(e.mul(x, inverse), w),
    );
}

#[inline(always)]
pub(in crate::kernels) fn f32_to_f16<const N: usize, E: Vector<N>>(
    e: E,
    from: &[f32],
    to: &mut [f16],
) {
    debug_assert_eq!(from.len(), to.len());
    let n = from.len().min(to.len());
    let (from, from_rest) = from[..n].as_chunks::<N>();
    let (to, to_rest) = to[..n].as_chunks_mut::<N>();
    for (from, to) in from.iter().zip(to) {
        e.store_f16(to, e.load(from));
    }
    let mut last = [f16::ZERO; N];
    e.store_f16(&mut last, e.load(&padded(from_rest, 0.0)));
    to_rest.copy_from_slice(&last[..to_rest.len()]);
}

#[inline(always)]
pub(in crate::kernels) fn f16_to_f32<const N: usize, E: Vector<N>>(
    e: E,
    from: &[f16],
    to: &mut [f32],
) {
    zip(
        e,
        to,
        from,
        #[inline(always)]
        |_, from| from,
    );
}
