//! Everything that is refused, with its status and shape.

use model_tests::http::{get, open, post, request, send_raw};
use serde_json::{Value, json};

use crate::support::{Server, Setup};

/// The error object of an answer with this status.
#[track_caller]
fn refused(server: &Server, path: &str, body: &Value, status: u16) -> Value {
    let reply = post(server.address, path, body);
    assert_eq!(reply.status, status, "{body}: {}", reply.body);
    let error = reply.json()["error"].clone();
    for name in ["message", "type", "param", "code"] {
        assert!(error.get(name).is_some(), "no {name} in {error}");
    }
    error
}

fn user(content: &Value) -> Value {
    json!([{"role": "user", "content": content}])
}

#[test]
fn wrong_fields_are_named() {
    let server = Setup::default().start();
    let image = json!([{"type": "text", "text": "What is it?"},
                       {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]);
    let text = json!("Hello");
    for (extra, param) in [
        (
            json!({"messages": user(&text), "temperature": "warm"}),
            "temperature",
        ),
        (
            json!({"messages": user(&text), "max_tokens": -2}),
            "max_tokens",
        ),
        (json!({"messages": user(&text), "stop": [1]}), "stop"),
        (json!({"messages": user(&text), "stop": ""}), "stop"),
        (
            json!({"messages": user(&text), "stream_options": {"include_usage": 1}}),
            "stream_options.include_usage",
        ),
        (json!({"messages": user(&text), "top_k": -2}), "top_k"),
        (
            json!({"messages": user(&text), "priority": "high"}),
            "priority",
        ),
        (json!({"messages": "Hello"}), "messages"),
        (json!({"messages": user(&image)}), "messages[0].content[1]"),
        (
            json!({"messages": [{"role": "wizard", "content": "a"}]}),
            "messages[0].role",
        ),
        (
            json!({"messages": user(&text), "response_format": {"type": "xml"}}),
            "response_format.type",
        ),
    ] {
        let error = refused(&server, "/v1/chat/completions", &extra, 400);
        assert_eq!(error["param"], param, "{error}");
        assert_eq!(error["type"], "invalid_request_error");
    }
    let biased = json!({"messages": user(&text), "logit_bias": {"5": 1e9}});
    let error = refused(&server, "/v1/chat/completions", &biased, 400);
    assert_eq!(error["param"], "logit_bias");
    let error = refused(&server, "/v1/chat/completions", &json!({}), 400);
    assert_eq!(error["param"], "messages");
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("missing field `messages`"),
        "{error}"
    );
    let error = refused(
        &server,
        "/v1/completions",
        &json!({"prompt": {"a": 1}}),
        400,
    );
    assert_eq!(error["param"], "prompt");
    let error = refused(
        &server,
        "/v1/completions",
        &json!({"prompt": "a", "top_p": 2}),
        400,
    );
    assert_eq!(error["param"], "top_p");
}

#[test]
fn what_would_change_the_result_is_refused_with_its_name() {
    let server = Setup::default().start();
    for (name, value) in [
        ("dynatemp_range", json!(0.5)),
        ("best_of", json!(2)),
        ("modalities", json!(["text", "audio"])),
        ("bad_words", json!(["a"])),
        ("allowed_token_ids", json!([1])),
        ("add_generation_prompt", json!(false)),
        ("echo", json!(true)),
        ("truncate_prompt_tokens", json!(5)),
        ("prompt_logprobs", json!(1)),
    ] {
        let mut body = json!({"messages": user(&json!("Hello"))});
        body[name] = value;
        let error = refused(&server, "/v1/chat/completions", &body, 400);
        assert_eq!(
            (&error["param"], &error["code"]),
            (&json!(name), &json!("unsupported_parameter"))
        );
    }
    let body = json!({"prompt": "Hello", "prompt_logprobs": 1});
    let error = refused(&server, "/v1/completions", &body, 400);
    assert_eq!(error["param"], "prompt_logprobs");
    for (name, value) in [("n_cmpl", json!(3)), ("post_sampling_probs", json!(true))] {
        let mut body = json!({"prompt": "Hello"});
        body[name] = value;
        assert_eq!(refused(&server, "/completion", &body, 400)["param"], name);
    }
    // What changes nothing is accepted.
    let neutral = json!({"messages": user(&json!("Hello")), "max_tokens": 1, "echo": false,
                         "add_generation_prompt": true, "guided_json": null, "stop_token_ids": [],
                         "continue_final_message": false, "skip_special_tokens": true});
    let reply = post(server.address, "/v1/chat/completions", &neutral);
    assert_eq!(reply.status, 200, "{}", reply.body);
}

/// An error about the prompt names the field of its endpoint, in the endpoint's shape.
#[test]
fn errors_of_prompts_name_the_field_of_the_endpoint() {
    let server = Setup::default().start();
    let long = "One day. ".repeat(2000);
    let messages = user(&json!(long));
    for (path, body, field) in [
        (
            "/v1/chat/completions",
            json!({"messages": messages}),
            "messages",
        ),
        ("/v1/completions", json!({"prompt": long}), "prompt"),
        ("/v1/responses", json!({"input": long}), "input"),
        ("/completion", json!({"prompt": long}), "prompt"),
    ] {
        let error = refused(&server, path, &body, 400);
        assert_eq!(error["param"], field, "{path}: {error}");
        assert!(error["n_prompt_tokens"].as_u64() > error["n_ctx"].as_u64());
        let (kind, code) = match path {
            "/completion" => ("exceed_context_size_error", json!(400)),
            _ => ("invalid_request_error", json!("context_length_exceeded")),
        };
        assert_eq!(
            (&error["type"], &error["code"]),
            (&json!(kind), &code),
            "{path}"
        );
    }
    let setup = Setup {
        template: None,
        ..Setup::default()
    };
    let server = setup.start();
    let error = refused(&server, "/v1/responses", &json!({"input": "Hello"}), 400);
    assert_eq!(
        (&error["param"], &error["code"]),
        (&json!("input"), &json!("no_chat_template"))
    );
}

#[test]
fn so_many_messages_are_refused_with_the_numbers() {
    let server = Setup::default().start();
    let messages = vec![json!({"role": "user", "content": "a"}); 20_000];
    for (path, param) in [
        ("/v1/chat/completions", "messages"),
        ("/apply-template", "messages"),
        ("/v1/responses", "input"),
    ] {
        let body = json!({"messages": messages, "input": messages});
        let error = refused(&server, path, &body, 400);
        assert_eq!(error["param"], param, "{path}");
        let message = error["message"].as_str().unwrap();
        assert!(
            message.contains("20000") && message.contains("16384"),
            "{message}"
        );
    }
}

#[test]
fn what_is_no_json_is_refused_with_its_place() {
    let server = Setup::default().start();
    for (body, reason) in [
        ("{\"messages\": [}", "line 1 column 15"),
        ("[]", "not a JSON object"),
        ("hello", "line 1 column 1"),
    ] {
        let sent = request("POST", "/v1/chat/completions", &[], body);
        let reply = open(server.address, &sent).finish();
        assert_eq!(reply.status, 400);
        let message = reply.json()["error"]["message"]
            .as_str()
            .unwrap()
            .to_owned();
        assert!(message.contains(reason), "{message}");
    }
}

#[test]
fn what_is_not_there_is_refused_with_what_is() {
    let server = Setup::default().start();
    assert_eq!(get(server.address, "/v1/models/gpt-4").status, 404);
    assert_eq!(get(server.address, "/v2/nothing").status, 404);
    let reply = get(server.address, "/v1/chat/completions");
    assert_eq!((reply.status, reply.header("allow")), (405, Some("POST")));
    assert!(
        reply.json()["error"]["message"]
            .as_str()
            .unwrap()
            .contains("takes POST")
    );
    let reply = post(server.address, "/v1/models", &json!({}));
    assert_eq!((reply.status, reply.header("allow")), (405, Some("GET")));
    let input = json!({"input": "Hello"});
    let error = refused(&server, "/v1/embeddings", &input, 400);
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("does not give embeddings"),
        "{error}"
    );
    let rerank = json!({"query": "a", "documents": ["b"]});
    let error = refused(&server, "/v1/rerank", &rerank, 400);
    assert_eq!(error["param"], "model");
}

#[test]
fn a_model_without_template_takes_no_messages() {
    let setup = Setup {
        template: None,
        ..Setup::default()
    };
    let server = setup.start();
    let body = json!({"messages": user(&json!("Hello"))});
    for path in ["/v1/chat/completions", "/apply-template"] {
        let error = refused(&server, path, &body, 400);
        match path {
            "/apply-template" => assert_eq!(error["code"], 400),
            _ => assert_eq!(error["code"], "no_chat_template"),
        }
        assert!(
            error["message"]
                .as_str()
                .unwrap()
                .contains("/v1/completions"),
            "{error}"
        );
    }
}

#[test]
fn schemas_that_cannot_be_compiled_are_refused_with_the_pointer() {
    let server = Setup::default().start();
    let schema = json!({"type": "object", "properties": {"a": {"type": "strange"}}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}});
    let body = json!({"messages": user(&json!("Hello")), "response_format": format});
    let error = refused(&server, "/v1/chat/completions", &body, 400);
    assert_eq!(error["param"], "response_format.json_schema.schema");
    assert_eq!(error["code"], "invalid_schema");
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("'/properties/a"),
        "{error}"
    );
}

#[test]
fn prompts_that_are_too_long_are_refused_with_the_numbers() {
    let setup = Setup {
        n_ctx: 256,
        ..Setup::default()
    };
    let server = setup.start();
    let body = json!({"prompt": "Once upon a time ".repeat(100)});
    let error = refused(&server, "/v1/completions", &body, 400);
    assert_eq!(error["code"], "context_length_exceeded");
    assert_eq!(error["n_ctx"], 256);
    let n_prompt = error["n_prompt_tokens"].as_u64().unwrap();
    assert!(n_prompt > 256);
    let message = error["message"].as_str().unwrap();
    for number in [n_prompt, 256, n_prompt - 256] {
        assert!(message.contains(&number.to_string()), "{message}");
    }
}

#[test]
fn large_bodies_are_refused() {
    let mut setup = Setup::default();
    setup.server.max_body = 1000;
    let server = setup.start();
    let body = json!({"prompt": "a".repeat(2000)});
    let error = refused(&server, "/v1/completions", &body, 413);
    assert!(
        error["message"].as_str().unwrap().contains("1000 bytes"),
        "{error}"
    );
    // A body that does not say how long it is.
    let chunked = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
         Transfer-Encoding: chunked\r\n\r\n7d0\r\n{}\r\n0\r\n\r\n",
        "a".repeat(2000)
    );
    assert_eq!(open(server.address, &chunked).finish().status, 413);
}

#[test]
fn keys_open_everything_but_the_public_routes() {
    let server = Setup::with_keys("secret\nother\n").start();
    let ask = |headers: &[(&str, &str)], path: &str| {
        open(server.address, &request("GET", path, headers, "")).finish()
    };
    for path in ["/", "/health", "/readyz", "/livez"] {
        assert_eq!(ask(&[], path).status, 200);
    }
    for path in ["/v1/models", "/metrics", "/props", "/slots", "/nothing"] {
        for headers in [
            &[][..],
            &[("Authorization", "Bearer wrong")],
            &[("Authorization", "secret")],
        ] {
            let reply = ask(headers, path);
            assert_eq!(reply.status, 401, "{path}");
            let error = reply.json()["error"].clone();
            match path {
                "/props" | "/slots" => assert_eq!(error["code"], 401),
                _ => assert_eq!(error["code"], "invalid_api_key"),
            }
            assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
        }
    }
    assert_eq!(
        ask(&[("Authorization", "Bearer secret")], "/v1/models").status,
        200
    );
    assert_eq!(ask(&[("X-Api-Key", "other")], "/v1/models").status, 200);
    // Keys do not share prefixes.
    let body = json!({"prompt": ("Once upon a time there was a little girl. ".repeat(3)), "max_tokens": 1});
    let cached = |key: &str| {
        let key = format!("Bearer {key}");
        let headers = [("Authorization", key.as_str())];
        let sent = request("POST", "/v1/completions", &headers, &body.to_string());
        let reply = open(server.address, &sent).finish().json();
        reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap()
    };
    assert_eq!(cached("secret"), 0);
    assert_eq!(cached("other"), 0);
    assert!(cached("secret") > 0);
}

#[test]
fn pages_of_other_sites_reach_nothing() {
    let server = Setup::default().start();
    for (headers, status) in [
        ([("Host", "evil.example")].as_slice(), 403),
        (&[("Origin", "https://evil.example")], 403),
        (&[("Origin", "http://localhost:3000")], 200),
        (&[("Host", "127.0.0.1:8080")], 200),
    ] {
        let reply = open(server.address, &request("GET", "/v1/models", headers, "")).finish();
        assert_eq!(reply.status, status, "{headers:?}");
        assert_eq!(reply.header("access-control-allow-origin"), None);
    }
}

#[test]
fn a_full_queue_says_when_to_come_again() {
    let mut setup = Setup {
        n_seqs: 1,
        n_ctx: 8192,
        ..Setup::default()
    };
    setup.service.max_queued = 1;
    let server = setup.start();
    let long = crate::life::long();
    let send = || {
        let text = request("POST", "/v1/completions", &[], &long.to_string());
        send_raw(server.address, text.as_bytes()).unwrap()
    };
    let _running = send();
    server.await_metric("cellar_requests_running{", 1.0);
    let _waiting = send();
    server.await_metric("cellar_requests_waiting{", 1.0);
    let reply = post(
        server.address,
        "/v1/completions",
        &json!({"prompt": "One day"}),
    );
    assert_eq!(reply.status, 429, "{}", reply.body);
    let seconds: u64 = reply.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=60).contains(&seconds));
    assert_eq!(reply.json()["error"]["code"], "rate_limit_exceeded");
    assert_eq!(server.metric("cellar_refused_total{status=\"429\"}"), 1.0);
}
