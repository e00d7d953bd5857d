//! `cellar serve` and OpenTelemetry's environment variables, with the cargo feature `otlp` and
//! without.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a panic is how a test fails

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

/// The program with a collector, and its lines up to that of the address.
fn start(variables: &[(&str, &str)]) -> (Child, Vec<String>) {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("cellar"));
    command
        .args(["serve", "--port", "0", "-c", "256", "--backend", "cpu"])
        .env_remove("CELLAR_LOG")
        .envs(variables.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut process = command.spawn().unwrap();
    let mut lines = Vec::new();
    for line in BufReader::new(process.stderr.take().unwrap()).lines() {
        lines.push(line.unwrap());
        if lines.last().unwrap().contains("http://127.0.0.1:") {
            break;
        }
    }
    (process, lines)
}

fn terminate(mut process: Child) {
    let id = process.id().to_string();
    Command::new("kill").args(["-TERM", &id]).status().unwrap();
    assert_eq!(process.wait().unwrap().code(), Some(0));
}

#[cfg(not(feature = "otlp"))]
#[test]
fn a_collector_is_not_passed_over_in_silence() {
    let endpoint = "http://127.0.0.1:1";
    let (process, lines) = start(&[("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)]);
    terminate(process);
    assert!(
        lines[0].contains("OTEL_EXPORTER_OTLP_ENDPOINT is set, but"),
        "{lines:?}"
    );
    let off = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint),
        ("OTEL_SDK_DISABLED", "true"),
    ];
    let (process, lines) = start(&off);
    terminate(process);
    assert!(!lines.concat().contains("OTEL"), "{lines:?}");
}

#[cfg(feature = "otlp")]
mod export {
    use std::io::{Read, Write};
    use std::net::{SocketAddr, TcpListener};

    use model_tests::http::post;
    use serde_json::json;

    use super::*;

    /// Takes one batch, and gives its bytes.
    fn take_batch(listener: &TcpListener) -> Vec<u8> {
        let (stream, _) = listener.accept().unwrap();
        let mut stream = BufReader::new(stream);
        let mut n_bytes = 0;
        loop {
            let mut line = String::new();
            stream.read_line(&mut line).unwrap();
            let line = line.trim().to_ascii_lowercase();
            if let Some(length) = line.strip_prefix("content-length: ") {
                n_bytes = length.parse().unwrap();
            }
            if line.is_empty() {
                break;
            }
        }
        let mut batch = vec![0; n_bytes];
        stream.read_exact(&mut batch).unwrap();
        let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
        stream.get_mut().write_all(answer).unwrap();
        batch
    }

    /// Sent when the server ends, long before the next batch is due.
    #[test]
    fn the_last_spans_are_sent_when_the_server_ends() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let (process, lines) = start(&[
            ("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint),
            ("OTEL_SERVICE_NAME", "service-of-a-test"),
            ("OTEL_BSP_SCHEDULE_DELAY", "3600000"),
        ]);
        // A program that was built without the feature would never send any.
        assert!(!lines.concat().contains("OTEL"), "{lines:?}");
        let address = lines.last().unwrap().split("http://").nth(1).unwrap();
        let address: SocketAddr = address.split(' ').next().unwrap().parse().unwrap();
        let body = json!({"prompt": "One day", "max_tokens": 4});
        assert_eq!(post(address, "/v1/completions", &body).status, 200);
        let batch = std::thread::spawn(move || take_batch(&listener));
        terminate(process);
        let batch = String::from_utf8_lossy(&batch.join().unwrap()).into_owned();
        for word in [
            "service-of-a-test",
            "POST /v1/completions",
            "prefill",
            "decode",
        ] {
            assert!(batch.contains(word), "no {word} in {batch}");
        }
    }

    #[test]
    fn another_protocol_is_refused() {
        let output = Command::new(assert_cmd::cargo::cargo_bin!("cellar"))
            .args(["serve", "--port", "0", "--backend", "cpu"])
            .env("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
            .env("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
            .output()
            .unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success());
        assert!(
            message.contains("only http/protobuf is supported"),
            "{message}"
        );
    }
}
