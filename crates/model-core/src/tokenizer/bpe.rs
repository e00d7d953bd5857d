//! BPE: the bytes or characters of each word join in the order of a list of merges.
//!
//! Invariant: every byte of the text is in exactly one token, so decoding gives the text back; only
//! a byte that no token of the vocabulary can stand for is left out (Falcon's has none for some
//! control characters). Source: the GPT-2 release. Knows nothing of special tokens.

use std::collections::HashMap;

use kv_core::TokenId;

use super::merge::{Join, Merger};
use super::pre_tokenizers::{Alphabet, PreTraits};
use super::vocab::{SPM_SPACE, SPM_SPACE_TEXT, Vocab};
use super::words::WordSplitter;
use super::{TokenizerError, byte_level};

#[derive(Clone, Debug)]
pub(super) struct Bpe {
    splitter: WordSplitter,
    traits: PreTraits,
    /// The symbol of each byte before anything is joined. Symbols below the number of tokens are
    /// tokens; those above are parts of merges that the vocabulary lacks.
    symbols: Vec<Option<u32>>,
    /// The characters that are parts of merges but no tokens.
    extra: HashMap<char, u32>,
    /// The token of each byte that ends up in no other token.
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
        traits: PreTraits,
    ) -> Result<Self, TokenizerError> {
        if merges.is_empty() {
            return Err(TokenizerError::MissingMerges);
        }
        let bytes = (0..=255)
            .map(|byte| vocab.byte_token(byte).or(unk))
            .collect();
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
        let alone = |(text, symbol): (String, u32)| {
            let mut chars = text.chars();
            let first = chars.next()?;
            chars.next().is_none().then_some((first, symbol))
        };
        Ok(Self {
            splitter,
            traits,
            symbols,
            extra: interner.extra.into_iter().filter_map(alone).collect(),
            bytes,
            joins,
            n_tokens,
        })
    }

    /// Appends the tokens of `text`.
    pub(super) fn encode(&self, vocab: &Vocab, text: &str, out: &mut Vec<TokenId>) {
        let mut merger = Merger::default();
        match self.traits.alphabet {
            Alphabet::Bytes => self.splitter.each(text, &mut |word| {
                self.join_bytes(vocab, word, &mut merger, out);
            }),
            Alphabet::Characters => self.splitter.each(text, &mut |word| {
                self.join_characters(vocab, word, &mut merger, out);
            }),
            Alphabet::SpacedLines => {
                let text = text.replace(' ', SPM_SPACE_TEXT);
                self.splitter.each(&text, &mut |line| {
                    self.join_characters(vocab, line, &mut merger, out);
                });
            }
            Alphabet::SpacedWords => {
                let text = text.replace(' ', SPM_SPACE_TEXT);
                self.splitter.each(&text, &mut |line| {
                    for word in spaced_words(line) {
                        self.join_characters(vocab, &word, &mut merger, out);
                    }
                });
            }
        }
    }

    fn join_bytes(&self, vocab: &Vocab, word: &str, merger: &mut Merger, out: &mut Vec<TokenId>) {
        if self.traits.whole_words
            && let Some(id) = vocab.id(&byte_level::escape(word))
        {
            out.push(id);
            return;
        }
        let symbol = |byte: u8| (1, self.symbols[usize::from(byte)]);
        self.join(word, word.bytes().map(symbol), merger, out);
    }

    fn join_characters(
        &self,
        vocab: &Vocab,
        word: &str,
        merger: &mut Merger,
        out: &mut Vec<TokenId>,
    ) {
        // No merge joins the ends of lines, but several may be one token.
        let is_whole = self.traits.whole_words || word.starts_with('\n');
        if is_whole && let Some(id) = vocab.id(word) {
            out.push(id);
            return;
        }
        let symbol = |c: char| {
            let token = vocab.id(c.encode_utf8(&mut [0; 4])).map(|id| id.0);
            (c.len_utf8(), token.or_else(|| self.extra.get(&c).copied()))
        };
        self.join(word, word.chars().map(symbol), merger, out);
    }

    fn join(
        &self,
        word: &str,
        pieces: impl Iterator<Item = (usize, Option<u32>)>,
        merger: &mut Merger,
        out: &mut Vec<TokenId>,
    ) {
        merger.run(
            pieces,
            |left, right| self.joins.get(&(left.id?, right.id?)).copied(),
            |symbol| match symbol.id {
                Some(id) if (id as usize) < self.n_tokens => out.push(TokenId(id)),
                _ => {
                    let bytes = &word.as_bytes()[symbol.start..symbol.end()];
                    let token = |&byte: &u8| self.bytes[usize::from(byte)];
                    out.extend(bytes.iter().filter_map(token));
                }
            },
        );
    }
}

/// The words of a line, each with a space before it.
fn spaced_words(line: &str) -> Vec<String> {
    if line.starts_with('\n') {
        return vec![line.to_owned()];
    }
    let line = line.strip_prefix(SPM_SPACE).unwrap_or(line);
    line.split(SPM_SPACE)
        .map(|word| format!("{SPM_SPACE}{word}"))
        .collect()
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
