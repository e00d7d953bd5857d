//! The tokenizer of RWKV's "world" models: at every byte the longest token that begins there.
//!
//! Tokens are strings of bytes, of which many are no UTF-8; GGUF has them as Python writes bytes
//! ([`python_bytes`](super::python_bytes)). Invariant: every byte of a text is in exactly one
//! token. Marks and place holders are no text: llama.cpp finds them in texts, the published
//! tokenizer does not. Source: the description of BlinkDL's `rwkv_vocab_v20230424` (Peng et al.,
//! arXiv 2404.05892).

use kv_core::TokenId;

use super::python_bytes::{escape, unescape};
use super::vocab::Vocab;
use super::{TokenKind, TokenizerError};

/// All tokens that text can become, in the order of their bytes: those that begin alike are
/// neighbours, and the shortest of them the first.
#[derive(Clone, Debug)]
pub(super) struct Rwkv {
    tokens: Vec<(Box<[u8]>, TokenId)>,
    /// The token for a byte with which no token begins.
    unk: Option<TokenId>,
}

impl Rwkv {
    pub(super) fn new(vocab: &Vocab, unk: Option<TokenId>) -> Result<Self, TokenizerError> {
        let mut tokens = Vec::with_capacity(vocab.n_tokens());
        for (id, text, kind) in vocab.iter() {
            if kind == TokenKind::Normal {
                let bytes = unescape(text).ok_or_else(|| TokenizerError::BadEscape {
                    id: id.as_usize(),
                    text: text.to_owned(),
                })?;
                tokens.push((bytes.into_boxed_slice(), id));
            }
        }
        tokens.sort_unstable();
        if let Some([(bytes, first), (_, second)]) = tokens
            .array_windows()
            .find(|[(bytes, _), (next, _)]| bytes == next)
        {
            return Err(TokenizerError::DuplicateToken {
                text: escape(bytes),
                first: first.as_usize(),
                second: second.as_usize(),
            });
        }
        let rwkv = Self { tokens, unk };
        let missing = (0..=255).find(|&byte| rwkv.longest(&[byte]).is_none());
        match missing.filter(|_| unk.is_none()) {
            Some(byte) => Err(TokenizerError::MissingByte { byte }),
            None => Ok(rwkv),
        }
    }

    /// Appends the tokens of `text`.
    pub(super) fn encode(&self, text: &str, out: &mut Vec<TokenId>) {
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            let (len, id) = match (self.longest(rest), self.unk) {
                (Some(found), _) => found,
                (None, Some(unk)) => (1, unk),
                // Without an unknown token every byte is a token.
                (None, None) => return,
            };
            out.push(id);
            rest = &rest[len..];
        }
    }

    /// The longest token that `text` begins with, and its length.
    fn longest(&self, text: &[u8]) -> Option<(usize, TokenId)> {
        // Those that begin with what was read.
        let mut alike = self.tokens.as_slice();
        let mut longest = None;
        for (at, byte) in text.iter().enumerate() {
            let start = alike.partition_point(|(token, _)| token.get(at) < Some(byte));
            let end = alike.partition_point(|(token, _)| token.get(at) <= Some(byte));
            alike = &alike[start..end];
            let Some((first, id)) = alike.first() else {
                break;
            };
            if first.len() == at + 1 {
                longest = Some((at + 1, *id));
            }
        }
        longest
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{TokenizerModel, TokenizerSpec};
    use super::*;
    use crate::tokenizer::{EncodeOptions, SpecialPieces, Tokenizer};

    fn spec(more: &[&[u8]]) -> TokenizerSpec {
        let bytes = (0..=255u8).map(|byte| escape(&[byte]));
        let more = more.iter().map(|bytes| escape(bytes));
        let texts = ["<s>".to_owned()].into_iter().chain(bytes).chain(more);
        let mut spec = TokenizerSpec::new(TokenizerModel::Rwkv, texts.collect());
        spec.kinds = vec![TokenKind::Normal; spec.tokens.len()];
        spec.kinds[0] = TokenKind::Control;
        spec
    }

    fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
        let ids = tokenizer.encode(text, EncodeOptions::TEXT);
        ids.into_iter().map(|id| id.0).collect()
    }

    #[test]
    fn the_longest_token_wins_even_where_the_rest_is_worse() {
        let more: [&[u8]; 6] = [b"ab", b"abcd", b"bc", b"cd", b"\xe4\xbd", b"\n\n"];
        let tokenizer = Tokenizer::new(spec(&more)).unwrap();
        let [ab, abcd, bc, cd, half, _] = [257, 258, 259, 260, 261, 262];
        let byte = |byte: u8| u32::from(byte) + 1;
        assert_eq!(ids(&tokenizer, "abcd"), [abcd]);
        // The end of the text, and another byte, end the search for `abcd`.
        assert_eq!(ids(&tokenizer, "abc"), [ab, byte(b'c')]);
        assert_eq!(ids(&tokenizer, "abce"), [ab, byte(b'c'), byte(b'e')]);
        assert_eq!(ids(&tokenizer, "bcd"), [bc, byte(b'd')]);
        assert_eq!(ids(&tokenizer, "acd"), [byte(b'a'), cd]);
        assert_eq!(ids(&tokenizer, "你"), [half, byte(0xa0)]);
        assert_eq!(ids(&tokenizer, "\n\n\n"), [262, byte(b'\n')]);
        // Marks are no text, unless they are looked for.
        assert_eq!(ids(&tokenizer, "<s>"), [byte(b'<'), byte(b's'), byte(b'>')]);
        let parsed = tokenizer.encode("<s>ab", EncodeOptions::PROMPT);
        assert_eq!(parsed, [TokenId(0), TokenId(ab)]);
    }

    #[test]
    fn tokens_that_cannot_be_are_refused() {
        let mut broken = spec(&[]);
        broken.tokens[7] = "\\x1".to_owned();
        let error = Tokenizer::new(broken).unwrap_err();
        assert_eq!(
            error.to_string(),
            "token 7 has the text \"\\\\x1\", in which an escape is not one of Python's for bytes"
        );
        let mut twice = spec(&[b"A"]);
        twice.tokens[257] = "\\x41".to_owned();
        let error = Tokenizer::new(twice).unwrap_err();
        let wanted = TokenizerError::DuplicateToken {
            text: "A".to_owned(),
            first: 66,
            second: 257,
        };
        assert_eq!(error, wanted);
        let mut lacking = spec(&[]);
        lacking.tokens[11] = "ab".to_owned();
        let error = Tokenizer::new(lacking.clone()).unwrap_err();
        assert_eq!(error, TokenizerError::MissingByte { byte: 10 });
        lacking.special.unk = Some(TokenId(0));
        let tokenizer = Tokenizer::new(lacking).unwrap();
        assert_eq!(ids(&tokenizer, "ab\na"), [11, 0, 98]);
    }

    proptest! {
        #[test]
        fn every_byte_comes_back(text in "[ab你é\\\\'\"\n ]{0,20}") {
            let more: [&[u8]; 5] = [b"ab", b"\xe4\xbd", b"\xa0\xc3", b" a", b"\\'"];
            let tokenizer = Tokenizer::new(spec(&more)).unwrap();
            let tokens = tokenizer.encode(&text, EncodeOptions::TEXT);
            let pieces = tokens.iter().map(|&id| tokenizer.piece(id, SpecialPieces::Skip));
            let bytes: Vec<u8> = pieces.flat_map(Result::unwrap).collect();
            prop_assert_eq!(bytes, text.as_bytes());
            prop_assert_eq!(tokenizer.decode(&tokens, SpecialPieces::Skip).unwrap(), text);
        }
    }
}
