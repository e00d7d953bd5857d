//! Limits of a server: sizes of bodies, numbers of values, stops and connections, and the rights of
//! keys.

use std::io::Read;
use std::net::TcpStream;
use std::num::NonZeroUsize;
use std::time::Duration;

use model_tests::http::{Response, get, open, post, request, send_raw};
use serde_json::{Value, json};

use crate::support::{Server, Setup, with};

const COMPLETION: &str = "/v1/completions";

fn prompt() -> Value {
    json!({"prompt": "One day", "max_tokens": 2, "temperature": 0})
}

/// The error of a request to this address, which is the client's fault.
#[track_caller]
fn wrong(server: &Server, path: &str, body: &Value) -> Value {
    let reply = post(server.address, path, body);
    assert_eq!(reply.status, 400, "{}", reply.body);
    let error = reply.json()["error"].clone();
    assert_eq!(error["type"], "invalid_request_error", "{error}");
    error
}

fn with_key(server: &Server, key: &str, method: &str, path: &str, body: &str) -> Response {
    open(
        server.address,
        &request(method, path, &[("x-api-key", key)], body),
    )
    .finish()
}

#[test]
fn large_bodies_are_answered_as_small_ones() {
    let setup = Setup {
        n_ctx: 64,
        ..Setup::default()
    };
    let server = setup.start();
    let text = "Once upon a time. ".repeat(20_000);
    let tokens = post(server.address, "/tokenize", &json!({"content": text})).json();
    let tokens = tokens["tokens"].clone();
    assert!(tokens.as_array().unwrap().len() > 80_000);
    let whole = post(server.address, "/detokenize", &json!({"tokens": tokens})).json();
    assert_eq!(whole["content"].as_str().unwrap().trim(), text.trim());
    let long = wrong(&server, COMPLETION, &json!({"prompt": text}));
    assert_eq!(long["code"], "context_length_exceeded");
    // Errors have the shape of the API, wherever it is answered.
    let reply = post(
        server.address,
        "/api/generate",
        &json!({"model": "stories", "prompt": "a", "images": [text]}),
    );
    assert_eq!(reply.status, 400);
    assert!(reply.json()["error"].is_string());
    // A field that is unknown changes nothing, however long it is.
    let small = post(server.address, COMPLETION, &prompt()).json();
    let large = with(prompt(), &json!({"unknown": text}));
    let large = post(server.address, COMPLETION, &large).json();
    assert_eq!(large["choices"], small["choices"]);
    let streamed = with(prompt(), &json!({"unknown": text, "stream": true}));
    let streamed = post(server.address, COMPLETION, &streamed);
    assert!(streamed.events().len() > 2, "{}", streamed.body);
}

#[test]
fn bodies_have_limits_of_bytes_and_values() {
    let mut setup = Setup::default();
    setup.server.max_body = 1_000_000;
    let server = setup.start();
    let reply = post(
        server.address,
        COMPLETION,
        &json!({"prompt": "a".repeat(1_000_000)}),
    );
    assert_eq!(reply.status, 413);
    assert!(reply.body.contains("1000000 bytes"), "{}", reply.body);
    let many = format!("{{\"a\": [{}0]}}", "{},".repeat(250_000));
    let sent = request("POST", COMPLETION, &[], &many);
    let reply = open(server.address, &sent).finish();
    assert_eq!(reply.status, 400);
    assert!(reply.body.contains("250003 objects"), "{}", reply.body);
}

#[test]
fn stops_have_limits() {
    let server = Setup::default().start();
    let texts = |n: usize| (0..n).map(|n| format!("~{n}")).collect::<Vec<_>>();
    let with_stops = |stops: Value| with(prompt(), &json!({"stop": stops}));
    let reply = post(server.address, COMPLETION, &with_stops(json!(texts(256))));
    assert_eq!(reply.status, 200, "{}", reply.body);
    let error = wrong(&server, COMPLETION, &with_stops(json!(texts(257))));
    assert_eq!(error["param"], "stop");
    assert!(
        error["message"].as_str().unwrap().contains("256"),
        "{error}"
    );
    let error = wrong(&server, COMPLETION, &with_stops(json!("a".repeat(65_537))));
    assert!(
        error["message"].as_str().unwrap().contains("65536"),
        "{error}"
    );
    let tokens = json!({"stop_token_ids": vec![5; 1025]});
    let error = wrong(&server, COMPLETION, &with(prompt(), &tokens));
    assert_eq!(error["param"], "stop_token_ids");
    let messages = json!([{"role": "user", "content": "Hello"}]);
    let body = json!({"messages": messages, "max_tokens": 2, "stop_sequences": texts(257)});
    let reply = post(server.address, "/v1/messages", &body);
    assert_eq!(reply.status, 400);
    assert!(reply.body.contains("stop_sequences"), "{}", reply.body);
    let body = json!({"model": "stories", "prompt": "a", "options": {"stop": texts(257)}});
    assert_eq!(post(server.address, "/api/generate", &body).status, 400);
    let body = json!({"prompt": "a", "stop": texts(257)});
    assert_eq!(post(server.address, "/completion", &body).status, 400);
}

#[test]
fn a_length_of_minus_one_is_any_length() {
    let setup = Setup {
        n_ctx: 48,
        ..Setup::default()
    };
    let server = setup.start();
    let messages = json!([{"role": "user", "content": "Hello"}]);
    // The model's own end is never chosen: what ends the text is the context.
    let base = json!({"ignore_eos": true, "temperature": 0});
    for any in [json!(-1), Value::Null] {
        for (path, own, name, ends) in [
            (
                COMPLETION,
                json!({"prompt": "One"}),
                "max_tokens",
                "/choices/0/finish_reason",
            ),
            (
                "/v1/chat/completions",
                json!({"messages": messages}),
                "max_tokens",
                "/choices/0/finish_reason",
            ),
            (
                "/v1/chat/completions",
                json!({"messages": messages}),
                "max_completion_tokens",
                "/choices/0/finish_reason",
            ),
            (
                "/v1/responses",
                json!({"input": "Hello"}),
                "max_output_tokens",
                "/status",
            ),
            (
                "/v1/messages",
                json!({"messages": messages}),
                "max_tokens",
                "/stop_reason",
            ),
            (
                "/completion",
                json!({"prompt": "One"}),
                "n_predict",
                "/stop_type",
            ),
        ] {
            let body = with(with(base.clone(), &own), &json!({name: any}));
            let reply = post(server.address, path, &body);
            assert_eq!(reply.status, 200, "{path} {body}: {}", reply.body);
            let json = reply.json();
            let end = json
                .pointer(ends)
                .and_then(Value::as_str)
                .unwrap_or_default();
            let is_full = [
                "length",
                "incomplete",
                "model_context_window_exceeded",
                "limit",
            ];
            assert!(is_full.contains(&end), "{path} {name}: {json}");
            let usage = json["usage"]["output_tokens"].as_u64();
            let usage = usage.or(json["usage"]["completion_tokens"].as_u64());
            let usage = usage.or(json["tokens_predicted"].as_u64()).unwrap();
            assert!(usage > 16, "{path} {name}: {json}");
            for bad in [json!(-2), json!("1"), json!(1.5)] {
                let body = with(with(base.clone(), &own), &json!({name: bad}));
                assert_eq!(
                    post(server.address, path, &body).status,
                    400,
                    "{path} {body}"
                );
            }
        }
    }
    for any in [json!(-1), json!(-2), Value::Null] {
        let options = with(base.clone(), &json!({"num_predict": any}));
        let body =
            json!({"model": "stories", "prompt": "One", "stream": false, "options": options});
        let reply = post(server.address, "/api/generate", &body).json();
        assert!(reply["eval_count"].as_u64().unwrap() > 16, "{reply}");
    }
}

#[test]
fn a_request_that_bans_every_token_is_wrong() {
    let server = Setup::default().start();
    let n_tokens = crate::support::stories().tokenizer().n_tokens();
    let bans: Vec<Value> = (0..n_tokens).map(|id| json!([id, false])).collect();
    let body = with(prompt(), &json!({"logit_bias": bans}));
    let error = wrong(&server, COMPLETION, &body);
    assert!(
        error["message"].as_str().unwrap().contains("logit_bias"),
        "{error}"
    );
    assert_eq!(post(server.address, COMPLETION, &prompt()).status, 200);
}

#[test]
fn pages_of_other_sites_load_nothing() {
    let server = Setup::default().start();
    let from = |site: &str, mode: &str, path: &str| {
        let headers = [("Sec-Fetch-Site", site), ("Sec-Fetch-Mode", mode)];
        open(server.address, &request("GET", path, &headers, "")).status
    };
    assert_eq!(from("cross-site", "no-cors", "/props?model=stories"), 403);
    assert_eq!(from("cross-site", "no-cors", "/view/events"), 403);
    assert_eq!(from("same-origin", "cors", "/props?model=stories"), 200);
}

#[test]
fn only_an_admin_changes_models_and_sees_the_requests_of_others() {
    let keys = "admin role=admin\nsecond role=admin\nuser\n";
    let server = Setup::with_keys(keys).start();
    for (method, path, body) in [
        ("POST", "/models/load", "{\"model\": \"stories\"}"),
        ("POST", "/models/unload", "{\"model\": \"stories\"}"),
        (
            "POST",
            "/api/generate",
            "{\"model\": \"stories\", \"keep_alive\": 0}",
        ),
        ("GET", "/view/events", ""),
    ] {
        let refused = with_key(&server, "user", method, path, body);
        assert_eq!(refused.status, 403, "{path}: {}", refused.body);
    }
    let load = with_key(
        &server,
        "admin",
        "POST",
        "/models/load",
        "{\"model\": \"stories\"}",
    );
    assert_eq!(load.status, 200, "{}", load.body);

    let body = crate::life::long().to_string();
    let sent = request("POST", COMPLETION, &[("x-api-key", "admin")], &body);
    let running = send_raw(server.address, sent.as_bytes()).unwrap();
    server.await_metric("cellar_requests_running{", 1.0);
    assert_eq!(
        with_key(&server, "user", "GET", "/slots", "").json(),
        json!([])
    );
    let slots = with_key(&server, "admin", "GET", "/slots", "").json();
    assert_eq!(slots.as_array().unwrap().len(), 4);
    assert!(slots.to_string().contains("n_prompt_tokens"), "{slots}");
    drop(running);

    // No key has all places of the view.
    let watch = |key| {
        open(
            server.address,
            &request("GET", "/view/events", &[("x-api-key", key)], ""),
        )
    };
    let viewers: Vec<_> = (0..8).map(|_| watch("admin")).collect();
    assert!(viewers.iter().all(|viewer| viewer.status == 200));
    assert_eq!(watch("admin").status, 429);
    assert_eq!(watch("second").status, 200);
}

/// True if the server ends a connection on which nothing is sent.
fn is_ended(connection: &mut TcpStream, wait: Duration) -> bool {
    connection.set_read_timeout(Some(wait)).unwrap();
    match connection.read(&mut [0]) {
        Ok(n) => n == 0,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn a_client_has_so_many_connections() {
    let mut setup = Setup::default();
    setup.server.max_client_connections = NonZeroUsize::new(3);
    let server = setup.start();
    let connect = || TcpStream::connect(server.address).unwrap();
    let mut idle: Vec<TcpStream> = (0..3).map(|_| connect()).collect();
    assert!(is_ended(&mut connect(), Duration::from_secs(60)));
    assert!(!is_ended(&mut idle[0], Duration::from_millis(50)));
    drop(idle);
    // Its places are free once the server has seen that they ended.
    let until = std::time::Instant::now() + Duration::from_secs(60);
    while is_ended(&mut connect(), Duration::from_millis(200)) {
        assert!(std::time::Instant::now() < until);
    }
}

#[test]
fn health_needs_no_admin() {
    let server = Setup::with_keys("a\nb\n").start();
    assert_eq!(get(server.address, "/health").status, 200);
    assert_eq!(with_key(&server, "a", "GET", "/v1/models", "").status, 200);
}
