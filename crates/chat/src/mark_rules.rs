//! [`Marks`]: the marks of models in a grammar.
//!
//! Invariant: a mark is the control tokens that the tokenizer makes of it, and the texts between
//! them; a grammar names all control tokens that it has. Knows no family.

use kv_core::TokenId;
use model_core::tokenizer::{AddSpecial, EncodeOptions, SpecialText, TokenKind, Tokenizer};
use serde_json::json;

use crate::family::Piece;
use crate::grammar::CallGrammar;

/// Marks as grammars write them.
pub(crate) struct Marks<'t> {
    tokenizer: &'t Tokenizer,
    named: Vec<TokenId>,
}

impl<'t> Marks<'t> {
    pub(crate) fn new(tokenizer: &'t Tokenizer) -> Self {
        Self {
            tokenizer,
            named: Vec::new(),
        }
    }

    /// The grammar with these rules.
    pub(crate) fn grammar(self, rules: String) -> CallGrammar {
        // A rule without a reference to it is no error.
        let lark = format!("{rules}TEXT: /(.|\\n)*/\nSPACES: /[ \\n]{{1,8}}/\n");
        CallGrammar {
            lark,
            named: self.named,
        }
    }

    /// A mark: its control tokens, and the texts around them.
    fn parts(&mut self, mark: &str) -> Vec<String> {
        let options = EncodeOptions {
            add: AddSpecial::Never,
            special: SpecialText::Parse,
        };
        let (mut parts, mut rest) = (Vec::new(), mark);
        for id in self.tokenizer.encode(mark, options) {
            let is_control = self.tokenizer.token_kind(id) == Some(TokenKind::Control);
            let control = self.tokenizer.token_text(id).filter(|_| is_control);
            let Some((before, behind)) = control.and_then(|text| rest.split_once(text)) else {
                continue;
            };
            if !before.is_empty() {
                parts.push(json!(before).to_string());
            }
            parts.push(format!("<[{}]>", id.0));
            self.named.push(id);
            rest = behind;
        }
        if !rest.is_empty() {
            parts.push(json!(rest).to_string());
        }
        parts
    }

    /// A mark alone.
    pub(crate) fn mark(&mut self, mark: &str) -> String {
        self.parts(mark).join(" ")
    }

    /// The mark behind a call, where there is one that does not end the answer.
    pub(crate) fn close(&mut self, close: Option<&'static str>) -> String {
        match close {
            Some(close) if !self.is_end(close) => format!(" SPACES? {}", self.mark(close)),
            _ => String::new(),
        }
    }

    /// Marks and texts behind a call, but for those that end the answer.
    pub(crate) fn behind(&mut self, pieces: &[Piece]) -> String {
        let pieces = pieces.iter().copied();
        let pieces: Vec<Piece> = pieces
            .filter(|piece| !matches!(piece, Piece::Mark(mark) if self.is_end(mark)))
            .collect();
        self.all(&pieces)
    }

    /// True if this mark is a token that ends an answer.
    fn is_end(&self, mark: &str) -> bool {
        let id = self.tokenizer.token_id(mark);
        id.is_some_and(|id| self.tokenizer.is_end_of_generation(id))
    }

    /// Marks and texts after each other.
    pub(crate) fn all(&mut self, pieces: &[Piece]) -> String {
        let mut all = Vec::with_capacity(pieces.len());
        for piece in pieces {
            all.push(match piece {
                Piece::Mark(mark) => self.mark(mark),
                Piece::Digits => "/[0-9]{1,4}/".to_owned(),
                Piece::Id => "/[a-zA-Z0-9]{9}/".to_owned(),
                Piece::Tool => "tool_name".to_owned(),
            });
        }
        all.join(" ")
    }

    /// The rule of text up to a mark, which ends with the first one.
    pub(crate) fn until(&mut self, rule: &str, mark: &str) -> String {
        self.until_from(rule, "TEXT", mark)
    }

    /// The same for text of this terminal.
    pub(crate) fn until_from(&mut self, rule: &str, text: &str, mark: &str) -> String {
        let parts = self.parts(mark);
        let is_control = |part: &String| part.starts_with('<');
        match parts.split_first() {
            None => format!("{rule}: {text}\n"),
            Some((first, [])) if !is_control(first) => format!("{rule}[lazy]: {text} {first}\n"),
            Some((first, _)) if is_control(first) => {
                format!("{rule}: {text} {}\n", parts.join(" "))
            }
            // The control token ends the text before it.
            Some((first, rest)) => {
                let terminal = rule.to_uppercase();
                format!(
                    "{rule}: {terminal} {}\n{terminal}: {text} {first}\n",
                    rest.join(" ")
                )
            }
        }
    }

    /// True if the grammar names a token that ends an answer.
    pub(crate) fn names_an_end(&self) -> bool {
        let mut named = self.named.iter();
        named.any(|id| self.tokenizer.is_end_of_generation(*id))
    }

    /// True if a mark has a token that ends an answer.
    pub(crate) fn has_an_end(&self, mark: &str) -> bool {
        let mut other = Self::new(self.tokenizer);
        other.parts(mark);
        other.names_an_end()
    }

    /// True if a mark has a control token that the grammar names.
    pub(crate) fn shares_a_token(&self, mark: &str) -> bool {
        let mut other = Self::new(self.tokenizer);
        other.parts(mark);
        other.named.iter().any(|id| self.named.contains(id))
    }
}
