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
    let cached = report(&["-n", "1", "-ctk", "q8_0", "-ctv", "q8_0", "-ub", "64"]);
    assert_eq!(cached["tokens"].as_array().unwrap().len(), 1);
    let inspected = json(&["inspect", "-c", "0", "--json"]);
    assert_eq!(inspected["model"]["memory"]["n_ctx"], 512);
    let dir = tempfile::tempdir().unwrap();
    let file = with_template(&dir, "{% for m in messages %}[{{ m.content }}]{% endfor %}");
    let chat = ["run", "-m", &file, "--chat", "Hi", "-n", "1", "--json"];
    let prompt = |more: &[&str]| json(&[&chat[..], more].concat())["prompt"].clone();
    assert_eq!(prompt(&["-sys", "Be brief."]), "[Be brief.][Hi]");
    let (code, message) = failure(&["run", "Hi", "-ngl", "99", "--backend", "cpu"]);
    assert_eq!(code, 2);
    assert_eq!(
        message,
        "--gpu-layers 99 needs a GPU, and --backend cpu has none to share layers with: leave one of them \
         out"
    );
    let (code, message) = failure(&["run", "Hi", "-ngl", "most"]);
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
    let (code, message) = failure(&["run", "Hi", "-m", "qwen"]);
    assert_eq!(code, 1);
    assert!(
        message.contains("models by name are OWNER/NAME"),
        "{message}"
    );
    let dir = tempfile::tempdir().unwrap();
    fs::copy(model(), dir.path().join("stories.gguf")).unwrap();
    let wrong = dir.path().join("stories2.gguf");
    let (code, message) = failure(&["run", "Hi", "-m", wrong.to_str().unwrap()]);
    assert_eq!(code, 1);
    assert!(
        message.ends_with("similar names there: 'stories.gguf'"),
        "{message}"
    );
}

#[test]
fn errors_of_files_say_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["b.gguf", "a.gguf"] {
        fs::copy(model(), dir.path().join(name)).unwrap();
    }
    let path = dir.path().to_str().unwrap();
    let (code, message) = failure(&["run", "Hi", "-m", path]);
    assert_eq!(code, 1);
    let wanted = "the directory has GGUF files; give one of them: 'a.gguf', 'b.gguf'";
    assert!(message.ends_with(wanted), "{message}");
    let whole = fs::read(model()).unwrap();
    let cut = dir.path().join("cut.gguf");
    for n in [whole.len() / 2, 1000] {
        fs::write(&cut, &whole[..n]).unwrap();
        let (_, message) = failure(&["run", "Hi", "-m", cut.to_str().unwrap()]);
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
        .args(["run", "Hi", "-m", "-"])
        .write_stdin("GGUF")
        .assert()
        .failure();
    let stderr = String::from_utf8(stdin.get_output().stderr.clone()).unwrap();
    assert!(stderr.contains("the file is incomplete"), "{stderr}");
}
