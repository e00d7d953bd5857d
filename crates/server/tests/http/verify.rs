//! Texts that are computed again, and what of them is counted.

use model_tests::http::post;
use serde_json::{Value, json};

use crate::support::{Server, Setup};

fn verifying(setup: Setup, part: f64) -> Server {
    let mut setup = setup;
    setup.server.verify = part;
    setup.start()
}

fn complete(server: &Server, more: &Value) -> Value {
    let mut body = json!({"prompt": "Once upon a time", "max_tokens": 12, "seed": 7});
    let fields = more.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(fields);
    let reply = post(server.address, "/v1/completions", &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.json()
}

#[test]
fn texts_are_the_same_again() {
    let server = verifying(Setup::default(), 1.0);
    complete(&server, &json!({"temperature": 0}));
    complete(&server, &json!({"temperature": 0.9, "n": 2, "logprobs": 3}));
    complete(&server, &json!({"temperature": 0.9, "stop": [" was"]}));
    server.await_metric("cellar_verified_total", 4.0);
    // What is held to a form is not computed again.
    let schema =
        json!({"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [1]}}});
    complete(&server, &json!({"response_format": schema}));
    complete(&server, &json!({}));
    server.await_metric("cellar_verified_total", 5.0);
    assert_eq!(server.metric("cellar_mismatch_total"), 0.0);
    // Nothing of it is a request.
    server.await_metric("cellar_requests_total{end=\"finished\"}", 6.0);
}

#[test]
fn a_part_of_the_texts_is_computed_again() {
    let server = verifying(Setup::default(), 0.5);
    for _ in 0..4 {
        complete(&server, &json!({}));
    }
    server.await_metric("cellar_verified_total", 2.0);
    let server = verifying(Setup::default(), 0.0);
    complete(&server, &json!({}));
    assert_eq!(server.metric("cellar_verified_total"), 0.0);
}

/// The script stands for a fault: the text is not the model's.
#[test]
fn a_planted_fault_is_found() {
    let server = verifying(Setup::scripted(), 1.0);
    server.script("nothing that the model writes");
    complete(&server, &json!({"max_tokens": 60}));
    server.await_metric("cellar_mismatch_total", 1.0);
    complete(&server, &json!({}));
    server.await_metric("cellar_verified_total", 2.0);
    assert_eq!(server.metric("cellar_mismatch_total"), 1.0);
}
