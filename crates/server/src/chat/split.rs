//! [`ChatSplitter`]: splits one answer into its parts as it comes.
//!
//! Invariant: what was given out is never taken back, so text waits where it may begin a mark. Knows
//! the order of sections; what is in a call is read elsewhere.

use std::ops::Range;

use super::call::{CallEvent, JsonCall, Place, ValueScanner};
use super::harmony::{self, Harmony};
use super::header::{self, Header};
use super::xml::{Step, XmlCall};
use super::{Marks, ToolFormat, reasoning_marks};
use crate::generate::{CallNumber, Tool};

const PYTHON_TAG: &str = "<|python_tag|>";
const FENCE: &str = "```";

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// What the reader gets.
    Text(String),
    /// What the model thought before.
    Reasoning(String),
    /// A call begins.
    ToolStart { index: usize, name: String },
    /// The next part of its arguments, which are JSON.
    ToolArguments { index: usize, text: String },
}

/// Where an answer is.
#[derive(Clone, Debug)]
enum State {
    /// Only white space has come.
    Start,
    /// Reasoning, until this mark.
    Reasoning(&'static str),
    Text,
    Call(JsonCall),
    /// Before the arguments: the name of a tool.
    Header,
    Arguments(ValueScanner),
    Xml(XmlCall),
    AfterCall,
}

/// Splits one answer.
#[derive(Clone, Debug)]
pub(crate) struct ChatSplitter {
    marks: Vec<Marks>,
    format: Option<ToolFormat>,
    /// The tools that there are.
    tools: Vec<Tool>,
    /// Set where answers are messages of channels, and then it does everything.
    harmony: Option<Harmony>,
    state: State,
    /// Text that was not decided about.
    held: String,
    /// The text of a call whose name has not come.
    raw: String,
    n_calls: usize,
    /// How many calls are given out.
    number: CallNumber,
    /// Bytes of the answer so far.
    n_bytes: usize,
    /// Bytes of the answer up to the end of its reasoning, with the mark that ends it.
    n_reasoning_bytes: usize,
    /// Whether the call of the state has its name.
    has_started: bool,
    /// Whether calls stand in a list.
    in_list: bool,
    /// Whether white space is dropped, between sections.
    trims: bool,
    parts: Vec<Part>,
}

impl ChatSplitter {
    /// A splitter of the answer to this prompt, by a model with this template.
    pub(crate) fn new(
        template: &str,
        prompt: &str,
        tools: Option<(ToolFormat, Vec<Tool>)>,
    ) -> Self {
        let marks = reasoning_marks(template);
        let (format, tools) = tools.map_or((None, Vec::new()), |(f, tools)| (Some(f), tools));
        let has_channels = format != Some(ToolFormat::Forced) && harmony::is_of(template);
        let end = prompt.trim_end();
        let open = marks.iter().find(|pair| end.ends_with(pair.open));
        let (state, trims) = match (format, open) {
            (Some(ToolFormat::Forced), _) => (State::Call(JsonCall::new()), false),
            (_, Some(pair)) => (State::Reasoning(pair.close), true),
            _ => (State::Start, false),
        };
        Self {
            marks,
            format,
            tools,
            harmony: has_channels.then(|| Harmony::new(format)),
            state,
            held: String::new(),
            raw: String::new(),
            n_calls: 0,
            number: CallNumber::Several,
            n_bytes: 0,
            n_reasoning_bytes: 0,
            has_started: false,
            in_list: false,
            trims,
            parts: Vec::new(),
        }
    }

    /// The same with so many calls at most: later ones are dropped.
    pub(crate) fn with_calls(mut self, number: CallNumber) -> Self {
        self.number = number;
        self
    }

    /// Whether there are tools.
    pub(crate) fn has_tools(&self) -> bool {
        self.format.is_some()
    }

    /// Whether tools were called.
    pub(crate) fn has_calls(&self) -> bool {
        match &self.harmony {
            Some(harmony) => harmony.has_calls(),
            None => self.n_calls > 0,
        }
    }

    /// Where reasoning stands in the answer, in bytes and with the marks around it.
    pub(crate) fn reasoning_bytes(&self) -> Vec<Range<usize>> {
        match (&self.harmony, &self.state) {
            (Some(harmony), _) => harmony.reasoning(),
            (None, State::Reasoning(_)) => std::iter::once(0..self.n_bytes).collect(),
            (None, _) => std::iter::once(0..self.n_reasoning_bytes).collect(),
        }
    }

    /// The parts that a piece of text completes.
    pub(crate) fn push(&mut self, piece: &str) -> Vec<Part> {
        let parts = self.push_all(piece);
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
        if let Some(harmony) = &mut self.harmony {
            return harmony.push(piece);
        }
        self.n_bytes += piece.len();
        self.held.push_str(piece);
        while self.step() {}
        std::mem::take(&mut self.parts)
    }

    /// What was held back.
    pub(crate) fn finish(&mut self) -> Vec<Part> {
        let parts = self.finish_all();
        self.given(parts)
    }

    fn finish_all(&mut self) -> Vec<Part> {
        if let Some(harmony) = &mut self.harmony {
            return harmony.finish();
        }
        let held = std::mem::take(&mut self.held);
        let raw = std::mem::take(&mut self.raw);
        match &self.state {
            State::Reasoning(_) => self.add_reasoning(held.trim_end()),
            State::Start | State::Text if self.trims => self.add_text(held.trim_start()),
            State::Start | State::Text => self.add_text(&held),
            State::Call(_) | State::Header | State::Xml(_) if !self.has_started => {
                self.add_text(&(raw + &held));
            }
            State::Call(_)
            | State::Header
            | State::Arguments(_)
            | State::Xml(_)
            | State::AfterCall => {}
        }
        std::mem::take(&mut self.parts)
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

    fn add_name(&mut self, name: String) {
        self.has_started = true;
        self.raw.clear();
        let index = self.n_calls;
        self.n_calls += 1;
        self.parts.push(Part::ToolStart { index, name });
    }

    fn add_arguments(&mut self, more: &str) {
        let index = self.n_calls.saturating_sub(1);
        match self.parts.last_mut() {
            Some(Part::ToolArguments { text, .. }) => text.push_str(more),
            _ => self.parts.push(Part::ToolArguments {
                index,
                text: more.to_owned(),
            }),
        }
    }

    /// Decides about what is held; `false` where more is needed.
    fn step(&mut self) -> bool {
        if self.trims {
            let text = self.held.trim_start();
            self.held = text.to_owned();
            if self.held.is_empty() {
                return false;
            }
        }
        match &self.state {
            State::Start => self.step_start(),
            State::Reasoning(close) => self.step_reasoning(close),
            State::Text => self.step_text(),
            State::Call(_) => self.step_call(),
            State::Header => self.step_header(),
            State::Arguments(_) => self.step_arguments(),
            State::Xml(_) => self.step_xml(),
            State::AfterCall => self.step_after_call(),
        }
    }

    fn step_start(&mut self) -> bool {
        let begun = self.held.trim_start();
        if begun.is_empty() {
            return false;
        }
        let is_llama = self.format == Some(ToolFormat::Llama);
        let opened = self.marks.iter().find(|pair| begun.starts_with(pair.open));
        if let Some(pair) = opened.filter(|_| !self.has_calls()) {
            let (close, rest) = (pair.close, begun.get(pair.open.len()..).unwrap_or_default());
            self.held = rest.to_owned();
            self.state = State::Reasoning(close);
            self.trims = true;
            return true;
        }
        let may_open = self.marks.iter().any(|pair| pair.open.starts_with(begun));
        if may_open || (is_llama && PYTHON_TAG.starts_with(begun)) {
            return false;
        }
        if is_llama {
            if let Some(rest) = begun.strip_prefix(PYTHON_TAG) {
                self.held = rest.to_owned();
                self.begin_call(PYTHON_TAG, State::Call(JsonCall::new()));
                return true;
            }
            if begun.starts_with('{') {
                self.begin_call("", State::Call(JsonCall::new()));
                return true;
            }
        }
        self.state = State::Text;
        true
    }

    fn step_reasoning(&mut self, close: &'static str) -> bool {
        self.trims = false;
        if let Some(at) = self.held.find(close) {
            let (reasoning, rest) = self.held.split_at(at);
            let reasoning = reasoning.trim_end().to_owned();
            self.held = rest.get(close.len()..).unwrap_or_default().to_owned();
            self.n_reasoning_bytes = self.n_bytes - self.held.len();
            self.add_reasoning(&reasoning);
            self.state = State::Start;
            self.trims = true;
            return true;
        }
        let n = undecided(&self.held, &[close], LastSpaces::Held);
        let ready = take_front(&mut self.held, n);
        self.add_reasoning(&ready);
        false
    }

    fn step_text(&mut self) -> bool {
        self.trims = false;
        let Some(format) = self.format else {
            let text = std::mem::take(&mut self.held);
            self.add_text(&text);
            return false;
        };
        let open = format.open();
        let marks: Vec<&str> = open
            .into_iter()
            .chain(format.noise().iter().copied())
            .collect();
        if let Some((at, mark)) = find_first(&self.held, &marks) {
            let (text, rest) = self.held.split_at(at);
            let text = text.trim_end().to_owned();
            self.held = rest.get(mark.len()..).unwrap_or_default().to_owned();
            self.add_text(&text);
            if Some(mark) == open {
                let state = match format {
                    ToolFormat::Mistral | ToolFormat::DeepSeek => State::Header,
                    ToolFormat::Xml => State::Xml(XmlCall::new()),
                    _ => State::Call(JsonCall::new()),
                };
                self.begin_call(mark, state);
            } else {
                self.trims = true;
            }
            return true;
        }
        let spaces = match marks.is_empty() {
            true => LastSpaces::Given,
            false => LastSpaces::Held,
        };
        let n = undecided(&self.held, &marks, spaces);
        let ready = take_front(&mut self.held, n);
        self.add_text(&ready);
        false
    }

    fn begin_call(&mut self, mark: &str, state: State) {
        self.raw = mark.to_owned();
        self.has_started = false;
        self.trims = false;
        self.state = state;
    }

    fn step_call(&mut self) -> bool {
        let held = std::mem::take(&mut self.held);
        let State::Call(mut call) = self.state.clone() else {
            return false;
        };
        for (at, c) in held.char_indices() {
            let mut events = Vec::new();
            if !self.has_started {
                self.raw.push(c);
            }
            call.push(c, &mut events);
            let is_llama = self.format == Some(ToolFormat::Llama);
            for event in events {
                match event {
                    CallEvent::Name(name) if is_llama && !self.has_tool(&name) => {
                        return self.is_no_call(&held, at + c.len_utf8());
                    }
                    CallEvent::Name(name) => self.add_name(name),
                    CallEvent::Arguments(text) => self.add_arguments(&text),
                }
            }
            let rest = at + c.len_utf8();
            if call.is_broken() && !self.has_started {
                return self.is_no_call(&held, rest);
            }
            if call.is_done() || call.is_broken() {
                self.held = held.get(rest..).unwrap_or_default().to_owned();
                self.state = State::AfterCall;
                return true;
            }
        }
        self.state = State::Call(call);
        false
    }

    fn has_tool(&self, name: &str) -> bool {
        self.tools.iter().any(|tool| tool.name == name)
    }

    fn step_xml(&mut self) -> bool {
        let State::Xml(mut call) = self.state.clone() else {
            return false;
        };
        let mut events = Vec::new();
        let step = call.step(&mut self.held, &self.tools, &mut events);
        for event in events {
            match event {
                CallEvent::Name(name) => self.add_name(name),
                CallEvent::Arguments(text) => self.add_arguments(&text),
            }
        }
        match step {
            Step::Open | Step::Read => self.state = State::Xml(call),
            Step::Done => self.state = State::AfterCall,
            Step::Broken => {
                let raw = std::mem::take(&mut self.raw);
                self.add_text(&raw);
                self.state = State::Text;
            }
        }
        step != Step::Open
    }

    /// What looked like a call is text.
    fn is_no_call(&mut self, held: &str, rest: usize) -> bool {
        let raw = std::mem::take(&mut self.raw);
        self.add_text(&raw);
        self.held = held.get(rest..).unwrap_or_default().to_owned();
        self.state = State::Text;
        true
    }

    /// The name of a tool before its arguments, or a list of calls.
    fn step_header(&mut self) -> bool {
        let read = match self.format {
            Some(ToolFormat::Mistral) => header::mistral(&self.held),
            _ => header::deepseek(&self.held),
        };
        match read {
            Header::Open => false,
            Header::List { rest } => {
                self.held = rest.to_owned();
                self.in_list = true;
                self.raw.push('[');
                self.state = State::Call(JsonCall::new());
                true
            }
            Header::Name { name, rest } => {
                let name = name.to_owned();
                self.held = rest.to_owned();
                self.begin_arguments(name)
            }
        }
    }

    fn begin_arguments(&mut self, name: String) -> bool {
        self.add_name(name);
        self.state = State::Arguments(ValueScanner::default());
        true
    }

    fn step_arguments(&mut self) -> bool {
        let State::Arguments(mut scanner) = self.state.clone() else {
            return false;
        };
        let held = std::mem::take(&mut self.held);
        for (at, c) in held.char_indices() {
            let place = scanner.push(c);
            if matches!(place, Place::Inside | Place::Last) {
                self.add_arguments(c.encode_utf8(&mut [0; 4]));
            }
            if matches!(place, Place::Last | Place::Behind) {
                let rest = at + c.len_utf8();
                self.held = held.get(rest..).unwrap_or_default().to_owned();
                self.state = State::AfterCall;
                return true;
            }
        }
        self.state = State::Arguments(scanner);
        false
    }

    fn step_after_call(&mut self) -> bool {
        let begun = self.held.trim_start();
        let first = begun.chars().next();
        match (self.format, first) {
            (_, None) => false,
            (Some(ToolFormat::Forced), Some('{')) => {
                self.begin_call("", State::Call(JsonCall::new()));
                true
            }
            (Some(ToolFormat::Forced), _) => {
                self.held.clear();
                false
            }
            (Some(ToolFormat::Mistral), Some(',')) if self.in_list => {
                self.held = begun.get(1..).unwrap_or_default().to_owned();
                self.begin_call("", State::Call(JsonCall::new()));
                true
            }
            (Some(ToolFormat::Mistral), Some(']')) if self.in_list => {
                self.held = begun.get(1..).unwrap_or_default().to_owned();
                self.in_list = false;
                self.end_calls()
            }
            (Some(ToolFormat::Llama), Some(';')) => {
                self.held = begun.get(1..).unwrap_or_default().to_owned();
                true
            }
            (Some(ToolFormat::Llama), Some('{')) => {
                self.begin_call("", State::Call(JsonCall::new()));
                true
            }
            (Some(ToolFormat::DeepSeek), Some('`')) => match begun.strip_prefix(FENCE) {
                Some(rest) => {
                    self.held = rest.to_owned();
                    self.end_calls()
                }
                None if FENCE.starts_with(begun) => false,
                None => self.end_calls(),
            },
            _ => self.end_calls(),
        }
    }

    fn end_calls(&mut self) -> bool {
        self.state = State::Text;
        self.trims = true;
        true
    }
}

/// What becomes of white space at the end of what came so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LastSpaces {
    /// It waits: a mark would swallow it.
    Held,
    /// It is given out.
    Given,
}

/// How many bytes of a text can be given out: without its longest end that may be the beginning of a
/// mark, and where a mark would swallow it, without white space at its end.
pub(super) fn undecided(text: &str, marks: &[&str], spaces: LastSpaces) -> usize {
    let is_open = |at: &usize| {
        let end = text.get(*at..).unwrap_or_default();
        !end.is_empty() && marks.iter().any(|mark| mark.starts_with(end))
    };
    let mut starts = text.char_indices().map(|(at, _)| at);
    let n = starts.find(is_open).unwrap_or(text.len());
    match spaces {
        LastSpaces::Held => text.get(..n).unwrap_or_default().trim_end().len(),
        LastSpaces::Given => n,
    }
}

/// Where the first of these marks stands in a text, and which it is.
pub(super) fn find_first<'m>(text: &str, marks: &[&'m str]) -> Option<(usize, &'m str)> {
    let found = marks
        .iter()
        .filter_map(|&mark| Some((text.find(mark)?, mark)));
    found.min()
}

/// Takes the first bytes of a text out of it.
pub(super) fn take_front(held: &mut String, n: usize) -> String {
    let rest = held.split_off(n);
    std::mem::replace(held, rest)
}
