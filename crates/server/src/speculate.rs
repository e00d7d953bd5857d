//! [`Speculate`]: how tokens of a request's text are drafted.
//!
//! Invariant: a draft model that is not there is refused. Drafts nothing.

use cellar_engine::serve::{DEFAULT_DRAFT, Speculation};
use serde::Deserialize;

use crate::error::ApiError;
use crate::model::ServedModel;

/// How the tokens of a text are drafted. The text is the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Speculate {
    /// They are not.
    Off,
    /// By what followed where the text occurred before.
    Lookup,
    /// By the draft model of the server.
    Draft,
    /// By the head of the model.
    Head,
    /// By lookup and head where the model has a head, else not.
    Auto,
}

impl Speculate {
    /// As a model's service takes it.
    pub(crate) fn of(self, model: &ServedModel) -> Result<Speculation, ApiError> {
        let n_max = model.settings().draft_max.unwrap_or(DEFAULT_DRAFT);
        match self {
            Self::Off => Ok(Speculation::Off),
            Self::Lookup => Ok(Speculation::Lookup { n_max }),
            Self::Draft if model.service()?.draft_model().is_none() => {
                let message = format!(
                    "'speculate' is draft, but the model '{}' has no draft model: start the server with \
                     --speculate draft --draft-model MODEL",
                    model.id()
                );
                Err(ApiError::invalid_param("speculate", message))
            }
            Self::Draft => Ok(Speculation::Draft { n_max }),
            Self::Head if !model.service()?.has_head() => {
                let message = format!(
                    "'speculate' is head, but the model '{}' has no head that drafts, or the server was \
                     started without --speculate head",
                    model.id()
                );
                Err(ApiError::invalid_param("speculate", message))
            }
            Self::Head => Ok(Speculation::Head { n_max }),
            Self::Auto => Ok(Speculation::Auto { n_max }),
        }
    }
}
