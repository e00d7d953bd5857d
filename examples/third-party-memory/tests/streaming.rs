//! An engine generates beyond the size of its cache, as with an eviction by hand.

use cellar::{GenerateOptions, Model};
use cellar_engine::sampler::SamplerConfig;
use cellar_engine::session::{ServiceConfig, ServiceExtras, Session, TextRequest};
use cellar_engine::{CompletionOptions, Engine, EngineConfig};
use kv_core::batch::Batch;
use kv_core::memory::{Memory, PosChange, Seqs};
use kv_core::{Pos, PosDelta, PosRange, SeqId, TokenId};
use kv_cpu::{CpuBackend, CpuConfig};
use model_core::architecture::Registry;
use model_core::model_file::ModelFile;
use model_core::tokenizer::EncodeOptions;
use streaming_llm_for_cellar::{StreamingConfig, StreamingLlm};

const CONFIG: StreamingConfig = StreamingConfig {
    n_seqs: 1,
    n_sinks: 4,
    n_recent: 60,
    n_evicted: 15,
};
const SEQ: SeqId = SeqId(0);

fn story_model() -> ModelFile {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../models/stories-llama-f16.gguf"
    );
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    ModelFile::open(path, &registry).unwrap()
}

fn best(logits: &[f32]) -> TokenId {
    let best = (0u32..).zip(logits).max_by(|a, b| a.1.total_cmp(b.1));
    TokenId(best.unwrap().0)
}

/// Three windows of text: what the engine computes is what one gets who drops the tokens and moves
/// the others by hand, in a memory of Cellar's.
#[test]
fn an_engine_generates_beyond_the_window() {
    let file = story_model();
    let backend = || CpuBackend::new(CpuConfig::default()).unwrap();
    let config = EngineConfig {
        n_ctx: Some(128),
        ..EngineConfig::default()
    };
    let memory = StreamingLlm::new(CONFIG);
    let mut streaming = Engine::with_memory(
        backend(),
        file.model().clone(),
        file.weights(),
        &config,
        memory,
    )
    .unwrap();
    let mut by_hand =
        Engine::new(backend(), file.model().clone(), file.weights(), &config).unwrap();
    let prompt = file
        .tokenizer()
        .encode("Once upon a time", EncodeOptions::PROMPT);
    let n_prompt = prompt.len();
    let mut batch = Batch::prompt(SEQ, prompt);
    let (mut n_held, mut n_evictions) = (0, 0);
    for step in 0..180 {
        let n_new = if step == 0 { n_prompt as u32 } else { 1 };
        if n_held + n_new > 64 {
            let gone = PosRange::from(Pos(4)..Pos(4 + CONFIG.n_evicted));
            by_hand.remove(Seqs::One(SEQ), gone).unwrap();
            let down = PosChange::Shift(PosDelta(-(CONFIG.n_evicted as i32)));
            let behind = PosRange::from(Pos(4 + CONFIG.n_evicted)..);
            by_hand.reposition(SEQ, behind, down).unwrap();
            n_held -= CONFIG.n_evicted;
            n_evictions += 1;
        }
        n_held += n_new;
        let wanted = by_hand.decode(&batch).unwrap().last().unwrap().to_vec();
        let got = streaming.decode(&batch).unwrap().last().unwrap().to_vec();
        let off = got.iter().zip(&wanted).map(|(a, b)| (a - b).abs());
        assert!(off.fold(0.0, f32::max) < 1e-3, "step {step}");
        assert_eq!(streaming.memory().n_tokens(SEQ), n_held);
        assert_eq!(
            streaming.memory().positions(SEQ).unwrap().last,
            Pos(n_held - 1)
        );
        batch = Batch::prompt(SEQ, [best(&wanted)]);
    }
    assert!(n_evictions >= 7, "{n_evictions}");
}

/// Two texts of three windows each in one session: each is what an engine with this memory
/// generates alone.
#[test]
fn a_session_serves_texts_beyond_the_window() {
    let file = story_model();
    let backend = || CpuBackend::new(CpuConfig::default()).unwrap();
    let engine = |n_seqs: u32| {
        let memory = StreamingLlm::new(StreamingConfig { n_seqs, ..CONFIG });
        let config = EngineConfig {
            n_ctx: Some(128),
            n_seqs,
            ..EngineConfig::default()
        };
        let (model, weights) = (file.model().clone(), file.weights());
        Engine::with_memory(backend(), model, weights, &config, memory).unwrap()
    };
    let encode = |text: &str| file.tokenizer().encode(text, EncodeOptions::PROMPT);
    let prompts = ["Once upon a time", "One day"].map(encode);
    let alone = |prompt: &[TokenId]| {
        let mut engine = engine(1);
        let mut batch = Batch::prompt(SEQ, prompt.to_vec());
        let tokens = (0..180).map(|_| {
            let mut row = engine.decode(&batch).unwrap().last().unwrap().to_vec();
            // A story would end before.
            for (id, logit) in (0..).zip(&mut row) {
                if file.tokenizer().is_end_of_generation(TokenId(id)) {
                    *logit = f32::NEG_INFINITY;
                }
            }
            let token = best(&row);
            batch = Batch::prompt(SEQ, [token]);
            token
        });
        tokens.collect::<Vec<_>>()
    };
    let mut session = Session::new(engine(2), file.tokenizer(), &ServiceConfig::default()).unwrap();
    let streams = prompts.clone().map(|prompt| {
        let options = CompletionOptions {
            sampler: SamplerConfig {
                min_tokens: 180,
                ..SamplerConfig::greedy()
            },
            n_predict: Some(180),
            ..CompletionOptions::default()
        };
        let request = TextRequest {
            prompt,
            options,
            ..TextRequest::default()
        };
        session.submit(request).unwrap()
    });
    for (mut stream, prompt) in streams.into_iter().zip(&prompts) {
        while session.next_piece(&mut stream).unwrap().is_some() {}
        let text = stream.finish().unwrap();
        assert_eq!(text.tokens.len(), 180);
        assert_eq!(text.tokens, alone(prompt));
    }
}

/// A model of the facade with this memory: a text of three windows, piece by piece, and a second
/// one that begins like the first.
#[test]
fn a_model_of_the_facade_has_this_memory() {
    let file = story_model();
    let config = EngineConfig {
        n_ctx: Some(128),
        ..EngineConfig::default()
    };
    let backend = CpuBackend::new(CpuConfig::default()).unwrap();
    let (model, weights) = (file.model().clone(), file.weights());
    let memory = StreamingLlm::new(CONFIG);
    let engine = Engine::with_memory(backend, model, weights, &config, memory).unwrap();
    let mut model = Model::with_engine(file, engine, ServiceExtras::default()).unwrap();
    let options = GenerateOptions {
        sampler: SamplerConfig {
            min_tokens: 180,
            ..SamplerConfig::greedy()
        },
        n_predict: Some(180),
        ..GenerateOptions::default()
    };
    let mut text = model.generate("Once upon a time", options.clone()).unwrap();
    let pieces: String = text.by_ref().map(Result::unwrap).collect();
    assert_eq!(text.tokens().len(), 180);
    assert_eq!(pieces, text.text());
    let again = model.generate("Once upon a time", options).unwrap();
    assert_eq!(again.finish().unwrap(), pieces);
    assert!(model.engine().memory().n_tokens(SEQ) <= 64);
}
