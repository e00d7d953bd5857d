//! GGUF files that llama.cpp's converter (build 11434) writes in another way than Cellar's own
//! conversion: they are the model of the directory, with the same graphs and tensors.

#![allow(clippy::unwrap_used)] // helpers of tests

use kv_graph::weights::{Weight, WeightSource};
use model_core::architecture::Model;
use model_core::gguf::{Array, GgufFile, GgufWriter, Metadata};
use model_tests::checks::{MANY, ONE};
use model_tests::{Case, Recipe, remove_key};
use serde_json::{Map, Value, json};

use crate::common::CASES;

/// A file, of its metadata and of its tensors by their names there.
fn written(metadata: Metadata, tensors: impl IntoIterator<Item = (String, Weight)>) -> GgufFile {
    let mut file = GgufWriter::with_metadata(metadata);
    for (name, weight) in tensors {
        let (shape, format) = (weight.shape().to_vec(), weight.format());
        let named = Weight::new(name, shape, format, weight.bytes().clone());
        file.add(named.unwrap()).unwrap();
    }
    GgufFile::from_bytes(file.to_bytes().unwrap().into()).unwrap()
}

/// All tensors of the GGUF file that Cellar converts a recipe to.
fn tensors(weights: &dyn WeightSource) -> impl Iterator<Item = (String, Weight)> {
    let names = weights.names().into_iter();
    names.map(|name| (name.clone(), weights.require(&name).unwrap()))
}

fn graphs(model: &dyn Model) -> Vec<String> {
    let models = [17, usize::MAX].map(|n_tokens| model.for_context(n_tokens));
    let shapes = [ONE, MANY].into_iter();
    let texts = shapes.flat_map(|shape| {
        let own = model.graph(shape).unwrap().text().to_string();
        let longer = models.iter().flatten();
        let longer = longer.map(move |model| model.graph(shape).unwrap().text().to_string());
        std::iter::once(own).chain(longer)
    });
    texts.collect()
}

/// That a file is the model of a recipe, tensor by tensor.
fn is_the_same(case: &Case, recipe: &Recipe, file: &GgufFile) {
    let directory = recipe.directory(&case.registry()).unwrap();
    let model = case.registry().model(file.metadata(), file).unwrap();
    assert_eq!(model.context_length(), directory.model().context_length());
    for (ours, theirs) in graphs(&*model).iter().zip(graphs(&**directory.model())) {
        for (ours, theirs) in ours.lines().zip(theirs.lines()) {
            assert_eq!(ours, theirs, "{}", case.name);
        }
        assert_eq!(ours.lines().count(), theirs.lines().count());
    }
    let n_graphs = [&*model, &**directory.model()].map(|model| graphs(model).len());
    assert_eq!(n_graphs[0], n_graphs[1], "{}", case.name);
    let weights = &**directory.weights();
    let [mut ours, mut theirs] = [file.names(), weights.names()];
    ours.sort();
    theirs.sort();
    assert_eq!(ours, theirs, "{}", case.name);
    for name in theirs {
        let [ours, theirs] = [file as &dyn WeightSource, weights].map(|w| w.require(&name));
        let (ours, theirs) = (ours.unwrap(), theirs.unwrap());
        assert_eq!(ours.info(), theirs.info(), "{}: {name}", case.name);
        assert_eq!(file.describe(&name).unwrap(), theirs.info(), "{name}");
        assert!(
            ours.bytes()[..] == theirs.bytes()[..],
            "{}: {name}",
            case.name
        );
    }
}

fn case(name: &str) -> &'static Case {
    Case::named(CASES, name)
}

/// The tensors of a recipe with keys and values of latents as one matrix.
fn with_latents_together(recipe: &Recipe, weights: &dyn WeightSource) -> Vec<(String, Weight)> {
    let is_half = |name: &str| name.contains(".attn_k_b.") || name.contains(".attn_v_b.");
    let others = tensors(weights).filter(|(name, _)| !is_half(name));
    let layers = recipe.weights().names().into_iter().filter_map(|name| {
        let layer = name.strip_suffix(".self_attn.kv_b_proj.weight")?;
        let layer = layer.strip_prefix("model.layers.")?;
        let weight = recipe.weights().require(&name).unwrap();
        Some((format!("blk.{layer}.attn_kv_b.weight"), weight))
    });
    others.chain(layers).collect()
}

/// The settings of MiniCPM 3 that its files leave out, as they were published.
fn published_minicpm3(config: &mut Map<String, Value>) {
    for (key, value) in [
        ("scale_emb", json!(12)),
        ("scale_depth", json!(1.4)),
        ("dim_model_base", json!(256)),
        // Files have no other number for the norms of latents.
        ("rms_norm_eps", json!(1e-6)),
    ] {
        config.insert(key.to_owned(), value);
    }
    let rope = config.get_mut("rope_parameters").unwrap();
    rope["rope_theta"] = json!(10_000.0);
}

const MINICPM3: [(&str, u32); 10] = [
    ("context_length", 512),
    ("embedding_length", 64),
    ("block_count", 3),
    ("feed_forward_length", 96),
    ("attention.head_count", 4),
    ("attention.head_count_kv", 4),
    ("attention.q_lora_rank", 28),
    ("attention.kv_lora_rank", 20),
    ("attention.key_length", 20),
    ("rope.dimension_count", 6),
];

fn minicpm3_keys() -> Metadata {
    let mut metadata = Metadata::new();
    metadata.insert("general.architecture", "minicpm3");
    for (key, value) in MINICPM3 {
        metadata.insert(&format!("minicpm3.{key}"), value);
    }
    metadata.insert("minicpm3.attention.layer_norm_rms_epsilon", 1e-6f32);
    metadata
}

#[test]
fn minicpm3_has_keys_and_values_of_latents_together_and_no_factors() {
    let case = case("minicpm3");
    let recipe = case.generated().with_config(published_minicpm3);
    let directory = recipe.directory(&case.registry()).unwrap();
    let tensors = with_latents_together(&recipe, &**directory.weights());
    is_the_same(case, &recipe, &written(minicpm3_keys(), tensors.clone()));
    // Heads that the matrix does not hold.
    for (key, value, wanted) in [
        (
            "attention.head_count",
            7u32,
            "no keys and values of 7 heads",
        ),
        (
            "attention.head_count_kv",
            2,
            "2; with these latents it must be 4",
        ),
        (
            "attention.value_length",
            12,
            "12; with these latents it must be 16",
        ),
    ] {
        let mut metadata = minicpm3_keys();
        metadata.insert(&format!("minicpm3.{key}"), value);
        let file = written(metadata, tensors.clone());
        let error = case.registry().model(file.metadata(), &file).map(drop);
        let error = error.unwrap_err().to_string();
        assert!(error.contains(wanted), "{key}: {error}");
    }
}

#[test]
fn deepseek_from_before_april_2025_has_them_together() {
    for name in ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3"] {
        let case = case(name);
        let recipe = case.generated();
        let (weights, mut metadata) = case.open();
        let count = |key: &str| recipe.config()[key].as_u64().unwrap() as u32;
        let key = |key: &str| format!("deepseek2.attention.{key}");
        remove_key(&mut metadata, &key("key_length_mla"));
        remove_key(&mut metadata, &key("value_length_mla"));
        let k_dim = count("qk_nope_head_dim") + count("qk_rope_head_dim");
        metadata.insert(&key("head_count_kv"), count("num_attention_heads"));
        metadata.insert(&key("key_length"), k_dim);
        metadata.insert(&key("value_length"), count("v_head_dim"));
        let tensors = with_latents_together(&recipe, &*weights);
        is_the_same(case, &recipe, &written(metadata, tensors));
    }
}

/// A file whose metadata are changed, and its tensors renamed.
fn rewritten(
    case: &Case,
    change: impl FnOnce(&mut Metadata),
    rename: impl Fn(&str) -> String,
) -> GgufFile {
    let (weights, mut metadata) = case.open();
    change(&mut metadata);
    let tensors = tensors(&*weights).map(|(name, weight)| (rename(&name), weight));
    written(metadata, tensors)
}

#[test]
fn hunyuan_3_has_biases_by_another_name() {
    let case = case("hy_v3");
    let rename = |name: &str| name.replace("exp_probs_b.bias", "exp_probs_b");
    let file = rewritten(case, |_| (), rename);
    is_the_same(case, &case.generated(), &file);
}

#[test]
fn mimo_v2_flash_has_windows_as_numbers() {
    let case = case("mimo_v2_flash");
    let change = |metadata: &mut Metadata| {
        let windows = Array::I32(vec![0, 1, 1, 0]);
        metadata.insert("mimo2.attention.sliding_window_pattern", windows);
    };
    let file = rewritten(case, change, str::to_owned);
    is_the_same(case, &case.generated(), &file);
}

#[test]
fn glm_4_7_flash_does_not_name_its_gate() {
    let case = case("glm4_moe_lite");
    let change = |metadata: &mut Metadata| remove_key(metadata, "deepseek2.expert_gating_func");
    let file = rewritten(case, change, str::to_owned);
    is_the_same(case, &case.generated(), &file);
}
