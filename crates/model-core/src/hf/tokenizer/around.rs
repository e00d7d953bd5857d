//! [`PostProcessor`]: the tokens that a post-processor adds before, between and after texts.
//!
//! Invariant: a post-processor that is not known is an error that names it. Knows no algorithm.

use serde_json::Value;

use super::super::{HfConfig, ModelFileError};
use super::tokens::Tokens;

/// The tokens that are added at one end of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AddedTokens {
    /// Nothing.
    Nothing,
    /// The token with that role.
    Mark,
    /// This token.
    Token(u32),
}

/// The tokens that a post-processor adds; what it does not say is `None`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PostProcessor {
    /// Before a text.
    pub(super) first: Option<AddedTokens>,
    /// After a text.
    pub(super) last: Option<AddedTokens>,
    /// Number of tokens between the two texts of a pair.
    pub(super) n_between: Option<usize>,
}

impl PostProcessor {
    pub(super) fn read(json: &HfConfig, tokens: &Tokens) -> Result<Self, ModelFileError> {
        let mut at = "post_processor".to_owned();
        if json.optional_text("post_processor.type")? == Some("Sequence") {
            let is_template = |i: &usize| {
                let key = format!("post_processor.processors.{i}.type");
                json.optional_text(&key).ok().flatten() == Some("TemplateProcessing")
            };
            match (0..8).find(is_template) {
                Some(i) => at = format!("post_processor.processors.{i}"),
                None => return Ok(Self::default()),
            }
        }
        match json.optional_text(&format!("{at}.type"))? {
            Some("TemplateProcessing") => Self::of_template(json, &at, tokens),
            // Both marks around every text, and between two one of BERT's, two of RoBERTa's.
            Some("BertProcessing") => Ok(Self::marks(1)),
            Some("RobertaProcessing") => Ok(Self::marks(2)),
            Some("ByteLevel") | None => Ok(Self::default()),
            Some(_) => Err(json.wrong(
                &format!("{at}.type"),
                "one of: TemplateProcessing, BertProcessing, RobertaProcessing, ByteLevel, Sequence",
            )),
        }
    }

    fn marks(n_between: usize) -> Self {
        Self {
            first: Some(AddedTokens::Mark),
            last: Some(AddedTokens::Mark),
            n_between: Some(n_between),
        }
    }

    fn of_template(json: &HfConfig, at: &str, tokens: &Tokens) -> Result<Self, ModelFileError> {
        let list = |name: &str| {
            let key = format!("{at}.{name}");
            (json.value(&key).and_then(Value::as_array).cloned(), key)
        };
        let (Some(single), _) = list("single") else {
            return Err(json.wrong(&format!("{at}.single"), "a list"));
        };
        let added = |piece: Option<&Value>| {
            let special = piece.and_then(|piece| piece.get("SpecialToken"));
            let text = special.map(|special| special.get("id").and_then(Value::as_str));
            match text {
                None => AddedTokens::Nothing,
                Some(text) => text
                    .and_then(|text| tokens.id(text))
                    .map_or(AddedTokens::Mark, AddedTokens::Token),
            }
        };
        let is_text = |piece: &Value| piece.get("Sequence").is_some();
        let (pair, _) = list("pair");
        let n_between = pair.and_then(|pair| {
            let first = pair.iter().position(is_text)?;
            let second = pair.iter().rposition(is_text)?;
            second.checked_sub(first + 1)
        });
        Ok(Self {
            first: Some(added(single.first())),
            last: Some(added(single.last())),
            n_between,
        })
    }
}

impl AddedTokens {
    /// True if anything is added.
    pub(super) fn is_something(self) -> bool {
        self != Self::Nothing
    }
}
