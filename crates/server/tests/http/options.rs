//! Log probabilities, several texts of a prompt, and the options of the sampler.

use cellar_engine::sampler::SamplerConfig;
use model_tests::http::post;
use serde_json::{Value, json};

use crate::support::{Alone, Server, Setup, with};

const PROMPT: &str = "Once upon a time";

fn ask(server: &Server, path: &str, body: Value) -> Value {
    let reply = post(server.address, path, &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.json()
}

fn complete(server: &Server, extra: Value) -> Value {
    let body = with(
        json!({"prompt": PROMPT, "max_tokens": 8, "temperature": 0}),
        &extra,
    );
    ask(server, "/v1/completions", body)
}

fn seeded(seed: u64) -> SamplerConfig {
    SamplerConfig {
        temperature: 1.0,
        seed,
        ..SamplerConfig::default()
    }
}

#[test]
fn n_texts_are_those_of_the_following_seeds() {
    let server = Setup::default().start();
    let alone = Alone::new();
    let drawn = json!({"temperature": 1.0, "seed": 5, "n": 3});
    let answer = complete(&server, drawn.clone());
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], index);
        assert_eq!(
            choice["text"],
            alone.text(PROMPT, seeded(5 + index as u64), 8).text
        );
    }
    let one = complete(&server, json!({"temperature": 1.0, "seed": 5}));
    assert_eq!(
        answer["usage"]["prompt_tokens"],
        one["usage"]["prompt_tokens"]
    );
    assert_eq!(answer["usage"]["completion_tokens"], 24);

    // Streamed, each choice has its own pieces.
    let body = with(
        json!({"prompt": PROMPT, "max_tokens": 8, "stream": true}),
        &drawn,
    );
    let events = post(server.address, "/v1/completions", &body).json_events();
    for (index, choice) in choices.iter().enumerate() {
        let own = events
            .iter()
            .filter(|event| event["choices"][0]["index"] == index);
        let texts = own.filter_map(|event| event["choices"][0]["text"].as_str());
        assert_eq!(json!(texts.collect::<String>()), choice["text"]);
    }
}

#[test]
fn the_best_of_several_has_the_highest_mean_log_probability() {
    let server = Setup::default().start();
    let drawn = json!({"temperature": 1.5, "seed": 9, "n": 4, "logprobs": 0});
    let all = complete(&server, drawn);
    let mean = |choice: &Value| {
        let values = choice["logprobs"]["token_logprobs"].as_array().unwrap();
        values.iter().map(|v| v.as_f64().unwrap()).sum::<f64>() / values.len() as f64
    };
    let choices = all["choices"].as_array().unwrap();
    let best = choices
        .iter()
        .max_by(|a, b| mean(a).total_cmp(&mean(b)))
        .unwrap();
    let chosen = complete(
        &server,
        json!({"temperature": 1.5, "seed": 9, "best_of": 4}),
    );
    assert_eq!(chosen["choices"].as_array().unwrap().len(), 1);
    assert_eq!(chosen["choices"][0]["text"], best["text"]);
    assert_eq!(chosen["choices"][0]["logprobs"], Value::Null);
}

#[test]
fn log_probabilities_have_the_shape_of_each_endpoint() {
    let server = Setup::default().start();
    let legacy = complete(&server, json!({"logprobs": 2}));
    let logprobs = &legacy["choices"][0]["logprobs"];
    let tokens = logprobs["tokens"].as_array().unwrap();
    assert_eq!(tokens.len(), 8);
    let text: String = tokens.iter().filter_map(Value::as_str).collect();
    assert_eq!(json!(text), legacy["choices"][0]["text"]);
    assert_eq!(logprobs["text_offset"][0], 0);
    assert_eq!(logprobs["top_logprobs"][0].as_object().unwrap().len(), 2);
    assert!(
        logprobs["token_logprobs"]
            .as_array()
            .unwrap()
            .iter()
            .all(|v| v.as_f64() <= Some(0.0))
    );

    let messages = json!([{"role": "user", "content": PROMPT}]);
    let body = json!({
        "messages": messages, "max_tokens": 6, "temperature": 0, "logprobs": true, "top_logprobs": 3,
    });
    let chat = ask(&server, "/v1/chat/completions", body.clone());
    let content = chat["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap();
    assert_eq!(content.len(), 6);
    for place in content {
        assert_eq!(place["top_logprobs"].as_array().unwrap().len(), 3);
        assert_eq!(
            place["top_logprobs"][0]["token"], place["token"],
            "greedy takes the likeliest"
        );
        assert!(place["bytes"].is_array());
    }
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let events = post(server.address, "/v1/chat/completions", &streamed).json_events();
    let places = events
        .iter()
        .filter_map(|e| e["choices"][0]["logprobs"]["content"].as_array());
    let places: Vec<&Value> = places.flatten().collect();
    assert_eq!(json!(places), json!(content));

    let llama = ask(
        &server,
        "/completion",
        json!({
            "prompt": PROMPT, "n_predict": 5, "temperature": 0, "n_probs": 2,
        }),
    );
    let places = llama["completion_probabilities"].as_array().unwrap();
    assert_eq!(places.len(), 5);
    assert_eq!(places[0]["top_logprobs"].as_array().unwrap().len(), 2);
    assert!(places[0]["id"].is_u64());

    let mut ollama = json!({
        "model": "stories:latest", "messages": messages, "logprobs": true, "top_logprobs": 2,
        "options": {"temperature": 0, "num_predict": 6}, "stream": false,
    });
    let whole = ask(&server, "/api/chat", ollama.clone());
    let places = whole["logprobs"].as_array().unwrap();
    let tokens = |places: &[Value]| -> Vec<Value> {
        places.iter().map(|place| place["token"].clone()).collect()
    };
    assert_eq!(tokens(places), tokens(content));
    assert_eq!(places[0]["top_logprobs"].as_array().unwrap().len(), 2);
    ollama["stream"] = json!(true);
    let lines = post(server.address, "/api/chat", &ollama).body;
    let lines = lines
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap());
    let streamed = lines.filter_map(|line| line["logprobs"].as_array().cloned());
    assert_eq!(
        tokens(&streamed.flatten().collect::<Vec<_>>()),
        tokens(content)
    );
    ollama["logprobs"] = json!(false);
    assert_eq!(post(server.address, "/api/chat", &ollama).status, 400);
}

#[test]
fn the_samplers_options_take_effect() {
    let server = Setup::default().start();
    let ends = complete(&server, json!({"logit_bias": {"2": 100}}));
    assert_eq!(ends["usage"]["completion_tokens"], 0);
    assert_eq!(ends["choices"][0]["finish_reason"], "stop");
    let longer = complete(&server, json!({"logit_bias": {"2": 100}, "min_tokens": 4}));
    assert_eq!(longer["usage"]["completion_tokens"], 4);
    let pairs = json!({
        "prompt": PROMPT, "n_predict": 3, "temperature": 0, "return_tokens": true,
        "logit_bias": [[300, 100.0], [301, false]],
    });
    assert_eq!(
        ask(&server, "/completion", pairs)["tokens"],
        json!([300, 300, 300])
    );
    for options in [
        json!({"typical_p": 0.2}),
        json!({"xtc_probability": 1.0, "xtc_threshold": 0.05}),
        json!({"mirostat": 2, "mirostat_tau": 1.5}),
        json!({"dry_multiplier": 0.8, "dry_allowed_length": 1, "dry_sequence_breakers": ["."]}),
    ] {
        let drawn = with(json!({"temperature": 1.0, "seed": 3}), &options);
        let first = complete(&server, drawn.clone());
        assert_eq!(
            complete(&server, drawn)["choices"],
            first["choices"],
            "{options}"
        );
    }
}

#[test]
fn values_out_of_range_are_refused_by_name() {
    let server = Setup::default().start();
    for (extra, wanted) in [
        (json!({"n": 0}), "n is 0: it must be between 1 and 128"),
        (
            json!({"n": 3, "best_of": 2}),
            "best_of is 2: it must be at least n",
        ),
        (json!({"best_of": 2, "stream": true}), "cannot be streamed"),
        (json!({"logprobs": 21}), "at most 20"),
        (json!({"logit_bias": {"x": 1}}), "'x' is no token id"),
        (
            json!({"logit_bias": {"7": 101}}),
            "the bias of token 7 is 101",
        ),
        (
            json!({"logit_bias": {"999999": 1}}),
            "the bias is of token 999999",
        ),
        (
            json!({"min_tokens": 9}),
            "at least 9 tokens, but may have 8 at most",
        ),
        (json!({"mirostat": 1}), "'mirostat' is 1"),
        (json!({"typical_p": 2}), "typical-p 2"),
    ] {
        let body = with(json!({"prompt": PROMPT, "max_tokens": 8}), &extra);
        let reply = post(server.address, "/v1/completions", &body);
        assert_eq!(reply.status, 400, "{extra}: {}", reply.body);
        let message = reply.json()["error"]["message"]
            .as_str()
            .unwrap()
            .to_owned();
        assert!(message.contains(wanted), "{message}");
    }
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}], "top_logprobs": 2});
    let reply = post(server.address, "/v1/chat/completions", &chat);
    assert_eq!(reply.status, 400);
    assert!(reply.body.contains("needs 'logprobs'"), "{}", reply.body);
}
