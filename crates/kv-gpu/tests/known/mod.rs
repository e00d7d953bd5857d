//! What the contract asks for and a GPU backend refuses. kv-cuda's tests compile this file, too.

use kv_contract::Known;

/// Tests that fail, and why.
pub(crate) const KNOWN: &[Known] = &[
    Known::fails("partial_results_have_logarithms", PARTIAL),
    Known::fails("recent_and_old_rows_merge", PARTIAL),
    Known::fails("rows_that_see_nothing_merge_to_zero", PARTIAL),
];

const PARTIAL: &str = "no partial attention";
