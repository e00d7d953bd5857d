//! The tokenizer of RWKV's "world" models, from the file in its directory and as GGUF has it,
//! against the published algorithm (`tests/fixtures/tokenizers/rwkv.py`).

#![allow(clippy::unwrap_used, missing_docs)]

use std::fs;
use std::path::PathBuf;

use kv_core::TokenId;
use model_core::gguf::{Array, Metadata};
use model_core::hf::tokenizer_keys;
use model_core::model_file::tokenizer_spec;
use model_core::tokenizer::{
    DecodeFrom, DecodeStream, EncodeOptions, SpecialPieces, TokenKind, Tokenizer,
};
use serde::Deserialize;

const FILE: &str = "rwkv_vocab_v20230424.txt";

#[derive(Deserialize)]
struct Cases {
    /// The texts of all tokens in a GGUF file of llama.cpp's converter.
    escaped: Vec<String>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    text: String,
    ids: Vec<u32>,
}

fn fixture() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tokenizers/rwkv")
}

fn cases() -> Cases {
    serde_json::from_slice(&fs::read(fixture().join("cases.json")).unwrap()).unwrap()
}

fn tokenizer(metadata: &Metadata) -> Tokenizer {
    Tokenizer::new(tokenizer_spec(metadata).unwrap()).unwrap()
}

fn assert_agrees(tokenizer: &Tokenizer) {
    for Case { text, ids } in cases().cases {
        let wanted: Vec<TokenId> = ids.into_iter().map(TokenId).collect();
        assert_eq!(
            tokenizer.encode(&text, EncodeOptions::TEXT),
            wanted,
            "{text:?}"
        );
        let decoded = tokenizer.decode(&wanted, SpecialPieces::Skip).unwrap();
        assert_eq!(decoded, text);
        let mut stream = DecodeStream::new(DecodeFrom::TextStart, SpecialPieces::Skip);
        let pushed = wanted.iter().map(|&id| stream.push(tokenizer, id).unwrap());
        let streamed: String = pushed.collect();
        assert_eq!(streamed + &stream.finish(), text);
    }
}

#[test]
fn the_file_beside_the_weights_makes_the_published_tokenizer() {
    let metadata = tokenizer_keys(fixture()).unwrap();
    let tokens: &[String] = metadata.get("tokenizer.ggml.tokens").unwrap();
    assert_eq!(tokens, cases().escaped);
    let tokenizer = tokenizer(&metadata);
    assert_agrees(&tokenizer);
    assert_eq!(tokenizer.token_kind(TokenId(0)), Some(TokenKind::Control));
    assert!(tokenizer.is_end_of_generation(TokenId(0)));
    assert_eq!(
        (tokenizer.adds_first(), tokenizer.adds_last()),
        (None, None)
    );
    // Half of a character is its bytes.
    let half = tokenizer.piece(TokenId(301), SpecialPieces::Skip).unwrap();
    assert_eq!(half, b"\xe4\xbd");
}

#[test]
fn a_file_of_llama_cpps_converter_is_the_same_tokenizer() {
    let mut metadata = Metadata::new();
    let mut tokens = cases().escaped;
    let mut kinds = vec![1; tokens.len()];
    kinds[0] = 3;
    tokens.push(format!("[PAD{}]", tokens.len()));
    kinds.push(5);
    metadata.insert("tokenizer.ggml.model", "rwkv");
    metadata.insert("tokenizer.ggml.tokens", Array::String(tokens));
    metadata.insert("tokenizer.ggml.token_type", Array::I32(kinds));
    metadata.insert("tokenizer.ggml.bos_token_id", 0u32);
    metadata.insert("tokenizer.ggml.eos_token_id", 0u32);
    metadata.insert("tokenizer.ggml.eot_token_id", 257u32);
    let tokenizer = tokenizer(&metadata);
    assert_agrees(&tokenizer);
    // Two ends of lines end an answer, and are text.
    assert!(tokenizer.is_end_of_generation(TokenId(257)));
    let piece = tokenizer.piece(TokenId(257), SpecialPieces::Skip).unwrap();
    assert_eq!(piece, b"\n\n");
    // A place holder is never found and writes nothing.
    let text = "[PAD313]";
    let ids = tokenizer.encode(text, EncodeOptions::PROMPT);
    assert_eq!(ids.len(), text.len(), "{ids:?}");
    let nothing = tokenizer.piece(TokenId(313), SpecialPieces::Skip).unwrap();
    assert!(nothing.is_empty());
}

#[test]
fn gaps_are_filled_and_wrong_lines_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let write = |text: &str| fs::write(directory.path().join(FILE), text).unwrap();
    let vocab = fs::read_to_string(fixture().join(FILE)).unwrap();
    fs::write(
        directory.path().join("config.json"),
        r#"{"vocab_size": 320}"#,
    )
    .unwrap();
    write(&vocab.replace("312 '34' 2", "315 '34' 2"));
    let metadata = tokenizer_keys(directory.path()).unwrap();
    let tokens: &[String] = metadata.get("tokenizer.ggml.tokens").unwrap();
    assert_eq!(tokens.len(), 320);
    assert_eq!(
        [&tokens[312], &tokens[315], &tokens[319]],
        ["[PAD312]", "34", "[PAD319]"]
    );
    assert_eq!(tokenizer(&metadata).token_id("34"), Some(TokenId(315)));
    for (line, reason) in [
        ("312 '34' 3", "line 312: not an id"),
        ("312 '34", "line 312: not an id"),
        ("311 '34' 2", "line 312: id 311 is not above 311"),
        (
            "99999999 '34' 2",
            "line 312: id 99999999 is not above 311 and below",
        ),
    ] {
        write(&vocab.replace("312 '34' 2", line));
        let error = tokenizer_keys(directory.path()).unwrap_err().to_string();
        assert!(error.contains(FILE) && error.contains(reason), "{error}");
    }
}
