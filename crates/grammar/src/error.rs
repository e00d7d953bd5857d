//! [`GrammarError`]: why a schema or grammar cannot be used. Decides nothing.

/// Why a schema or grammar cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrammarError {
    /// The schema is not JSON.
    #[error("the schema is not JSON: line {line}, column {column}: {reason}")]
    NotJson {
        /// The line, from 1 on.
        line: usize,
        /// The column, from 1 on.
        column: usize,
        /// What is wrong.
        reason: String,
    },
    /// A part of the schema cannot be compiled: it is wrong, or uses a keyword that is not
    /// supported.
    #[error("the schema at '{pointer}' cannot be compiled: {reason}")]
    Schema {
        /// JSON pointer to the part; empty for the whole.
        pointer: String,
        /// What is wrong.
        reason: String,
    },
    /// The grammar cannot be compiled.
    #[error("the grammar cannot be compiled: {reason}")]
    Grammar {
        /// What is wrong, with line and column where they are known.
        reason: String,
    },
    /// The tokenizer has no token that ends generation, so no text could be complete.
    #[error("the model has no token that ends a text, so no grammar can end it")]
    NoEndToken,
    /// The tokenizer cannot be used with grammars.
    #[error("the tokenizer cannot be used with a grammar: {reason}")]
    Tokenizer {
        /// Why not.
        reason: String,
    },
}
