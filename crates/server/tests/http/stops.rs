//! What ends a text: stop tokens, stop strings that stay in it, and texts that the model may not
//! end.

use model_tests::http::post;
use serde_json::{Value, json};

use crate::support::{Server, Setup, with};

const PROMPT: &str = "Once upon a time";
/// The token that ends the model's texts.
const EOS: u32 = 2;

fn ask(server: &Server, path: &str, body: &Value) -> Value {
    let reply = post(server.address, path, body);
    assert_eq!(reply.status, 200, "{body}: {}", reply.body);
    reply.json()
}

/// The tokens of a greedy text.
fn greedy(server: &Server, extra: &Value) -> (Vec<u32>, Value) {
    let body = json!({
        "prompt": PROMPT, "n_predict": 24, "temperature": 0, "return_tokens": true,
    });
    let answer = ask(server, "/completion", &with(body, extra));
    let tokens = serde_json::from_value(answer["tokens"].clone()).unwrap();
    (tokens, answer)
}

#[test]
fn a_text_ends_before_a_stop_token() {
    let setup = Setup {
        has_draft_model: true,
        ..Setup::default()
    };
    let server = setup.start();
    let (tokens, _) = greedy(&server, &json!({}));
    // One that is there for the first time.
    let at = (6..tokens.len()).find(|&at| !tokens[..at].contains(&tokens[at]));
    let at = at.unwrap();
    for speculate in ["off", "lookup", "draft"] {
        let stop = json!({"stop_token_ids": [0, tokens[at]], "speculate": speculate});
        let (stopped, answer) = greedy(&server, &stop);
        assert_eq!(stopped, tokens[..at], "{speculate}");
        assert_eq!(answer["stop_type"], "eos");
        let text = answer["content"].as_str().unwrap();

        let body = json!({"prompt": PROMPT, "max_tokens": 24, "temperature": 0});
        let completion = ask(&server, "/v1/completions", &with(body.clone(), &stop));
        let choice = &completion["choices"][0];
        assert_eq!(choice["text"], text);
        assert_eq!(choice["finish_reason"], "stop");
        assert_eq!(completion["usage"]["completion_tokens"], at);

        let streamed = with(with(body, &stop), &json!({"stream": true}));
        let events = post(server.address, "/v1/completions", &streamed).json_events();
        let texts = events
            .iter()
            .filter_map(|e| e["choices"][0]["text"].as_str());
        assert_eq!(texts.collect::<String>(), text);
    }

    let messages = json!([{"role": "user", "content": PROMPT}]);
    let body = json!({"messages": messages, "max_tokens": 9, "temperature": 0, "logprobs": true});
    let whole = ask(&server, "/v1/chat/completions", &body);
    let first = whole["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(!first.is_empty());
    let all: Vec<u32> = (0..1024).collect();
    let none = with(body, &json!({"stop_token_ids": all}));
    let none = ask(&server, "/v1/chat/completions", &none);
    assert_eq!(none["choices"][0]["message"]["content"], "");
    assert_eq!(none["choices"][0]["finish_reason"], "stop");
}

#[test]
fn stop_tokens_wait_for_the_least_number_of_tokens() {
    let server = Setup::default().start();
    let (tokens, _) = greedy(&server, &json!({}));
    let (stopped, _) = greedy(&server, &json!({"stop_token_ids": [tokens[0]]}));
    assert!(stopped.is_empty());
    let later = json!({"stop_token_ids": [tokens[0]], "min_tokens": 5});
    let (stopped, _) = greedy(&server, &later);
    assert!(
        stopped.len() >= 5 && !stopped.contains(&tokens[0]),
        "{stopped:?}"
    );
}

#[test]
fn a_stop_token_that_does_not_exist_is_refused_with_the_size_of_the_vocabulary() {
    let server = Setup::default().start();
    let n_vocab = get_n_vocab(&server);
    for (body, param) in [
        (json!({"stop_token_ids": [1, n_vocab]}), "stop_token_ids"),
        (json!({"stop_token_ids": [-1]}), "stop_token_ids[0]"),
        (
            json!({"logit_bias": {n_vocab.to_string(): 1}}),
            "logit_bias",
        ),
    ] {
        let body = with(json!({"prompt": PROMPT, "max_tokens": 1}), &body);
        let reply = post(server.address, "/v1/completions", &body);
        assert_eq!(reply.status, 400, "{}", reply.body);
        let error = reply.json()["error"].clone();
        assert_eq!(error["param"], param, "{error}");
        if param != "stop_token_ids[0]" {
            let message = error["message"].as_str().unwrap();
            assert!(message.contains(&format!("{n_vocab} tokens")), "{message}");
        }
    }
}

fn get_n_vocab(server: &Server) -> u64 {
    let shown = post(server.address, "/api/show", &json!({"model": "stories"})).json();
    let n_vocab = &shown["model_info"]["tokenizer.ggml.n_tokens"];
    n_vocab.as_u64().unwrap()
}

#[test]
fn the_models_own_ends_can_be_ignored() {
    let server = Setup::default().start();
    let ends = json!({"logit_bias": [[EOS, 100.0]]});
    assert!(greedy(&server, &ends).0.is_empty());
    let on = with(ends, &json!({"ignore_eos": true}));
    let (tokens, answer) = greedy(&server, &on);
    assert_eq!((tokens.len(), tokens.contains(&EOS)), (24, false));
    assert_eq!(answer["stop_type"], "limit");
    // JSON has to be ended by the model.
    let body = json!({
        "prompt": PROMPT, "ignore_eos": true, "response_format": {"type": "json_object"},
    });
    let reply = post(server.address, "/v1/completions", &body);
    assert_eq!(reply.status, 400, "{}", reply.body);
    assert_eq!(reply.json()["error"]["param"], "ignore_eos");
}

#[test]
fn a_stop_string_can_stay_in_the_text() {
    let server = Setup::default().start();
    let text = |extra: Value| {
        let body = json!({"prompt": PROMPT, "max_tokens": 24, "temperature": 0});
        let choice = ask(&server, "/v1/completions", &with(body, &extra))["choices"][0].clone();
        (
            choice["text"].as_str().unwrap().to_owned(),
            choice["finish_reason"].clone(),
        )
    };
    let (whole, _) = text(json!({}));
    let word = whole.split(' ').nth(4).unwrap();
    let (before, _) = text(json!({"stop": word}));
    let (with_it, reason) = text(json!({"stop": word, "include_stop_str_in_output": true}));
    assert_eq!(with_it, format!("{before}{word}"));
    assert!(whole.starts_with(&with_it));
    assert_eq!(reason, "stop");
    let body = json!({
        "prompt": PROMPT, "stop_token_ids": [5], "include_stop_str_in_output": true,
    });
    let reply = post(server.address, "/v1/completions", &body);
    let error = reply.json()["error"].clone();
    assert_eq!(error["param"], "include_stop_str_in_output", "{error}");
}

/// A model that only thinks: after so many tokens its reasoning is ended, and the answer goes on.
#[test]
fn reasoning_ends_after_its_budget() {
    let setup = Setup {
        template: Some("{% for m in messages %}{{ m.content }}{% endfor %}<think>"),
        ..Setup::scripted()
    };
    let server = setup.start();
    let messages = json!([{"role": "user", "content": "Hello"}]);
    let body = json!({"messages": messages, "max_tokens": 30, "temperature": 0});
    let thoughts = "a".repeat(40);
    let is_answer = |text: &Value| {
        text.as_str()
            .is_some_and(|t| t.len() > 3 && !t.contains('<'))
    };
    for name in [
        "reasoning_budget",
        "thinking_budget_tokens",
        "thinking_token_budget",
    ] {
        for n_tokens in [0, 3] {
            server.script(&thoughts);
            let answer = ask(
                &server,
                "/v1/chat/completions",
                &with(body.clone(), &json!({name: n_tokens})),
            );
            let message = &answer["choices"][0]["message"];
            let reasoning = message["reasoning_content"].as_str().unwrap_or_default();
            assert_eq!(reasoning, &thoughts[..n_tokens], "{name}: {answer}");
            assert!(is_answer(&message["content"]), "{answer}");
        }
    }
    server.script(&thoughts);
    let limited = json!({"thinking": {"type": "enabled", "budget_tokens": 5}});
    let answer = ask(&server, "/v1/messages", &with(body.clone(), &limited));
    assert_eq!(answer["content"][0]["thinking"], "aaaaa", "{answer}");
    assert!(is_answer(&answer["content"][1]["text"]), "{answer}");
    // What the model ends itself is not touched, and -1 is no limit.
    for (script, n_tokens, reasoning) in [
        ("ab</think>done", 10, "ab"),
        (&thoughts, -1, &thoughts[..30]),
    ] {
        server.script(script);
        let limited = with(body.clone(), &json!({"reasoning_budget": n_tokens}));
        let answer = ask(&server, "/v1/chat/completions", &limited);
        let message = &answer["choices"][0]["message"];
        assert_eq!(message["reasoning_content"], reasoning, "{answer}");
    }
    let wrong = with(body, &json!({"reasoning_budget": -2}));
    assert_eq!(
        post(server.address, "/v1/chat/completions", &wrong).status,
        400
    );
}

/// The model begins to think itself.
#[test]
fn reasoning_that_the_model_begins_has_a_budget_too() {
    let server = Setup::scripted().start();
    let messages = json!([{"role": "user", "content": "Hello"}]);
    let body =
        json!({"messages": messages, "max_tokens": 40, "temperature": 0, "reasoning_budget": 4});
    server.script(&format!("\n<think>{}", "b".repeat(50)));
    let answer = ask(&server, "/v1/chat/completions", &body);
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["reasoning_content"], "bbbb", "{answer}");
    assert!(
        message["content"].as_str().unwrap().starts_with('b'),
        "{answer}"
    );
    // A text without reasoning has no budget.
    server.script("no thoughts <think> here");
    let answer = ask(&server, "/v1/chat/completions", &body);
    assert_eq!(
        answer["choices"][0]["message"]["content"],
        "no thoughts <think> here"
    );
}

/// Reasoning in messages of its own: the next one is the answer.
#[test]
fn reasoning_on_a_channel_has_a_budget_too() {
    let messages = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let channel = "<|channel|>analysis<|message|>";
    let recipient = " to=self<|message|>";
    for (marks, open, close) in [
        ("<|channel|><|message|>", channel, "<|end|>"),
        (
            "<atem:invoke name= to=self <|message|>",
            recipient,
            "<|eom|>",
        ),
    ] {
        let template = format!("{{# {marks} #}}{messages}");
        let setup = Setup {
            template: Some(Box::leak(template.into_boxed_str())),
            reasoning_tokens: Some(4),
            ..Setup::scripted()
        };
        let server = setup.start();
        let messages = json!([{"role": "user", "content": "Hello"}]);
        let body = json!({"messages": messages, "max_tokens": 200, "temperature": 0});
        let next = format!("{close}<|start|>assistant{open}");
        for (written, n_tokens, reasoning) in [
            (format!("{open}{}", "c".repeat(50)), json!(null), "cccc"),
            // A later message has what the first one left, whose mark is 7 tokens here.
            (
                format!("{open}ab{next}{}", "c".repeat(50)),
                json!(12),
                "abcccc",
            ),
            (
                format!("{open}{}{close}", "c".repeat(50)),
                json!(-1),
                &"c".repeat(50),
            ),
        ] {
            server.script(&written);
            let limited = with(body.clone(), &json!({"reasoning_budget": n_tokens}));
            let answer = ask(&server, "/v1/chat/completions", &limited);
            let message = &answer["choices"][0]["message"];
            assert_eq!(message["reasoning_content"], reasoning, "{answer}");
            let text = message["content"].as_str().unwrap();
            assert!(n_tokens == -1 || text.starts_with('c'), "{answer}");
        }
    }
}
