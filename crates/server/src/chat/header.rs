//! What stands between the mark of a call and its arguments, where that is no JSON: the name of the
//! tool.
//!
//! Pure functions of the text so far. Know no state of an answer.

const ARGS: &str = "[ARGS]";
const SEPARATOR: &str = "<｜tool▁sep｜>";

/// What a text begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Header<'t> {
    /// More is needed to say it.
    Open,
    /// A list of calls, each a JSON object.
    List {
        /// What follows the bracket.
        rest: &'t str,
    },
    /// The name of a tool.
    Name {
        /// The name.
        name: &'t str,
        /// What follows: the arguments.
        rest: &'t str,
    },
}

/// `[…]`, or `name[ARGS]{…}`, or `name{…}`.
pub(super) fn mistral(text: &str) -> Header<'_> {
    if let Some(rest) = text.trim_start().strip_prefix('[') {
        return Header::List { rest };
    }
    let ends = [text.find(ARGS), text.find('{')];
    let Some((name, rest)) = ends.into_iter().flatten().min().map(|at| text.split_at(at)) else {
        return Header::Open;
    };
    Header::Name {
        name: name.trim(),
        rest: rest.strip_prefix(ARGS).unwrap_or(rest),
    }
}

/// `name<｜tool▁sep｜>{…}`; of older models the type, the separator, the name, and a fence around the
/// arguments.
pub(super) fn deepseek(text: &str) -> Header<'_> {
    let Some((header, rest)) = text.split_once(SEPARATOR) else {
        return Header::Open;
    };
    if header.trim() != "function" {
        let name = header.trim();
        return Header::Name { name, rest };
    }
    let fenced = rest.split_once('\n').and_then(|(name, rest)| {
        let at = rest.find('{')?;
        Some((name.trim(), rest.get(at..)?))
    });
    match fenced {
        Some((name, rest)) => Header::Name { name, rest },
        None => Header::Open,
    }
}
