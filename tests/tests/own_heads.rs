//! Heads that draft in files of their own (EAGLE-3): logits are those of an independent forward
//! pass of model and head (`fixtures/heads/eagle3.py`), and heads that do not fit are refused.

use model_tests::{Case, heads};

const MODEL: Case = Case::recipe("llama_gqa_untied", model_llama::register);

#[test]
fn heads_of_eagle_give_the_reference() {
    let folder = tempfile::tempdir().unwrap();
    for head in ["eagle3", "eagle3_normed"] {
        heads::own_head_gives_reference(&MODEL, head, &folder.path().join(head));
    }
}

#[test]
fn wrong_heads_of_eagle_are_named() {
    let folder = tempfile::tempdir().unwrap();
    heads::wrong_own_heads_are_named(&MODEL, folder.path());
}
