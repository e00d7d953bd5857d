//! [`Scales`]: what the numbers of a group of columns are multiplied with, a row each; and
//! [`Groups`], which column belongs to which group.

use std::sync::Arc;

use half::{bf16, f16};
use kv_block::mxfp4_scale;
use kv_graph::weights::SharedBytes;

use super::super::fp8::e4m3;

/// The way that scales are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScaleType {
    F32,
    F16,
    BF16,
    E4M3,
    /// A power of two, by its exponent.
    E8M0,
}

impl ScaleType {
    /// Bytes of one.
    pub(super) fn n_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::E4M3 | Self::E8M0 => 1,
        }
    }
}

/// A scale for all scales.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum GlobalScale {
    None,
    /// None, and numbers are divided by the scales that are stored.
    Inverse,
    Divisor(f32),
    Factor(f32),
}

/// The scales of a matrix. Invariant: [`Self::new`] checked that there are bytes for all of them.
#[derive(Clone, Debug)]
pub(super) struct Scales {
    bytes: SharedBytes,
    stored: ScaleType,
    /// Scales from one row, or group, to the next; 0 where they share one.
    row_step: usize,
    group_step: usize,
    global: GlobalScale,
}

impl Scales {
    /// Scales with these steps, of which there are so many; `None` where there are other bytes.
    pub(super) fn new(
        bytes: SharedBytes,
        stored: ScaleType,
        n: usize,
        [row_step, group_step]: [usize; 2],
    ) -> Option<Self> {
        (n.checked_mul(stored.n_bytes())? == bytes.len()).then_some(Self {
            bytes,
            stored,
            row_step,
            group_step,
            global: GlobalScale::None,
        })
    }

    /// The same under a scale of all.
    pub(super) fn with_global(self, global: GlobalScale) -> Self {
        Self { global, ..self }
    }

    pub(super) fn stored(&self) -> ScaleType {
        self.stored
    }

    /// The scale of a row's group.
    pub(super) fn get(&self, row: usize, group: usize) -> f32 {
        let n_bytes = self.stored.n_bytes();
        let at = (row * self.row_step + group * self.group_step) * n_bytes;
        let bytes = self.bytes.get(at..at + n_bytes).unwrap_or_default();
        let scale = match (self.stored, bytes) {
            (ScaleType::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            (ScaleType::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
            (ScaleType::BF16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
            (ScaleType::E4M3, &[byte]) => e4m3(byte),
            (ScaleType::E8M0, &[exponent]) => 2.0 * mxfp4_scale(exponent),
            _ => f32::NAN,
        };
        match self.global {
            GlobalScale::None => scale,
            GlobalScale::Inverse => scale.recip(),
            GlobalScale::Divisor(global) => scale / global,
            GlobalScale::Factor(global) => scale * global,
        }
    }

    /// The exponent of a power of two.
    pub(super) fn exponent(&self, row: usize, group: usize) -> u8 {
        let at = row * self.row_step + group * self.group_step;
        self.bytes.get(at).copied().unwrap_or_default()
    }
}

/// The group of each column.
#[derive(Clone, Debug)]
pub(super) enum Groups {
    /// So many columns each, in order.
    Even(usize),
    /// Any, column by column.
    Listed(Arc<[u32]>),
}

impl Groups {
    pub(super) fn of(&self, column: usize) -> usize {
        match self {
            Self::Even(len) => column / (*len).max(1),
            Self::Listed(groups) => groups.get(column).map_or(0, |group| *group as usize),
        }
    }

    /// True if no block of so many columns has parts of two groups.
    pub(super) fn keep_blocks_whole(&self, block_len: usize) -> bool {
        match self {
            Self::Even(len) => len.is_multiple_of(block_len),
            Self::Listed(groups) => {
                let mut blocks = groups.chunks(block_len);
                blocks.all(|block| block.iter().all(|group| Some(group) == block.first()))
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    #[test]
    fn scales_of_each_type_are_read_where_they_lie() {
        let halves = |values: &[f32], to: fn(f32) -> [u8; 2]| {
            values.iter().flat_map(|v| to(*v)).collect::<Vec<u8>>()
        };
        let values = [0.5, 1.0, 2.0, 3.0];
        let f16s = halves(&values, |v| f16::from_f32(v).to_le_bytes());
        let bf16s = halves(&values, |v| bf16::from_f32(v).to_le_bytes());
        for (bytes, stored) in [
            (SharedBytes::from_f32(&values), ScaleType::F32),
            (f16s.into(), ScaleType::F16),
            (bf16s.into(), ScaleType::BF16),
            (vec![0x30, 0x38, 0x40, 0x44].into(), ScaleType::E4M3),
        ] {
            let scales = Scales::new(bytes.clone(), stored, 4, [2, 1]).unwrap();
            assert_eq!([scales.get(0, 1), scales.get(1, 1)], [1.0, 3.0]);
            let tall = Scales::new(bytes.clone(), stored, 4, [1, 2]).unwrap();
            assert_eq!([tall.get(1, 0), tall.get(0, 1)], [1.0, 2.0]);
            assert!(Scales::new(bytes, stored, 5, [1, 2]).is_none());
            let divided = tall.clone().with_global(GlobalScale::Divisor(4.0));
            assert_eq!(divided.get(1, 1), 0.75);
            let inverse = tall.clone().with_global(GlobalScale::Inverse);
            assert_eq!(inverse.get(0, 1), 0.5);
            assert_eq!(tall.with_global(GlobalScale::Factor(4.0)).get(1, 1), 12.0);
        }
        let powers = vec![126u8, 127, 0, 255].into();
        let powers = Scales::new(powers, ScaleType::E8M0, 4, [0, 1]).unwrap();
        let read = [0, 1, 2].map(|group| powers.get(7, group));
        assert_eq!(read, [0.5, 1.0, 2f32.powi(-127)]);
        assert!(!powers.get(0, 3).is_finite());
        assert_eq!(powers.exponent(3, 1), 127);
    }

    #[test]
    fn groups_that_cross_blocks_are_found() {
        for (groups, whole) in [
            (Groups::Even(32), true),
            (Groups::Even(128), true),
            (Groups::Even(48), false),
            (Groups::Listed([[7; 32], [2; 32]].concat().into()), true),
            (
                Groups::Listed([vec![1; 31], vec![0]].concat().into()),
                false,
            ),
        ] {
            assert_eq!(groups.keep_blocks_whole(32), whole, "{groups:?}");
        }
        let wide = [64, 256].map(|len| Groups::Even(192).keep_blocks_whole(len));
        assert_eq!(wide, [true, false]);
        assert_eq!([0, 47, 48].map(|c| Groups::Even(48).of(c)), [0, 0, 1]);
        assert_eq!(Groups::Listed([3, 1].into()).of(1), 1);
    }
}
