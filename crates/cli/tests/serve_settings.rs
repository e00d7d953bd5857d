//! Flags of `cellar serve` from a file and from variables.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::process::{Command, Stdio};

use model_tests::http::{get, open, request};

use crate::serve::Server;

fn n_ctx(server: &Server) -> u64 {
    let props = get(server.address, "/props").json();
    props["default_generation_settings"]["n_ctx"]
        .as_u64()
        .unwrap()
}

/// A file with these settings, and its path.
fn settings(dir: &tempfile::TempDir, text: &str) -> String {
    let path = dir.path().join("serve.toml");
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}

/// The exit code and the message of a server that does not start.
fn refused(variables: &[(&str, &str)], args: &[&str]) -> (i32, String) {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("cellar"));
    command.arg("serve").args(args).stdin(Stdio::null());
    command.envs(variables.iter().copied());
    // A folder of its own: some flags make the directory that they name.
    let folder = tempfile::tempdir().unwrap();
    command.current_dir(folder.path());
    let output = command.output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    (output.status.code().unwrap(), message)
}

#[test]
fn the_command_line_wins_then_variables_then_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = settings(
        &dir,
        "ctx = 96\nalias = ['tiny', 'small']\nport = 1\nshow_text = true\nno-auth = false\n\
         top-p = 0.5\nlog = 'off'\n",
    );
    let args = ["--config", file.as_str()];
    // The port of the file is not taken: the command line has one.
    let server = Server::start(&args);
    assert_eq!(n_ctx(&server), 96);
    let models = get(server.address, "/v1/models").json();
    assert_eq!(models["data"][0]["id"], "tiny");
    let server = Server::start_with(&[("CELLAR_CTX", "80"), ("CELLAR_CONFIG", &file)], &[]);
    assert_eq!(n_ctx(&server), 80);
    let variables = [("CELLAR_CTX", "80"), ("CELLAR_PARALLEL", "")];
    let server = Server::start_with(&variables, &[&args[..], &["-c", "64"]].concat());
    assert_eq!(n_ctx(&server), 64);
    // What conflicts with the command line makes room for it.
    let socket = dir.path().join("socket").display().to_string();
    let file = settings(&dir, "host = '0.0.0.0'\napi-key = 'secret'\n");
    let (code, message) = refused(
        &[],
        &["--config", &file, "--socket", &socket, "-m", "no.gguf"],
    );
    assert!(
        code == 1 && message.contains("no.gguf"),
        "{code}: {message}"
    );
}

#[test]
fn keys_come_from_variables_and_add_up() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("keys");
    std::fs::write(&file, "first\n").unwrap();
    let file = file.display().to_string();
    let variables = [
        ("CELLAR_API_KEY", "second\nthird"),
        ("CELLAR_LOG_FORMAT", "json"),
    ];
    let server = Server::start_with(&variables, &["-c", "64", "--api-key-file", &file]);
    let status = |key: &str| {
        let headers = [("x-api-key", key), ("Host", "llm.example.org")];
        open(server.address, &request("GET", "/v1/models", &headers, ""))
            .finish()
            .status
    };
    // Where keys are needed any Host is served.
    assert_eq!(
        ["first", "second", "third", "other"].map(status),
        [200, 200, 200, 401]
    );
    let server = Server::start(&["-c", "64", "--api-key", "alone"]);
    let headers = [("Authorization", "Bearer alone")];
    let sent = request("GET", "/v1/models", &headers, "");
    assert_eq!(open(server.address, &sent).finish().status, 200);
    assert_eq!(get(server.address, "/v1/models").status, 401);
}

#[test]
fn what_makes_no_sense_is_refused_with_its_place() {
    let dir = tempfile::tempdir().unwrap();
    for (text, part) in [
        (
            "prot = 1",
            "prot: 'cellar serve' has no such flag: did you mean 'port'?",
        ),
        ("port = 70000", "port: invalid value '70000'"),
        ("no-auth = 'yes'", "no-auth: its value is true or false"),
        (
            "[server]\nport = 1",
            "server: 'cellar serve' has no such flag",
        ),
        (
            "port = true",
            "port: its value is a text, a number or a list of them",
        ),
        (
            "config = 'other'",
            "config: 'cellar serve' has no such flag",
        ),
        (
            "tls-cert = 'a.pem'",
            "tls-cert: --tls-cert=a.pem has no effect without --tls-key FILE: give both",
        ),
        ("port = ", "is no TOML"),
    ] {
        let file = settings(&dir, text);
        let (code, message) = refused(&[], &["--config", &file]);
        assert!(
            code == 2 && message.contains(part),
            "{text}: {code}: {message}"
        );
        assert_eq!(message.trim_end().lines().count(), 1, "{message}");
    }
    let (code, message) = refused(&[("CELLAR_PORT", "tcp://10.0.0.1:80")], &[]);
    assert!(
        code == 2 && message.contains("CELLAR_PORT: invalid value"),
        "{message}"
    );
    let (code, message) = refused(&[("CELLAR_NO_AUTH", "maybe")], &[]);
    assert!(
        code == 2 && message.contains("CELLAR_NO_AUTH turns a flag"),
        "{message}"
    );
    let (code, message) = refused(&[], &["--config", "/nowhere/serve.toml"]);
    assert!(
        code == 1 && message.contains("'/nowhere/serve.toml'"),
        "{message}"
    );
}

/// Each flag has a variable of its own, and none is that of something else.
#[test]
fn a_variable_for_every_flag() {
    let mut help = Command::new(assert_cmd::cargo::cargo_bin!("cellar"));
    let output = help.args(["serve", "--help"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let lines = text.lines().map(str::trim_start);
    let flags = lines.filter_map(|line| {
        let long = line.split("--").nth(1).filter(|_| line.starts_with('-'))?;
        long.split([' ', '=', '[']).next()
    });
    let switches = ["help", "config", "model", "log"];
    let mut n = 0;
    for flag in flags.filter(|flag| !switches.contains(flag)) {
        let variable = format!("CELLAR_{}", flag.to_uppercase().replace('-', "_"));
        // Nothing can be this: a switch, a number or a choice says so; a text is a text.
        let (_, message) = refused(&[(&variable, "\u{1}")], &["--port", "0", "-m", "no.gguf"]);
        assert!(
            message.contains(&variable)
                || message.contains("no.gguf")
                || message.contains("\\u{1}"),
            "{flag}: {message}"
        );
        n += usize::from(message.contains(&variable));
    }
    assert!(n > 40, "{n}");
}
