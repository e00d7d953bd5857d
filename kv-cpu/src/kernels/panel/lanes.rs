//! [`Lanes`]: what a tile needs of an instruction set, one weight row in each lane.
//!
//! Invariant: integer functions are exact for the operands that formats have. Knows no format.

/// Registers of `ROWS` integers or floats.
///
/// All functions need the instruction set that the type stands for, which is what makes them
/// unsafe to call; loads and stores need `4 · ROWS` readable or writable bytes.
#[allow(clippy::missing_safety_doc)] // said once, above
pub(in crate::kernels) trait Lanes {
    /// 32-bit integers, also taken as bytes or pairs of 16 bits.
    type Int: Copy;
    /// `f32`.
    type Float: Copy;
    /// Number of lanes.
    const ROWS: usize;
    /// Whether wide weights are taken for signed bytes, less 128, so that this is not left to take off.
    /// Where not, `WIDE` changes nothing.
    const SIGNED_WIDE: bool = false;

    unsafe fn zero() -> Self::Int;
    unsafe fn load(from: *const i32) -> Self::Int;
    /// Asks for a line; may be any address.
    unsafe fn prefetch(from: *const u8);
    unsafe fn splat(x: i32) -> Self::Int;
    /// `acc + Σ w · a` over the four bytes of each lane, `w` unsigned and below 64 unless `WIDE`, `a`
    /// signed.
    unsafe fn dot_bytes<const WIDE: bool>(acc: Self::Int, w: Self::Int, a: Self::Int) -> Self::Int;
    /// `acc + Σ w · a` over the two signed halves of each lane.
    unsafe fn dot_pairs(acc: Self::Int, w: Self::Int, a: Self::Int) -> Self::Int;
    unsafe fn add(a: Self::Int, b: Self::Int) -> Self::Int;
    unsafe fn mul(a: Self::Int, b: Self::Int) -> Self::Int;
    /// Rounded to nearest.
    unsafe fn to_float(x: Self::Int) -> Self::Float;

    unsafe fn zero_f() -> Self::Float;
    unsafe fn load_f(from: *const f32) -> Self::Float;
    unsafe fn store_f(to: *mut f32, x: Self::Float);
    unsafe fn splat_f(x: f32) -> Self::Float;
    unsafe fn mul_f(a: Self::Float, b: Self::Float) -> Self::Float;
    /// `a · b + c`, rounded once.
    unsafe fn mul_add_f(a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float;
    /// `c − a · b`, rounded once.
    unsafe fn sub_mul_f(a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float;
}
