//! Heads that draft, behind GLM-4.5, DeepSeek V3 and V3.2.

use crate::common::case;
use model_tests::{Case, Source, heads};

const fn with_head(name: &'static str) -> Case {
    Case {
        source: Source::RecipeIn("heads"),
        ..case(name)
    }
}

#[test]
fn heads_of_glm_give_the_reference() {
    heads::gives_reference(&with_head("glm4_moe"));
}

#[test]
fn heads_of_latents_give_the_reference() {
    heads::gives_reference(&with_head("deepseek_v3"));
}

#[test]
fn heads_with_an_indexer_give_the_reference() {
    heads::gives_reference(&with_head("deepseek_v32"));
}

#[test]
fn wrong_heads_are_named() {
    let layer = "model.layers.4.";
    let case = with_head("glm4_moe");
    let gate = format!("{layer}mlp.gate.weight");
    let matrices = ["eh_proj", "embed_tokens", "shared_head.head"];
    for matrix in matrices.map(|name| format!("{layer}{name}.weight")) {
        heads::wrong_heads_are_named(&case, &matrix, &gate);
    }
}
