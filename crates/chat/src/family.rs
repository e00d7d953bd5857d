//! [`Family`]: how the models of a family write calls of tools.
//!
//! Plain data: a family is a row of [`crate::table`]. Knows no answer.

use crate::header::ReadHeader;
use crate::tagged::Tags;
use crate::value::Dialect;

/// The way in which the models of a family write calls of tools.
#[derive(Debug)]
pub(crate) struct Family {
    /// Models of the family, for logs.
    pub(crate) name: &'static str,
    /// Templates of the family hold all texts of one of these lists.
    pub(crate) shown: &'static [&'static [&'static str]],
    /// Texts that may stand before the mark of calls, and say nothing.
    pub(crate) before: &'static [&'static str],
    /// Marks that begin a call or a list of them.
    pub(crate) open: &'static [&'static str],
    /// Texts that may stand behind a call, and say nothing.
    pub(crate) after: &'static [&'static str],
    /// A call behind the mark.
    pub(crate) body: Body,
    /// A call in brackets behind the mark, where there may be several.
    pub(crate) listed: Option<Body>,
    pub(crate) start: Start,
    /// The form of calls in a grammar.
    pub(crate) written: CallSyntax,
    pub(crate) wrap: Wrap,
}

/// The form of a call in a grammar, behind the first mark that begins one.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CallSyntax {
    /// In no way: such answers are not held to a form.
    Not,
    /// A JSON object.
    Object {
        keys: Keys,
        close: Option<&'static str>,
    },
    /// Several JSON objects.
    List {
        keys: Keys,
        between: Separator,
        close: Option<&'static str>,
    },
    /// The name between texts, then the arguments.
    Named {
        before: &'static [Piece],
        behind: &'static [Piece],
        close: &'static [Piece],
    },
    /// As the marks of the body say.
    Tagged,
    /// `[name(key='value'), …]`: a list of calls as Python writes them.
    Python { close: &'static str },
}

/// The separator of the calls of a list, in a grammar.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Separator {
    /// A comma; the list is in brackets.
    Commas,
    /// A line break; each call is a line.
    Lines,
}

/// The texts around calls in a grammar of an answer that is nothing else.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wrap {
    Nothing,
    /// These, around each call.
    Each {
        before: &'static [Piece],
        behind: &'static [Piece],
    },
    /// These, around all calls together.
    All {
        before: &'static [Piece],
        behind: &'static [Piece],
    },
}

/// A part of a call that is neither its name nor its arguments, in a grammar.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Piece {
    /// This mark, or text.
    Mark(&'static str),
    /// A small number.
    Digits,
    /// Nine letters and digits.
    Id,
    /// The name of a tool.
    Tool,
}

/// The members of a call that is a JSON object.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Keys {
    /// Members with these names.
    Named {
        /// The model's id of the call, before the rest.
        id: Option<&'static str>,
        name: &'static str,
        arguments: &'static str,
    },
    /// The tool's name alone, with the arguments.
    Tool,
}

impl Keys {
    pub(crate) const USUAL: Self = Self::of("name", "arguments");

    pub(crate) const fn of(name: &'static str, arguments: &'static str) -> Self {
        Self::Named {
            id: None,
            name,
            arguments,
        }
    }
}

/// The form of one call.
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

/// The beginning of an answer that calls without a mark; only tools that there are can be called
/// so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// In no way.
    Marked,
    /// With this character.
    With(char),
    /// With the name of a tool, or of the user: the prompt ends with the mark.
    Recipient { user: &'static str },
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
