//! `--trace`, and `cellar replay` of what it wrote.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use crate::support::{failure, json as run_json, output};
use serde_json::{Value, json};

/// A trace of eight requests whose prompts begin alike.
fn trace(folder: &tempfile::TempDir) -> String {
    let path = |name: &str| folder.path().join(name).display().to_string();
    let beginning = "Once upon a time there was a little girl who had a red ball. ".repeat(3);
    let line = |at: usize| json!({"prompt": format!("{beginning}{at}"), "max_tokens": 4 + at});
    let lines: Vec<String> = (0..8).map(|at| line(at).to_string()).collect();
    std::fs::write(path("in"), lines.join("\n")).unwrap();
    let (input, trace) = (path("in"), path("trace.jsonl"));
    output(&[
        "batch",
        "-c",
        "300",
        "--parallel",
        "1",
        "--temp",
        "0",
        "-f",
        &input,
        "--trace",
        &trace,
    ]);
    trace
}

#[test]
fn a_trace_is_replayed_with_other_memories() {
    let folder = tempfile::tempdir().unwrap();
    let trace = trace(&folder);
    let replay = |more: &[&str]| run_json(&[&["replay", &trace, "--json"], more].concat());
    let same = replay(&[]);
    let [recorded, replayed] = ["recorded", "replayed"].map(|name| &same[name]);
    for number in [
        "n_requests",
        "n_prompt",
        "n_reused",
        "n_computed",
        "n_evicted",
        "n_ctx",
    ] {
        assert_eq!(recorded[number], replayed[number], "{number}: {same}");
    }
    assert_eq!(recorded["n_requests"], 8);
    assert_eq!(recorded["n_ctx"], 300);
    let hit_rate = |report: &Value| report["hit_rate"].as_f64().unwrap();
    assert!(
        hit_rate(recorded) > 0.5 && hit_rate(recorded) < 1.0,
        "{same}"
    );

    assert_eq!(replay(&["--policy", "off"])["replayed"]["n_reused"], 0);
    assert_eq!(replay(&["--ctx", "5000"])["replayed"]["n_ctx"], 5000);
    let budget = replay(&["--budget", "8M", "--policy", "lru"]);
    let bytes = budget["replayed"]["memory_bytes"].as_u64().unwrap();
    assert!(bytes <= 8 << 20 && bytes > 7 << 20, "{budget}");

    let (table, _) = output(&["replay", &trace]);
    assert!(
        table.contains("recorded") && table.contains("hit rate"),
        "{table}"
    );
    let text = std::fs::read_to_string(&trace).unwrap();
    assert!(!text.contains("little"), "a trace has no text");
}

#[test]
fn bench_writes_a_trace() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.jsonl").display().to_string();
    let bench = [
        "bench",
        "--clients",
        "2",
        "-p",
        "12",
        "-n",
        "5",
        "-r",
        "2",
        "--arrivals",
        "inf",
        "--trace",
        &trace,
    ];
    output(&bench);
    let report = run_json(&["replay", &trace, "--json"]);
    // Four, and one that warms up.
    assert_eq!(report["recorded"]["n_requests"], 5, "{report}");
    let on_stdout = [&bench[..bench.len() - 1], &["-"]].concat();
    let (stdout, stderr) = output(&on_stdout);
    assert!(stderr.contains("tokens of text/s"), "{stderr}");
    std::fs::write(&trace, stdout).unwrap();
    let report = run_json(&["replay", &trace, "--json"]);
    assert_eq!(report["recorded"]["n_requests"], 5, "{report}");
    let (code, message) = failure(&[&on_stdout[..], &["--json"]].concat());
    assert!(
        code == 2 && message.contains("both write to stdout"),
        "{message}"
    );
}

#[test]
fn what_cannot_be_replayed_is_refused_with_the_place() {
    let folder = tempfile::tempdir().unwrap();
    let trace = trace(&folder);
    let text = std::fs::read_to_string(&trace).unwrap();
    let cut = folder.path().join("cut").display().to_string();
    let middle = text.len() / 2;
    std::fs::write(&cut, &text[..middle]).unwrap();
    let at = 1 + text[..middle].rfind('\n').unwrap();
    let (code, message) = failure(&["replay", &cut]);
    assert_eq!(code, 1);
    assert!(
        message.contains(&format!("cut off at byte {at}")),
        "{message}"
    );
    assert!(message.contains("--partial"), "{message}");
    let partial = run_json(&["replay", &cut, "--partial", "--json"]);
    assert_eq!(partial["cut_off"], at);
    assert!(partial["replayed"]["n_requests"].as_u64().unwrap() >= 1);

    std::fs::write(&cut, "Once upon a time\n").unwrap();
    let (_, message) = failure(&["replay", &cut]);
    assert!(
        message.contains("at byte 0") && message.contains("no header"),
        "{message}"
    );
    let (_, message) = failure(&["replay", "no-such-file"]);
    assert!(message.contains("cannot read the trace"), "{message}");
    let (_, message) = failure(&["replay", &trace, "--budget", "10"]);
    assert!(message.contains("takes at least"), "{message}");
    for (args, wanted) in [
        (
            &["replay", "x", "--budget", "1G", "--ctx", "5"][..],
            "--ctx",
        ),
        (&["bench", "--trace", "x"], "--clients"),
    ] {
        let (code, message) = failure(args);
        assert!(code == 2 && message.contains(wanted), "{message}");
    }
}

#[test]
fn requests_are_replayed_by_several_servers() {
    let folder = tempfile::tempdir().unwrap();
    let trace = trace(&folder);
    let replay = |more: &[&str]| run_json(&[&["replay", &trace, "--json"], more].concat());
    let reused = |report: &Value| report["replayed"]["n_reused"].as_u64().unwrap();
    let alone = replay(&[]);
    assert_eq!(alone.get("replicas"), None, "{alone}");
    let rr = replay(&["--replicas", "2", "--router", "rr"]);
    let of_each: Vec<u64> = rr["replicas"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["n_requests"].as_u64().unwrap())
        .collect();
    assert_eq!(of_each, [4, 4], "{rr}");
    assert!(reused(&rr) < reused(&alone), "{rr}");
    let (table, _) = output(&["replay", &trace, "--replicas", "2"]);
    for wanted in ["recorded", "server", "the busiest computes"] {
        assert!(table.contains(wanted), "{table}");
    }
}

#[test]
fn traces_of_mooncakes_format_are_replayed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.jsonl").display().to_string();
    let line = |blocks: &[u64]| {
        let n = blocks.len() as u64 * 512;
        json!({"timestamp": 0, "input_length": n, "output_length": 9, "hash_ids": blocks})
            .to_string()
    };
    // The second one begins as the first one does, and the third one as both.
    let lines = [line(&[1, 2, 3]), line(&[1, 2, 4, 5]), line(&[1, 6])].join("\n");
    std::fs::write(&path, lines).unwrap();
    let mooncake = ["replay", &path, "--trace-format", "mooncake"];
    let report = run_json(&[&mooncake[..], &["-c", "100000", "--json"]].concat());
    assert_eq!(report.get("recorded"), None, "{report}");
    assert_eq!(report["replayed"]["n_prompt"], 9 * 512);
    assert_eq!(report["replayed"]["n_reused"], 3 * 512);
    let (table, _) = output(&[&mooncake[..], &["--budget", "1G", "--replicas", "2"]].concat());
    assert!(
        table.contains("replayed") && !table.contains("recorded"),
        "{table}"
    );
    // One after the other: the second server has nothing of the first prompt, and the tier has.
    let tier = [
        "-c",
        "100000",
        "--replicas",
        "2",
        "--router",
        "rr",
        "--tier",
        "1G",
        "--json",
    ];
    let report = run_json(&[&mooncake[..], &tier].concat());
    assert_eq!(report["replayed"]["n_reused"], 512, "{report}");
    assert_eq!(report["replayed"]["n_fetched"], 2 * 512, "{report}");
    let (table, _) = output(&[&mooncake[..], &tier[..8]].concat());
    assert!(table.contains("fetched from the tier"), "{table}");
    let (code, message) = failure(&mooncake);
    assert!(
        code == 1 && message.contains("needs --ctx or --budget"),
        "{message}"
    );
    std::fs::write(&path, line(&[1]).replace("512", "513")).unwrap();
    let (code, message) = failure(&[&mooncake[..], &["-c", "9999"]].concat());
    assert!(
        code == 1
            && message.contains("line 1: a prompt of 513 tokens in 1 blocks of 512: it has 2"),
        "{message}"
    );
    for wrong in [["--replicas", "0"], ["--router", "best"], ["--tier", "0"]] {
        let (code, message) = failure(&[&mooncake[..], &wrong].concat());
        assert!(code == 2 && message.contains(wrong[0]), "{message}");
    }
}
