//! The limits of a key: a tenant above them gets 429 with `Retry-After`, and others are served.

use std::net::TcpStream;

use model_tests::http::{Response, open, request, send_raw};
use serde_json::{Value, json};

use crate::support::{Server, Setup};

fn text(key: &str, body: &Value) -> String {
    let key = format!("Bearer {key}");
    let headers = [("Authorization", key.as_str())];
    request("POST", "/v1/completions", &headers, &body.to_string())
}

fn begin(server: &Server, key: &str, body: &Value) -> TcpStream {
    send_raw(server.address, text(key, body).as_bytes()).unwrap()
}

fn ask(server: &Server, key: &str, body: &Value) -> Response {
    open(server.address, &text(key, body)).finish()
}

#[test]
fn a_tenant_above_its_limits_gets_429() {
    let mut setup = Setup::with_keys("small max_running=1 max_queued=1\nother weight=2\n");
    setup.n_ctx = 8192;
    let server = setup.start();
    let (long, short) = (
        crate::life::long(),
        json!({"prompt": "One day", "max_tokens": 3}),
    );
    let running = begin(&server, "small", &long);
    server.await_metric("cellar_requests_running{", 1.0);
    let waiting = begin(&server, "small", &long);
    server.await_metric("cellar_requests_waiting{", 1.0);

    let refused = ask(&server, "small", &short);
    assert_eq!(refused.status, 429, "{}", refused.body);
    let error = refused.json()["error"].clone();
    assert_eq!(error["code"], "rate_limit_exceeded");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains('1'), "{message}");
    let seconds: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=60).contains(&seconds));

    // There are three more places, which only others get.
    assert_eq!(ask(&server, "other", &short).status, 200);
    drop(running);
    server.await_metric("cellar_requests_waiting{", 0.0);
    server.await_metric("cellar_requests_running{", 1.0);
    drop(waiting);
    server.await_metric("cellar_requests_running{", 0.0);
    assert_eq!(ask(&server, "small", &short).status, 200);
}
