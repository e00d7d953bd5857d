//! Decoding token by token.
//!
//! Invariant: what all pushes and the end return, put together, is what decoding all tokens at once
//! returns, and no part of a character is ever returned. Bytes that can never become a character
//! are replaced by U+FFFD as [`String::from_utf8_lossy`] does.

use kv_core::TokenId;

use super::{SpecialPieces, Tokenizer, TokenizerError};

/// The place in a text where decoding starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeFrom {
    /// At the start of a text: the space that SPM put before it is dropped.
    TextStart,
    /// After other tokens, as generation does after a prompt: the first space is part of the text.
    Continuation,
}

/// Decodes tokens one by one, for text that is shown while it is made.
#[derive(Clone, Debug)]
pub struct DecodeStream {
    special: SpecialPieces,
    from: DecodeFrom,
    /// The bytes of an unfinished character: at most three.
    pending: Vec<u8>,
}

impl DecodeStream {
    /// A stream that has seen no token.
    pub fn new(from: DecodeFrom, special: SpecialPieces) -> Self {
        Self {
            special,
            from,
            pending: Vec::new(),
        }
    }

    /// The text that `id` completes: empty where it ends inside of a character.
    ///
    /// # Errors
    /// [`TokenizerError::UnknownToken`] if `tokenizer` has no such token; the stream is unchanged.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: TokenId) -> Result<String, TokenizerError> {
        let first = self.pending.len();
        tokenizer
            .vocab
            .push_piece(id, self.special, &mut self.pending)?;
        if self.from == DecodeFrom::TextStart && self.pending.len() > first {
            self.from = DecodeFrom::Continuation;
            if tokenizer.drops_first_space() && self.pending.get(first) == Some(&b' ') {
                self.pending.remove(first);
            }
        }
        Ok(take_characters(&mut self.pending))
    }

    /// Ends the text: what is left of an unfinished character becomes U+FFFD.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

/// Removes all finished characters from `bytes`.
fn take_characters(bytes: &mut Vec<u8>) -> String {
    let mut text = String::with_capacity(bytes.len());
    let mut n_taken = 0;
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        n_taken += chunk.valid().len();
        let invalid = chunk.invalid();
        let at_end = n_taken + invalid.len() == bytes.len();
        if invalid.is_empty() || (at_end && could_continue(invalid)) {
            break;
        }
        text.push(char::REPLACEMENT_CHARACTER);
        n_taken += invalid.len();
    }
    bytes.drain(..n_taken);
    text
}

/// True if more bytes could make a character of these.
fn could_continue(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|e| e.valid_up_to() == 0 && e.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_cut_of_any_bytes_gives_the_lossy_text(
            bytes in prop::collection::vec(
                prop_oneof![
                    any::<u8>(),
                    prop::sample::select(&b"\xF0\x9F\x98\x80\xE2\x82\xAC\xC3\xA9a"[..]),
                ],
                0..40,
            ),
            step in 1..5usize,
        ) {
            let mut text = String::new();
            let mut pending = Vec::new();
            for part in bytes.chunks(step) {
                pending.extend_from_slice(part);
                text.push_str(&take_characters(&mut pending));
                prop_assert!(pending.len() < 4);
            }
            text.push_str(&String::from_utf8_lossy(&pending));
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }
    }
}
