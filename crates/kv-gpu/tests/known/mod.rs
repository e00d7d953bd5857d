//! What the contract asks for and the backend refuses, on the simulator and on GPUs.

use kv_contract::Known;

/// Ops without a kernel, and settings of others that their kernels do not take.
pub(crate) const KNOWN: &[Known] = &[
    Known::fails("scores_by_distance_add", NO_KERNEL),
    Known::fails("indexers_choose_what_is_attended", NO_KERNEL),
    Known::fails(
        "indexers_that_may_choose_everything_leave_nothing_out",
        NO_KERNEL,
    ),
    Known::fails("indexers_need_keys_of_their_width", NO_KERNEL),
];
const NO_KERNEL: &str = "an operation without a kernel is refused";
