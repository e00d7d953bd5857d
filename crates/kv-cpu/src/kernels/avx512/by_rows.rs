//! How many weight rows one token meets at a time. Knows no format.

/// Defines `multiply`: all weight rows against one token, by a `tile` that stands beside it, for formats of
/// the given trait whose blocks span so many blocks of activations; with the features that `tile` needs.
///
/// `$in_order` says whether sixteen rows are not too long to be read side by side.
macro_rules! by_rows {
    ($format:ident, $span:expr, $in_order:path, $features:literal) => {
        /// All weight rows against one token: `out[row]`.
        #[target_feature(enable = $features)]
        pub(super) fn multiply<F: $format<BYTES>, const BYTES: usize>(
            weights: &$crate::kernels::WeightRows<'_>,
            acts: &$crate::activations::Int8Row<'_>,
            out: &mut [f32],
        ) {
            use super::reduce::{FEW, ROWS};

            if $in_order(ROWS, weights.row_bytes) {
                by_rows::<F, BYTES, ROWS>(weights, acts, out);
            } else {
                by_rows::<F, BYTES, FEW>(weights, acts, out);
            }
        }

        /// The same, `N` rows at a time.
        #[target_feature(enable = $features)]
        fn by_rows<F: $format<BYTES>, const BYTES: usize, const N: usize>(
            weights: &$crate::kernels::WeightRows<'_>,
            acts: &$crate::activations::Int8Row<'_>,
            out: &mut [f32],
        ) {
            let row_bytes = weights.row_bytes.max(1);
            let n_stored = (row_bytes / BYTES).min(acts.n_blocks() / $span);
            for (rows, out) in $crate::kernels::side_by_side::side_by_side(weights, out) {
                // SAFETY: `n_stored` blocks can be read from the start of each row on, and the activations
                // have as many.
                let sums = unsafe { tile::<F, BYTES, N>(&rows, (n_stored, row_bytes), acts) };
                super::reduce::store(sums, out);
            }
        }
    };
}
pub(super) use by_rows;
