//! `--expert-memory`: mixtures whose experts are read as they are needed, and what is told of it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::path::Path;

use crate::support::{directory, failure, json, output};
use serde_json::Value;

/// Mixtures of several kinds: shared experts, experts in some layers, groups, biases.
const MIXTURES: [&str; 4] = ["qwen3_moe", "qwen2_moe", "glm4_moe", "phimoe"];

/// The file of a recipe.
fn converted(recipe: &str) -> (tempfile::TempDir, String) {
    let from = directory(recipe);
    let to = from.path().join("model.gguf").display().to_string();
    let folder = from.path().display().to_string();
    output(&["convert", &folder, &to, "--type", "f32"]);
    (from, to)
}

fn logits(model: &str, more: &[&str]) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("logits").display().to_string();
    let ids = "1,5,9,200,31,77,4,18,250,99,12,3";
    let args = ["logits", "-m", model, "--tokens", ids, "--out", &out];
    output(&[&args[..], more].concat());
    std::fs::read(out).unwrap()
}

fn number(report: &Value, name: &str) -> u64 {
    report[name]
        .as_u64()
        .unwrap_or_else(|| panic!("{name}: {report}"))
}

#[test]
fn logits_and_texts_are_those_of_a_model_held_whole() {
    for recipe in MIXTURES {
        let (_folder, model) = converted(recipe);
        let whole = logits(&model, &[]);
        let run = ["run", "-m", &model, "Once upon", "--temp", "0", "-n", "12"];
        let run = [&run[..], &["--backend", "cpu", "--json"]].concat();
        let text = json(&run);
        assert_eq!(text.get("experts"), None, "{text}");
        // One matrix, some, all.
        for memory in ["16K", "100K", "64M"] {
            let limited = ["--expert-memory", memory];
            assert!(logits(&model, &limited) == whole, "{recipe}: {memory}");
            let limited = json(&[&run[..], &limited].concat());
            assert_eq!(limited["tokens"], text["tokens"], "{recipe}: {memory}");
            let experts = &limited["experts"];
            let (resident, budget) = (number(experts, "resident"), number(experts, "budget"));
            assert!(resident > 0 && resident <= budget, "{experts}");
            assert!(number(experts, "misses") > 0, "{experts}");
            let reads_all_once = memory == "64M";
            if reads_all_once {
                assert!(
                    number(experts, "read") <= number(experts, "total"),
                    "{experts}"
                );
                assert!(
                    number(experts, "hits") > number(experts, "misses"),
                    "{experts}"
                );
            }
        }
    }
}

#[test]
fn what_routers_chose_is_replayed() {
    let (folder, model) = converted("qwen3_moe");
    let trace = folder.path().join("experts.jsonl").display().to_string();
    let run = ["run", "-m", &model, "Once upon", "--temp", "0", "-n", "40"];
    let limited = [
        "--expert-memory",
        "100K",
        "--expert-trace",
        &trace,
        "--json",
    ];
    let experts = json(&[&run[..], &limited].concat())["experts"].clone();
    let replay = |more: &[&str]| json(&[&["replay", &trace, "--json"], more].concat());
    let same = replay(&[]);
    assert_eq!(number(&same, "budget"), 100 << 10);
    assert_eq!(number(&same, "total"), number(&experts, "total"));
    let rule = |report: &Value, name: &str| {
        let mut rules = report["rules"].as_array().unwrap().iter();
        rules.find(|r| r["rule"] == name).unwrap().clone()
    };
    let value = rule(&same, "value");
    // A run also reads ahead, which a replay does not.
    let uses = number(&experts, "hits") + number(&experts, "misses");
    let replayed = number(&value, "n_hits") + number(&value, "n_misses");
    assert_eq!(replayed, uses);
    assert!(number(&value, "most_bytes") <= 100 << 10);
    let future = rule(&same, "future");
    for name in ["value", "recency", "frequency"] {
        let other = rule(&same, name);
        assert!(
            number(&future, "n_hits") >= number(&other, "n_hits"),
            "{same}"
        );
    }
    let all = replay(&["--budget", "64M"]);
    let read_once = number(&rule(&all, "value"), "bytes_read");
    assert!(read_once <= number(&experts, "total"), "{all}");
    let (text, _) = output(&["replay", &trace, "--budget", "200K"]);
    assert!(
        text.contains("200.00 KiB") && text.contains("frequency"),
        "{text}"
    );
    let (code, message) = failure(&["replay", &trace, "--policy", "lru"]);
    assert_eq!(code, 2);
    assert!(
        message.contains("--policy is for a trace of requests"),
        "{message}"
    );
    let cut = std::fs::read_to_string(&trace).unwrap();
    std::fs::write(&trace, &cut[..cut.len() - 5]).unwrap();
    let (code, message) = failure(&["replay", &trace]);
    assert_eq!(code, 1);
    assert!(message.contains("line "), "{message}");
}

#[test]
fn a_plan_divides_memory_among_experts() {
    let (_folder, model) = converted("qwen3_moe");
    let plan = |more: &[&str]| json(&[&["plan", &model, "--json"], more].concat());
    let whole = plan(&["--backend", "cpu"]);
    assert_eq!(whole.get("experts"), None, "{whole}");
    let limited = plan(&["--expert-memory", "100K"]);
    let experts = &limited["experts"];
    assert_eq!(number(experts, "held"), 100 << 10);
    let total = number(experts, "total");
    // Two of six experts.
    assert_eq!(number(experts, "of_token"), total / 3);
    let read = number(experts, "of_token") as f64 * (1.0 - (100 << 10) as f64 / total as f64);
    assert!(
        (number(experts, "read_by_token") as f64 - read).abs() < 2.0,
        "{experts}"
    );
    // All of these fit, so that nothing needs to be chosen.
    let roomy = plan(&["--ram", "8G"]);
    assert_eq!(number(&roomy["experts"], "held"), total);
    assert_eq!(roomy["experts"].get("expert_memory"), None, "{roomy}");
    let (code, message) = failure(&["plan", &model, "--ram", "1M"]);
    assert_eq!(code, 2);
    assert!(message.contains("are the least"), "{message}");
    let (code, message) = failure(&["plan", "--ram", "1G"]);
    assert_eq!(code, 2);
    assert!(message.contains("there are none"), "{message}");
}

#[test]
fn what_cannot_be_read_is_refused() {
    let (folder, model) = converted("qwen3_moe");
    let run = |model: &str, more: &[&str]| {
        failure(&[&["run", "-m", model, "Hi", "-n", "1"], more].concat())
    };
    let (code, message) = run(&model, &["--expert-memory", "4K"]);
    assert_eq!(code, 1);
    assert!(
        message.contains("which takes 8192: give at least"),
        "{message}"
    );
    let directory = folder.path().display().to_string();
    std::fs::remove_file(Path::new(&model)).unwrap();
    let (code, message) = run(&directory, &["--expert-memory", "1M"]);
    assert_eq!(code, 1);
    assert!(message.contains("convert the model to GGUF"), "{message}");
    let (code, message) = run(
        &directory,
        &["--expert-memory", "1M", "--backend", "candle"],
    );
    assert_ne!(code, 0);
    assert!(
        message.contains("only the cpu backend reads experts"),
        "{message}"
    );
    let (code, message) = run(&directory, &["--expert-trace", "t"]);
    assert_eq!(code, 2);
    assert!(message.contains("--expert-memory"), "{message}");
    for flag in ["--cpu-moe", "-ncmoe", "-ot"] {
        let (code, message) = run(&directory, &[flag, "8"]);
        assert_eq!(code, 2);
        assert!(
            message.contains("there is no") && message.contains("--expert-memory"),
            "{message}"
        );
    }
}
