//! Trained models tell the stories that an independent implementation (transformers, f32) tells.

use kv_backend::Backend;
use model_tests::{Case, Runner, Setup, Source, best, cpu, fixture};

use super::register;

const fn story(name: &'static str, folder: &'static str) -> Case {
    Case {
        source: Source::Gguf(folder),
        ..Case::recipe(name, register)
    }
}

/// The trained models: a Llama, one with windows, a Mamba.
pub(crate) const MODELS: [Case; 3] = [
    story("stories-llama-f16", "../../models"),
    story("stories-gemma3-f16", "stories"),
    story("stories-mamba-f16", "stories"),
];

/// A prompt with its greedy continuation.
struct Story {
    prompt: Vec<u32>,
    continuation: Vec<u32>,
}

fn stories(case: &Case) -> Vec<Story> {
    let Source::Gguf(folder) = case.source else {
        panic!("{} is no file", case.name)
    };
    let name = case.name.trim_end_matches("-f16");
    let path = fixture(folder).join(format!("{name}.reference.json"));
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let ids = |value: &serde_json::Value| serde_json::from_value(value.clone()).unwrap();
    let prompts = json["prompts"].as_array().unwrap().iter();
    let story = |prompt: &serde_json::Value| Story {
        prompt: ids(&prompt["ids"]),
        continuation: ids(&prompt["greedy_ids"]),
    };
    prompts.map(story).collect()
}

/// Tokens of the stories, and of how many prompts.
#[derive(Clone, Copy)]
pub(crate) struct Length {
    pub(crate) n_prompts: usize,
    pub(crate) n_tokens: usize,
}

impl Length {
    pub(crate) const WHOLE: Self = Self {
        n_prompts: usize::MAX,
        n_tokens: usize::MAX,
    };
}

/// The text is the reference's, token by token.
pub(crate) fn stories_are_the_references<B: Backend>(backend: impl Fn() -> B, length: Length) {
    for case in &MODELS {
        for story in stories(case).into_iter().take(length.n_prompts) {
            let n = story.continuation.len().min(length.n_tokens);
            let mut runner = Runner::new(backend(), case, &Setup::default());
            let told = runner.greedy(&story.prompt, n);
            assert_eq!(told, story.continuation[..n], "{}", case.name);
        }
    }
}

/// At every token of the reference's text the choice is the CPU's, or one that is likelier there by
/// less than twice `tolerance`.
pub(crate) fn choices_are_the_cpus<B: Backend>(
    backend: impl Fn() -> B,
    length: Length,
    tolerance: f32,
) {
    for case in &MODELS {
        for story in stories(case).into_iter().take(length.n_prompts) {
            let n = story.continuation.len().min(length.n_tokens);
            let mut runner = Runner::new(backend(), case, &Setup::default());
            let mut ours = runner.feed(0, &story.prompt, 512);
            for &token in &story.continuation[..n] {
                ours.extend(runner.feed(0, &[token], 512));
            }
            let text = [&story.prompt, &story.continuation[..n]].concat();
            let theirs = Runner::new(cpu(), case, &Setup::default()).feed(0, &text, 512);
            let n_vocab = theirs.len() / text.len();
            assert_eq!(ours.len(), theirs.len());
            let rows = ours.chunks(n_vocab).zip(theirs.chunks(n_vocab));
            for (at, (ours, theirs)) in rows.enumerate() {
                assert!(ours.iter().all(|logit| logit.is_finite()), "{}", case.name);
                let (our, their) = (best(ours) as usize, best(theirs) as usize);
                let worse = theirs[their] - theirs[our];
                let name = case.name;
                assert!(
                    worse < 2.0 * tolerance,
                    "{name}, token {at}: {our}, but {their} is likelier by {worse}"
                );
            }
        }
    }
}
