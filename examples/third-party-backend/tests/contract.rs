//! The contract suite. What this backend does not compute is declared, with the reason: a declared
//! failure that passes fails the suite, so the list cannot outlive its reasons.

use kv_contract::{Known, Subject, backend_contract};
use loops_for_cellar::LoopsBackend;

const EXACT_GELU: &str = "the exact GELU needs an error function, which the standard library lacks";
const DISTANCES: &str = "no scores by distance";
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
    Known::op("add_row", ELEMENTWISE),
    Known::op("clamp", ELEMENTWISE),
    Known::op("clamped_gate", ELEMENTWISE),
    Known::op("gain", ELEMENTWISE),
    Known::op("gaussian_top_k", ELEMENTWISE),
    Known::op("layer_norm", ELEMENTWISE),
    Known::op("mix", ELEMENTWISE),
    Known::op("scale_by_position", ELEMENTWISE),
    Known::op("soft_cap", ELEMENTWISE),
    Known::op("conv", RECURRENT),
    Known::op("decay", RECURRENT),
    Known::op("delta", RECURRENT),
    Known::op("scan", RECURRENT),
    Known::op("scan_heads", RECURRENT),
    Known::op("route", EXPERTS),
    Known::op("expert_linear", EXPERTS),
    Known::op("expert_scale", EXPERTS),
    Known::op("expert_sum", EXPERTS),
    Known::op("concat", HEADS),
    Known::op("head_linear", HEADS),
    Known::op("index", SPARSE),
    Known::op("attend_sparse", SPARSE),
    Known::op("custom", CUSTOM),
    Known::op("attend_partial", PARTIAL),
    Known::op("merge_partials", PARTIAL),
    Known::op("kq", PLAIN),
    Known::op("kq_soft_max", PLAIN),
    Known::op("kqv", PLAIN),
    Known::op("rope_sections", SECTIONS),
    Known::op("attend_batch", BATCH),
    // Operations that it computes in other cases.
    Known::fails("activate_activates", EXACT_GELU),
    Known::fails("gate_activates", EXACT_GELU),
    Known::fails("stored_keys_have_scores_by_distance", DISTANCES),
];

backend_contract!(|| Subject::new(LoopsBackend).with_known(KNOWN));
