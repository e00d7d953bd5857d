//! `--speculate`: the same texts with fewer steps, and a reason where nothing can be drafted.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::support;

use crate::support::{cellar, failure, json as report, json_lines, output};
use model_tests::Recipe;
use serde_json::{Value, json};

/// A prompt that repeats itself, and so does its continuation.
const PROMPT: &str = "The cat sat. The dog sat. The cat sat. The dog sat. The cat sat. The dog";

fn run(args: &[&str]) -> Value {
    report(&[&["run", PROMPT, "--json", "-c", "300", "-n", "80"], args].concat())
}

/// Flags with which a model drafts on the CPU.
fn draft_flags(model: &str) -> [&str; 6] {
    [
        "--backend",
        "cpu",
        "--speculate",
        "draft",
        "--draft-model",
        model,
    ]
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
        let (code, line) = failure(&["run", "-p", "a", "--speculate", "lookup", "--draft-max", n]);
        assert_eq!(code, 2, "{line}");
        assert!(line.contains("--draft-max"), "{line}");
    }
    let (code, line) = failure(&["run", "-p", "a", "--speculate", "model"]);
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
    let draft = draft_flags(&model);
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
    let (code, message) = failure(&["run", "-p", "x", "--speculate", "draft"]);
    assert!(code == 2 && message.contains("--draft-model"), "{message}");
    let (code, message) = failure(&["run", "-p", "x", "--draft-model", &model]);
    assert!(
        code == 2 && message.contains("--speculate draft"),
        "{message}"
    );
    let (code, message) = failure(&[&["bench", "-p", "8"], &draft[..]].concat());
    assert!(code == 2 && message.contains("--clients"), "{message}");
    let other = support::directory("gpt2");
    let other = other.path().display().to_string();
    let draft = ["--speculate", "draft", "--draft-model", &other];
    let dir = tempfile::tempdir().unwrap();
    let requests = dir.path().join("requests.jsonl");
    std::fs::write(&requests, r#"{"prompt": "a"}"#).unwrap();
    let requests = requests.display().to_string();
    for command in [
        &["run", "-p", "x"][..],
        &["batch", "-f", &requests],
        &["plan"],
        &["bench", "--clients", "2", "-p", "4", "-n", "4"],
    ] {
        let (code, message) = failure(&[command, &["--backend", "cpu"], &draft[..]].concat());
        assert!(
            code == 1 && message.contains("vocabularies must be equal"),
            "{command:?}: {message}"
        );
    }
}

/// Requests that are computed together are drafted for together, and each chooses how.
#[test]
fn a_batch_with_a_draft_model_gives_the_same_texts() {
    let model = support::model().display().to_string();
    let request = |seed: u64| {
        let mut line =
            json!({"prompt": PROMPT, "seed": seed, "max_tokens": 40, "temperature": 0.8});
        if seed == 0 {
            line["temperature"] = json!(0);
        }
        if let Some(how) = [None, Some("off"), Some("lookup"), Some("draft")][seed as usize % 4] {
            line["speculate"] = json!(how);
        }
        line.to_string()
    };
    let input: Vec<String> = (0..8).map(request).collect();
    let batch = |extra: &[&str], input: &str| {
        let args = ["batch", "-f", "-", "-c", "800", "--backend", "cpu"];
        json_lines(&[&args[..], extra].concat(), input)
    };
    let draft = [
        "--speculate",
        "draft",
        "--draft-model",
        &model,
        "--draft-max",
        "6",
    ];
    let without = input.iter().map(|line| {
        let mut line: Value = serde_json::from_str(line).unwrap();
        line.as_object_mut().unwrap().remove("speculate");
        line.to_string()
    });
    let without: Vec<String> = without.collect();
    let plain = batch(&[], &without.join("\n"));
    let drafted = batch(&draft, &input.join("\n"));
    for (seed, (plain, drafted)) in plain.iter().zip(&drafted).enumerate() {
        assert_eq!(drafted["text"], plain["text"]);
        let speculation = drafted.get("speculation");
        match seed % 4 {
            0 | 3 => assert!(speculation.unwrap()["accepted"].as_u64().unwrap() > 0),
            1 => assert_eq!(speculation, None),
            _ => {}
        }
    }
    let lines = |how: &str| json!({"prompt": "a", "speculate": how}).to_string();
    for (how, extra, wanted) in [
        (
            "draft",
            &["--speculate", "lookup"][..],
            "line 1: there is no draft model",
        ),
        ("always", &[], "line 1: unknown variant `always`"),
    ] {
        let args = ["batch", "-f", "-", "--backend", "cpu"];
        let done = cellar()
            .args([&args[..], extra].concat())
            .write_stdin(lines(how))
            .assert()
            .code(2);
        let message = String::from_utf8(done.get_output().stderr.clone()).unwrap();
        assert!(message.contains(wanted), "{message}");
    }
}

#[test]
fn clients_of_a_bench_are_drafted_for() {
    let model = support::model().display().to_string();
    let args = [
        "bench",
        "--clients",
        "3",
        "-p",
        "8",
        "-n",
        "24",
        "-r",
        "1",
        "--json",
    ];
    let draft = draft_flags(&model);
    let measured = report(&[&args[..], &draft].concat());
    let count = |key: &str| measured[key].as_u64().unwrap();
    assert!(count("accepted_tokens") > 0, "{measured}");
    assert!(
        count("accepted_tokens") <= count("drafted_tokens"),
        "{measured}"
    );
}

/// A draft model's weights, rows and programs are in the plan.
#[test]
fn a_plan_counts_the_draft_model() {
    let model = support::model().display().to_string();
    let plan = |n_seqs: &str, extra: &[&str]| {
        let args = [
            "plan",
            "--json",
            "-c",
            "1000",
            "--backend",
            "cpu",
            "--seqs",
            n_seqs,
        ];
        report(&[&args[..], extra].concat())
    };
    let draft = ["--speculate", "draft", "--draft-model", &model];
    let (without, with) = (plan("2", &[]), plan("2", &draft));
    let of_draft = |key: &str| with["draft"][key].as_u64().unwrap();
    let bytes = |report: &Value, key: &str| report[key].as_u64().unwrap();
    // The process may have grown.
    let own = |report: &Value| bytes(report, "total") - bytes(report, "process");
    assert_eq!(own(&with), own(&without) + of_draft("host"));
    // The same model with the same context: the same rows, and the same weights and scratch.
    assert_eq!(of_draft("memory"), bytes(&without, "memory"));
    let backend = |key: &str| without["backend"][key].as_u64().unwrap();
    let rest = bytes(&without, "mapped") + backend("packed") + backend("scratch");
    assert_eq!(of_draft("host"), of_draft("memory") + rest);
    let largest = |report: &Value| bytes(report, "largest_n_ctx");
    assert!(largest(&with) < largest(&without));
    let (table, _) = output(&[&["plan", "--backend", "cpu"], &draft[..]].concat());
    assert!(table.contains("draft model"), "{table}");
}

/// A model of stories that was trained with a head.
const HEADED: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../tests/fixtures/heads/stories-head.gguf"
);

#[test]
fn a_head_drafts_where_the_file_has_one() {
    for sampling in [&["--temp", "0"][..], &["--temp", "0.8", "--seed", "5"]] {
        let run = |extra: &[&str]| {
            let model = ["-m", HEADED, "--backend", "cpu"];
            run(&[sampling, &model, extra].concat())
        };
        let plain = run(&["--speculate", "off"]);
        assert!(plain["timings"].get("drafted").is_none(), "{plain}");
        for drafted in [run(&[]), run(&["--speculate", "head"])] {
            for key in ["text", "tokens", "finish"] {
                assert_eq!(drafted[key], plain[key], "{key}");
            }
            let count = |key: &str| drafted["timings"][key].as_u64().unwrap();
            assert!(count("drafted") > 0 && count("accepted") <= count("drafted"));
        }
    }
}

/// Its rows are counted before anything is loaded.
#[test]
fn a_plan_counts_the_rows_of_a_head() {
    let plan = |how: &str| {
        let args = ["plan", HEADED, "--json", "-c", "256", "--speculate", how];
        let plan = report(&args);
        (plan["n_bytes"].as_u64().unwrap(), plan["memory"].as_u64())
    };
    let (with, of_with) = plan("auto");
    let (without, of_without) = plan("off");
    // Two layers, and that of the head.
    assert_eq!(with * 2, without * 3);
    assert!(of_with > of_without);
}

#[test]
fn a_head_that_is_not_there_is_missed_where_it_is_asked_for() {
    let (code, line) = failure(&["run", "-p", "a", "--speculate", "head"]);
    assert!(code == 2 && line.contains("has none"), "{line}");
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("incomplete.gguf");
    let bytes = std::fs::read(HEADED).unwrap();
    // The name of a tensor of the head, as another.
    let (name, other) = (b"blk.2.nextn.eh_proj", b"blk.2.nextn.eh_prox");
    let at = bytes.windows(name.len()).position(|part| part == name);
    let mut bytes = bytes;
    bytes[at.unwrap()..][..other.len()].copy_from_slice(other);
    std::fs::write(&model, bytes).unwrap();
    let model = model.to_str().unwrap();
    let args = ["run", "-m", model, "-p", "a", "-n", "4", "--backend", "cpu"];
    let (code, line) = failure(&[&args[..], &["--speculate", "head"]].concat());
    let missing = "'blk.2.nextn.eh_proj.weight' is missing";
    assert!(code == 1 && line.contains(missing), "{line}");
    // It is a model without its head.
    let done = cellar().args(args).assert().success();
    let said = String::from_utf8(done.get_output().stderr.clone()).unwrap();
    assert!(
        said.contains("not used") && said.contains(missing),
        "{said}"
    );
}

/// Directories of a model, and of a head for it.
struct OwnHead {
    model: tempfile::TempDir,
    head: tempfile::TempDir,
}

impl OwnHead {
    fn new(change: impl FnOnce(Recipe) -> Recipe) -> Self {
        let head = tempfile::tempdir().unwrap();
        let recipe = Recipe::open(&model_tests::fixture("heads/eagle3"));
        change(recipe).expand(head.path());
        let model = support::directory("llama_gqa_untied");
        Self { model, head }
    }

    fn args(&self) -> [&str; 6] {
        let [model, head] = [&self.model, &self.head].map(|f| f.path().to_str().unwrap());
        ["-m", model, "--backend", "cpu", "--draft-model", head]
    }
}

#[test]
fn a_head_of_another_file_leaves_texts_as_they_are() {
    let own = OwnHead::new(|recipe| recipe);
    let with = own.args();
    for sampling in [&["--temp", "0"][..], &["--temp", "0.8", "--seed", "5"]] {
        let plain = run(&[sampling, &with[..4]].concat());
        for how in ["auto", "head"] {
            let drafted = run(&[sampling, &with, &["--speculate", how]].concat());
            for key in ["text", "tokens", "finish"] {
                assert_eq!(drafted[key], plain[key], "{key}");
            }
            let count = |key: &str| drafted["timings"][key].as_u64().unwrap();
            assert!(count("drafted") > 0 && count("accepted") <= count("drafted"));
        }
    }
    // Rows and weights of the head are counted.
    let plan = |args: &[&str]| {
        let args = [&["plan", "--json", "-c", "256", "--seqs", "1"], args].concat();
        let plan = report(&args);
        ["n_bytes", "weights"].map(|key| plan[key].as_u64().unwrap())
    };
    let ([rows, weights], [rows_with, weights_with]) = (plan(&with[..4]), plan(&with));
    // Three layers, and that of the head.
    assert_eq!(rows_with * 3, rows * 4);
    assert!(weights_with > weights);
}

#[test]
fn heads_of_other_files_that_cannot_draft_are_refused() {
    let whole = OwnHead::new(|recipe| recipe);
    let with = whole.args();
    let run = |args: &[&str], how: &str| {
        failure(&[&["run", "-p", "a", "-n", "4", "--speculate", how], args].concat())
    };
    let (code, line) = run(&with, "draft");
    let wanted = "a head that drafts for another model ('eagle3')";
    assert!(code == 1 && line.contains(wanted), "{line}");
    let (code, line) = run(&with, "lookup");
    assert!(code == 2 && line.contains("--speculate draft"), "{line}");
    // The built-in model has other rows and another vocabulary.
    let (code, line) = run(&with[2..], "auto");
    assert!(
        code == 1 && line.contains("512 tokens, but the model has 1024"),
        "{line}"
    );
    let (code, line) = failure(&[&["bench", "-p", "8"], &with[2..]].concat());
    assert!(code == 2 && line.contains("--clients"), "{line}");
    let narrow = OwnHead::new(|recipe| {
        recipe.with_config(|config| {
            config.insert("target_hidden_size".to_owned(), 96.into());
        })
    });
    let (code, line) = run(&narrow.args(), "auto");
    let wanted = "96, but rows of the model have 64 values";
    assert!(code == 1 && line.contains(wanted), "{line}");
    // A head that is incomplete is missed where it is asked for, and else named.
    let part = OwnHead::new(|recipe| recipe.without("fc.weight"));
    let args = part.args();
    let (code, line) = run(&args, "head");
    let wanted = "'fc.weight' is missing";
    assert!(code == 1 && line.contains(wanted), "{line}");
    let done = cellar()
        .args([&["run", "-p", "a", "-n", "4"], &args[..]].concat())
        .assert()
        .success();
    let said = String::from_utf8(done.get_output().stderr.clone()).unwrap();
    assert!(said.contains("not used") && said.contains(wanted), "{said}");
}
