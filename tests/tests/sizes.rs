//! Sizes that no model has, in `config.json` and in GGUF metadata: always an error or a model,
//! soon, in memory that the files justify, and never a panic.
//!
//! `CELLAR_FUZZ_SECONDS=600` draws sizes at random for as long, and `CELLAR_FUZZ_SEED` chooses
//! which.
#![allow(clippy::unwrap_used, clippy::panic)] // a test

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use model_core::architecture::{Model, Registry};
use model_core::gguf::{Array, GgufFile, Metadata, Value as GgufValue};
use model_core::hf::HfTranslation;
use model_core::model_file::{ModelFile, OpenModel};
use model_tests::{Recipe, fixture};
use serde_json::Value;

/// The system's allocator, which counts the bytes that each thread holds, and the most that it
/// held.
struct CountingAllocator;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(n_bytes: isize) {
    // A thread that is ending has no such variables any more; nothing is measured then.
    let _ = HELD.try_with(|held| {
        held.set(held.get() + n_bytes);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(held.get())));
    });
}

// SAFETY: every call is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are those that `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are those that `System` asks for.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the memory came from `System`, with this layout.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as isize - layout.size() as isize);
        // SAFETY: the memory came from `System`, with this layout.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static COUNTING: CountingAllocator = CountingAllocator;

/// Bytes that opening a small model may take more than before, whatever its numbers are.
const MEMORY: isize = 50 << 20;

/// The time that one case may take. The program is not optimized here, and other tests run next to
/// it.
const TIME: Duration = Duration::from_secs(3);

/// Numbers that no small model has: the largest that is read as it is, and the largest of each
/// width.
const ABSURD: [u64; 3] = [1 << 16, (1 << 32) - 1, u64::MAX];

/// Models of all kinds of layers, by folder and name.
const RECIPES: [(&str, &str); 26] = [
    ("recipes", "qwen3_next"),
    ("recipes", "recurrent_gemma"),
    ("recipes", "llama_gqa_tied"),
    ("recipes", "llama4_chunk16"),
    ("recipes", "deepseek_v2"),
    ("recipes", "deepseek_v32"),
    ("recipes", "gemma3n"),
    ("recipes", "gemma4_e"),
    ("recipes", "granitemoehybrid"),
    ("recipes", "phi3_longrope_long"),
    ("recipes", "glm4_moe"),
    ("recipes", "minimax"),
    ("recipes", "jamba"),
    ("recipes", "kimi_linear"),
    ("recipes", "lfm2_moe"),
    ("recipes", "mamba2"),
    ("recipes", "nemotron_h_moe"),
    ("recipes", "rwkv6"),
    ("recipes", "rwkv7"),
    ("recipes", "xlstm"),
    ("recipes", "zamba2"),
    ("encoders", "bert_cased"),
    ("encoders", "deberta_v2_reranker"),
    ("encoders", "modernbert_classifier"),
    ("seq2seq", "t5_v1_1"),
    ("seq2seq", "m2m_100"),
];

fn registry() -> Registry {
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    model_mamba::register(&mut registry);
    model_bert::register(&mut registry);
    registry
}

/// Does it, and returns what went over the limits.
fn measured<T>(what: &str, run: impl FnOnce() -> T) -> Option<String> {
    let (before, started) = (HELD.get(), Instant::now());
    PEAK.set(before);
    let outcome = catch_unwind(AssertUnwindSafe(|| drop(run())));
    let (grown, seconds) = (PEAK.get() - before, started.elapsed());
    let is_good = outcome.is_ok() && grown <= MEMORY && seconds <= TIME;
    let ended = if outcome.is_ok() { "" } else { ", a panic" };
    let report = || format!("{what}: {} MiB, {seconds:?}{ended}", grown >> 20);
    (!is_good).then(report)
}

fn is_clean(found: &[String]) {
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// JSON pointers to the whole numbers of a value.
fn numbers(value: &Value, at: &str, found: &mut Vec<String>) {
    match value {
        Value::Number(number) if number.is_u64() => found.push(at.to_owned()),
        Value::Object(object) => {
            for (key, value) in object {
                numbers(value, &format!("{at}/{key}"), found);
            }
        }
        Value::Array(list) => {
            for (i, value) in list.iter().enumerate() {
                numbers(value, &format!("{at}/{i}"), found);
            }
        }
        _ => {}
    }
}

/// A directory of a recipe, with a tokenizer.
struct Directory {
    folder: tempfile::TempDir,
    config: Value,
    places: Vec<String>,
    name: &'static str,
}

impl Directory {
    fn new((folder, name): (&str, &'static str)) -> Self {
        let recipe = Recipe::open(&fixture(folder).join(name));
        let folder = tempfile::tempdir().unwrap();
        recipe.expand(folder.path());
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            let tokenizer = fixture("tokenizers/spm512").join(file);
            fs::copy(tokenizer, folder.path().join(file)).unwrap();
        }
        let config = Value::Object(recipe.config().clone());
        let mut places = Vec::new();
        numbers(&config, "", &mut places);
        Self {
            folder,
            config,
            places,
            name,
        }
    }

    /// Opens the directory with these numbers in its config.
    fn open(&self, changes: &[(&str, u64)], registry: &Registry) -> Option<String> {
        let mut config = self.config.clone();
        for (place, number) in changes {
            *config.pointer_mut(place).unwrap() = (*number).into();
        }
        let path = self.folder.path().join("config.json");
        fs::write(path, config.to_string()).unwrap();
        measured(&format!("{}, {changes:?}", self.name), || {
            let file = ModelFile::open(self.folder.path(), registry);
            // The tokenizer is none of an encoder: without it, at least the model.
            file.map(drop)
                .or_else(|_| OpenModel::open(self.folder.path(), registry).map(drop))
        })
    }
}

#[test]
fn absurd_numbers_in_a_config_are_refused_soon_and_in_little_memory() {
    let registry = registry();
    let mut found = Vec::new();
    for recipe in RECIPES {
        let directory = Directory::new(recipe);
        assert!(!directory.places.is_empty());
        let usual = OpenModel::open(directory.folder.path(), &registry);
        usual.unwrap_or_else(|error| panic!("{}: {error}", directory.name));
        for place in &directory.places {
            for number in ABSURD {
                found.extend(directory.open(&[(place, number)], &registry));
            }
        }
    }
    is_clean(&found);
}

#[test]
fn a_size_that_no_tensor_has_is_named_with_what_it_can_be() {
    let registry = registry();
    let error = |key: &str| {
        let recipe = Recipe::named("qwen3_next");
        let recipe = recipe.with_config(|config| {
            config.insert(key.to_owned(), u32::MAX.into());
        });
        recipe.directory(&registry).unwrap_err().to_string()
    };
    let vocab = error("vocab_size");
    assert!(
        vocab.contains("'vocab_size' is 4294967295, not at most 65536"),
        "{vocab}"
    );
    let layers = error("num_hidden_layers");
    let n_tensors = Recipe::named("qwen3_next").weights().names().len();
    let wanted = format!("is 4294967295, not at most {n_tensors}, the number of tensors");
    assert!(layers.contains(&wanted), "{layers}");
}

#[test]
fn an_absurd_id_of_a_token_is_refused_in_little_memory() {
    let directory = Directory::new(("recipes", "qwen3_next"));
    let path = directory.folder.path().join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let added = tokenizer
        .pointer_mut("/added_tokens")
        .unwrap()
        .as_array_mut();
    let token = serde_json::json!({"id": (1 << 24) - 1, "content": "<far>", "special": true});
    added.unwrap().push(token);
    fs::write(path, tokenizer.to_string()).unwrap();
    let registry = registry();
    let mut error = String::new();
    let over = measured("a token", || {
        error = ModelFile::open(directory.folder.path(), &registry)
            .unwrap_err()
            .to_string();
    });
    assert_eq!(over, None);
    assert!(
        error.contains("\"<far>\"' is no id, not a number below 65536"),
        "{error}"
    );
}

/// The values of a key with its first number replaced.
fn replaced(value: &GgufValue, number: u64) -> Vec<GgufValue> {
    fn each<T: Clone>(list: &[T], number: T, made: fn(Vec<T>) -> Array) -> Vec<GgufValue> {
        // One layer stands for all.
        let places = 0..list.len().min(1);
        let changed = places.map(|at| {
            let mut list = list.to_vec();
            list.splice(at..=at, [number.clone()]);
            GgufValue::Array(made(list))
        });
        changed.collect()
    }
    let (half, signed) = (number as u32, number as i32);
    match value {
        GgufValue::U32(_) => vec![GgufValue::U32(half)],
        GgufValue::I32(_) | GgufValue::U8(_) | GgufValue::I8(_) => vec![GgufValue::I32(signed)],
        GgufValue::U16(_) | GgufValue::I16(_) => vec![GgufValue::U16(number as u16)],
        GgufValue::U64(_) | GgufValue::I64(_) => vec![GgufValue::U64(number)],
        GgufValue::F32(_) => vec![GgufValue::F32(number as f32), GgufValue::F32(f32::NAN)],
        GgufValue::Array(Array::U32(list)) => each(list, half, Array::U32),
        GgufValue::Array(Array::I32(list)) => each(list, signed, Array::I32),
        GgufValue::Array(Array::F32(list)) => each(list, number as f32, Array::F32),
        _ => Vec::new(),
    }
}

/// The model of these metadata for a small context.
fn model(
    metadata: &Metadata,
    weights: &dyn kv_graph::weights::WeightSource,
    registry: &Registry,
) -> bool {
    let model = registry.model(metadata, weights);
    model.is_ok_and(|model| Model::for_context(&*model, 16).is_some())
}

/// Tries all numbers of the metadata, and returns what went over the limits.
fn all_replaced(
    name: &str,
    metadata: &Metadata,
    weights: &dyn kv_graph::weights::WeightSource,
    registry: &Registry,
) -> Vec<String> {
    let mut found = Vec::new();
    for (key, value) in metadata.iter() {
        for number in ABSURD {
            for value in replaced(value, number) {
                let mut changed = metadata.clone();
                let what = format!("{name}, {key} {number}");
                changed.insert(key, value);
                found.extend(measured(&what, || model(&changed, weights, registry)));
            }
        }
    }
    found
}

#[test]
fn absurd_numbers_in_metadata_are_refused_soon_and_in_little_memory() {
    let registry = registry();
    let mut found = Vec::new();
    let file = GgufFile::open(fixture("gguf/granite_llama_cpp.gguf")).unwrap();
    found.extend(all_replaced("granite", file.metadata(), &file, &registry));
    for (folder, name) in RECIPES {
        let recipe = Recipe::open(&fixture(folder).join(name));
        let translation: HfTranslation = recipe.translated(&registry).unwrap();
        let (metadata, weights) = translation.into_parts();
        registry.model(&metadata, &weights).unwrap();
        found.extend(all_replaced(name, &metadata, &weights, &registry));
    }
    is_clean(&found);
}

/// Numbers of a generator of xorshift.
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Small, large, absurd, or next to a power of two.
    fn size(&mut self) -> u64 {
        let bits = self.next() % 64;
        match self.next() % 4 {
            0 => self.next() % 64,
            1 => (1 << bits) - 1,
            2 => 1 << bits,
            _ => self.next() >> bits,
        }
    }
}

#[test]
fn sizes_at_random() {
    let number = |name: &str, usual: u64| {
        let text = std::env::var(name);
        text.map_or(usual, |text| text.parse().unwrap())
    };
    let (seconds, seed) = (
        number("CELLAR_FUZZ_SECONDS", 3),
        number("CELLAR_FUZZ_SEED", 1),
    );
    let registry = registry();
    let directories: Vec<Directory> = RECIPES.into_iter().map(Directory::new).collect();
    let mut draws = Draws(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let until = Instant::now() + Duration::from_secs(seconds);
    let (mut found, mut n) = (Vec::new(), 0);
    while Instant::now() < until && found.len() < 20 {
        let directory = &directories[draws.next() as usize % directories.len()];
        let places = &directory.places;
        let n_changes = 1 + draws.next() % 3;
        let changes = (0..n_changes).map(|_| {
            let place = &places[draws.next() as usize % places.len()];
            (place.as_str(), draws.size())
        });
        let changes: Vec<_> = changes.collect();
        found.extend(directory.open(&changes, &registry));
        n += 1;
    }
    println!("{n} configs, seed {seed}");
    assert!(n > 0);
    is_clean(&found);
}
