//! llama-server's endpoints.

use cellar_engine::serve::Speculation;
use model_tests::http::{get, post};
use serde_json::{Value, json};

use crate::support::{Alone, Setup};

#[test]
fn a_completion_is_the_text_alone() {
    let server = Setup::default().start();
    let prompt = "Once upon a time there was a little girl. She had a";
    let text = Alone::new().greedy(prompt, 11);
    let body = json!({"prompt": prompt, "temperature": 0, "n_predict": 11,
                      "return_tokens": true, "cache_prompt": true, "id_slot": -1});
    let answer = post(server.address, "/completion", &body).json();
    assert_eq!(answer["content"], text);
    assert_eq!(answer["stop_type"], "limit");
    assert_eq!(answer["tokens_predicted"], 11);
    assert_eq!(answer["tokens"].as_array().unwrap().len(), 11);
    let back = post(
        server.address,
        "/detokenize",
        &json!({"tokens": answer["tokens"]}),
    );
    assert_eq!(back.json()["content"].as_str().unwrap().trim(), text.trim());

    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let reply = post(server.address, "/completion", &streamed);
    let events = reply.json_events();
    assert!(reply.is_complete && !reply.body.contains("[DONE]"));
    let texts = events
        .iter()
        .map(|event| event["content"].as_str().unwrap());
    assert_eq!(texts.collect::<String>(), text);
    let stops: Vec<bool> = events
        .iter()
        .map(|e| e["stop"].as_bool().unwrap())
        .collect();
    assert_eq!(stops.iter().filter(|stop| **stop).count(), 1);
    let last = events.last().unwrap();
    assert_eq!(last["stop"], true);
    let n_prompt = last["tokens_evaluated"].as_u64().unwrap();
    assert_eq!(
        last["tokens_cached"],
        n_prompt - 1,
        "the prompt came before"
    );

    let schema = json!({"prompt": "x", "n_predict": 30, "json_schema": {"enum": ["yes", "no"]}});
    let answer = post(server.address, "/completion", &schema).json();
    assert!(
        ["\"yes\"", "\"no\""].contains(&answer["content"].as_str().unwrap()),
        "{answer}"
    );
    assert_eq!(answer["stop_type"], "eos");
}

/// A list of prompts is answered by a list; one with tokens among its texts is one prompt.
#[test]
fn each_prompt_of_a_list_has_its_own_result() {
    let server = Setup::default().start();
    let (a, b) = ("Once upon a time", "One day, Tom");
    let ask = |prompt: Value| {
        let body = json!({"prompt": prompt, "temperature": 0, "n_predict": 6});
        let reply = post(server.address, "/completion", &body);
        assert_eq!(reply.status, 200, "{}", reply.body);
        reply.json()
    };
    let tokens = |text: &str, add_special: bool| {
        let body = json!({"content": text, "add_special": add_special});
        post(server.address, "/tokenize", &body).json()["tokens"].clone()
    };
    let alone = Alone::new();
    let (text_a, text_b) = (alone.greedy(a, 6), alone.greedy(b, 6));
    let one = ask(json!(tokens(a, true)));
    assert_eq!(one["content"], text_a);
    assert_eq!(ask(json!([a]))["content"], text_a);
    for prompts in [
        json!([a, b]),
        json!([tokens(a, true), b]),
        json!([tokens(a, true), tokens(b, true)]),
    ] {
        let results = ask(prompts);
        let results = results.as_array().unwrap();
        let contents: Vec<&Value> = results.iter().map(|result| &result["content"]).collect();
        assert_eq!(contents, [&text_a, &text_b]);
        let indices: Vec<&Value> = results.iter().map(|result| &result["index"]).collect();
        assert_eq!(indices, [0, 1]);
    }
    // Tokens and texts of one prompt.
    let mut mixed = tokens(a, true).as_array().unwrap().clone();
    mixed.push(json!(" there was"));
    assert!(ask(json!(mixed)).is_object());
    let body = json!({"prompt": [a, b], "temperature": 0, "n_predict": 6, "stream": true});
    let events = post(server.address, "/completion", &body).json_events();
    for (index, text) in [(0, &text_a), (1, &text_b)] {
        let of = events.iter().filter(|event| event["index"] == index);
        let pieces = of.map(|event| event["content"].as_str().unwrap());
        assert_eq!(pieces.collect::<String>(), *text);
    }
    let wrong = json!({"prompt": [1, ["a"]]});
    let reply = post(server.address, "/completion", &wrong);
    assert_eq!(reply.status, 400, "{}", reply.body);
    let error = reply.json()["error"].clone();
    assert_eq!(
        (&error["code"], &error["param"]),
        (&json!(400), &json!("prompt"))
    );
    assert_eq!(error["type"], "invalid_request_error");
}

#[test]
fn tokens_and_texts_are_each_other() {
    let server = Setup::default().start();
    let body = json!({"content": "One day, Tom", "with_pieces": true});
    let tokens = post(server.address, "/tokenize", &body).json()["tokens"].clone();
    let tokens = tokens.as_array().unwrap();
    let pieces: String = tokens
        .iter()
        .map(|t| t["piece"].as_str().unwrap())
        .collect();
    assert_eq!(pieces.trim_start(), "One day, Tom");
    let ids: Vec<&Value> = tokens.iter().map(|t| &t["id"]).collect();
    let text = post(server.address, "/detokenize", &json!({"tokens": ids}));
    assert_eq!(text.json()["content"], "One day, Tom");
    let error = post(server.address, "/detokenize", &json!({"tokens": [1 << 30]}));
    assert_eq!(
        (error.status, &error.json()["error"]["param"]),
        (400, &json!("tokens"))
    );
}

#[test]
fn the_state_of_the_server_is_shown() {
    let server = Setup::default().start();
    assert_eq!(
        get(server.address, "/health").json(),
        json!({"status": "ok"})
    );
    for path in ["/readyz", "/livez"] {
        assert_eq!(get(server.address, path).json(), json!({"status": "ok"}));
    }
    let props = get(server.address, "/props").json();
    assert_eq!(props["default_generation_settings"]["n_ctx"], 1024);
    assert_eq!(props["total_slots"], 4);
    let slots = get(server.address, "/slots").json();
    assert_eq!(slots.as_array().unwrap().len(), 4);
    assert!(
        slots
            .as_array()
            .unwrap()
            .iter()
            .all(|slot| slot["is_processing"] == false)
    );
    assert_eq!(server.metric("cellar_kv_cells{"), 1024.0);
    let body = json!({"prompt": "Once upon a time", "max_tokens": 5});
    for _ in 0..2 {
        assert_eq!(post(server.address, "/v1/completions", &body).status, 200);
    }
    assert_eq!(
        server.metric("cellar_requests_total{end=\"finished\"}"),
        2.0
    );
    assert_eq!(server.metric("cellar_generated_tokens_total"), 10.0);
    assert_eq!(
        server.metric("cellar_time_to_first_token_seconds_count"),
        2.0
    );
    // Prompts of so few tokens are not looked up.
    let too_short = "cellar_prefix_misses_total{reason=\"too_short\"}";
    assert_eq!(server.metric(too_short), 2.0);
    server.await_metric("vllm:num_requests_running{", 0.0);
    assert_eq!(server.metric("vllm:num_requests_waiting{"), 0.0);
    // What is cached is free to a router, and no request runs.
    assert_eq!(server.metric("vllm:kv_cache_usage_perc{"), 0.0);
    let cells = |kind: &str| {
        let labels = format!("model_name=\"stories\",part=\"0\",use=\"{kind}\"");
        server.metric(&format!("cellar_part_cells{{{labels}}}"))
    };
    assert_eq!(cells("running"), 0.0);
    assert_eq!(cells("cached"), server.metric("cellar_kv_cells_used{"));
    assert_eq!(cells("cached") + cells("free"), 1024.0);
    for (name, alias) in [
        (
            "cellar_generated_tokens_total",
            "vllm:generation_tokens_total",
        ),
        ("cellar_prompt_tokens_total", "vllm:prompt_tokens_total"),
        (
            "cellar_prompt_tokens_total",
            "vllm:prefix_cache_queries_total",
        ),
        ("cellar_reused_tokens_total", "vllm:prefix_cache_hits_total"),
        ("cellar_preemptions_total", "vllm:num_preemptions_total"),
        (
            "cellar_request_seconds_count",
            "vllm:e2e_request_latency_seconds_count",
        ),
        (
            "cellar_inter_token_seconds_count",
            "vllm:inter_token_latency_seconds_count",
        ),
        (
            "cellar_time_to_first_token_seconds_count",
            "vllm:time_to_first_token_seconds_count",
        ),
    ] {
        assert_eq!(server.metric(name), server.metric(alias), "{alias}");
    }
    assert!(server.metric("cellar_inter_token_seconds_count") > 0.0);
    let index = get(server.address, "/").body;
    for cellar_server::api::Endpoint { method, path, .. } in cellar_server::api::endpoints() {
        let path = path.replace('*', "");
        assert!(index.contains(&path), "{method} {path}");
    }
}

/// Drafted tokens change no text, and are counted where each API and Prometheus look for them.
#[test]
fn drafted_tokens_are_counted() {
    let prompt = "The cat sat. The dog sat. The cat sat. The dog sat. The cat sat. The dog";
    let body = json!({"prompt": prompt, "temperature": 0, "n_predict": 60, "max_tokens": 60});
    let plain = Setup::default().start();
    let setup = Setup {
        speculation: Speculation::LOOKUP,
        ..Setup::default()
    };
    let server = setup.start();
    let of = |address| post(address, "/completion", &body).json();
    let (without, with) = (of(plain.address), of(server.address));
    assert_eq!(with["content"], without["content"]);
    assert!(without["timings"].get("draft_n").is_none(), "{without}");
    let timings = &with["timings"];
    let (drafted, accepted) = (&timings["draft_n"], &timings["draft_n_accepted"]);
    let (drafted, accepted) = (drafted.as_u64().unwrap(), accepted.as_u64().unwrap());
    assert!(drafted > 0 && accepted > 0, "{timings}");
    server.await_metric("cellar_drafted_tokens_total", drafted as f64);
    server.await_metric("cellar_accepted_tokens_total", accepted as f64);
    let usage = post(server.address, "/v1/completions", &body).json()["usage"].clone();
    let details = &usage["completion_tokens_details"];
    assert_eq!(details["accepted_prediction_tokens"], accepted, "{usage}");
    assert_eq!(details["rejected_prediction_tokens"], drafted - accepted);
}

/// Each request chooses how it is drafted for, in every API; the text is the same.
#[test]
fn requests_choose_how_they_are_drafted_for() {
    let setup = Setup {
        has_draft_model: true,
        ..Setup::default()
    };
    let (server, plain) = (setup.start(), Setup::default().start());
    let body = |how: Option<&str>| {
        let mut body = json!({"prompt": "Once upon a time", "temperature": 0.8, "seed": 4,
                              "n_predict": 40, "max_tokens": 40});
        if let Some(how) = how {
            body["speculate"] = json!(how);
        }
        body
    };
    let of = |how| post(server.address, "/completion", &body(how)).json();
    let unchanged = of(None);
    for how in ["off", "lookup", "draft"] {
        let answer = of(Some(how));
        assert_eq!(answer["content"], unchanged["content"], "{how}");
        let drafted = answer["timings"].get("draft_n");
        match how {
            "draft" => assert!(drafted.unwrap().as_u64().unwrap() > 0),
            "off" => assert!(drafted.is_none()),
            _ => {}
        }
    }
    let usage = &post(server.address, "/v1/completions", &body(Some("draft"))).json()["usage"];
    let accepted = &usage["completion_tokens_details"]["accepted_prediction_tokens"];
    assert!(accepted.as_u64().unwrap() > 0, "{usage}");

    let refused = |address, how: Value| {
        let mut body = body(None);
        body["speculate"] = how;
        let reply = post(address, "/v1/completions", &body);
        assert_eq!(reply.status, 400, "{}", reply.body);
        let error = reply.json()["error"].clone();
        assert_eq!(error["param"], "speculate", "{error}");
        error["message"].as_str().unwrap().to_owned()
    };
    let message = refused(plain.address, json!("draft"));
    assert!(message.contains("--draft-model"), "{message}");
    let message = refused(server.address, json!("always"));
    assert!(
        message.contains("off") && message.contains("lookup"),
        "{message}"
    );
    refused(server.address, json!(true));
}
