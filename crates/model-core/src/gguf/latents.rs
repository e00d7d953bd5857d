//! [`LatentHeads`]: keys and values of latent attention whose matrices a file has as one.
//!
//! Graphs want two tensors: `attn_k_b`, transposed head by head, which turns queries into latents,
//! and `attn_v_b`. Files of MiniCPM 3 and those of DeepSeek V2 and V3 from before April 2025 have
//! `attn_kv_b`: of each head the rows of keys, then those of values. Rows of values are copied as
//! they are stored. Blocks of quantized rows lie across a transposed matrix: those of keys become
//! `F32`.

use kv_block::{BlockFormat, dequantize};
use kv_graph::weights::{SharedBytes, WeightInfo};

use super::metadata::Metadata;

const TOGETHER: &str = "attn_kv_b.weight";
const KEYS: &str = "attn_k_b.weight";
const VALUES: &str = "attn_v_b.weight";

/// One of the two matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LatentPart {
    /// The part that turns a head's queries into latents.
    Keys,
    /// The part that makes a head's values of latents.
    Values,
}

/// The heads of a file, as far as its keys say.
#[derive(Clone, Copy, Debug)]
pub(super) struct LatentHeads {
    n_heads: usize,
    /// Values of a head's key that the latent makes.
    plain_dim: usize,
}

/// The sizes of one tensor.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    n_heads: usize,
    plain_dim: usize,
    v_dim: usize,
    rank: usize,
}

/// The two tensors that graphs want in place of the one of this name, if it is one.
pub(super) fn parts_of(name: &str) -> Option<[String; 2]> {
    let layer = name.strip_suffix(TOGETHER)?;
    Some([KEYS, VALUES].map(|part| format!("{layer}{part}")))
}

/// The tensor that holds the one of this name, and which part of it that is.
pub(super) fn whole_of(name: &str) -> Option<(String, LatentPart)> {
    let keys = name.strip_suffix(KEYS).map(|at| (at, LatentPart::Keys));
    let values = || name.strip_suffix(VALUES).map(|at| (at, LatentPart::Values));
    let (layer, part) = keys.or_else(values)?;
    Some((format!("{layer}{TOGETHER}"), part))
}

impl LatentHeads {
    /// The heads that the keys of a file describe; `None` where they describe none.
    pub(super) fn of(metadata: &Metadata) -> Option<Self> {
        let architecture: &str = metadata.get("general.architecture").ok()?;
        let count = |key: &str| metadata.get::<usize>(&format!("{architecture}.{key}")).ok();
        let n_heads = count("attention.head_count").filter(|&n| n > 0)?;
        let rotated = count("rope.dimension_count")?;
        let plain_dim = count("attention.key_length")?.checked_sub(rotated)?;
        Some(Self { n_heads, plain_dim })
    }

    fn sizes(self, shape: &[usize]) -> Option<Sizes> {
        let Self { n_heads, plain_dim } = self;
        let &[rows, rank] = shape else { return None };
        let head_rows = rows.is_multiple_of(n_heads).then(|| rows / n_heads)?;
        let v_dim = head_rows.checked_sub(plain_dim).filter(|&n| n > 0)?;
        (plain_dim > 0).then_some(Sizes {
            n_heads,
            plain_dim,
            v_dim,
            rank,
        })
    }

    /// True if a tensor of this shape holds keys and values of these heads.
    pub(super) fn fit(self, shape: &[usize]) -> bool {
        self.sizes(shape).is_some()
    }

    /// One part of a tensor that is stored like this; `None` where it is none of these heads.
    pub(super) fn describe(self, part: LatentPart, whole: &WeightInfo) -> Option<WeightInfo> {
        let sizes = self.sizes(&whole.shape)?;
        Some(match part {
            LatentPart::Keys => WeightInfo {
                shape: vec![sizes.n_heads, sizes.rank, sizes.plain_dim],
                format: BlockFormat::F32,
            },
            LatentPart::Values => WeightInfo {
                shape: vec![sizes.n_heads, sizes.v_dim, sizes.rank],
                format: whole.format,
            },
        })
    }

    /// The values of one part, of those of the whole.
    pub(super) fn bytes(
        self,
        part: LatentPart,
        whole: &WeightInfo,
        bytes: &[u8],
    ) -> Option<SharedBytes> {
        let sizes = self.sizes(&whole.shape)?;
        let head_rows = sizes.plain_dim + sizes.v_dim;
        let row_bytes = bytes.len() / (sizes.n_heads * head_rows);
        let heads = bytes.chunks_exact((head_rows * row_bytes).max(1));
        let plain_bytes = sizes.plain_dim * row_bytes;
        if part == LatentPart::Values {
            let values = heads.filter_map(|head| head.get(plain_bytes..));
            return Some(values.collect::<Vec<_>>().concat().into());
        }
        let mut transposed = Vec::with_capacity(sizes.n_heads * sizes.rank * sizes.plain_dim);
        let mut keys = vec![0.0; sizes.plain_dim * sizes.rank];
        for head in heads {
            dequantize(whole.format, head.get(..plain_bytes)?, &mut keys);
            for column in 0..sizes.rank {
                transposed.extend(keys.iter().skip(column).step_by(sizes.rank));
            }
        }
        Some(SharedBytes::from_f32(&transposed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_cut_in_keys_and_values() {
        let heads = LatentHeads {
            n_heads: 2,
            plain_dim: 2,
        };
        let whole = WeightInfo {
            shape: vec![6, 2],
            format: BlockFormat::F32,
        };
        let values: Vec<f32> = (0u8..12).map(f32::from).collect();
        let bytes = SharedBytes::from_f32(&values);
        let part = |part| {
            let info = heads.describe(part, &whole).unwrap();
            let bytes = heads.bytes(part, &whole, &bytes).unwrap();
            let mut values = vec![0.0; info.shape.iter().product()];
            dequantize(info.format, &bytes, &mut values);
            (info.shape, values)
        };
        let keys = vec![0., 2., 1., 3., 6., 8., 7., 9.];
        assert_eq!(part(LatentPart::Keys), (vec![2, 2, 2], keys));
        let values = vec![4., 5., 10., 11.];
        assert_eq!(part(LatentPart::Values), (vec![2, 1, 2], values));
    }

    #[test]
    fn other_shapes_are_no_heads() {
        let heads = LatentHeads {
            n_heads: 2,
            plain_dim: 2,
        };
        for shape in [&[5, 2][..], &[4, 2], &[6], &[2, 6, 2]] {
            assert!(!heads.fit(shape), "{shape:?}");
        }
    }

    #[test]
    fn names_of_parts_and_wholes() {
        let parts = parts_of("blk.3.attn_kv_b.weight").unwrap();
        assert_eq!(parts, ["blk.3.attn_k_b.weight", "blk.3.attn_v_b.weight"]);
        for (part, wanted) in parts.iter().zip([LatentPart::Keys, LatentPart::Values]) {
            let whole = "blk.3.attn_kv_b.weight".to_owned();
            assert_eq!(whole_of(part), Some((whole, wanted)));
        }
        assert_eq!(parts_of("blk.3.attn_k_b.weight"), None);
        assert_eq!(whole_of("blk.3.attn_k.weight"), None);
    }
}
