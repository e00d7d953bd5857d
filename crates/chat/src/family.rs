//! [`Family`]: how the models of a family write calls of tools.
//!
//! Plain data: a family is a row of [`crate::table`]. Knows no answer.

use crate::header::ReadHeader;
use crate::tagged::Tags;
use crate::value::Dialect;

/// How the models of a family write calls of tools.
#[derive(Debug)]
pub(crate) struct Family {
    /// Models of the family, for logs.
    pub(crate) name: &'static str,
    /// Templates of the family hold all texts of one of these lists.
    pub(crate) shown: &'static [&'static [&'static str]],
    /// What may stand before what begins calls, and says nothing.
    pub(crate) before: &'static [&'static str],
    /// What begins a call or a list of them.
    pub(crate) open: &'static [&'static str],
    /// What may stand behind a call, and says nothing.
    pub(crate) after: &'static [&'static str],
    /// A call behind the mark.
    pub(crate) body: Body,
    /// A call in brackets behind the mark, where there may be several.
    pub(crate) listed: Option<Body>,
    pub(crate) start: Start,
}

/// How one call is written.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Body {
    /// `{"name": …, "arguments": {…}}`.
    Json,
    /// A header with the name, then the arguments.
    Named {
        header: ReadHeader,
        dialect: Dialect,
    },
    /// Marks around keys and values.
    Tagged(&'static Tags),
    /// Elements in elements, with this text before each mark.
    Elements(&'static str),
}

/// How an answer begins that calls without a mark; only tools that there are can be called so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// In no way.
    Marked,
    /// With this character.
    With(char),
}

impl Family {
    /// The family of models with this template.
    pub(crate) fn of_template(template: &str) -> Option<&'static Self> {
        let is_shown = |family: &&Self| {
            let mut ways = family.shown.iter();
            ways.any(|texts| texts.iter().all(|text| template.contains(text)))
        };
        crate::table::FAMILIES.iter().find(is_shown)
    }
}
