//! `--speculate`: the same texts with fewer steps, and a reason where nothing can be drafted.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

mod support;

use serde_json::{Value, json};
use support::{cellar, failure, json as report, json_lines, output};

/// A prompt that repeats itself, and so does its continuation.
const PROMPT: &str = "The cat sat. The dog sat. The cat sat. The dog sat. The cat sat. The dog";

fn run(args: &[&str]) -> Value {
    report(&[&["run", PROMPT, "--json", "-c", "300", "-n", "80"], args].concat())
}

#[test]
fn a_run_gives_the_same_text_and_counts_drafts() {
    for sampling in [&["--temp", "0"][..], &["--temp", "0.8", "--seed", "5"]] {
        let plain = run(&[sampling, &["--backend", "cpu"]].concat());
        assert!(plain["timings"].get("drafted").is_none(), "{plain}");
        let extra = ["--backend", "cpu", "--speculate", "lookup"];
        let drafted = run(&[sampling, &extra].concat());
        for key in ["text", "tokens", "finish"] {
            assert_eq!(drafted[key], plain[key], "{key}");
        }
        let count = |key: &str| drafted["timings"][key].as_u64().unwrap();
        assert!(count("drafted") > 0 && count("accepted") <= count("drafted"));
    }
}

/// Each line of `--jsonl` is of one token, also where several were verified together.
#[test]
fn lines_of_tokens_stay_lines_of_tokens() {
    let lines = |extra: &[&str]| {
        let args = [
            "run", PROMPT, "--jsonl", "-c", "300", "-n", "60", "--temp", "0",
        ];
        let more = ["--logprobs", "1", "--backend", "cpu"];
        let mut lines = json_lines(&[&args[..], &more, extra].concat(), "");
        lines.pop();
        lines
    };
    assert_eq!(lines(&["--speculate", "lookup"]), lines(&[]));
}

#[test]
fn a_chat_gives_the_same_answers() {
    let talk = |extra: &[&str]| {
        let template = "{% for m in messages %}{{ m.content }}\n{% endfor %}";
        let folder = tempfile::tempdir().unwrap();
        let model = support::with_template(&folder, template);
        let args = ["chat", "-m", &model, "-c", "300", "-n", "40", "--temp", "0"];
        let input = format!("{PROMPT}\n{PROMPT}\n/stats\n");
        let done = cellar()
            .args([&args[..], &["--backend", "cpu"], extra].concat())
            .write_stdin(input)
            .assert()
            .success();
        String::from_utf8(done.get_output().stdout.clone()).unwrap()
    };
    assert_eq!(talk(&["--speculate", "lookup"]), talk(&[]));
}

#[test]
fn a_batch_gives_the_same_texts_and_counts_drafts() {
    let request = |seed: u64| json!({"prompt": PROMPT, "seed": seed, "max_tokens": 50});
    let input: Vec<String> = (0..5).map(|seed| request(seed).to_string()).collect();
    let batch = |extra: &[&str]| {
        let args = [
            "batch",
            "-f",
            "-",
            "-c",
            "800",
            "--temp",
            "0.4",
            "--backend",
            "cpu",
        ];
        json_lines(&[&args[..], extra].concat(), &input.join("\n"))
    };
    let (plain, drafted) = (
        batch(&[]),
        batch(&["--speculate", "lookup", "--draft-max", "5"]),
    );
    for (plain, drafted) in plain.iter().zip(&drafted) {
        assert_eq!(drafted["text"], plain["text"]);
        assert!(plain.get("speculation").is_none());
        assert!(drafted["speculation"]["drafted"].as_u64().unwrap() > 0);
    }
}

#[test]
fn wrong_numbers_and_memories_without_a_way_back_are_named() {
    for n in ["0", "33", "-1", "x"] {
        let (code, line) = failure(&["run", "a", "--speculate", "lookup", "--draft-max", n]);
        assert_eq!(code, 2, "{line}");
        assert!(line.contains("--draft-max"), "{line}");
    }
    let (code, line) = failure(&["run", "a", "--speculate", "model"]);
    assert!(code == 2 && line.contains("lookup"), "{line}");
    let mamba = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/fixtures/stories/stories-mamba-f16.gguf"
    );
    let args = [
        "run",
        "-m",
        mamba,
        PROMPT,
        "-n",
        "30",
        "--speculate",
        "lookup",
    ];
    let (plain, line) = output(&args);
    assert!(line.contains("--speculate has no effect"), "{line}");
    assert!(line.contains("--snapshots"), "{line}");
    let (text, line) = output(&[&args[..], &["--snapshots", "8"]].concat());
    assert!(!line.contains("no effect"), "{line}");
    assert!(!plain.is_empty() && !text.is_empty());
}

#[test]
fn a_draft_model_leaves_texts_as_they_are() {
    let model = support::model().display().to_string();
    let draft = [
        "--backend",
        "cpu",
        "--speculate",
        "draft",
        "--draft-model",
        &model,
    ];
    for sampling in [
        &["--temp", "0"][..],
        &["--temp", "0.3", "--seed", "5"],
        &["--temp", "0.8", "--seed", "6"],
    ] {
        let plain = run(&[sampling, &["--backend", "cpu"]].concat());
        let drafted = run(&[sampling, &draft].concat());
        for key in ["text", "tokens", "finish"] {
            assert_eq!(drafted[key], plain[key], "{key}");
        }
        let count = |key: &str| drafted["timings"][key].as_u64().unwrap();
        assert!(count("accepted") > 0 && count("accepted") <= count("drafted"));
    }
}

#[test]
fn a_chat_with_a_draft_model_gives_the_same_answers() {
    let folder = tempfile::tempdir().unwrap();
    let template = "{% for m in messages %}{{ m.content }}\n{% endfor %}";
    let model = support::with_template(&folder, template);
    let talk = |extra: &[&str]| {
        let args = [
            "chat", "-m", &model, "-c", "300", "-n", "30", "--temp", "0.8", "--seed", "3",
        ];
        let done = cellar()
            .args([&args[..], &["--backend", "cpu"], extra].concat())
            .write_stdin(format!("{PROMPT}\nOne day\n"))
            .assert()
            .success();
        String::from_utf8(done.get_output().stdout.clone()).unwrap()
    };
    let draft = support::model().display().to_string();
    let with_draft = talk(&["--speculate", "draft", "--draft-model", &draft]);
    assert_eq!(with_draft, talk(&[]));
}

#[test]
fn draft_models_that_cannot_draft_are_refused() {
    let model = support::model().display().to_string();
    let draft = ["--speculate", "draft", "--draft-model", &model];
    let (code, message) = failure(&["run", "x", "--speculate", "draft"]);
    assert!(code == 2 && message.contains("--draft-model"), "{message}");
    let (code, message) = failure(&["run", "x", "--draft-model", &model]);
    assert!(
        code == 2 && message.contains("--speculate draft"),
        "{message}"
    );
    let (code, message) = failure(&[&["batch", "-f", "x"], &draft[..]].concat());
    assert!(
        code == 2 && message.contains("--speculate lookup"),
        "{message}"
    );
    let other = support::directory("gpt2");
    let other = other.path().display().to_string();
    let draft = ["--speculate", "draft", "--draft-model", &other];
    let (code, message) = failure(&[&["run", "x", "--backend", "cpu"], &draft[..]].concat());
    assert!(
        code == 1 && message.contains("vocabularies must be equal"),
        "{message}"
    );
}
