//! What users of llama.cpp type works, and what is mistyped is answered with what to do.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::fs;

use crate::support::{cellar, directory, failure, json, model, output, with_template};

#[test]
fn flags_of_llama_cpp_work() {
    let base = ["run", "Once upon a time", "--json"];
    let report = |more: &[&str]| json(&[&base[..], more].concat());
    let trained = report(&["-c", "0", "-n", "3"]);
    assert_eq!(trained["n_ctx"], 512, "the trained length");
    assert_eq!(
        report(&["--ctx-size", "64", "--n-predict", "3"])["n_ctx"],
        64
    );
    let whole = report(&["-c", "24", "-n", "-1", "-ngl", "0"]);
    assert_eq!(whole["finish"]["reason"], "context_full", "{whole}");
    let seeds = [(), ()].map(|()| report(&["-n", "1", "--seed", "-1"])["seed"].clone());
    assert_ne!(seeds[0], seeds[1]);
    let looks_back = report(&[
        "-n",
        "3",
        "--repeat-last-n",
        "-1",
        "--repeat-penalty",
        "1.1",
    ]);
    assert_eq!(looks_back["tokens"].as_array().unwrap().len(), 3);
    let (_, stderr) = output(&[&base[..], &["-n", "1", "--no-mmap"]].concat());
    assert!(
        stderr.contains("warning: --no-mmap has no effect"),
        "{stderr}"
    );
    let stories = model().display().to_string();
    assert_eq!(report(&["-n", "1", "-hf", &stories])["model"], stories);
    for command in ["plan", "inspect"] {
        let report = |model: &[&str]| output(&[&[command][..], model, &["-c", "64"]].concat()).0;
        let lines = |text: String| text.lines().take(3).map(str::to_owned).collect::<Vec<_>>();
        let [named, flagged] = [&[&*stories][..], &["-m", &stories]].map(report).map(lines);
        assert_eq!(named, flagged);
    }
    let bench = ["bench", "-p", "4", "--n-predict", "2", "-r", "1", "--json"];
    assert_eq!(json(&bench)["n_predict"], 2);
    let cached = report(&["-n", "1", "-ctk", "q8_0", "-ctv", "q8_0", "-ub", "64"]);
    assert_eq!(cached["tokens"].as_array().unwrap().len(), 1);
    let inspected = json(&["inspect", "-c", "0", "--json"]);
    assert_eq!(inspected["model"]["memory"]["n_ctx"], 512);
    let dir = tempfile::tempdir().unwrap();
    let file = with_template(&dir, "{% for m in messages %}[{{ m.content }}]{% endfor %}");
    let chat = ["run", "-m", &file, "--chat", "Hi", "-n", "1", "--json"];
    let prompt = |more: &[&str]| json(&[&chat[..], more].concat())["prompt"].clone();
    assert_eq!(prompt(&["-sys", "Be brief."]), "[Be brief.][Hi]");
    for limit in [["-n", "-1"], ["--n-predict", "3"]] {
        let args = [
            &["chat", "-m", &file, "-c", "40", "--seed", "-1"],
            &limit[..],
        ]
        .concat();
        let mut chat = cellar();
        let done = chat.args(args).write_stdin("Hi\n").assert().success();
        assert!(!done.get_output().stdout.is_empty(), "{limit:?}");
    }
    let (code, message) = failure(&["chat", "-n", "0"]);
    assert!(
        code == 2 && message.contains("at least 1 is needed, or -1"),
        "{message}"
    );
    let (code, message) = failure(&["run", "-p", "Hi", "-ngl", "99", "--backend", "cpu"]);
    assert_eq!(code, 2);
    assert_eq!(
        message,
        "--gpu-layers 99 needs a GPU, and --backend cpu has none to share layers with: leave one of them \
         out"
    );
    let (code, message) = failure(&["run", "-p", "Hi", "-ngl", "most"]);
    assert_eq!(code, 2);
    assert_eq!(
        message,
        "invalid value 'most' for '--gpu-layers <N>': a number of layers is needed, or -1 for all; see \
         --help"
    );
}

#[test]
fn alone_it_lists_the_commands() {
    let (help, stderr) = output(&[]);
    for wanted in ["Commands:", "run", "perplexity", "Examples:"] {
        assert!(help.contains(wanted), "{wanted}: {help}");
    }
    assert_eq!(stderr, "");
    let (code, message) = failure(&["state"]);
    assert_eq!(code, 2);
    assert_eq!(
        message,
        "'cellar state' needs a command; see 'cellar state --help'"
    );
}

#[test]
fn typos_are_answered_with_what_is_similar() {
    for (args, wanted) in [
        (&["run", "--tmp", "0"][..], "'--temp'"),
        (&["inspct"], "'inspect'"),
        (&["rnu", "Hi"], "'run'"),
        (&["run", "--backend", "candel"], "'candle'"),
        (&["convert", "a", "b", "--type", "q4k"], "'q4_k'"),
    ] {
        let (code, message) = failure(args);
        assert_eq!(code, 2, "{message}");
        assert!(
            message.contains("similar") && message.contains(wanted),
            "{message}"
        );
    }
    for name in ["qwen", "qwen2.5:7b"] {
        let (code, message) = failure(&["run", "-p", "Hi", "-m", name]);
        assert_eq!(code, 1);
        assert!(
            message.contains("names are OWNER/NAME") || message.contains("by name are OWNER/NAME"),
            "{message}"
        );
    }
    let (_, message) = failure(&["run", "-p", "Hi", "-m", "absent.gguf"]);
    assert!(!message.contains("OWNER/NAME"), "{message}");
    let dir = tempfile::tempdir().unwrap();
    fs::copy(model(), dir.path().join("stories.gguf")).unwrap();
    let wrong = dir.path().join("stories2.gguf");
    let (code, message) = failure(&["run", "-p", "Hi", "-m", wrong.to_str().unwrap()]);
    assert_eq!(code, 1);
    assert!(
        message.ends_with("similar names there: 'stories.gguf'"),
        "{message}"
    );
}

#[test]
fn what_other_programs_call_otherwise_is_answered_with_its_name() {
    let model = model().display().to_string();
    for (args, wanted) in [
        (
            &["run", "--max-tokens", "5", "Hi"][..],
            "it is called '--predict' here",
        ),
        (
            &["chat", "--num-predict", "5"],
            "it is called '--predict' here",
        ),
        (&["chat", "--port", "1"], "it is a flag of 'cellar serve'"),
        (&["chat", "--raw"], "'cellar run --raw' continues a text"),
        (
            &["-m", &model],
            "flags follow a command: 'cellar run -m MODEL PROMPT'",
        ),
        (
            &["run", "--top-k", "1.5"],
            "'1.5' for '--top-k <K>': a number of at least 1 is needed, or 0 or -1 for all tokens",
        ),
        (
            &["rerank", "-m", "x", "-q", "q", "--top", "0", "a"],
            "'0' for '--top <N>': a number of at least 1 is needed",
        ),
    ] {
        let (code, message) = failure(args);
        assert_eq!(code, 2, "{message}");
        assert!(
            message.contains(wanted) && message.ends_with("; see --help"),
            "{message}"
        );
        assert!(!message.contains("tip"), "{message}");
    }
}

#[test]
fn errors_of_files_say_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["b.gguf", "a.gguf"] {
        fs::copy(model(), dir.path().join(name)).unwrap();
    }
    let path = dir.path().to_str().unwrap();
    let (code, message) = failure(&["run", "-p", "Hi", "-m", path]);
    assert_eq!(code, 1);
    let wanted = "the directory has GGUF files; give one of them: 'a.gguf', 'b.gguf'";
    assert!(message.ends_with(wanted), "{message}");
    let made = directory("mistral_swa8");
    let state = dir.path().join("x.state").display().to_string();
    output(&["run", "-p", "Hi", "-n", "30", "--save-state", &state]);
    let cut_state = dir.path().join("cut.state").display().to_string();
    fs::write(&cut_state, &fs::read(&state).unwrap()[..2000]).unwrap();
    let binary = dir.path().join("bin.txt").display().to_string();
    fs::write(&binary, [0xff, 0xfe, 0]).unwrap();
    let in_made = |name: &str| made.path().join(name).display().to_string();
    let (config, weights) = (in_made("config.json"), in_made("model.safetensors"));
    let of_directory = format!(
        "give the directory that has it: '{}'",
        made.path().display()
    );
    let gguf = model().display().to_string();
    for (args, wanted) in [
        (
            &["run", "-p", "Hi", "-m", &config][..],
            of_directory.as_str(),
        ),
        (&["run", "-p", "Hi", "-m", &weights], &of_directory),
        (&["inspect", &state], "'cellar state inspect' shows it"),
        (&["run", "--load-state", &gguf], "a model is given with -m"),
        (&["state", "inspect", &cut_state], "copy the file again"),
        (
            &["run", "-f", &binary],
            "it is no text in UTF-8; name a file of text",
        ),
        (&["run", "--load-state", &state, "-c", "4"], "--ctx"),
    ] {
        let (_, message) = failure(args);
        assert!(message.contains(wanted), "{message}");
    }
    let whole = fs::read(model()).unwrap();
    let cut = dir.path().join("cut.gguf");
    for n in [whole.len() / 2, 1000] {
        fs::write(&cut, &whole[..n]).unwrap();
        let (_, message) = failure(&["run", "-p", "Hi", "-m", cut.to_str().unwrap()]);
        let wanted = "the file is incomplete: download or copy it again";
        assert!(message.ends_with(wanted), "{message}");
    }
    let made = directory("mistral_swa8");
    fs::remove_file(made.path().join("config.json")).unwrap();
    let (_, message) = failure(&["inspect", made.path().to_str().unwrap()]);
    assert!(
        message.contains("give a GGUF file, or a directory with config.json"),
        "{message}"
    );
    let stdin = cellar()
        .args(["run", "-p", "Hi", "-m", "-"])
        .write_stdin("GGUF")
        .assert()
        .failure();
    let stderr = String::from_utf8(stdin.get_output().stderr.clone()).unwrap();
    assert!(stderr.contains("the file is incomplete"), "{stderr}");
}
