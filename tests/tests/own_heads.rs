//! Heads that draft in files of their own (EAGLE-3): logits are those of an independent forward
//! pass of model and head (`fixtures/heads/eagle3.py`), a GGUF file holds what a directory holds,
//! and heads that do not fit are refused.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::path::{Path, PathBuf};

use kv_block::BlockFormat;
use kv_core::TokenId;
use kv_graph::GraphShape;
use kv_graph::weights::{Weight, WeightSource};
use model_core::architecture::Registry;
use model_core::directory::HfDirectory;
use model_core::gguf::{Array, GgufWriter, Metadata, Value};
use model_core::head_file::{HeadFile, HeadWeights, JoinedModel};
use model_core::hf::{HfTranslation, HfWeights};
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

/// Metadata and tensors of a head's directory, as llama.cpp's converter has them: its table holds
/// tokens, not their distances.
fn translated(folder: &Path, registry: &Registry) -> (Metadata, HfWeights) {
    let translation = HfTranslation::open(folder, registry.hf_classes()).unwrap();
    let (mut metadata, weights) = translation.into_parts();
    metadata.insert("eagle3.d2t_by_distance", false);
    (metadata, weights)
}

/// A file of a head, without a tensor where that is named.
fn as_gguf(metadata: Metadata, weights: &HfWeights, without: Option<&str>) -> Vec<u8> {
    let mut file = GgufWriter::with_metadata(metadata);
    let is_kept = |name: &str| Some(name) != without;
    let names = weights.names();
    for name in names.iter().filter(|name| *name != "d2t" && is_kept(name)) {
        file.add(weights.require(name).unwrap()).unwrap();
    }
    let distances = weights.integers("d2t").unwrap();
    let Some(distances) = distances.filter(|_| is_kept("d2t")) else {
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
        let (metadata, weights) = translated(&directory, &registry);
        std::fs::write(&file, as_gguf(metadata, &weights, None)).unwrap();
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

/// Metadata keys that change nothing about drafts, by head.
const WITHOUT_EFFECT: &[(&str, &str)] = &[
    ("eagle3", "eagle3.context_length"), // the model's context counts
    ("eagle3_normed", "eagle3.context_length"),
    ("eagle3_normed", "eagle3.d2t_by_distance"), // without a table
    ("eagle3", "general.name"),
    ("eagle3_normed", "general.name"),
    ("eagle3", "general.type"),
    ("eagle3_normed", "general.type"),
];

/// Keys that files may lack: others are drafts, or the same.
const OPTIONAL: &[&str] = &[
    "eagle3.attention.key_length", // the width, divided by the number of heads
    "eagle3.attention.value_length",
    "eagle3.context_length",
    "eagle3.d2t_by_distance",
    "eagle3.draft_vocab_size", // the table says it
    "eagle3.norm_before_fc",
    "eagle3.norm_before_residual",
    "eagle3.rope.dimension_count", // the whole of each head
    "eagle3.rope.freq_base",       // 10,000
    "eagle3.target_hidden_size",   // the matrix that fuses rows says it
    "eagle3.target_layers",        // one at the beginning, in the middle, at the end
    "eagle3.vocab_size",
    "general.name",
    "general.type",
];

/// The same kind of value, but another one.
fn other(value: &Value) -> Value {
    match value {
        Value::U32(n) => Value::U32(n + 1),
        Value::F32(n) => Value::F32(n * 2.0 + 0.5),
        Value::Bool(flag) => Value::Bool(!flag),
        Value::String(_) => Value::from("no such thing"),
        Value::Array(Array::U32(list)) => {
            let mut list = list.clone();
            list[0] += 1;
            Array::U32(list).into()
        }
        _ => panic!("{value:?}"),
    }
}

/// Files of heads, changed in one place, for one model.
struct ChangedFiles<'a> {
    model: &'a HfDirectory,
    registry: &'a Registry,
    file: PathBuf,
}

impl ChangedFiles<'_> {
    /// What the head computes and what the model computes for it, or why it is refused.
    fn outcome(&self, bytes: &[u8]) -> Result<String, String> {
        std::fs::write(&self.file, bytes).unwrap();
        let own = HeadFile::open(&self.file, self.registry).map_err(|e| e.to_string())?;
        let own = own.ok_or("'general.architecture' is of no head")?;
        let (model, weights) = (self.model.model(), self.model.weights().clone());
        let joined = own.join(&**model, weights, self.registry);
        let joined = joined.map_err(|error| error.to_string())?;
        let head = joined.model.draft_head().unwrap();
        let shape = GraphShape {
            n_tokens: 3,
            n_outputs: 1,
        };
        let [of_model, of_head] =
            [&joined.model, &head].map(|model| model.graph(shape).unwrap().text().to_string());
        Ok(format!("{of_model}{of_head}{:?}", head.head_reading()))
    }
}

/// Each key and each tensor of a file has a part in what is drafted, or is refused by name where it
/// is another or not there.
#[test]
fn a_key_or_tensor_of_a_gguf_file_is_understood_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let registry = MODEL.registry();
    let model = MODEL.generated().directory(&registry).unwrap();
    let files = ChangedFiles {
        model: &model,
        registry: &registry,
        file: folder.path().join("head.gguf"),
    };
    let mut faults = Vec::new();
    for name in ["eagle3", "eagle3_normed"] {
        let directory = folder.path().join(name);
        Recipe::open(&fixture("heads").join(name)).expand(&directory);
        let (metadata, weights) = translated(&directory, &registry);
        let sound = files.outcome(&as_gguf(metadata.clone(), &weights, None));
        let sound = sound.unwrap();
        for (key, value) in metadata.iter() {
            let (mut changed, mut less) = (metadata.clone(), metadata.clone());
            changed.insert(key, other(value));
            less.remove(key);
            for (how, metadata) in [("changed", changed), ("missing", less)] {
                let found = files.outcome(&as_gguf(metadata, &weights, None));
                let is_told = match &found {
                    Ok(found) if how == "changed" => {
                        *found != sound || WITHOUT_EFFECT.contains(&(name, key))
                    }
                    Ok(_) => OPTIONAL.contains(&key),
                    // The key, or the key or tensor that contradicts it.
                    Err(error) => ["eagle3.", "'general.", "tensor '", "d2t: "]
                        .iter()
                        .any(|named| error.contains(named)),
                };
                if !is_told {
                    faults.push(format!("{name}: {key} {how}: {found:?}"));
                }
            }
        }
        for tensor in weights.names() {
            let found = files.outcome(&as_gguf(metadata.clone(), &weights, Some(&tensor)));
            let is_told = match &found {
                Ok(found) => *found != sound,
                // That of another bias is named, which comes without it.
                Err(error) if tensor.ends_with(".bias") => error.contains("tensor 'blk.0.attn_"),
                Err(error) => error.contains(&format!("tensor '{tensor}' is missing")),
            };
            if !is_told {
                faults.push(format!("{name}: without {tensor}: {found:?}"));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
