//! Second choices of a draft model, verified as branches: texts are the same, steps fewer, and branches hold
//! nothing between steps.

use cellar_engine::{EngineConfig, GenerateOptions, Generation, SpeculationOff};
use kv_core::SeqId;
use kv_core::memory::{Memory, Streams};

use crate::service::draft_model::{draft_model, generate, options, prompts};
use crate::service::models::{Case, stories};

const N_BRANCHES: u32 = 3;

/// Texts that are measured, and their tokens: 8 of 120 in docs/performance.md.
const N_TEXTS: u64 = 3;
const N_TOKENS: usize = 40;

fn config(n_ctx: u32) -> EngineConfig {
    EngineConfig {
        n_ctx: Some(n_ctx),
        n_seqs: 1 + N_BRANCHES,
        n_active: Some(1),
        n_ubatch: 32,
        ..EngineConfig::default()
    }
}

fn branches(n: u32) -> Vec<SeqId> {
    (1..=n).map(SeqId).collect()
}

/// Also where the context ends the text, and the last tokens leave no room for branches.
#[test]
fn texts_with_branches_are_those_without() {
    let target = stories("stories-llama");
    for (n_ctx, temperatures) in [(300, [0.0, 0.8]), (40, [0.3, 1.3])] {
        let mut engine = target.engine_with(&config(n_ctx));
        for draft in ["stories-llama", "stories-mamba", "stories-gemma3"].map(stories) {
            let model = draft_model(&draft, &target, 300);
            let mut n_seconds = [0; 2];
            for temperature in temperatures {
                for (prompt, n) in prompts(&target).iter().zip(1..) {
                    let plain = options(temperature, None);
                    let (alone, _) = generate(&mut engine, &target, prompt, plain);
                    let with_branches = GenerateOptions {
                        branches: branches(n),
                        ..options(temperature, Some(&model))
                    };
                    let (got, speculated) = generate(&mut engine, &target, prompt, with_branches);
                    let name = format!("{}, {n} branches at {temperature}", draft.name);
                    assert_eq!(got, alone, "{name}");
                    for branch in branches(N_BRANCHES) {
                        assert_eq!(engine.memory().n_tokens(branch), 0, "{name}");
                    }
                    let n_held = engine.memory().n_tokens(SeqId(0));
                    assert_eq!(engine.memory().n_used(), n_held, "{name}");
                    n_seconds[0] += speculated.n_seconds;
                    n_seconds[1] += speculated.n_seconds_accepted;
                }
            }
            assert!(n_seconds[0] > n_seconds[1], "{}", draft.name);
            assert!(n_seconds[1] > 0, "{}: {n_seconds:?}", draft.name);
        }
    }
}

/// Tokens, and the steps that they took.
fn measure(target: &Case, draft: &Case, n_branches: u32, temperature: f32) -> [usize; 2] {
    let mut engine = target.engine_with(&config(300));
    let model = draft_model(draft, target, 300);
    let mut sums = [0; 2];
    for (seed, prompt) in (0..N_TEXTS).zip(prompts(target).into_iter().cycle()) {
        let mut options = GenerateOptions {
            branches: branches(n_branches),
            n_predict: Some(N_TOKENS),
            ..options(temperature, Some(&model))
        };
        options.sampler.seed = seed;
        let _removed = engine.clear();
        let mut text = Generation::new(&engine, &target.tokenizer, options).unwrap();
        text.feed(&mut engine, &prompt, |_| {}).unwrap();
        while text.next_piece(&mut engine).unwrap().is_some() {
            sums[1] += 1;
        }
        sums[0] += text.tokens().len();
    }
    sums
}

/// As in docs/performance.md, with fewer texts.
#[test]
fn branches_save_steps() {
    let target = stories("stories-llama");
    for draft in ["stories-mamba", "stories-gemma3"].map(stories) {
        for temperature in [0.0, 0.8] {
            let measured = [0, 1, 3].map(|n| measure(&target, &draft, n, temperature));
            let [line, one, three] = measured.map(|[n, steps]| n as f64 / steps as f64);
            let name = format!("{} at {temperature}", draft.name);
            eprintln!("{name}: {line:.2} tokens a step, {one:.2} and {three:.2} with branches");
            assert_eq!(measured[0][0], measured[2][0], "{name}");
            assert!(three > line, "{name}: {measured:?}");
        }
    }
}

#[test]
fn what_takes_no_branches_says_why_and_drafts_a_line() {
    let draft = stories("stories-llama");
    for (target, streams) in [
        ("stories-gemma3", Streams::Shared),
        ("stories-mamba", Streams::Shared),
        ("stories-llama", Streams::PerSequence),
    ] {
        let target = stories(target);
        let mut engine = target.engine_with(&EngineConfig {
            streams,
            n_snapshots: 6,
            n_active: None,
            ..config(300)
        });
        let model = draft_model(&draft, &target, 300);
        let prompt = &prompts(&target)[0];
        let (alone, _) = generate(&mut engine, &target, prompt, options(0.8, None));
        let with_branches = GenerateOptions {
            branches: branches(2),
            ..options(0.8, Some(&model))
        };
        let text = Generation::new(&engine, &target.tokenizer, with_branches.clone()).unwrap();
        assert_eq!(text.branches_off(), Some(SpeculationOff::NoBranches));
        let (got, speculated) = generate(&mut engine, &target, prompt, with_branches);
        assert_eq!(got, alone, "{}", target.name);
        assert!(speculated.n_accepted > 0 && speculated.n_seconds == 0);
    }
}
