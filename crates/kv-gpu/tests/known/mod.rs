//! What the contract asks for and a GPU backend refuses. kv-cuda's tests compile this file, too.

use kv_contract::Known;

/// Tests that fail, and why.
pub(crate) const KNOWN: &[Known] = &[Known::fails(
    "stored_keys_have_scores_by_distance",
    "no scores by distance over stored keys",
)];
