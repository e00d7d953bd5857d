//! `cellar run`: the same text on every way, and every way to give a prompt or to end.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::support;

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

use crate::support::{BACKENDS, cellar, json, output, references, with_template};

#[test]
fn greedy_text_is_the_reference_s_on_every_way() {
    let ways = [
        ["--kv-type", "f32", "--ubatch", "512"],
        ["--kv-type", "f16", "--ubatch", "7"],
        ["--kv-type", "f32", "--ubatch", "1"],
    ];
    for backend in BACKENDS {
        for (reference, way) in references().iter().zip(ways) {
            for streams in [&[][..], &["--streams"]] {
                let n = reference.greedy_ids.len().to_string();
                let mut args = vec!["run", &reference.prompt, "--temp", "0", "-n", &n];
                args.extend(["--backend", backend]);
                args.extend(way);
                args.extend(streams);
                let wanted = format!("{}{}\n", reference.prompt, reference.continuation);
                assert_eq!(output(&args).0, wanted, "{args:?}");
            }
        }
    }
}

#[test]
fn without_a_prompt_there_is_a_story() {
    let (story, statistics) = output(&["run", "--temp", "0", "-n", "12"]);
    assert_eq!(
        story,
        "Once upon a time, there was a little girl named Lily. She loved to\n"
    );
    let line = statistics.strip_suffix('\n').unwrap();
    assert!(!line.contains('\n'), "one line: {line}");
    assert!(
        line.contains("prompt: 5 tokens") && line.contains("generated: 12 tokens"),
        "{line}"
    );
}

#[test]
fn a_prompt_comes_from_argument_file_or_pipe() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prompt.txt");
    std::fs::write(&file, "One day\n").unwrap();
    let file = file.to_str().unwrap();
    let wanted = output(&["run", "One day", "--temp", "0", "-n", "5"]).0;
    for option in ["-p", "--prompt"] {
        let args = ["run", option, "One day", "--temp", "0", "-n", "5"];
        assert_eq!(output(&args).0, wanted, "{option}");
    }
    assert_eq!(
        output(&["run", "-f", file, "--temp", "0", "-n", "5"]).0,
        wanted
    );
    let piped = cellar()
        .args(["run", "--temp", "0", "-n", "5"])
        .write_stdin("One day\n")
        .assert();
    piped.success().stdout(wanted);
}

#[test]
fn json_is_all_of_the_output() {
    let reference = &references()[0];
    let args = [
        "run",
        &reference.prompt,
        "--temp",
        "0",
        "-n",
        "20",
        "--json",
        "--seed",
        "9",
    ];
    let report = json(&args);
    assert_eq!(
        report["tokens"],
        serde_json::json!(reference.greedy_ids[..20])
    );
    assert_eq!(report["prompt_ids"], serde_json::json!(reference.ids));
    assert_eq!(report["prompt_tokens"], reference.ids.len());
    assert_eq!(report["seed"], 9);
    assert_eq!(report["finish"]["reason"], "length");
    assert!(
        reference
            .continuation
            .starts_with(report["text"].as_str().unwrap())
    );
    for key in [
        "load_ms",
        "prompt_tokens_per_second",
        "generation_tokens_per_second",
    ] {
        assert!(report["timings"][key].as_f64().unwrap() > 0.0, "{key}");
    }
    let (stdout, _) = output(&args);
    assert_eq!(stdout.lines().count(), 1);
}

#[test]
fn json_lines_stream_the_pieces_and_end_with_the_report() {
    let args = ["run", "--temp", "0", "-n", "12"];
    let report = json(&[&args[..], &["--json"]].concat());
    let (stdout, _) = output(&[&args[..], &["--jsonl"]].concat());
    let lines: Vec<serde_json::Value> = stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let (last, pieces) = lines.split_last().unwrap();
    assert_eq!(last["text"], report["text"]);
    let text: String = pieces
        .iter()
        .map(|line| line["piece"].as_str().unwrap())
        .collect();
    assert_eq!(report["text"], text);
    let tokens: Vec<&serde_json::Value> = pieces.iter().map(|line| &line["token"]).collect();
    assert_eq!(serde_json::json!(tokens), report["tokens"]);
    let (code, message) = support::failure(&["run", "--json", "--jsonl"]);
    assert!(
        code == 2 && message.contains("cannot be used with"),
        "{message}"
    );
}

#[test]
fn thinking_is_apart_from_the_answer() {
    let dir = tempfile::tempdir().unwrap();
    let model = with_template(&dir, "{{ messages[0].content }}<think>\n");
    let base = ["run", "-m", &model, "--temp", "0", "-n", "8", "Hello"];
    assert_eq!(output(&base).0, "\n", "hidden in a pipe");
    let shown = output(&[&base[..], &["--show-thinking"]].concat()).0;
    let report = json(&[&base[..], &["--json"]].concat());
    assert_eq!(report["thinking"], shown.trim());
    assert_eq!(report["answer"], "");
    assert_eq!(report["text"].as_str().unwrap().trim(), shown.trim());
}

#[test]
fn thinking_ends_after_its_budget() {
    let dir = tempfile::tempdir().unwrap();
    let model = with_template(&dir, "{{ messages[0].content }}<think>\n");
    let report = |budget: &str| {
        json(&[
            "run",
            "-m",
            &model,
            "--temp",
            "0",
            "-n",
            "30",
            "Hello",
            "--json",
            "--reasoning-budget",
            budget,
        ])
    };
    let (free, short) = (report("-1"), report("3"));
    assert_eq!(free["answer"], "");
    let thinking = short["thinking"].as_str().unwrap();
    assert!(
        !thinking.is_empty() && free["thinking"].as_str().unwrap().starts_with(thinking),
        "{short}"
    );
    assert_ne!(short["answer"], "");
    assert_eq!(
        short["tokens"].as_array().unwrap()[..3],
        free["tokens"].as_array().unwrap()[..3]
    );
    assert!(
        short["text"].as_str().unwrap().contains("</think>"),
        "{short}"
    );
    for (flags, wanted) in [
        (&["--reasoning-budget", "-3"][..], "-1 for no limit"),
        (&["--reasoning-budget", "3", "--raw"], "cannot be used with"),
        (&["--reasoning-budget", "3"], "needs a chat template"),
    ] {
        let (code, message) = support::failure(&[&["run", "Hi there", "-n", "1"], flags].concat());
        assert!(code == 2 && message.contains(wanted), "{message}");
    }
}

#[test]
fn the_same_seed_tells_the_same_story() {
    let story = |seed| output(&["run", "--seed", seed, "-n", "30"]).0;
    assert_eq!(story("1"), story("1"));
    assert_ne!(story("1"), story("2"));
    let seeds = [0, 1].map(|_| {
        json(&["run", "-n", "1", "--json"])["seed"]
            .as_u64()
            .unwrap()
    });
    assert_ne!(seeds[0], seeds[1], "random without --seed");
}

#[test]
fn text_ends_at_stop_strings_and_where_the_context_is_full() {
    let args = ["run", "--temp", "0", "--stop", " named", "--no-echo"];
    assert_eq!(output(&args).0, ", there was a little girl\n");
    let report = json(&["run", "--temp", "0", "-c", "12", "-n", "100", "--json"]);
    assert_eq!(report["finish"]["reason"], "context_full");
    assert_eq!(report["tokens"].as_array().unwrap().len(), 8);
}

#[test]
fn no_bos_leaves_it_out() {
    let report = json(&["run", "One day", "--no-bos", "-n", "1", "--json"]);
    assert_eq!(
        report["prompt_ids"],
        serde_json::json!(references()[1].ids[1..3])
    );
}

#[test]
fn chat_renders_the_model_s_template_with_one_bos() {
    let template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n\
                    {% endfor %}{% if add_generation_prompt %}assistant:{% endif %}";
    let dir = tempfile::tempdir().unwrap();
    let model = with_template(&dir, template);
    let base = [
        "run", "-m", &model, "--temp", "0", "-n", "3", "--json", "--chat",
    ];
    let report = json(&[&base[..], &["Hello", "--system", "Be kind."]].concat());
    assert_eq!(
        report["prompt"],
        "<s>system: Be kind.\nuser: Hello\nassistant:"
    );
    let ids: Vec<u64> = serde_json::from_value(report["prompt_ids"].clone()).unwrap();
    assert_eq!(ids.iter().filter(|&&id| id == 1).count(), 1, "{ids:?}");
    let (stdout, _) = output(&[&base[..], &["Hello"]].concat());
    assert!(
        !stdout.starts_with("<s>"),
        "the rendered prompt is not shown"
    );
}

#[test]
fn a_model_with_a_template_answers_unless_it_is_told_not_to() {
    let dir = tempfile::tempdir().unwrap();
    let model = with_template(
        &dir,
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:",
    );
    let base = ["run", "-m", &model, "--temp", "0", "-n", "3", "Hello"];
    let prompt = |more: &[&str]| json(&[&base[..], &["--json"], more].concat())["prompt"].clone();
    for flags in [&[][..], &["--chat"]] {
        assert_eq!(prompt(flags), "user: Hello\nassistant:", "{flags:?}");
    }
    for flags in [&["--raw"][..], &["--no-bos"]] {
        assert_eq!(prompt(flags), "Hello", "{flags:?}");
    }
    let system = prompt(&["--system", "Be kind."]);
    assert_eq!(system, "system: Be kind.\nuser: Hello\nassistant:");
    assert!(
        output(&[&base[..], &["--raw"]].concat())
            .0
            .starts_with("Hello")
    );
    assert!(!output(&base).0.starts_with("Hello"), "an answer alone");
    let refused = |args: &[&str]| support::failure(args);
    let (code, message) = refused(&["run", "-p", "Hello", "--system", "Be kind."]);
    assert!(
        code == 2 && message.contains("--system needs a chat template"),
        "{message}"
    );
    let broken = with_template(&dir, "{{ raise_exception('no way') }}");
    let (code, message) = refused(&["run", "-m", &broken, "Hello"]);
    assert!(
        code == 1 && message.contains("no way; --raw continues"),
        "{message}"
    );
}

#[test]
fn standard_input_comes_before_the_argument() {
    let prompt = |input: &str, args: &[&str]| {
        let base = ["run", "-n", "0", "--json"];
        let mut command = cellar();
        let done = command.args([&base[..], args].concat()).write_stdin(input);
        let stdout = done.assert().success().get_output().stdout.clone();
        let text = String::from_utf8(stdout).unwrap();
        let report: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        report["prompt"].as_str().unwrap().to_owned()
    };
    assert_eq!(
        prompt("One\nday\n", &["Who was it?"]),
        "One\nday\n\nWho was it?"
    );
    assert_eq!(prompt("One day\n", &["-p", "Who?"]), "One day\n\nWho?");
    assert_eq!(prompt("", &["-p", "Who?"]), "Who?");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prompt.txt");
    std::fs::write(&file, "One night").unwrap();
    let file = file.to_str().unwrap();
    assert_eq!(prompt("One day\n", &["-f", file]), "One night");
}

#[test]
fn a_pipe_that_brings_nothing_is_not_waited_for() {
    let mut child = Command::new(assert_cmd::cargo::cargo_bin!("cellar"))
        .args(["run", "-p", "Hello", "-n", "0"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    stderr.read_line(&mut line).unwrap();
    assert!(
        line.starts_with("(nothing came on standard input within a second"),
        "{line}"
    );
    drop(child.stdin.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let mut child = Command::new(assert_cmd::cargo::cargo_bin!("cellar"))
        .args(["run", "--temp", "0", "-n", "200"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 4];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    assert_eq!(&first, b"Once");
    let done = child.wait_with_output().unwrap();
    assert_eq!(done.status.code(), Some(0));
    assert_eq!(String::from_utf8(done.stderr).unwrap(), "");
}

#[cfg(unix)]
#[test]
fn an_interrupt_ends_the_text_with_statistics() {
    let mut child = Command::new(assert_cmd::cargo::cargo_bin!("cellar"))
        .args(["run", "-c", "100000", "--ubatch", "1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let long = "Once upon a time ".repeat(20_000 / 4);
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), long.as_bytes()).unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    stderr.read_line(&mut line).unwrap();
    assert!(
        line.starts_with("warning: a context of 100000 tokens"),
        "{line}"
    );
    let id = child.id().to_string();
    assert!(
        Command::new("kill")
            .args(["-INT", &id])
            .status()
            .unwrap()
            .success()
    );
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(rest.contains("interrupted"), "{rest}");
}

#[test]
fn a_text_goes_on_behind_the_end_of_its_context() {
    let args = |more: &[&'static str]| {
        let mut args = vec![
            "run",
            "Once upon a time",
            "--temp",
            "0",
            "-n",
            "50",
            "--json",
        ];
        args.extend(["--kv-type", "f32"]);
        args.extend(more);
        args
    };
    let whole = json(&args(&["-c", "64"]));
    let ends = json(&args(&["-c", "24"]));
    assert_eq!(ends["finish"]["reason"], "context_full");
    let shifted = json(&args(&["-c", "24", "--context-shift", "--keep", "4"]));
    let grouped = json(&args(&[
        "-c",
        "64",
        "--group-attention-factor",
        "2",
        "--group-attention-width",
        "16",
    ]));
    let alone = json(&args(&["-c", "64", "--group-attention-factor", "1"]));
    let tokens = |report: &serde_json::Value| report["tokens"].as_array().unwrap().clone();
    let n_first = tokens(&ends).len();
    for other in [&whole, &shifted] {
        assert!(tokens(other).len() > n_first);
        assert_eq!(tokens(other)[..n_first], tokens(&ends));
    }
    assert_ne!(tokens(&shifted), tokens(&whole), "it forgot its middle");
    assert_ne!(tokens(&grouped), tokens(&whole), "positions moved");
    assert_eq!(
        tokens(&alone),
        tokens(&whole),
        "groups of one are no groups"
    );
}
