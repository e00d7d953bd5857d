//! Loops over slices, some values at a time. Knows no operation.

use half::f16;

use super::Vector;

/// A way of storing numbers that become lanes.
pub(super) trait LaneStorage: Copy + Default {
    fn load<const N: usize, E: Vector<N>>(e: E, from: &[Self; N]) -> E::F;
}

macro_rules! stored {
    ($($name:ident: $load:ident;)+) => {
        $(impl LaneStorage for $name {
            #[inline(always)]
            fn load<const N: usize, E: Vector<N>>(e: E, from: &[Self; N]) -> E::F {
                e.$load(from)
            }
        })+
    };
}

stored! {
    f32: load;
    f16: load_f16;
}

/// The first `x.len()` (at most `N`) values, then `fill`.
#[inline(always)]
pub(super) fn padded<const N: usize, A: Copy>(x: &[A], fill: A) -> [A; N] {
    let mut all = [fill; N];
    for (all, x) in all.iter_mut().zip(x) {
        *all = *x;
    }
    all
}

/// `x[i] = f(x[i])`; lanes beyond the end are `fill`.
#[inline(always)]
pub(super) fn map<const N: usize, E: Vector<N>>(
    e: E,
    x: &mut [f32],
    fill: f32,
    mut f: impl FnMut(E::F) -> E::F,
) {
    let (whole, rest) = x.as_chunks_mut::<N>();
    for x in whole {
        let result = f(e.load(x));
        e.store(x, result);
    }
    if !rest.is_empty() {
        let mut last = padded(rest, fill);
        let result = f(e.load(&last));
        e.store(&mut last, result);
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

/// `a[i] = f(a[i], b[i])`.
#[inline(always)]
pub(super) fn zip<const N: usize, E: Vector<N>, B: LaneStorage>(
    e: E,
    a: &mut [f32],
    b: &[B],
    f: impl Fn(E::F, E::F) -> E::F,
) {
    debug_assert_eq!(a.len(), b.len());
    let n = a.len().min(b.len());
    let (a, a_rest) = a[..n].as_chunks_mut::<N>();
    let (b, b_rest) = b[..n].as_chunks::<N>();
    for (a, b) in a.iter_mut().zip(b) {
        let result = f(e.load(a), B::load(e, b));
        e.store(a, result);
    }
    if !a_rest.is_empty() {
        let mut last = padded(a_rest, 0.0);
        let result = f(e.load(&last), B::load(e, &padded(b_rest, B::default())));
        e.store(&mut last, result);
        a_rest.copy_from_slice(&last[..a_rest.len()]);
    }
}
