//! Constrains generated texts to a JSON schema or a grammar, with `llguidance`.
//!
//! Invariant: no token is ever chosen that the grammar does not allow. Where the allowed tokens
//! cannot be computed, none is left, and generation ends with an error instead of going on without
//! the grammar. When the text is complete, only tokens that end generation are left. Knows nothing
//! of models, only of tokenizers.
//!
//! ```
//! use cellar_grammar::{GrammarCompiler, GrammarError};
//! use cellar_engine::session::TextRequest;
//! use model_core::tokenizer::Tokenizer;
//!
//! fn constrain(text: &mut TextRequest, tokenizer: &Tokenizer) -> Result<(), GrammarError> {
//!     let schema = r#"{"type": "object", "properties": {"age": {"type": "integer"}},
//!                      "required": ["age"], "additionalProperties": false}"#;
//!     let grammar = GrammarCompiler::new(tokenizer)?.json_schema(schema)?;
//!     text.steps.push(Box::new(grammar.step()));
//!     Ok(())
//! }
//! ```

mod close;
mod compiler;
mod error;
mod gbnf;
mod holdable;
mod locate;
mod step;

pub use close::close_objects;
pub use compiler::{Grammar, GrammarCompiler, choice_rule, grammar_rule, json_rule, regex_rule};
pub use error::GrammarError;
pub use holdable::{HoldableSchema, SkippedKeyword};
pub use step::{GrammarFailure, GrammarStep};
