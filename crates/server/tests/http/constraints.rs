//! Texts that are held to schemas, grammars, regular expressions and choices, under each API's
//! names.

use model_tests::http::{Response, post};
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

/// A request to each address of texts whose schema has keywords that no grammar holds, and where
/// the schema stands.
fn annotated_requests() -> [(&'static str, Value, &'static str); 6] {
    let messages = json!([{"role": "user", "content": "Hello"}]);
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "x", "schema": annotated()}});
    let flat = json!({"type": "json_schema", "name": "x", "schema": annotated()});
    [
        (
            "/v1/chat/completions",
            json!({"messages": messages, "max_tokens": 60, "response_format": format}),
            "response_format.json_schema.schema",
        ),
        (
            "/v1/completions",
            json!({"prompt": "Hello", "max_tokens": 60, "guided_json": annotated()}),
            "guided_json",
        ),
        (
            "/v1/responses",
            json!({"input": "Hello", "max_output_tokens": 60, "text": {"format": flat}}),
            "text.format.schema",
        ),
        (
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 60, "output_config": {"format": flat}}),
            "output_config.format.schema",
        ),
        (
            "/completion",
            json!({"prompt": "Hello", "n_predict": 60, "json_schema": annotated()}),
            "json_schema",
        ),
        (
            "/api/chat",
            json!({"model": "stories", "messages": messages, "format": annotated(),
                   "options": {"num_predict": 60, "num_ctx": 512, "wish": 1}}),
            "format",
        ),
    ]
}

/// The names that an answer has in its warnings. In a stream one object has them, near its end.
fn warned(reply: &Response) -> Vec<String> {
    let lines = reply.body.lines();
    let lines = lines.map(|line| line.strip_prefix("data: ").unwrap_or(line));
    let objects = lines.filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let lists = objects.filter_map(|object| {
        let own = object
            .get("warnings")
            .or_else(|| object["response"].get("warnings"))?;
        Some(own.as_array().unwrap().clone())
    });
    let lists: Vec<Vec<Value>> = lists.collect();
    assert_eq!(lists.len(), 1, "{}", reply.body);
    let names = lists[0].iter().map(|warning| warning["param"].as_str());
    names.map(|name| name.unwrap().to_owned()).collect()
}

#[test]
fn what_a_text_is_not_held_to_is_named_in_its_answer() {
    let server = Setup::default().start();
    let mut setup = Setup::default();
    setup.server.strict = true;
    let strict = setup.start();
    for (path, body, schema) in annotated_requests() {
        for stream in [false, true] {
            let body = with(body.clone(), &json!({"stream": stream}));
            let reply = post(server.address, path, &body);
            assert_eq!(reply.status, 200, "{path}: {}", reply.body);
            let mut wanted = vec![
                format!("{schema}#/not"),
                format!("{schema}#/properties/tags/uniqueItems"),
            ];
            if path == "/api/chat" {
                wanted.push("options.wish".to_owned());
            }
            let mut names = warned(&reply);
            names.sort();
            wanted.sort();
            assert_eq!(names, wanted, "{path} {stream}");
            let refused = post(strict.address, path, &body);
            assert_eq!(refused.status, 400, "{path}: {}", refused.body);
            assert!(
                wanted
                    .iter()
                    .any(|name| refused.body.contains(&format!("'{name}'"))),
                "{}",
                refused.body
            );
        }
    }
    // Options that say how a model is loaded are no wishes of a text.
    let options =
        json!({"num_ctx": 512, "num_gpu": 1, "use_mmap": true, "num_predict": 2, "top_k": null});
    let body = json!({"model": "stories", "prompt": "Hello", "stream": false, "options": options});
    let reply = post(strict.address, "/api/generate", &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert!(reply.json().get("warnings").is_none(), "{}", reply.body);
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
    let names = warned(&reply);
    let uniqueness = "tools[0].function.parameters#/properties/tags/uniqueItems";
    assert!(names.iter().any(|name| name == uniqueness), "{names:?}");
    let error = refused(&server, "/v1/chat/completions", &request(true));
    assert_eq!(error["param"], "tools[0].function.parameters", "{error}");
}

/// The parts of an answer, whatever its API: what was thought, the text, and names of calls.
fn parts(answer: &Value) -> (String, String, Vec<String>) {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let message = if answer["choices"].is_array() {
        &answer["choices"][0]["message"]
    } else {
        &answer["message"]
    };
    let mut parts = (
        text(&message["reasoning_content"]) + &text(&message["thinking"]),
        text(&message["content"]),
        Vec::new(),
    );
    for call in list(&message["tool_calls"]) {
        parts.2.push(text(&call["function"]["name"]));
    }
    for item in list(&answer["output"])
        .iter()
        .chain(&list(&answer["content"]))
    {
        match item["type"].as_str().unwrap() {
            "function_call" | "tool_use" => parts.2.push(text(&item["name"])),
            "reasoning" => parts.0 += &text(&item["content"][0]["text"]),
            "thinking" => parts.0 += &text(&item["thinking"]),
            _ => parts.1 += &(text(&item["content"][0]["text"]) + &text(&item["text"])),
        }
    }
    parts
}

/// A format binds the final text: the model may call in its place, and think before either.
#[test]
fn a_format_leaves_calls_and_thoughts_possible() {
    let setup = Setup {
        template: Some(
            "{# <tool_call> </think> #}{% for m in messages %}{{ m.content }}{% endfor %}",
        ),
        ..Setup::scripted()
    };
    let server = setup.start();
    let schema = json!({"type": "object", "properties": {"mood": {"enum": ["glad", "sad"]}},
                        "required": ["mood"], "additionalProperties": false});
    let messages = json!([{"role": "user", "content": "Hello"}]);
    let function = json!({"name": "f", "parameters": {"type": "object", "properties": {}}});
    let nested = json!([{"type": "function", "function": function}]);
    let flat = json!({"type": "json_schema", "name": "x", "schema": schema});
    let requests = [
        (
            "/v1/chat/completions",
            json!({"messages": messages, "tools": nested, "max_tokens": 200,
                   "response_format": {"type": "json_schema", "json_schema": flat}}),
        ),
        (
            "/v1/responses",
            json!({"input": "Hello", "max_output_tokens": 200, "text": {"format": flat},
                   "tools": [with(function.clone(), &json!({"type": "function"}))]}),
        ),
        (
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 200, "output_config": {"format": flat},
                   "tools": [{"name": "f", "input_schema": {"type": "object"}}]}),
        ),
        (
            "/api/chat",
            json!({"model": "stories", "messages": messages, "tools": nested, "format": schema,
                   "stream": false, "options": {"num_predict": 200}}),
        ),
    ];
    let (text, call) = (
        "{\"mood\": \"glad\"}",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>",
    );
    let ask = |path: &str, body: &Value, written: &str| {
        server.script(written);
        let reply = post(server.address, path, body);
        assert_eq!(reply.status, 200, "{path}: {}", reply.body);
        parts(&reply.json())
    };
    for (path, body) in &requests {
        for (thought, before) in [("", ""), ("Hm.", "<think>Hm.</think>\n")] {
            let (thought, answer) = (thought.to_owned(), text.to_owned());
            let answered = ask(path, body, &format!("{before}{text}"));
            assert_eq!(answered, (thought.clone(), answer, vec![]), "{path}");
            let called = ask(path, body, &format!("{before}{call}"));
            assert_eq!(
                called,
                (thought, String::new(), vec!["f".to_owned()]),
                "{path}"
            );
        }
        // What a model without the format would write is no part of the answer.
        let (_, answer, _) = ask(path, body, "Hello there, I am glad.");
        let is_of_form = answer.is_empty() || answer.trim_start().starts_with('{');
        assert!(is_of_form && !answer.contains("Hello"), "{path}: {answer}");
    }
    // The thought before a form ends by its budget, too.
    let body = with(requests[0].1.clone(), &json!({"reasoning_budget": 3}));
    let (thought, ..) = ask(requests[0].0, &body, &format!("<think>{}", "a".repeat(40)));
    assert_eq!(thought, "aaa");
}
