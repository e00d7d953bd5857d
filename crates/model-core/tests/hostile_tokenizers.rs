//! `tokenizer.json` files that are nearly right: each is an error or cuts any text, soon and in
//! little memory. `CELLAR_FUZZ_SECONDS=600` tries more, and `CELLAR_FUZZ_SEED` chooses which.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use kv_contract::Random;
use model_core::model_file::open_tokenizer;
use model_core::tokenizer::EncodeOptions;
use serde_json::{Value, json};

use crate::{LARGEST, data};

const FILES: [&str; 5] = [
    "encoders/qwen3_embed_tiny",
    "encoders/bert_tiny",
    "encoders/xlm_roberta_rerank_tiny",
    "seq2seq",
    "tokenizers/spm512",
];

const TEXTS: [&str; 6] = [
    "",
    " the cat  sat\n\non 1234 mats, didn't it? ",
    "caf\u{e9} cafe\u{301} 漢字かな 한국어 \u{1F600}\u{200d}",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!",
    "                                                                            x",
    "<s></s>[CLS]<|im_end|><unk>\0",
];

/// Expressions that take long or much memory where nothing bounds them.
const EXPRESSIONS: [&str; 12] = [
    "(a*)*b",
    "(a+)+$",
    "(?=(a+)+b)",
    r"(\w+\s?)*\1!",
    r"\p{L}{1000}{1000}",
    "(((a{100}){100}){100}){100}",
    "",
    "a|",
    "(?!)",
    "(?<=a+)b",
    "(((((((",
    r"\p{Nothing}",
];

/// Types of other steps and models.
const NAMES: [&str; 5] = ["NFC", "Lowercase", "Metaspace", "Unigram", "BPE"];

/// Any place of a value.
fn places(value: &Value, at: &str, found: &mut Vec<String>) {
    found.push(at.to_owned());
    match value {
        Value::Object(members) => {
            for (key, value) in members.iter().take(40) {
                let key = key.replace('~', "~0").replace('/', "~1");
                places(value, &format!("{at}/{key}"), found);
            }
        }
        Value::Array(items) => {
            for (index, value) in items.iter().take(8).enumerate() {
                places(value, &format!("{at}/{index}"), found);
            }
        }
        _ => {}
    }
}

fn replacement(random: &mut Random, old: &Value) -> Value {
    match random.below(14) {
        0 => Value::Null,
        1 => json!(random.below(2) == 1),
        2 => json!(-1),
        3 => json!(4_294_967_296_u64),
        4 => json!(1e300),
        5 => json!(""),
        6 => json!("x".repeat(100_000)),
        7 => json!([]),
        8 => json!({}),
        9 => json!([old.clone(), old.clone()]),
        10 => {
            json!({"type": "Sequence", "pretokenizers": [old.clone()], "normalizers": [old.clone()]})
        }
        11 => {
            json!({"type": "Split", "pattern": {"Regex": EXPRESSIONS[random.below(EXPRESSIONS.len())]},
            "behavior": "Isolated", "invert": false})
        }
        12 => json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaa"}),
        _ => json!(NAMES[random.below(NAMES.len())]),
    }
}

fn mutated(random: &mut Random, json: &Value) -> Value {
    let mut json = json.clone();
    for _ in 0..1 + random.below(3) {
        let mut all = Vec::new();
        // What is not a token, mostly: there is the structure.
        for part in [
            "normalizer",
            "pre_tokenizer",
            "post_processor",
            "added_tokens",
            "model",
        ] {
            let start = all.len();
            places(&json[part], &format!("/{part}"), &mut all);
            all.truncate(start + 60);
        }
        let place = all.swap_remove(random.below(all.len()));
        if let Some(value) = json.pointer_mut(&place) {
            *value = replacement(random, value);
        }
    }
    json
}

/// Reads the file and cuts the texts; false where it was refused.
fn tries(folder: &Path, json: &Value) -> bool {
    fs::write(folder.join("tokenizer.json"), json.to_string()).unwrap();
    let started = Instant::now();
    LARGEST.set(0);
    let tokenizer = open_tokenizer(folder);
    if let Ok(tokenizer) = &tokenizer {
        for text in TEXTS {
            tokenizer.encode(text, EncodeOptions::PROMPT);
            tokenizer.encode(text, EncodeOptions::TEXT);
        }
    }
    let (took, largest) = (started.elapsed(), LARGEST.get());
    let parts = ["normalizer", "pre_tokenizer", "post_processor"].map(|part| &json[part]);
    assert!(took < Duration::from_secs(5), "{took:?} for {parts:?}");
    assert!(largest < 64 << 20, "{largest} bytes for {parts:?}");
    tokenizer.is_ok()
}

fn number(name: &str, default: u64) -> u64 {
    let given = std::env::var(name).ok();
    given.map_or(default, |text| text.parse().unwrap())
}

#[test]
fn files_that_are_nearly_right_are_refused_or_work() {
    let seed = number("CELLAR_FUZZ_SEED", 1);
    let until = Instant::now() + Duration::from_secs(number("CELLAR_FUZZ_SECONDS", 0));
    let mut random = Random::new(seed);
    let folder = tempfile::tempdir().unwrap();
    let files = FILES.map(|name| -> Value {
        let path = data(name).join("tokenizer.json");
        serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
    });
    for (name, json) in FILES.iter().zip(&files) {
        fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
        let opened = open_tokenizer(folder.path());
        assert!(opened.is_ok(), "{name}: {opened:?}");
    }
    let (mut n_good, mut n_bad) = (0, 0);
    while n_good + n_bad < 500 || Instant::now() < until {
        let json = &files[random.below(files.len())];
        if tries(folder.path(), &mutated(&mut random, json)) {
            n_good += 1;
        } else {
            n_bad += 1;
        }
    }
    assert!(n_good > 50 && n_bad > 50, "{n_good} good, {n_bad} bad");
}

#[test]
fn expressions_that_explode_are_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let path = data(FILES[0]).join("tokenizer.json");
    let json: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    for expression in EXPRESSIONS {
        let mut json = json.clone();
        json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        ]});
        tries(folder.path(), &json);
    }
}
