//! The contract suite. What this backend does not compute is declared, with the reason: a declared
//! failure that passes fails the suite, so the list cannot outlive its reasons.

use kv_contract::{Known, Subject, backend_contract};
use loops_for_cellar::LoopsBackend;

const EXACT_GELU: &str = "the exact GELU needs an error function, which the standard library lacks";
const ELEMENTWISE: &str = "only the elementwise operations of Llama";
const RECURRENT: &str = "no recurrent layers";
const EXPERTS: &str = "no experts";
const HEADS: &str = "no matrices of heads, and no two values next to each other";
const SPARSE: &str = "no indexers";
const CUSTOM: &str = "no custom operations";
const PARTIAL: &str = "no partial attention";
const PLAIN: &str = "no attention in three nodes";
const SECTIONS: &str = "no positions of images";
const BATCH: &str = "no attention among the tokens of a ubatch";

const KNOWN: &[Known] = &[
    Known::fails("activate_activates", EXACT_GELU),
    Known::fails("gate_activates", EXACT_GELU),
    Known::fails("clamp_bounds", ELEMENTWISE),
    Known::fails("gains_multiply", ELEMENTWISE),
    Known::fails("parts_of_rows_mix", ELEMENTWISE),
    Known::fails("gaussian_top_k_cuts", ELEMENTWISE),
    Known::fails("clamped_gate_clamps", ELEMENTWISE),
    Known::fails("elementwise_nodes_leave_operands_alone", ELEMENTWISE),
    Known::fails("layer_norm_centres", ELEMENTWISE),
    Known::fails("positions_scale", ELEMENTWISE),
    Known::fails("positions_scale_from_zero", ELEMENTWISE),
    Known::fails("rows_of_a_weight_add", ELEMENTWISE),
    Known::fails("soft_cap_bends", ELEMENTWISE),
    Known::fails("convolutions_and_scans_compute", RECURRENT),
    Known::fails("kernels_of_convolutions_join", RECURRENT),
    Known::fails(
        "going_back_to_a_snapshot_is_as_if_nothing_followed",
        RECURRENT,
    ),
    Known::fails("scans_by_heads_compute", RECURRENT),
    Known::fails("decays_fall", RECURRENT),
    Known::fails("delta_rules_compute", RECURRENT),
    Known::fails("delta_states_go_back", RECURRENT),
    Known::fails("states_of_every_type_compute", RECURRENT),
    Known::fails(
        "states_of_every_type_continue_however_they_are_cut",
        RECURRENT,
    ),
    Known::fails("states_of_custom_operations_are_floats", CUSTOM),
    Known::fails("unsound_states_are_refused", RECURRENT),
    Known::fails("experts_compute", EXPERTS),
    Known::fails("routes_share_among_near_ties", EXPERTS),
    Known::fails("experts_on_blocks", EXPERTS),
    Known::fails("experts_on_scaled_inputs_compute", EXPERTS),
    Known::fails("routes_choose_and_weigh", EXPERTS),
    Known::fails("routes_choose_from_groups", EXPERTS),
    Known::fails("routes_have_gains", EXPERTS),
    Known::fails("heads_have_matrices", HEADS),
    Known::fails("heads_on_blocks", HEADS),
    Known::fails("heads_are_cut_and_joined", HEADS),
    Known::fails("indexers_choose_what_is_attended", SPARSE),
    Known::fails(
        "indexers_that_may_choose_everything_leave_nothing_out",
        SPARSE,
    ),
    Known::fails("indexers_need_keys_of_their_width", SPARSE),
    Known::fails("unregistered_operations_are_refused", CUSTOM),
    Known::fails("custom_operations_see_whole_sequences", CUSTOM),
    Known::fails("custom_rows_compute", CUSTOM),
    Known::fails("custom_states_continue_however_they_are_cut", CUSTOM),
    Known::fails("what_custom_operations_refuse_is_reported", CUSTOM),
    Known::fails("partial_results_have_logarithms", PARTIAL),
    Known::fails("recent_and_old_rows_merge", PARTIAL),
    Known::fails("rows_that_see_nothing_merge_to_zero", PARTIAL),
    Known::fails("plain_attention_is_three_nodes", PLAIN),
    Known::fails("sinks_and_biases_come_from_the_graph", PLAIN),
    Known::fails("rope_sections_rotate", SECTIONS),
    Known::fails("tokens_attend_within_their_ubatch", BATCH),
    Known::fails("scores_by_distance_add", BATCH),
    Known::fails("stored_keys_have_scores_by_distance", BATCH),
    Known::fails("unsound_batch_visibilities_are_refused", BATCH),
];

backend_contract!(|| Subject::new(LoopsBackend).with_known(KNOWN));
