//! One row of K or V: the values of all heads of one token, as bytes.
//!
//! Invariant: [`RowShape::encode`] and [`RowShape::decode`] are the specification of what backends
//! write and read. Does not know which layer or cell a row belongs to.

use serde::{Deserialize, Serialize};

use crate::{HeadRotation, KvType, MAX_GROUP};

/// Shape and type of the K or V rows of one layer: a row is `[heads, dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowShape {
    /// Number of heads in a row.
    pub heads: usize,
    /// Values of one head.
    pub dim: usize,
    /// The way values are stored.
    pub kv_type: KvType,
    /// The way heads are rotated before that.
    #[serde(default, skip_serializing_if = "is_unrotated")]
    pub rotation: HeadRotation,
}

/// The blocks that hold one head of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadBlocks {
    /// Bytes of the row before them.
    pub first_byte: usize,
    /// Their bytes.
    pub n_bytes: usize,
    /// Their values: more than the head's where it begins or ends inside a block.
    pub n_values: usize,
    /// Values of other heads before the head's.
    pub skip: usize,
}

const fn is_unrotated(rotation: &HeadRotation) -> bool {
    rotation.is_none()
}

impl RowShape {
    /// Values of one row.
    pub const fn len(&self) -> usize {
        self.heads * self.dim
    }

    /// True if a row holds no values at all.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of one row.
    pub const fn bytes(&self) -> usize {
        self.kv_type.row_bytes(self.len())
    }

    /// The blocks of a row that hold its `head`-th head: its own where heads are whole blocks.
    pub const fn head(&self, head: usize) -> HeadBlocks {
        let (len, bytes) = (self.kv_type.block_len(), self.kv_type.row_bytes(1));
        let (first, last) = (head * self.dim / len, ((head + 1) * self.dim).div_ceil(len));
        HeadBlocks {
            first_byte: first * bytes,
            n_bytes: (last - first) * bytes,
            n_values: (last - first) * len,
            skip: head * self.dim - first * len,
        }
    }

    /// Stores `values`, `[heads, dim]`, as one row: what every backend must write.
    pub fn encode(&self, values: &[f32], row: &mut [u8]) {
        let group = self.rotation.group();
        if self.rotation.is_none() || group > MAX_GROUP {
            return self.kv_type.encode_row(values, row);
        }
        let mut rotated = [0.0; MAX_GROUP];
        let rotated = &mut rotated[..group];
        let groups = row.chunks_exact_mut(self.kv_type.row_bytes(group));
        for (values, row) in values.chunks_exact(group).zip(groups) {
            rotated.copy_from_slice(values);
            self.rotation.apply(rotated);
            self.kv_type.encode_row(rotated, row);
        }
    }

    /// Reads one row into `values`, `[heads, dim]`: the mirror of [`RowShape::encode`].
    pub fn decode(&self, row: &[u8], values: &mut [f32]) {
        self.kv_type.decode_row(row, values);
        self.rotation.apply(values);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_begin_inside_blocks_where_rows_are_whole_blocks() {
        let shape = |heads, dim, kv_type| RowShape {
            heads,
            dim,
            kv_type,
            rotation: HeadRotation::None,
        };
        let blocks = |first_byte, n_bytes, n_values, skip| HeadBlocks {
            first_byte,
            n_bytes,
            n_values,
            skip,
        };
        let small = shape(4, 16, KvType::Q8_0);
        let heads = [0, 1, 2, 3].map(|h| small.head(h));
        let wanted = [(0, 0), (0, 16), (34, 0), (34, 16)].map(|(b, s)| blocks(b, 34, 32, s));
        assert_eq!(heads, wanted);
        assert_eq!(shape(2, 80, KvType::Q4_0).head(1), blocks(36, 54, 96, 16));
        assert_eq!(shape(2, 64, KvType::Q5_1).head(1), blocks(48, 48, 64, 0));
        assert_eq!(shape(3, 5, KvType::F16).head(2), blocks(20, 10, 5, 0));
    }
}
