//! [`ValueReader`]: the values of a call, as models write them, to JSON.
//!
//! Invariant: what it wrote is the beginning of a JSON value, and a whole one once it is done.
//! Small faults are mended: line breaks in strings, a comma before a bracket, Python's words. What
//! cannot be read is [`Step::Broken`].

use serde_json::Value;

/// Brackets in brackets: no deeper than readers of JSON go.
const MAX_DEPTH: usize = 120;
/// The longest number or word.
const MAX_WORD: usize = 400;

/// The notation of a model's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// JSON; the values of a call are an object.
    Json,
    /// `(key='text', other=[1, 2])`, as Python.
    Python,
    /// `{key:<|"|>text<|"|>,other:[1,2]}`: Gemma 4.
    Gemma,
}

/// The quote of [`Dialect::Gemma`], behind which nothing is escaped.
pub(crate) const GEMMA_QUOTE: &str = "<|\"|>";

/// The state of a value after a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// More is needed.
    Open,
    /// The last of it.
    Done,
    /// The first behind a number or word.
    Behind,
    /// This cannot be read.
    Broken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Container {
    Array { close: char },
    Object { close: char },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Key,
    Value,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// Before a value, or the end of an array.
    Value,
    /// Before a key, or the end of an object.
    Key,
    /// In a key without quotes.
    BareKey,
    /// In a string that ends with this quote.
    Text {
        quote: char,
        role: Role,
    },
    /// Behind a backslash in it.
    Escape {
        quote: char,
        role: Role,
    },
    /// Before so many more digits of `\u`.
    Digits {
        quote: char,
        role: Role,
        n: u8,
    },
    /// Behind a single quote, which ends the string or does not.
    Quote {
        role: Role,
    },
    /// In so many characters of Gemma's quote before a string.
    OpenQuote {
        role: Role,
        n: usize,
    },
    /// In a string of Gemma, and in so many characters of the quote behind it.
    Marked {
        role: Role,
        n: usize,
    },
    Colon,
    /// Behind a value in brackets.
    After,
    /// In a number or word.
    Word,
}

/// A value that is being read.
#[derive(Clone, Debug)]
pub(crate) struct ValueReader {
    dialect: Dialect,
    at: At,
    containers: Vec<Container>,
    /// A comma and white space, which wait for what follows.
    waiting: String,
    word: String,
    /// White space behind a single quote.
    spaces: String,
}

impl ValueReader {
    pub(crate) fn new(dialect: Dialect) -> Self {
        Self {
            dialect,
            at: At::Value,
            containers: Vec::new(),
            waiting: String::new(),
            word: String::new(),
            spaces: String::new(),
        }
    }

    /// The value as it is in a text, where it is all of it.
    pub(crate) fn read_all(dialect: Dialect, text: &str) -> Option<Value> {
        let (mut reader, mut json) = (Self::new(dialect), String::new());
        let mut step = Step::Open;
        for c in text.trim().chars() {
            if step != Step::Open {
                return None;
            }
            step = reader.push(c, &mut json);
        }
        if step == Step::Open {
            step = reader.push(',', &mut json);
        }
        match step {
            Step::Done | Step::Behind => serde_json::from_str(&json).ok(),
            Step::Open | Step::Broken => None,
        }
    }

    /// Takes a character, and writes what is decided.
    pub(crate) fn push(&mut self, c: char, out: &mut String) -> Step {
        match self.at {
            At::Value => self.push_before_value(c, out),
            At::Key => self.push_before_key(c, out),
            At::BareKey => self.push_bare_key(c, out),
            At::Text { quote, role } => self.push_text(c, QuotedText { quote, role }, out),
            At::Escape { quote, role } => self.push_escape(c, QuotedText { quote, role }, out),
            At::Digits { quote, role, n } => {
                if !c.is_ascii_hexdigit() {
                    return Step::Broken;
                }
                out.push(c);
                self.at = match n {
                    1 => At::Text { quote, role },
                    _ => At::Digits {
                        quote,
                        role,
                        n: n - 1,
                    },
                };
                Step::Open
            }
            At::Quote { role } => self.push_behind_quote(c, role, out),
            At::OpenQuote { role, n } => {
                let mut rest = GEMMA_QUOTE.chars().skip(n);
                if rest.next() != Some(c) {
                    return Step::Broken;
                }
                self.at = At::OpenQuote { role, n: n + 1 };
                if rest.next().is_none() {
                    out.push('"');
                    self.at = At::Marked { role, n: 0 };
                }
                Step::Open
            }
            At::Marked { role, n } => self.push_marked(c, role, n, out),
            At::Colon if c.is_whitespace() => {
                out.push(c);
                Step::Open
            }
            At::Colon if c == ':' => {
                out.push(':');
                self.at = At::Value;
                Step::Open
            }
            At::Colon => Step::Broken,
            At::After => self.push_after(c, out),
            At::Word => self.push_word(c, out),
        }
    }

    /// The text that it has taken and not written, where the rest cannot be read.
    pub(crate) fn unwritten(&self) -> String {
        let inside = match self.at {
            At::Word | At::BareKey => self.word.clone(),
            At::Escape { .. } => "\\".to_owned(),
            At::Quote { .. } => format!("'{}", self.spaces),
            At::OpenQuote { n, .. } | At::Marked { n, .. } => GEMMA_QUOTE.chars().take(n).collect(),
            _ => String::new(),
        };
        self.waiting.clone() + &inside
    }

    /// The number or word that it has taken and not written, where the answer ends.
    pub(crate) fn last_word(&self) -> String {
        match self.at {
            At::Word | At::BareKey => self.waiting.clone() + &self.word,
            _ => String::new(),
        }
    }

    fn push_before_value(&mut self, c: char, out: &mut String) -> Step {
        let is_first = self.containers.is_empty();
        match c {
            _ if c.is_whitespace() => {
                match (is_first, self.waiting.is_empty()) {
                    (true, _) => {}
                    (false, true) => out.push(c),
                    (false, false) => self.waiting.push(c),
                }
                return Step::Open;
            }
            ']' | ')' if self.ends(c) => return self.close(out),
            _ => {}
        }
        out.push_str(&std::mem::take(&mut self.waiting));
        match c {
            '{' => return self.open(Container::Object { close: '}' }, out),
            '(' if is_first && self.dialect == Dialect::Python => {
                return self.open(Container::Object { close: ')' }, out);
            }
            '[' => return self.open(Container::Array { close: ']' }, out),
            '(' if self.dialect == Dialect::Python => {
                return self.open(Container::Array { close: ')' }, out);
            }
            _ if self.begins_text(c, Role::Value, out) => {}
            '-' | '+' | '.' | '_' => self.begin_word(c),
            _ if c.is_alphanumeric() => self.begin_word(c),
            _ => return Step::Broken,
        }
        Step::Open
    }

    fn begin_word(&mut self, c: char) {
        self.word.clear();
        self.word.push(c);
        self.at = At::Word;
    }

    /// True if a text begins with this character.
    fn begins_text(&mut self, c: char, role: Role, out: &mut String) -> bool {
        match c {
            '"' | '\'' => {
                out.push('"');
                self.at = At::Text { quote: c, role };
                true
            }
            '<' if self.dialect == Dialect::Gemma => {
                self.at = At::OpenQuote { role, n: 1 };
                true
            }
            _ => false,
        }
    }

    fn open(&mut self, container: Container, out: &mut String) -> Step {
        if self.containers.len() == MAX_DEPTH {
            return Step::Broken;
        }
        match container {
            Container::Array { .. } => {
                out.push('[');
                self.at = At::Value;
            }
            Container::Object { .. } => {
                out.push('{');
                self.at = At::Key;
            }
        }
        self.containers.push(container);
        Step::Open
    }

    /// True if the character ends the innermost brackets.
    fn ends(&self, c: char) -> bool {
        let (Some(Container::Array { close }) | Some(Container::Object { close })) =
            self.containers.last()
        else {
            return false;
        };
        *close == c
    }

    fn close(&mut self, out: &mut String) -> Step {
        // A comma before a bracket is dropped.
        self.waiting.clear();
        match self.containers.pop() {
            Some(Container::Array { .. }) => out.push(']'),
            Some(Container::Object { .. }) => out.push('}'),
            None => return Step::Broken,
        }
        self.value_done()
    }

    fn value_done(&mut self) -> Step {
        self.at = At::After;
        if self.containers.is_empty() {
            Step::Done
        } else {
            Step::Open
        }
    }

    fn push_before_key(&mut self, c: char, out: &mut String) -> Step {
        if c.is_whitespace() {
            if self.waiting.is_empty() {
                out.push(c)
            } else {
                self.waiting.push(c)
            }
            return Step::Open;
        }
        if self.ends(c) {
            return self.close(out);
        }
        let is_bare = self.dialect != Dialect::Json && (c.is_alphabetic() || c == '_');
        if !is_bare && !matches!(c, '"' | '\'' | '<') {
            return Step::Broken;
        }
        out.push_str(&std::mem::take(&mut self.waiting));
        if is_bare {
            self.word.clear();
            self.word.push(c);
            self.at = At::BareKey;
            return Step::Open;
        }
        if self.begins_text(c, Role::Key, out) {
            Step::Open
        } else {
            Step::Broken
        }
    }

    fn push_bare_key(&mut self, c: char, out: &mut String) -> Step {
        let separator = match (self.dialect, c) {
            (Dialect::Python, '=') => ": ",
            (Dialect::Gemma, ':') => ":",
            _ if self.word.len() >= MAX_WORD || matches!(c, ',' | '}' | ')' | '\n') => {
                return Step::Broken;
            }
            _ => {
                self.word.push(c);
                return Step::Open;
            }
        };
        out.push_str(&Value::from(self.word.trim()).to_string());
        out.push_str(separator);
        self.at = At::Value;
        Step::Open
    }

    fn push_text(&mut self, c: char, quoted: QuotedText, out: &mut String) -> Step {
        let QuotedText { quote, role } = quoted;
        match c {
            '\\' => self.at = At::Escape { quote, role },
            '\'' if quote == '\'' => {
                self.spaces.clear();
                self.at = At::Quote { role };
            }
            '"' if quote == '"' => {
                out.push('"');
                return self.text_done(role);
            }
            _ => push_escaped(c, out),
        }
        Step::Open
    }

    fn text_done(&mut self, role: Role) -> Step {
        match role {
            Role::Value => self.value_done(),
            Role::Key => {
                self.at = At::Colon;
                Step::Open
            }
        }
    }

    fn push_escape(&mut self, c: char, quoted: QuotedText, out: &mut String) -> Step {
        let QuotedText { quote, role } = quoted;
        self.at = At::Text { quote, role };
        match c {
            '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => out.extend(['\\', c]),
            'u' => {
                out.push_str("\\u");
                self.at = At::Digits { quote, role, n: 4 };
            }
            'x' if self.dialect == Dialect::Python => {
                out.push_str("\\u00");
                self.at = At::Digits { quote, role, n: 2 };
            }
            '\'' => out.push(c),
            // JSON knows no other.
            _ => {
                out.push_str("\\\\");
                push_escaped(c, out);
            }
        }
        Step::Open
    }

    /// A single quote ends a string where what follows it can follow a string: models write
    /// apostrophes as they are.
    fn push_behind_quote(&mut self, c: char, role: Role, out: &mut String) -> Step {
        if c.is_whitespace() {
            self.spaces.push(c);
            return Step::Open;
        }
        let ends = match role {
            Role::Key => c == ':',
            Role::Value => c == ',' || self.ends(c),
        };
        if ends {
            out.push('"');
            return match self.text_done(role) {
                Step::Open => self.push(c, out),
                // It was the whole value.
                _ => Step::Behind,
            };
        }
        out.push('\'');
        for space in std::mem::take(&mut self.spaces).chars() {
            push_escaped(space, out);
        }
        self.at = At::Text { quote: '\'', role };
        self.push_text(c, QuotedText { quote: '\'', role }, out)
    }

    fn push_marked(&mut self, c: char, role: Role, n: usize, out: &mut String) -> Step {
        let mut rest = GEMMA_QUOTE.chars().skip(n);
        if rest.next() == Some(c) {
            self.at = At::Marked { role, n: n + 1 };
            if rest.next().is_none() {
                out.push('"');
                return self.text_done(role);
            }
            return Step::Open;
        }
        // What looked like the quote is text.
        GEMMA_QUOTE
            .chars()
            .take(n)
            .for_each(|c| push_escaped(c, out));
        let begins = GEMMA_QUOTE.starts_with(c);
        if !begins {
            push_escaped(c, out);
        }
        self.at = At::Marked {
            role,
            n: usize::from(begins),
        };
        Step::Open
    }

    fn push_after(&mut self, c: char, out: &mut String) -> Step {
        match c {
            _ if c.is_whitespace() => {
                self.waiting.push(c);
                Step::Open
            }
            ',' => {
                self.waiting.push(',');
                self.at = match self.containers.last() {
                    Some(Container::Object { .. }) => At::Key,
                    _ => At::Value,
                };
                Step::Open
            }
            _ if self.ends(c) => {
                let waiting = std::mem::take(&mut self.waiting);
                out.push_str(&waiting);
                self.close(out)
            }
            _ => Step::Broken,
        }
    }

    fn push_word(&mut self, c: char, out: &mut String) -> Step {
        if c.is_alphanumeric() || matches!(c, '-' | '+' | '.' | '_') {
            self.word.push(c);
            return if self.word.len() > MAX_WORD {
                Step::Broken
            } else {
                Step::Open
            };
        }
        match self.word.as_str() {
            "true" | "True" => out.push_str("true"),
            "false" | "False" => out.push_str("false"),
            "null" | "None" => out.push_str("null"),
            word => match serde_json::from_str::<Value>(word) {
                Ok(Value::Number(_)) => out.push_str(word),
                _ => return Step::Broken,
            },
        }
        match self.value_done() {
            Step::Open => self.push(c, out),
            _ => Step::Behind,
        }
    }
}

/// In which string a character is.
#[derive(Clone, Copy)]
struct QuotedText {
    quote: char,
    role: Role,
}

/// A character of a JSON string.
pub(crate) fn push_escaped(c: char, out: &mut String) {
    match c {
        '"' => out.push_str("\\\""),
        '\\' => out.push_str("\\\\"),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        _ if u32::from(c) < 0x20 => out.push_str(&format!("\\u{:04x}", u32::from(c))),
        _ => out.push(c),
    }
}

#[cfg(test)]
mod tests;
