//! The tokens of a `tokenizer.json` by id, with what they are for.
//!
//! Invariant: every id up to the last has one text, and no text has two ids.

use std::collections::HashMap;

use serde_json::Value;

use super::super::{HfConfig, ModelFileError};
use super::pre::Kind;

/// More tokens than any vocabulary has; a larger id is a broken file.
const MAX_TOKENS: usize = 1 << 24;

/// The uses of tokens, in the numbers of GGUF.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Type {
    Normal = 1,
    Unknown = 2,
    Control = 3,
    UserDefined = 4,
    Unused = 5,
    Byte = 6,
}

/// The tokens by id.
#[derive(Debug)]
pub(super) struct Tokens {
    texts: Vec<Option<(String, Type)>>,
    ids: HashMap<String, u32>,
    /// `"left right"`, those that join first come first.
    pub(super) merges: Vec<String>,
    /// Those of the file, where it has them.
    own_scores: Vec<f32>,
    /// The token for text in no token, by the file's number.
    pub(super) unknown: Option<u32>,
    /// No id is as large.
    most: usize,
}

impl Tokens {
    /// Reads a file whose ids are all below `most`: memory is taken for all up to the largest.
    pub(super) fn read(json: &HfConfig, kind: Kind, most: usize) -> Result<Self, ModelFileError> {
        let mut tokens = Self {
            texts: Vec::new(),
            ids: HashMap::new(),
            merges: merges(json)?,
            own_scores: Vec::new(),
            unknown: None,
            most: most.min(MAX_TOKENS),
        };
        match kind {
            Kind::Unigram => tokens.take_scored(json)?,
            _ => tokens.take_numbered(json, kind)?,
        }
        let added = json.value("added_tokens").and_then(Value::as_array);
        for (i, token) in added.into_iter().flatten().enumerate() {
            let text = json.optional_text(&format!("added_tokens.{i}.content"))?;
            let Some(text) = text else {
                return Err(json.missing(&format!("added_tokens.{i}.content"), "a text"));
            };
            let id = token.get("id").and_then(Value::as_u64);
            let of = match token.get("special").and_then(Value::as_bool) {
                Some(true) => Type::Control,
                _ => Type::UserDefined,
            };
            tokens.insert(json, id.and_then(|id| usize::try_from(id).ok()), text, of)?;
        }
        let by_text = json.optional_text("model.unk_token")?;
        let unknown = tokens.unknown.or(by_text.and_then(|text| tokens.id(text)));
        if let Some(id) = unknown
            && let Some(Some((_, of))) = tokens.texts.get_mut(id as usize)
        {
            *of = Type::Unknown;
        }
        Ok(tokens)
    }

    /// Takes a vocabulary of texts and ids.
    fn take_numbered(&mut self, json: &HfConfig, kind: Kind) -> Result<(), ModelFileError> {
        let key = "model.vocab";
        let vocab = json.value(key).and_then(Value::as_object);
        let vocab = vocab.ok_or_else(|| json.missing(key, "an object of texts and ids"))?;
        self.ids.reserve(vocab.len());
        for (text, id) in vocab {
            let id = id.as_u64().and_then(|id| usize::try_from(id).ok());
            let is_byte = kind == Kind::Spm && is_byte(text);
            let of = if is_byte { Type::Byte } else { Type::Normal };
            self.insert(json, id, text, of)?;
        }
        Ok(())
    }

    /// Takes a vocabulary of texts and scores, in the order of the ids.
    fn take_scored(&mut self, json: &HfConfig) -> Result<(), ModelFileError> {
        let key = "model.vocab";
        let vocab = json.value(key).and_then(Value::as_array);
        let vocab = vocab.ok_or_else(|| json.missing(key, "a list of texts and scores"))?;
        self.ids.reserve(vocab.len());
        for (id, piece) in vocab.iter().enumerate() {
            let of_piece = match piece.as_array().map(Vec::as_slice) {
                Some([Value::String(text), Value::Number(score)]) => {
                    score.as_f64().map(|score| (text, score))
                }
                _ => None,
            };
            let Some((text, score)) = of_piece else {
                return Err(json.wrong(&format!("{key}.{id}"), "a text and a score"));
            };
            self.insert(json, Some(id), text, Type::Normal)?;
            self.own_scores.push(score as f32);
        }
        let unknown = json.optional_number("model.unk_id")?;
        self.unknown = match unknown {
            None => None,
            Some(id) if id.fract() == 0.0 && (0.0..vocab.len() as f64).contains(&id) => {
                Some(id as u32)
            }
            Some(_) => return Err(json.wrong("model.unk_id", "a token's number")),
        };
        Ok(())
    }

    /// Sets a token; a text that is there already may only get another type.
    fn insert(
        &mut self,
        json: &HfConfig,
        id: Option<usize>,
        text: &str,
        of: Type,
    ) -> Result<(), ModelFileError> {
        let wrong = |found: String, expected: String| ModelFileError::WrongKey {
            file: json.file().to_owned(),
            key: format!("id of token {text:?}"),
            found,
            expected,
        };
        let most = self.most;
        let id = id.filter(|&id| id < most);
        let id = id.ok_or_else(|| wrong("no id".into(), format!("a number below {most}")))?;
        if self.texts.len() <= id {
            self.texts.resize(id + 1, None);
        }
        let number = u32::try_from(id).unwrap_or(u32::MAX);
        let first = *self.ids.entry(text.to_owned()).or_insert(number);
        if first != number {
            return Err(wrong(
                id.to_string(),
                format!("{first}, which it is elsewhere"),
            ));
        }
        match self.texts.get_mut(id) {
            Some(Some((other, _))) if *other != text => {
                Err(wrong(id.to_string(), format!("another: {other:?} has it")))
            }
            Some(slot) => {
                *slot = Some((text.to_owned(), of));
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// The id of a text.
    pub(super) fn id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    /// Makes place for `n` tokens: embeddings often have more rows than a vocabulary has tokens.
    pub(super) fn pad(&mut self, n: usize) {
        if self.texts.len() < n.min(self.most) {
            self.texts.resize(n.min(self.most), None);
        }
    }

    /// One score a token: the file's; or without these, the earlier a merge makes it, the higher.
    /// What no merge makes comes last.
    pub(super) fn scores(&self) -> Vec<f32> {
        if !self.own_scores.is_empty() {
            let mut scores = self.own_scores.clone();
            // Marks that are no pieces, and tokens that only embeddings have.
            scores.resize(self.texts.len(), 0.0);
            return scores;
        }
        let mut ranks: HashMap<u32, usize> = HashMap::with_capacity(self.merges.len());
        for merge in &self.merges {
            let made = merge
                .split_once(' ')
                .map(|(left, right)| format!("{left}{right}"));
            if let Some(id) = made.and_then(|text| self.id(&text)) {
                let next = ranks.len();
                ranks.entry(id).or_insert(next);
            }
        }
        let last = ranks.len();
        (0u32..)
            .zip(&self.texts)
            .map(|(id, token)| match token {
                // These never join, so that their scores play no role.
                Some((_, Type::Normal)) | None => -(*ranks.get(&id).unwrap_or(&last) as f32),
                Some(_) => 0.0,
            })
            .collect()
    }

    /// Texts and types by id, as GGUF has them.
    pub(super) fn into_lists(self, kind: Kind) -> (Vec<String>, Vec<i32>) {
        let named = self.texts.into_iter().enumerate().map(|(id, token)| {
            let (text, of) = token.unwrap_or_else(|| (format!("[PAD{id}]"), Type::Unused));
            let text = match (kind, of) {
                (Kind::WordPiece, Type::Normal) => word_piece(&text),
                _ => text,
            };
            (text, of as i32)
        });
        named.unzip()
    }
}

/// GGUF marks pieces that begin a word, `tokenizer.json` those that continue one.
fn word_piece(text: &str) -> String {
    match text.strip_prefix("##") {
        Some(rest) => rest.to_owned(),
        None => format!("\u{2581}{text}"),
    }
}

/// `<0x0A>`
fn is_byte(text: &str) -> bool {
    let hex = text.strip_prefix("<0x").and_then(|t| t.strip_suffix('>'));
    hex.is_some_and(|hex| hex.len() == 2 && hex.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Merges as texts: newer files have pairs.
fn merges(json: &HfConfig) -> Result<Vec<String>, ModelFileError> {
    let key = "model.merges";
    let Some(list) = json.value(key).and_then(Value::as_array) else {
        return Ok(Vec::new());
    };
    let merge = |(i, value): (usize, &Value)| {
        let text = match value {
            Value::String(text) => Some(text.clone()),
            Value::Array(pair) => match pair.as_slice() {
                [Value::String(left), Value::String(right)] => Some(format!("{left} {right}")),
                _ => None,
            },
            _ => None,
        };
        text.ok_or_else(|| json.wrong(&format!("{key}.{i}"), "a text or a pair of texts"))
    };
    list.iter().enumerate().map(merge).collect()
}
