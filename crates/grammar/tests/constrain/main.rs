//! Texts of random logits, held to schemas and grammars.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

mod holdable;
mod texts;

use cellar_engine::sampler::{SampleError, Sampler, SamplerConfig, Step, TokenOrigin};
use cellar_grammar::{Grammar, GrammarCompiler, GrammarError, GrammarStep};
use kv_core::TokenId;
use model_core::tokenizer::{
    SpecialIds, SpecialPieces, TokenKind, Tokenizer, TokenizerModel, TokenizerSpec,
};

const UNK: TokenId = TokenId(0);
const BOS: TokenId = TokenId(1);
const EOS: TokenId = TokenId(2);
/// A mark of a chat, which a text must not contain.
const MARK: TokenId = TokenId(3);
/// The token of the byte 0.
const BYTE_0: u32 = 4;

/// An SPM vocabulary: marks, all bytes, and some pieces.
fn tokenizer() -> Tokenizer {
    let pieces = [
        "{", "}", "\"", ":", ",", "name", "age", "\u{2581}", "1", "12", "{\"", "\":", "é",
    ];
    let marks = ["<unk>", "<s>", "</s>", "<|mark|>"];
    let bytes = (0..=255).map(|byte| format!("<0x{byte:02X}>"));
    let texts = marks.into_iter().map(str::to_owned).chain(bytes);
    let texts: Vec<String> = texts.chain(pieces.map(str::to_owned)).collect();
    let mut kinds = vec![TokenKind::Control; marks.len()];
    kinds[UNK.as_usize()] = TokenKind::Unknown;
    kinds.extend([TokenKind::Byte; 256]);
    kinds.extend(pieces.map(|_| TokenKind::Normal));
    let mut spec = TokenizerSpec::new(TokenizerModel::Spm, texts);
    spec.scores = vec![0.0; spec.tokens.len()];
    spec.kinds = kinds;
    spec.special = SpecialIds {
        bos: Some(BOS),
        eos: Some(EOS),
        unk: Some(UNK),
        ..SpecialIds::default()
    };
    Tokenizer::new(spec).unwrap()
}

fn schema(schema: &serde_json::Value) -> Grammar {
    let compiler = GrammarCompiler::new(&tokenizer()).unwrap();
    compiler.json_schema(&schema.to_string()).unwrap()
}

/// A sampler that takes the most likely token the step allows.
fn sampler(step: GrammarStep) -> Sampler {
    let config = SamplerConfig {
        temperature: 0.0,
        ..SamplerConfig::default()
    };
    let mut sampler = Sampler::new(config).unwrap();
    sampler.push_front(Box::new(step));
    // A grammar does not see the prompt.
    sampler.accept(BOS, TokenOrigin::Prompt);
    sampler
}

/// The text that random logits lead to, up to its end token.
fn text(grammar: &Grammar, seed: u64) -> String {
    let tokenizer = tokenizer();
    let mut sampler = sampler(grammar.step());
    let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut ids = Vec::new();
    for n_chosen in 0..400 {
        let logits: Vec<f32> = (0..tokenizer.n_tokens())
            .map(|id| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let noise = (random >> 40) as f32 / (1u64 << 24) as f32;
                // Marks are always what the model would like best, then ends; bytes are least.
                let token = TokenId(id as u32);
                match token {
                    MARK | BOS | UNK => 9.0,
                    EOS => 2.0 + n_chosen as f32 / 100.0,
                    _ if tokenizer.token_kind(token) == Some(TokenKind::Byte) => noise,
                    _ => noise + 0.3,
                }
            })
            .collect();
        let token = sampler.sample(&logits).unwrap();
        if token == EOS {
            return String::from_utf8(ids).unwrap();
        }
        sampler.accept(token, TokenOrigin::Generated);
        ids.extend(tokenizer.piece(token, SpecialPieces::Render).unwrap());
    }
    panic!("no end: {}", String::from_utf8_lossy(&ids))
}

/// True if the grammar allows exactly this text, written byte by byte.
fn allows(grammar: &Grammar, text: &str) -> bool {
    let n_tokens = tokenizer().n_tokens();
    let mut sampler = sampler(grammar.step());
    let bytes = text.bytes().map(|byte| TokenId(BYTE_0 + u32::from(byte)));
    let mut wanted = bytes.chain([EOS]);
    wanted.all(|token| {
        let mut logits = vec![0.0; n_tokens];
        logits[token.as_usize()] = 9.0;
        let is_allowed = sampler.sample(&logits) == Ok(token);
        if is_allowed {
            sampler.accept(token, TokenOrigin::Generated);
        }
        is_allowed
    })
}

/// The bytes as byte-level BPE writes them, and one pair.
fn byte_tokens() -> Vec<String> {
    let is_plain = |byte: &u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let plain = (0..=255).filter(is_plain).map(char::from);
    let others = (256..)
        .filter_map(char::from_u32)
        .take(256 - plain.clone().count());
    let bytes = plain.chain(others).map(String::from);
    bytes.chain(["ab".to_owned()]).collect()
}

#[test]
fn random_logits_give_json_of_the_schema() {
    let grammar = schema(&serde_json::json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "é"]}, "maxItems": 2}
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": false
    }));
    for seed in 1..20 {
        let text = text(&grammar, seed);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        let object = value.as_object().unwrap();
        assert_eq!(object.len(), 3, "{text}");
        assert!(
            object["name"].as_str().unwrap().chars().count() <= 6,
            "{text}"
        );
        assert!(object["age"].as_u64().unwrap() <= 150, "{text}");
        let tags = object["tags"].as_array().unwrap();
        assert!(tags.len() <= 2 && tags.iter().all(|tag| tag == "a" || tag == "é"));
    }
}

#[test]
fn a_grammar_ends_the_text_and_may_need_byte_tokens() {
    let compiler = GrammarCompiler::new(&tokenizer()).unwrap();
    // No piece has these characters: only bytes write them.
    let grammar = compiler.lark("start: \"Ω\" | \"日本\"").unwrap();
    for seed in 1..8 {
        let text = text(&grammar, seed);
        assert!(["Ω", "日本"].contains(&text.as_str()), "{text}");
    }
}

#[test]
fn every_text_has_its_own_place_in_the_grammar() {
    let compiler = GrammarCompiler::new(&tokenizer()).unwrap();
    let grammar = compiler.lark("start: \"12\"").unwrap();
    assert_eq!(text(&grammar, 1), "12");
    assert_eq!(text(&grammar, 2), "12");
    let mut step = grammar.step();
    let byte = TokenId(BYTE_0 + u32::from(b'1'));
    step.accept(byte, TokenOrigin::Generated);
    step.reset();
    let mut sampler = sampler(step);
    let mut logits = vec![0.0; tokenizer().n_tokens()];
    logits[(BYTE_0 + u32::from(b'2')) as usize] = 1.0;
    let first = sampler.sample(&logits).unwrap();
    let piece = tokenizer().piece(first, SpecialPieces::Render).unwrap();
    assert!(piece.starts_with(b"1"), "{piece:?}");
}

#[test]
fn a_failure_leaves_no_token() {
    let compiler = GrammarCompiler::new(&tokenizer()).unwrap();
    let step = compiler.lark("start: \"12\"").unwrap().step();
    let failure = step.failure();
    let mut sampler = sampler(step);
    assert_eq!(failure.reason(), None);
    // A token that the grammar does not allow.
    sampler.accept(TokenId(BYTE_0), TokenOrigin::Generated);
    let n_tokens = tokenizer().n_tokens();
    for _ in 0..2 {
        let refused = sampler.sample(&vec![0.0; n_tokens]);
        assert_eq!(refused, Err(SampleError::NothingLeft { n_tokens }));
    }
    assert!(failure.reason().is_some());
    // Logits beyond the vocabulary belong to no token.
    let step = compiler.lark("start: \"12\"").unwrap().step();
    let mut sampler = self::sampler(step);
    let mut logits = vec![0.0; n_tokens + 5];
    logits[n_tokens + 2] = 9.0;
    assert!(sampler.sample(&logits).unwrap().as_usize() < n_tokens);
}

#[test]
fn what_cannot_be_compiled_is_refused_with_its_place() {
    let compiler = GrammarCompiler::new(&tokenizer()).unwrap();
    let refused = |text: &str| compiler.json_schema(text).unwrap_err();
    let pointer = |text: &str| match refused(text) {
        GrammarError::Schema { pointer, reason } => {
            assert!(!reason.is_empty() && !reason.contains('\n'), "{reason}");
            pointer
        }
        other => panic!("{other}"),
    };
    for (schema, wanted) in [
        (r#"{"type": "strong"}"#, "/type"),
        (r#"{"not": {"type": "string"}}"#, "/not"),
        (
            r#"{"type": "object", "properties": {"a": {"items": {"type": "array", "uniqueItems": true}}}}"#,
            "/properties/a/items/uniqueItems",
        ),
        (
            r#"{"type": "object", "properties": {"a": {"pattern": "("}}, "additionalProperties": false}"#,
            "/properties/a/pattern",
        ),
        (r##"{"items": {"$ref": "#/$defs/none"}}"##, "/items/$ref"),
        (
            r##"{"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "integer", "minimum": "3"}}}"##,
            "/$defs/a/minimum",
        ),
        ("7", ""),
        // A form that no text has: it is made of itself.
        (r##"{"$ref": "#"}"##, "/$ref"),
        (r##"{"anyOf": [{"$ref": "#"}]}"##, "/anyOf"),
    ] {
        assert_eq!(pointer(schema), wanted, "{schema}");
    }
    // The compiler advises an option of its own, which no schema has.
    let error = refused(r#"{"oneOf": [{"type": "object"}, {"required": ["a"]}]}"#).to_string();
    assert!(
        error.contains("'/oneOf'") && error.contains("write anyOf"),
        "{error}"
    );
    assert!(!error.contains("coerce"), "{error}");
    let error = refused("{\n \"type\": }");
    assert!(
        matches!(
            error,
            GrammarError::NotJson {
                line: 2,
                column: 10,
                ..
            }
        ),
        "{error}"
    );
    let error = compiler.lark("start: nothing").unwrap_err();
    assert!(matches!(error, GrammarError::Grammar { .. }), "{error}");
    let mut spec = TokenizerSpec::new(TokenizerModel::Bpe, byte_tokens());
    spec.merges = vec!["a b".to_owned()];
    spec.pre = Some("qwen2".to_owned());
    let endless = Tokenizer::new(spec).unwrap();
    assert_eq!(
        GrammarCompiler::new(&endless).map(drop).unwrap_err(),
        GrammarError::NoEndToken
    );
}

/// Text is free until a call begins; then only what the grammar allows can follow, and control
/// tokens pass wherever the text may end.
#[test]
fn text_is_free_until_a_mark() {
    let tokenizer = tokenizer();
    let compiler = GrammarCompiler::new(&tokenizer).unwrap();
    let call = cellar_grammar::json_rule(&serde_json::json!({
        "type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"],
        "additionalProperties": false,
    }));
    let lark =
        |head: &str| format!("start: (head call)* TEXT\n{head}\ncall: {call}\nTEXT: /(.|\\n)*/\n");
    let byte = |c: u8| TokenId(BYTE_0 + u32::from(c));
    let allowed = |sampler: &mut Sampler, id: TokenId| {
        let mut logits = vec![0.0; tokenizer.n_tokens()];
        logits[id.as_usize()] = 9.0;
        sampler.sample(&logits).unwrap() == id
    };
    let text = compiler
        .lark_in_text(&lark("head[lazy]: TEXT \"<c>\""), &[])
        .unwrap();
    let mut held = sampler(text.step());
    let push = |held: &mut Sampler, text: &str| {
        for c in text.bytes() {
            assert!(allowed(held, byte(c)), "{text}: {}", char::from(c));
            held.accept(byte(c), TokenOrigin::Generated);
        }
    };
    push(&mut held, "x <b");
    assert!(allowed(&mut held, MARK) && allowed(&mut held, EOS));
    held.accept(MARK, TokenOrigin::Generated);
    push(&mut held, "<c>");
    for wrong in [byte(b'x'), byte(b'['), MARK, EOS] {
        assert!(!allowed(&mut held, wrong), "{wrong:?}");
    }
    push(&mut held, "{\"age\": 1");
    assert!(!allowed(&mut held, byte(b'x')));
    push(&mut held, "}");
    assert!(allowed(&mut held, EOS) && allowed(&mut held, MARK));
    push(&mut held, " y<c>{\"age\"");
    assert!(!allowed(&mut held, EOS));

    // A mark that is a control token, which the grammar names.
    let head = format!("head: TEXT <[{}]>", MARK.0);
    let named = compiler.lark_in_text(&lark(&head), &[MARK]).unwrap();
    let mut held = sampler(named.step());
    push(&mut held, "x<c>");
    assert!(allowed(&mut held, MARK) && allowed(&mut held, EOS));
    held.accept(MARK, TokenOrigin::Generated);
    assert!(!allowed(&mut held, byte(b'x')) && !allowed(&mut held, EOS));
    push(&mut held, "{\"age\": 1}");
    assert!(allowed(&mut held, EOS));
}
