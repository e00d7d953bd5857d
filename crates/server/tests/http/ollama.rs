//! Ollama's endpoints over a socket.

use model_tests::http::{get, open, post, request};
use serde_json::{Value, json};

use crate::support::{Alone, Setup, stories, with};

fn lines(body: &str) -> Vec<Value> {
    body.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[test]
fn a_chat_streams_lines_of_json_by_default() {
    let server = Setup::default().start();
    let body = json!({
        "model": "stories", "messages": [{"role": "user", "content": "Once upon a time"}],
        "options": {"temperature": 0, "num_predict": 12},
    });
    let reply = post(server.address, "/api/chat", &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert_eq!(reply.header("content-type"), Some("application/x-ndjson"));
    let lines = lines(&reply.body);
    let (last, before) = lines.split_last().unwrap();
    assert!(
        before
            .iter()
            .all(|line| line["done"] == false && line["model"] == "stories")
    );
    let texts = before
        .iter()
        .filter_map(|line| line["message"]["content"].as_str());
    let alone = Alone::new().greedy("<|user|>Once upon a time\n<|assistant|>", 12);
    assert_eq!(texts.collect::<String>(), alone);
    assert_eq!(last["done"], true);
    assert_eq!(last["done_reason"], "length");
    assert_eq!(last["message"], json!({"role": "assistant", "content": ""}));
    assert_eq!(last["eval_count"], 12);
    assert!(last["prompt_eval_count"].as_u64() > Some(0));
    assert!(last["total_duration"].as_u64() >= last["eval_duration"].as_u64());

    let mut whole = body.clone();
    whole["stream"] = json!(false);
    let whole = post(server.address, "/api/chat", &whole).json();
    assert_eq!(whole["message"]["content"], alone);
    assert_eq!(whole["done"], true);
}

#[test]
fn a_text_is_continued_raw_or_as_a_message() {
    let server = Setup::default().start();
    let generate = |extra: Value| {
        let body = with(
            json!({
                "model": "tiny", "prompt": "Once upon a time", "stream": false, "keep_alive": "5m",
                "options": {"temperature": 0, "num_predict": 9, "num_ctx": 512},
            }),
            &extra,
        );
        post(server.address, "/api/generate", &body).json()
    };
    let alone = Alone::new();
    let raw = generate(json!({"raw": true}));
    assert_eq!(raw["response"], alone.greedy("Once upon a time", 9));
    assert_eq!(raw["model"], "tiny", "as the client calls it");
    let rendered = "<|system|>Be brief.\n<|user|>Once upon a time\n<|assistant|>";
    let told = generate(json!({"system": "Be brief."}));
    assert_eq!(told["response"], alone.greedy(rendered, 9));
    // How clients load a model.
    let loaded = generate(json!({"prompt": ""}));
    assert_eq!(
        (&loaded["done_reason"], &loaded["response"]),
        (&json!("load"), &json!(""))
    );
}

#[test]
fn tools_are_called_and_their_results_reach_the_template() {
    let server = Setup::default().start();
    let parameters = json!({
        "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"], "additionalProperties": false,
    });
    let tool =
        json!({"type": "function", "function": {"name": "weather", "parameters": parameters}});
    let user = json!({"role": "user", "content": "How is it?"});
    let body = |messages: Value, extra: Value| {
        with(
            json!({"model": "stories", "tools": [tool], "messages": messages,
                              "options": {"temperature": 0, "num_predict": 100}}),
            &extra,
        )
    };
    let asked = body(
        json!([user]),
        json!({"tool_choice": "required", "parallel_tool_calls": false}),
    );
    let reply = post(server.address, "/api/chat", &asked);
    let lines: Vec<Value> = reply
        .body
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let calls = lines
        .iter()
        .filter_map(|line| line["message"]["tool_calls"].as_array());
    let calls: Vec<&Value> = calls.flatten().collect();
    assert_eq!(calls.len(), 1, "{}", reply.body);
    assert_eq!(calls[0]["function"]["name"], "weather");
    let city = &calls[0]["function"]["arguments"]["city"];
    assert!(["Rome", "Oslo"].contains(&city.as_str().unwrap()));
    assert_eq!(lines.last().unwrap()["done_reason"], "stop");

    let extra = json!({"tool_choice": "required", "parallel_tool_calls": false, "stream": false});
    let whole = post(server.address, "/api/chat", &body(json!([user]), extra)).json();
    let call = &whole["message"]["tool_calls"][0];
    assert_eq!(call["function"], calls[0]["function"]);
    let answer = &whole["message"];
    let result = json!({"role": "tool", "tool_name": "weather", "content": "sunny"});
    let extra = json!({"stream": false});
    let after = post(
        server.address,
        "/api/chat",
        &body(json!([user, answer, result]), extra),
    );
    assert_eq!(after.status, 200, "{}", after.body);
    // The template shows no calls: it gets them as text.
    let called = format!("{{\"name\": \"weather\", \"arguments\": {{\"city\": {city}}}}}");
    let called = format!("<tool_call>\n{called}\n</tool_call>");
    let prompt = format!("<|user|>How is it?\n<|assistant|>{called}\n<|tool|>sunny\n<|assistant|>");
    let text = after.json()["message"]["content"].clone();
    assert_eq!(text, Alone::new().greedy(&prompt, 100));

    // A call that is cut off is none.
    let extra = json!({"tool_choice": "required", "stream": false,
                       "options": {"temperature": 0, "num_predict": 8}});
    let cut = post(server.address, "/api/chat", &body(json!([user]), extra)).json();
    assert_eq!(cut["message"].get("tool_calls"), None, "{cut}");
    assert_eq!(cut["done_reason"], "length");
}

#[test]
fn models_are_listed_and_shown() {
    let server = Setup::default().start();
    let tags = get(server.address, "/api/tags").json();
    assert_eq!(tags["models"][0]["name"], "stories");
    let details = &tags["models"][0]["details"];
    assert_eq!(details["family"], "llama");
    let n_weights = stories().weight_summary().n_values;
    let millions = format!("{:.2}M", n_weights as f64 / 1e6);
    assert_eq!(details["parameter_size"], millions);
    assert_eq!(details["quantization_level"], "F16");
    let ps = get(server.address, "/api/ps").json();
    assert_eq!(ps["models"][0]["model"], "stories");
    assert_eq!(&ps["models"][0]["details"], details);
    assert!(ps["models"][0]["expires_at"].is_string());
    let shown = post(server.address, "/api/show", &json!({"model": "tiny"})).json();
    assert_eq!(shown["capabilities"], json!(["completion"]));
    assert_eq!(shown["model_info"]["general.architecture"], "llama");
    assert_eq!(shown["model_info"]["llama.context_length"], 1024);
    assert_eq!(shown["model_info"]["general.parameter_count"], n_weights);
    let width = stories().model().embedding_dim();
    assert_eq!(shown["model_info"]["llama.embedding_length"], width);
    assert_eq!(&shown["details"], details);
    let version = get(server.address, "/api/version").json();
    assert_eq!(version["cellar"], env!("CARGO_PKG_VERSION"));
}

#[test]
fn what_cannot_be_done_is_501_with_a_reason() {
    let server = Setup::default().start();
    let refused = |method: &str, path: &str, body: Value, status: u16, wanted: &str| {
        let headers = [("content-type", "application/json")];
        let request = request(method, path, &headers, &body.to_string());
        let reply = open(server.address, &request).finish();
        assert_eq!(reply.status, status, "{method} {path}: {}", reply.body);
        let error = reply.json()["error"].as_str().unwrap().to_owned();
        assert!(error.contains(wanted), "{error}");
    };
    let started = "the models that it was started with";
    for path in ["/api/pull", "/api/push", "/api/create", "/api/copy"] {
        refused("POST", path, json!({"model": "x"}), 501, started);
    }
    refused("DELETE", "/api/delete", json!({"model": "x"}), 501, started);
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let chat = |extra: Value| with(json!({"model": "stories", "messages": messages}), &extra);
    let tools = chat(json!({"tools": [{"type": "function"}]}));
    refused("POST", "/api/chat", tools, 400, "'tools[0].function.name'");
    let image = json!([{"role": "user", "content": "What?", "images": ["aGk="]}]);
    refused(
        "POST",
        "/api/chat",
        chat(json!({"messages": image})),
        400,
        "'messages[0].content[0]' is a picture, and this model takes text only",
    );
    let unload = chat(json!({"messages": [], "keep_alive": 0}));
    refused("POST", "/api/chat", unload, 501, "cannot be unloaded");
    refused(
        "POST",
        "/api/chat",
        chat(json!({"keep_alive": "soon"})),
        400,
        "'keep_alive' is 'soon'",
    );
    refused(
        "POST",
        "/api/chat",
        chat(json!({"format": "xml"})),
        400,
        "'format' must be",
    );
    refused(
        "POST",
        "/api/chat",
        chat(json!({"options": {"top_p": 2}})),
        400,
        "top-p 2",
    );
    let embed = json!({"model": "stories", "input": "Hi"});
    refused("POST", "/api/embed", embed, 400, "does not give embeddings");
}
