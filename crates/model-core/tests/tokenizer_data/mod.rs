//! Reads the vocabularies and golden ids that the tokenizer tests compare against.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests may fail the test

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use kv_core::TokenId;
use lzma_rust2::LzmaReader;
use model_core::tokenizer::{SpecialSpacing, TokenKind, Tokenizer, TokenizerModel, TokenizerSpec};

/// A file of the tokenizer tests.
pub(crate) fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures/tokenizers")
        .join(name)
}

/// The text of a file, which is packed where its name ends in `.lzma`.
pub(crate) fn read(path: &Path) -> String {
    let mut file = File::open(path).unwrap();
    let mut text = String::new();
    if path.extension().is_some_and(|ending| ending == "lzma") {
        LzmaReader::new_mem_limit(file, u32::MAX, None)
            .unwrap()
            .read_to_string(&mut text)
    } else {
        file.read_to_string(&mut text)
    }
    .unwrap();
    text
}

/// Reads a vocabulary in the format that `MANIFEST.md` of the fixtures describes.
pub(crate) fn spec(path: &Path) -> TokenizerSpec {
    let text = read(path);
    let mut spec = TokenizerSpec::new(TokenizerModel::Bpe, Vec::new());
    let id = |value: &str| Some(TokenId(value.parse().unwrap()));
    let flag = |value: &str| Some(value.parse().unwrap());
    for line in text.lines() {
        let (key, value) = line.split_once(' ').unwrap();
        match key {
            "M" | "m" => {
                spec.merges.push(value.to_owned());
                if key == "M" {
                    spec.tokens.push(value.replace(' ', ""));
                    spec.kinds.push(TokenKind::Normal);
                }
            }
            "t" => {
                let mut fields = value.splitn(3, ' ');
                let code = fields.next().unwrap().parse().unwrap();
                spec.kinds
                    .push(TokenKind::from_code(spec.tokens.len(), code).unwrap());
                let score = fields.next().unwrap();
                if score != "-" {
                    spec.scores.push(score.parse().unwrap());
                }
                spec.tokens
                    .push(serde_json::from_str(fields.next().unwrap()).unwrap());
            }
            "model" => spec.model = TokenizerModel::from_name(value).unwrap(),
            "pre" => spec.pre = Some(value.to_owned()),
            "bos" => spec.special.bos = id(value),
            "eos" => spec.special.eos = id(value),
            "eot" => spec.special.eot = id(value),
            "unk" => spec.special.unk = id(value),
            "pad" => spec.special.pad = id(value),
            "add_bos_token" => spec.add_bos = flag(value),
            "add_eos_token" => spec.add_eos = flag(value),
            "add_space_prefix" => spec.add_space_prefix = flag(value),
            "special_spacing" => spec.special_spacing = SpecialSpacing::Strip,
            other => panic!("unknown key {other:?} in {}", path.display()),
        }
    }
    spec
}

/// The tokenizer of a vocabulary.
pub(crate) fn tokenizer(path: &Path) -> Tokenizer {
    Tokenizer::new(spec(path)).unwrap()
}

/// A text and its ids by llama.cpp.
#[derive(serde::Deserialize)]
pub(crate) struct Golden {
    pub(crate) text: String,
    /// With BOS and EOS as the model says, special tokens parsed.
    pub(crate) prompt: Vec<u32>,
    /// Without BOS and EOS, special tokens taken as text.
    pub(crate) plain: Vec<u32>,
}

/// Reads golden ids, one JSON object a line.
pub(crate) fn golden(path: &Path) -> Vec<Golden> {
    read(path)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// The character that stands for a byte in byte-level vocabularies.
pub(crate) fn byte_char(byte: u8) -> char {
    let is_plain = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if is_plain(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&b| !is_plain(b)).count();
    char::from_u32(256 + u32::try_from(before).unwrap()).unwrap()
}
