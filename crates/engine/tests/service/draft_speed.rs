//! The time that drafts take and save. `CELLAR_DRAFT_ROUNDS=9 cargo test --release -p cellar-engine
//! --test engine draft_speed:: -- --nocapture` prints the table of docs/performance.md. Times are
//! of the thread that computes, not of the machine, which may have other work.

use std::time::Duration;

use cellar_engine::sampler::SamplerConfig;
use cellar_engine::serve::{ServiceConfig, Speculated, Speculation, TextRequest};
use cellar_engine::session::Session;
use cellar_engine::{CompletionOptions, EngineConfig};
use kv_core::TokenId;
use model_core::architecture::with_draft_head;
use model_core::tokenizer::EncodeOptions;

use crate::service::models::{Case, stories, stories_head};

/// Tokens of each text where times count, and where texts alone are compared.
const N_MEASURED: usize = 300;
const N_COMPARED: usize = 60;

const N_TEXTS: usize = 8;

const REPEATING: &str = "The cat sat. The dog sat. The cat sat. The dog sat. The cat sat. The dog";
const STORY: &str = "Once upon a time";

/// The time that this thread computed.
fn of_thread() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanos = stat.split(' ').next().and_then(|n| n.parse().ok());
    Duration::from_nanos(nanos.unwrap_or(0))
}

/// Texts of which so many are computed together.
#[derive(Clone, Copy)]
struct Load {
    prompt: &'static str,
    n_together: usize,
    n_tokens: usize,
    temperature: f32,
}

struct Measurement {
    took: Duration,
    texts: Vec<Vec<TokenId>>,
    speculated: Speculated,
}

fn measure(case: &Case, load: Load, speculation: Speculation) -> Measurement {
    let n_together = load.n_together as u32;
    let engine = case.engine_with(&EngineConfig {
        n_ctx: Some(512 * n_together),
        n_seqs: n_together,
        ..EngineConfig::default()
    });
    let mut session = Session::new(engine, &case.tokenizer, &ServiceConfig::default()).unwrap();
    let prompt = case.tokenizer.encode(load.prompt, EncodeOptions::PROMPT);
    let began = of_thread();
    let streams = (0..N_TEXTS as u64).map(|seed| {
        let request = TextRequest {
            prompt: prompt.clone(),
            speculation,
            options: CompletionOptions {
                sampler: SamplerConfig {
                    temperature: load.temperature,
                    seed,
                    min_tokens: load.n_tokens,
                    ..SamplerConfig::default()
                },
                n_predict: Some(load.n_tokens),
                ..CompletionOptions::default()
            },
            ..TextRequest::default()
        };
        session.submit(request).unwrap()
    });
    let streams: Vec<_> = streams.collect();
    let mut speculated = Speculated::default();
    let texts = streams.into_iter().map(|mut stream| {
        let mut tokens = Vec::new();
        while let Some(pieces) = session.next_tokens(&mut stream).unwrap() {
            tokens.extend(pieces.into_iter().filter_map(|piece| piece.token));
        }
        let of_text = stream.usage().speculated;
        speculated.n_drafted += of_text.n_drafted;
        speculated.n_accepted += of_text.n_accepted;
        speculated.off = of_text.off.or(speculated.off);
        tokens
    });
    let texts = texts.collect();
    Measurement {
        took: of_thread().saturating_sub(began),
        texts,
        speculated,
    }
}

/// The speed with drafts over that without, of rounds that take turns; the texts are the same.
fn ratios(cases: [&Case; 2], load: Load, speculation: Speculation, n_rounds: usize) -> Vec<f64> {
    let [without, with] = cases;
    let mut ratios = Vec::new();
    let mut last = Speculated::default();
    for _ in 0..n_rounds {
        let plain = measure(without, load, Speculation::Off);
        let drafted = measure(with, load, speculation);
        assert_eq!(drafted.texts, plain.texts);
        ratios.push(plain.took.as_secs_f64() / drafted.took.as_secs_f64().max(1e-9));
        last = drafted.speculated;
    }
    ratios.sort_by(f64::total_cmp);
    println!(
        "{} {:?} {:?}, {} together, temperature {}: {:.2} ({:.2} to {:.2}), {} of {} right; {}",
        with.name,
        load.prompt,
        speculation,
        load.n_together,
        load.temperature,
        ratios[ratios.len() / 2],
        ratios[0],
        ratios[ratios.len() - 1],
        last.n_accepted,
        last.n_drafted,
        last.off.map_or(String::new(), |off| off.to_string()),
    );
    ratios
}

#[test]
fn drafts_leave_texts_as_they_are_and_their_speed_is_told() {
    let n_rounds = std::env::var("CELLAR_DRAFT_ROUNDS").map_or(1, |n| n.parse().unwrap());
    let n_tokens = if n_rounds > 1 { N_MEASURED } else { N_COMPARED };
    let plain = stories_head();
    let model = with_draft_head(&*plain.model, &*plain.weights).unwrap();
    let headed = Case {
        model: model.unwrap(),
        ..stories_head()
    };
    let other = stories("stories-llama");
    for prompt in [STORY, REPEATING] {
        for (n_together, temperature) in [(1, 0.0), (1, 0.8), (4, 0.0), (4, 0.8)] {
            let load = Load {
                prompt,
                n_together,
                n_tokens,
                temperature,
            };
            let auto = Speculation::Auto { n_max: 16 };
            ratios([&plain, &headed], load, auto, n_rounds);
            if n_rounds > 1 {
                // What the head takes where nothing is drafted.
                ratios([&plain, &headed], load, Speculation::Off, n_rounds);
                ratios([&other, &other], load, auto, n_rounds);
                ratios([&other, &other], load, Speculation::LOOKUP, n_rounds);
            }
        }
    }
}
