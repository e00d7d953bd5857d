//! Byte-level BPE: the bytes of each word join in the order of a list of merges.
//!
//! Invariant: every byte of the text is in exactly one token, so decoding gives the text back.
//! Source: the GPT-2 release. Knows nothing of special tokens.

use std::collections::HashMap;

use kv_core::TokenId;

use super::merge::{Join, Merger};
use super::vocab::Vocab;
use super::words::WordSplitter;
use super::{TokenizerError, byte_level};

/// What becomes of a word that is itself a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WholeWords {
    /// It is that token.
    Take,
    /// The merges decide.
    Merge,
}

#[derive(Clone, Debug)]
pub(super) struct Bpe {
    splitter: WordSplitter,
    whole_words: WholeWords,
    /// What each byte is before anything is joined. Symbols below the number of tokens are tokens;
    /// those above are parts of merges that the vocabulary lacks.
    symbols: Vec<Option<u32>>,
    /// What each byte becomes where it ends up in no token.
    bytes: Vec<Option<TokenId>>,
    joins: HashMap<(u32, u32), Join>,
    n_tokens: usize,
}

impl Bpe {
    pub(super) fn new(
        vocab: &Vocab,
        merges: &[String],
        unk: Option<TokenId>,
        splitter: WordSplitter,
        whole_words: WholeWords,
    ) -> Result<Self, TokenizerError> {
        if merges.is_empty() {
            return Err(TokenizerError::MissingMerges);
        }
        let mut bytes = Vec::with_capacity(256);
        for byte in 0..=255 {
            let token = vocab.byte_token(byte).or(unk);
            // These bytes are in no UTF-8 text.
            if token.is_none() && !matches!(byte, 0xC0 | 0xC1 | 0xF5..=0xFF) {
                return Err(TokenizerError::MissingByte { byte });
            }
            bytes.push(token);
        }
        let mut interner = Interner {
            vocab,
            extra: HashMap::new(),
        };
        let mut symbols = Vec::with_capacity(256);
        for byte in 0..=255 {
            symbols.push(interner.symbol(&byte_level::byte_to_char(byte).to_string()));
        }
        let mut joins = HashMap::with_capacity(merges.len());
        let mut joined = String::new();
        for (index, text) in merges.iter().enumerate() {
            let bad = || TokenizerError::BadMerge {
                index,
                text: text.clone(),
            };
            // The left part may itself start with a space.
            let first = text.chars().next().map_or(0, char::len_utf8);
            let space = text
                .get(first..)
                .and_then(|t| t.find(' '))
                .ok_or_else(bad)?
                + first;
            let (left, right) = (&text[..space], &text[space + 1..]);
            if right.is_empty() {
                return Err(bad());
            }
            joined.clear();
            joined.push_str(left);
            joined.push_str(right);
            let ids = (
                interner.symbol(left),
                interner.symbol(right),
                interner.symbol(&joined),
            );
            if let ((Some(left), Some(right), Some(id)), Ok(rank)) = (ids, u32::try_from(index)) {
                // Of a merge that is listed twice, the first place counts.
                joins.entry((left, right)).or_insert(Join { rank, id });
            }
        }
        let n_tokens = vocab.n_tokens();
        Ok(Self {
            splitter,
            whole_words,
            symbols,
            bytes,
            joins,
            n_tokens,
        })
    }

    /// Appends the tokens of `text`.
    pub(super) fn encode(&self, vocab: &Vocab, text: &str, out: &mut Vec<TokenId>) {
        let mut merger = Merger::default();
        self.splitter.each(text, |word| {
            if self.whole_words == WholeWords::Take
                && let Some(id) = vocab.id(&byte_level::escape(word))
            {
                out.push(id);
                return;
            }
            merger.run(
                word.bytes()
                    .map(|byte| (1, self.symbols[usize::from(byte)])),
                |left, right| self.joins.get(&(left.id?, right.id?)).copied(),
                |symbol| match symbol.id {
                    Some(id) if (id as usize) < self.n_tokens => out.push(TokenId(id)),
                    _ => {
                        let bytes = &word.as_bytes()[symbol.start..symbol.end()];
                        out.extend(
                            bytes
                                .iter()
                                .filter_map(|&byte| self.bytes[usize::from(byte)]),
                        );
                    }
                },
            );
        });
    }
}

/// Numbers texts: tokens by their ids, others from the number of tokens on.
struct Interner<'v> {
    vocab: &'v Vocab,
    extra: HashMap<String, u32>,
}

impl Interner<'_> {
    fn symbol(&mut self, text: &str) -> Option<u32> {
        if let Some(id) = self.vocab.id(text) {
            return Some(id.0);
        }
        if let Some(&symbol) = self.extra.get(text) {
            return Some(symbol);
        }
        let symbol = u32::try_from(self.vocab.n_tokens() + self.extra.len()).ok()?;
        self.extra.insert(text.to_owned(), symbol);
        Some(symbol)
    }
}
