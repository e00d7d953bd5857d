//! Greedy text of a model of each kind of memory: windows, and states; and of one that brings its
//! own operations.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::support::{BACKENDS, directory, output, references_in};
use model_tests::{Recipe, fixture};

/// Trained models without the ending.
const MODELS: [&str; 2] = ["stories/stories-gemma3", "stories/stories-mamba"];

#[test]
fn greedy_text_is_the_reference_s_for_windows_and_states() {
    let ways = [
        ["--kv-type", "f32", "--ubatch", "512"],
        ["--kv-type", "f16", "--ubatch", "7"],
        ["--kv-type", "f32", "--ubatch", "1"],
    ];
    for model in MODELS {
        let path = fixture(model);
        let file = format!("{}-f16.gguf", path.display());
        let references = references_in(format!("{}.reference.json", path.display()));
        for backend in BACKENDS {
            for (reference, way) in references.iter().zip(ways) {
                let n = reference.greedy_ids.len().to_string();
                let mut args = vec!["run", &reference.prompt, "-m", &file, "--temp", "0"];
                args.extend(["-n", &n, "--backend", backend]);
                args.extend(way);
                let wanted = format!("{}{}\n", reference.prompt, reference.continuation);
                assert_eq!(output(&args).0, wanted, "{args:?}");
            }
        }
    }
}

/// RWKV-4's numbers are tested elsewhere (`directories.rs`); here, that every command knows its
/// operations.
#[test]
fn a_model_with_operations_of_its_own_runs_is_planned_and_becomes_a_file() {
    // Any tokenizer of 512 tokens does.
    let made = directory("rwkv4");
    let path = |name: &str| made.path().join(name).display().to_string();
    let directory = made.path().display().to_string();
    let (gguf, state) = (path("model.gguf"), path("text.state"));
    output(&["convert", &directory, &gguf, "--type", "f32"]);
    let greedy = ["--temp", "0", "--backend"];
    let run = |args: &[&str], backend| output(&[&["run"], args, &greedy, &[backend]].concat()).0;
    let prompt = ["Once upon", "-n", "12", "-m"];
    let wanted = run(&[&prompt[..], &[&directory]].concat(), "cpu");
    assert!(wanted.len() > "Once upon\n".len(), "{wanted}");
    for backend in BACKENDS {
        for model in [&directory, &gguf] {
            let text = run(&[&prompt[..], &[model]].concat(), backend);
            assert_eq!(text, wanted, "{backend}, {model}");
        }
    }
    // Half of the text, and the other half from what was remembered.
    let half = ["-n", "6", "-m", &directory];
    let first = run(
        &[&["Once upon", "--save-state", &state], &half[..]].concat(),
        "cpu",
    );
    let second = run(&[&["--load-state", &state], &half[..]].concat(), "cpu");
    assert_eq!(format!("{}{second}", first.trim_end_matches('\n')), wanted);
    // Three blocks, of which each remembers two rows and an average's three.
    let (plan, _) = output(&["plan", &directory]);
    assert_eq!(plan.matches("f32 1.50 KiB").count(), 3, "{plan}");
    assert_eq!(plan.matches("f32 512 bytes").count(), 6, "{plan}");
    let (inspected, _) = output(&["inspect", &directory]);
    assert!(inspected.contains("rwkv4: width 64"), "{inspected}");
}

/// The vocabulary of RWKV's "world" models, with an RWKV of as many tokens and more: the directory
/// and the file that is made of it have the tokens of the published algorithm, and write the same
/// text.
#[test]
fn a_directory_with_rwkvs_vocabulary_becomes_a_file_with_it() {
    let made = tempfile::tempdir().unwrap();
    Recipe::named("rwkv4").expand(made.path());
    let (name, from) = ("rwkv_vocab_v20230424.txt", fixture("tokenizers/rwkv"));
    std::fs::copy(from.join(name), made.path().join(name)).unwrap();
    let directory = made.path().display().to_string();
    let gguf = made.path().join("model.gguf").display().to_string();
    output(&["convert", &directory, &gguf, "--type", "f32"]);
    let run = |model: &str| {
        let args = [
            "run",
            "it's 你好\n\n",
            "-m",
            model,
            "--temp",
            "0",
            "-n",
            "20",
        ];
        output(&args).0
    };
    assert_eq!(run(&gguf), run(&directory));
    let tokens = |model: &str| output(&["tokenize", "-m", model, "it's 你好"]).0;
    assert_eq!(tokens(&gguf), tokens(&directory));
    // 'it' and the space have no token of their own.
    let ids = ["106", "117", "268", "33", "292"];
    let found = tokens(&gguf);
    assert!(ids.iter().all(|id| found.contains(id)), "{found}");
}
