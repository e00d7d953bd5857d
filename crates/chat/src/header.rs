//! The header of a call, between its mark and its arguments, where it is no JSON: the name of the
//! tool, and what the model calls the call.
//!
//! Pure functions of the text so far. Know no state of an answer.

/// The longest header of a call.
const MAX_HEADER: usize = 512;

/// The beginning of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Header<'t> {
    /// More is needed to say it.
    Open,
    /// The name of a tool.
    Name {
        /// The name.
        name: &'t str,
        /// The model's id of the call.
        id: Option<&'t str>,
        /// The rest of the text: the arguments.
        rest: &'t str,
    },
    /// Text follows, not a call.
    Text {
        /// The rest of the text.
        rest: &'t str,
    },
    /// It is no call.
    Broken,
}

/// Reads a header.
pub(crate) type ReadHeader = fn(&str) -> Header<'_>;

/// More is needed, but not without end.
fn open(text: &str) -> Header<'_> {
    if text.len() > MAX_HEADER {
        Header::Broken
    } else {
        Header::Open
    }
}

fn named<'t>(name: &'t str, rest: &'t str) -> Header<'t> {
    let id = None;
    if is_name(name.trim()) {
        Header::Name {
            name: name.trim(),
            id,
            rest,
        }
    } else {
        Header::Broken
    }
}

/// True if a tool may be called so.
pub(crate) fn is_name(text: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/');
    !text.is_empty() && text.len() <= 128 && text.chars().all(is_part)
}

/// `name[ARGS]{…}`, or `name[CALL_ID]id[ARGS]{…}`, or `name{…}`.
pub(crate) fn mistral(text: &str) -> Header<'_> {
    let ends = [text.find("[ARGS]"), text.find('{')];
    let Some((header, rest)) = ends.into_iter().flatten().min().map(|at| text.split_at(at)) else {
        return open(text);
    };
    let rest = rest.strip_prefix("[ARGS]").unwrap_or(rest);
    let Some((name, id)) = header.split_once("[CALL_ID]") else {
        return named(header, rest);
    };
    match named(name, rest) {
        Header::Name { name, rest, .. } => {
            let id = Some(id.trim()).filter(|id| !id.is_empty());
            Header::Name { name, id, rest }
        }
        other => other,
    }
}

/// `name<｜tool▁sep｜>{…}`; of older models the type, the separator, the name, and a fence around the
/// arguments.
pub(crate) fn deepseek(text: &str) -> Header<'_> {
    let Some((header, rest)) = text.split_once("<｜tool▁sep｜>") else {
        return open(text);
    };
    if header.trim() != "function" {
        return named(header, rest);
    }
    let fenced = rest.split_once('\n').and_then(|(name, rest)| {
        let at = rest.find('{')?;
        Some((name, rest.get(at..)?))
    });
    match fenced {
        Some((name, rest)) => named(name, rest),
        None => open(text),
    }
}

/// `functions.name:0<|tool_call_argument_begin|>{…}`: the whole header is the id.
pub(crate) fn kimi(text: &str) -> Header<'_> {
    let Some((header, rest)) = text.split_once("<|tool_call_argument_begin|>") else {
        return open(text);
    };
    let id = header.trim();
    let name = id.strip_prefix("functions.").unwrap_or(id);
    let name = match name.rsplit_once(':') {
        Some((name, number)) if number.parse::<u32>().is_ok() => name,
        _ => name,
    };
    match named(name, rest) {
        Header::Name { name, rest, .. } => Header::Name {
            name,
            id: Some(id),
            rest,
        },
        other => other,
    }
}

/// `id<|tool_call:name|>name<|tool_call:args|>{…}`.
pub(crate) fn solar(text: &str) -> Header<'_> {
    let Some((header, rest)) = text.split_once("<|tool_call:args|>") else {
        return open(text);
    };
    let Some((id, name)) = header.split_once("<|tool_call:name|>") else {
        return Header::Broken;
    };
    match named(name, rest) {
        Header::Name { name, rest, .. } => {
            let id = Some(id.trim()).filter(|id| !id.is_empty());
            Header::Name { name, id, rest }
        }
        other => other,
    }
}

/// `name>{…}`.
pub(crate) fn in_tag(text: &str) -> Header<'_> {
    match text.split_once('>') {
        Some((name, rest)) => named(name, rest),
        None if text.contains(['\n', '<']) => Header::Broken,
        None => open(text),
    }
}

/// `name\n{…}`, or `all\n` and text.
pub(crate) fn on_line(text: &str) -> Header<'_> {
    match text.split_once('\n') {
        Some((name, rest)) if name.trim() == "all" => Header::Text { rest },
        Some((name, rest)) => named(name, rest),
        None => open(text),
    }
}

/// `call:name{…}`.
pub(crate) fn gemma(text: &str) -> Header<'_> {
    let Some(at) = text.find('{') else {
        return open(text);
    };
    let (header, rest) = text.split_at(at);
    let header = header.trim();
    named(header.strip_prefix("call:").unwrap_or(header), rest)
}

/// `name(…)`.
pub(crate) fn python(text: &str) -> Header<'_> {
    match text.find('(').map(|at| text.split_at(at)) {
        Some((name, rest)) => named(name, rest),
        None => open(text),
    }
}

/// `{"name": {…}}`, where the last bracket comes after the arguments.
pub(crate) fn keyed(text: &str) -> Header<'_> {
    let begun = text.trim_start();
    let Some(begun) = begun.strip_prefix('{') else {
        return if begun.is_empty() {
            open(text)
        } else {
            Header::Broken
        };
    };
    let begun = begun.trim_start();
    let Some(begun) = begun.strip_prefix('"') else {
        return if begun.is_empty() {
            open(text)
        } else {
            Header::Broken
        };
    };
    let Some((name, rest)) = begun.split_once('"') else {
        return open(text);
    };
    let rest = rest.trim_start();
    match rest.strip_prefix(':') {
        Some(rest) => named(name, rest),
        None if rest.is_empty() => open(text),
        None => Header::Broken,
    }
}
