//! Log probabilities of `run` and `batch`, and several texts of one prompt.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::support::{failure, json as report, json_lines};
use serde_json::{Value, json};

const PROMPT: &str = "Once upon a time";

fn batch(lines: &[Value]) -> Vec<Value> {
    let input: Vec<String> = lines.iter().map(Value::to_string).collect();
    let batch = ["batch", "-c", "400", "-n", "8", "-f", "-"];
    json_lines(&batch, &input.join("\n"))
}

/// A list of places has a place for each token, with falling log probabilities.
fn check(places: &Value, ids: &Value, n_top: usize) {
    let (places, ids) = (places.as_array().unwrap(), ids.as_array().unwrap());
    assert_eq!(places.len(), ids.len());
    for (place, id) in places.iter().zip(ids) {
        assert_eq!(place["token"], *id);
        assert!(place["text"].is_string());
        let own = place["logprob"].as_f64().unwrap();
        let top = place["top"].as_array().map_or(&[][..], Vec::as_slice);
        assert_eq!(top.len(), n_top);
        let values: Vec<f64> = top.iter().map(|t| t["logprob"].as_f64().unwrap()).collect();
        assert!(values.is_sorted_by(|a, b| a >= b), "{values:?}");
        assert!(
            values
                .first()
                .is_none_or(|best| own <= *best && *best <= 0.0)
        );
    }
}

#[test]
fn run_gives_log_probabilities() {
    let run = ["run", PROMPT, "--temp", "0", "-n", "5", "-c", "64"];
    let flags = ["--json", "--logprobs", "3", "--prompt-logprobs", "1"];
    let printed = report(&[&run[..], &flags].concat());
    check(&printed["logprobs"], &printed["tokens"], 3);
    for place in printed["logprobs"].as_array().unwrap() {
        assert_eq!(
            place["top"][0]["token"], place["token"],
            "greedy takes the likeliest"
        );
    }
    let prompt_ids = printed["prompt_ids"].as_array().unwrap();
    check(&printed["prompt_logprobs"], &json!(prompt_ids[1..]), 1);
    let plain = report(&[&run[..], &["--json"]].concat());
    assert_eq!(plain["tokens"], printed["tokens"]);
    assert!(plain["logprobs"].is_null() && plain["prompt_logprobs"].is_null());

    let flags = ["--jsonl", "--logprobs", "3"];
    let lines = json_lines(&[&run[..], &flags].concat(), "");
    let of_pieces: Vec<&Value> = lines
        .iter()
        .filter_map(|line| line.get("piece").map(|_| &line["logprobs"]))
        .collect();
    assert_eq!(json!(of_pieces), printed["logprobs"]);
}

#[test]
fn too_many_log_probabilities_are_refused() {
    let (code, message) = failure(&["run", "--logprobs", "21"]);
    assert_eq!(code, 2);
    assert!(message.contains("'--logprobs <N>'"), "{message}");
}

#[test]
fn batch_gives_those_of_run() {
    let line = json!({"prompt": PROMPT, "temperature": 0, "logprobs": 2, "prompt_logprobs": 0});
    let answers = batch(&[line, json!({"prompt": PROMPT, "temperature": 0})]);
    let run = ["run", PROMPT, "--temp", "0", "-n", "8", "-c", "64", "--raw"];
    let flags = ["--json", "--logprobs", "2", "--prompt-logprobs", "0"];
    let printed = report(&[&run[..], &flags].concat());
    assert_eq!(answers[0]["logprobs"], printed["logprobs"]);
    assert_eq!(answers[0]["prompt_logprobs"], printed["prompt_logprobs"]);
    assert_eq!(answers[0]["reuse"]["missed"]["reason"], "disabled");
    assert!(answers[1]["logprobs"].is_null());
    assert_eq!(answers[0]["text"], answers[1]["text"]);
}

#[test]
fn several_texts_are_those_of_the_following_seeds() {
    let several = json!({"prompt": PROMPT, "temperature": 1.2, "seed": 5, "n": 3, "id": "x"});
    let best = json!({"prompt": PROMPT, "temperature": 1.2, "seed": 5, "n": 1, "best_of": 3});
    let answers = batch(&[several, best]);
    assert_eq!(answers[0]["id"], "x");
    let texts = answers[0]["texts"].as_array().unwrap();
    assert_eq!(texts.len(), 3);
    let mut means = Vec::new();
    for (seed, text) in (5..).zip(texts) {
        let seed = seed.to_string();
        let printed = report(&[
            "run",
            PROMPT,
            "--raw",
            "--temp",
            "1.2",
            "--seed",
            &seed,
            "-n",
            "8",
            "-c",
            "64",
            "--json",
            "--logprobs",
            "0",
        ]);
        assert_eq!(text["text"], printed["text"]);
        assert_eq!(text["finish_reason"], printed["finish"]);
        assert!(text["logprobs"].is_null(), "none were requested");
        let places = printed["logprobs"].as_array().unwrap();
        let sum: f64 = places
            .iter()
            .map(|place| place["logprob"].as_f64().unwrap())
            .sum();
        means.push(sum / places.len() as f64);
    }
    let best = (0..3)
        .max_by(|&a, &b| means[a].total_cmp(&means[b]))
        .unwrap();
    assert_eq!(answers[1]["text"], texts[best]["text"]);
    assert!(answers[1]["texts"].is_null());
    // What was reused is that of the text which computed the prompt, whichever is the best.
    let reused = answers[1]["reuse"]["tokens"].as_u64().unwrap();
    assert!(reused < answers[1]["prompt_tokens"].as_u64().unwrap());
}
