//! The words of each pre-tokenizer: ids that llama.cpp gives, or, where it reads a published
//! expression wrongly, ids by that expression (docs/testing.md).

#![allow(clippy::unwrap_used)] // helpers of tests may fail the test

use std::collections::HashSet;

use model_core::tokenizer::{
    AddSpecial, EncodeOptions, TokenKind, Tokenizer, TokenizerError, TokenizerModel, TokenizerSpec,
};

use crate::tokenizer_data::{byte_char, data, read};

/// Names of pre-tokenizers that cut these texts alike, and the ids of a vocabulary made of them.
#[derive(serde::Deserialize)]
struct GoldenIds {
    names: Vec<String>,
    texts: Vec<String>,
    ids: Vec<Vec<u32>>,
}

/// The space of a vocabulary of characters.
fn space_of(name: &str) -> Option<&'static str> {
    match name {
        "gemma4" | "granite-embed-multi-311m" | "mmbert" | "sarvam-moe" => Some("\u{2581}"),
        "whitespace" => Some(" "),
        _ => None,
    }
}

/// A vocabulary in which every two neighbours of some text are one token, so that the ids show each
/// place where a word was cut.
fn tokenizer(name: &str, texts: &[String]) -> Result<Tokenizer, TokenizerError> {
    let space = space_of(name);
    let spelled = |text: &String| match space {
        Some(space) => text.replace(' ', space),
        None => text.bytes().map(byte_char).collect(),
    };
    let spelled: Vec<String> = texts.iter().map(spelled).collect();
    let (mut tokens, mut kinds) = (Vec::new(), Vec::new());
    match space {
        Some(space) => {
            let all = spelled.iter().flat_map(|text| text.chars());
            let mut characters: Vec<char> =
                all.chain(space.chars()).filter(|&c| c != '\0').collect();
            characters.sort_unstable();
            characters.dedup();
            tokens.push("<unk>".to_owned());
            tokens.extend((0..=255u8).map(|byte| format!("<0x{byte:02X}>")));
            tokens.extend(characters.iter().map(char::to_string));
            tokens.extend(["\n\n".to_owned(), "\n\n\n".to_owned()]);
            kinds.push(TokenKind::Unknown);
            kinds.extend([TokenKind::Byte; 256]);
            kinds.extend(vec![TokenKind::Normal; characters.len()]);
            kinds.extend([TokenKind::UserDefined; 2]);
        }
        None => {
            tokens.extend((0..=255).map(|byte| byte_char(byte).to_string()));
            kinds.extend([TokenKind::Normal; 256]);
        }
    }
    let mut known: HashSet<String> = tokens.iter().cloned().collect();
    let (mut pairs, mut merges) = (HashSet::new(), Vec::new());
    for text in &spelled {
        for (left, right) in text.chars().zip(text.chars().skip(1)) {
            let is_free = |c| !matches!(c, '\n' | ' ' | '\0');
            if !is_free(left) || !is_free(right) || !pairs.insert((left, right)) {
                continue;
            }
            merges.push(format!("{left} {right}"));
            let joined = format!("{left}{right}");
            if known.insert(joined.clone()) {
                tokens.push(joined);
                kinds.push(TokenKind::Normal);
            }
        }
    }
    let model = if name == "gemma4" {
        TokenizerModel::CharacterBpe
    } else {
        TokenizerModel::Bpe
    };
    Tokenizer::new(TokenizerSpec {
        pre: Some(name.to_owned()),
        kinds,
        merges,
        ..TokenizerSpec::new(model, tokens)
    })
}

#[test]
fn every_name_cuts_as_llama_cpp_does() {
    let mut n_names = 0;
    for line in read(&data("pre.golden.lzma")).lines() {
        let golden: GoldenIds = serde_json::from_str(line).unwrap();
        for name in &golden.names {
            n_names += 1;
            let tokenizer = tokenizer(name, &golden.texts).unwrap();
            let options = EncodeOptions {
                add: AddSpecial::Never,
                ..EncodeOptions::PROMPT
            };
            for (text, ids) in golden.texts.iter().zip(&golden.ids) {
                let found: Vec<u32> = tokenizer
                    .encode(text, options)
                    .iter()
                    .map(|id| id.0)
                    .collect();
                assert_eq!(&found, ids, "{name}: {text:?}");
            }
        }
    }
    assert_eq!(n_names, 92);
}
