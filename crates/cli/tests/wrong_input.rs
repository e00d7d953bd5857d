//! Whatever is wrong: one clear line on stderr, exit code 1 or 2, no panic.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::path::Path;

use crate::support::{cellar, directory, edited, failure, model};
use model_core::gguf::Value;

/// The commands that read a model, given this one.
fn with_model(path: &Path) -> Vec<Vec<String>> {
    let path = path.to_str().unwrap();
    let commands: [&[&str]; 6] = [
        &["run", "-m", path, "Hi"],
        &["inspect", path],
        &["graph", "-m", path],
        &["tokenize", "-m", path, "Hi"],
        &["logits", "-m", path, "--tokens", "1", "--out", "/dev/null"],
        &["bench", "-m", path, "-p", "2", "-n", "2", "-r", "1"],
    ];
    commands
        .iter()
        .map(|args| args.iter().map(|&a| a.to_owned()).collect())
        .collect()
}

#[track_caller]
fn all_fail(path: &Path, wanted: &str) {
    for args in with_model(path) {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let (code, message) = failure(&args);
        assert_eq!(code, 1, "{args:?}: {message}");
        assert!(message.contains(wanted), "{args:?}: {message}");
    }
}

#[test]
fn files_that_are_no_models() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    all_fail(&dir.path().join("absent.gguf"), "No such file");
    all_fail(dir.path(), "config.json': No such file");
    all_fail(&file("empty.gguf", b""), "the file is empty");
    all_fail(&file("text.gguf", b"This is a text."), "not a GGUF file");
    let mut absurd = b"GGUF\x03\0\0\0".to_vec();
    absurd.extend([0xff; 16]);
    all_fail(&file("absurd.gguf", &absurd), "absurd.gguf");
}

#[test]
fn a_truncated_model_at_fifty_places() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cut.gguf");
    let whole = std::fs::read(model()).unwrap();
    for i in 0..50 {
        // Denser at the start, where the header is.
        let n = whole.len() * (i * i) / (50 * 50);
        std::fs::write(&path, &whole[..n]).unwrap();
        let (code, message) = failure(&["run", "-m", path.to_str().unwrap(), "Hi"]);
        assert_eq!(code, 1, "{n} bytes: {message}");
        assert!(message.contains("cut.gguf"), "{n} bytes: {message}");
    }
}

#[test]
fn models_that_cannot_be_run() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("other.gguf");
    let cases: [(&str, Value, &str); 9] = [
        (
            "general.type",
            "adapter".into(),
            "it is a LoRA adapter, not a model: give it with --lora, next to the model",
        ),
        (
            "general.type",
            "imatrix".into(),
            "it is an importance matrix, not a model: give it with --imatrix of 'cellar convert'",
        ),
        (
            "general.architecture",
            "clip".into(),
            "it is a tower for pictures, not a model: give it with --mmproj",
        ),
        (
            "general.architecture",
            "elephant".into(),
            "unknown architecture 'elephant'; known are 1",
        ),
        (
            "llama.attention.head_count_kv",
            3u32.into(),
            "llama.attention.head_count_kv: 3 key/value heads do not divide 8 query heads",
        ),
        (
            "llama.block_count",
            7u32.into(),
            "tensor 'blk.6.attn_norm.weight' is missing; the model needs it as [128]",
        ),
        // That of PLaMo 2.
        (
            "tokenizer.ggml.model",
            "plamo2".into(),
            "tokenizer: tokenizer model \"plamo2\" is not supported",
        ),
        (
            "tokenizer.ggml.precompiled_charsmap",
            "table".into(),
            "metadata 'tokenizer.ggml.precompiled_charsmap' is ",
        ),
        (
            "tokenizer.ggml.model",
            "abacus".into(),
            "tokenizer: tokenizer model \"abacus\" is not supported",
        ),
    ];
    for (key, value, wanted) in cases {
        let bytes = edited(|writer| {
            writer.set(key, value);
        });
        std::fs::write(&path, bytes).unwrap();
        let path = path.to_str().unwrap();
        let (code, message) = failure(&["run", "-m", path, "Hi"]);
        assert_eq!(code, 1);
        let wanted = format!("'{path}': {wanted}");
        assert!(message.starts_with(&wanted), "{message}");
    }
    // Looking into it is still possible.
    let shown = cellar()
        .args(["inspect", path.to_str().unwrap()])
        .assert()
        .success();
    let shown = String::from_utf8(shown.get_output().stdout.clone()).unwrap();
    assert!(
        shown.contains("cannot be used") && shown.contains("abacus"),
        "{shown}"
    );
}

#[test]
fn prompts_that_cannot_be() {
    let (code, message) = failure(&["run", "Once upon a time", "-c", "4"]);
    assert_eq!(code, 1);
    assert_eq!(
        message,
        "the prompt of 5 tokens does not fit the context of 4; choose a larger --ctx or a shorter \
         prompt"
    );
    let model = model();
    let model = model.to_str().unwrap();
    let (code, message) = failure(&["run", "-m", model]);
    assert_eq!(code, 2);
    assert!(message.starts_with("no prompt"), "{message}");
    let (code, message) = failure(&["run", "-m", model, "-p", "One day", "Hi"]);
    assert_eq!(code, 2, "{message}");
    assert!(
        message.contains("two prompts: leave out -p or 'Hi'"),
        "{message}"
    );
    let (code, message) = failure(&["run", "-p", "Hi", "-f", "prompt.txt"]);
    assert_eq!(code, 1);
    assert!(message.contains("'prompt.txt'"), "{message}");
    let (code, message) = failure(&["run", "", "--no-bos"]);
    assert_eq!((code, message.as_str()), (1, "the prompt has no tokens"));
    let (code, message) = failure(&["run", "-p", "Hi", "--chat"]);
    assert_eq!(code, 1);
    assert!(message.contains("no chat template"), "{message}");
    let (code, message) = failure(&["run", "-f", "/"]);
    assert_eq!(
        (code, message.as_str()),
        (1, "cannot read '/': it is a directory; name a file in it")
    );
    let (code, message) = failure(&["run", "-f", "/nowhere/prompt.txt"]);
    assert_eq!(code, 1);
    assert!(
        message.starts_with("cannot read '/nowhere/prompt.txt': No such"),
        "{message}"
    );
}

#[test]
fn flags_out_of_range() {
    let cases: [(&[&str], &str); 41] = [
        (
            &["run", "-c", "-5"],
            "'--ctx <N>': a number of tokens from 1 to 1073741824 is needed, 0 for the trained length",
        ),
        (&["run", "-c", "99999999999"], "'--ctx <N>'"),
        (&["run", "--ubatch", "0"], "'--ubatch <N>'"),
        (&["run", "-b", "0"], "'--batch <N>'"),
        (&["run", "-t", "0"], "'--threads <N>'"),
        (&["run", "-n", "-3"], "'--predict <N>'"),
        (
            &["run", "--temp", "-0.5"],
            "'-0.5' for '--temp <T>': a number of at least 0",
        ),
        (
            &["run", "--temp", "NaN"],
            "'NaN' for '--temp <T>': a number of at least 0",
        ),
        (&["run", "--temp", "warm"], "'--temp <T>'"),
        (
            &["run", "--top-p", "1.5"],
            "'1.5' for '--top-p <P>': a number between 0 and 1",
        ),
        (
            &["run", "--min-p", "-1"],
            "'-1' for '--min-p <P>': a number between 0 and 1",
        ),
        (&["run", "--top-k", "-2"], "'--top-k <K>'"),
        (
            &["run", "--repeat-penalty", "0"],
            "'0' for '--repeat-penalty <X>': a number above 0",
        ),
        (&["run", "--stop", ""], "--stop number 1 is empty"),
        (&["run", "--kv-type", "q9"], "unknown KV type 'q9'"),
        (&["run", "--kv-type-k", "f8"], "unknown KV type 'f8'"),
        (&["run", "--kv-type-v", ""], "unknown KV type ''"),
        (
            &["run", "--kv-type-layer", "3-1=f16"],
            "'3-1=f16' is not of the form LAYERS=TYPE",
        ),
        (&["run", "--kv-type-layer", "0=q9"], "unknown KV type 'q9'"),
        (&["run", "--kv-type-old", "q4"], "unknown KV type 'q4'"),
        (
            &["run", "--kv-type-old", "q4_0", "--kv-recent", "0"],
            "'--kv-recent <N>'",
        ),
        (&["run", "--kv-sinks", "4"], "--kv-type-old TYPE"),
        (&["run", "--kv-rotation", "maybe"], "'maybe'"),
        (&["kl", ""], "less than two tokens"),
        (&["run", "--backend", "abacus"], "'abacus'"),
        (&["run", "--no-bos", "--chat", "Hi"], "cannot be used with"),
        (
            &["run", "--frobnicate"],
            "unexpected argument '--frobnicate'",
        ),
        (
            &["graph", "--tokens", "2", "--outputs", "3"],
            "only 2 tokens go in",
        ),
        (&["bench", "-p", "0", "-n", "0"], "nothing to measure"),
        (
            &["bench", "-p", "8", "-c", "4"],
            "64 tokens do not fit the context of 4",
        ),
        (
            &[
                "bench",
                "--seqs",
                "4",
                "--depth",
                "10",
                "--share-depth",
                "-c",
                "2000",
            ],
            "2058 tokens do not fit the context of 2000",
        ),
        (&["bench", "--share-depth"], "--depth"),
        (&["bench", "--share-depth", "--depth", "4"], "--seqs"),
        (&["bench", "--clients", "2", "--seqs", "2"], "--seqs"),
        (&["bench", "--clients", "2", "-n", "0"], "at least 1"),
        (&["bench", "--clients", "2", "-p", "0"], "at least 1"),
        (&["bench", "--step-ms", "9"], "--clients"),
        (&["bench", "--arrivals", "2/s"], "--clients"),
        (&["bench", "--clients", "2", "--seed", "2"], "--arrivals"),
        (
            &["bench", "--clients", "2", "--arrivals", "2/h"],
            "2/s or 30/min",
        ),
        (
            &["bench", "--times", "--backend", "candle"],
            "does not profile its steps",
        ),
    ];
    for (args, wanted) in cases {
        let (code, message) = failure(args);
        assert_eq!(code, 2, "{args:?}: {message}");
        assert!(message.contains(wanted), "{args:?}: {message}");
    }
}

#[test]
fn a_context_that_no_machine_has() {
    let (code, message) = failure(&["run", "-c", "1073741824"]);
    assert_eq!(code, 1);
    assert!(
        message.starts_with("a context of 1073741824 cells takes 1.6"),
        "{message}"
    );
    assert!(message.contains("TiB, but this machine has"), "{message}");
    // The largest that fits, which does.
    let words: Vec<&str> = message.split(' ').collect();
    let at = words.iter().position(|w| *w == "--ctx").unwrap();
    let largest: u32 = words[at + 1].parse().unwrap();
    assert!((1 << 16..1 << 30).contains(&largest), "{message}");
}

#[test]
fn tokens_that_are_none() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out.safetensors");
    let out = out.to_str().unwrap();
    let cases: [(&[&str], i32, &str); 6] = [
        (&["--tokens", "1,two"], 2, "'two' is no token id"),
        (&["--tokens", "1,-2"], 2, "'-2' is no token id"),
        (
            &["--tokens", "1,1024"],
            2,
            "1024 is no token of this model, which has 1024",
        ),
        (&["--tokens", ""], 2, "a sequence without tokens"),
        (&[], 2, "no tokens: give --tokens"),
        (
            &["--tokens", "1,2,3", "-c", "2"],
            1,
            "3 tokens do not fit the context of 2",
        ),
    ];
    for (args, code, wanted) in cases {
        let (got, message) = failure(&[&["logits", "--out", out], args].concat());
        assert_eq!(got, code, "{args:?}: {message}");
        assert!(message.contains(wanted), "{args:?}: {message}");
    }
    let missing = dir.path().join("no/such/dir/out");
    let (code, message) = failure(&[
        "logits",
        "--tokens",
        "1",
        "--out",
        missing.to_str().unwrap(),
    ]);
    assert_eq!(code, 1);
    assert!(message.starts_with("cannot write"), "{message}");
    assert_eq!(
        std::fs::read_dir(dir.path()).unwrap().count(),
        0,
        "nothing was left behind"
    );
}

#[test]
fn graphs_that_are_none() {
    let (code, message) = failure(&["graph", "--arch", "elephant"]);
    assert_eq!(code, 1);
    assert!(
        message.contains("elephant") && message.contains("docs/architectures.md"),
        "{message}"
    );
    let (code, message) = failure(&["graph", "diff", "llama", "elephant"]);
    assert_eq!(code, 1);
    assert!(
        message.contains("neither a file nor a known architecture"),
        "{message}"
    );
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("graph.json");
    std::fs::write(&path, "{}").unwrap();
    let (code, message) = failure(&["graph", "diff", path.to_str().unwrap(), "llama"]);
    assert_eq!(code, 1);
    assert!(
        message.contains("neither a GGUF file nor a graph"),
        "{message}"
    );
}

#[test]
fn long_contexts_that_cannot_be_are_usage_errors() {
    let cases: [(&[&str], &str); 5] = [
        (&["--keep", "3"], "--context-shift"),
        (
            &["--group-attention-width", "8"],
            "--group-attention-factor",
        ),
        (&["--group-attention-factor", "0"], "0"),
        (
            &[
                "--group-attention-factor",
                "3",
                "--group-attention-width",
                "8",
            ],
            "a width of 8 must be a multiple of the factor 3",
        ),
        (
            &["--context-shift", "--group-attention-factor", "2"],
            "--group-attention-factor",
        ),
    ];
    for (args, wanted) in cases {
        let args = [&["run", "-p", "Hi"], args].concat();
        let (code, message) = failure(&args);
        assert_eq!(code, 2, "{args:?}: {message}");
        assert!(message.contains(wanted), "{args:?}: {message}");
    }
    for (keep, is_fine) in [("5", true), ("6", false), ("9", false)] {
        let args = [
            "run",
            "-p",
            "Hi",
            "-c",
            "8",
            "-n",
            "20",
            "--context-shift",
            "--keep",
            keep,
        ];
        if is_fine {
            cellar().args(args).assert().success();
            continue;
        }
        let (code, message) = failure(&args);
        assert_eq!(code, 2, "{message}");
        let wanted = format!(
            "--keep {keep} leaves no tokens to drop from a context of 8: keep at most 5, or choose a \
             larger --ctx"
        );
        assert_eq!(message, wanted);
    }
}

/// Before a text is told that would break off.
#[test]
fn a_context_that_cannot_be_shifted_is_refused_at_once() {
    let made = directory("jamba");
    let model = &made.path().display().to_string();
    for way in [&["--context-shift"][..], &["--group-attention-factor", "2"]] {
        let (code, message) = failure(&[&["run", "-m", model, "Hi"], way].concat());
        assert_eq!(code, 1);
        assert_eq!(
            message,
            "the context of this model cannot be shifted: layer 0 keeps one state of all tokens, and \
             none can be taken out of it"
        );
    }
}

/// Types for layers that the model does not have are refused before anything is allocated.
#[test]
fn kv_types_that_do_not_fit_the_model_are_refused() {
    let (code, message) = failure(&["run", "-p", "Hi", "--kv-type-layer", "4-6=q8_0"]);
    assert_eq!(code, 1, "{message}");
    let wanted = "types were chosen for layer 6, but the model has 6 layers";
    assert!(message.contains(wanted), "{message}");
    let old = [
        "run",
        "-p",
        "Hi",
        "--kv-type-old",
        "q4_0",
        "--kv-recent",
        "9",
    ];
    let (code, message) = failure(&[&old[..], &["--kv-sinks", "512"]].concat());
    assert_eq!(code, 1, "{message}");
    let wanted = "the number of first tokens is 512: it must be between 1 and 511";
    assert!(message.contains(wanted), "{message}");
}

/// Before anything is computed, with the way out.
#[test]
fn states_that_a_model_cannot_round_are_refused() {
    let made = directory("xlstm");
    let model = &made.path().display().to_string();
    let (code, message) = failure(&["run", "-m", model, "Hi", "--state-type", "bf16"]);
    assert_eq!(code, 1, "{message}");
    for wanted in [
        "xlstm models keep the states of",
        "as f32 only, not as bf16",
        "--state-type f32",
    ] {
        assert!(message.contains(wanted), "{message}");
    }
    let (code, message) = failure(&["run", "-p", "Hi", "--state-type", "q8_0"]);
    assert_eq!(code, 2, "{message}");
    assert!(
        message.contains("choose one of f32, f16, bf16"),
        "{message}"
    );
}
