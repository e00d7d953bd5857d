//! [`ChatSplitter`]: splits one answer into its parts as it comes.
//!
//! Invariant: what was given out is never taken back, so text waits where it may begin a mark.
//! Knows the order of sections; what is in a call is read elsewhere.

mod bare;
mod calls;

use std::ops::Range;

use self::bare::BareAnswer;
use crate::family::{Family, Start};
use crate::harmony::Harmony;
use crate::marks::{LastSpaces, find_first, take_front, undecided};
use crate::reader::CallReader;
use crate::style::Style;
use crate::table::FORCED;
use crate::tool::{CallNumber, Tool};

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Text for the reader.
    Text(String),
    /// The model's thoughts before it.
    Reasoning(String),
    /// A call begins.
    ToolStart {
        /// The number of the call in the answer, from 0 on.
        index: usize,
        /// The tool.
        name: String,
        /// The model's id of the call, where it writes one.
        id: Option<String>,
    },
    /// The next part of the arguments of the call that began last, which are JSON.
    ToolArguments {
        /// The number of the call in the answer.
        index: usize,
        /// A part of a JSON object.
        text: String,
    },
}

/// The calls that an answer may have.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Calls {
    /// None.
    #[default]
    None,
    /// Calls of these tools, in the form of the model's family.
    Free(Vec<Tool>),
    /// The answer is calls and nothing else, each a JSON object, as a grammar demands.
    Forced,
}

/// The treatment of white space around reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spaces {
    Dropped,
    Kept,
}

/// The section in which an answer is.
#[derive(Clone, Debug)]
enum State {
    /// Only white space has come.
    Start,
    /// The text so far may be calls without the marks of the family, and nothing else.
    Bare(Box<BareAnswer>),
    /// Reasoning, until this mark.
    Reasoning(&'static str),
    /// In reasoning, behind what looks like a call. It is one where the reasoning does not end.
    Doubt(&'static str),
    Text,
    /// Between a mark before calls and the call.
    Between,
    /// Behind the mark of a call or a list of calls.
    Open,
    Call(CallReader),
    /// In the arguments of a call that cannot be read, which are given out as they are.
    Malformed,
    AfterCall,
}

/// Splits one answer.
#[derive(Clone, Debug)]
pub struct ChatSplitter {
    style: Style,
    /// The form of calls; `None` where none are read.
    family: Option<&'static Family>,
    /// The tools that there are.
    tools: Vec<Tool>,
    /// Set where answers are messages of channels: their text goes on to the rest.
    harmony: Option<Harmony>,
    /// Marks that are looked for in text.
    text_marks: Vec<&'static str>,
    state: State,
    /// Text that was not decided about.
    held: String,
    /// Bytes of it that were searched for the end of reasoning.
    n_searched: usize,
    /// The text of a call whose name has not come.
    raw: String,
    /// Bytes of it up to the end of its first mark.
    n_mark: usize,
    n_calls: usize,
    /// The model's ids of its calls.
    ids: Vec<String>,
    /// The number of calls that are given out.
    number: CallNumber,
    spaces: Spaces,
    /// Bytes of the answer so far.
    n_bytes: usize,
    /// The place of reasoning in it, with its marks.
    reasoning: Vec<Range<usize>>,
    /// True if the call of the state has its name.
    has_started: bool,
    /// True if the call has no mark, and so must be of a tool that there is.
    is_bare: bool,
    /// True if calls stand in a list.
    in_list: bool,
    /// True if white space is dropped, between sections.
    trims: bool,
    parts: Vec<Part>,
}

impl ChatSplitter {
    /// A splitter of the answer to this prompt, by a model with this template.
    pub fn new(template: &str, prompt: &str, calls: Calls) -> Self {
        let style = Style::of_template(template);
        let harmony = match &calls {
            Calls::Forced => None,
            _ => Harmony::of_template(template, &calls),
        };
        let (family, tools) = match calls {
            Calls::None => (None, Vec::new()),
            Calls::Free(tools) => (Family::of_template(template), tools),
            Calls::Forced => (Some(&FORCED), Vec::new()),
        };
        let mut splitter = Self {
            text_marks: text_marks(&style, family),
            style,
            family,
            tools,
            harmony,
            state: State::Start,
            held: String::new(),
            n_searched: 0,
            raw: String::new(),
            n_mark: 0,
            n_calls: 0,
            ids: Vec::new(),
            number: CallNumber::Several,
            spaces: Spaces::Dropped,
            n_bytes: 0,
            reasoning: Vec::new(),
            has_started: false,
            is_bare: false,
            in_list: false,
            trims: false,
            parts: Vec::new(),
        };
        splitter.begin(prompt.trim_end());
        splitter
    }

    /// The first state: the prompt may have begun reasoning, or a call.
    fn begin(&mut self, prompt: &str) {
        if self.is_forced() {
            self.state = State::Open;
            return;
        }
        let mut pairs = self.style.pairs.iter();
        if let Some(pair) = pairs.find(|pair| prompt.ends_with(pair.open)) {
            self.begin_reasoning(pair.close);
            return;
        }
        let opens = self.family.map_or(&[][..], |family| family.open);
        if opens.iter().any(|open| prompt.ends_with(open)) {
            self.state = State::Open;
        }
    }

    /// The same with so many calls at most: later ones are dropped.
    #[must_use]
    pub fn with_calls(mut self, number: CallNumber) -> Self {
        self.number = number;
        self
    }

    /// The same with all white space around reasoning.
    #[must_use]
    pub fn with_spaces(mut self) -> Self {
        self.spaces = Spaces::Kept;
        self.trims = false;
        self
    }

    /// True if calls are read.
    pub fn reads_calls(&self) -> bool {
        self.family.is_some() || self.harmony.as_ref().is_some_and(Harmony::reads_calls)
    }

    /// True if a control token with this text is a mark that it looks for, or a part of one.
    pub fn knows(&self, control: &str) -> bool {
        let pairs = self.style.pairs.iter();
        let mut pairs = pairs.flat_map(|pair| [pair.open, pair.close]);
        let mut channels = self.harmony.iter().flat_map(|_| Harmony::marks());
        let is_in = |mark: &str| !control.is_empty() && mark.contains(control);
        pairs.any(is_in) || self.text_marks.iter().any(|mark| is_in(mark)) || channels.any(is_in)
    }

    /// True if tools were called.
    pub fn has_calls(&self) -> bool {
        self.n_calls > 0 || self.harmony.as_ref().is_some_and(Harmony::has_calls)
    }

    /// The place of reasoning in the answer, in bytes and with the marks around it.
    pub fn reasoning_bytes(&self) -> Vec<Range<usize>> {
        if let Some(harmony) = &self.harmony {
            return harmony.reasoning();
        }
        let mut ranges = self.reasoning.clone();
        if let (State::Reasoning(_) | State::Doubt(_), Some(last)) =
            (&self.state, ranges.last_mut())
        {
            last.end = self.n_bytes;
        }
        ranges
    }

    /// The parts that a piece of text completes.
    pub fn push(&mut self, piece: &str) -> Vec<Part> {
        let parts = self.push_all(piece);
        self.given(parts)
    }

    /// The text that was held back.
    pub fn finish(&mut self) -> Vec<Part> {
        if let Some(harmony) = &mut self.harmony {
            let parts = harmony.finish();
            self.pass_on(parts);
        }
        self.finish_text();
        let parts = std::mem::take(&mut self.parts);
        self.given(parts)
    }

    /// The parts without those of calls that are too many.
    fn given(&self, mut parts: Vec<Part>) -> Vec<Part> {
        if self.number == CallNumber::One {
            parts.retain(|part| match part {
                Part::ToolStart { index, .. } | Part::ToolArguments { index, .. } => *index == 0,
                Part::Text(_) | Part::Reasoning(_) => true,
            });
        }
        parts
    }

    fn push_all(&mut self, piece: &str) -> Vec<Part> {
        match &mut self.harmony {
            Some(harmony) => {
                let parts = harmony.push(piece);
                self.pass_on(parts);
            }
            None => self.push_text(piece),
        }
        std::mem::take(&mut self.parts)
    }

    /// The texts of messages may have calls in them.
    fn pass_on(&mut self, parts: Vec<Part>) {
        for part in parts {
            match part {
                Part::Text(text) if self.family.is_some() => self.push_text(&text),
                part => self.parts.push(part),
            }
        }
    }

    fn push_text(&mut self, piece: &str) {
        self.n_bytes += piece.len();
        self.held.push_str(piece);
        while self.step() {}
    }

    fn finish_text(&mut self) {
        match self.state {
            State::Doubt(_) => self.finish_doubt(),
            State::Bare(_) => self.finish_bare(),
            _ => {}
        }
        let held = std::mem::take(&mut self.held);
        let raw = std::mem::take(&mut self.raw);
        match &self.state {
            State::Reasoning(_) | State::Doubt(_) => self.add_last_reasoning(&held),
            State::Start | State::Text if self.trims => self.add_text(held.trim_start()),
            State::Start | State::Text => self.add_text(&held),
            State::Between | State::Open => self.add_text(&(raw + &held)),
            State::Call(_) if !self.has_started => self.add_text(&(raw + &held)),
            State::Malformed => self.add_arguments(held.trim_end()),
            State::Call(reader) => {
                let last = reader.last_arguments(&held, &self.tools);
                self.add_arguments(&last);
            }
            State::AfterCall | State::Bare(_) => {}
        }
    }

    /// Reasoning has not ended: what looked like a call in it is one, where it can be read.
    fn finish_doubt(&mut self) {
        let mut other = self.clone();
        other.state = State::Text;
        other.trims = true;
        while other.step() {}
        other.finish_text();
        if other.n_calls > self.n_calls {
            if let Some(last) = other.reasoning.last_mut() {
                last.end = self.n_bytes - self.held.len();
            }
            *self = other;
        }
    }

    fn add_text(&mut self, text: &str) {
        match self.parts.last_mut() {
            _ if text.is_empty() => {}
            Some(Part::Text(last)) => last.push_str(text),
            _ => self.parts.push(Part::Text(text.to_owned())),
        }
    }

    fn add_reasoning(&mut self, text: &str) {
        match self.parts.last_mut() {
            _ if text.is_empty() => {}
            Some(Part::Reasoning(last)) => last.push_str(text),
            _ => self.parts.push(Part::Reasoning(text.to_owned())),
        }
    }

    /// Adds reasoning up to its end.
    fn add_last_reasoning(&mut self, text: &str) {
        self.add_reasoning(match self.spaces {
            Spaces::Dropped => text.trim_end(),
            Spaces::Kept => text,
        });
    }

    fn add_name(&mut self, name: String, id: Option<String>) {
        self.has_started = true;
        self.raw.clear();
        let index = self.n_calls;
        self.n_calls += 1;
        // A name that is given twice is none.
        let id = id.filter(|id| !self.ids.contains(id));
        self.ids.extend(id.clone());
        self.parts.push(Part::ToolStart { index, name, id });
    }

    fn add_arguments(&mut self, more: &str) {
        let index = self.n_calls.saturating_sub(1);
        match self.parts.last_mut() {
            _ if more.is_empty() => {}
            Some(Part::ToolArguments { text, .. }) => text.push_str(more),
            _ => self.parts.push(Part::ToolArguments {
                index,
                text: more.to_owned(),
            }),
        }
    }

    fn is_forced(&self) -> bool {
        self.family
            .is_some_and(|family| std::ptr::eq(family, &FORCED))
    }

    /// Drops bytes from the front of what is held.
    fn drop_front(&mut self, n: usize) {
        self.held.drain(..n);
    }

    /// Decides about what is held; `false` where more is needed.
    fn step(&mut self) -> bool {
        if self.trims {
            let n = self.held.len() - self.held.trim_start().len();
            self.drop_front(n);
            if self.held.is_empty() {
                return false;
            }
        }
        match &self.state {
            State::Start => self.step_start(),
            State::Bare(_) => self.step_bare(),
            State::Reasoning(close) => self.step_reasoning(close),
            State::Doubt(close) => self.step_doubt(close),
            State::Text => self.step_text(),
            State::Between => self.step_between(),
            State::Open => self.step_open(),
            State::Call(_) => self.step_call(),
            State::Malformed => self.step_malformed(),
            State::AfterCall => self.step_after_call(),
        }
    }

    fn step_start(&mut self) -> bool {
        let begun = self.held.trim_start();
        let n_spaces = self.held.len() - begun.len();
        if begun.is_empty() {
            return false;
        }
        let mut pairs = self.style.pairs.iter();
        if let Some(pair) = pairs.find(|pair| begun.starts_with(pair.open))
            && self.n_calls == 0
        {
            let (open, close) = (pair.open, pair.close);
            self.begin_reasoning(close);
            self.drop_front(n_spaces + open.len());
            return true;
        }
        if let Some(beginning) = self.style.beginning.filter(|_| self.family.is_none()) {
            if begun.starts_with(beginning) {
                self.drop_front(n_spaces + beginning.len());
                self.state = State::Text;
                return true;
            }
            if beginning.starts_with(begun) {
                return false;
            }
        }
        let mut pairs = self.style.pairs.iter();
        if pairs.any(|pair| pair.open.starts_with(begun)) {
            return false;
        }
        let start = self.family.map_or(Start::Marked, |family| family.start);
        if let Start::With(c) = start
            && begun.starts_with(c)
        {
            self.begin_call("", 0);
            self.is_bare = true;
            self.trims = true;
            return true;
        }
        if self.may_be_bare(begun) {
            self.begin_bare();
            return true;
        }
        self.state = State::Text;
        true
    }

    fn begin_reasoning(&mut self, close: &'static str) {
        let at = self.n_bytes - self.held.len();
        self.reasoning.push(at..at);
        self.state = State::Reasoning(close);
        self.n_searched = 0;
        self.trims = self.spaces == Spaces::Dropped;
    }

    /// The place of the end of reasoning in the text that is held.
    fn find_close(&self, close: &str) -> Option<usize> {
        let from = self.n_searched.saturating_sub(close.len());
        let from = self.held.floor_char_boundary(from);
        Some(from + self.held.get(from..)?.find(close)?)
    }

    fn end_reasoning(&mut self, at: usize, close: &str) {
        let reasoning = take_front(&mut self.held, at);
        self.drop_front(close.len());
        let end = self.n_bytes - self.held.len();
        if let Some(last) = self.reasoning.last_mut() {
            last.end = end;
        }
        self.add_last_reasoning(&reasoning);
        self.state = State::Start;
        self.n_searched = 0;
        self.trims = self.spaces == Spaces::Dropped;
    }

    fn step_reasoning(&mut self, close: &'static str) -> bool {
        self.trims = false;
        if let Some(at) = self.find_close(close) {
            self.end_reasoning(at, close);
            return true;
        }
        let mut marks = call_marks(self.family);
        if let Some((at, _)) = find_first(&self.held, &marks) {
            let before = self.held.get(..at).unwrap_or_default().trim_end().len();
            let ready = take_front(&mut self.held, before);
            self.add_reasoning(&ready);
            self.state = State::Doubt(close);
            return false;
        }
        marks.push(close);
        let n = undecided(&self.held, &marks, LastSpaces::Held);
        let ready = take_front(&mut self.held, n);
        self.add_reasoning(&ready);
        false
    }

    fn step_doubt(&mut self, close: &'static str) -> bool {
        if let Some(at) = self.find_close(close) {
            self.end_reasoning(at, close);
            return true;
        }
        self.n_searched = self.held.len();
        false
    }

    fn step_text(&mut self) -> bool {
        self.trims = false;
        if let Some((at, mark)) = find_first(&self.held, &self.text_marks) {
            let before = take_front(&mut self.held, at);
            let text = before.trim_end();
            let n_text = text.len();
            self.add_text(text);
            self.drop_front(mark.len());
            let mut pairs = self.style.pairs.iter();
            let is_silent = self.style.silent.contains(&mark);
            if let Some(pair) = pairs.find(|pair| pair.open == mark) {
                self.begin_reasoning(pair.close);
            } else if is_silent {
                self.trims = true;
            } else {
                let spaces = before.get(n_text..).unwrap_or_default();
                let is_open = self
                    .family
                    .is_some_and(|family| family.open.contains(&mark));
                self.begin_call(&format!("{spaces}{mark}"), spaces.len() + mark.len());
                if !is_open {
                    self.state = State::Between;
                }
            }
            return true;
        }
        let spaces = if self.text_marks.is_empty() {
            LastSpaces::Given
        } else {
            LastSpaces::Held
        };
        let n = undecided(&self.held, &self.text_marks, spaces);
        let ready = take_front(&mut self.held, n);
        self.add_text(&ready);
        false
    }
}

/// Marks that begin calls of a family.
fn call_marks(family: Option<&'static Family>) -> Vec<&'static str> {
    let marks = family.map(|family| family.open.iter().chain(family.before));
    marks.into_iter().flatten().copied().collect()
}

/// Marks to look for in text. Those of reasoning that are control tokens count wherever they are.
fn text_marks(style: &Style, family: Option<&'static Family>) -> Vec<&'static str> {
    let opens = style.pairs.iter().map(|pair| pair.open);
    let opens = opens.filter(|open| open.starts_with("<|"));
    let calls = call_marks(family).into_iter();
    calls
        .chain(style.silent.iter().copied())
        .chain(opens)
        .collect()
}
