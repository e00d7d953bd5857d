//! Editors that find a local server by themselves: their probes, in their order, and then a chat.
//! The requests are those of the clients' public sources; what is checked is what they read.

use model_tests::http::{Response, get, open, post, request};
use serde_json::{Value, json};

use crate::support::{Server, Setup};

/// A template that takes tools, as those that agents are used with.
const TEMPLATE: &str = "{# Calls as in Hermes: <tool_call> #}{% for t in tools or [] %}{{ t.function.name }}\n\
    {% endfor %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>";

fn server() -> Server {
    let setup = Setup {
        template: Some(TEMPLATE),
        has_gap_marks: true,
        ..Setup::default()
    };
    setup.start()
}

fn tool() -> Value {
    json!({"type": "function", "function": {
        "name": "read_file",
        "description": "Reads a file",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}},
            "required": ["path"],
        },
    }})
}

/// The objects of a stream of server-sent events.
#[track_caller]
fn streamed(server: &Server, path: &str, body: &Value) -> Vec<Value> {
    let reply = post(server.address, path, body);
    assert_eq!(reply.status, 200, "{path}: {}", reply.body);
    let kind = reply.header("content-type").unwrap_or_default();
    assert!(kind.contains("event-stream"), "{path}: {kind}");
    reply.json_events()
}

/// A chat whose last object but `[DONE]` has the usage, as clients that count tokens want it.
#[track_caller]
fn chat_is_streamed(server: &Server, path: &str, body: &Value) {
    let objects = streamed(server, path, body);
    let ends = objects.iter().filter(|object| {
        let reason = object.pointer("/choices/0/finish_reason");
        reason.is_some_and(Value::is_string)
    });
    assert_eq!(ends.count(), 1, "{objects:?}");
    let has_usage = |object: &Value| object["usage"]["total_tokens"].is_u64();
    assert!(objects.iter().any(has_usage), "{objects:?}");
}

/// True if a version is at least another, number by number.
fn is_at_least(version: &str, least: &[u32]) -> bool {
    let numbers: Vec<u32> = version.split('.').map(|n| n.parse().unwrap()).collect();
    numbers.as_slice() >= least
}

#[test]
fn copilot_finds_models_as_of_ollama() {
    let server = server();
    let version = get(server.address, "/api/version").json();
    assert!(
        is_at_least(version["version"].as_str().unwrap(), &[0, 6, 4]),
        "{version}"
    );
    let tags = get(server.address, "/api/tags").json();
    let name = tags["models"][0]["model"].as_str().unwrap();
    let shown = post(server.address, "/api/show", &json!({"model": name})).json();
    let info = &shown["model_info"];
    assert_eq!(info["general.basename"], "stories");
    let architecture = info["general.architecture"].as_str().unwrap();
    assert_eq!(info[format!("{architecture}.context_length")], 1024);
    let capabilities = shown["capabilities"].as_array().unwrap();
    assert!(capabilities.contains(&json!("tools")), "{capabilities:?}");
    let chat = json!({
        "model": name,
        "messages": [
            {"role": "system", "content": "You are a programmer."},
            {"role": "user", "content": [{"type": "text", "text": "Read a.txt"}]},
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "call_1", "type": "function", "function": {
                    "name": "read_file", "arguments": "{\"path\":\"a.txt\"}"}},
            ]},
            {"role": "tool", "tool_call_id": "call_1", "content": "It is empty."},
        ],
        "tools": [tool()],
        "stream": true,
        "stream_options": {"include_usage": true},
        "temperature": 0.1,
        "top_p": 1,
        "n": 1,
        "max_tokens": 12,
    });
    chat_is_streamed(&server, "/v1/chat/completions", &chat);
}

#[test]
fn zed_finds_models_as_of_llama_server() {
    let server = server();
    let models = get(server.address, "/v1/models").json();
    let entry = &models["data"][0];
    assert_eq!(entry["meta"]["n_ctx"], 1024);
    assert_eq!(entry["status"]["value"], "loaded");
    let props = get(server.address, "/props?model=stories").json();
    assert_eq!(props["default_generation_settings"]["n_ctx"], 1024);
    assert_eq!(props["modalities"]["vision"], false);
    assert_eq!(props["chat_template_caps"]["supports_tool_calls"], true);
    // Zed follows models here where it can, and looks again by itself where it cannot.
    assert_eq!(get(server.address, "/models/sse").status, 404);
    let chat = json!({
        "model": "stories",
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant"},
                     {"role": "user", "content": "Once"}],
        "stream": true,
        "max_tokens": 12,
        "stop": [],
        "temperature": 1.0,
        "tools": [tool()],
        "tool_choice": "auto",
        "stream_options": {"include_usage": true},
    });
    let objects = streamed(&server, "/v1/chat/completions", &chat);
    for object in &objects {
        assert!(object["model"].is_string() && object["object"].is_string());
        assert!(object["choices"].is_array(), "{object}");
    }
    chat_is_streamed(&server, "/v1/chat/completions", &chat);
}

#[test]
fn zed_and_cline_find_models_as_of_lm_studio() {
    let server = server();
    let list = get(server.address, "/api/v0/models").json();
    let entry = &list["data"][0];
    for (name, values) in [
        ("type", json!(["llm", "vlm", "embeddings"])),
        ("compatibility_type", json!(["gguf", "mlx"])),
        ("state", json!(["loaded", "loading", "not-loaded"])),
    ] {
        let values = values.as_array().unwrap();
        assert!(values.contains(&entry[name]), "{name}: {entry}");
    }
    assert_eq!(entry["capabilities"], json!(["tool_use"]));
    assert_eq!(entry["loaded_context_length"], 1024);
    let messages = json!([
        {"role": "system", "content": "You are Cline."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}]},
    ]);
    let cline = json!({
        "model": "stories", "messages": messages, "stream": true,
        "stream_options": {"include_usage": true}, "max_completion_tokens": 12,
    });
    chat_is_streamed(&server, "/api/v0/chat/completions", &cline);
    let zed = json!({
        "model": "stories", "messages": messages, "stream": true, "max_tokens": 12, "stop": [],
        "temperature": 1.0, "tools": [tool()], "tool_choice": "auto",
    });
    let objects = streamed(&server, "/api/v0/chat/completions", &zed);
    assert!(objects.iter().all(|object| object["created"].is_u64()));
    let text = json!({"model": "stories", "prompt": "Once", "max_tokens": 4, "stream": false});
    let text = post(server.address, "/api/v0/completions", &text).json();
    assert!(text["choices"][0]["text"].is_string(), "{text}");
    let vectors = json!({"model": "stories", "input": "Once"});
    let vectors = post(server.address, "/api/v0/embeddings", &vectors);
    assert_eq!(vectors.status, 400, "the model has none: {}", vectors.body);
}

#[test]
fn cline_and_jetbrains_chat_as_with_ollama() {
    let server = server();
    // JetBrains' AI Assistant asks for the root and the list when the connection is tested.
    let root = open(server.address, &request("GET", "/", &[], "")).finish();
    assert_eq!(root.status, 200);
    let tags = get(server.address, "/api/tags").json();
    let entry = &tags["models"][0];
    for name in ["name", "model", "modified_at", "digest"] {
        assert!(entry[name].is_string(), "{name}: {entry}");
    }
    assert!(entry["size"].is_u64() && entry["details"].is_object());
    let chat = json!({
        "model": entry["name"],
        "messages": [
            {"role": "system", "content": "You are Cline."},
            {"role": "user", "content": "Hi", "images": []},
        ],
        "stream": true,
        "options": {"num_ctx": 32768, "num_predict": 12},
        "keep_alive": "5m",
    });
    let reply: Response = post(server.address, "/api/chat", &chat);
    assert_eq!(reply.status, 200, "{}", reply.body);
    let lines = reply.body.lines();
    let lines: Vec<Value> = lines.map(|l| serde_json::from_str(l).unwrap()).collect();
    let last = lines.last().unwrap();
    assert_eq!(last["done"], true);
    for name in ["prompt_eval_count", "eval_count", "total_duration"] {
        assert!(last[name].is_u64(), "{name}: {last}");
    }
    assert!(
        lines
            .iter()
            .all(|line| line["message"]["content"].is_string())
    );
}

#[test]
fn cline_and_jetbrains_chat_as_with_openai() {
    let server = server();
    let models = get(server.address, "/v1/models").json();
    assert_eq!(models["data"][0]["id"], "stories");
    let cline = json!({
        "model": "stories",
        "messages": [{"role": "system", "content": "You are Cline."},
                     {"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "temperature": 0,
        "max_tokens": 12,
        "stream": true,
        "stream_options": {"include_usage": true},
        "tools": [tool()],
        "tool_choice": "auto",
        "parallel_tool_calls": false,
    });
    chat_is_streamed(&server, "/v1/chat/completions", &cline);
    // JetBrains sends what it knows of OpenAI's models to any server.
    let jetbrains = json!({
        "model": "stories",
        "messages": [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "Hi"}],
        "temperature": 0.0,
        "max_completion_tokens": 12,
        "stream": true,
        "stream_options": {"include_usage": true},
        "store": false,
        "user": "ide",
        "reasoning_effort": "low",
    });
    let reply = post(server.address, "/v1/chat/completions", &jetbrains);
    assert_eq!(reply.status, 200, "{}", reply.body);
}

#[test]
fn continue_completes_and_chats() {
    let server = server();
    // Its provider `llama.cpp`: a prompt that it has templated itself.
    let edit = json!({
        "prompt": "<|user|>Hi\n<|assistant|>", "stream": true, "n_predict": 12,
        "frequency_penalty": null, "presence_penalty": null, "min_p": null, "mirostat": null,
        "stop": ["<|user|>", "\n\n"], "top_k": null, "top_p": null, "temperature": 0.01,
    });
    let objects = streamed(&server, "/completion", &edit);
    assert!(
        objects.iter().any(|object| object["content"] != ""),
        "{objects:?}"
    );
    assert_eq!(objects.last().unwrap()["stop"], true);
    // Its autocompletion with the provider `ollama`: raw, with the marks of the vocabulary.
    let fill = json!({
        "model": "stories", "prompt": "<PRE>Once<SUF> time<MID>", "raw": true, "stream": true,
        "keep_alive": 1800,
        "options": {"temperature": 0.01, "num_predict": 12, "num_ctx": 1024,
                    "stop": ["<PRE>", "<SUF>", "<MID>", "\n\n"]},
    });
    let reply = post(server.address, "/api/generate", &fill);
    assert_eq!(reply.status, 200, "{}", reply.body);
    let last = reply.body.lines().last().unwrap();
    assert_eq!(serde_json::from_str::<Value>(last).unwrap()["done"], true);
    // Its provider `openai`.
    let chat = json!({
        "model": "stories", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12,
        "temperature": 0.5, "stream": true, "tools": [tool()], "parallel_tool_calls": false,
        "stream_options": {"include_usage": true},
    });
    chat_is_streamed(&server, "/v1/chat/completions", &chat);
}
