//! Planes: how a weight in blocks lies on a device.
//!
//! A block as it is stored has parts (quants, high bits, scales) whose sizes suit no aligned load.
//! On the device each part has a plane of its own, in which the parts of all blocks follow each
//! other; quants are first. The kernel `split` makes planes of stored blocks. What is in a part
//! only the kernels know (`kernels/blocks`).

use bytemuck::{Pod, Zeroable};
use kv_backend::BackendError;
use kv_block::BlockFormat;

use crate::kernels::word;

/// Planes begin at multiples of this many bytes, and are numbered by them.
const ALIGN: usize = 256;
/// A format has no more planes.
pub(crate) const MAX_PLANES: usize = 4;

/// A part of a block: its first byte and its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segment {
    from: usize,
    len: usize,
}

/// The parts of a format's blocks, in the order of the planes.
fn segments(format: BlockFormat) -> Vec<Segment> {
    let parts: &[(usize, usize)] = match format {
        BlockFormat::F32 => &[(0, 4)],
        BlockFormat::F16 | BlockFormat::BF16 => &[(0, 2)],
        BlockFormat::Q4_0 | BlockFormat::IQ4_NL => &[(2, 16), (0, 2)],
        BlockFormat::Q4_1 => &[(4, 16), (0, 4)],
        BlockFormat::Q5_0 => &[(6, 16), (2, 4), (0, 2)],
        BlockFormat::Q5_1 => &[(8, 16), (4, 4), (0, 4)],
        BlockFormat::Q8_0 => &[(2, 32), (0, 2)],
        BlockFormat::Q2_K => &[(16, 64), (0, 16), (80, 4)],
        BlockFormat::Q3_K => &[(32, 64), (0, 32), (96, 12), (108, 2)],
        BlockFormat::Q4_K => &[(16, 128), (0, 16)],
        BlockFormat::Q5_K => &[(48, 128), (16, 32), (0, 16)],
        BlockFormat::Q6_K => &[(0, 128), (128, 64), (192, 16), (208, 2)],
        BlockFormat::IQ4_XS => &[(8, 128), (0, 8)],
        BlockFormat::MXFP4 => &[(1, 16), (0, 1)],
        BlockFormat::IQ1_S => &[(2, 32), (34, 16), (0, 2)],
        BlockFormat::IQ1_M => &[(0, 32), (32, 16), (48, 8)],
        BlockFormat::IQ2_XXS => &[(2, 64), (0, 2)],
        BlockFormat::IQ2_XS => &[(2, 64), (66, 8), (0, 2)],
        BlockFormat::IQ2_S => &[(2, 64), (66, 16), (0, 2)],
        BlockFormat::IQ3_XXS => &[(2, 64), (66, 32), (0, 2)],
        BlockFormat::IQ3_S => &[(2, 64), (66, 8), (74, 36), (0, 2)],
        BlockFormat::TQ1_0 => &[(0, 48), (48, 4), (52, 2)],
        BlockFormat::TQ2_0 => &[(0, 64), (64, 2)],
        BlockFormat::Q1_0 | BlockFormat::Q2_0 => &[(2, 16), (0, 2)],
        BlockFormat::NVFP4 => &[(4, 32), (0, 4)],
        // A format without kernels has no planes, and is refused where it is used.
        _ => &[],
    };
    let parts = parts.iter();
    parts.map(|&(from, len)| Segment { from, len }).collect()
}

/// A plane: which part of blocks it has, and where it begins, in units of 256 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
struct Plane {
    from: u32,
    len: u32,
    at: u32,
}

/// True if there are kernels for matrices in this format.
pub fn has_kernels(format: BlockFormat) -> bool {
    !segments(format).is_empty()
}

/// The planes of one weight.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Planes {
    all: [Plane; MAX_PLANES],
    bytes: usize,
}

/// `SplitArgs` of `split.k`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct SplitSettings {
    pub(crate) first_block: u32,
    pub(crate) n_blocks: u32,
    block_bytes: u32,
    planes: [Plane; MAX_PLANES],
}

impl Planes {
    /// The planes of `n_blocks` blocks.
    ///
    /// # Errors
    /// [`BackendError::Input`] where there are more than a kernel can count.
    pub(crate) fn new(format: BlockFormat, n_blocks: usize) -> Result<Self, BackendError> {
        let mut planes = Self::default();
        for (plane, segment) in planes.all.iter_mut().zip(segments(format)) {
            *plane = Plane {
                from: word(segment.from)?,
                len: word(segment.len)?,
                at: word(planes.bytes / ALIGN)?,
            };
            planes.bytes += (n_blocks * segment.len).next_multiple_of(ALIGN);
        }
        Ok(planes)
    }

    /// Bytes of all planes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The start of the planes after the first, as kernels take it.
    pub(crate) fn places(&self) -> [u32; MAX_PLANES - 1] {
        let [_, rest @ ..] = self.all;
        rest.map(|plane| plane.at)
    }

    /// Settings of the kernel that splits blocks `first_block..first_block + n_blocks`.
    pub(crate) fn split(&self, first_block: u32, n_blocks: u32) -> SplitSettings {
        SplitSettings {
            first_block,
            n_blocks,
            block_bytes: self.all.iter().map(|plane| plane.len).sum(),
            planes: self.all,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_of_a_block_is_in_one_plane() {
        for format in BlockFormat::ALL.into_iter().filter(|f| has_kernels(*f)) {
            let mut bytes: Vec<usize> = Vec::new();
            for segment in segments(format) {
                bytes.extend(segment.from..segment.from + segment.len);
            }
            bytes.sort_unstable();
            let all: Vec<usize> = (0..format.block_bytes()).collect();
            assert_eq!(bytes, all, "{format}");
            assert!(segments(format).len() <= MAX_PLANES);
        }
    }

    #[test]
    fn planes_begin_where_the_one_before_ends() {
        let planes = Planes::new(BlockFormat::Q5_0, 17).unwrap();
        assert_eq!(planes.places(), [2, 3, 0]);
        assert_eq!(planes.bytes(), 4 * 256);
    }
}
