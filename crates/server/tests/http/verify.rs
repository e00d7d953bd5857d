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
    complete(&server, &json!({}));
    server.await_metric("cellar_verified_total", 5.0);
    assert_eq!(server.metric("cellar_mismatch_total"), 0.0);
    // Nothing of it is a request.
    server.await_metric("cellar_requests_total{end=\"finished\"}", 5.0);
}

/// A text that is held to a form is held to it again.
#[test]
fn texts_of_a_form_are_the_same_again() {
    let server = verifying(Setup::default(), 1.0);
    let schema = json!({"type": "object", "properties": {"a": {"type": "boolean"}},
                        "required": ["a"], "additionalProperties": false});
    let mut n_texts = 0.0;
    for form in [
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}),
        json!({"grammar": "root ::= \"red\" | \"blue\" root"}),
        json!({"guided_regex": "[a-z ]{5,30}"}),
        json!({"guided_choice": ["red", "blue"]}),
    ] {
        let more = json!({"temperature": 0.9, "n": 2, "max_tokens": 40});
        let fields = more.as_object().unwrap().clone();
        let mut body = form;
        body.as_object_mut().unwrap().extend(fields);
        complete(&server, &body);
        n_texts += 2.0;
        server.await_metric("cellar_verified_total", n_texts);
    }
    assert_eq!(server.metric("cellar_mismatch_total"), 0.0);
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

/// Of two answers that a script gives, the model itself gives one at most.
#[test]
fn a_planted_fault_is_found_in_a_text_of_a_form() {
    let server = verifying(Setup::scripted(), 1.0);
    let form = json!({"temperature": 0, "guided_choice": ["red", "blue"]});
    for (n_texts, script) in [(1.0, "red"), (2.0, "blue")] {
        server.script(script);
        let reply = complete(&server, &form);
        assert_eq!(reply["choices"][0]["text"], script);
        server.await_metric("cellar_verified_total", n_texts);
    }
    assert!(server.metric("cellar_mismatch_total") >= 1.0);
}

/// Thoughts that a budget ends are ended again.
#[test]
fn thoughts_with_a_budget_are_verified() {
    let server = verifying(Setup::scripted(), 1.0);
    let messages = json!([{"role": "user", "content": "Hello"}]);
    let body = json!({"messages": messages, "max_tokens": 30, "temperature": 0,
                      "reasoning_budget": 4});
    let reply = post(server.address, "/v1/chat/completions", &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    server.await_metric("cellar_verified_total", 1.0);
    assert_eq!(server.metric("cellar_mismatch_total"), 0.0);
}
