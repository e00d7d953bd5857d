//! Rows of images in place of tokens, by way of an engine: with text around them, and with a model
//! that takes none.

#![allow(clippy::unwrap_used)] // a test

use cellar_engine::{Engine, EngineConfig, EngineError};
use kv_core::{GridPos, Pos, SeqId, TokenId, batch::Batch, memory::Memory};
use kv_cpu::CpuBackend;
use kv_rows::KvType;
use model_tests::checks::TOLERANCE;
use model_tests::images::ImagePrompt;
use model_tests::{Case, Source, best, cpu};

const SEQ: SeqId = SeqId(1);

fn engine(case: &Case) -> Engine<CpuBackend> {
    let (weights, _) = case.open();
    let config = EngineConfig {
        n_ctx: Some(128),
        n_seqs: 2,
        kv_types: KvType::F32.into(),
        ..EngineConfig::default()
    };
    Engine::new(cpu(), case.model(), weights, &config).unwrap()
}

#[test]
fn text_goes_on_behind_an_image() {
    let case = Case {
        source: Source::RecipeIn("images"),
        ..Case::recipe("qwen2_vl", model_llama::register)
    };
    let (mut engine, prompt) = (engine(&case), ImagePrompt::of(&case, 0));
    let mut logits = Vec::new();
    for batch in prompt.batches(SEQ, 512) {
        logits.extend_from_slice(engine.decode(&batch).unwrap().values());
    }
    let off = case.reference().logits(0).distance(&logits);
    assert!(off < TOLERANCE, "off by {off}");
    // The prompt ends with text, so without a position a token follows it.
    let wanted = case.reference().greedy(0);
    let n_vocab = case.model().vocab_size();
    let mut token = best(&logits[logits.len() - n_vocab..]);
    assert_eq!(token, wanted[0]);
    for &wanted in &wanted[1..5] {
        let batch = Batch::prompt(SEQ, [TokenId(token)]);
        token = best(engine.decode(&batch).unwrap().values());
        assert_eq!(token, wanted);
    }
}

#[test]
fn a_model_of_tokens_refuses_rows_and_a_text_an_image() {
    let case = Case::recipe("rwkv4", model_mamba::register);
    let mut engine = engine(&case);
    let mut rows = Batch::new();
    rows.push_embedding(&vec![0.5; case.model().embedding_dim()]);
    let error = engine.decode(&rows).unwrap_err();
    assert!(matches!(error, EngineError::TokensOnly { .. }), "{error:?}");
    assert_eq!(
        error.to_string(),
        "the model 'rwkv4' takes tokens only, no rows in their place"
    );
    assert!(engine.memory().positions(SeqId(0)).is_none());
    let mut image = Batch::new();
    let token = image.push_token(TokenId(5));
    token.at_grid(Pos(0), GridPos { y: 0, x: 1 });
    let error = engine.decode(&image).unwrap_err();
    assert!(matches!(error, EngineError::Batch(_)), "{error:?}");
}
