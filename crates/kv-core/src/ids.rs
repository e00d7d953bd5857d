//! Index newtypes: one type for every kind of number that counts tokens, cells or layers.
//!
//! Invariant: none of them has a value that means "none"; absence is an `Option`.
//! Knows nothing of what is stored under an index.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! index_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        #[repr(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// The index as a `usize`, for indexing slices.
            #[inline]
            pub const fn as_usize(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl From<u32> for $name {
            fn from(value: u32) -> Self {
                Self(value)
            }
        }
    };
}

index_type!(
    /// A sequence: one line of text that a model remembers. Below [`MAX_SEQS`].
    SeqId
);
index_type!(
    /// The position of a token in its sequence, counted from 0.
    Pos
);
index_type!(
    /// One token's place in a part of the memory, counted over all streams of that part:
    /// cell `c` of stream `s` is `s * cells_per_stream + c`. It is also the row number of the
    /// token's K and V in the backend's storage.
    CellIdx
);
index_type!(
    /// A layer of the model, counted from 0.
    LayerIdx
);
index_type!(
    /// An independent array of cells that only its own sequences use.
    StreamIdx
);
index_type!(
    /// A part of a memory: the attention layers that share one set of cells, and so one window.
    PartIdx
);
index_type!(
    /// A token of the vocabulary, or the name of a row that stands in the place of one
    /// ([`TokenId::names_row`]).
    TokenId
);

impl TokenId {
    /// The smallest name of a row: no vocabulary has as many tokens.
    pub const FIRST_ROW_NAME: u32 = 1 << 31;

    /// True if it names a row of a picture instead of a token. Two rows have the same name where
    /// they are the same row of the same picture: so a memory of tokens is one of pictures, too.
    #[inline]
    pub const fn names_row(self) -> bool {
        self.0 >= Self::FIRST_ROW_NAME
    }
}

/// By how much a position moves; below 0 towards the beginning of the sequence.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct PosDelta(pub i32);

impl fmt::Display for PosDelta {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:+}", self.0)
    }
}

/// The largest number of sequences that a memory can hold.
pub const MAX_SEQS: usize = 4096;

impl Pos {
    /// The position `n` tokens later, or `None` where that is not representable.
    #[inline]
    pub fn checked_add(self, n: u32) -> Option<Self> {
        self.0.checked_add(n).map(Self)
    }

    /// The position after this one, saturating at the largest.
    #[inline]
    pub const fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl CellIdx {
    /// The cell `n` places further.
    #[inline]
    pub const fn offset(self, n: u32) -> Self {
        Self(self.0 + n)
    }
}
