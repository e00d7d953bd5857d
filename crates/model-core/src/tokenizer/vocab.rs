//! The vocabulary: texts, kinds, and what a token writes when it is decoded.
//!
//! Invariant: every token has its own text, and every byte token names a byte. Knows nothing of how
//! text becomes tokens.

use std::hash::BuildHasher;

use hashbrown::hash_table::Entry;
use hashbrown::{DefaultHashBuilder, HashTable};
use kv_core::TokenId;

use super::{TokenKind, TokenizerError, TokenizerModel, TokenizerSpec, byte_level, python_bytes};

/// The character that SentencePiece writes for a space.
pub(super) const SPM_SPACE: char = '\u{2581}';
/// The same as text.
pub(super) const SPM_SPACE_TEXT: &str = "\u{2581}";

/// The appearance of marks such as BOS in decoded text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpecialPieces {
    /// Control and unknown tokens write nothing.
    #[default]
    Skip,
    /// Control and unknown tokens write their text.
    Render,
}

#[derive(Clone, Debug)]
pub(super) struct Vocab {
    model: TokenizerModel,
    texts: Vec<String>,
    kinds: Vec<TokenKind>,
    /// By their texts, which are only in `texts`: vocabularies are large.
    ids: HashTable<u32>,
    hasher: DefaultHashBuilder,
    max_len: usize,
}

impl Vocab {
    /// Takes the tokens and kinds out of a spec. A token without text is called `[EMPTY_<id>]`, as
    /// llama.cpp calls it.
    pub(super) fn new(
        model: TokenizerModel,
        mut texts: Vec<String>,
        mut kinds: Vec<TokenKind>,
    ) -> Result<Self, TokenizerError> {
        let n_tokens = texts.len();
        if n_tokens == 0 {
            return Err(TokenizerError::EmptyVocab);
        }
        if u32::try_from(n_tokens).is_err() {
            return Err(TokenizerError::VocabTooLarge { n_tokens });
        }
        if kinds.is_empty() {
            kinds = vec![TokenKind::Normal; n_tokens];
        }
        check_len("tokenizer.ggml.token_type", kinds.len(), n_tokens)?;
        for (id, text) in texts.iter_mut().enumerate() {
            if text.is_empty() {
                *text = format!("[EMPTY_{id}]");
            }
        }
        let hasher = DefaultHashBuilder::default();
        let ids = ids_by_text(&texts, &hasher)?;
        let max_len = texts.iter().map(String::len).max().unwrap_or(0);
        let vocab = Self {
            model,
            texts,
            kinds,
            ids,
            hasher,
            max_len,
        };
        for (id, text) in vocab.texts.iter().enumerate() {
            if vocab.kinds[id] == TokenKind::Byte && vocab.named_byte(text).is_none() {
                return Err(TokenizerError::BadByteToken {
                    id,
                    text: text.clone(),
                });
            }
        }
        Ok(vocab)
    }

    pub(super) fn n_tokens(&self) -> usize {
        self.texts.len()
    }

    /// The length of the longest token, in bytes.
    pub(super) fn max_len(&self) -> usize {
        self.max_len
    }

    pub(super) fn text(&self, id: TokenId) -> Option<&str> {
        self.texts.get(id.as_usize()).map(String::as_str)
    }

    pub(super) fn kind(&self, id: TokenId) -> Option<TokenKind> {
        self.kinds.get(id.as_usize()).copied()
    }

    pub(super) fn set_kind(&mut self, id: TokenId, kind: TokenKind) {
        if let Some(slot) = self.kinds.get_mut(id.as_usize()) {
            *slot = kind;
        }
    }

    pub(super) fn id(&self, text: &str) -> Option<TokenId> {
        let of_text = |&id: &u32| self.texts[id as usize] == text;
        let id = self.ids.find(self.hasher.hash_one(text), of_text)?;
        Some(TokenId(*id))
    }

    /// Ids with text and kind, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (TokenId, &str, TokenKind)> {
        let tokens = self.texts.iter().zip(&self.kinds);
        (0u32..)
            .zip(tokens)
            .map(|(id, (text, &kind))| (TokenId(id), text.as_str(), kind))
    }

    /// The token of one byte.
    pub(super) fn byte_token(&self, byte: u8) -> Option<TokenId> {
        match self.model {
            TokenizerModel::Spm => self.id(&format!("<0x{byte:02X}>")).or_else(|| {
                let plain = byte.is_ascii().then(|| char::from(byte).to_string())?;
                self.id(&plain)
            }),
            TokenizerModel::CharacterBpe => self.id(&format!("<0x{byte:02X}>")),
            TokenizerModel::Bpe => self.id(&byte_level::byte_to_char(byte).to_string()),
            TokenizerModel::WordPiece | TokenizerModel::Unigram | TokenizerModel::Rwkv => None,
        }
    }

    fn named_byte(&self, text: &str) -> Option<u8> {
        match self.model {
            TokenizerModel::Spm | TokenizerModel::CharacterBpe | TokenizerModel::Unigram => {
                let hex = text.strip_prefix("<0x")?.strip_suffix('>')?;
                let exact = hex.len() == 2 && hex.bytes().all(|b| b.is_ascii_hexdigit());
                exact.then(|| u8::from_str_radix(hex, 16).ok())?
            }
            TokenizerModel::WordPiece | TokenizerModel::Rwkv => None,
            TokenizerModel::Bpe => {
                let mut chars = text.chars();
                let byte = chars.next().and_then(byte_level::char_to_byte)?;
                chars.next().is_none().then_some(byte)
            }
        }
    }

    /// Appends what token `id` writes.
    pub(super) fn push_piece(
        &self,
        id: TokenId,
        special: SpecialPieces,
        out: &mut Vec<u8>,
    ) -> Result<(), TokenizerError> {
        let (Some(text), Some(kind)) = (self.text(id), self.kind(id)) else {
            return Err(TokenizerError::UnknownToken {
                id: id.0,
                n_tokens: self.n_tokens(),
            });
        };
        match (kind, self.model) {
            (TokenKind::Control | TokenKind::Unknown, _) if special == SpecialPieces::Skip => {}
            (TokenKind::Control | TokenKind::Unknown | TokenKind::UserDefined, _) => {
                out.extend_from_slice(text.as_bytes());
            }
            (TokenKind::Byte, _) => out.extend(self.named_byte(text)),
            (TokenKind::Unused | TokenKind::Undefined, _) => {}
            (
                TokenKind::Normal,
                TokenizerModel::Spm
                | TokenizerModel::CharacterBpe
                | TokenizerModel::WordPiece
                | TokenizerModel::Unigram,
            ) => {
                let mut parts = text.split(SPM_SPACE);
                out.extend_from_slice(parts.next().unwrap_or_default().as_bytes());
                for part in parts {
                    out.push(b' ');
                    out.extend_from_slice(part.as_bytes());
                }
            }
            // What has wrong escapes was refused.
            (TokenKind::Normal, TokenizerModel::Rwkv) => {
                out.extend(python_bytes::unescape(text).unwrap_or_default());
            }
            (TokenKind::Normal, TokenizerModel::Bpe) => {
                for c in text.chars() {
                    match byte_level::char_to_byte(c) {
                        Some(byte) => out.push(byte),
                        // Not of the byte-level alphabet: text that was added as it is.
                        None => out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
                    }
                }
            }
        }
        Ok(())
    }
}

/// The ids of all texts, each of which there may be but once.
fn ids_by_text(
    texts: &[String],
    hasher: &DefaultHashBuilder,
) -> Result<HashTable<u32>, TokenizerError> {
    let hash = |&id: &u32| hasher.hash_one(texts[id as usize].as_str());
    let mut ids = HashTable::with_capacity(texts.len());
    for (id, text) in (0u32..).zip(texts) {
        let same = |&first: &u32| texts[first as usize] == *text;
        match ids.entry(hash(&id), same, hash) {
            Entry::Vacant(free) => free.insert(id),
            Entry::Occupied(first) => {
                return Err(TokenizerError::DuplicateToken {
                    text: text.clone(),
                    first: *first.get() as usize,
                    second: id as usize,
                });
            }
        };
    }
    Ok(ids)
}

/// That a list has one entry for each token.
pub(super) fn check_len(
    list: &'static str,
    n_entries: usize,
    n_tokens: usize,
) -> Result<(), TokenizerError> {
    if n_entries == n_tokens {
        return Ok(());
    }
    Err(TokenizerError::LengthMismatch {
        list,
        n_entries,
        n_tokens,
    })
}

/// Takes the vocabulary out of a spec and leaves the rest. `model` says how tokens are spelled.
pub(super) fn take_vocab(
    spec: &mut TokenizerSpec,
    model: TokenizerModel,
) -> Result<Vocab, TokenizerError> {
    let texts = std::mem::take(&mut spec.tokens);
    let kinds = std::mem::take(&mut spec.kinds);
    Vocab::new(model, texts, kinds)
}
