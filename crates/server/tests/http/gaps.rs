//! Fill in the middle: `/infill`, `suffix` of OpenAI and of Ollama.

use model_tests::http::post;
use serde_json::{Value, json};

use crate::support::{GAP_MARKS, Server, Setup};

fn with_marks() -> Server {
    let setup = Setup {
        has_gap_marks: true,
        ..Setup::default()
    };
    setup.start()
}

fn tokens(server: &Server, text: &str) -> Vec<u64> {
    let body = json!({"content": text, "parse_special": false});
    let reply = post(server.address, "/tokenize", &body).json();
    let tokens = reply["tokens"].as_array().unwrap().iter();
    tokens.map(|id| id.as_u64().unwrap()).collect()
}

/// What tokens are continued with.
fn continued(server: &Server, prompt: &[u64]) -> Value {
    let body = json!({"prompt": prompt, "temperature": 0, "n_predict": 9});
    post(server.address, "/completion", &body).json()["content"].clone()
}

#[test]
fn a_gap_is_filled_by_what_its_tokens_are_continued_with() {
    let server = with_marks();
    let [before, after, middle] = GAP_MARKS.map(|mark| mark.id);
    let (prefix, suffix) = ("Once upon a time", "The end.");
    let mut prompt = vec![1, before];
    prompt.extend(tokens(&server, prefix));
    prompt.push(after);
    prompt.extend(tokens(&server, suffix));
    prompt.push(middle);
    let expected = continued(&server, &prompt);
    let body = json!({
        "input_prefix": "Once upon", "prompt": " a time", "input_suffix": suffix,
        "temperature": 0, "n_predict": 9,
    });
    let filled = post(server.address, "/infill", &body).json();
    assert_eq!(filled["content"], expected);
    assert_eq!(filled["tokens_evaluated"], prompt.len());
    let body = json!({"prompt": prefix, "suffix": suffix, "temperature": 0, "max_tokens": 9});
    let filled = post(server.address, "/v1/completions", &body).json();
    assert_eq!(filled["choices"][0]["text"], expected);
    let body = json!({"model": "stories", "prompt": prefix, "suffix": suffix, "stream": false,
                      "options": {"temperature": 0, "num_predict": 9}});
    let filled = post(server.address, "/api/generate", &body).json();
    assert_eq!(filled["response"], expected);
    let shown = post(server.address, "/api/show", &json!({"model": "stories"})).json();
    assert_eq!(shown["capabilities"], json!(["completion", "insert"]));

    // Other files come before, and are cut off where there is no room.
    let extra = |text: &str| json!([{"text": text, "filename": "a.txt"}]);
    let body = |extra: Value| {
        json!({"input_prefix": prefix, "input_suffix": suffix, "input_extra": extra,
               "temperature": 0, "n_predict": 9})
    };
    let one = post(server.address, "/infill", &body(extra("One day"))).json();
    assert!(one["tokens_evaluated"].as_u64().unwrap() > prompt.len() as u64);
    let large = post(
        server.address,
        "/infill",
        &body(extra(&"word ".repeat(3000))),
    )
    .json();
    assert_eq!(large["tokens_evaluated"], 1024 - 9, "{large}");
}

#[test]
fn a_vocabulary_without_marks_fills_no_gaps() {
    let server = Setup::default().start();
    let body = json!({"input_prefix": "a", "input_suffix": "b"});
    let reply = post(server.address, "/infill", &body);
    assert_eq!(reply.status, 501, "{}", reply.body);
    assert!(reply.body.contains("no marks"), "{}", reply.body);
    let body = json!({"prompt": "a", "suffix": "b"});
    let reply = post(server.address, "/v1/completions", &body);
    assert_eq!(reply.status, 400);
    assert_eq!(reply.json()["error"]["param"], "suffix");
    let body = json!({"model": "stories", "prompt": "a", "suffix": "b"});
    let reply = post(server.address, "/api/generate", &body);
    assert_eq!(reply.status, 501);
    assert!(reply.json()["error"].as_str().unwrap().contains("no marks"));
}

#[test]
fn wrong_fields_are_named() {
    let server = with_marks();
    for (path, body, param) in [
        (
            "/infill",
            json!({"input_prefix": "a", "input_suffix": 1}),
            json!("input_suffix"),
        ),
        (
            "/infill",
            json!({"input_prefix": "a"}),
            json!("input_suffix"),
        ),
        (
            "/infill",
            json!({"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "c"}]}),
            json!("input_extra[0].text"),
        ),
        ("/completion", json!({}), json!("prompt")),
        (
            "/v1/completions",
            json!({"prompt": [1, 2], "suffix": "b"}),
            json!("prompt"),
        ),
    ] {
        let reply = post(server.address, path, &body);
        assert_eq!(reply.status, 400, "{}", reply.body);
        assert_eq!(reply.json()["error"]["param"], param, "{}", reply.body);
    }
}
