//! A draft model changes no text, follows the text wherever it goes, and stops where its memory is
//! short.

// A part of a test.
#![allow(unreachable_pub)]

use cellar_engine::sampler::SamplerConfig;
use cellar_engine::session::{ServiceExtras, TextRequest};
use cellar_engine::{
    CancelFlag, CompletionOptions, DraftModel, Engine, EngineConfig, EngineError, FinishReason,
    Speculated, Speculation, SpeculationOff,
};
use kv_backend::BoxedBackend;
use kv_core::TokenId;
use kv_cpu::{CpuBackend, CpuConfig};
use model_core::tokenizer::{EncodeOptions, Tokenizer, TokenizerModel, TokenizerSpec};

use crate::service::models::{Case, Generated, stories};
use crate::support::text::Writer;

/// Tokens of a draft.
pub const N_MAX: usize = 6;

/// An engine for a draft model.
pub fn draft_engine(case: &Case, config: &EngineConfig) -> Engine<BoxedBackend> {
    let cpu = CpuConfig {
        n_threads: std::num::NonZeroUsize::new(1),
        ..CpuConfig::default()
    };
    let backend = BoxedBackend::new(CpuBackend::new(cpu).unwrap());
    Engine::new(backend, case.model.clone(), case.weights.clone(), config).unwrap()
}

/// The model of a case as a draft model of `target`, for one text.
pub fn draft_model(case: &Case, target: &Case, n_ctx: u32) -> DraftModel {
    draft_model_for(case, target, 1, n_ctx)
}

/// The same for so many texts at once.
pub fn draft_model_for(case: &Case, target: &Case, n_texts: u32, n_ctx: u32) -> DraftModel {
    let engine = draft_engine(
        case,
        &EngineConfig {
            n_ctx: Some(n_ctx),
            n_seqs: n_texts,
            n_ubatch: 32,
            n_snapshots: N_MAX as u32,
            ..EngineConfig::default()
        },
    );
    DraftModel::new(engine, &case.tokenizer, &target.tokenizer, N_MAX).unwrap()
}

pub fn prompts(case: &Case) -> Vec<Vec<TokenId>> {
    let texts = [
        "Once upon a time",
        "Tom and his dog went to the",
        "One day, a little girl",
    ];
    let encode = |text: &&str| case.tokenizer.encode(text, EncodeOptions::PROMPT);
    texts.iter().map(encode).collect()
}

/// The text of a prompt, greedy or drawn, drafted for where there is a model.
pub fn generate(
    engine: Engine<CpuBackend>,
    case: &Case,
    request: TextRequest,
    draft_model: Option<&DraftModel>,
) -> (Generated, Speculated) {
    let extras = ServiceExtras {
        draft_model: draft_model.cloned(),
        ..ServiceExtras::default()
    };
    let text = Writer::with(engine, &case.tokenizer, request, extras).unwrap();
    let text = text.finish();
    let generated = Generated {
        text: text.text.clone(),
        tokens: text.tokens.clone(),
        finish: text.finish_reason(),
    };
    (generated, text.usage().speculated)
}

pub fn request(prompt: &[TokenId], temperature: f32, speculation: Speculation) -> TextRequest {
    TextRequest {
        prompt: prompt.to_vec(),
        options: CompletionOptions {
            sampler: SamplerConfig {
                temperature,
                seed: 11,
                ..SamplerConfig::default()
            },
            n_predict: Some(60),
            ..CompletionOptions::default()
        },
        speculation,
        ..TextRequest::default()
    }
}

const DRAFTED: Speculation = Speculation::Draft { n_max: N_MAX };

#[test]
fn texts_with_a_draft_model_are_those_without() {
    for target in [
        stories("stories-llama"),
        stories("stories-gemma3"),
        stories("stories-mamba"),
    ] {
        let engine = || {
            target.engine_with(&EngineConfig {
                n_ctx: Some(300),
                n_ubatch: 32,
                n_snapshots: N_MAX as u32,
                ..EngineConfig::default()
            })
        };
        for draft in ["stories-llama", "stories-mamba", "stories-gemma3"].map(stories) {
            let name = format!("{} for {}", draft.name, target.name);
            // One model for all texts, one after the other.
            let model = draft_model(&draft, &target, 300);
            let mut n_right = 0;
            for temperature in [0.0, 0.8] {
                for prompt in prompts(&target) {
                    let plain = request(&prompt, temperature, Speculation::Off);
                    let (alone, _) = generate(engine(), &target, plain, None);
                    let drafted = request(&prompt, temperature, DRAFTED);
                    let (got, speculated) = generate(engine(), &target, drafted, Some(&model));
                    assert_eq!(got, alone, "{name} at {temperature}");
                    assert_eq!(speculated.off, None, "{name}");
                    assert!(speculated.n_drafted > 0, "{name}");
                    if draft.name == target.name && temperature == 0.0 {
                        // All are right but those behind the end of the text.
                        let n_wrong = speculated.n_drafted - speculated.n_accepted;
                        assert!(n_wrong < N_MAX, "{name}: {speculated:?}");
                    }
                    n_right += speculated.n_accepted;
                }
            }
            assert!(n_right > 30, "{name}: {n_right}");
        }
    }
}

#[test]
fn where_its_memory_is_short_drafts_end_and_the_text_does_not() {
    let case = stories("stories-llama");
    for (n_ctx, has_drafts) in [(3, false), (30, true)] {
        let model = draft_model(&case, &case, n_ctx);
        for prompt in prompts(&case) {
            let plain = request(&prompt, 0.8, Speculation::Off);
            let (alone, _) = generate(case.engine(1, 300), &case, plain, None);
            let drafted = request(&prompt, 0.8, DRAFTED);
            let (got, speculated) = generate(case.engine(1, 300), &case, drafted, Some(&model));
            assert_eq!(got, alone);
            let full = SpeculationOff::DraftModelFull { n_ctx };
            assert_eq!(speculated.off, Some(full));
            assert_eq!(speculated.n_drafted > 0, has_drafts);
        }
    }
}

#[test]
fn a_text_that_is_cancelled_ends_and_the_next_one_is_right() {
    let case = stories("stories-llama");
    let model = draft_model(&case, &case, 300);
    let prompt = &prompts(&case)[0];
    let plain = request(prompt, 0.8, Speculation::Off);
    let (alone, _) = generate(case.engine(1, 300), &case, plain, None);
    let cancel = CancelFlag::default();
    let cancelled = TextRequest {
        cancel: Some(cancel.clone()),
        ..request(prompt, 0.8, DRAFTED)
    };
    let extras = ServiceExtras {
        draft_model: Some(model.clone()),
        ..ServiceExtras::default()
    };
    let engine = case.engine(1, 300);
    let mut text = Writer::with(engine, &case.tokenizer, cancelled, extras).unwrap();
    for _ in 0..3 {
        text.next().unwrap();
    }
    cancel.cancel();
    let text = text.finish();
    assert_eq!(text.finish_reason(), FinishReason::Cancelled);
    assert!(alone.tokens.starts_with(&text.tokens));
    let drafted = request(prompt, 0.8, DRAFTED);
    let (again, _) = generate(case.engine(1, 300), &case, drafted, Some(&model));
    assert_eq!(again, alone);
}

#[test]
fn another_vocabulary_is_refused_with_the_first_token_that_differs() {
    let case = stories("stories-llama");
    let tokens = |id| case.tokenizer.token_text(id).unwrap().to_owned();
    let mut texts: Vec<String> = (0..case.tokenizer.n_tokens() as u32)
        .map(|id| tokens(TokenId(id)))
        .collect();
    texts[300] = "another".to_owned();
    let n_tokens = texts.len();
    let mut spec = TokenizerSpec::new(TokenizerModel::Spm, texts);
    spec.scores = vec![0.0; n_tokens];
    let other = Tokenizer::new(spec).unwrap();
    let engine = draft_engine(&case, &EngineConfig::default());
    match DraftModel::new(engine, &other, &case.tokenizer, N_MAX) {
        Err(EngineError::VocabulariesDiffer {
            token,
            target,
            draft,
        }) => {
            assert_eq!(token, TokenId(300));
            assert_eq!(draft.as_deref(), Some("another"));
            assert_eq!(target, Some(tokens(token)));
        }
        other => panic!("{other:?}"),
    }
    for n_max in [0, 33] {
        let engine = draft_engine(&case, &EngineConfig::default());
        let made = DraftModel::new(engine, &case.tokenizer, &case.tokenizer, n_max);
        assert!(matches!(made, Err(EngineError::Config(_))), "{n_max}");
    }
}
