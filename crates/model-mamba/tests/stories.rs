//! A trained model tells the same stories as an independent implementation (transformers, f32).

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use common::case;
use kv_core::backend::Backend;
use model_tests::{Runner, Setup, candle, cpu};

/// Greedy continuations of the reference's prompts.
fn tells_the_story<B: Backend>(backend: impl Fn() -> B, file: &'static str) {
    let case = case(file);
    let text = std::fs::read_to_string(case.path("stories-mamba.reference.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let ids = |value: &serde_json::Value| -> Vec<u32> {
        let ids = value.as_array().unwrap().iter();
        ids.map(|id| id.as_u64().unwrap() as u32).collect()
    };
    for prompt in json["prompts"].as_array().unwrap() {
        let (tokens, wanted) = (ids(&prompt["ids"]), ids(&prompt["greedy_ids"]));
        assert!(wanted.len() > 50);
        let story = Runner::new(backend(), &case, &Setup::default()).greedy(&tokens, wanted.len());
        assert_eq!(story, wanted, "{file}: {}", prompt["prompt"]);
    }
}

#[test]
fn the_story_is_the_references() {
    for file in ["stories-mamba-f32", "stories-mamba-f16"] {
        tells_the_story(cpu, file);
    }
    tells_the_story(candle, "stories-mamba-f32");
}
