//! Models straight from directories of safetensors against an independent implementation
//! (transformers, f32): logits and greedy tokens on both backends, whichever way the tokens come
//! in; and their keys and tensors against those of llama.cpp's converter.
//!
//! The directories are the recipes of the fixtures, or those in the folder that `CELLAR_FIXTURES`
//! names.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::collections::BTreeMap;
use std::num::NonZero;
use std::path::PathBuf;
use std::sync::Arc;

use cellar_engine::{Engine, EngineConfig};
use kv_backend::Backend;
use kv_candle::CandleBackend;
use kv_core::{SeqId, TokenId, batch::Batch};
use kv_cpu::{CpuBackend, CpuConfig};
use kv_graph::weights::{MemoryWeights, WeightSource};
use kv_rows::KvType;
use model_core::architecture::Registry;
use model_core::directory::HfDirectory;
use model_core::hf::{HfConfig, HfTranslation, ModelFileError};
use model_tests::checks::tolerance_of;
use model_tests::{LogitsRows, Recipe, TensorKey, fixture};
use serde_json::{Map, Value};

fn registry() -> Registry {
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    model_mamba::register(&mut registry);
    registry
}

/// Every recipe to test.
fn recipes() -> Vec<Recipe> {
    let folder = std::env::var_os("CELLAR_FIXTURES");
    let folder = folder.map_or_else(|| fixture("recipes"), PathBuf::from);
    let recipes = Recipe::all_in(&folder);
    assert!(!recipes.is_empty(), "no recipe in {}", folder.display());
    recipes
}

/// Every directory whose model can be computed.
fn directories() -> Vec<(Recipe, HfDirectory)> {
    let mut found = Vec::new();
    for recipe in recipes() {
        match recipe.directory(&registry()) {
            Ok(directory) => found.push((recipe, directory)),
            Err(declined @ ModelFileError::Declined { .. }) => println!("{declined}"),
            Err(error) => panic!("{}: {error}", recipe.name()),
        }
    }
    found
}

fn cpu() -> CpuBackend {
    CpuBackend::new(CpuConfig {
        n_threads: NonZero::new(2),
        ..CpuConfig::default()
    })
    .unwrap()
}

fn engine<B: Backend>(backend: B, directory: &HfDirectory, n_ubatch: u32) -> Engine<B> {
    engine_within(256, backend, directory, n_ubatch)
}

fn engine_within<B: Backend>(
    n_ctx: u32,
    backend: B,
    directory: &HfDirectory,
    n_ubatch: u32,
) -> Engine<B> {
    let config = EngineConfig {
        n_ctx: Some(n_ctx),
        n_ubatch,
        n_seqs: 3,
        kv_types: KvType::F32.into(),
        ..EngineConfig::default()
    };
    let weights = Arc::clone(directory.weights()) as Arc<dyn WeightSource>;
    Engine::new(backend, Arc::clone(directory.model()), weights, &config).unwrap()
}

/// Logits of all tokens of all prompts, in one batch or in pieces of `piece` tokens each.
fn logits<B: Backend>(mut engine: Engine<B>, prompts: &[Vec<u32>], piece: usize) -> Vec<Vec<f32>> {
    let n_vocab = engine.model().vocab_size();
    let longest = prompts.iter().map(Vec::len).max().unwrap();
    let mut all = vec![Vec::new(); prompts.len()];
    for start in (0..longest).step_by(piece) {
        let (mut batch, mut owners) = (Batch::new(), Vec::new());
        for (seq, prompt) in prompts.iter().enumerate() {
            let end = (start + piece).min(prompt.len());
            for &id in prompt.get(start..end).unwrap_or_default() {
                let seq_id = SeqId(u32::try_from(seq).unwrap());
                batch
                    .push_token(TokenId(id))
                    .in_sequence(seq_id)
                    .with_output();
                owners.push(seq);
            }
        }
        let rows = engine.decode(&batch).unwrap();
        for (owner, row) in owners.iter().zip(rows.values().chunks(n_vocab)) {
            all[*owner].extend_from_slice(row);
        }
    }
    all
}

/// The most likely tokens, one after the other.
fn greedy<B: Backend>(mut engine: Engine<B>, prompt: &[u32], n: usize) -> Vec<u32> {
    let mut next = prompt.to_vec();
    let mut out = Vec::new();
    while out.len() < n {
        let mut batch = Batch::new();
        for &id in &next {
            batch
                .push_token(TokenId(id))
                .in_sequence(SeqId(0))
                .with_output();
        }
        let logits = engine.decode(&batch).unwrap();
        let row = logits.last().unwrap();
        let best = (0..row.len())
            .max_by(|&a, &b| row[a].total_cmp(&row[b]))
            .unwrap();
        out.push(u32::try_from(best).unwrap());
        next = vec![out[out.len() - 1]];
    }
    out
}

fn assert_close(name: &str, how: &str, ours: &[Vec<f32>], theirs: &[LogitsRows]) {
    for (i, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        let distance = theirs.distance(ours);
        assert!(
            distance < tolerance_of(name),
            "{name}, prompt {i}, {how}: off by {distance}"
        );
    }
}

/// How the tokens of three sequences come: the size of ubatches and of pieces.
type Way = (u32, usize);

fn agrees<B: Backend>(backend: impl Fn() -> B, ways: &[Way], n_greedy: usize) {
    for (recipe, directory) in directories() {
        let (name, reference) = (recipe.name(), recipe.reference());
        let prompts = reference.prompts();
        let theirs = [0, 1, 2].map(|i| reference.logits(i));
        let alone: Vec<Vec<f32>> = prompts
            .iter()
            .flat_map(|prompt| {
                let engine = engine(backend(), &directory, 512);
                logits(engine, std::slice::from_ref(prompt), 512)
            })
            .collect();
        assert_close(&name, "alone", &alone, &theirs);
        for &(n_ubatch, piece) in ways {
            let how = format!("three sequences, ubatch {n_ubatch}, pieces of {piece}");
            let engine = engine(backend(), &directory, n_ubatch);
            let together = logits(engine, &prompts, piece);
            assert_close(&name, &how, &together, &theirs);
        }
        for (i, prompt) in prompts.iter().enumerate().take(n_greedy) {
            let wanted = reference.greedy(i);
            let found = greedy(engine(backend(), &directory, 512), prompt, wanted.len());
            assert_eq!(found, wanted, "{name}: greedy");
        }
    }
}

#[test]
fn cpu_agrees_with_the_reference() {
    agrees(cpu, &[(512, 512), (7, 512), (512, 20), (512, 1)], 3);
}

/// In one way and with one text: it takes several times as long.
#[test]
fn candle_agrees_with_the_reference() {
    agrees(CandleBackend::cpu, &[(7, 20)], 1);
}

/// The first 16 tokens in a context of 16, which is the original length of the one recipe, whose
/// other logits are those of a longer context; the other has the same weights and an original
/// length that is never exceeded.
#[test]
fn the_length_of_the_context_chooses_the_factors_of_long_rope() {
    let directory = Recipe::named("phi3_longrope_long");
    let directory = directory.directory(&registry()).unwrap();
    let reference = Recipe::named("phi3_longrope_short").reference();
    let prompt = reference.prompts().swap_remove(2)[..16].to_vec();
    let wanted = reference.logits(2).of_first(prompt.len());
    assert!(wanted.positions.len() >= 2, "{:?}", wanted.positions);
    let found = |n_ctx| {
        let engine = engine_within(n_ctx, cpu(), &directory, 512);
        logits(engine, std::slice::from_ref(&prompt), 512)
    };
    assert_close("short", "16", &found(16), std::slice::from_ref(&wanted));
    assert!(wanted.distance(&found(17)[0]) > 0.1);
    let [within, beyond] = [16, 17].map(|n_ctx| engine_within(n_ctx, cpu(), &directory, 512));
    let error = within.fingerprint().check(beyond.fingerprint());
    let error = error.unwrap_err().to_string();
    assert!(error.contains("rope_factors_long.weight"), "{error}");
}

/// The value of a key (`{architecture}.{key}`) of a directory whose config is that of a fixture,
/// changed; or why there is no such directory.
fn translated(
    name: &str,
    change: impl FnOnce(&mut Map<String, Value>),
    key: &str,
) -> Result<Option<f32>, String> {
    let mut config = Recipe::named(name).config().clone();
    change(&mut config);
    // Keys do not depend on tensors: there are none, and none is missed.
    config.insert("tie_word_embeddings".to_owned(), true.into());
    let config = HfConfig::new("'config.json'", config);
    let (none, registry) = (MemoryWeights::new(), registry());
    let translated = HfTranslation::from_parts(name, config, &none, registry.hf_classes());
    let translated = translated.map_err(|e| e.to_string())?;
    let metadata = translated.metadata();
    let architecture: &str = metadata.get("general.architecture").unwrap();
    let key = format!("{architecture}.{key}");
    let count = metadata.get::<u32>(&key).map(|n| n as f32);
    Ok(count.or_else(|_| metadata.get(&key)).ok())
}

/// Fixture, key, the key of metadata that it becomes; what that is where the key is left out, as
/// transformers has it, and where it is `null`.
const LEFT_OUT: &str = "
    gemma2_swa8     query_pre_attn_scalar    attention.scale           0.0625   none
    gemma2_swa8     attn_logit_softcapping   attn_logit_softcapping    50       none
    gemma2_swa8     final_logit_softcapping  final_logit_softcapping   30       none
    gemma2_swa8     sliding_window           attention.sliding_window  4096     refused
    gemma2_swa8     head_dim                 attention.key_length      256      16
    gemma3_iswa8    query_pre_attn_scalar    attention.scale           0.0625   none
    gemma3_iswa8    attn_logit_softcapping   attn_logit_softcapping    none     none
    gemma3_iswa8    final_logit_softcapping  final_logit_softcapping   none     none
    gemma3_iswa8    sliding_window           attention.sliding_window  4096     refused
    gemma3_iswa8    rope_parameters          rope.freq_base            1000000  1000000
    gemma3_iswa8    rope_parameters          rope.freq_base_swa        10000    10000
    mistral_swa8    sliding_window           attention.sliding_window  4096     none
    mixtral         sliding_window           attention.sliding_window  none     none
    mixtral         rope_parameters          rope.freq_base            1000000  1000000
    starcoder2      sliding_window           attention.sliding_window  none     none
    smollm3         rope_theta               rope.freq_base            2000000  10000
    llama4_chunk16  rope_parameters          rope.freq_base            500000   500000
    falcon_mamba    mixer_rms_eps            ssm.dt_b_c_rms_epsilon    1e-6     1e-6
";

#[test]
fn keys_that_are_left_out_are_those_of_transformers() {
    for line in LEFT_OUT.trim().lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let &[name, key, to, left_out, null] = &words[..] else {
            panic!("{line}");
        };
        let older = |config: &mut Map<String, Value>| {
            // Older files have the base of the rotation at the top.
            if key == "rope_theta" {
                config.remove("rope_parameters");
            }
            config.remove(key);
        };
        let found = translated(name, older, to).unwrap();
        assert_eq!(found, left_out.parse().ok(), "{line}");
        let is_null = |config: &mut Map<String, Value>| {
            older(config);
            config.insert(key.to_owned(), Value::Null);
        };
        match (translated(name, is_null, to), null) {
            (Err(error), "refused") => assert!(error.contains(key), "{line}: {error}"),
            (found, _) => assert_eq!(found, Ok(null.parse().ok()), "{line}"),
        }
    }
}

/// Configs of Gemma have 4 KV heads where they do not say how many, whatever the number of query
/// heads; `null` is as many as query heads.
#[test]
fn gemma_has_four_kv_heads_where_the_config_does_not_say() {
    for name in ["gemma2_swa8", "gemma3_iswa8"] {
        let kv_heads = |null: Option<Value>| {
            let change = |config: &mut Map<String, Value>| {
                config.insert("num_attention_heads".to_owned(), 8.into());
                config.remove("num_key_value_heads");
                config.extend(null.map(|null| ("num_key_value_heads".to_owned(), null)));
            };
            translated(name, change, "attention.head_count_kv").unwrap()
        };
        assert_eq!(kv_heads(None), Some(4.0), "{name}");
        assert_eq!(kv_heads(Some(Value::Null)), Some(8.0), "{name}");
    }
}

/// Recipe, key and value: what published models of these classes have and transformers' classes
/// ignore.
const IGNORED: &str = "
    bloom             offset_alibi            100
    codegen           scale_attn_weights      true
    falcon            rotary                  true
    gemma3n           rope_local_base_freq    10000.0
    gptj              rotary                  true
    hunyuan_v1_dense  attention_head_dim      8
    kimi_linear       rope_theta              10000.0
    minimax           attn_type_list          [0,1]
    minimax_m2        attn_type_list          [1,1,1]
    nemotron_h        rope_theta              10000
    stablelm          rotary_scaling_factor   1.0
    starcoder2        scale_attn_weights      true
";

#[test]
fn keys_that_published_models_have_and_their_classes_ignore_are_no_error() {
    for line in IGNORED.trim().lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let &[name, key, value] = &words[..] else {
            panic!("{line}");
        };
        let value: Value = serde_json::from_str(value).unwrap();
        let recipe =
            Recipe::named(name).with_config(|config| drop(config.insert(key.to_owned(), value)));
        let opened = recipe.translated(&registry());
        assert!(opened.is_ok(), "{line}: {:?}", opened.err());
    }
}

#[test]
fn settings_that_change_scores_and_are_not_read_are_refused() {
    let key = "attn_logit_softcapping";
    let capped = Recipe::named("seed_oss")
        .with_config(|config| drop(config.insert(key.to_owned(), 30.0.into())));
    let error = capped.translated(&registry()).map(drop).unwrap_err();
    let error = error.to_string();
    assert!(error.contains(key), "{error}");
}

/// The sum of a tensor's values, each times a number that its index alone decides, and the size of
/// the summands: another order of the values gives another sum.
fn checksum(values: &[f32]) -> (f64, f64) {
    let key = TensorKey::new("checksum", 0);
    let products = values.iter().zip(0..);
    let products = products.map(|(&v, i)| f64::from(v) * f64::from(key.unit(i)));
    products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()))
}

/// The keys of a model and the names and shapes of its tensors as llama.cpp's converter writes
/// them, and a checksum of each tensor's values: `gguf.txt` next to a recipe.
#[test]
fn keys_and_tensors_are_those_of_llama_cpps_converter() {
    let mut n_compared = 0;
    for recipe in Recipe::all_in(&fixture("recipes")) {
        let (name, path) = (recipe.name(), recipe.folder().join("gguf.txt"));
        let Ok(golden) = std::fs::read_to_string(path) else {
            continue;
        };
        n_compared += 1;
        let translated = recipe.translated(&registry()).unwrap();
        let keys: BTreeMap<_, _> = translated.metadata().iter().collect();
        let mut names = Vec::new();
        for line in golden.lines() {
            let words: Vec<&str> = line.split('\t').collect();
            match words[..] {
                ["key", key, value] => {
                    let found = keys.get(key).map(|value| format!("{value:?}"));
                    assert_eq!(found.as_deref(), Some(value), "{name}: {key}");
                }
                ["tensor", tensor, shape, format, sum] => {
                    let weight = translated.weights().require(tensor).unwrap();
                    assert_eq!(format!("{:?}", weight.shape()), shape, "{name}: {tensor}");
                    assert_eq!(weight.format().to_string(), format, "{name}: {tensor}");
                    let (found, size) = checksum(&weight.to_f32());
                    let off = (found - sum.parse::<f64>().unwrap()).abs();
                    // Functions are rounded by each program that computes them.
                    assert!(off <= 1e-6 * size, "{name}: {tensor} has other values");
                    names.push(tensor.to_owned());
                }
                _ => panic!("{name}: {line}"),
            }
        }
        let mut own_names = translated.weights().names();
        own_names.sort();
        assert_eq!(own_names, names, "{name}");
    }
    assert!(n_compared >= 30, "{n_compared} compared");
}
