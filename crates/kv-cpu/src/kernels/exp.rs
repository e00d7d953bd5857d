//! Constants of `e^x = 2^n e^r` with `x = n ln 2 + r`, for every instruction set.

/// Exponents below this give zero as well.
pub(crate) const LEAST: f32 = -104.0;
/// -ln 2 in two parts; the first has few bits, so that its product with a small whole number is
/// exact.
pub(crate) const LN_2: [f32; 2] = [-0.693_359_4, 2.121_944_4e-4];
/// Coefficients of the Taylor series of `e^r`, from that of `r^7` on.
pub(crate) const SERIES: [f32; 8] = [
    1.0 / 5040.0,
    1.0 / 720.0,
    1.0 / 120.0,
    1.0 / 24.0,
    1.0 / 6.0,
    0.5,
    1.0,
    1.0,
];
