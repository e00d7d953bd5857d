//! Prompts that are echoed, with their log probabilities.

use model_tests::http::post;
use serde_json::{Map, Value, json};

use crate::support::{Alone, Server, Setup, with};

const PROMPT: &str = "Once upon a time, there was a café. ☕ Tim";

fn ask(server: &Server, body: &Value) -> Value {
    let reply = post(server.address, "/v1/completions", body);
    assert_eq!(reply.status, 200, "{body}: {}", reply.body);
    reply.json()
}

fn tokens(server: &Server, text: &str) -> Vec<u32> {
    let body = json!({"content": text, "add_special": true});
    let ids = post(server.address, "/tokenize", &body).json()["tokens"].clone();
    serde_json::from_value(ids).unwrap()
}

/// What lm-evaluation-harness sends.
fn harness(prompt: &Value, max_tokens: usize) -> Value {
    json!({
        "model": "stories", "prompt": prompt, "temperature": 0, "max_tokens": max_tokens,
        "logprobs": 1, "seed": 1234, "echo": true,
    })
}

/// Each place of a prompt has what its token has where it is forced after the tokens before it.
#[test]
fn log_probabilities_of_a_prompt_are_those_of_one_token_at_a_time() {
    let server = Setup::default().start();
    let ids = tokens(&server, PROMPT);
    for max_tokens in [0, 1] {
        let answer = ask(&server, &harness(&json!(PROMPT), max_tokens));
        let logprobs = &answer["choices"][0]["logprobs"];
        let values = logprobs["token_logprobs"].as_array().unwrap();
        let tops = logprobs["top_logprobs"].as_array().unwrap();
        assert_eq!(values.len(), ids.len() + max_tokens);
        assert_eq!((&values[0], &tops[0]), (&Value::Null, &Value::Null));
        for at in 1..ids.len() {
            let forced = json!({
                "prompt": ids[..at], "max_tokens": 1, "logprobs": 1, "temperature": 0,
                "logit_bias": {ids[at].to_string(): 100},
            });
            let one = ask(&server, &forced)["choices"][0]["logprobs"].clone();
            assert_eq!(one["tokens"][0], logprobs["tokens"][at], "{at}");
            let (got, wanted) = (values[at].as_f64(), one["token_logprobs"][0].as_f64());
            let difference = got.unwrap() - wanted.unwrap();
            assert!(difference.abs() < 1e-6, "{at}: {difference}");
            let top = tops[at].as_object().unwrap();
            let names = |top: &Map<String, Value>| top.keys().cloned().collect::<Vec<_>>();
            assert_eq!(
                Some(names(top)),
                one["top_logprobs"][0].as_object().map(names)
            );
            let own = logprobs["tokens"][at].as_str().unwrap();
            assert_eq!(top[own], values[at], "the chosen token is there, {at}");
            assert!(top.values().all(|top| top.as_f64() >= values[at].as_f64()));
        }
        let distinct = values[1..ids.len()].windows(2).filter(|w| w[0] != w[1]);
        assert!(distinct.count() > 5, "shifted by one they would be others");
    }
}

#[test]
fn the_text_begins_with_the_prompt_and_offsets_point_into_it() {
    let server = Setup::default().start();
    let alone = Alone::new();
    let n_prompt = tokens(&server, PROMPT).len();
    for max_tokens in [0, 7] {
        let answer = ask(&server, &harness(&json!(PROMPT), max_tokens));
        let choice = &answer["choices"][0];
        let text = format!("{PROMPT}{}", alone.greedy(PROMPT, max_tokens));
        assert_eq!(choice["text"], text);
        assert_eq!(choice["finish_reason"], "length");
        let usage = &answer["usage"];
        let counts = [&usage["prompt_tokens"], &usage["completion_tokens"]];
        assert_eq!(counts, [&json!(n_prompt), &json!(max_tokens)]);
        let logprobs = &choice["logprobs"];
        let chars: Vec<char> = text.chars().collect();
        let offsets = logprobs["text_offset"].as_array().unwrap();
        let offsets: Vec<usize> = offsets
            .iter()
            .map(|at| at.as_u64().unwrap() as usize)
            .collect();
        assert_eq!(offsets.len(), n_prompt + max_tokens);
        // The beginning of the text is a token that the tokenizer adds.
        assert_eq!((offsets[0], offsets[1]), (0, 0));
        let pieces = logprobs["tokens"].as_array().unwrap();
        assert_eq!(pieces[1], " Once");
        for (piece, at) in pieces.iter().zip(&offsets).skip(2) {
            let piece = piece.as_str().unwrap();
            // A part of a character is none.
            if !piece.contains('\u{fffd}') {
                let there: String = chars[*at..].iter().take(piece.chars().count()).collect();
                assert_eq!(there, piece, "{at}");
            }
        }
    }
}

#[test]
fn prompts_of_tokens_several_prompts_and_several_texts_are_echoed() {
    let server = Setup::default().start();
    let ids = tokens(&server, "Tim ran.");
    let of_tokens = ask(&server, &harness(&json!(ids), 0));
    assert_eq!(of_tokens["choices"][0]["text"], "<s> Tim ran.");
    let of_text = ask(&server, &harness(&json!("Tim ran."), 0));
    assert_eq!(
        of_tokens["choices"][0]["logprobs"]["token_logprobs"],
        of_text["choices"][0]["logprobs"]["token_logprobs"]
    );

    let prompts = json!(["Tim ran.", "A"]);
    let drawn = json!({"n": 2, "temperature": 1.0, "logprobs": null});
    let answer = ask(&server, &with(harness(&prompts, 3), &drawn));
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 4);
    for (index, choice) in choices.iter().enumerate() {
        let prompt = prompts[index / 2].as_str().unwrap();
        assert!(choice["text"].as_str().unwrap().starts_with(prompt));
    }
    assert_eq!(answer["usage"]["completion_tokens"], 12);

    let answer = ask(&server, &harness(&prompts, 3));
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 2);
    for (index, choice) in choices.iter().enumerate() {
        let prompt = prompts[index].as_str().unwrap();
        assert!(choice["text"].as_str().unwrap().starts_with(prompt));
        let n_prompt = tokens(&server, prompt).len();
        let alone = ask(&server, &harness(&json!(prompt), 0));
        let of_prompt = |choice: &Value| {
            let values = choice["logprobs"]["token_logprobs"].as_array().unwrap();
            assert!(values.len() >= n_prompt);
            values[..n_prompt].to_vec()
        };
        assert_eq!(of_prompt(choice), of_prompt(&alone["choices"][0]));
    }
}

#[test]
fn a_stream_begins_with_the_prompt() {
    let server = Setup::default().start();
    for extra in [
        json!({"prompt": [PROMPT, PROMPT]}),
        json!({"n": 2, "temperature": 1.0, "logprobs": null}),
        json!({"max_tokens": 0}),
    ] {
        let body = with(harness(&json!(PROMPT), 5), &extra);
        let whole = ask(&server, &body);
        let events = post(
            server.address,
            "/v1/completions",
            &with(body, &json!({"stream": true})),
        )
        .json_events();
        for choice in whole["choices"].as_array().unwrap() {
            let own = events.iter().map(|event| &event["choices"][0]);
            let own: Vec<&Value> = own.filter(|own| own["index"] == choice["index"]).collect();
            assert_eq!(own[0]["text"], PROMPT);
            let texts = own.iter().filter_map(|chunk| chunk["text"].as_str());
            assert_eq!(json!(texts.collect::<String>()), choice["text"]);
            for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                let parts = own
                    .iter()
                    .filter_map(|chunk| chunk["logprobs"][name].as_array());
                let parts: Vec<&Value> = parts.flatten().collect();
                let wanted = choice["logprobs"][name].as_array().cloned();
                assert_eq!(json!(parts), json!(wanted.unwrap_or_default()), "{name}");
            }
        }
    }
}

/// Without log probabilities nothing has to be computed again.
#[test]
fn an_echo_without_log_probabilities_reuses_what_is_cached() {
    let server = Setup::default().start();
    let prompt = "Once upon a time there was a little girl. ".repeat(3);
    let cached = |extra: Value| {
        let body = with(harness(&json!(prompt), 1), &extra);
        let answer = ask(&server, &body);
        let text = answer["choices"][0]["text"].as_str().unwrap();
        assert!(text.starts_with(&prompt), "{text}");
        let details = &answer["usage"]["prompt_tokens_details"];
        details["cached_tokens"].as_u64().unwrap()
    };
    let best = json!({"logprobs": null, "best_of": 2, "temperature": 1.0});
    assert_eq!(cached(best.clone()), 0);
    assert!(cached(best) > 0);
    assert_eq!(cached(json!({"logprobs": 0})), 0);
}

#[test]
fn a_gap_and_several_choices_with_log_probabilities_have_no_echo() {
    let setup = Setup {
        has_gap_marks: true,
        ..Setup::default()
    };
    let server = setup.start();
    for extra in [
        json!({"suffix": "ran."}),
        json!({"n": 2}),
        json!({"best_of": 2}),
    ] {
        let body = with(harness(&json!("Tim"), 1), &extra);
        let reply = post(server.address, "/v1/completions", &body);
        assert_eq!(reply.status, 400, "{}", reply.body);
        let error = &reply.json()["error"];
        assert_eq!(error["param"], "echo");
        assert_eq!(error["code"], "unsupported_parameter");
    }
}
