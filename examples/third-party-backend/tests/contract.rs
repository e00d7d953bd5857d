//! The contract suite. What this backend does not compute is declared, with the reason: a declared
//! failure that passes fails the suite, so the list cannot outlive its reasons.

use kv_contract::{KnownLimit, Subject, backend_contract};
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

const KNOWN: &[KnownLimit] = &[
    KnownLimit::op("add_row", ELEMENTWISE),
    KnownLimit::op("clamp", ELEMENTWISE),
    KnownLimit::op("clamped_gate", ELEMENTWISE),
    KnownLimit::op("gain", ELEMENTWISE),
    KnownLimit::op("gaussian_top_k", ELEMENTWISE),
    KnownLimit::op("layer_norm", ELEMENTWISE),
    KnownLimit::op("mix", ELEMENTWISE),
    KnownLimit::op("scale_by_position", ELEMENTWISE),
    KnownLimit::op("soft_cap", ELEMENTWISE),
    KnownLimit::op("conv", RECURRENT),
    KnownLimit::op("decay", RECURRENT),
    KnownLimit::op("delta", RECURRENT),
    KnownLimit::op("scan", RECURRENT),
    KnownLimit::op("scan_heads", RECURRENT),
    KnownLimit::op("route", EXPERTS),
    KnownLimit::op("expert_linear", EXPERTS),
    KnownLimit::op("expert_scale", EXPERTS),
    KnownLimit::op("expert_sum", EXPERTS),
    KnownLimit::op("concat", HEADS),
    KnownLimit::op("head_linear", HEADS),
    KnownLimit::op("index", SPARSE),
    KnownLimit::op("attend_sparse", SPARSE),
    KnownLimit::op("custom", CUSTOM),
    KnownLimit::op("attend_partial", PARTIAL),
    KnownLimit::op("merge_partials", PARTIAL),
    KnownLimit::op("kq", PLAIN),
    KnownLimit::op("kq_soft_max", PLAIN),
    KnownLimit::op("kqv", PLAIN),
    KnownLimit::op("rope_sections", SECTIONS),
    KnownLimit::op("attend_batch", BATCH),
    // Operations that it computes in other cases.
    KnownLimit::fails("activate_activates", EXACT_GELU),
    KnownLimit::fails("gate_activates", EXACT_GELU),
    KnownLimit::fails("stored_keys_have_scores_by_distance", DISTANCES),
];

backend_contract!(|| Subject::new(LoopsBackend).with_known(KNOWN));
