//! The fields of requests that are done, skipped and refused: the policy, and what coding agents
//! rely on.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use cellar_server::api::openapi::document;
use model_tests::http::{Response, open, post, request};
use serde_json::{Map, Value, json};

use crate::support::{Server, Setup, with};

fn ask(server: &Server, path: &str, body: &Value) -> Value {
    let reply = post(server.address, path, body);
    assert_eq!(reply.status, 200, "{path} {body}: {}", reply.body);
    reply.json()
}

fn strict() -> Server {
    let mut setup = Setup {
        has_gap_marks: true,
        ..Setup::default()
    };
    setup.server.strict = true;
    setup.start()
}

/// A small request to each address of texts, and the text of its answer.
fn text_of(path: &str, answer: &Value) -> Value {
    let text = match path {
        "/v1/chat/completions" => answer.pointer("/choices/0/message/content"),
        "/v1/responses" => answer.pointer("/output/0/content/0/text"),
        "/v1/messages" => answer.pointer("/content/0/text"),
        _ => answer.get("content"),
    };
    text.unwrap_or_else(|| panic!("no text in {answer}"))
        .clone()
}

fn small(path: &str) -> Value {
    let messages = json!([{"role": "user", "content": "Hello"}]);
    match path {
        "/v1/responses" => json!({"input": "Hello", "max_output_tokens": 6, "temperature": 0}),
        "/infill" => json!({
            "input_prefix": "Once", "input_suffix": "end", "n_predict": 6, "temperature": 0,
        }),
        "/completion" => json!({"prompt": "Once", "n_predict": 6, "temperature": 0}),
        _ => json!({"messages": messages, "max_tokens": 6, "temperature": 0}),
    }
}

#[test]
fn what_is_skipped_is_named_and_changes_no_text() {
    let setup = Setup {
        has_gap_marks: true,
        ..Setup::default()
    };
    let (server, strict) = (setup.start(), strict());
    let search = json!({"type": "web_search"});
    for (path, extra, param) in [
        (
            "/v1/chat/completions",
            json!({"samplers": "edkypmxt"}),
            "samplers",
        ),
        (
            "/v1/chat/completions",
            json!({"web_search_options": {"a": 1}}),
            "web_search_options",
        ),
        ("/v1/chat/completions", json!({"wish": 1}), "wish"),
        (
            "/v1/chat/completions",
            json!({"tools": [search]}),
            "tools[0]",
        ),
        ("/v1/responses", json!({"background": true}), "background"),
        ("/v1/responses", json!({"truncation": "auto"}), "truncation"),
        ("/v1/responses", json!({"tools": [search]}), "tools[0]"),
        (
            "/v1/responses",
            json!({"tools": [{"type": "namespace", "name": "a"}]}),
            "tools[0]",
        ),
        (
            "/v1/responses",
            json!({"input": [
            {"role": "user", "content": "Hello"}, {"type": "web_search_call", "id": "ws_1"}]}),
            "input[1]",
        ),
        (
            "/v1/messages",
            json!({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}),
            "context_management",
        ),
        (
            "/v1/messages",
            json!({"mcp_servers": [{"url": "a"}]}),
            "mcp_servers",
        ),
        (
            "/v1/messages",
            json!({"tools": [{"type": "bash_20250124", "name": "bash"}]}),
            "tools[0]",
        ),
        ("/completion", json!({"n_indent": 4}), "n_indent"),
        (
            "/infill",
            json!({"samplers": ["top_k", "infill"]}),
            "samplers",
        ),
    ] {
        let plain = ask(&server, path, &small(path));
        assert!(plain.get("warnings").is_none(), "{plain}");
        let body = with(small(path), &extra);
        let answer = ask(&server, path, &body);
        assert_eq!(answer["warnings"][0]["param"], param, "{path} {answer}");
        assert_eq!(answer["warnings"].as_array().unwrap().len(), 1, "{answer}");
        assert_eq!(
            text_of(path, &answer),
            text_of(path, &plain),
            "{path} {param}"
        );
        // A strict server refuses it by its name, and nothing else of the request.
        let refused = post(strict.address, path, &body);
        assert_eq!(refused.status, 400, "{path} {param}: {}", refused.body);
        assert!(
            refused.body.contains(&format!("'{param}'")),
            "{}",
            refused.body
        );
        ask(&strict, path, &small(path));
    }
}

#[test]
fn hints_and_accounts_are_taken_without_a_word() {
    let strict = strict();
    let path = "/v1/chat/completions";
    let extra = json!({"user": "a", "metadata": {"a": "b"}, "store": true, "cache_prompt": true,
                       "prompt_cache_key": "a", "service_tier": "auto", "wish": null, "n": 1});
    let answer = ask(&strict, path, &with(small(path), &extra));
    assert!(answer.get("warnings").is_none(), "{answer}");
}

#[test]
fn results_of_tools_keep_a_note_of_their_images() {
    let server = Setup::default().start();
    let note = "call the [image]";
    let image = json!({"type": "image", "source": {"type": "base64", "data": "AA=="}});
    let anthropic = json!({"max_tokens": 2, "messages": [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [image]}]},
    ]});
    let answer = ask(&server, "/v1/messages", &anthropic);
    assert_eq!(
        answer["warnings"][0]["param"],
        "messages[2].content[0].content[0]"
    );
    let responses = json!({"max_output_tokens": 2, "input": [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [
            {"type": "input_text", "text": note}, {"type": "input_image", "image_url": "data:"}]},
    ]});
    let answer = ask(&server, "/v1/responses", &responses);
    assert_eq!(answer["warnings"][0]["param"], "input[1].output[1]");
    let rendered = ask(
        &server,
        "/apply-template",
        &json!({"messages": [
            {"role": "user", "content": "Look"},
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]},
            {"role": "tool", "tool_call_id": "c", "content": [
                {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}}]},
        ]}),
    );
    assert!(
        rendered["prompt"].as_str().unwrap().contains("a\n[image]"),
        "{rendered}"
    );
    // What a user says is not changed.
    let said = json!({"max_tokens": 2, "messages": [{"role": "user", "content": [image]}]});
    assert_eq!(post(server.address, "/v1/messages", &said).status, 400);
}

#[test]
fn messages_of_the_system_stay_in_their_place() {
    let server = Setup::default().start();
    let list = json!([{"role": "user", "content": "a"}, {"role": "system", "content": "b"},
                      {"role": "user", "content": "c"}]);
    let chat = ask(
        &server,
        "/v1/chat/completions/render",
        &json!({"messages": list}),
    );
    let count = ask(
        &server,
        "/v1/messages/count_tokens",
        &json!({"messages": list}),
    );
    let n = chat["token_ids"].as_array().unwrap().len();
    assert_eq!(count["input_tokens"], n);
    let rendered = ask(&server, "/apply-template", &json!({"messages": list}));
    assert_eq!(
        rendered["prompt"],
        "<|user|>a\n<|system|>b\n<|user|>c\n<|assistant|>"
    );
}

#[test]
fn an_answer_that_is_begun_is_gone_on_with() {
    let server = Setup::default().start();
    let begun =
        json!([{"role": "user", "content": "Tell"}, {"role": "assistant", "content": "Once upon"}]);
    let rendered = ask(&server, "/apply-template", &json!({"messages": begun}));
    assert_eq!(rendered["prompt"], "<|user|>Tell\n<|assistant|>Once upon");
    let body = json!({"messages": begun, "max_tokens": 8, "temperature": 0});
    let prompt = json!({"prompt": "<|user|>Tell\n<|assistant|>Once upon", "max_tokens": 8, "temperature": 0});
    let text = ask(&server, "/v1/completions", &prompt)["choices"][0]["text"].clone();
    let chat = ask(&server, "/v1/chat/completions", &body);
    assert_eq!(chat["choices"][0]["message"]["content"], text);
    let message = ask(&server, "/v1/messages", &body);
    assert_eq!(message["content"][0]["text"], text);
    // vLLM's way to ask for it.
    let path = "/v1/chat/completions";
    let said = json!({"continue_final_message": true, "add_generation_prompt": false});
    let chat = ask(&server, path, &with(body.clone(), &said));
    assert_eq!(chat["choices"][0]["message"]["content"], text);
    assert!(chat.get("warnings").is_none(), "{chat}");
    let question = json!([{"role": "user", "content": "Tell"}]);
    for (extra, param) in [
        (
            json!({"continue_final_message": true, "add_generation_prompt": true}),
            "continue_final_message",
        ),
        (
            json!({"continue_final_message": true, "messages": question}),
            "continue_final_message",
        ),
        (
            json!({"add_generation_prompt": false}),
            "add_generation_prompt",
        ),
    ] {
        let refused = post(server.address, path, &with(body.clone(), &extra));
        assert_eq!(refused.status, 400, "{extra}: {}", refused.body);
        assert_eq!(refused.json()["error"]["param"], param, "{extra}");
    }
}

#[test]
fn a_conversation_is_counted_and_made_short() {
    let server = Setup::default().start();
    let input = json!([{"role": "user", "content": "Tell me of Tim."},
                       {"role": "assistant", "content": "Tim has a dog."}]);
    let rendered = ask(&server, "/v1/responses/render", &json!({"input": input}));
    let counted = ask(
        &server,
        "/v1/responses/input_tokens",
        &json!({"input": input}),
    );
    let n = rendered["token_ids"].as_array().unwrap().len();
    assert_eq!(
        counted,
        json!({"object": "response.input_tokens", "input_tokens": n})
    );
    let body = json!({"input": input, "max_output_tokens": 12, "temperature": 0});
    let short = ask(&server, "/v1/responses/compact", &body);
    assert_eq!(short["object"], "response.compaction");
    assert_eq!(short["usage"]["output_tokens"], 12);
    let item = &short["output"][0];
    assert_eq!(item["type"], "compaction");
    // The item is read back as what the model wrote; one of another server is left out.
    let mut next = vec![item.clone(), json!({"role": "user", "content": "Go on."})];
    let n_with = ask(
        &server,
        "/v1/responses/input_tokens",
        &json!({"input": next}),
    )["input_tokens"]
        .clone();
    next[0]["encrypted_content"] = json!("AAAA");
    let other = ask(
        &server,
        "/v1/responses/input_tokens",
        &json!({"input": next}),
    );
    assert_eq!(other["warnings"][0]["param"], "input[0]");
    assert!(
        n_with.as_u64() > other["input_tokens"].as_u64(),
        "{n_with} {other}"
    );
    let empty = ask(
        &server,
        "/v1/responses",
        &json!({"input": [], "max_output_tokens": 1}),
    );
    assert_eq!(empty["usage"]["output_tokens"], 1);
}

#[test]
fn calls_written_bare_are_calls() {
    let server = Setup::scripted().start();
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
    let body = json!({"messages": [{"role": "user", "content": "Call"}], "tools": tools});
    for written in [
        "{\"name\": \"f\", \"arguments\": {\"a\": 1}}",
        "```json\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n```",
    ] {
        server.script(written);
        let answer = ask(&server, "/v1/chat/completions", &body);
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
        let function = &choice["message"]["tool_calls"][0]["function"];
        assert_eq!(*function, json!({"name": "f", "arguments": "{\"a\": 1}"}));
    }
    server.script("{\"name\": \"g\"}");
    let answer = ask(&server, "/v1/chat/completions", &body);
    assert_eq!(
        answer["choices"][0]["message"]["content"],
        "{\"name\": \"g\"}"
    );
}

#[test]
fn a_format_binds_no_answer_that_has_to_call() {
    let server = Setup::default().start();
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}});
    let parameters = json!({"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"],
                            "additionalProperties": false});
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
    let body = json!({"messages": [{"role": "user", "content": "Hello"}], "tools": [tool],
                      "tool_choice": "required", "response_format": format, "max_tokens": 60});
    let answer = ask(&server, "/v1/chat/completions", &body);
    assert_eq!(
        answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"],
        "f"
    );
}

#[test]
fn editors_get_the_members_and_the_time_that_they_ask_for() {
    let server = Setup::scripted().start();
    server.script("a\nb");
    let body =
        json!({"prompt": "Once", "response_fields": ["content", "timings/predicted_n", "wish"]});
    let answer = ask(&server, "/completion", &body);
    assert_eq!(answer, json!({"content": "a\nb", "predicted_n": 3}));
    // A text whose time is over ends with its line: this one has many.
    server.script(&"a\n".repeat(400));
    let body = json!({"prompt": "Once", "t_max_predict_ms": 1});
    let answer = ask(&server, "/completion", &body);
    assert_eq!(answer["stop_type"], "limit");
    assert!(
        answer["tokens_predicted"].as_u64().unwrap() < 800,
        "{answer}"
    );
    assert!(answer["content"].as_str().unwrap().contains('\n'));
}

fn send(server: &Server, encoding: &str, body: &str) -> Response {
    let headers = [
        ("content-type", "application/json"),
        ("content-encoding", encoding),
    ];
    open(
        server.address,
        &request("POST", "/v1/completions", &headers, body),
    )
    .finish()
}

#[test]
fn bodies_may_have_a_byte_order_mark_and_are_not_compressed() {
    let server = Setup::default().start();
    let body = "\u{feff}{\"prompt\": \"a\", \"max_tokens\": 1}";
    assert_eq!(send(&server, "identity", body).status, 200);
    let reply = send(&server, "gzip", "{}");
    assert_eq!(reply.status, 415, "{}", reply.body);
    assert!(reply.body.contains("without compression"), "{}", reply.body);
    let wrong = post(
        server.address,
        "/v1/completions",
        &json!({"prompt": "a", "n": -1}),
    );
    assert_eq!(wrong.status, 400);
    assert!(
        wrong.body.contains("expected a whole number"),
        "{}",
        wrong.body
    );
}

/// The addresses of fields, which are done, by the names of the fields.
fn names(schema: &Value) -> Vec<String> {
    let own = schema["allOf"].get(0).unwrap_or(schema);
    let members = own["properties"].as_object();
    members.into_iter().flat_map(Map::keys).cloned().collect()
}

/// The tables of the documentation.
fn tables() -> String {
    let document = document();
    let list = |names: &[String]| {
        let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
        names.join(", ")
    };
    let mut done: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut limited: BTreeMap<(String, &str, String), Vec<String>> = BTreeMap::new();
    for (path, operations) in document["paths"].as_object().unwrap() {
        let post = &operations["post"];
        let schema = &post["requestBody"]["content"]["application/json"]["schema"];
        if path.ends_with("/render") || schema.is_null() {
            continue;
        }
        let common = if schema["allOf"].is_null() {
            ""
        } else {
            ", how tokens are sampled"
        };
        done.entry(list(&names(schema)) + common)
            .or_default()
            .push(path.clone());
        for (member, word) in [("x-skipped", "skipped"), ("x-refused", "refused")] {
            for (name, why) in post[member].as_object().unwrap() {
                let why = why.as_str().unwrap().to_owned();
                limited
                    .entry((name.clone(), word, why))
                    .or_default()
                    .push(path.clone());
            }
        }
    }
    let mut text = String::from("| addresses | fields that are done |\n| --- | --- |\n");
    for (fields, paths) in done {
        writeln!(text, "| {} | {fields} |", list(&paths)).unwrap();
    }
    let sampling = names(&document["components"]["schemas"]["Sampling"]);
    writeln!(text, "\nHow tokens are sampled: {}.", list(&sampling)).unwrap();
    let without = document["x-without-effect"].as_array().unwrap().iter();
    let without: Vec<String> = without
        .map(|name| name.as_str().unwrap().to_owned())
        .collect();
    writeln!(
        text,
        "\nTaken without effect, everywhere: {}.",
        list(&without)
    )
    .unwrap();
    text += "\n| field | of | | |\n| --- | --- | --- | --- |\n";
    for ((name, word, why), paths) in limited {
        writeln!(text, "| `{name}` | {} | {word} | {why} |", list(&paths)).unwrap();
    }
    text
}

#[test]
fn the_documentation_has_the_table_of_fields() {
    const BEGIN: &str = "<!-- fields: made by a test, with UPDATE_DOCS=1 -->\n";
    const END: &str = "<!-- end of fields -->";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/fields.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(BEGIN).unwrap();
    let (_, after) = rest.split_once(END).unwrap();
    let expected = format!("{before}{BEGIN}{}{END}{after}", tables());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &expected).unwrap();
    }
    assert!(
        std::env::var_os("UPDATE_DOCS").is_some() || page == expected,
        "docs/fields.md is not up to date: run this test with UPDATE_DOCS=1"
    );
}
