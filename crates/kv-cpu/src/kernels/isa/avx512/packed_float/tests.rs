//! Packed rows come back as they were stored.

use kv_block::BlockFormat;

use crate::isa::Isa;
use crate::kernels::isa::avx512::{BF16_TABLE, TABLE};
use crate::kernels::{Kernels, PackFns, WeightLayout, WeightRows};

/// Three blocks of the longest ones.
const N: usize = 3 * 128;
static TABLES: [Kernels; 2] = [TABLE, BF16_TABLE];

/// In bf13 bits, for activations of `f32`, and of BF16.
fn ways(format: BlockFormat) -> Vec<&'static PackFns> {
    let ways = [
        (Isa::Avx512Vnni, TABLES[0].pack),
        (Isa::Avx512Bf16, TABLES[1].pack_bf16),
    ];
    let there = ways.into_iter().filter(|(isa, _)| isa.is_available());
    let fns = there.filter_map(|(_, fns)| fns);
    fns.filter(|fns| (fns.row_bytes)(format, N) > 0).collect()
}

/// The ways in which a row can be packed; there it has to give the bits that were stored.
fn kept(format: BlockFormat, halves: &[u16; N]) -> Vec<bool> {
    let bytes = halves.map(u16::to_le_bytes);
    kept_bytes(format, bytes.as_flattened())
}

fn kept_bytes(format: BlockFormat, bytes: &[u8]) -> Vec<bool> {
    let ways = ways(format).into_iter();
    ways.map(|fns| is_repacked_by(fns, format, bytes)).collect()
}

/// True if it can be packed in every way, false if in none.
fn is_repacked(format: BlockFormat, halves: &[u16; N]) -> bool {
    kept(format, halves).into_iter().all(|is_kept| is_kept)
}

fn is_refused(format: BlockFormat, halves: &[u16; N]) -> bool {
    !kept(format, halves).contains(&true)
}

fn is_repacked_by(fns: &PackFns, format: BlockFormat, bytes: &[u8]) -> bool {
    let stored = WeightRows {
        format,
        layout: WeightLayout::Stored,
        bytes,
        row_bytes: bytes.len(),
        first: 0,
        n_columns: N,
    };
    let row_bytes = (fns.row_bytes)(format, N);
    let mut to = vec![0xa5; row_bytes];
    if !(fns.pack)(&stored, &mut to) {
        return false;
    }
    let repacked = WeightRows {
        layout: WeightLayout::Packed,
        bytes: &to,
        row_bytes,
        ..stored
    };
    let n_bytes = (fns.block_len)(format) * format.block_bytes();
    for (b, wanted) in bytes.chunks_exact(n_bytes).enumerate() {
        let mut got = vec![0; n_bytes];
        (fns.stored_block)(&repacked, 0, b, &mut got);
        assert_eq!(wanted, got, "{format}: block {b}");
    }
    true
}

fn bf16(f: impl Fn(usize) -> f32) -> [u16; N] {
    std::array::from_fn(|i| (f(i).to_bits() >> 16) as u16)
}

#[test]
fn rows_of_eight_significant_bits_are_kept() {
    if !Isa::Avx512Vnni.is_available() {
        return;
    }
    let (bf, f) = (BlockFormat::BF16, BlockFormat::F16);
    // Signs, all mantissas, and exponents from the largest to the last that fits.
    let binades = |n: i32| {
        bf16(move |i| {
            let sign = if i % 3 == 0 { -1.0 } else { 1.0 };
            sign * (1.0 + (i * 37 % 128) as f32 / 128.0) * 2f32.powi(5 - i as i32 % n)
        })
    };
    assert!(is_repacked(bf, &binades(30)));
    assert!(is_refused(bf, &binades(34)), "too far apart");
    let near = |scale: i32| bf16(move |i| (i as f32 - 99.0) / 128.0 * 2f32.powi(scale));
    for scale in [-118, -14, 0, 29] {
        assert!(is_repacked(bf, &near(scale)), "values near 2^{scale}");
    }
    let only_as_bf16 = |kept: &[bool]| !kept[0] && kept[1..].iter().all(|is_kept| *is_kept);
    assert!(
        only_as_bf16(&kept(bf, &near(40))),
        "no model has such values"
    );
    assert!(
        is_repacked(bf, &[0; N]) && is_repacked(f, &[0x8000; N]),
        "zeros of both signs"
    );
    // Far below the largest only a few bits are left.
    let with_small = |small: f32| bf16(move |i| if i == 100 { small } else { 3.0 });
    let only_as_f32 = |kept: &[bool]| kept[0] && !kept[1..].contains(&true);
    assert!(only_as_f32(&kept(bf, &with_small(2f32.powi(-35)))));
    assert!(is_refused(bf, &with_small(1.5 * 2f32.powi(-36))));
    assert!(
        is_refused(bf, &with_small(f32::from_bits(1 << 16))),
        "a subnormal number"
    );
    for odd in [f32::INFINITY, f32::NAN, -f32::INFINITY] {
        assert!(is_refused(bf, &with_small(odd)), "{odd}");
    }
    assert!(
        is_repacked(bf, &bf16(|_| f32::from_bits(0x0080_0000))),
        "the smallest normal number"
    );
}

#[test]
fn f16_is_kept_where_it_was_rounded_from_fewer_bits() {
    if !Isa::Avx512Vnni.is_available() {
        return;
    }
    let format = BlockFormat::F16;
    let f16 = |f: &dyn Fn(usize) -> f32| -> [u16; N] {
        std::array::from_fn(|i| half::f16::from_f32(f(i)).to_bits())
    };
    // As trained: BF16 values whose smallest ones are subnormal in F16, where they were rounded.
    let trained = |i: usize| {
        let value = (i as f32 * 0.37).sin() * 0.1 * 2f32.powi(-(i as i32 % 24));
        f32::from_bits(value.to_bits() & 0xffff_0000)
    };
    assert!(is_repacked(format, &f16(&trained)));
    assert!(
        is_refused(format, &f16(&|i| (i as f32 * 0.37).sin())),
        "eleven bits"
    );
    assert!(is_repacked(format, &[1; N]), "all subnormal");
    let large = |i: usize| if i == 7 { 65_280.0 } else { -1.0 };
    assert!(is_repacked(format, &f16(&large)));
    let mut with_odd = f16(&large);
    with_odd[9] = 1;
    assert!(is_refused(format, &with_odd), "2^-24 with 2^15");
    with_odd[9] = 0x7c00;
    assert!(is_refused(format, &with_odd), "infinity");
}

#[test]
fn f32_is_kept_where_its_lower_half_is_zero() {
    if !Isa::Avx512Vnni.is_available() {
        return;
    }
    let row: [f32; N] = std::array::from_fn(|i| (i as f32 % 192.0 - 99.0) / 128.0);
    let mut bytes = row.map(f32::to_le_bytes);
    assert_eq!(kept_bytes(BlockFormat::F32, bytes.as_flattened()), [true]);
    bytes[70][0] |= 1;
    assert_eq!(kept_bytes(BlockFormat::F32, bytes.as_flattened()), [false]);
}

/// Whatever the bits, what is said to be kept is.
#[test]
fn random_rows_are_kept_or_refused() {
    if !Isa::Avx512Vnni.is_available() {
        return;
    }
    let mut seed = 1_u64;
    let mut n_kept = 0;
    for round in 0..2000 {
        let masks = [0xffff, 0x83f8, 0x9ff8, 0xbfff, 0x8fff];
        let halves = std::array::from_fn(|_| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            ((seed >> 48) as u16 & masks[round % masks.len()]) | (0x3000 * (round as u16 % 2))
        });
        for format in [BlockFormat::F16, BlockFormat::BF16] {
            n_kept += usize::from(kept(format, &halves)[0]);
        }
    }
    assert!((500..3500).contains(&n_kept), "{n_kept} of 4000");
}
