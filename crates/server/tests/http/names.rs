//! Names of models, and the addresses that clients of other servers use.

use model_tests::http::{get, open, post, request};
use serde_json::{Value, json};

use cellar_server::{App, ServerConfig};

use crate::support::{Alone, Server, Setup, stories};

fn strict() -> Server {
    let mut setup = Setup::default();
    setup.server.strict = true;
    setup.start()
}

fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

#[test]
fn one_model_has_any_name() {
    let server = Setup::default().start();
    for name in [
        "gpt-4o",
        "GPT-4",
        "claude-sonnet-4-5-20250929",
        "stories.gguf",
        "",
    ] {
        let chat = json!({
            "model": name, "messages": user("Hi"), "max_tokens": 2, "stream": false,
            "options": {"num_predict": 2},
        });
        for path in ["/v1/chat/completions", "/v1/messages", "/api/chat"] {
            let reply = post(server.address, path, &chat);
            assert_eq!(reply.status, 200, "{path} {name}: {}", reply.body);
        }
    }
    // What is asked of a model by its name alone is of that model.
    assert_eq!(get(server.address, "/v1/models/gpt-4").status, 404);
    let unload = post(server.address, "/models/unload", &json!({"model": "gpt-4"}));
    assert_eq!(unload.status, 404, "{}", unload.body);
}

#[test]
fn a_strict_server_refuses_names_that_it_has_not() {
    let server = strict();
    let ask = |path: &str, name: &str| {
        let body = json!({
            "model": name, "messages": user("Hi"), "input": "Hi", "prompt": "Hi", "content": "Hi",
            "max_tokens": 2, "max_output_tokens": 2, "stream": false,
        });
        let mut body = body.as_object().unwrap().clone();
        let own: &[&str] = match path {
            "/tokenize" => &["model", "content"],
            "/v1/responses" => &["model", "input", "max_output_tokens"],
            "/v1/completions" => &["model", "prompt", "max_tokens"],
            "/api/chat" => &["model", "messages", "stream"],
            _ => &["model", "messages", "max_tokens", "stream"],
        };
        body.retain(|name, _| own.contains(&name.as_str()));
        post(server.address, path, &Value::Object(body))
    };
    for path in [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/tokenize",
    ] {
        let reply = ask(path, "gpt-4");
        assert_eq!(reply.status, 404, "{path}: {}", reply.body);
        assert!(
            reply.body.contains("this server has 'stories'"),
            "{}",
            reply.body
        );
        assert_eq!(ask(path, "tiny").status, 200, "{path}");
    }
    let openai = ask("/v1/chat/completions", "gpt-4").json();
    assert_eq!(openai["error"]["code"], "model_not_found");
    let anthropic = ask("/v1/messages", "gpt-4");
    assert_eq!(anthropic.status, 404);
    assert_eq!(anthropic.json()["error"]["type"], "not_found_error");
    let ollama = ask("/api/chat", "gpt-4");
    assert_eq!(ollama.status, 404);
    assert!(
        ollama.json()["error"]
            .to_string()
            .contains("there is no model 'gpt-4'")
    );
}

#[test]
fn aliases_may_be_patterns() {
    let setup = Setup::default();
    let models = vec![
        setup.served("a", &["gpt-*", "exact"]),
        setup.served("b", &["claude-*", "*-mini", "exact-*"]),
    ];
    let server = Server::start(App::new(models, ServerConfig::default()));
    for (name, model) in [
        ("gpt-4o", "a"),
        ("exact", "a"),
        ("claude-opus-4", "b"),
        ("o4-mini", "b"),
        // The first model whose alias fits has it.
        ("gpt-4o-mini", "a"),
        ("exact-not", "b"),
    ] {
        let body = json!({"model": name, "prompt": "Hi", "max_tokens": 1});
        let reply = post(server.address, "/v1/completions", &body);
        assert_eq!(reply.json()["model"], model, "{name}: {}", reply.body);
    }
    // Of two models, none has every name.
    let body = json!({"model": "mistral", "prompt": "Hi", "max_tokens": 1});
    assert_eq!(post(server.address, "/v1/completions", &body).status, 404);
}

#[test]
fn short_addresses_answer_as_the_long_ones() {
    let server = Setup::default().start();
    let alone = Alone::new().greedy("Once upon a time", 8);
    let body = json!({"prompt": "Once upon a time", "temperature": 0, "n_predict": 8});
    let reply = post(server.address, "/completions", &body).json();
    assert_eq!(reply["content"], alone);
    let chat = json!({"messages": user("Hi"), "temperature": 0, "max_tokens": 5, "input": "Hi"});
    let [short, long] = ["/chat/completions", "/v1/chat/completions"]
        .map(|path| post(server.address, path, &chat).json()["choices"].clone());
    assert_eq!(short, long);
    assert_eq!(short[0]["finish_reason"], "length");
    let response = post(server.address, "/responses", &chat).json();
    assert_eq!(response["object"], "response");
    // The prompt is called as in the long address.
    let long = json!({"messages": user(&"word ".repeat(3000))});
    let error = post(server.address, "/chat/completions", &long).json();
    assert_eq!(error["error"]["param"], "messages");
    let adapters = get(server.address, "/lora-adapters");
    assert_eq!((adapters.status, adapters.json()), (200, json!([])));
    let set = |list: &Value| post(server.address, "/lora-adapters", list);
    assert_eq!(set(&json!([])).json(), json!({"success": true}));
    for wrong in [json!([{"id": 0, "scale": 1}]), json!({})] {
        assert_eq!(set(&wrong).status, 400, "{wrong}");
    }
}

#[test]
fn lists_of_lm_studio_have_the_models() {
    let server = Setup::default().start();
    let list = get(server.address, "/api/v0/models").json();
    let entry = &list["data"][0];
    for (name, value) in [
        ("id", json!("stories")),
        ("object", json!("model")),
        ("type", json!("llm")),
        ("arch", json!("llama")),
        ("state", json!("loaded")),
        ("max_context_length", json!(1024)),
        ("loaded_context_length", json!(1024)),
    ] {
        assert_eq!(entry[name], value, "{name}: {entry}");
    }
    assert_eq!(&get(server.address, "/api/v0/models/tiny").json(), entry);
    assert_eq!(get(server.address, "/api/v0/models/none").status, 404);
    let list = get(server.address, "/api/v1/models").json();
    let entry = &list["models"][0];
    assert_eq!(
        (&entry["key"], &entry["type"]),
        (&json!("stories"), &json!("llm"))
    );
    assert_eq!(
        entry["loaded_instances"][0]["config"]["context_length"],
        1024
    );
}

#[test]
fn other_addresses_need_a_key_and_keep_to_the_limit_of_bodies() {
    let mut setup = Setup::with_keys("secret");
    setup.server.max_body = 300;
    let server = setup.start();
    let long = json!({"content": "a".repeat(400)}).to_string();
    for endpoint in cellar_server::api::endpoints() {
        let path = endpoint.path.replace('*', "").replace("{id}", "x");
        let ask = |headers: &[(&str, &str)], body: &str| {
            let sent = request(endpoint.method.as_str(), &path, headers, body);
            open(server.address, &sent).finish().status
        };
        let is_open = ["/", "/health", "/v1/health", "/readyz", "/livez"].contains(&&*path);
        let expected = if is_open { 200 } else { 401 };
        assert_eq!(ask(&[], "{}"), expected, "{path}");
        if endpoint.method == "POST" {
            let key = [("Authorization", "Bearer secret")];
            assert_eq!(ask(&key, &long), 413, "{path}");
        }
    }
}

#[test]
fn tokens_are_given_in_the_form_of_each_server() {
    let server = Setup::default().start();
    let ask = |body: Value| post(server.address, "/tokenize", &body);
    let tokenizer = stories();
    let tokenizer = tokenizer.tokenizer();
    let expected: Vec<u32> = tokenizer
        .encode("Once upon", model_core::tokenizer::EncodeOptions::PROMPT)
        .iter()
        .map(|id| id.0)
        .collect();
    let vllm = ask(json!({"prompt": "Once upon", "return_token_strs": true})).json();
    assert_eq!(vllm["tokens"], json!(expected));
    assert_eq!(vllm["count"], expected.len());
    assert_eq!(vllm["max_model_len"], 1024);
    assert_eq!(vllm["token_strs"].as_array().unwrap().len(), expected.len());
    let bare = ask(json!({"prompt": "Once upon", "add_special_tokens": false})).json();
    let llama = ask(json!({"content": "Once upon"})).json();
    assert_eq!(bare["tokens"], llama["tokens"]);
    assert_eq!(llama.as_object().unwrap().len(), 1, "{llama}");
    let chat = json!({"messages": user("Hi")});
    let rendered = post(server.address, "/v1/chat/completions/render", &chat).json();
    assert_eq!(ask(chat.clone()).json()["tokens"], rendered["token_ids"]);
    let begun = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "You"}]);
    let begun = json!({"messages": begun, "continue_final_message": true});
    let prompt = ask(json!({"prompt": "<|user|>Hi\n<|assistant|>You"}));
    assert_eq!(ask(begun).json()["tokens"], prompt.json()["tokens"]);
    for wrong in [
        json!({}),
        json!({"content": "a", "prompt": "a"}),
        json!({"messages": user("Hi"), "add_generation_prompt": false}),
        json!({"messages": user("Hi"), "continue_final_message": true}),
        json!({"messages": 1}),
    ] {
        assert_eq!(ask(wrong.clone()).status, 400, "{wrong}");
    }
}

#[test]
fn whole_numbers_may_be_floats_in_every_api() {
    let server = Setup::default().start();
    let integers = |path: &str, whole: Value, floats: Value| {
        let [a, b] = [whole, floats].map(|body| post(server.address, path, &body));
        assert_eq!(
            (a.status, b.status),
            (200, 200),
            "{path}: {} {}",
            a.body,
            b.body
        );
        (a.json(), b.json())
    };
    let (a, b) = integers(
        "/v1/completions",
        json!({"prompt": "Once", "max_tokens": 4, "seed": 7, "top_k": 5, "n": 1}),
        json!({"prompt": "Once", "max_tokens": 4.0, "seed": 7.0, "top_k": 5.0, "n": 1.0}),
    );
    assert_eq!(a["choices"], b["choices"]);
    assert_eq!(b["usage"]["completion_tokens"], 4);
    let ollama = |n: Value, seed: Value| json!({"model": "x", "prompt": "Once", "stream": false, "options": {"num_predict": n, "seed": seed}});
    let (a, b) = integers(
        "/api/generate",
        ollama(json!(4), json!(3)),
        ollama(json!(4.0), json!(3.0)),
    );
    assert_eq!(a["response"], b["response"]);
    let messages =
        |n: Value| json!({"messages": user("Hi"), "temperature": 0, "max_tokens": n, "top_k": n});
    let (a, b) = integers("/v1/messages", messages(json!(3)), messages(json!(3.0)));
    assert_eq!(a["content"], b["content"]);
    let wrong = post(
        server.address,
        "/v1/completions",
        &json!({"prompt": "Once", "top_k": 4.5}),
    );
    assert_eq!(wrong.status, 400);
    assert_eq!(wrong.json()["error"]["param"], "top_k");
}

#[test]
fn chat_answers_tell_their_times() {
    let server = Setup::default().start();
    let body = json!({"messages": user("Once upon"), "max_tokens": 6});
    let whole = post(server.address, "/v1/chat/completions", &body).json();
    let check = |timings: &Value, n_prompt: &Value| {
        assert_eq!(timings["predicted_n"], 6, "{timings}");
        let of_prompt = ["cache_n", "prompt_n"].map(|name| timings[name].as_u64().unwrap());
        assert_eq!(json!(of_prompt[0] + of_prompt[1]), *n_prompt);
        assert!(timings["predicted_ms"].as_f64().unwrap() > 0.0);
    };
    let n_prompt = &whole["usage"]["prompt_tokens"];
    check(&whole["timings"], n_prompt);
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let sent = request("POST", "/v1/chat/completions", &[], &streamed.to_string());
    let events = open(server.address, &sent).finish().json_events();
    let with_times: Vec<&Value> = events
        .iter()
        .filter(|event| event.get("timings").is_some())
        .collect();
    assert_eq!(with_times.len(), 1);
    assert_eq!(with_times[0]["choices"][0]["finish_reason"], "length");
    check(&with_times[0]["timings"], n_prompt);
}
