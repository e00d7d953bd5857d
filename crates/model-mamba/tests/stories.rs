//! A trained model tells the same stories as an independent implementation (transformers, f32).

#![allow(clippy::unwrap_used)] // helpers of tests

use crate::common::STORIES;
use kv_backend::Backend;
use model_tests::{Runner, Setup, candle, cpu, fixture};

/// Greedy continuations of the reference's prompts.
fn tells_the_story<B: Backend>(backend: impl Fn() -> B) {
    let path = fixture("stories/stories-mamba.reference.json");
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let ids = |value: &serde_json::Value| -> Vec<u32> {
        let ids = value.as_array().unwrap().iter();
        ids.map(|id| id.as_u64().unwrap() as u32).collect()
    };
    for prompt in json["prompts"].as_array().unwrap() {
        let (tokens, wanted) = (ids(&prompt["ids"]), ids(&prompt["greedy_ids"]));
        assert!(wanted.len() > 50);
        let mut runner = Runner::new(backend(), &STORIES, &Setup::default());
        let story = runner.greedy(&tokens, wanted.len());
        assert_eq!(story, wanted, "{}", prompt["prompt"]);
    }
}

#[test]
fn the_story_is_the_references_on_the_cpu() {
    tells_the_story(cpu);
}

#[test]
fn the_story_is_the_references_on_candle() {
    tells_the_story(candle);
}
