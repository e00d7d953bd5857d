//! Heads that draft in files of their own (EAGLE-3): logits are those of an independent forward
//! pass of model and head (`fixtures/heads/eagle3.py`), a GGUF file holds what a directory holds,
//! and heads that do not fit are refused.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::path::Path;

use kv_block::BlockFormat;
use kv_core::TokenId;
use kv_graph::weights::{Weight, WeightSource};
use model_core::architecture::Registry;
use model_core::gguf::GgufWriter;
use model_core::head_file::{HeadFile, HeadWeights, JoinedModel};
use model_core::hf::HfTranslation;
use model_tests::{Case, Recipe, fixture, heads};

const MODEL: Case = Case::recipe("llama_gqa_untied", model_llama::register);

#[test]
fn heads_of_eagle_give_the_reference() {
    let folder = tempfile::tempdir().unwrap();
    for head in ["eagle3", "eagle3_normed"] {
        heads::own_head_gives_reference(&MODEL, head, &folder.path().join(head));
    }
}

/// The model that assistants draft for.
const GEMMA4: Case = Case::recipe("gemma4_e", model_llama::register);

#[test]
fn assistants_of_gemma_give_the_reference() {
    let folder = tempfile::tempdir().unwrap();
    for head in ["gemma4_assistant", "gemma4_assistant_ordered"] {
        heads::assistant_gives_reference(&GEMMA4, head, &folder.path().join(head));
    }
}

#[test]
fn assistants_that_do_not_fit_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let registry = GEMMA4.registry();
    let directory = GEMMA4.generated().directory(&registry).unwrap();
    let opened = |name: &str, change: &dyn Fn(Recipe) -> Recipe| {
        let recipe = change(Recipe::open(&fixture("heads/gemma4_assistant_ordered")));
        let place = folder.path().join(name);
        recipe.expand(&place);
        HeadFile::open(&place, &registry)
    };
    let refused = |name: &str, change: &dyn Fn(Recipe) -> Recipe| {
        let own = opened(name, change).unwrap().unwrap();
        let joined = own.join(&**directory.model(), directory.weights().clone(), &registry);
        joined.unwrap_err().to_string()
    };
    let set = |key: &'static str, value: u64| {
        move |recipe: Recipe| {
            recipe.with_config(|config| {
                config.insert(key.to_owned(), value.into());
            })
        }
    };
    let set_text = |key: &'static str, value: serde_json::Value| {
        move |recipe: Recipe| {
            recipe.with_config(|config| {
                let text = config.get_mut("text_config").unwrap();
                text.as_object_mut()
                    .unwrap()
                    .insert(key.to_owned(), value.clone());
            })
        }
    };
    for tensor in [
        "pre_projection.weight",
        "post_projection.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "masked_embedding.centroids.weight",
        "masked_embedding.token_ordering",
    ] {
        let message = refused(tensor, &|recipe| recipe.without(tensor));
        assert!(message.contains("is missing"), "{tensor}: {message}");
    }
    let message = refused("width", &set("backbone_hidden_size", 96));
    let wanted = "96, but rows of the model have 48 values";
    assert!(message.contains(wanted), "{message}");
    let message = refused("groups", &set("num_centroids", 30));
    assert!(
        message.contains("30, which does not divide the 512 tokens"),
        "{message}"
    );
    let message = refused("chosen", &set("centroid_intermediate_top_k", 33));
    assert!(message.contains("33 of 32 groups"), "{message}");
    let message = refused("window", &set_text("sliding_window", 16.into()));
    assert!(
        message.contains("layer 0 attends over 2 heads of 12"),
        "{message}"
    );
    let message = refused("tokens", &|recipe| {
        recipe.with_step("masked_embedding.token_ordering", 0)
    });
    assert!(message.contains("token 511 is there twice"), "{message}");
    for (key, value) in [
        ("num_kv_shared_layers", 2.into()),
        ("hidden_size_per_layer_input", 8.into()),
        ("use_double_wide_mlp", true.into()),
        ("enable_moe_block", true.into()),
    ] {
        let error = opened(key, &set_text(key, value)).unwrap_err().to_string();
        assert!(error.contains(key), "{key}: {error}");
    }
    // It drafts for no other model.
    let other = MODEL.generated().directory(&registry).unwrap();
    let own = opened("whole", &|recipe| recipe).unwrap().unwrap();
    let joined = own.join(&**other.model(), other.weights().clone(), &registry);
    let message = joined.unwrap_err().to_string();
    assert!(
        message.contains("48, but rows of the model have 64"),
        "{message}"
    );
}

#[test]
fn wrong_heads_of_eagle_are_named() {
    let folder = tempfile::tempdir().unwrap();
    heads::wrong_own_heads_are_named(&MODEL, folder.path());
}

/// The head of a directory as llama.cpp's converter writes it: its table holds tokens, not their
/// distances.
fn as_gguf(folder: &Path, registry: &Registry) -> Vec<u8> {
    let translation = HfTranslation::open(folder, registry.hf_classes()).unwrap();
    let (mut metadata, weights) = translation.into_parts();
    metadata.insert("eagle3.d2t_by_distance", false);
    let mut file = GgufWriter::with_metadata(metadata);
    for name in weights.names().iter().filter(|name| *name != "d2t") {
        file.add(weights.require(name).unwrap()).unwrap();
    }
    let Some(distances) = weights.integers("d2t").unwrap() else {
        return file.to_bytes().unwrap();
    };
    let tokens = (0i64..).zip(&distances).map(|(at, distance)| at + distance);
    let bytes: Vec<u8> = tokens.flat_map(i64::to_le_bytes).collect();
    // Twice as many numbers of half the width, until the header says otherwise.
    let n = distances.len();
    let stored = Weight::new("d2t", vec![2 * n], BlockFormat::F32, bytes.into()).unwrap();
    file.add(stored).unwrap();
    let mut bytes = file.to_bytes().unwrap();
    let entry = [&3u64.to_le_bytes()[..], b"d2t", &1u32.to_le_bytes()].concat();
    let at = bytes.windows(entry.len()).position(|part| part == entry);
    let at = at.unwrap() + entry.len();
    bytes[at..at + 8].copy_from_slice(&(n as u64).to_le_bytes());
    bytes[at + 8..at + 12].copy_from_slice(&27u32.to_le_bytes());
    bytes
}

#[test]
fn a_gguf_file_is_the_same_head() {
    let folder = tempfile::tempdir().unwrap();
    let registry = MODEL.registry();
    let model = MODEL.generated().directory(&registry).unwrap();
    let joined = |path: &Path| -> JoinedModel {
        let own = HeadFile::open(path, &registry).unwrap().unwrap();
        let joined = own.join(&**model.model(), model.weights().clone(), &registry);
        joined.unwrap()
    };
    for name in ["eagle3", "eagle3_normed"] {
        let directory = folder.path().join(name);
        Recipe::open(&fixture("heads").join(name)).expand(&directory);
        let file = folder.path().join(format!("{name}.gguf"));
        std::fs::write(&file, as_gguf(&directory, &registry)).unwrap();
        let [wanted, found] = [directory.as_path(), file.as_path()].map(joined);
        let names = |joined: &JoinedModel| {
            let mut names = joined.weights.names();
            names.sort();
            names
        };
        assert_eq!(names(&found), names(&wanted));
        for name in names(&wanted) {
            let [wanted, found] =
                [&wanted, &found].map(|joined| joined.weights.require(&name).unwrap());
            assert_eq!(found.info(), wanted.info(), "{name}");
            assert!(found.bytes()[..] == wanted.bytes()[..], "{name}");
        }
        let [wanted, found] = [wanted, found].map(|joined| joined.model.draft_head().unwrap());
        let known = wanted.head_reading();
        assert_eq!(found.head_reading(), known, "{name}");
        if name == "eagle3" {
            // Tokens 1, 4, 7 and so on.
            let tokens = known.tokens.unwrap();
            assert!(
                (0u32..)
                    .zip(tokens)
                    .all(|(at, &token)| token == TokenId(3 * at + 1))
            );
        }
    }
}
