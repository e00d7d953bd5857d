//! [`Harmony`]: splits answers that are messages with channels or recipients, of gpt-oss and
//! others.
//!
//! `<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…`: analysis
//! is reasoning, final and commentary are text, and a message to `functions.NAME` is a call. Where
//! there are no channels, a message to `self` is reasoning, and calls are in the text of messages.
//!
//! Invariant: as of [`crate::ChatSplitter`]. What is no message of this form comes out as text.

use std::ops::Range;

use crate::marks::{LastSpaces, find_first, take_front, undecided};
use crate::split::{Calls, Part};
use crate::value::{Dialect, Step, ValueReader};

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const CONSTRAIN: &str = "<|constrain|>";
const END: &str = "<|end|>";
const CALL: &str = "<|call|>";
const RETURN: &str = "<|return|>";
/// Marks that end messages of models without channels.
const END_OF_MESSAGE: &str = "<|eom|>";
const END_OF_TURN: &str = "<|eot|>";
/// Whom reasoning is to, where there are no channels.
const SELF: &str = "to=self";

/// What ends a message.
const ENDS: [&str; 6] = [END, START, CALL, RETURN, END_OF_MESSAGE, END_OF_TURN];

/// A header is longer than this in no answer.
const MAX_HEADER: usize = 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Body {
    Reasoning,
    Text,
    Call,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Before the first message: the prompt ends with the beginning of its header.
    First,
    /// In the header of a message.
    Header,
    /// In a message.
    Message(Body),
    /// Between two messages.
    Between,
}

/// True if messages to functions are the calls of models with this template.
pub(crate) fn calls_by(template: &str) -> bool {
    template.contains(CHANNEL) && template.contains(MESSAGE)
}

/// True if models with this template write messages with recipients, and no channels.
pub(crate) fn has_recipients(template: &str) -> bool {
    !calls_by(template) && template.contains(SELF) && template.contains(MESSAGE)
}

/// Splits one answer.
#[derive(Clone, Debug)]
pub(crate) struct Harmony {
    state: State,
    /// Text that was not decided about.
    held: String,
    /// Bytes of the answer so far.
    n_bytes: usize,
    /// Where reasoning stands in it, with its marks.
    reasoning: Vec<Range<usize>>,
    /// Whether there are tools; without, a message to a function is text or reasoning.
    has_tools: bool,
    n_calls: usize,
    /// Whether the call has arguments.
    has_arguments: bool,
    /// Reads them; `None` where they cannot be read, or have ended.
    arguments: Option<ValueReader>,
    parts: Vec<Part>,
}

impl Harmony {
    /// A splitter of answers of models with this template, where they are messages.
    pub(crate) fn of_template(template: &str, calls: &Calls) -> Option<Self> {
        let has_channels = calls_by(template);
        (has_channels || has_recipients(template)).then(|| Self {
            has_tools: has_channels && *calls != Calls::None,
            state: State::First,
            held: String::new(),
            n_bytes: 0,
            reasoning: Vec::new(),
            n_calls: 0,
            has_arguments: false,
            arguments: None,
            parts: Vec::new(),
        })
    }

    /// The marks that are looked for.
    pub(crate) fn marks() -> impl Iterator<Item = &'static str> {
        [CHANNEL, MESSAGE, CONSTRAIN].into_iter().chain(ENDS)
    }

    /// True if messages to functions are calls.
    pub(crate) fn reads_calls(&self) -> bool {
        self.has_tools
    }

    pub(crate) fn has_calls(&self) -> bool {
        self.n_calls > 0
    }

    /// Where reasoning stands in the answer, in bytes.
    pub(crate) fn reasoning(&self) -> Vec<Range<usize>> {
        let mut ranges = self.reasoning.clone();
        if let (State::Message(Body::Reasoning), Some(last)) = (self.state, ranges.last_mut()) {
            last.end = self.n_bytes;
        }
        ranges
    }

    pub(crate) fn push(&mut self, piece: &str) -> Vec<Part> {
        self.n_bytes += piece.len();
        self.held.push_str(piece);
        while self.step() {}
        std::mem::take(&mut self.parts)
    }

    pub(crate) fn finish(&mut self) -> Vec<Part> {
        let held = std::mem::take(&mut self.held);
        match self.state {
            State::Message(body) => {
                self.add(body, &held);
                self.end_message();
            }
            State::First => self.add(Body::Text, &held),
            // A header that was cut off is no text.
            State::Header | State::Between => {}
        }
        std::mem::take(&mut self.parts)
    }

    fn add(&mut self, body: Body, text: &str) {
        if text.is_empty() {
            return;
        }
        let index = self.n_calls.saturating_sub(1);
        let part = match body {
            Body::Reasoning => Part::Reasoning(text.to_owned()),
            Body::Text => Part::Text(text.to_owned()),
            Body::Call => {
                let text = self.mended(text);
                if text.is_empty() {
                    return;
                }
                self.has_arguments = true;
                Part::ToolArguments { index, text }
            }
        };
        self.parts.push(part);
    }

    /// Arguments with small faults mended, as far as they can be read.
    fn mended(&mut self, text: &str) -> String {
        let Some(reader) = &mut self.arguments else {
            return text.to_owned();
        };
        let mut json = String::new();
        for (at, c) in text.char_indices() {
            let step = reader.push(c, &mut json);
            let rest = match step {
                Step::Open => continue,
                Step::Done => at + c.len_utf8(),
                Step::Behind | Step::Broken => at,
            };
            if step == Step::Broken {
                json.push_str(&reader.unwritten());
            }
            self.arguments = None;
            json.push_str(text.get(rest..).unwrap_or_default());
            return json;
        }
        json
    }

    /// Where what is held begins in the answer.
    fn at(&self) -> usize {
        self.n_bytes - self.held.len()
    }

    /// Decides about what is held; `false` where more is needed.
    fn step(&mut self) -> bool {
        match self.state {
            State::First => self.step_first(),
            State::Header => self.step_header(),
            State::Message(body) => self.step_message(body),
            State::Between => self.step_between(),
        }
    }

    /// A header goes on after `<|start|>assistant`, which the prompt has. What is no header is
    /// text.
    fn step_first(&mut self) -> bool {
        let begins = [CHANNEL, " to=", START, MESSAGE];
        if begins.iter().any(|begin| self.held.starts_with(begin)) {
            self.state = State::Header;
            return true;
        }
        let is_open = begins.iter().any(|begin| begin.starts_with(&self.held));
        if !is_open {
            self.state = State::Message(Body::Text);
        }
        !is_open
    }

    fn step_header(&mut self) -> bool {
        let Some(end) = self.held.find(MESSAGE) else {
            if self.held.len() > MAX_HEADER {
                self.state = State::Message(Body::Text);
                return true;
            }
            return false;
        };
        let at = self.at();
        let header = take_front(&mut self.held, end);
        take_front(&mut self.held, MESSAGE.len());
        let body = match (
            recipient(&header).filter(|_| self.has_tools),
            channel(&header),
        ) {
            (Some(name), _) => {
                let name = name.to_owned();
                let index = self.n_calls;
                self.n_calls += 1;
                self.has_arguments = false;
                self.arguments = Some(ValueReader::new(Dialect::Json));
                let id = None;
                self.parts.push(Part::ToolStart { index, name, id });
                Body::Call
            }
            (None, channel) if channel == "analysis" || header.contains(SELF) => {
                self.reasoning.push(at..at);
                Body::Reasoning
            }
            (None, _) => Body::Text,
        };
        self.state = State::Message(body);
        true
    }

    fn step_message(&mut self, body: Body) -> bool {
        if let Some((at, end)) = find_first(&self.held, &ENDS) {
            let text = take_front(&mut self.held, at);
            // The next header begins with its mark.
            if end != START {
                take_front(&mut self.held, end.len());
            }
            self.add(body, &text);
            self.end_message();
            return true;
        }
        let n = undecided(&self.held, &ENDS, LastSpaces::Given);
        let text = take_front(&mut self.held, n);
        self.add(body, &text);
        false
    }

    fn end_message(&mut self) {
        let at = self.at();
        match self.state {
            State::Message(Body::Reasoning) => {
                if let Some(last) = self.reasoning.last_mut() {
                    last.end = at;
                }
            }
            State::Message(Body::Call) if !self.has_arguments => self.add(Body::Call, "{}"),
            State::Message(Body::Call) => {
                let last = self.arguments.take();
                self.add(
                    Body::Call,
                    &last.map_or(String::new(), |last| last.last_word()),
                );
            }
            _ => {}
        }
        self.state = State::Between;
    }

    fn step_between(&mut self) -> bool {
        if let Some(rest) = self.held.trim_start().strip_prefix(START) {
            self.held = rest.to_owned();
            self.state = State::Header;
            return true;
        }
        let begun = self.held.trim_start();
        if START.starts_with(begun) {
            return false;
        }
        if begun.starts_with(CHANNEL) {
            self.state = State::Header;
        } else {
            self.state = State::Message(Body::Text);
        }
        true
    }
}

/// The function that a message is to.
fn recipient(header: &str) -> Option<&str> {
    let (_, rest) = header.split_once("to=")?;
    let end = rest.find(|c: char| c.is_whitespace() || c == '<');
    let name = rest.get(..end.unwrap_or(rest.len()))?;
    let name = name.strip_prefix("functions.").unwrap_or(name);
    (!name.is_empty()).then_some(name)
}

/// The channel of a message; the final one where none is named.
fn channel(header: &str) -> &str {
    let Some((_, rest)) = header.split_once(CHANNEL) else {
        return "final";
    };
    let rest = rest.split_once(CONSTRAIN).map_or(rest, |(name, _)| name);
    rest.split_whitespace().next().unwrap_or("final")
}
