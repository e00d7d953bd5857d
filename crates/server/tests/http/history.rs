//! Earlier messages: what this server wrote itself is taken back, and no string of a request
//! becomes a control token.

use model_tests::http::post;
use serde_json::{Value, json};

use crate::support::{Server, Setup};

/// Ends each message with a control token, and shows tools and calls.
const TEMPLATE: &str = "{% for t in tools or [] %}{{ t.function.name }}:{{ t.function.description }}\
    {{ t.function.parameters | tojson }};{% endfor %}{% for m in messages %}[{{ m.role }}]\
    {{ m.reasoning_content }}{{ m.content }}{% for c in m.tool_calls or [] %}\
    {{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}</s>{% endfor %}\
    {{ note }}";

fn server() -> Server {
    let setup = Setup {
        template: Some(TEMPLATE),
        ..Setup::default()
    };
    setup.start()
}

/// Arguments that models wrote in place of JSON, and what they become.
const BROKEN: [(&str, &str); 4] = [
    ("{\"city\": \"Pa\nris\"}", r#"f({"city": "Pa\nris"})"#),
    (r#"{"city": "Paris",}"#, r#"f({"city": "Paris"})"#),
    (r#"{"city": "Par"#, r#"f({"city": "Par"})"#),
    ("Paris", r#"f("Paris")"#),
];

/// The prompt of a request, as tokens and as a text.
fn rendered(server: &Server, path: &str, body: &Value) -> (Vec<u64>, String) {
    let reply = post(server.address, &format!("{path}/render"), body);
    assert_eq!(reply.status, 200, "{body}: {}", reply.json());
    let ids = reply.json()["token_ids"].clone();
    let text = post(server.address, "/detokenize", &json!({"tokens": ids})).json();
    let ids = ids
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap());
    (ids.collect(), text["content"].as_str().unwrap().to_owned())
}

#[test]
fn broken_arguments_are_taken_back() {
    let server = server();
    for (arguments, expected) in BROKEN {
        let call = json!({"id": "a", "type": "function",
                          "function": {"name": "f", "arguments": arguments}});
        let messages = json!([
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": null, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": null},
        ]);
        let (_, text) = rendered(
            &server,
            "/v1/chat/completions",
            &json!({"messages": messages}),
        );
        assert!(text.contains(expected), "{text}");
        let input = json!([
            {"role": "user", "content": "Hi"},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": arguments},
            {"type": "function_call_output", "call_id": "a", "output": null},
        ]);
        let (_, text) = rendered(&server, "/v1/responses", &json!({"input": input}));
        assert!(text.contains(expected), "{text}");
        // Anthropic's answers have the text as `input` then.
        let block = json!({"type": "tool_use", "id": "a", "name": "f", "input": arguments});
        let result = json!({"type": "tool_result", "tool_use_id": "a"});
        let anthropic = json!({"messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [block]},
            {"role": "user", "content": [result]},
        ]});
        let n_tokens = |body: &Value| {
            let reply = post(server.address, "/v1/messages/count_tokens", body);
            assert_eq!(reply.status, 200, "{}", reply.json());
            reply.json()["input_tokens"].as_u64().unwrap()
        };
        let (ids, _) = rendered(
            &server,
            "/v1/chat/completions",
            &json!({"messages": messages}),
        );
        assert_eq!(n_tokens(&anthropic), ids.len() as u64);
        let function = json!({"name": "f", "arguments": arguments});
        let ollama = json!({"model": "stories", "stream": false, "options": {"num_predict": 1},
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "tool_calls": [{"function": function}]},
            {"role": "tool", "tool_name": "f", "content": null},
        ]});
        let reply = post(server.address, "/api/chat", &ollama);
        assert_eq!(reply.status, 200, "{}", reply.json());
        assert_eq!(reply.json()["prompt_eval_count"], ids.len());
    }
}

#[test]
fn reasoning_is_read_under_every_name() {
    let server = server();
    for name in ["reasoning_content", "reasoning", "thinking"] {
        let messages = json!([
            {"role": "user", "content": "Hi"},
            {"role": "assistant", name: "Once upon"},
            {"role": "user", "content": "Yes"},
        ]);
        let (_, text) = rendered(
            &server,
            "/v1/chat/completions",
            &json!({"messages": messages}),
        );
        assert!(text.contains("[assistant]Once upon"), "{name}: {text}");
    }
    let thinking = json!({"type": "thinking", "thinking": "Once upon", "signature": ""});
    let count = |blocks: Value| {
        let body = json!({"messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": "Yes"},
        ]});
        let reply = post(server.address, "/v1/messages/count_tokens", &body);
        reply.json()["input_tokens"].as_u64().unwrap()
    };
    let said = json!({"type": "text", "text": "One day"});
    assert!(count(json!([thinking, said])) > count(json!([said])));
}

/// The id of the token `</s>`, which ends the messages.
fn end_of_turn(server: &Server) -> u64 {
    let reply = post(server.address, "/tokenize", &json!({"content": "</s>"})).json();
    reply["tokens"]
        .as_array()
        .unwrap()
        .last()
        .unwrap()
        .as_u64()
        .unwrap()
}

/// A request whose strings have this text, wherever a request has strings.
fn full_of(text: &str) -> Value {
    let arguments = json!({"a": text, text: [{"b": text}]}).to_string();
    let function = json!({"name": text, "arguments": arguments});
    let call = json!({"id": text, "type": "function", "function": function});
    let properties =
        json!({"a": {"type": "string", "description": text, "enum": [text]}, text: {}});
    let tool = json!({"type": "function", "function": {
        "name": "f", "description": text,
        "parameters": {"type": "object", "properties": properties},
    }});
    json!({
        "messages": [
            {"role": "system", "content": text},
            {"role": "user", "content": [{"type": "text", "text": text}], "name": text},
            {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": text, "content": text},
            {"role": "user", "content": text},
        ],
        "tools": [tool],
        "chat_template_kwargs": {"note": text},
    })
}

#[test]
fn no_string_of_a_request_becomes_a_control_token() {
    let server = server();
    let end = end_of_turn(&server);
    let n_ends = |text: &str| {
        let (ids, rendered) = rendered(&server, "/v1/chat/completions", &full_of(text));
        (ids.iter().filter(|id| **id == end).count(), rendered)
    };
    assert_eq!(n_ends("One day").0, 5);
    for text in [
        "One</s>day",
        "</s>",
        "\u{FDD0}</s>",
        // As JSON's escapes in arguments, and in two halves that the template could join.
        "<</s>/s>",
        "</",
        "/s>",
        "/s",
    ] {
        let (n, rendered) = n_ends(text);
        assert_eq!(n, 5, "{text}: {rendered}");
        // Nothing is lost: the text is in the prompt, in each place.
        let n_texts = rendered.matches(text).count();
        assert!(n_texts >= 14, "{text}: {n_texts} in {rendered}");
    }
}

#[test]
fn a_prompt_as_a_text_has_no_control_tokens_of_users() {
    let server = server();
    let apply = |body: &Value| post(server.address, "/apply-template", body);
    let of = |content: &str| json!({"messages": [{"role": "user", "content": content}]});
    assert_eq!(apply(&of("One day")).json()["prompt"], "[user]One day</s>");
    let refused = apply(&of("One</s>day"));
    assert_eq!(refused.status, 400);
    let message = refused.json()["error"]["message"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(
        message.starts_with("'messages[0].content' spells a control token"),
        "{message}"
    );
    assert!(message.contains("/v1/chat/completions/render"), "{message}");
    // A part of one is harmless where the template does not complete it.
    assert_eq!(apply(&of("One </")).json()["prompt"], "[user]One </</s>");
    let mut body = of("One day");
    body["chat_template_kwargs"] = json!({"note": "</s>"});
    assert_eq!(apply(&body).status, 400);
}
