//! What can be wrong with a tokenizer's data.
//!
//! Invariant: every message names the token or the number that is wrong, so that it can be looked
//! up in the file. Knows nothing of where the data came from.

/// Why a tokenizer cannot be built from its data, or cannot decode a token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The kind of tokenizer is not one that this crate has.
    #[error(
        "tokenizer model {name:?} is not supported (supported: \"llama\", \"gpt2\", \"gemma4\", \
         \"bert\", \"t5\", \"rwkv\")"
    )]
    UnknownModel {
        /// The name as the file gives it (`tokenizer.ggml.model`).
        name: String,
    },
    /// An unknown token type.
    #[error("token type {code} of token {id} is unknown (known: 0 to 6)")]
    UnknownKind {
        /// The token.
        id: usize,
        /// The number as the file gives it (`tokenizer.ggml.token_type`).
        code: i64,
    },
    /// The pre-tokenizer is not one that this crate splits exactly.
    #[error("pre-tokenizer {name:?} is not supported")]
    UnknownPre {
        /// The name as the file gives it (`tokenizer.ggml.pre`).
        name: String,
    },
    /// An expression of a pre-tokenizer that is none.
    #[error("the pre-tokenizer's expression {text:?} cannot be used: {reason}")]
    Expression {
        /// The expression as the file gives it.
        text: String,
        /// The library's message.
        reason: String,
    },
    /// A step that prepares texts and is not known.
    #[error(
        "the normalizer {text} is not supported (supported: NFC, NFD, NFKC, NFKD, Lowercase, \
         Prepend, and Replace of a text)"
    )]
    Normalizer {
        /// The step as the file gives it.
        text: String,
    },
    /// No tokens at all.
    #[error("the vocabulary is empty")]
    EmptyVocab,
    /// More tokens than ids.
    #[error("the vocabulary has {n_tokens} tokens, more than ids of 32 bits can name")]
    VocabTooLarge {
        /// Number of tokens.
        n_tokens: usize,
    },
    /// A list that must have one entry for each token has another length.
    #[error("{list} has {n_entries} entries for {n_tokens} tokens")]
    LengthMismatch {
        /// The name of the list.
        list: &'static str,
        /// Its length.
        n_entries: usize,
        /// The number of tokens.
        n_tokens: usize,
    },
    /// Two tokens with the same text.
    #[error("tokens {first} and {second} have the same text {text:?}")]
    DuplicateToken {
        /// The text.
        text: String,
        /// The lower id.
        first: usize,
        /// The higher id.
        second: usize,
    },
    /// A score that cannot be ordered.
    #[error("the score of token {id} is not a number")]
    ScoreNotANumber {
        /// The token.
        id: usize,
    },
    /// A BPE without merges.
    #[error("a BPE tokenizer needs merges, the file has none")]
    MissingMerges,
    /// A merge that is not two parts with a space between.
    #[error("merge {index} is not of the form \"left right\": {text:?}")]
    BadMerge {
        /// Index in the list of merges.
        index: usize,
        /// The merge as the file gives it.
        text: String,
    },
    /// A token of kind [`Byte`](super::TokenKind::Byte) whose text names no byte.
    #[error("byte token {id} has the text {text:?}, which names no byte")]
    BadByteToken {
        /// The token.
        id: usize,
        /// Its text.
        text: String,
    },
    /// A token whose text is not as Python writes bytes.
    #[error(
        "token {id} has the text {text:?}, in which an escape is not one of Python's for bytes"
    )]
    BadEscape {
        /// The token.
        id: usize,
        /// Its text.
        text: String,
    },
    /// Text could hold a byte that has no token.
    #[error(
        "no token stands for the byte 0x{byte:02X}, and there is no unknown token to use instead"
    )]
    MissingByte {
        /// The byte.
        byte: u8,
    },
    /// The file requires a token at the start or end of every text but does not name it.
    #[error("the file asks to add a {name} token to every text, but names none")]
    MissingSpecial {
        /// The name of the special token.
        name: &'static str,
    },
    /// A token id that the vocabulary does not have.
    #[error("token {id} is outside of the vocabulary of {n_tokens} tokens")]
    UnknownToken {
        /// The id.
        id: u32,
        /// The number of tokens.
        n_tokens: usize,
    },
    /// The table that normalises texts is broken (`tokenizer.ggml.precompiled_charsmap`).
    #[error("the table of tokenizer.ggml.precompiled_charsmap is broken: {reason}")]
    CharMap {
        /// The reason, with numbers.
        reason: String,
    },
    /// The table of letters could not be built.
    #[error("the character class {class:?} is not available: {reason}")]
    CharClass {
        /// The class as a regular expression.
        class: &'static str,
        /// The library's message.
        reason: String,
    },
}
