//! Heads that draft, behind Qwen 3.5.

use crate::common::case;
use model_tests::{Case, Source, heads};

const fn with_head(name: &'static str) -> Case {
    Case {
        source: Source::RecipeIn("heads"),
        ..case(name)
    }
}

#[test]
fn heads_of_qwen_give_the_reference() {
    heads::gives_reference(&with_head("qwen3_5"));
}

#[test]
fn heads_with_experts_give_the_reference() {
    heads::gives_reference(&with_head("qwen3_5_moe"));
}

#[test]
fn wrong_heads_are_named() {
    let case = with_head("qwen3_5");
    let norm = "mtp.layers.0.input_layernorm.weight";
    heads::wrong_heads_are_named(&case, "mtp.fc.weight", norm);
}
