//! An output never destroys an input or a model, and what a killed process leaves is removed by the
//! next.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use model_tests::fixture;
use tempfile::TempDir;

use crate::support::{cellar, directory, failure, model, output};

/// A directory with a model, a file of requests, a state and a text.
struct Place {
    dir: TempDir,
}

impl Place {
    fn new() -> Self {
        let place = Self {
            dir: tempfile::tempdir().unwrap(),
        };
        fs::copy(model(), place.path("model.gguf")).unwrap();
        fs::copy(model(), place.path("other.gguf")).unwrap();
        fs::copy(
            fixture("batch/requests.jsonl"),
            place.path("requests.jsonl"),
        )
        .unwrap();
        fs::write(
            place.path("notes.txt"),
            "One day, Tom went to the park. ".repeat(40),
        )
        .unwrap();
        symlink("model.gguf", place.path("link.gguf")).unwrap();
        fs::hard_link(place.path("model.gguf"), place.path("hard.gguf")).unwrap();
        let state = place.path("saved.state");
        output(&[
            "run",
            "-p",
            "Once",
            "-n",
            "0",
            "--save-state",
            state.to_str().unwrap(),
        ]);
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The command line with the place's names replaced by paths.
    fn args(&self, line: &str) -> Vec<String> {
        let path = |word: &str| {
            // `FILE=SCALE`
            let (name, scale) = word.split_at(word.find('=').unwrap_or(word.len()));
            if self.path(name).exists() || name.starts_with("new.") {
                format!("{}{scale}", self.path(name).display())
            } else {
                word.to_owned()
            }
        };
        line.split(' ').map(path).collect()
    }

    /// The names and contents of all files.
    fn contents(&self) -> Vec<(PathBuf, Vec<u8>)> {
        let entries = fs::read_dir(self.dir.path()).unwrap();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        let read = |path: PathBuf| {
            let bytes = fs::read(&path).unwrap();
            (path, bytes)
        };
        paths.into_iter().map(read).collect()
    }
}

#[test]
fn an_output_that_is_read_or_a_model_is_refused_and_nothing_changes() {
    let place = Place::new();
    let before = place.contents();
    let is_read = "is read as --model: choose another file";
    let is_model = "is a model, which would be lost: choose another file";
    for (line, wanted) in [
        (
            "batch -m model.gguf -f requests.jsonl -o model.gguf",
            is_read,
        ),
        (
            "batch -m model.gguf -f requests.jsonl -o link.gguf",
            is_read,
        ),
        ("batch -m link.gguf -f requests.jsonl -o hard.gguf", is_read),
        (
            "batch -m model.gguf -f requests.jsonl -o new.out --trace model.gguf",
            is_read,
        ),
        (
            "batch -m model.gguf -f requests.jsonl -o requests.jsonl",
            "is read as --file",
        ),
        (
            "batch -m model.gguf -f requests.jsonl --trace requests.jsonl",
            "is read as --file",
        ),
        (
            "batch -f requests.jsonl -o new.out --trace new.out",
            "is the file of --output, too",
        ),
        ("batch -f requests.jsonl -o other.gguf", is_model),
        (
            "run -m model.gguf --raw x -n 1 --lora requests.jsonl=0.5 --save-state requests.jsonl",
            "is read as --lora",
        ),
        (
            "run -m model.gguf --raw x -n 1 --save-state model.gguf",
            is_read,
        ),
        (
            "run -m model.gguf --raw x -n 1 --save-state link.gguf",
            is_read,
        ),
        (
            "run -m model.gguf --raw x -n 1 --save-state other.gguf",
            is_model,
        ),
        (
            "run -m model.gguf -f notes.txt -n 1 --save-state notes.txt",
            "is read as --file",
        ),
        ("logits -m model.gguf --tokens 1,2 -o model.gguf", is_read),
        ("logits -m model.gguf --tokens 1,2 -o other.gguf", is_model),
        ("imatrix -m model.gguf -f notes.txt -o model.gguf", is_read),
        (
            "imatrix -m model.gguf -f notes.txt -o notes.txt",
            "is read as --file",
        ),
        (
            "convert model.gguf model.gguf --type q8_0",
            "is read as MODEL",
        ),
        (
            "convert model.gguf hard.gguf --type q8_0 --force",
            "is read as MODEL",
        ),
        (
            "convert model.gguf other.gguf --type q8_0",
            "is a model, which would be lost: choose another file, or replace it with --force",
        ),
        ("bench -m model.gguf --clients 1 --trace link.gguf", is_read),
        ("bench --clients 1 --trace other.gguf", is_model),
    ] {
        let args = place.args(line);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let (code, message) = failure(&args);
        assert_eq!(code, 2, "{line}: {message}");
        assert!(message.contains(wanted), "{line}: {message}");
        assert!(place.contents() == before, "{line}");
    }
}

#[test]
fn a_redirected_stdin_is_not_replaced() {
    let place = Place::new();
    let before = place.contents();
    let done = Command::new(assert_cmd::cargo::cargo_bin!("cellar"))
        .args(["batch", "-f", "-", "-o"])
        .arg(place.path("requests.jsonl"))
        .stdin(fs::File::open(place.path("requests.jsonl")).unwrap())
        .output()
        .unwrap();
    let stderr = String::from_utf8(done.stderr).unwrap();
    assert_eq!(done.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("is read as stdin"), "{stderr}");
    assert!(place.contents() == before);
}

#[test]
fn files_of_a_model_directory_are_not_replaced() {
    let dir = directory("qwen3");
    let model = dir.path().display().to_string();
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        let path = dir.path().join(name);
        let before = fs::read(&path).unwrap();
        let out = path.display().to_string();
        let (code, message) = failure(&["logits", "-m", &model, "--tokens", "1", "-o", &out]);
        assert_eq!(code, 2, "{message}");
        assert!(message.contains("is read as --model"), "{message}");
        assert!(fs::read(&path).unwrap() == before, "{name}");
    }
    // Another model's weights are a model, too.
    let weights = dir.path().join("model.safetensors").display().to_string();
    let (code, message) = failure(&["logits", "--tokens", "1", "-o", &weights]);
    assert_eq!(code, 2, "{message}");
    assert!(message.contains("is a model"), "{message}");
}

/// Outputs may be written again: states, logits, importance matrices; a model with `--force`.
#[test]
fn outputs_of_the_same_kind_are_replaced() {
    let place = Place::new();
    for line in [
        "logits --tokens 1,2 -o new.safetensors",
        "imatrix -f notes.txt -o new.imatrix.gguf -c 64",
        "run --load-state saved.state --save-state saved.state -n 1 --raw",
        "convert model.gguf other.gguf --type q8_0 --force",
    ] {
        for _ in 0..2 {
            let args = place.args(line);
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            output(&args);
        }
    }
    assert!(fs::read(place.path("model.gguf")).unwrap() == fs::read(model()).unwrap());
    let (was, is) = (place.path("model.gguf"), place.path("other.gguf"));
    assert!(fs::metadata(is).unwrap().len() < fs::metadata(was).unwrap().len());
}

/// The temporary files of one process that was killed, of one that lives, and of another file.
#[test]
fn what_a_killed_process_left_is_removed_by_the_next_writer() {
    let dir = tempfile::tempdir().unwrap();
    let names = [
        "out.999999.part",
        "out.999998.part",
        "out.x.part",
        "out2.999999.part",
    ];
    let [dead, held, no_process, other] = names.map(|name| dir.path().join(name));
    for path in [&dead, &held, &no_process, &other] {
        fs::write(path, "part").unwrap();
    }
    let holder = fs::File::open(&held).unwrap();
    holder.lock().unwrap();
    let out = dir.path().join("out").display().to_string();
    output(&["logits", "--tokens", "1", "-o", &out]);
    assert!(!dead.exists());
    assert!(held.exists() && no_process.exists() && other.exists());
    drop(holder);
    output(&["logits", "--tokens", "1", "-o", &out]);
    assert!(!held.exists());
}

/// `ulimit -f`: an error, as of a full disk, and nothing stays.
#[test]
fn a_file_that_may_not_grow_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let run = |blocks: &str, out: &Path| {
        let program = assert_cmd::cargo::cargo_bin!("cellar")
            .display()
            .to_string();
        let convert = format!(
            "ulimit -f {blocks}; exec '{program}' convert '{}' '{}' --type q8_0",
            model().display(),
            out.display()
        );
        let mut command = Command::new("sh");
        command
            .arg0("sh")
            .args(["-c", &convert])
            .stdin(Stdio::null());
        command.output().unwrap()
    };
    let done = run("8", &out);
    let stderr = String::from_utf8(done.stderr).unwrap();
    assert_eq!(done.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("File too large"), "{stderr}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    assert!(
        cellar()
            .args(["run", "-n", "1"])
            .assert()
            .success()
            .get_output()
            .status
            .success()
    );
}
