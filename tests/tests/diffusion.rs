//! Diffusion language models: logits are those of an independent implementation, and so are the
//! texts that its loops fill (`fixtures/diffusion/make.py`).

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::sync::Arc;

use cellar_engine::{Engine, EngineError, MemoryBudget};
use cellar_tasks::{DenoiseOptions, Denoiser, FillOrder, FillSchedule};
use kv_backend::Backend;
use kv_core::TokenId;
use model_core::architecture::{Architecture, MaskPlace, Model, OutputKind, Registry};
use model_core::directory::HfDirectory;
use model_tests::{Recipe, Reference, candle, cpu, distance, fixture};

const NAMES: [&str; 4] = ["dream", "llada", "llada_moe", "rnd1"];
/// Largest difference of a logit, of a standard deviation of 3.
const TOLERANCE: f32 = 2e-4;
/// The last token of each vocabulary.
const MASK: TokenId = TokenId(255);

struct Subject {
    name: &'static str,
    directory: HfDirectory,
    reference: Reference,
}

fn subject(name: &'static str) -> Subject {
    let recipe = Recipe::open(&fixture("diffusion").join(name));
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    Subject {
        name,
        directory: recipe.directory(&registry).unwrap(),
        reference: recipe.reference(),
    }
}

impl Subject {
    fn model(&self) -> &Arc<dyn Model> {
        self.directory.model()
    }

    /// For 40 tokens, prompt and masks together.
    fn denoiser<B: Backend>(&self, backend: B, guidance: f32) -> Denoiser<B> {
        let longest = DenoiseOptions {
            n_tokens: 40,
            guidance,
            ..DenoiseOptions::default()
        };
        let config = longest.engine_config(&**self.model(), 0);
        let weights = self.directory.weights().clone();
        let engine = Engine::new(backend, Arc::clone(self.model()), weights, &config).unwrap();
        Denoiser::new(engine, MASK).unwrap()
    }

    fn ids(&self, name: &str) -> Vec<TokenId> {
        let ids = self.reference.ids(name).unwrap();
        ids.into_iter().map(TokenId).collect()
    }

    fn check_logits<B: Backend>(&self, backend: B) {
        let mut denoiser = self.denoiser(backend, 0.0);
        for at in 0..3 {
            let got = denoiser.logits(&self.ids(&format!("ids_{at}"))).unwrap();
            let n_vocab = self.model().vocab_size();
            let rows = self.reference.ids(&format!("rows_{at}")).unwrap();
            let rows = rows.into_iter().map(|row| row as usize * n_vocab);
            let kept: Vec<f32> = rows
                .flat_map(|row| got[row..row + n_vocab].to_vec())
                .collect();
            let wanted = self.reference.values(&format!("logits_{at}")).unwrap().1;
            let off = distance(&kept, &wanted);
            assert!(off < TOLERANCE, "{}, {at}: off by {off}", self.name);
        }
    }

    fn filled(&self, options: DenoiseOptions) -> Vec<TokenId> {
        let mut denoiser = self.denoiser(cpu(), options.guidance);
        let mut text = denoiser.start(&self.ids("prompt"), options).unwrap();
        let mut n_left = text.text().count();
        while n_left > 0 {
            let goes_on = text.step(&mut denoiser).unwrap();
            let left = text.text().filter(Option::is_none).count();
            assert!(left < n_left, "a step fills at least one mask");
            assert_eq!(goes_on, left > 0);
            n_left = left;
        }
        assert_eq!(text.n_done(), text.n_steps());
        assert!(!text.step(&mut denoiser).unwrap(), "nothing is left to do");
        text.text().map(Option::unwrap).collect()
    }
}

#[test]
fn logits_are_the_references() {
    for name in NAMES {
        let subject = subject(name);
        subject.check_logits(cpu());
        subject.check_logits(candle());
    }
}

#[test]
fn texts_are_those_of_the_published_loops() {
    for name in NAMES {
        let subject = subject(name);
        let blocks = |n_tokens, guidance| DenoiseOptions {
            n_tokens: 12,
            n_steps: 6,
            schedule: FillSchedule::Blocks { n_tokens },
            guidance,
            ..DenoiseOptions::default()
        };
        let by_time = |order| DenoiseOptions {
            n_tokens: 12,
            n_steps: 8,
            order,
            ..DenoiseOptions::default()
        };
        for (what, options) in [
            ("blocks", blocks(4, 0.0)),
            ("guided", blocks(6, 0.5)),
            ("maskgit_plus", by_time(FillOrder::Confidence)),
            ("topk_margin", by_time(FillOrder::Margin)),
            ("entropy", by_time(FillOrder::Entropy)),
        ] {
            assert_eq!(subject.filled(options), subject.ids(what), "{name}, {what}");
        }
    }
}

#[test]
fn a_seed_gives_one_text_and_another_seed_another() {
    let subject = subject("llada");
    let drawn = |seed, order| {
        let mut options = DenoiseOptions {
            n_tokens: 20,
            n_steps: 5,
            order,
            ..DenoiseOptions::default()
        };
        options.sampler.temperature = 1.0;
        options.sampler.seed = seed;
        subject.filled(options)
    };
    for order in [FillOrder::Confidence, FillOrder::Random] {
        let text = drawn(1, order);
        assert_eq!(drawn(1, order), text);
        assert_ne!(drawn(2, order), text);
        assert!(!text.contains(&MASK), "no mask is filled with a mask");
    }
}

#[test]
fn the_file_says_where_the_logits_of_a_mask_are() {
    let places = NAMES.map(|name| subject(name).model().output());
    let [before, own] = [MaskPlace::Before, MaskPlace::Own].map(OutputKind::MaskLogits);
    assert_eq!(places, [before, own, own, before]);
    let examples = ["dream", "llada", "llada-moe", "rnd1"].map(|name| {
        let row = model_llama::members().find(|row| row.name == name);
        row.unwrap().example().unwrap().output()
    });
    assert_eq!(examples, places, "without a file it is the table");
}

#[test]
fn what_cannot_be_filled_is_refused_with_the_numbers() {
    let subject = subject("dream");
    let denoiser = subject.denoiser(cpu(), 0.0);
    let refusal = |options: DenoiseOptions, prompt: &[TokenId]| {
        denoiser.start(prompt, options).unwrap_err().to_string()
    };
    let prompt = subject.ids("prompt");
    let of = |n_tokens, n_steps, schedule| DenoiseOptions {
        n_tokens,
        n_steps,
        schedule,
        ..DenoiseOptions::default()
    };
    let times = FillSchedule::Times { end: 1e-3 };
    let blocks = |n_tokens| FillSchedule::Blocks { n_tokens };
    let guided = DenoiseOptions {
        guidance: f32::NAN,
        ..of(4, 4, times)
    };
    let mut penalised = of(4, 4, times);
    penalised.sampler.penalties.repeat = 1.5;
    for (options, part) in [
        (of(0, 4, times), "the text's length is 0"),
        (of(4, 0, times), "steps is 0"),
        (of(4, 4, blocks(5)), "the block's length is 5"),
        (of(12, 2, blocks(4)), "2 steps are too few for 3 blocks"),
        (
            of(4, 4, FillSchedule::Times { end: 1.0 }),
            "the last time 1",
        ),
        (of(34, 4, times), "41 tokens"),
        (guided, "guidance NaN"),
        (penalised, "a penalty for the last tokens"),
    ] {
        let message = refusal(options, &prompt);
        assert!(message.contains(part), "{message}");
    }
    // The first mask's logits would stand before the text.
    assert!(denoiser.start(&[], of(4, 4, times)).is_err());
}

#[test]
fn a_model_of_another_kind_is_refused() {
    let llama = model_llama::members().find(|member| member.name == "llama");
    let example = llama.unwrap().example().unwrap();
    assert_eq!(example.output(), OutputKind::Logits);
    let subject = subject("llada");
    let config = cellar_engine::EngineConfig {
        n_ctx: Some(64),
        n_batch: 64,
        n_ubatch: 64,
        budget: MemoryBudget::Unlimited,
        ..cellar_engine::EngineConfig::default()
    };
    let weights = subject.directory.weights().clone();
    let mut engine = Engine::new(cpu(), Arc::clone(subject.model()), weights, &config).unwrap();
    let mut batch = kv_core::batch::Batch::new();
    batch.push_token(TokenId(3)).with_output();
    let refused = engine.decode(&batch).unwrap_err();
    assert!(
        matches!(refused, EngineError::OtherOutput { .. }),
        "{refused}"
    );
}
