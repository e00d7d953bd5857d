//! Models straight from safetensors directories against an independent implementation
//! (transformers, f32): logits and greedy tokens on both backends, whichever way the tokens come
//! in; where the directory has a GGUF file too, its keys and tensors.
//!
//! Without `CELLAR_FIXTURES` the directories of this repository are tested, most of which are put
//! together from other files first (see [`recipes`]); with it, every directory below that folder
//! that holds a `config.json` and a `reference.safetensors`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod recipes;

use std::collections::BTreeMap;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use engine::{Engine, EngineConfig};
use kv_candle::CandleBackend;
use kv_core::backend::Backend;
use kv_core::batch::Batch;
use kv_core::weights::WeightSource;
use kv_core::{KvType, SeqId, TokenId};
use kv_cpu::{CpuBackend, CpuConfig};
use model_core::architecture::Registry;
use model_core::directory::HfDirectory;
use model_core::gguf::GgufFile;
use model_core::hf::{HfTranslation, ModelFileError};
use safetensors::tensor::TensorView;
use serde_json::{Map, Value};

/// Largest difference from the reference that f32 arithmetic in another order may make.
const TOLERANCE: f32 = 2e-4;

fn registry() -> Registry {
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    model_mamba::register(&mut registry);
    registry
}

/// The directories below a folder that hold a file of this name.
fn below(folder: &Path, file: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("config.json").exists() && path.join(file).exists())
        .collect();
    paths.sort();
    paths
}

/// The models to test, and what they were put together in.
struct Fixtures {
    paths: Vec<PathBuf>,
    _made: Option<tempfile::TempDir>,
}

/// Every directory with a model and its reference.
fn fixtures() -> Fixtures {
    if let Some(folder) = std::env::var_os("CELLAR_FIXTURES") {
        let paths = below(Path::new(&folder), "reference.safetensors");
        assert!(!paths.is_empty(), "no model in {}", folder.display());
        return Fixtures { paths, _made: None };
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let folder = root.join("cli/tests/data/directories");
    let made = tempfile::tempdir().unwrap();
    let mut paths = below(&folder, "reference.safetensors");
    for from in below(&folder, "recipe.json") {
        let to = made.path().join(from.file_name().unwrap());
        recipes::prepare(&root, &from, &to);
        paths.push(to);
    }
    Fixtures {
        paths,
        _made: Some(made),
    }
}

/// Every directory whose model can be computed.
fn directories(fixtures: &Fixtures) -> Vec<(String, HfDirectory)> {
    let mut found = Vec::new();
    for path in &fixtures.paths {
        match HfDirectory::open(path, &registry()) {
            Ok(directory) => found.push((path.display().to_string(), directory)),
            Err(declined @ ModelFileError::Declined { .. }) => println!("{declined}"),
            Err(error) => panic!("{}: {error}", path.display()),
        }
    }
    found
}

struct Reference {
    prompts: Vec<Vec<u32>>,
    logits: Vec<Vec<f32>>,
    greedy: Vec<Vec<u32>>,
}

fn reference(directory: &str) -> Reference {
    let bytes = std::fs::read(Path::new(directory).join("reference.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: String| -> Vec<[u8; 4]> {
        let tensor = file.tensor(&name).unwrap();
        tensor.data().as_chunks::<4>().0.to_vec()
    };
    let ids = |name: String| words(name).into_iter().map(u32::from_le_bytes).collect();
    let numbers = |name: String| words(name).into_iter().map(f32::from_le_bytes).collect();
    Reference {
        prompts: (0..3).map(|i| ids(format!("ids_{i}"))).collect(),
        logits: (0..3).map(|i| numbers(format!("logits_{i}"))).collect(),
        greedy: (0..3).map(|i| ids(format!("greedy_{i}"))).collect(),
    }
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

fn assert_close(name: &str, how: &str, ours: &[Vec<f32>], theirs: &[Vec<f32>]) {
    for (i, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        // Some references hold the last rows only.
        let ours = &ours[ours.len() - theirs.len()..];
        let distance = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs());
        let distance = distance.fold(0.0, f32::max);
        assert!(
            distance < TOLERANCE,
            "{name}, prompt {i}, {how}: off by {distance}"
        );
    }
}

fn agrees<B: Backend>(backend: impl Fn() -> B) {
    let fixtures = fixtures();
    for (name, directory) in directories(&fixtures) {
        let reference = reference(&name);
        let alone: Vec<Vec<f32>> = reference
            .prompts
            .iter()
            .flat_map(|prompt| {
                logits(
                    engine(backend(), &directory, 512),
                    std::slice::from_ref(prompt),
                    512,
                )
            })
            .collect();
        assert_close(&name, "alone", &alone, &reference.logits);
        for (n_ubatch, piece) in [(512, 512), (7, 512), (512, 20), (512, 1)] {
            let how = format!("three sequences, ubatch {n_ubatch}, pieces of {piece}");
            let together = logits(
                engine(backend(), &directory, n_ubatch),
                &reference.prompts,
                piece,
            );
            assert_close(&name, &how, &together, &reference.logits);
        }
        for (prompt, wanted) in reference.prompts.iter().zip(&reference.greedy) {
            let found = greedy(engine(backend(), &directory, 512), prompt, wanted.len());
            assert_eq!(found, *wanted, "{name}: greedy");
        }
    }
}

#[test]
fn cpu_agrees_with_the_reference() {
    agrees(cpu);
}

#[test]
fn candle_agrees_with_the_reference() {
    agrees(CandleBackend::cpu);
}

#[test]
fn the_length_of_the_context_chooses_the_factors_of_long_rope() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let made = tempfile::tempdir().unwrap();
    let from = root.join("cli/tests/data/directories/phi3_longrope");
    recipes::prepare(&root, &from, made.path());
    let directory = HfDirectory::open(made.path(), &registry()).unwrap();
    // What was computed with the factors for short contexts.
    let short = root.join("model-llama/tests/data/phi3_longrope_short.reference.safetensors");
    std::fs::copy(short, made.path().join("reference.safetensors")).unwrap();
    let reference = reference(&made.path().display().to_string());
    let prompt = &reference.prompts[2..];
    for n_ctx in [17, 32] {
        let engine = engine_within(n_ctx, cpu(), &directory, 512);
        let found = logits(engine, prompt, 512);
        assert_close("short", &format!("{n_ctx}"), &found, &reference.logits[2..]);
    }
    let [within, beyond] = [32, 33].map(|n_ctx| engine_within(n_ctx, cpu(), &directory, 512));
    let error = within.fingerprint().check(beyond.fingerprint());
    let error = error.unwrap_err().to_string();
    assert!(error.contains("rope_factors_long.weight"), "{error}");
}

/// What a directory says of a key (`{architecture}.{key}`), whose config is that of a fixture,
/// changed.
fn translated(name: &str, change: impl FnOnce(&mut Map<String, Value>), key: &str) -> Option<f32> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/directories");
    let text = std::fs::read(folder.join(name).join("config.json")).unwrap();
    let mut config: Map<String, Value> = serde_json::from_slice(&text).unwrap();
    change(&mut config);
    // Keys do not depend on tensors: there are none, and none is missed.
    config.insert("tie_word_embeddings".to_owned(), true.into());
    let none = safetensors::serialize(Vec::<(&str, TensorView<'_>)>::new(), None).unwrap();
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("model.safetensors"), none).unwrap();
    let config = Value::Object(config).to_string();
    std::fs::write(directory.path().join("config.json"), config).unwrap();
    let translated = HfTranslation::open(directory.path(), registry().hf_classes()).unwrap();
    let metadata = translated.metadata();
    let architecture: &str = metadata.get("general.architecture").unwrap();
    let key = format!("{architecture}.{key}");
    let count = metadata.get::<u32>(&key).map(|n| n as f32);
    count.or_else(|_| metadata.get(&key)).ok()
}

/// Fixture, key, the key of metadata that it becomes; what that is where the key is left out, as
/// transformers has it, and where it is `null`.
const LEFT_OUT: &str = "
    gemma2_swa8     query_pre_attn_scalar    attention.scale           0.0625   none
    gemma2_swa8     attn_logit_softcapping   attn_logit_softcapping    50       none
    gemma2_swa8     final_logit_softcapping  final_logit_softcapping   30       none
    gemma3_iswa8    query_pre_attn_scalar    attention.scale           0.0625   none
    gemma3_iswa8    attn_logit_softcapping   attn_logit_softcapping    none     none
    gemma3_iswa8    rope_parameters          rope.freq_base            1000000  1000000
    gemma3_iswa8    rope_parameters          rope.freq_base_swa        10000    10000
    mistral_swa8    sliding_window           attention.sliding_window  4096     none
    mixtral         sliding_window           attention.sliding_window  none     none
    mixtral         rope_parameters          rope.freq_base            1000000  1000000
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
        let found = translated(name, |config| drop(config.remove(key)), to);
        assert_eq!(found, left_out.parse().ok(), "{line}");
        let is_null = |config: &mut Map<String, Value>| config[key] = Value::Null;
        assert_eq!(translated(name, is_null, to), null.parse().ok(), "{line}");
    }
}

/// Keys that a directory need not have as the GGUF file has them.
fn is_own(key: &str) -> bool {
    !key.starts_with("general.") && !key.starts_with("tokenizer.")
}

#[test]
fn keys_and_tensors_are_those_of_the_gguf_file() {
    let mut n_compared = 0;
    let fixtures = fixtures();
    let paths = fixtures.paths.iter();
    for path in paths.filter(|path| path.join("model-f32.gguf").exists()) {
        let name = path.display();
        let translated = HfTranslation::open(path, registry().hf_classes()).unwrap();
        n_compared += 1;
        let file = GgufFile::open(path.join("model-f32.gguf")).unwrap();
        let ours: BTreeMap<_, _> = translated.metadata().iter().collect();
        for (key, value) in file.metadata().iter().filter(|(key, _)| is_own(key)) {
            match ours.get(key) {
                Some(own) => assert_eq!(*own, value, "{name}: {key}"),
                None => println!("{name}: no key {key}, which is {value:?}"),
            }
        }
        let (mut own_names, mut names) = (translated.weights().names(), file.names());
        own_names.sort();
        names.sort();
        assert_eq!(own_names, names, "{name}");
        for tensor in names {
            let own = translated.weights().require(&tensor).unwrap();
            let theirs = file.weight(&tensor).unwrap();
            assert_eq!(own.info(), theirs.info(), "{name}: {tensor}");
            let differ = own.to_f32().iter().zip(theirs.to_f32()).any(|(a, b)| {
                // Functions are rounded by whoever computes them.
                (a - b).abs() > 4e-7 * b.abs()
            });
            assert!(!differ, "{name}: {tensor} has other values");
        }
    }
    assert!(n_compared > 0, "no GGUF file to compare with");
}
