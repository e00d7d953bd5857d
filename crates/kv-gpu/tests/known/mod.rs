//! What the contract asks for and the backend refuses, on the simulator and on GPUs.

use kv_contract::Known;

/// Ops without a kernel, and settings of others that their kernels do not take.
pub(crate) const KNOWN: &[Known] = &[
    Known::fails("sigmoid_gates", NO_KERNEL),
    Known::fails("decays_fall", NO_KERNEL),
    Known::fails("delta_rules_compute", NO_KERNEL),
    Known::fails("delta_states_go_back", NO_KERNEL),
    Known::fails(
        "kernels_of_convolutions_join",
        "the kernel takes one weight",
    ),
    Known::fails("clamp_bounds", NO_KERNEL),
    Known::fails("rectifiers_cut", NO_KERNEL),
    Known::fails(
        "positions_scale_from_zero",
        "the kernel counts positions from 1",
    ),
];
const NO_KERNEL: &str = "an operation without a kernel is refused";
