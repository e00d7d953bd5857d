//! Texts that go on in another process, and states that are not what they should be.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::support::{
    BACKENDS, edited, failure, json, model, output, references, references_in, with_template,
};

/// Models of each kind of memory, without the ending.
const MODELS: [&str; 3] = [
    "models/stories-llama",
    "tests/fixtures/stories/stories-gemma3",
    "tests/fixtures/stories/stories-mamba",
];

fn path(model: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.join(model).display().to_string()
}

/// A directory and a file in it that is not there yet.
fn place() -> (tempfile::TempDir, PathBuf, String) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("text.state");
    let name = file.to_str().unwrap().to_owned();
    (dir, file, name)
}

fn saved(args: &[&str]) -> (tempfile::TempDir, PathBuf, String) {
    let (dir, file, name) = place();
    let base = ["run", "--temp", "0", "-n", "8", "--save-state", &name];
    output(&[&base[..], args].concat());
    (dir, file, name)
}

#[test]
fn a_text_interrupted_half_way_goes_on_in_a_new_process_as_if_it_had_not_been() {
    for model in MODELS {
        let file = format!("{}-f16.gguf", path(model));
        let references = references_in(format!("{}.reference.json", path(model)));
        for (reference, kv_type) in references.iter().zip(["f32", "f16"]) {
            for backend in BACKENDS {
                let (dir, _, state) = place();
                let n = reference.greedy_ids.len();
                let (half, rest) = ((n / 2).to_string(), (n - n / 2).to_string());
                let base = ["run", "-m", &file, "--temp", "0", "--kv-type", kv_type];
                let base = [&base[..], &["--backend", backend]].concat();
                let first = ["--save-state", &state, "-n", &half, &reference.prompt];
                let (first, _) = output(&[&base[..], &first].concat());
                // The state is replaced by that of the end.
                let second = ["--load-state", &state, "--save-state", &state, "-n", &rest];
                let (second, _) = output(&[&base[..], &second].concat());
                let told = format!("{}{second}", first.strip_suffix('\n').unwrap());
                let wanted = format!("{}{}\n", reference.prompt, reference.continuation);
                assert_eq!(told, wanted, "{model} {kv_type} {backend}");
                let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
                assert_eq!(left.len(), 1, "{left:?}");
                let shown = json(&["state", "inspect", &state, "--json"]);
                let seq = &shown["sequences"][0];
                // The token that ends a text is not kept, and the one before it was evaluated.
                let ended = usize::from(n < 128);
                let n_ids = reference.ids.len() + n - ended;
                assert_eq!(seq["n_ids"], n_ids);
                assert_eq!(seq["n_pending"], 1 - ended);
                assert_eq!(seq["last_position"], n_ids - 2 + ended);
            }
        }
    }
}

#[test]
fn a_state_goes_to_other_contexts_streams_types_and_ubatches() {
    let reference = &references()[0];
    let ways: [&[&str]; 4] = [
        &["-c", "400", "--kv-type", "f32"],
        &["-c", "200", "--streams", "--ubatch", "3"],
        &["--kv-type", "f16"],
        &["--backend", "candle"],
    ];
    let n = reference.greedy_ids.len();
    for saved_as in [
        &["--kv-type", "f32"][..],
        &["--kv-type", "f32", "--save-kv-type", "f16"],
    ] {
        let (_dir, file, state) = saved(&[&[&reference.prompt[..]], saved_as].concat());
        for way in ways {
            let rest = (n - 8).to_string();
            let base = [
                "run",
                "--temp",
                "0",
                "--load-state",
                &state,
                "-n",
                &rest,
                "--json",
            ];
            let report = json(&[&base[..], way].concat());
            assert_eq!(
                report["tokens"],
                serde_json::json!(reference.greedy_ids[8..]),
                "{way:?}"
            );
            assert_eq!(report["loaded_tokens"], reference.ids.len() + 7);
        }
        let shown = json(&["state", "inspect", &state, "--json"]);
        assert_eq!(shown["n_bytes"], std::fs::metadata(&file).unwrap().len());
        assert_eq!(
            shown["rows"][0]["stored"],
            if saved_as.len() == 2 { "f32" } else { "f16" }
        );
    }
}

#[test]
fn a_prompt_is_read_once_and_gone_on_from_with_another() {
    let reference = &references()[0];
    let (_dir, _, state) = place();
    let (read, _) = output(&["run", &reference.prompt, "-n", "0", "--save-state", &state]);
    assert_eq!(read, format!("{}\n", reference.prompt));
    let base = ["run", "--load-state", &state, "--temp", "0", "--json"];
    let report = json(&[&base[..], &["-n", "20"]].concat());
    assert_eq!(
        report["tokens"],
        serde_json::json!(reference.greedy_ids[..20])
    );
    // A prompt continues the text: no second beginning.
    let report = json(&[&base[..], &["-n", "5", " One day"]].concat());
    let ids = [
        &reference.ids[reference.ids.len() - 1..],
        &references()[1].ids[1..3],
    ]
    .concat();
    assert_eq!(report["prompt_ids"], serde_json::json!(ids));
    assert_eq!(report["loaded_tokens"], reference.ids.len() - 1);
    // A prompt of one token, all of which waits.
    output(&[
        "run",
        "-p",
        "a",
        "--no-bos",
        "-n",
        "0",
        "--save-state",
        &state,
    ]);
    let alone = json(&[
        "run", "-p", "a", "--no-bos", "-n", "5", "--temp", "0", "--json",
    ]);
    let report = json(&[&base[..], &["-n", "5"]].concat());
    assert_eq!(report["tokens"], alone["tokens"]);
}

#[test]
fn penalties_look_back_into_what_was_loaded() {
    let args = ["--temp", "0", "--repeat-penalty", "1.5", "--json"];
    let whole = json(&[&["run", "Once upon a time", "-n", "40"][..], &args].concat());
    let (_dir, _, state) = place();
    let first = [
        "run",
        "Once upon a time",
        "-n",
        "20",
        "--save-state",
        &state,
    ];
    output(&[&first[..], &args].concat());
    let second = json(&[&["run", "-n", "20", "--load-state", &state][..], &args].concat());
    assert_eq!(
        second["tokens"].as_array().unwrap()[..],
        whole["tokens"].as_array().unwrap()[20..]
    );
}

#[test]
fn a_text_that_its_model_ended_needs_a_prompt() {
    // The story ends by itself within the context.
    let (_dir, _, state) = place();
    let base = [
        "run",
        "Once upon a time",
        "--temp",
        "0",
        "-n",
        "500",
        "-c",
        "512",
        "--json",
    ];
    let report = json(&[&base[..], &["--save-state", &state]].concat());
    assert_eq!(report["finish"]["reason"], "end_of_generation", "{report}");
    let (code, message) = failure(&["run", "--load-state", &state]);
    assert_eq!(code, 2);
    assert_eq!(
        message,
        "the saved text has ended: give a prompt to continue it with"
    );
    output(&["run", "--load-state", &state, "-n", "3", "Once"]);
}

#[cfg(unix)]
#[test]
fn an_interrupted_text_is_saved_and_goes_on() {
    let (_dir, file, state) = place();
    let args = [
        "-m",
        &format!("{}-f16.gguf", path(MODELS[2])),
        "--temp",
        "0",
    ]
    .map(str::to_owned);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let mut child = Command::new(assert_cmd::cargo::cargo_bin!("cellar"))
        .args([
            "run",
            "Once upon a time",
            "-n",
            "100000",
            "-c",
            "100000",
            "--save-state",
            &state,
        ])
        .args(&args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let mut first = vec![0; 60];
    stdout.read_exact(&mut first).unwrap();
    let id = child.id().to_string();
    Command::new("kill").args(["-INT", &id]).status().unwrap();
    stdout.read_to_end(&mut first).unwrap();
    let code = child.wait().unwrap().code();
    if code == Some(0) {
        // The story was over before the signal came.
        return;
    }
    assert_eq!(code, Some(130));
    assert!(file.exists());
    let first = String::from_utf8(first).unwrap();
    let go_on = ["run", "--load-state", &state, "-n", "30", "-c", "100000"];
    let (second, _) = output(&[&go_on[..], &args].concat());
    let told = format!("{}{second}", first.strip_suffix('\n').unwrap());
    // A token has a byte at least.
    let enough = told.len().to_string();
    let whole = ["run", "Once upon a time", "-n", &enough, "-c", "100000"];
    let (whole, _) = output(&[&whole[..], &args].concat());
    assert!(whole.starts_with(told.trim_end()), "{told}\n---\n{whole}");
}

#[test]
fn inspect_says_what_is_in_a_state() {
    let (_dir, _, state) = saved(&["Once upon a time"]);
    let (text, _) = output(&["state", "inspect", &state]);
    for wanted in [
        "state, format version 1, ",
        "model: llama, 6 layers, 1024 tokens in the vocabulary, ",
        "part 0: window full, 12 cells",
        "sequence 0: positions 0 to 11, 12 tokens, 0 snapshots; 13 ids known, 1 of them not evaluated yet",
        "k      f16           6         72         9216",
    ] {
        assert!(text.contains(wanted), "{wanted} in {text}");
    }
    let (_dir, _, state) = saved(&[
        "-m",
        &format!("{}-f16.gguf", path(MODELS[2])),
        "One day",
        "--snapshots",
        "4",
    ]);
    let shown = json(&["state", "inspect", &state, "--json"]);
    assert_eq!(shown["sequences"][0]["n_snapshots"], 4);
    assert_eq!(shown["model"]["architecture"], "mamba");
}

#[test]
fn states_of_other_models_are_refused_in_one_line() {
    let (dir, _, state) = saved(&["Once upon a time"]);
    let other = |model: &str, wanted: &str| {
        let (code, message) = failure(&["run", "--load-state", &state, "-m", model, "Hi"]);
        assert_eq!(code, 1);
        let start = format!("cannot load '{state}': the state is another model's: its {wanted}");
        assert!(message.starts_with(&start), "{message}");
    };
    let gemma = format!("{}-f16.gguf", path(MODELS[1]));
    other(&gemma, "architecture is llama, but here it is gemma3");
    let stretched = dir.path().join("stretched.gguf");
    let bytes = edited(|writer| {
        writer.set("llama.rope.freq_base", 5000.0f32);
    });
    std::fs::write(&stretched, bytes).unwrap();
    other(stretched.to_str().unwrap(), "RoPE is ");
}

#[test]
fn damaged_states_are_refused_in_one_line() {
    let (dir, file, state) = saved(&["Once upon a time"]);
    let whole = std::fs::read(&file).unwrap();
    let refused = |bytes: &[u8], wanted: &str| {
        std::fs::write(&file, bytes).unwrap();
        let model = model().display().to_string();
        for args in [
            &["run", "-m", &model, "--load-state", &state, "Hi"][..],
            &["state", "inspect", &state],
        ] {
            let (code, message) = failure(args);
            assert_eq!(code, 1, "{message}");
            assert!(
                message.contains(&state) && message.contains(wanted),
                "{wanted}: {message}"
            );
        }
    };
    refused(b"", "this is no saved state");
    refused(b"GGUF is something else", "this is no saved state");
    for i in 1..20 {
        let n = whole.len() * i / 20;
        refused(
            &whole[..n],
            &format!(
                "the state is cut off: {} bytes are needed, {n} are there",
                whole.len()
            ),
        );
        let mut flipped = whole.clone();
        flipped[n] ^= 1 << (i % 8);
        refused(&flipped, "the state is damaged: ");
    }
    let (code, message) = failure(&["state", "inspect", dir.path().to_str().unwrap()]);
    assert!(
        code == 1 && message.ends_with("it is a directory; name a file in it"),
        "{message}"
    );
}

#[test]
fn impossible_options_are_refused_before_any_text() {
    let (dir, _, state) = saved(&["Once upon a time"]);
    let load = ["run", "--load-state", &state, "Hi"];
    let refused = |more: &[&str]| failure(&[&load[..], more].concat());
    let (code, message) = refused(&["--chat"]);
    assert!(
        code == 1 && message.contains("no chat template: run it without --chat"),
        "{message}"
    );
    let (code, message) = refused(&["--chat", "--system", "Be kind."]);
    let why = "a system message comes before all others, and the saved text has begun already; \
               give it in the run that saves";
    assert!(code == 2 && message.ends_with(why), "{message}");
    let (code, message) = refused(&["--group-attention-factor", "2"]);
    let why = "a state does not record which of its tokens share positions; continue without groups, \
               or read the whole text again";
    assert!(code == 2 && message.ends_with(why), "{message}");
    let (code, _) = failure(&["run", "--load-state", "absent.state", "Hi"]);
    assert_eq!(code, 1);
    let nowhere = dir.path().join("no").join("where.state");
    for bad in [dir.path(), &nowhere] {
        let (code, message) = failure(&["run", "-p", "Hi", "--save-state", bad.to_str().unwrap()]);
        assert!(
            code == 1 && message.starts_with("cannot write '"),
            "{message}"
        );
    }
    // A context that is too small for what was saved.
    let (code, message) = failure(&["run", "--load-state", &state, "-c", "8", "Hi"]);
    assert_eq!(code, 1);
    assert!(
        message.ends_with(
            "12 saved tokens need as many cells of part 0, stream 0 (full): 8 of 8 are free; \
             choose a larger --ctx"
        ),
        "{message}"
    );
}

#[test]
fn a_chat_continues_from_a_state_with_the_next_message() {
    let template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}</s>\n\
                    {% endfor %}{% if add_generation_prompt %}assistant:{% endif %}";
    let (dir, _, state) = place();
    let model = with_template(&dir, template);
    let base = ["run", "-m", &model, "--temp", "0", "-n", "6", "--json"];
    let save = ["--chat", "--save-state", &state];
    let first = json(&[&base[..], &save, &["Hello", "--system", "Be kind."]].concat());
    let load = ["--chat", "--load-state", &state, "--save-state", &state];
    let second = json(&[&base[..], &load, &["And then?"]].concat());
    // What ends the answer, then the message; no second beginning.
    let turn = "</s>\nuser: And then?</s>\nassistant:";
    assert_eq!(second["prompt"], turn);
    let ids = |report: &serde_json::Value, key: &str| -> Vec<u64> {
        serde_json::from_value(report[key].clone()).unwrap()
    };
    // As if all of it had been one text: the last token of the answer was not evaluated before.
    let fed = ids(&second, "prompt_ids");
    let answer = ids(&first, "tokens");
    assert_eq!(
        fed[..2],
        [answer[5], 2],
        "the answer's last token, then its end"
    );
    assert!(!fed.contains(&1), "{fed:?}");
    let whole = [ids(&first, "prompt_ids"), answer, fed[1..].to_vec()].concat();
    let all: Vec<String> = whole.iter().map(u64::to_string).collect();
    let logits = dir.path().join("logits.safetensors");
    let args = ["logits", "-m", &model, "--kv-type", "f16", "--tokens"];
    let out = ["--out", logits.to_str().unwrap()];
    output(&[&args[..], &[&all.join(",")], &out].concat());
    assert_eq!(best(&logits), ids(&second, "tokens")[0]);
    // And once more.
    let third = json(&[&base[..], &load, &["Why?"]].concat());
    assert_eq!(third["prompt"], "</s>\nuser: Why?</s>\nassistant:");
    let n_before = whole.len() + 6 - 1;
    assert_eq!(third["loaded_tokens"], n_before);
    // A message is needed, and a template that shows the last one only has no place for it.
    let (code, message) = failure(&[&base[..5], &load].concat());
    assert!(code == 2 && message.starts_with("no prompt"), "{message}");
    let model = with_template(&dir, "{{ messages[-1].content }}");
    let args = ["run", "-m", &model, "--chat", "--load-state", &state, "Hi"];
    let (code, message) = failure(&args);
    assert!(
        code == 1 && message.contains("leaves out earlier messages"),
        "{message}"
    );
}

/// The token with the largest logit in the last row of a file that `cellar logits` wrote.
fn best(path: &Path) -> u64 {
    let (values, n_vocab) = logits(path);
    let last = values[values.len() - n_vocab..].iter().zip(0..);
    last.max_by(|a, b| a.0.total_cmp(b.0)).unwrap().1
}

/// The values of a file that `cellar logits` wrote, and how many there are in a row.
fn logits(path: &Path) -> (Vec<f32>, usize) {
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensor = file.tensor("logits").unwrap();
    let values = tensor.data().as_chunks::<4>().0.iter();
    let values = values.map(|bytes| f32::from_le_bytes(*bytes));
    (values.collect(), tensor.shape()[1])
}

/// Two best tokens that are nearer than this may change places where a state was saved in 8 bits,
/// and where it was saved in 4.
const NEAR_TIES: [(&str, usize, f32); 2] = [("q8_0", 34, 0.05), ("q4_0", 18, 0.5)];

/// A state that is saved narrower takes the bytes that its blocks take, and its text goes on as
/// that of f32 does, up to a token that f32 was nearly undecided about.
#[test]
fn states_saved_in_fewer_bits_are_smaller_and_go_on() {
    for (model, (saved_as, block_bytes, near_tie)) in MODELS
        .into_iter()
        .flat_map(|model| NEAR_TIES.map(|saved_as| (model, saved_as)))
    {
        let file = format!("{}-f16.gguf", path(model));
        let mut n_same = 0;
        for reference in references_in(format!("{}.reference.json", path(model))) {
            let args = ["-m", &file, "--kv-type", "f32", &reference.prompt];
            let (_exact_dir, exact_file, exact) = saved(&args);
            let (_dir, narrow_file, narrow) =
                saved(&[&args[..], &["--save-kv-type", saved_as]].concat());
            let rows = |state: &str| json(&["state", "inspect", state, "--json"])["rows"].clone();
            let (rows_of_exact, rows_of_narrow) = (rows(&exact), rows(&narrow));
            let mut n_saved = 0;
            let all = |rows: &serde_json::Value| rows.as_array().unwrap().clone();
            for (wide, small) in all(&rows_of_exact).iter().zip(all(&rows_of_narrow)) {
                let (wide_bytes, small_bytes) = (&wide["n_bytes"], &small["n_bytes"]);
                if ["k", "v"].contains(&small["kind"].as_str().unwrap()) {
                    assert_eq!(small["stored"], saved_as);
                    let blocks = wide_bytes.as_u64().unwrap() / (32 * 4);
                    assert_eq!(*small_bytes, blocks * block_bytes as u64, "{model}");
                } else {
                    // States of recurrent layers are always f32.
                    assert_eq!(
                        (&small["stored"], small_bytes),
                        (&wide["stored"], wide_bytes)
                    );
                }
                n_saved += wide_bytes.as_u64().unwrap() - small_bytes.as_u64().unwrap();
            }
            let n_bytes = |file: &Path| std::fs::metadata(file).unwrap().len();
            let less = n_bytes(&exact_file) - n_bytes(&narrow_file);
            // But for a few letters in what describes the rows.
            assert!(less.abs_diff(n_saved) < 500, "{model}: {less}, {n_saved}");
            let rest = (reference.greedy_ids.len() - 8).to_string();
            let args = [
                "run",
                "-m",
                &file,
                "--kv-type",
                "f32",
                "--temp",
                "0",
                "--json",
            ];
            let go_on = ["--load-state", &narrow, "-n", &rest];
            let report = json(&[&args[..], &go_on].concat());
            let told: Vec<u32> = serde_json::from_value(report["tokens"].clone()).unwrap();
            let wanted = &reference.greedy_ids[8..];
            let same = told.iter().zip(wanted).take_while(|(a, b)| a == b).count();
            n_same += same;
            if same < wanted.len().min(told.len()) {
                let ids = [&reference.ids[..], &reference.greedy_ids[..8 + same]].concat();
                let margin = margin(&file, &ids);
                assert!(
                    margin < near_tie,
                    "{model} {saved_as}: token {same}, margin {margin}"
                );
            }
        }
        assert!(n_same > 100, "{model} {saved_as}: {n_same} tokens");
    }
}

/// How far the second best token is behind the best, with K and V in f32.
fn margin(model: &str, ids: &[u32]) -> f32 {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("logits.safetensors");
    let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
    let args = ["logits", "-m", model, "--tokens", &ids.join(",")];
    output(&[&args[..], &["--out", file.to_str().unwrap()]].concat());
    let (values, n_vocab) = logits(&file);
    let mut last = values[values.len() - n_vocab..].to_vec();
    last.sort_by(f32::total_cmp);
    last[n_vocab - 1] - last[n_vocab - 2]
}

/// Rows that are no whole blocks of a type are refused with the numbers before a text is told that
/// could not be saved then; a file of that name stays.
#[test]
fn types_whose_blocks_do_not_divide_a_row_are_refused_with_the_numbers() {
    let (_dir, file, state) = place();
    std::fs::write(&file, "something else").unwrap();
    let model = path("tests/fixtures/gguf/granite_llama_cpp.gguf");
    let base = ["run", "-m", &model, "Hi", "-n", "3", "--save-state", &state];
    for (args, wanted) in [
        (
            &["--save-kv-type", "q8_0"][..],
            "layer 0: rows of 16 values cannot be saved as q8_0, whose blocks hold 32 values",
        ),
        (
            &["--kv-type", "q4_0"],
            "layer 0: K rows of 2 heads of 8 values cannot be stored as q4_0, whose blocks hold 32 \
             values",
        ),
        (
            &["--kv-type-k", "bf16", "--kv-type-v", "q5_1"],
            "layer 0: V rows of 2 heads of 8 values cannot be stored as q5_1, whose blocks hold 32 \
             values",
        ),
    ] {
        let (code, message) = failure(&[&base[..], args].concat());
        assert_eq!((code, &message[..]), (1, wanted));
        assert_eq!(std::fs::read(&file).unwrap(), b"something else");
    }
    output(&[&base[..], &["--save-kv-type", "bf16"]].concat());
    assert_ne!(std::fs::read(&file).unwrap(), b"something else");
}

/// With states of two bytes a text goes on as if it had not been interrupted; states in blocks take
/// fewer bytes, and are said to be what they are.
#[test]
fn states_of_other_types_are_saved_and_go_on() {
    let model = format!("{}-f16.gguf", path(MODELS[2]));
    let base = ["run", "-m", &model, "--temp", "0", "--state-type", "bf16"];
    let (whole, _) = output(&[&base[..], &["-n", "24", "One day"]].concat());
    let (_dir, file, state) = place();
    let half = ["-n", "12", "--save-state", &state, "One day"];
    let (first, _) = output(&[&base[..], &half].concat());
    let rest = ["-n", "12", "--load-state", &state];
    let (rest, _) = output(&[&base[..], &rest].concat());
    assert_eq!(
        format!("{}{rest}", first.strip_suffix('\n').unwrap()),
        whole
    );
    let stored = |state: &str| {
        let report = json(&["state", "inspect", state, "--json"]);
        report.to_string()
    };
    assert!(stored(&state).contains("bf16"), "{}", stored(&state));
    let bytes = |file: &Path| std::fs::metadata(file).unwrap().len();
    let (_dir, narrow, name) = place();
    let args = [
        "-n",
        "12",
        "--save-state",
        &name,
        "--save-state-type",
        "q8_0",
        "One day",
    ];
    output(&[&base[..], &args].concat());
    assert!(bytes(&narrow) < bytes(&file), "{}", bytes(&narrow));
    assert!(stored(&name).contains("q8_0"), "{}", stored(&name));
    // It goes on, if perhaps with other words, and in a memory of floats, too.
    let plain = ["run", "-m", &model, "-n", "4", "--load-state", &name];
    output(&plain);
}
