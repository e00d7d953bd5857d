//! Texts that are held to schemas, grammars, regular expressions and choices, under each API's
//! names.

use model_tests::http::post;
use serde_json::{Value, json};

use crate::support::{Server, Setup, with};

fn chat_body(extra: &Value) -> Value {
    let messages = json!([{"role": "user", "content": "Once upon a time"}]);
    with(
        json!({"temperature": 0, "max_tokens": 60, "messages": messages}),
        extra,
    )
}

/// The text of an answer.
fn chat(server: &Server, extra: &Value) -> String {
    let reply = post(server.address, "/v1/chat/completions", &chat_body(extra));
    assert_eq!(reply.status, 200, "{extra}: {}", reply.body);
    let text = reply.json()["choices"][0]["message"]["content"].clone();
    text.as_str()
        .unwrap_or_else(|| panic!("{extra}"))
        .to_owned()
}

fn refused(server: &Server, path: &str, body: &Value) -> Value {
    let reply = post(server.address, path, body);
    assert_eq!(reply.status, 400, "{body}: {}", reply.body);
    reply.json()["error"].clone()
}

#[test]
fn a_text_is_held_to_what_any_of_the_fields_says() {
    let server = Setup::default().start();
    let (gbnf, lark) = ("root ::= \"red\" | \"blue\"", "start: \"red\" | \"blue\"");
    for extra in [
        json!({"grammar": gbnf}),
        json!({"guided_grammar": lark}),
        json!({"guided_grammar": gbnf}),
        json!({"guided_regex": "red|blue"}),
        json!({"guided_choice": ["red", "blue"]}),
        json!({"structured_outputs": {"regex": "red|blue", "json_object": false}}),
        json!({"structured_outputs": {"choice": ["red", "blue"], "grammar": null}}),
        json!({"structured_outputs": {"grammar": gbnf}}),
        json!({"response_format": {"type": "grammar", "grammar": gbnf}}),
        json!({"response_format": {"type": "regex", "pattern": "red|blue"}}),
        json!({"response_format": {"type": "regex", "value": "red|blue"}, "grammar": ""}),
    ] {
        let text = chat(&server, &extra);
        assert!(["red", "blue"].contains(&text.as_str()), "{extra}: {text}");
        let body = with(json!({"prompt": "One day", "max_tokens": 60}), &extra);
        let reply = post(server.address, "/v1/completions", &body).json();
        let text = reply["choices"][0]["text"].as_str().unwrap().to_owned();
        assert!(["red", "blue"].contains(&text.as_str()), "{extra}: {text}");
        let reply = post(server.address, "/completion", &body).json();
        let text = reply["content"].as_str().unwrap().to_owned();
        assert!(["red", "blue"].contains(&text.as_str()), "{extra}: {text}");
    }
    let schema = json!({"type": "object", "properties": {"a": {"type": "boolean"}},
                        "required": ["a"], "additionalProperties": false});
    for extra in [
        json!({"json_schema": schema}),
        json!({"guided_json": schema.to_string()}),
        json!({"structured_outputs": {"json": schema}}),
    ] {
        let text = chat(&server, &extra);
        let value: Value = serde_json::from_str(&text).unwrap();
        assert!(value["a"].is_boolean(), "{extra}: {text}");
    }
}

#[test]
fn two_constraints_are_refused_with_both_names() {
    let server = Setup::default().start();
    let schema = json!({"type": "object"});
    for (extra, first, second) in [
        (
            json!({"grammar": "root ::= \"a\"", "guided_regex": "a"}),
            "grammar",
            "guided_regex",
        ),
        (
            json!({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}),
            "response_format",
            "guided_choice",
        ),
        (
            json!({"json_schema": schema, "guided_json": schema}),
            "json_schema",
            "guided_json",
        ),
        (
            json!({"structured_outputs": {"choice": ["a"], "regex": "a"}}),
            "structured_outputs.choice",
            "structured_outputs.regex",
        ),
    ] {
        let error = refused(&server, "/v1/chat/completions", &chat_body(&extra));
        assert_eq!(error["param"], second, "{error}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(&format!("'{first}'")), "{message}");
    }
}

#[test]
fn what_is_wrong_in_a_grammar_is_named_with_its_place() {
    let server = Setup::default().start();
    for (extra, param, wanted) in [
        (
            json!({"grammar": "root ::= \"a\" other"}),
            "grammar",
            "line 1, column 14: no rule",
        ),
        (
            json!({"guided_grammar": "start: nothing"}),
            "guided_grammar",
            "nothing",
        ),
        (
            json!({"guided_regex": "a(?=b)"}),
            "guided_regex",
            "look-around",
        ),
        (
            json!({"guided_choice": ["a", 7]}),
            "guided_choice",
            "no text",
        ),
        (json!({"guided_json": "{"}), "guided_json", "no JSON"),
        (
            json!({"response_format": {"type": "regex", "pattern": "("}}),
            "response_format.regex",
            "unclosed group",
        ),
        (
            json!({"response_format": {"type": "xml"}}),
            "response_format.type",
            "regex",
        ),
        (
            json!({"structured_outputs": {"structural_tag": "{}"}}),
            "structured_outputs.structural_tag",
            "not supported",
        ),
    ] {
        let error = refused(&server, "/v1/chat/completions", &chat_body(&extra));
        assert_eq!(error["param"], param, "{error}");
        assert!(
            error["message"].as_str().unwrap().contains(wanted),
            "{error}"
        );
    }
    // So large that a compiler without limits would end the server.
    let deep = format!("start: {}\"a\"{}", "(".repeat(50_000), ")".repeat(50_000));
    refused(
        &server,
        "/v1/chat/completions",
        &chat_body(&json!({"guided_grammar": deep})),
    );
    assert_eq!(
        chat(&server, &json!({"guided_choice": ["still there"]})),
        "still there"
    );
}

/// A schema as pydantic and OpenAPI write them, with keywords that no grammar holds.
fn annotated() -> Value {
    json!({"type": "object", "required": ["tags", "size"], "additionalProperties": false,
           "properties": {
               "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2, "uniqueItems": true},
               "size": {"type": "integer", "format": "int32", "minimum": 0, "maximum": 9}},
           "not": {"required": ["other"]}})
}

#[test]
fn keywords_that_cannot_be_held_are_skipped_unless_the_schema_is_strict() {
    let server = Setup::default().start();
    let format = |strict: Value| {
        let schema = json!({"name": "x", "strict": strict, "schema": annotated()});
        json!({"response_format": {"type": "json_schema", "json_schema": schema}})
    };
    for strict in [json!(false), Value::Null] {
        let text = chat(&server, &format(strict));
        let value: Value = serde_json::from_str(&text).unwrap();
        assert!(
            value["size"].as_u64().unwrap() <= 9 && value["tags"].is_array(),
            "{text}"
        );
    }
    let error = refused(
        &server,
        "/v1/chat/completions",
        &chat_body(&format(json!(true))),
    );
    assert_eq!(
        error["param"], "response_format.json_schema.schema",
        "{error}"
    );
    assert!(
        error["message"].as_str().unwrap().contains("uniqueItems'"),
        "{error}"
    );

    let text = json!({"format": {"type": "json_schema", "name": "x", "strict": true, "schema": annotated()}});
    let mut body = json!({"input": "Hello", "max_output_tokens": 60, "text": text});
    let error = refused(&server, "/v1/responses", &body);
    assert_eq!(error["param"], "text.format.schema", "{error}");
    body["text"]["format"]["strict"] = json!(false);
    assert_eq!(post(server.address, "/v1/responses", &body).status, 200);

    let body = json!({"model": "stories", "stream": false, "format": annotated(),
                      "messages": [{"role": "user", "content": "Hello"}]});
    let reply = post(server.address, "/api/chat", &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
}

/// One tool of many with an annotation does not stop a request that demands a call.
#[test]
fn tools_are_held_as_far_as_they_can_be_unless_they_are_strict() {
    let setup = Setup {
        template: Some("{# <tool_call> #}{% for m in messages %}{{ m.content }}{% endfor %}"),
        ..Setup::default()
    };
    let server = setup.start();
    let request = |strict: bool| {
        let function = json!({"name": "tag", "strict": strict, "parameters": annotated()});
        chat_body(
            &json!({"tools": [{"type": "function", "function": function}],
                          "tool_choice": "required", "max_tokens": 120}),
        )
    };
    let reply = post(server.address, "/v1/chat/completions", &request(false));
    assert_eq!(reply.status, 200, "{}", reply.body);
    let call = &reply.json()["choices"][0]["message"]["tool_calls"][0]["function"];
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert!(arguments["size"].as_u64().unwrap() <= 9, "{arguments}");
    let error = refused(&server, "/v1/chat/completions", &request(true));
    assert_eq!(error["param"], "tools[0].function.parameters", "{error}");
}
