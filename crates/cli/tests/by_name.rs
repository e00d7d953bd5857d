//! Models by name: downloaded from a server on this machine, run, listed and removed.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::server::{Fault, HubServer, sha256};
use crate::support::model;

const REPO: &str = "owner/stories-GGUF";

/// The program with a cache of its own, and nothing of this machine's.
fn command(server: &HubServer, home: &Path) -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("cellar"));
    let unset = [
        "HF_TOKEN",
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
    ];
    for variable in unset {
        command.env_remove(variable);
    }
    command
        .env("HF_HOME", home)
        .env("HF_ENDPOINT", &server.endpoint)
        .env("NO_PROXY", "127.0.0.1")
        .current_dir(home)
        .stdin(Stdio::null());
    command
}

/// Its exit code, and what it printed to stdout and stderr.
struct Done {
    code: i32,
    stdout: String,
    stderr: String,
}

#[track_caller]
fn cellar(server: &HubServer, home: &Path, args: &[&str]) -> Done {
    let output = command(server, home).args(args).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    Done {
        code: output.status.code().unwrap(),
        stdout: text(&output.stdout),
        stderr: text(&output.stderr),
    }
}

#[test]
fn a_model_is_pulled_run_listed_and_removed_by_name() {
    let server = HubServer::start(REPO);
    let bytes = std::fs::read(model()).unwrap();
    server
        .add("stories-F16.gguf", &bytes)
        .add("stories-Q2_K.gguf", &[0; 100]);
    let home = tempfile::tempdir().unwrap();
    let cellar = |args: &[&str]| cellar(&server, home.path(), args);
    let story = ["-p", "Once upon a time", "-n", "8", "--temp", "0"];
    let run = |name: &str| cellar(&[&["run", "-m", name], &story[..]].concat());

    let before = run(REPO);
    assert_eq!(before.code, 1);
    let cache = home.path().join("hub");
    assert_eq!(
        before.stderr,
        format!(
            "error: no file '{REPO}', and no model of that name in {}; 'cellar pull {REPO}' \
             downloads it\n",
            cache.display()
        )
    );

    let pulled = cellar(&["pull", REPO]);
    assert_eq!(pulled.code, 0, "{}", pulled.stderr);
    assert!(pulled.stderr.contains("F16, "), "{}", pulled.stderr);
    let others = format!("others to choose with {REPO}:QUANT: Q2_K (100 bytes)");
    assert!(pulled.stderr.contains(&others), "{}", pulled.stderr);
    assert_eq!(std::fs::read(pulled.stdout.trim_end()).unwrap(), bytes);

    let wanted = run(model().to_str().unwrap());
    assert_eq!(wanted.code, 0, "{}", wanted.stderr);
    for name in [REPO.to_owned(), format!("{REPO}:f16")] {
        assert_eq!(run(&name).stdout, wanted.stdout, "{name}");
        let inspected = cellar(&["inspect", &name]);
        assert_eq!(inspected.code, 0, "{}", inspected.stderr);
        assert_eq!(cellar(&["graph", "diff", &name, &name]).code, 0);
    }
    let listed = cellar(&["list"]).stdout;
    assert!(listed.contains(&format!("{REPO}:F16  ")), "{listed}");
    let listed: serde_json::Value =
        serde_json::from_str(&cellar(&["list", "--json"]).stdout).unwrap();
    assert_eq!(listed[0]["n_bytes"], bytes.len());
    assert_eq!(listed[0]["path"], pulled.stdout.trim_end());

    let absent = cellar(&["rm", &format!("{REPO}:Q2_K")]);
    assert_eq!(absent.code, 1);
    assert!(
        absent.stderr.contains("'cellar list' shows"),
        "{}",
        absent.stderr
    );
    let removed = cellar(&["rm", REPO]);
    assert_eq!(removed.code, 0, "{}", removed.stderr);
    assert!(removed.stdout.ends_with(" freed\n"), "{}", removed.stdout);
    assert_eq!(run(REPO).code, 1);
    assert!(cellar(&["list"]).stderr.contains("no models in"));
}

#[test]
fn a_path_that_exists_is_a_path() {
    let server = HubServer::start(REPO);
    server.add("stories-F16.gguf", &std::fs::read(model()).unwrap());
    let home = tempfile::tempdir().unwrap();
    assert_eq!(cellar(&server, home.path(), &["pull", REPO]).code, 0);
    std::fs::create_dir(home.path().join("owner")).unwrap();
    std::fs::write(home.path().join(REPO), "This is a text.").unwrap();
    let tokenized = cellar(&server, home.path(), &["tokenize", "-m", REPO, "Hi"]);
    assert_eq!(tokenized.code, 1);
    assert!(
        tokenized.stderr.contains("not a GGUF file"),
        "{}",
        tokenized.stderr
    );
}

#[test]
fn names_that_cannot_be_pulled() {
    let server = HubServer::start(REPO);
    let home = tempfile::tempdir().unwrap();
    let error = |args: &[&str]| {
        let done = cellar(&server, home.path(), args);
        assert_eq!(done.stdout, "");
        assert_eq!(done.stderr.lines().count(), 1, "{}", done.stderr);
        (done.code, done.stderr)
    };
    let (code, message) = error(&["pull", "model.gguf"]);
    assert_eq!(code, 2, "{message}");
    assert!(
        message.contains("'model.gguf' is no model name: it has no '/'"),
        "{message}"
    );
    let (code, message) = error(&["pull", "owner/absent"]);
    assert_eq!(code, 1, "{message}");
    assert!(
        message.contains("has no model repository 'owner/absent'"),
        "{message}"
    );
    let offline = command(&server, home.path())
        .env("HF_HUB_OFFLINE", "1")
        .args(["pull", REPO])
        .output()
        .unwrap();
    assert_eq!(offline.status.code(), Some(1));
    let message = String::from_utf8(offline.stderr).unwrap();
    assert!(message.contains("HF_HUB_OFFLINE is set"), "{message}");
}

#[cfg(unix)]
#[test]
fn ctrl_c_leaves_a_part_that_the_next_pull_continues() {
    let server = HubServer::start(REPO);
    let bytes = std::fs::read(model()).unwrap();
    server.add_faulty(
        "stories-F16.gguf",
        &bytes,
        &[Fault::Stall { n_bytes: 5000 }],
    );
    let home = tempfile::tempdir().unwrap();
    let child = command(&server, home.path())
        .args(["pull", REPO])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let blobs = home.path().join("hub/models--owner--stories-GGUF/blobs");
    let part = blobs.join(format!("{}.incomplete", sha256(&bytes)));
    let started = Instant::now();
    while !std::fs::metadata(&part).is_ok_and(|data| data.len() == 5000) {
        assert!(started.elapsed() < Duration::from_secs(60), "no bytes came");
        std::thread::sleep(Duration::from_millis(20));
    }
    let pid = child.id().to_string();
    assert!(
        Command::new("kill")
            .args(["-INT", &pid])
            .status()
            .unwrap()
            .success()
    );
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let message = String::from_utf8(output.stderr).unwrap();
    let wanted = format!("stopped; 'cellar pull {REPO}' continues\n");
    assert!(message.ends_with(&wanted), "{message}");

    let listed = cellar(&server, home.path(), &["list"]);
    assert!(
        listed
            .stderr
            .contains("interrupted downloads hold 4.88 KiB"),
        "{}",
        listed.stderr
    );
    server.add("stories-F16.gguf", &bytes);
    server.requests();
    let pulled = cellar(&server, home.path(), &["pull", REPO]);
    assert_eq!(pulled.code, 0, "{}", pulled.stderr);
    let requests = server.requests();
    let content = requests.iter().find(|request| request.is_content).unwrap();
    assert_eq!(content.headers["range"], "bytes=5000-");
}

/// A server downloads what it is to serve where it is told to, and nothing otherwise.
#[cfg(unix)]
#[test]
fn a_server_downloads_its_model_with_consent() {
    use std::io::{BufRead, BufReader};

    let server = HubServer::start(REPO);
    let bytes = std::fs::read(model()).unwrap();
    server.add("stories-F16.gguf", &bytes);
    let home = tempfile::tempdir().unwrap();
    let args = ["serve", "-m", REPO, "--port", "0", "-c", "64"];
    let refused = cellar(&server, home.path(), &args);
    assert_eq!(refused.code, 2, "{}", refused.stderr);
    assert!(
        refused
            .stderr
            .contains("add --pull, or run 'cellar pull owner/stories-GGUF'"),
        "{}",
        refused.stderr
    );
    assert!(!home.path().join("hub").exists());
    let mut serving = command(&server, home.path());
    // As a compose file says it.
    serving
        .args(["serve", "--port", "0", "-c", "64"])
        .envs([("CELLAR_MODEL", REPO), ("CELLAR_PULL", "1")])
        .stderr(Stdio::piped());
    let mut serving = serving.spawn().unwrap();
    let mut lines = BufReader::new(serving.stderr.take().unwrap()).lines();
    let served = lines.find(|line| line.as_ref().unwrap().contains("served at http://"));
    let id = serving.id().to_string();
    Command::new("kill").args(["-TERM", &id]).status().unwrap();
    assert_eq!(serving.wait().unwrap().code(), Some(0));
    assert!(served.is_some(), "it did not start");
}
