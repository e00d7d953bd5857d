//! [`Form`]: how the rows of a weight are to lie, which of floats depends on their values.
//!
//! Knows nothing of memory, nor of when anything is repacked.

use kv_core::weights::Weight;

use crate::kernels::{Arrangement, RepackFns, WeightRows};
use crate::storage::LINE;

/// Bytes that a task repacks, about.
const BYTES_PER_TASK: usize = 256 << 10;

/// How the rows of a weight lie.
#[derive(Clone, Copy)]
pub(super) struct Form {
    /// How they were repacked; not where they lie as they are stored.
    pub(super) fns: Option<&'static RepackFns>,
    /// How many, from the first one on: all that lie side by side with others.
    pub(super) n_rows: usize,
    /// Bytes of a row, on average.
    pub(super) row_bytes: usize,
}

impl Form {
    /// The first of these that a weight can have, else as it is stored; none where it is no matrix, nor one for each expert.
    pub(super) fn of(weight: &Weight, fns: &'static [RepackFns]) -> Option<Self> {
        let (&[n_out, _] | &[_, n_out, _]) = weight.shape() else {
            return None;
        };
        let row_bytes = |fns: &RepackFns| (fns.row_bytes)(weight.format(), weight.n_columns());
        // The rows of a matrix for each expert have to be whole.
        let has_one = n_out == weight.n_rows();
        let fits = |f: &RepackFns| match n_out % f.at_once {
            0 => true,
            _ => has_one && n_out > f.at_once,
        };
        let is_good = |f: &&RepackFns| fits(f) && row_bytes(f) > 0 && can_be_repacked(weight, f);
        let fns = fns.iter().find(is_good);
        let n_rows = weight.n_rows();
        let (n_rows, row_bytes) = match fns {
            Some(fns) => (n_rows / fns.at_once * fns.at_once, row_bytes(fns)),
            None => (n_rows, weight.format().row_bytes(weight.n_columns())?),
        };
        (n_out > 0 && row_bytes > 0).then_some(Self {
            fns,
            n_rows,
            row_bytes,
        })
    }

    pub(super) fn arrangement(&self) -> Arrangement {
        match self.fns {
            Some(_) => Arrangement::Repacked,
            None => Arrangement::Stored,
        }
    }

    /// Rows that cannot be parted.
    pub(super) fn at_once(&self) -> usize {
        self.fns.map_or(1, |fns| fns.at_once)
    }

    /// Rows that a task repacks.
    pub(super) fn rows_of_piece(&self) -> usize {
        let n_rows = (BYTES_PER_TASK / self.row_bytes).max(1);
        n_rows.next_multiple_of(self.at_once())
    }

    /// Bytes of all of these rows, whole lines.
    pub(super) fn n_bytes(&self) -> usize {
        (self.n_rows * self.row_bytes).next_multiple_of(LINE)
    }
}

/// Whether the first rows of a weight and the last ones can be repacked, if that depends on their values.
fn can_be_repacked(weight: &Weight, fns: &RepackFns) -> bool {
    let format = weight.format();
    if format.block_len() > 1 {
        return true;
    }
    let (n_columns, n_rows) = (weight.n_columns(), weight.n_rows());
    let Some(row_bytes) = format.row_bytes(n_columns) else {
        return false;
    };
    let n = fns.at_once.min(n_rows);
    let mut to = vec![0; n * (fns.row_bytes)(format, n_columns)];
    [0, n_rows - n].into_iter().all(|first| {
        let bytes = weight
            .bytes()
            .get(first * row_bytes..(first + n) * row_bytes);
        let rows = bytes.map(|bytes| WeightRows {
            format,
            arrangement: Arrangement::Stored,
            bytes,
            row_bytes,
            first: 0,
            n_columns,
        });
        rows.is_some_and(|rows| (fns.repack)(&rows, &mut to))
    })
}
