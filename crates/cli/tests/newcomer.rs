//! Command lines of a first day: a model as an argument, loops over questions, and
//! flags of other programs.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::process::{Command, Stdio};

use model_tests::fixture;

use crate::support::{cellar, failure, json, model, output, references};

const FEW: [&str; 5] = ["--temp", "0", "-n", "4", "--json"];

#[test]
fn a_model_is_an_argument() {
    let stories = model().display().to_string();
    let named = |args: &[&str]| json(&[args, &FEW[..]].concat());
    let wanted = named(&["run", "-m", &stories, "-p", "One day"]);
    assert_eq!(named(&["run", &stories, "One day"])["text"], wanted["text"]);
    let by_option = named(&["run", &stories, "-p", "One day"]);
    assert_eq!(by_option["model"], stories);
    assert_eq!(by_option["text"], wanted["text"]);
    let mut command = cellar();
    command.env("CELLAR_MODEL", &stories).args(["run", "One"]);
    let done = command.args(FEW).assert().success();
    let text = String::from_utf8(done.get_output().stdout.clone()).unwrap();
    let report: serde_json::Value = serde_json::from_str(text.trim()).unwrap();
    assert_eq!(report["model"], stories, "the default model");
    assert_eq!(
        report["prompt"], "One",
        "a word is a prompt where there is a model"
    );
    for command in [
        "chat",
        "batch",
        "bench",
        "logits",
        "perplexity",
        "imatrix",
        "graph",
        "plan",
        "inspect",
    ] {
        let needs: &[&str] = match command {
            "batch" => &["-f", "/absent.jsonl"],
            "logits" => &["--tokens", "1", "-o", "/absent/out"],
            "perplexity" | "imatrix" => &["-f", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")],
            _ => &[],
        };
        let (_, message) = failure(&[&[command, "absent.gguf"], needs].concat());
        assert!(message.contains("absent"), "{command}: {message}");
        let (code, message) = failure(&[&[command, "a.gguf", "-m", "b.gguf"], needs].concat());
        assert!(
            code == 2 && message.contains("cannot be used with"),
            "{message}"
        );
    }
}

/// The models that a line of each command opens.
#[test]
fn every_command_with_a_model_takes_it_before_texts_and_from_the_environment() {
    let encoders = fixture("encoders");
    let [encoder, reranker] =
        ["bert_tiny", "bert_rerank_tiny"].map(|name| encoders.join(name).display().to_string());
    for (before, after) in [
        (&["embed"][..], &["a cat"][..]),
        (&["rerank", "--query", "cat"], &["a cat", "a dog"]),
        (&["tokenize"], &["a cat"]),
        (
            &["kl", "--kv-type", "q8_0"],
            &["Once upon a time there was"],
        ),
        (&["graph"], &[]),
        (&["perplexity", "-c", "8", "-f"], &[]),
    ] {
        let notes = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(
            notes.path(),
            "Once upon a time there was a little girl. ".repeat(4),
        )
        .unwrap();
        let notes = notes.path().display().to_string();
        let model = match before[0] {
            "embed" => encoder.clone(),
            "rerank" => reranker.clone(),
            _ => model().display().to_string(),
        };
        let mut before = before.to_vec();
        if before.last() == Some(&"-f") {
            before.push(&notes);
        }
        let flag = output(&[&before[..], &["-m", &model], after].concat()).0;
        let word = output(&[&before[..], &[&*model], after].concat()).0;
        assert_eq!(word, flag, "{before:?}");
        let mut command = cellar();
        command
            .env("CELLAR_MODEL", &model)
            .args(&before)
            .args(after);
        let done = command.assert().success();
        let variable = String::from_utf8(done.get_output().stdout.clone()).unwrap();
        assert_eq!(variable, flag, "{before:?}");
    }
    // A word that could be a model's name, or is a file's, stays a text where it is alone.
    for text in ["cat/dog", "10:30", "src"] {
        let pieces = json(&["tokenize", "--json", "--no-bos", text])["pieces"].clone();
        let pieces: Vec<&str> = pieces
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|p| p.as_str())
            .collect();
        assert_eq!(pieces.concat().trim(), text);
    }
}

#[test]
fn what_is_no_model_says_what_to_write() {
    for (args, code, wanted) in [
        (
            &["run", "llama3"][..],
            2,
            "'cellar run -p llama3' continues it",
        ),
        (&["run", "absent.gguf"], 1, "No such file"),
        (&["run", "absent.gguf", "Hello you"], 1, "No such file"),
        (
            &["run", "llama3.2:1b"],
            1,
            "names are OWNER/NAME-GGUF[:QUANT]",
        ),
        (
            &["chat", "llama3.2:1b"],
            1,
            "'cellar pull OWNER/NAME-GGUF:Q4_K_M'",
        ),
        (
            &["run", "acme/missing", "Hi"],
            1,
            "'cellar pull acme/missing' downloads it",
        ),
        (
            &[
                "run",
                "-m",
                "https://huggingface.co/o/n-GGUF/blob/main/x.gguf",
                "Hi",
            ],
            1,
            "'cellar pull o/n-GGUF' downloads it",
        ),
        (
            &["run", "-m", "ollama.com/library/llama3", "Hi"],
            1,
            "'cellar pull OWNER/NAME' takes llama3",
        ),
        (
            &["run", "-m", "https://example.org/x.gguf", "Hi"],
            1,
            "download the file, and give its path",
        ),
        (
            &["run", "-m", "x.gguf", "two", "texts"],
            2,
            "put the prompt in quotes, \"two texts\"",
        ),
        (
            &["run", "x.gguf", "many", "words"],
            2,
            "put the prompt in quotes",
        ),
        (&["perplexity", "x.gguf", "-f", "/dev/null"], 1, "x.gguf"),
        (&["embed", "A text"], 2, "or set CELLAR_MODEL"),
        (&["rerank", "--query", "A", "B c"], 2, "or set CELLAR_MODEL"),
        (&["embed", "absent.gguf", "A text"], 1, "absent.gguf"),
        (
            &["embed", "acme/missing", "A text"],
            1,
            "'cellar pull acme/missing'",
        ),
        (
            &["tokenize", "-m", "x.gguf", "two", "texts"],
            2,
            "put the text in quotes, \"two texts\"",
        ),
        (
            &["tokenize", "A text", "-f", "notes.txt"],
            2,
            "-f 'notes.txt' cannot be used with the text 'A text'",
        ),
        (
            &["generate", "Hi"],
            2,
            "'cellar run MODEL PROMPT' answers a prompt",
        ),
        (&["quantize", "x.gguf"], 2, "'cellar convert"),
        (&["show", "x"], 2, "'cellar inspect MODEL' does it"),
        (&["ps"], 2, "/v1/models"),
        (&["push", "x"], 2, "are not uploaded"),
        (&["convert", "a", "b", "q4_0"], 2, "'--type q4_0'"),
        (&["graph", "dif", "llama", "qwen2"], 2, "'cellar graph diff"),
        (&["batch", "m.gguf", "Cargo.toml"], 2, "-f Cargo.toml"),
        (&["cp", "x", "y"], 2, "a model is a file"),
        (&["kl", "Once upon a time"], 2, "nothing to compare"),
    ] {
        if cfg!(not(feature = "hub")) && wanted.contains("pull") {
            continue;
        }
        let (is, message) = failure(args);
        assert!(
            is == code && message.contains(wanted),
            "{args:?}: {is} {message}"
        );
    }
}

#[test]
fn flags_of_llama_cpp_work_or_say_what_to_write() {
    let prompt = &references()[0].prompt;
    let wanted = json(&[&["run", "--raw", prompt], &FEW[..]].concat());
    for flags in [
        &["-no-cnv", "-fa", "on"][..],
        &["--raw", "-fa", "--jinja", "--mlock", "--no-mmap", "-v"],
        &[
            "--raw",
            "-tb",
            "2",
            "--no-warmup",
            "-s",
            "7",
            "--color",
            "auto",
        ],
    ] {
        let report = json(&[&["run"], flags, &[prompt], &FEW[..]].concat());
        assert_eq!(report["text"], wanted["text"], "{flags:?}");
        assert_eq!(report["prompt"], *prompt, "{flags:?}");
    }
    for (flags, wanted) in [
        (
            &["--yarn-ext-factor", "1"][..],
            "there is no --yarn-ext-factor here: YaRN",
        ),
        (&["-i"], "a chat is 'cellar chat'"),
    ] {
        let (code, message) = failure(&[&["run"], flags, &["Hi you"]].concat());
        assert!(code == 2 && message.contains(wanted), "{message}");
    }
}

#[test]
fn a_greedy_text_has_no_seed_and_a_quiet_run_no_statistics() {
    let (_, stderr) = output(&["run", "-n", "1", "--temp", "0"]);
    assert!(
        stderr.contains("loaded in") && !stderr.contains("seed"),
        "{stderr}"
    );
    let (_, stderr) = output(&["run", "-n", "1", "--temp", "0", "--seed", "5"]);
    assert!(stderr.contains("seed 5"), "{stderr}");
    let (_, stderr) = output(&["run", "-n", "1"]);
    assert!(stderr.contains("seed "), "{stderr}");
    assert_eq!(output(&["run", "-n", "1", "-q"]).1, "");
}

/// What a shell prints, in which `$CELLAR` is the program and `$DIR` a directory with some texts.
#[cfg(unix)]
fn shell(script: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(
        dir.path().join("q.txt"),
        "One day a\nTwo day b\nSix day c\n",
    )
    .unwrap();
    std::fs::write(dir.path().join("notes.txt"), "The notes.\n").unwrap();
    let done = Command::new("sh")
        .args(["-c", script])
        .env("CELLAR", assert_cmd::cargo::cargo_bin!("cellar"))
        .env("DIR", dir.path())
        .env("CUDA_VISIBLE_DEVICES", "")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(done.status.success(), "{done:?}");
    String::from_utf8(done.stdout).unwrap()
}

/// The prompts of the reports that a shell prints.
#[cfg(unix)]
fn prompts(script: &str) -> Vec<String> {
    let reports = shell(script);
    let prompt = |line: &str| -> String {
        let report: serde_json::Value = serde_json::from_str(line).unwrap();
        report["prompt"].as_str().unwrap().to_owned()
    };
    reports.lines().map(prompt).collect()
}

#[cfg(unix)]
#[test]
fn a_loop_answers_each_line() {
    let all = ["One day a", "Two day b", "Six day c"];
    let of_file = "while read -r q; do $CELLAR run -n 0 --json \"$q\"; done < $DIR/q.txt";
    assert_eq!(prompts(of_file), all);
    let of_pipe =
        "cat $DIR/q.txt | while read -r q; do $CELLAR run -n 0 --json --no-stdin \"$q\"; done";
    assert_eq!(prompts(of_pipe), all);
}

#[cfg(unix)]
#[test]
fn notes_come_before_the_question() {
    let wanted = ["The notes.\n\nSum it up."];
    for script in [
        "cat $DIR/notes.txt | $CELLAR run -n 0 --json 'Sum it up.'",
        "$CELLAR run -n 0 --json 'Sum it up.' < $DIR/notes.txt",
        "$CELLAR run -n 0 --json -f $DIR/notes.txt 'Sum it up.'",
        // Slower than a pipe may be that nothing asked for.
        "(sleep 2; cat $DIR/notes.txt) | $CELLAR run -n 0 --json -f - 'Sum it up.'",
        // One that begins is read to its end.
        "(printf 'The '; sleep 2; echo notes.) | $CELLAR run -n 0 --json 'Sum it up.'",
    ] {
        assert_eq!(prompts(script), wanted, "{script}");
    }
    let left = "cat $DIR/notes.txt | $CELLAR run -n 0 --json --no-stdin 'Sum it up.'";
    assert_eq!(prompts(left), ["Sum it up."]);
}

#[test]
fn a_graph_is_written_to_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("graph.json").display().to_string();
    let args = ["graph", "--arch", "llama", "--format", "json"];
    assert_eq!(output(&[&args[..], &["-o", &file]].concat()).0, "");
    let written = std::fs::read_to_string(&file).unwrap();
    assert_eq!(written, output(&args).0);
    assert_eq!(written, output(&["graph", "llama", "--format", "json"]).0);
    let alike = output(&["graph", "diff", &file, "llama"]).0;
    assert_eq!(alike, "the graphs are alike\nlayers 0-1: the same\n");
}
