//! [`Rounding`]: states rounded to their type, in registers.
//!
//! Invariant: the bits of [`StateType::round`](kv_rows::StateType::round) on every instruction set.

use half::f16;

use super::Vector;

/// The rounding of a state after every token.
pub(super) trait Rounding {
    /// Every value rounded.
    fn round<const W: usize, E: Vector<W>>(e: E, x: E::F) -> E::F;
}

/// Nothing is rounded.
pub(super) struct ToF32;

/// To 16-bit IEEE floats.
pub(super) struct ToF16;

/// To the upper halves of 32-bit floats.
pub(super) struct ToBf16;

impl Rounding for ToF32 {
    #[inline(always)]
    fn round<const W: usize, E: Vector<W>>(_: E, x: E::F) -> E::F {
        x
    }
}

impl Rounding for ToF16 {
    #[inline(always)]
    fn round<const W: usize, E: Vector<W>>(e: E, x: E::F) -> E::F {
        let mut halves = [f16::ZERO; W];
        e.store_f16(&mut halves, x);
        e.load_f16(&halves)
    }
}

impl Rounding for ToBf16 {
    #[inline(always)]
    fn round<const W: usize, E: Vector<W>>(e: E, x: E::F) -> E::F {
        let mut values = [0.0; W];
        e.store(&mut values, x);
        for value in &mut values {
            *value = round_bf16(*value);
        }
        e.load(&values)
    }
}

/// Without branches, so that the compiler takes all lanes at once.
#[inline(always)]
fn round_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    let quiet = bits | 0x0040_0000;
    f32::from_bits(if x.is_nan() { quiet } else { rounded } & 0xffff_0000)
}

#[cfg(test)]
mod tests {
    use kv_rows::StateType;

    use super::round_bf16;

    #[test]
    fn every_kind_of_float_is_rounded_as_the_type_says() {
        for high in 0..=u32::from(u16::MAX) {
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(high << 16 | low);
                let wanted = StateType::BF16.round(x).to_bits();
                assert_eq!(round_bf16(x).to_bits(), wanted, "{x:e}");
            }
        }
    }
}
