//! `cellar serve` as those see it who run it: its log, its first line, TLS, pages of other origins,
//! models that are downloaded.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a panic is how a test fails

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;

use model_tests::http::{get, open, post, request};
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::{Value, json};

use crate::serve::Server;
use crate::support::failure;

#[test]
fn a_request_is_a_line_and_a_refusal_has_its_reason() {
    let server = Server::start(&["-c", "200", "--strict"]);
    let body = json!({"prompt": "Once upon a time", "max_tokens": 4, "ignore_eos": true});
    post(server.address, "/v1/completions", &body);
    let line = server.await_line("POST /v1/completions 200 ");
    assert!(line.contains("model=stories prompt="), "{line}");
    assert!(line.contains(" generated=4 end=length id=req_"), "{line}");
    post(
        server.address,
        "/v1/completions",
        &json!({"model": "gone", "prompt": "a"}),
    );
    let line = server.await_line("POST /v1/completions 404 ");
    assert!(line.contains("there is no model 'gone'"), "{line}");
    get(server.address, "/health");
    get(server.address, "/v1/models");
    server.await_line("GET /v1/models 200 ");
    let said = server.said.lock().unwrap();
    // A probe that goes well is no news, and no word of a prompt is written.
    assert!(
        !said
            .iter()
            .any(|line| line.contains("/health") || line.contains("Once")),
        "{said:?}"
    );
}

#[test]
fn a_log_is_json_or_more_or_nothing() {
    let server = Server::start(&["-c", "64", "--log-format", "json"]);
    let sent = request("GET", "/v1/nowhere", &[("X-Request-Id", "mine")], "");
    open(server.address, &sent).finish();
    let line: Value = serde_json::from_str(&server.await_line("/v1/nowhere")).unwrap();
    assert_eq!(line["request_id"], "mine");
    assert_eq!(line["status"], 404);
    assert!(
        line["reason"].as_str().unwrap().contains("GET / lists"),
        "{line}"
    );
    let server = Server::start(&["-c", "64", "--log", "debug"]);
    get(server.address, "/health");
    server.await_line("GET /health 200 ");
    let server = Server::start(&["-c", "64", "--log", "off"]);
    get(server.address, "/v1/nowhere");
    get(server.address, "/v1/models");
    let said = Arc::clone(&server.said);
    assert_eq!(server.terminate(), Some(0));
    let said = said.lock().unwrap();
    assert!(!said.iter().any(|line| line.contains("/v1/")), "{said:?}");
}

#[test]
fn the_first_line_has_the_model_its_size_and_the_page() {
    let server = Server::start(&["-c", "200"]);
    let line = server.log.last().unwrap();
    assert!(
        line.starts_with("'stories' is served at http://127.0.0.1:"),
        "{line}"
    );
    for part in ["(context 200; ", "iB of memory; ", "open it in a browser"] {
        assert!(line.contains(part), "{part}: {line}");
    }
}

/// A model that was trained for long texts has a long context without a flag.
#[test]
fn a_context_is_as_long_as_the_model_was_trained_for() {
    const KEY: &[u8] = b"llama.context_length";
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = std::fs::read(crate::support::model()).unwrap();
    let at = bytes
        .windows(KEY.len())
        .position(|part| part == KEY)
        .unwrap();
    let at = at + KEY.len() + 4;
    bytes[at..at + 4].copy_from_slice(&20_000u32.to_le_bytes());
    let path = dir.path().join("long.gguf");
    std::fs::write(&path, bytes).unwrap();
    let path = path.display().to_string();
    let n_ctx = |args: &[&str]| {
        let server = Server::start(args);
        let props = get(server.address, "/props").json();
        props["default_generation_settings"]["n_ctx"]
            .as_u64()
            .unwrap()
    };
    assert_eq!(n_ctx(&["-m", &path]), 20_000);
    // Where little may be taken, a part of it; at least as much as ever.
    assert_eq!(n_ctx(&["-m", &path, "--memory", "64M"]), 16_384);
    assert_eq!(n_ctx(&["-m", &path, "--memory", "24M"]), 4096);
    assert_eq!(n_ctx(&["-m", &path, "-c", "300"]), 300);
}

#[test]
fn pages_that_are_allowed_are_served_and_a_star_is_warned_of() {
    let server = Server::start(&[
        "-c",
        "64",
        "--allow-origin",
        "*",
        "--allow-host",
        "llm.example",
    ]);
    let log = server.log.join("\n");
    assert!(
        log.contains("warning: --allow-origin '*' without keys"),
        "{log}"
    );
    let headers = [("Origin", "https://app.example"), ("Host", "llm.example")];
    let answer = open(server.address, &request("GET", "/v1/models", &headers, "")).finish();
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(
        answer.header("access-control-allow-origin"),
        Some("https://app.example")
    );
    for wrong in [
        ["--allow-origin", "app.example"],
        ["--allow-host", "http://llm.example"],
        ["--allow-host", "llm.example:80"],
        ["--api-key", "two words"],
    ] {
        let (code, message) = failure(&["serve", wrong[0], wrong[1]]);
        assert!(
            code == 2 && message.contains(wrong[0]),
            "{wrong:?}: {message}"
        );
    }
}

/// Files with a certificate for localhost and its key.
fn certificate(dir: &Path) -> (String, String, RootCertStore) {
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(["localhost".to_owned()]).unwrap();
    let certificate = params.self_signed(&key).unwrap();
    let write = |name: &str, text: String| {
        let path = dir.join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let mut roots = RootCertStore::empty();
    roots.add(certificate.der().clone()).unwrap();
    let files = (
        write("cert.pem", certificate.pem()),
        write("key.pem", key.serialize_pem()),
    );
    (files.0, files.1, roots)
}

/// The answer to a request over TLS.
fn over_tls(address: SocketAddr, roots: RootCertStore, sent: &str) -> String {
    let config = ClientConfig::builder()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").unwrap();
    let client = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut stream = StreamOwned::new(client, TcpStream::connect(address).unwrap());
    stream.write_all(sent.as_bytes()).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    String::from_utf8(answer).unwrap()
}

#[test]
fn connections_are_encrypted_with_a_certificate() {
    let dir = tempfile::tempdir().unwrap();
    let (certificate, key, roots) = self::certificate(dir.path());
    let args = ["-c", "64", "--tls-cert", &certificate, "--tls-key", &key];
    let server = Server::start(&args);
    let line = server.log.last().unwrap();
    assert!(line.contains(" served at https://127.0.0.1:"), "{line}");
    let body = r#"{"prompt": "One day", "max_tokens": 3, "stream": true}"#;
    let sent = request("POST", "/v1/completions", &[], body);
    // A client that says nothing, and one that speaks no TLS, hold up no other.
    let _silent = TcpStream::connect(server.address).unwrap();
    let mut plain = TcpStream::connect(server.address).unwrap();
    plain.write_all(sent.as_bytes()).unwrap();
    let answer = over_tls(server.address, roots.clone(), &sent);
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    assert!(answer.contains("data: [DONE]"), "{answer}");
    let health = request("GET", "/health", &[], "");
    assert!(over_tls(server.address, roots, &health).contains("200 OK"));
    assert_eq!(server.terminate(), Some(0));
}

#[cfg(unix)]
#[test]
fn a_renewed_certificate_is_read_at_a_signal_and_a_broken_one_is_not_taken() {
    let dir = tempfile::tempdir().unwrap();
    let (certificate, key, first) = self::certificate(dir.path());
    let server = Server::start(&["-c", "64", "--tls-cert", &certificate, "--tls-key", &key]);
    let health = request("GET", "/health", &[], "");
    let ask = |roots: &RootCertStore| over_tls(server.address, roots.clone(), &health);
    assert!(ask(&first).contains("200 OK"));
    let (_, _, second) = self::certificate(dir.path());
    // The server got no SIGHUP, and looks at the files once a minute.
    assert!(ask(&first).contains("200 OK"));
    server.signal("HUP");
    server.await_line("the certificate was read again");
    assert!(ask(&second).contains("200 OK"));
    std::fs::write(&certificate, "nonsense").unwrap();
    server.signal("HUP");
    let line = server.await_line("the certificate before it stays");
    assert!(line.contains(&certificate), "{line}");
    assert!(ask(&second).contains("200 OK"));
    assert_eq!(server.terminate(), Some(0));
}

#[test]
fn certificates_that_cannot_be_used_are_said_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let (certificate, key, _) = self::certificate(dir.path());
    let other = dir.path().join("other");
    std::fs::create_dir(&other).unwrap();
    let (_, other_key, _) = self::certificate(&other);
    for (certificate, key, part) in [
        (certificate.as_str(), other_key.as_str(), "with the key"),
        (
            "/nowhere/cert.pem",
            &key,
            "'/nowhere/cert.pem' as the certificate",
        ),
        (
            &certificate,
            "/nowhere/key.pem",
            "'/nowhere/key.pem' as the private key",
        ),
        (&key, &key, "there is no certificate in it"),
        (&certificate, &certificate, "there is no private key in it"),
    ] {
        let args = [
            "serve",
            "--port",
            "0",
            "--tls-cert",
            certificate,
            "--tls-key",
            key,
        ];
        let (code, message) = failure(&args);
        assert!(code == 1 && message.contains(part), "{part}: {message}");
    }
    let (code, message) = failure(&["serve", "--tls-cert", &certificate]);
    assert!(
        code == 2 && message.contains("without --tls-key"),
        "{message}"
    );
}

#[test]
fn files_of_clients_are_kept_in_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let kept = dir.path().join("kept").display().to_string();
    let args = ["-c", "64", "--files-dir", &kept];
    let server = Server::start(&args);
    let form = "--XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"in.jsonl\"\r\n\r\n{}\r\n--XX--\r\n";
    let headers = [("Content-Type", "multipart/form-data; boundary=XX")];
    let sent = request("POST", "/v1/files", &headers, form);
    let file = open(server.address, &sent).finish();
    assert_eq!(file.status, 200, "{}", file.body);
    let (code, message) = failure(&["serve", "--port", "0", "--files-dir", &kept]);
    assert!(code == 1 && message.contains("--files-dir"), "{message}");
    assert!(
        message.contains(&kept) && message.contains("another server"),
        "{message}"
    );
    assert_eq!(server.terminate(), Some(0));
    let server = Server::start(&args);
    let list = get(server.address, "/v1/files").json();
    assert_eq!(list["data"], json!([file.json()]));
}
