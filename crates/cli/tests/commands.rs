//! The commands other than `run`: what they print and write.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::path::Path;

use crate::support::{BACKENDS, cellar, directory, failure, json, model, output, references};
use safetensors::SafeTensors;
use serde_json::Value;

#[test]
fn help_lists_commands_and_flags() {
    let (top, _) = output(&["--help"]);
    for command in [
        "run",
        "inspect",
        "plan",
        "graph",
        "tokenize",
        "logits",
        "kl",
        "bench",
        "state",
        "perplexity",
        "convert",
        "embed",
        "batch",
        "rerank",
    ] {
        assert!(top.contains(command), "{command}");
        let (help, _) = output(&[command, "--help"]);
        assert!(
            help.contains("Examples:") && help.contains("Usage:"),
            "{help}"
        );
    }
    let flags = "--predict --ctx --temp --top-k --top-p --min-p --repeat-penalty --seed --threads \
                 --logit-bias --min-tokens --typical --xtc-probability --dry-multiplier --mirostat \
                 --batch --ubatch --kv-type --streams --backend --chat --raw --no-bos --file --json";
    let (help, _) = output(&["run", "--help"]);
    for flag in flags.split_whitespace() {
        assert!(help.contains(flag), "{flag}");
    }
    let (version, _) = output(&["--version"]);
    let wanted = concat!("cellar ", env!("CARGO_PKG_VERSION"), " (");
    assert!(version.starts_with(wanted), "{version}");
}

#[test]
fn tokenize_lists_ids_and_pieces() {
    let reference = &references()[0];
    let report = json(&["tokenize", &reference.prompt, "--json"]);
    assert_eq!(report["tokens"], serde_json::json!(reference.ids));
    assert_eq!(report["pieces"][0], "<s>");
    let (lines, _) = output(&["tokenize", &reference.prompt, "--no-bos"]);
    assert_eq!(lines.lines().count(), reference.ids.len() - 1);
    let first = lines.lines().next().unwrap();
    assert!(first.trim_start().starts_with("391  "), "{first}");
    let special = |args: &[&str]| json(&[&["tokenize", "--json", "</s>"], args].concat());
    assert_eq!(special(&[])["tokens"], serde_json::json!([1, 2]));
    assert_ne!(
        special(&["--no-special"])["tokens"],
        serde_json::json!([1, 2])
    );
}

/// A character that the vocabulary lacks is several tokens of one byte each.
#[test]
fn pieces_are_text_and_other_bytes_are_apart() {
    let text = "One \u{1F642} day";
    let report = json(&["tokenize", text, "--json", "--no-bos"]);
    let pieces = report["pieces"].as_array().unwrap();
    assert_eq!(pieces.len(), report["tokens"].as_array().unwrap().len());
    let bytes_at = |index: usize| {
        let others = report["not_utf8"].as_array().unwrap();
        let other = others.iter().find(|other| other["index"] == index).unwrap();
        serde_json::from_value::<Vec<u8>>(other["bytes"].clone()).unwrap()
    };
    let mut written = Vec::new();
    for (index, piece) in pieces.iter().enumerate() {
        match piece.as_str() {
            Some(piece) => written.extend(piece.bytes()),
            None => written.extend(bytes_at(index)),
        }
    }
    assert_eq!(String::from_utf8(written).unwrap().trim_start(), text);
    assert_eq!(report["not_utf8"].as_array().unwrap().len(), 4);
    let (lines, _) = output(&["tokenize", text, "--no-bos"]);
    for wanted in ["' One'", "'<0xF0>'", "'<0x82>'", "' day'"] {
        assert!(lines.contains(wanted), "{wanted}: {lines}");
    }
}

#[test]
fn an_empty_instruction_set_is_the_default() {
    let info = |value: Option<&str>| {
        let mut command = cellar();
        command.args(["run", "-n", "1", "--json"]);
        match value {
            Some(value) => command.env("CELLAR_ISA", value),
            None => command.env_remove("CELLAR_ISA"),
        };
        let stdout = command.assert().success().get_output().stdout.clone();
        let stdout = String::from_utf8(stdout).unwrap();
        let report: serde_json::Value =
            serde_json::from_str(stdout.lines().last().unwrap()).unwrap();
        report["device"].clone()
    };
    assert_eq!(info(Some("")), info(None));
}

#[test]
fn plan_adds_up() {
    for (args, is_known) in [
        (&["plan", "--json"][..], true),
        (
            &[
                "plan",
                "--json",
                "--repack",
                "never",
                "--attention",
                "plain",
            ],
            true,
        ),
        (&["plan", "--json", "--backend", "candle"], false),
    ] {
        let report = json(args);
        let bytes = |name: &str| report[name].as_u64().unwrap_or(0);
        let backend = |name: &str| report["backend"][name].as_u64().unwrap_or(0);
        let sum = bytes("memory") + bytes("mapped") + bytes("process");
        let sum = sum + backend("packed") + backend("scratch");
        assert_eq!(bytes("total"), sum, "{report}");
        assert_eq!(backend("scratch") > 0, is_known, "{report}");
    }
}

#[test]
fn plan_shows_bytes_by_layer_part_and_kind() {
    let args = ["plan", "--json", "-c", "1000", "--kv-type", "f32", "--seqs"];
    let plan = |n_seqs| json(&[&args[..], &[n_seqs, "--streams"]].concat());
    let (one, two) = (plan("1"), plan("2"));
    // 6 layers, K and V, 4 heads of 16 values of 4 bytes.
    assert_eq!(one["n_bytes"], 1000 * 6 * 2 * 4 * 16 * 4);
    assert_eq!(two["n_bytes"], 2 * one["n_bytes"].as_u64().unwrap());
    let row = &two["rows"][3];
    assert_eq!((&row["layer"], &row["kind"]), (&1.into(), &"v".into()));
    assert_eq!((&row["part"], &row["n_rows"]), (&0.into(), &2000.into()));
    assert_eq!(row["n_bytes"], 2000 * 4 * 16 * 4);
    assert_eq!(one["by_kind"][0]["n_bytes"], 1000 * 6 * 4 * 16 * 4);
    let inspected = json(&["inspect", "--json", "-c", "1000", "--kv-type", "f32"]);
    assert_eq!(one["weights"], inspected["tensors"]["n_bytes"]);
    assert_eq!(one["n_bytes"], inspected["model"]["memory"]["n_bytes"]);
    let (table, _) = output(&["plan", "-c", "1000"]);
    for wanted in [
        "layer  part",
        "f16 125.00 KiB",
        "part 0: window full",
        "weights",
    ] {
        assert!(table.contains(wanted), "{wanted}: {table}");
    }
}

#[test]
fn inspect_shows_what_memory_costs() {
    let report = json(&["inspect", "--json", "-c", "1000", "--kv-type", "f32"]);
    // 6 layers, K and V, 4 heads of 16 values of 4 bytes.
    assert_eq!(
        report["model"]["memory"]["n_bytes"],
        1000 * 6 * 2 * 4 * 16 * 4
    );
    assert_eq!(
        report["model"]["memory"]["layers"]
            .as_array()
            .unwrap()
            .len(),
        6
    );
    assert_eq!(report["tensors"]["n_values"], 1_164_928);
    // The embedding is the output matrix, too.
    assert_eq!(report["tensors"]["looked_up"]["n_bytes"], 0);
    assert_eq!(report["tokenizer"]["n_tokens"], 1024);
    assert_eq!(
        report["metadata"]["tokenizer.ggml.tokens"]["n_elements"],
        1024
    );
    let model = model();
    let (text, _) = output(&["inspect", model.to_str().unwrap()]);
    for wanted in [
        "general.architecture",
        "(1024 elements)",
        "F16",
        "Memory for 512 tokens in f16",
    ] {
        assert!(text.contains(wanted), "{wanted} in {text}");
    }
}

#[test]
fn graphs_print_and_compare() {
    let (text, _) = output(&["graph", "--tokens", "3"]);
    assert!(text.starts_with("graph: 3 tokens, 1 outputs\n"), "{text}");
    assert!(text.contains("kqv_out-5"), "{text}");
    assert!(
        output(&["graph", "--arch", "qwen2", "--format", "dot"])
            .0
            .starts_with("digraph")
    );
    let (graph, _) = output(&["graph", "--format", "json"]);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("graph.json");
    std::fs::write(&path, graph).unwrap();
    let (model, path) = (model(), path.to_str().unwrap());
    let model = model.to_str().unwrap();
    let (same, _) = output(&["graph", "diff", path, model]);
    assert!(same.starts_with("the graphs are alike\n"), "{same}");
    let args = ["graph", "diff", path, model, "--tokens", "2", "--json"];
    let done = cellar().args(args).assert().code(1);
    let report: Value = serde_json::from_slice(&done.get_output().stdout).unwrap();
    assert!(
        !report["blocks"][0]["diff"]["changed"]
            .as_array()
            .unwrap()
            .is_empty()
    );
}

/// What 'cellar graph diff' prints of graphs that differ.
fn differences(args: &[&str]) -> String {
    let done = cellar().args(["graph", "diff"]).args(args).assert().code(1);
    String::from_utf8(done.get_output().stdout.clone()).unwrap()
}

#[test]
fn a_diff_of_graphs_folds_equal_layers() {
    assert_eq!(
        differences(&["llama", "qwen2"]),
        "\
layers 0-1:
  ~ Qproj: f32[1, 2048] = linear(attn_norm, w=blk.*.attn_q.weight)
    Qproj: f32[1, 2048] = linear(attn_norm, w=blk.*.attn_q.weight, b=blk.*.attn_q.bias)
  ~ Kproj: f32[1, 512] = linear(attn_norm, w=blk.*.attn_k.weight)
    Kproj: f32[1, 512] = linear(attn_norm, w=blk.*.attn_k.weight, b=blk.*.attn_k.bias)
  ~ Vproj: f32[1, 512] = linear(attn_norm, w=blk.*.attn_v.weight)
    Vproj: f32[1, 512] = linear(attn_norm, w=blk.*.attn_v.weight, b=blk.*.attn_v.bias)
  ~ Qcur: f32[1, 32, 64] = rope(Qheads, inp_pos, style={norm | neox}, n_rot=64, base=500000)
  ~ Kcur: f32[1, 8, 64] = rope(Kheads, inp_pos, style={norm | neox}, n_rot=64, base=500000)
"
    );
}

/// The built-in model has six layers of other sizes than the example's two.
#[test]
fn models_of_one_family_have_one_structure() {
    let model = model().display().to_string();
    let all = differences(&["llama", &model]);
    assert!(all.lines().count() <= 40, "{all}");
    assert!(
        all.contains("layers 2-5: only in RIGHT, like its layer 0\n"),
        "{all}"
    );
    assert!(
        all.contains("~ result_norm: f32[1, {2048 | 128}] ="),
        "{all}"
    );
    let (same, _) = output(&["graph", "diff", "llama", &model, "--structure"]);
    assert_eq!(
        same,
        "the graphs are alike\nLEFT layers 0-1 and RIGHT layers 0-5: the same\n"
    );
    let other = differences(&["qwen2", &model, "--structure"]);
    assert!(other.contains("b=blk.*.attn_q.bias"), "{other}");
}

#[test]
fn a_written_graph_is_compared() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("graph.txt").display().to_string();
    output(&["graph", "llama", "-o", &path]);
    let (same, _) = output(&["graph", "diff", &path, "llama"]);
    assert_eq!(same, "the graphs are alike\nlayers 0-1: the same\n");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("%34 kqv-1", "%34 kqv_other-1")).unwrap();
    let other = differences(&[&path, "llama"]);
    assert!(
        other.starts_with("layer 0: the same\nlayer 1:\n  - kqv_other: "),
        "{other}"
    );
    assert_eq!(
        output(&["graph", "diff", &path, "llama", "--layer", "0"]).0,
        "layer 0: the same\n"
    );
    assert!(differences(&[&path, "llama", "--layer", "1"]).contains("+ kqv: "));
    std::fs::write(&path, text.replace("%34 ", "%43 ")).unwrap();
    let (code, message) = failure(&["graph", "diff", &path, "llama"]);
    assert_eq!(code, 1);
    assert!(
        message.contains("line 36 is no node: %43 kqv-1"),
        "{message}"
    );
    let (code, message) = failure(&["graph", "diff", "llama", "qwen2", "--layer", "2"]);
    assert_eq!(code, 2);
    assert!(
        message.contains("--layer 2: 'llama' has 2 layers"),
        "{message}"
    );
}

/// The tensors of a file by name: shape and values.
fn read(path: &Path) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let bytes = std::fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let values = |data: &[u8]| {
        data.as_chunks()
            .0
            .iter()
            .map(|b| f32::from_le_bytes(*b))
            .collect()
    };
    let mut read: Vec<_> = tensors
        .tensors()
        .into_iter()
        .map(|(name, view)| (name, view.shape().to_vec(), values(view.data())))
        .collect();
    read.sort_by(|a, b| a.0.cmp(&b.0));
    read
}

#[test]
fn logits_are_the_same_on_every_way() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("logits.safetensors");
    let list = |ids: &[u32]| ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let references = references();
    let [a, b] = [0, 1].map(|i| list(&references[i].greedy_ids[..9 + 4 * i]));
    let file = dir.path().join("tokens.txt");
    std::fs::write(&file, format!("{}\n\n{b}\n", a.replace(',', " "))).unwrap();
    let file = file.to_str().unwrap();
    let logits = |args: &[&str]| {
        let base = ["logits", "--out", out.to_str().unwrap()];
        output(&[&base[..], args].concat());
        read(&out)
    };
    for backend in BACKENDS {
        let alone = [&a, &b].map(|ids| {
            let mut read = logits(&["--backend", backend, "--tokens", ids]);
            assert_eq!(read.len(), 1);
            let (name, shape, values) = read.remove(0);
            assert_eq!(
                (name.as_str(), shape),
                ("logits", vec![ids.split(',').count(), 1024])
            );
            values
        });
        let ways: [&[&str]; 7] = [
            &[],
            &["--ubatch", "1"],
            &["--ubatch", "7"],
            &["--chunks", "1"],
            &["--chunks", "5,2"],
            &["--streams"],
            &["--streams", "--chunks", "4", "--ubatch", "3"],
        ];
        for (at, way) in ways.iter().enumerate() {
            let given: &[&str] = match at {
                2 => &["--tokens-file", file],
                _ => &["--tokens", &a, "--tokens", &b],
            };
            let both = logits(&[&["--backend", backend], *way, given].concat());
            assert_eq!(both.len(), 2);
            for ((name, _, values), (number, alone)) in both.iter().zip(alone.iter().enumerate()) {
                assert_eq!(*name, format!("logits_{number}"));
                assert_eq!(values.len(), alone.len());
                let far = values
                    .iter()
                    .zip(alone)
                    .map(|(x, y)| (x - y).abs())
                    .fold(0.0, f32::max);
                assert!(far < 2e-5, "{backend} {way:?}: {far}");
                // Cellar's own kernels add up in the same order on every way.
                assert!(backend != "cpu" || far == 0.0, "{way:?}: {far}");
            }
        }
    }
    let left: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(left.len(), 2, "only the result and the tokens: {left:?}");
}

#[test]
fn bench_tells_where_the_time_goes() {
    let args = ["bench", "-p", "16", "-n", "3", "-r", "2", "--times"];
    let report = json(&[&args[..], &["--json"]].concat());
    for phase in ["prompt_steps", "generation_steps"] {
        let kinds = report[phase].as_array().unwrap();
        let number = |kind: &serde_json::Value, key: &str| kind[key].as_f64().unwrap();
        let sum: f64 = kinds.iter().map(|kind| number(kind, "share")).sum();
        assert!((sum - 1.0).abs() < 1e-6, "{phase} {sum}: {report}");
        for wanted in ["matmul", "attention", "outside"] {
            let kind = kinds.iter().find(|kind| kind["kind"] == wanted).unwrap();
            assert!(number(kind, "us_per_token") > 0.0, "{phase}: {kind}");
            let has_weights = kind.get("weight_gb_per_second").is_some();
            assert_eq!(has_weights, wanted == "matmul", "{phase}: {kind}");
        }
    }
    let (text, _) = output(&args);
    assert!(text.contains("GB/s of weights"), "{text}");
    let unprofiled = json(&["bench", "-p", "8", "-n", "2", "-r", "1", "--json"]);
    assert!(unprofiled.get("generation_steps").is_none());
}

#[test]
fn bench_measures_what_clients_wait_for() {
    let args = [
        "bench",
        "--clients",
        "4",
        "-p",
        "10",
        "-n",
        "6",
        "-r",
        "2",
        "--depth",
        "100",
        "--share-depth",
    ];
    let report = json(&[&args[..], &["--json"]].concat());
    assert_eq!(
        (report["n_clients"].as_u64(), report["n_requests"].as_u64()),
        (Some(4), Some(8))
    );
    assert_eq!(report["prompt_tokens"], 8 * 110);
    // All but the first request have the common tokens.
    assert_eq!(report["reused_tokens"], 7 * 100);
    assert_eq!(report["preemptions"], 0);
    for times in ["first_token_ms", "inter_token_ms", "total_ms"] {
        let [p50, p90, p99, max] =
            ["p50", "p90", "p99", "max"].map(|name| report[times][name].as_f64().unwrap());
        assert!(
            0.0 < p50 && p50 <= p90 && p90 <= p99 && p99 <= max,
            "{report}"
        );
    }
    assert!(report["text_tokens_per_second"].as_f64().unwrap() > 0.0);
    assert!(report.get("arrivals").is_none(), "{report}");
    let (text, _) = output(&args);
    assert!(text.contains("700 of 880 prompt tokens reused"), "{text}");
    assert!(text.contains("one after the other"), "{text}");
}

#[test]
fn bench_sends_requests_when_they_are_due() {
    fn bench<'a>(more: &[&'a str]) -> Vec<&'a str> {
        let args = ["bench", "--clients", "2", "-p", "10", "-n", "6", "-r", "3"];
        [&args[..], more].concat()
    }
    // Six requests, the last of which comes 500 ms after the first.
    let fixed = json(&bench(&["--arrivals", "100ms", "--json"]));
    assert_eq!(fixed["n_requests"], 6);
    assert_eq!(fixed["arrivals"]["process"], "fixed");
    assert_eq!(fixed["arrivals"]["seconds"], 0.1);
    let seconds = fixed["seconds"].as_f64().unwrap();
    assert!(seconds >= 0.5, "{fixed}");
    let poisson = json(&bench(&["--arrivals", "50/s", "--seed", "3", "--json"]));
    assert_eq!(poisson["arrivals"]["process"], "poisson");
    assert_eq!(poisson["arrivals"]["per_second"], 50.0);
    assert_eq!(poisson["arrivals"]["seed"], 3);
    assert!(poisson["arrivals"]["max_late_ms"].as_f64().unwrap() >= 0.0);
    // All come at once and two run, so others wait until those end.
    let at_once = json(&bench(&["--arrivals", "inf", "--json"]));
    let time = |of: &str, name: &str| at_once[of][name].as_f64().unwrap();
    let longest_wait = time("queued_ms", "max");
    assert!(longest_wait > time("inter_token_ms", "mean"), "{at_once}");
    assert!(longest_wait < time("total_ms", "max"), "{at_once}");
    let (text, _) = output(&bench(&["--arrivals", "30/s"]));
    assert!(text.contains("at random, 30.000 a second"), "{text}");
    assert!(text.contains("time to first token"), "{text}");
    assert!(text.contains("inter-token latency"), "{text}");
}

#[test]
fn bench_measures_both_speeds() {
    let report = json(&[
        "bench", "-p", "16", "-n", "3", "-r", "3", "--depth", "5", "--json",
    ]);
    for key in ["prompt_tokens_per_second", "generation_tokens_per_second"] {
        let [min, median, max] =
            ["min", "median", "max"].map(|name| report[key][name].as_f64().unwrap());
        assert!(0.0 < min && min <= median && median <= max, "{report}");
    }
    let report = json(&["bench", "-p", "0", "-n", "2", "-r", "1", "--json"]);
    assert!(report.get("prompt_tokens_per_second").is_none());
    let (text, _) = output(&["bench", "-p", "8", "-n", "2", "-r", "1"]);
    assert!(text.contains("prompt") && text.contains("median"), "{text}");
    for flags in [
        &["--streams"][..],
        &["--share-depth"],
        &["--share-depth", "--streams"],
    ] {
        let shape = [
            "bench", "-p", "6", "-n", "2", "-r", "1", "--seqs", "3", "--depth", "9",
        ];
        let report = json(&[&shape, flags, &["--json"]].concat());
        assert_eq!(report["n_seqs"], 3);
        let shared = flags.contains(&"--share-depth");
        assert_eq!(
            report["depth_tokens"],
            if shared { "shared" } else { "own" }
        );
        assert!(
            report["generation_tokens_per_second"]["min"]
                .as_f64()
                .unwrap()
                > 0.0
        );
    }
}

#[test]
fn a_log_can_be_asked_for() {
    let done = cellar()
        .args(["run", "-n", "1"])
        .env("CELLAR_LOG", "debug")
        .assert()
        .success();
    let stderr = String::from_utf8(done.get_output().stderr.clone()).unwrap();
    assert!(stderr.contains("compiling"), "{stderr}");
}

/// Vocabulary of 512 and 64 values, in `f32`, beside an output matrix of the same size.
#[test]
fn inspect_tells_what_is_only_looked_up() {
    let made = directory("llama_gqa_untied");
    let untied = made.path().join("model.gguf").display().to_string();
    let from = made.path().display().to_string();
    output(&["convert", &from, &untied, "--type", "f32"]);
    let report = json(&["inspect", "--json", &untied]);
    let looked_up = &report["tensors"]["looked_up"];
    assert_eq!(
        (&looked_up["n_values"], &looked_up["n_bytes"]),
        (&32_768.into(), &131_072.into())
    );
    let (text, _) = output(&["inspect", &untied]);
    assert!(text.contains("look rows up in 128.00 KiB"), "{text}");
}

#[test]
fn inspect_counts_bytes_of_every_type() {
    let bytes = |args: &[&str]| {
        let report = json(&[&["inspect", "--json", "-c", "1000"], args].concat());
        report["model"]["memory"]["bytes_per_token"]
            .as_u64()
            .unwrap()
    };
    // 6 layers of 4 heads of 16 values: two blocks for K and two for V.
    for (kv_type, block) in [
        ("q8_0", 34),
        ("q4_0", 18),
        ("q4_1", 20),
        ("q5_0", 22),
        ("q5_1", 24),
    ] {
        assert_eq!(bytes(&["--kv-type", kv_type]), 6 * 2 * 2 * block);
    }
    assert_eq!(bytes(&["--kv-type", "bf16"]), 6 * 2 * 64 * 2);
    let apart = bytes(&["--kv-type-k", "q8_0", "--kv-type-v", "iq4_nl"]);
    assert_eq!(apart, 6 * 2 * (34 + 18));
    let layers = bytes(&["--kv-type", "q8_0", "--kv-type-layer", "0-1=f32,5=f16/q4_0"]);
    assert_eq!(layers, 3 * 136 + 2 * 512 + 128 + 36);
    let old = bytes(&["--kv-type-old", "q8_0/q4_0", "--kv-recent", "100"]);
    assert_eq!(old, 6 * 2 * (34 + 18));
}

#[test]
fn old_rows_of_the_same_type_tell_the_same_story() {
    let story = |apart: &[&str]| {
        let prompt = &references()[0].prompt;
        let args = ["run", prompt, "--temp", "0", "-n", "60", "--kv-type", "f32"];
        output(&[&args[..], apart].concat()).0
    };
    let together = story(&[]);
    for sinks in ["0", "3"] {
        let apart = ["--kv-type-old", "f32", "--kv-recent", "8", "--kv-sinks"];
        assert_eq!(story(&[&apart[..], &[sinks]].concat()), together);
    }
    let (plan, _) = output(&[
        "plan",
        "--kv-type-old",
        "q4_0",
        "--kv-recent",
        "64",
        "--kv-sinks",
        "4",
    ]);
    assert!(plan.contains("window ends(4, 64)"), "{plan}");
}

/// A trained model; those of Mamba-2 and of delta rules are in the engine's tests.
#[test]
fn kl_of_rounded_states_is_small() {
    let model = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/fixtures/stories/stories-mamba-f16.gguf"
    );
    let text = &references()[0].prompt;
    let kl = |state_type: &str| {
        let args = [
            "kl",
            "-m",
            model,
            text.as_str(),
            "--json",
            "--kv-type",
            "f32",
            "--state-type",
            state_type,
        ];
        json(&args)["mean_kl"].as_f64().unwrap()
    };
    let [exact, f16, bf16] = ["f32", "f16", "bf16"].map(kl);
    assert_eq!(exact, 0.0);
    assert!(0.0 < f16 && f16 < 1e-4, "{f16}");
    assert!(f16 < bf16 && bf16 < 1e-2, "{bf16}");
}

#[test]
fn kl_is_small_for_types_that_keep_much() {
    let text = &references()[0].prompt;
    let kl = |args: &[&str]| json(&[&["kl", text.as_str(), "--json"], args].concat());
    let [exact, f16, q8, q4] = [
        &["--kv-type", "f32"][..],
        &["--kv-type", "f16"],
        &["--kv-type", "q8_0"],
        &[
            "--kv-type-k",
            "q4_0",
            "--kv-type-v",
            "q4_0",
            "--backend",
            "candle",
        ],
    ]
    .map(kl);
    assert_eq!(exact["mean_kl"], 0.0);
    assert_eq!(exact["same_top"], 1.0);
    assert_eq!(exact["perplexity"], exact["f32_perplexity"]);
    let mean = |report: &serde_json::Value| report["mean_kl"].as_f64().unwrap();
    assert!(0.0 < mean(&f16) && mean(&f16) < 1e-5, "{f16}");
    assert!(mean(&f16) < mean(&q8) && mean(&q8) < 1e-2, "{q8}");
    assert!(mean(&q8) < mean(&q4) && mean(&q4) < 1.0, "{q4}");
    assert_eq!(q8["bytes_per_token"], 6 * 4 * 34);
    let (table, _) = output(&[
        "kl",
        text.as_str(),
        "--kv-type",
        "q8_0",
        "--kv-rotation",
        "off",
    ]);
    assert!(
        table.contains("K and V in q8_0 compared with f32"),
        "{table}"
    );
}
