//! Anthropic's endpoints over a socket.

use model_tests::http::{open, post, request};
use serde_json::{Value, json};

use crate::support::{Alone, Setup, with};

fn body(extra: Value) -> Value {
    let body = json!({
        "model": "stories", "max_tokens": 12, "temperature": 0,
        "messages": [{"role": "user", "content": "Once upon a time"}],
    });
    with(body, &extra)
}

#[test]
fn a_message_is_the_text_of_its_rendered_messages() {
    let server = Setup::default().start();
    let reply = post(
        server.address,
        "/v1/messages",
        &body(json!({"system": "Be brief."})),
    );
    assert_eq!(reply.status, 200, "{}", reply.body);
    let message = reply.json();
    let alone = Alone::new().greedy(
        "<|system|>Be brief.\n<|user|>Once upon a time\n<|assistant|>",
        12,
    );
    assert_eq!(message["content"], json!([{"type": "text", "text": alone}]));
    assert_eq!(message["type"], "message");
    assert_eq!(message["role"], "assistant");
    assert_eq!(message["stop_reason"], "max_tokens");
    assert_eq!(message["stop_sequence"], Value::Null);
    assert_eq!(message["usage"]["output_tokens"], 12);
    assert_eq!(message["usage"]["cache_read_input_tokens"], 0);
    let n_prompt = message["usage"]["input_tokens"].as_u64().unwrap();
    // Blocks are the same prompt, of which all but the last token is cached now.
    let blocks = json!({
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Once upon a time"}]}],
    });
    let again = post(server.address, "/v1/messages", &body(blocks.clone())).json();
    assert_eq!(again["content"], message["content"]);
    assert_eq!(again["usage"]["cache_read_input_tokens"], n_prompt - 1);
    assert_eq!(again["usage"]["input_tokens"], 1);
    // Claude's clients count with a query.
    let counted = post(
        server.address,
        "/v1/messages/count_tokens?beta=true",
        &body(blocks),
    );
    assert_eq!(counted.json(), json!({ "input_tokens": n_prompt }));
}

#[test]
fn a_stream_has_all_events_in_their_order() {
    let server = Setup::default().start();
    let whole = post(server.address, "/v1/messages", &body(json!({}))).json();
    let reply = post(
        server.address,
        "/v1/messages",
        &body(json!({"stream": true})),
    );
    assert_eq!(reply.header("content-type"), Some("text/event-stream"));
    assert!(reply.is_complete);
    let names: Vec<&str> = reply
        .body
        .lines()
        .filter_map(|line| line.strip_prefix("event: "))
        .collect();
    let events = reply.json_events();
    let types: Vec<&str> = events
        .iter()
        .map(|event| event["type"].as_str().unwrap())
        .collect();
    assert_eq!(names, types);
    let n_deltas = names
        .iter()
        .filter(|name| **name == "content_block_delta")
        .count();
    assert!(n_deltas > 0);
    let wanted = [
        &["message_start", "ping", "content_block_start"][..],
        &vec!["content_block_delta"; n_deltas],
        &["content_block_stop", "message_delta", "message_stop"],
    ];
    assert_eq!(names, wanted.concat());
    let text: String = events
        .iter()
        .filter_map(|event| event["delta"]["text"].as_str())
        .collect();
    assert_eq!(json!(text), whole["content"][0]["text"]);
    assert_eq!(events[0]["message"]["content"], json!([]));
    assert_eq!(events[0]["message"]["stop_reason"], Value::Null);
    assert_eq!(
        events[2]["content_block"],
        json!({"type": "text", "text": ""})
    );
    let delta = &events[events.len() - 2];
    assert_eq!(
        delta["delta"],
        json!({"stop_reason": "max_tokens", "stop_sequence": null})
    );
    assert_eq!(delta["usage"]["output_tokens"], 12);
    assert!(delta["usage"]["cache_read_input_tokens"].as_u64() > Some(0));
}

#[test]
fn a_stop_sequence_is_named() {
    let server = Setup::default().start();
    let whole = post(server.address, "/v1/messages", &body(json!({}))).json();
    let text = whole["content"][0]["text"].as_str().unwrap();
    let word = text.split_whitespace().nth(3).unwrap();
    let stopped = body(json!({"stop_sequences": [word]}));
    let stopped = post(server.address, "/v1/messages", &stopped).json();
    assert_eq!(stopped["stop_reason"], "stop_sequence");
    assert_eq!(stopped["stop_sequence"], word);
    let shown = stopped["content"][0]["text"].as_str().unwrap();
    assert_eq!(shown, &text[..text.find(word).unwrap()]);
}

#[test]
fn an_answer_is_held_to_its_format() {
    let server = Setup::default().start();
    let send = |extra: Value| post(server.address, "/v1/messages", &body(extra));
    let schema = json!({"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                        "required": ["city"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "schema": schema});
    let new = json!({"output_config": {"format": format}, "max_tokens": 60});
    for extra in [new, json!({"output_format": format, "max_tokens": 60})] {
        let message = send(extra).json();
        let text = message["content"][0]["text"].as_str().unwrap();
        let value: Value = serde_json::from_str(text).unwrap();
        assert!(["Rome", "Oslo"].contains(&value["city"].as_str().unwrap()));
    }
    let wrong = json!({"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}});
    for (extra, wanted) in [
        (
            json!({"output_config": {"format": {"type": "json_schema", "schema": wrong}}}),
            "nowhere",
        ),
        (
            json!({"output_format": {"type": "xml"}}),
            "'output_format.type'",
        ),
        (
            json!({"output_format": {"type": "json_schema"}}),
            "needs a 'schema'",
        ),
        (
            json!({"output_format": format, "output_config": {"format": format}}),
            "give one of them",
        ),
    ] {
        let reply = send(extra);
        assert_eq!(reply.status, 400, "{}", reply.body);
        let error = reply.json();
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains(wanted), "{message}");
    }
}

#[test]
fn errors_have_anthropics_shape() {
    let server = Setup::with_keys("secret").start();
    let send = |body: &Value, key: &str| {
        let headers = [("x-api-key", key), ("content-type", "application/json")];
        let request = request("POST", "/v1/messages", &headers, &body.to_string());
        open(server.address, &request).finish()
    };
    let refused = |extra: Value, status: u16, kind: &str, wanted: &str| {
        let reply = send(&body(extra), "secret");
        assert_eq!(reply.status, status, "{}", reply.body);
        let error = reply.json();
        assert_eq!(error["type"], "error");
        assert_eq!(error["error"]["type"], kind);
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains(wanted), "{message}");
    };
    let wrong_key = send(&body(json!({})), "guess");
    assert_eq!(wrong_key.status, 401);
    assert_eq!(wrong_key.json()["error"]["type"], "authentication_error");
    let invalid = "invalid_request_error";
    refused(
        json!({"max_tokens": 0}),
        400,
        invalid,
        "'max_tokens' is needed",
    );
    refused(json!({"temperature": -1}), 400, invalid, "temperature -1");
    refused(
        json!({"stop_sequences": [""]}),
        400,
        invalid,
        "'stop_sequences' is empty",
    );
    refused(
        json!({"messages": []}),
        400,
        invalid,
        "there are no messages",
    );
    let image = json!([{"role": "user", "content": [
        {"type": "text", "text": "What is it?"}, {"type": "image", "source": {
            "type": "base64", "media_type": "image/png", "data": "AA=="}}]}]);
    let at = "'messages[0].content[1]' is a picture, and this model takes text only";
    refused(json!({"messages": image}), 400, invalid, at);
    assert_eq!(send(&body(json!({})), "secret").status, 200);
}
