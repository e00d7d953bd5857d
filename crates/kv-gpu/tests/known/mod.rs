//! What the contract asks for and the backend refuses, on the simulator and on GPUs.

use kv_contract::Known;

/// The delta rule and what goes with it have no kernels.
pub(crate) const KNOWN: &[Known] = &[
    Known::fails("sigmoid_gates", NO_KERNEL),
    Known::fails("decays_fall", NO_KERNEL),
    Known::fails("delta_rules_compute", NO_KERNEL),
    Known::fails("delta_states_go_back", NO_KERNEL),
];
const NO_KERNEL: &str = "an operation without a kernel is refused";
