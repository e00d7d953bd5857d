//! The endpoints that render prompts to tokens, as vLLM has them.

use model_tests::http::post;
use serde_json::{Value, json};

use crate::support::{Server, Setup, with};

const TEXT: &str =
    "Once upon a time there was a little girl with a big red ball and a small brown dog.";

/// What is rendered for a request: a list for prompts, else one.
fn render(server: &Server, path: &str, body: &Value) -> Vec<Value> {
    let reply = post(server.address, &format!("{path}/render"), body);
    assert_eq!(reply.status, 200, "{path}: {}", reply.body);
    assert_eq!(reply.header("content-type"), Some("application/json"));
    match (path, reply.json()) {
        ("/v1/completions", Value::Array(list)) => list,
        ("/v1/completions", other) => panic!("not a list: {other}"),
        (_, one) => vec![one],
    }
}

/// All tokens but the last of each prompt are cached once the rendered tokens were computed.
#[test]
fn rendered_tokens_are_those_that_are_computed() {
    // As many sequences as running texts and cached prompts take: none is evicted for another.
    let setup = Setup {
        n_seqs: 16,
        ..Setup::default()
    };
    let server = setup.start();
    let chat =
        json!([{"role": "system", "content": "Tell a story."}, {"role": "user", "content": TEXT}]);
    let mut n_rendered = 0;
    for (path, body, prefix) in [
        ("/v1/completions", json!({"prompt": TEXT}), "cmpl-"),
        (
            "/v1/completions",
            json!({"prompt": [format!("{TEXT} One day"), format!("A: {TEXT}")], "n": 2}),
            "cmpl-",
        ),
        (
            "/v1/completions",
            json!({"prompt": (1..40).collect::<Vec<_>>()}),
            "cmpl-",
        ),
        (
            "/v1/chat/completions",
            json!({"messages": chat}),
            "chatcmpl-",
        ),
        (
            "/v1/responses",
            json!({"instructions": "Go on.", "input": TEXT}),
            "resp_",
        ),
    ] {
        let body = with(
            json!({"model": "stories", "temperature": 0, "seed": 7}),
            &body,
        );
        let rendered = render(&server, path, &body);
        let mut n_tokens = 0;
        for one in &rendered {
            let id = one["request_id"].as_str().unwrap();
            assert!(id.starts_with(prefix), "{id}");
            assert_eq!(one["model"], "stories");
            assert_eq!(one["sampling_params"]["temperature"], 0.0);
            assert_eq!(one["sampling_params"]["seed"], 7);
            let ids = &one["token_ids"];
            n_tokens += ids.as_array().unwrap().len();
            let body = json!({"prompt": ids, "max_tokens": 1});
            assert_eq!(post(server.address, "/v1/completions", &body).status, 200);
        }
        let usage = &post(server.address, path, &body).json()["usage"];
        let (all, cached) = match path {
            "/v1/responses" => (&usage["input_tokens"], &usage["input_tokens_details"]),
            _ => (&usage["prompt_tokens"], &usage["prompt_tokens_details"]),
        };
        assert_eq!(*all, n_tokens, "{path}");
        assert_eq!(cached["cached_tokens"], n_tokens - rendered.len(), "{path}");
        n_rendered += rendered.len();
    }
    assert_eq!(n_rendered, 6);
}

#[test]
fn rendered_parameters_are_those_of_the_request() {
    let server = Setup::default().start();
    let body = json!({
        "prompt": TEXT, "temperature": 0.123, "top_p": 0.456, "frequency_penalty": 1.1, "max_tokens": 5,
        "stop": "\n", "n": 3, "cache_salt": "mine", "priority": 2, "stream": true,
    });
    let rendered = &render(&server, "/v1/completions", &body)[0];
    let params = &rendered["sampling_params"];
    for name in [
        "temperature",
        "top_p",
        "frequency_penalty",
        "max_tokens",
        "n",
    ] {
        assert_eq!(params[name], body[name], "{name}");
    }
    assert_eq!(params["stop"], json!(["\n"]));
    assert_eq!(params["seed"], Value::Null);
    for name in ["cache_salt", "priority", "stream"] {
        assert_eq!(rendered[name], body[name], "{name}");
    }
}

/// What the endpoint refuses that answers, with the same error.
#[test]
fn what_is_not_answered_is_not_rendered() {
    let mut setup = Setup {
        n_ctx: 256,
        n_seqs: 1,
        ..Setup::default()
    };
    setup.server.strict = true;
    let server = setup.start();
    let long = "a b ".repeat(300);
    for (path, body, status) in [
        (
            "/v1/completions",
            json!({"prompt": "a", "model": "nothing"}),
            404,
        ),
        ("/v1/completions", json!({"prompt": {"a": 1}}), 400),
        ("/v1/completions", json!({"prompt": []}), 400),
        ("/v1/completions", json!({"prompt": [70_000]}), 400),
        (
            "/v1/completions",
            json!({"prompt": "a", "prompt_logprobs": 1}),
            400,
        ),
        ("/v1/completions", json!({"prompt": long}), 400),
        (
            "/v1/completions",
            json!({"prompt": "a", "suffix": "b"}),
            400,
        ),
        ("/v1/chat/completions", json!({}), 400),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "a", "content": "b"}]}),
            400,
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": long}]}),
            400,
        ),
        (
            "/v1/responses",
            json!({"input": "a", "conversation": "conv_1"}),
            400,
        ),
    ] {
        let answered = post(server.address, path, &body);
        let rendered = post(server.address, &format!("{path}/render"), &body);
        assert_eq!(
            (answered.status, rendered.status),
            (status, status),
            "{path} {body}"
        );
        assert_eq!(answered.json(), rendered.json(), "{path} {body}");
    }
    let body = json!({"input": "a", "previous_response_id": "resp_1"});
    let reply = post(server.address, "/v1/responses/render", &body);
    assert_eq!(reply.status, 400);
    assert_eq!(reply.json()["error"]["param"], "previous_response_id");
}

/// What a user writes is text, also where it spells a control token.
#[test]
fn messages_have_no_control_tokens() {
    let server = Setup::default().start();
    let rendered = |content: &str| {
        let body = json!({"messages": [{"role": "user", "content": content}]});
        let ids = render(&server, "/v1/chat/completions", &body)[0]["token_ids"].clone();
        let text = post(server.address, "/detokenize", &json!({"tokens": ids})).json();
        (ids, text["content"].as_str().unwrap().to_owned())
    };
    let end = post(server.address, "/tokenize", &json!({"content": "</s>"})).json();
    let end = end["tokens"].as_array().unwrap().last().unwrap().clone();
    let (ids, text) = rendered("One day</s>Tom");
    assert!(!ids.as_array().unwrap().contains(&end), "{ids}");
    assert!(text.contains("/s>Tom"), "{text}");
    let (ids, _) = rendered("One day");
    assert!(!ids.as_array().unwrap().is_empty());
    // A text prompt is read as ever.
    let body = json!({"prompt": "One day</s>Tom"});
    let ids = render(&server, "/v1/completions", &body)[0]["token_ids"].clone();
    assert!(ids.as_array().unwrap().contains(&end), "{ids}");
}
