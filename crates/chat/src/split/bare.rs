//! [`BareAnswer`]: an answer that is nothing but JSON of given tools, bare or in a fence, as models
//! write calls that do not know their own form well.
//!
//! Invariant: only a whole answer is read so. It is held back as long as it can still be one, and
//! is text, unchanged, once it cannot.

use super::{ChatSplitter, State};
use crate::family::Start;
use crate::json_call::JsonCall;
use crate::reader::{CallEvent, Progress};
use crate::tool::Tool;

/// The first lines of fences around calls.
const FENCES: [&str; 3] = ["```json", "```tool_call", "```"];
const FENCE_END: &str = "```";

/// The place in an answer.
#[derive(Clone, Debug)]
enum Place {
    /// Before a fence, a list or a call.
    Before,
    /// In a fence or a list, before a call.
    Inside,
    Call(JsonCall),
    /// Behind a call.
    Behind,
}

/// The reading of the text so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// More is needed.
    Open,
    /// A part was read.
    Read,
    /// It is no answer of calls alone.
    Text,
}

/// An answer that may be calls alone.
#[derive(Clone, Debug)]
pub(super) struct BareAnswer {
    place: Place,
    /// All of its text that was read.
    raw: String,
    /// Names and arguments of the calls so far.
    events: Vec<CallEvent>,
    in_fence: bool,
    in_list: bool,
}

impl BareAnswer {
    fn new() -> Self {
        Self {
            place: Place::Before,
            raw: String::new(),
            events: Vec::new(),
            in_fence: false,
            in_list: false,
        }
    }

    /// Moves bytes from the front of what is held to what was read.
    fn take(&mut self, held: &mut String, n: usize) {
        self.raw.extend(held.drain(..n));
    }

    fn step(&mut self, held: &mut String, tools: &[Tool]) -> Verdict {
        let n_spaces = held.len() - held.trim_start().len();
        let in_call = matches!(self.place, Place::Call(_));
        if n_spaces > 0 && !in_call {
            self.take(held, n_spaces);
        }
        if held.is_empty() {
            return Verdict::Open;
        }
        match &self.place {
            Place::Before if held.starts_with('`') => self.step_fence(held),
            Place::Before if held.starts_with('[') => {
                self.in_list = true;
                self.place = Place::Inside;
                self.take(held, 1);
                Verdict::Read
            }
            Place::Before | Place::Inside if held.starts_with('{') => {
                self.place = Place::Call(JsonCall::new());
                Verdict::Read
            }
            Place::Before | Place::Inside => Verdict::Text,
            Place::Call(_) => self.step_call(held, tools),
            Place::Behind => self.step_behind(held),
        }
    }

    fn step_fence(&mut self, held: &mut String) -> Verdict {
        let Some((line, _)) = held.split_once('\n') else {
            let line = held.trim_end();
            let may_be = FENCES.iter().any(|fence| fence.starts_with(line));
            return if may_be { Verdict::Open } else { Verdict::Text };
        };
        if self.in_fence || !FENCES.contains(&line.trim_end()) {
            return Verdict::Text;
        }
        let n = line.len() + 1;
        self.take(held, n);
        self.in_fence = true;
        Verdict::Read
    }

    fn step_call(&mut self, held: &mut String, tools: &[Tool]) -> Verdict {
        let Place::Call(call) = &mut self.place else {
            return Verdict::Text;
        };
        let before = held.clone();
        let first = self.events.len();
        let progress = call.step(held, &mut self.events);
        let n_read = before.len() - held.len();
        self.raw.push_str(before.get(..n_read).unwrap_or_default());
        let new = self.events.get(first..).unwrap_or_default();
        let is_known = new.iter().all(|event| match event {
            CallEvent::Name { name, .. } => tools.iter().any(|tool| tool.name == *name),
            CallEvent::Arguments(_) => true,
        });
        match progress {
            _ if call.is_odd() || !is_known => Verdict::Text,
            Progress::Open => Verdict::Open,
            Progress::Done => {
                self.place = Place::Behind;
                Verdict::Read
            }
            Progress::Read | Progress::Text | Progress::Broken => Verdict::Text,
        }
    }

    fn step_behind(&mut self, held: &mut String) -> Verdict {
        if self.in_list && held.starts_with(',') {
            self.place = Place::Inside;
            self.take(held, 1);
        } else if self.in_list && held.starts_with(']') {
            self.in_list = false;
            self.take(held, 1);
        } else if !self.in_list && held.starts_with('{') {
            self.place = Place::Inside;
        } else if self.in_fence && !self.in_list && held.starts_with(FENCE_END) {
            self.in_fence = false;
            self.place = Place::Before;
            self.take(held, FENCE_END.len());
        } else if self.in_fence && FENCE_END.starts_with(held.as_str()) {
            return Verdict::Open;
        } else {
            return Verdict::Text;
        }
        Verdict::Read
    }

    /// True if the text so far is whole calls. A fence may stay open: some models end in it.
    fn is_whole(&self) -> bool {
        let is_between = matches!(self.place, Place::Behind | Place::Before);
        is_between && !self.in_list && !self.events.is_empty()
    }
}

impl ChatSplitter {
    /// True if an answer that begins so may be calls alone, which the family does not read itself.
    pub(super) fn may_be_bare(&self, begun: &str) -> bool {
        let start = self.family.map_or(Start::Marked, |family| family.start);
        let is_of_family = matches!(start, Start::With(c) if begun.starts_with(c));
        !self.tools.is_empty()
            && self.harmony.is_none()
            && self.n_calls == 0
            && !is_of_family
            && begun.starts_with(['{', '[', '`'])
    }

    /// Reads the answer as calls alone, as long as it can be that.
    pub(super) fn begin_bare(&mut self) {
        self.state = State::Bare(Box::new(BareAnswer::new()));
        self.trims = false;
    }

    pub(super) fn step_bare(&mut self) -> bool {
        let State::Bare(answer) = &mut self.state else {
            return false;
        };
        match answer.step(&mut self.held, &self.tools) {
            Verdict::Open => false,
            Verdict::Read => true,
            Verdict::Text => {
                self.give_back_bare();
                true
            }
        }
    }

    /// The end of an answer that may be calls alone: it is, or it is text.
    pub(super) fn finish_bare(&mut self) {
        let is_whole = matches!(&self.state, State::Bare(answer) if answer.is_whole());
        if !is_whole || !self.held.trim().is_empty() {
            self.give_back_bare();
            while self.step() {}
            return;
        }
        if let State::Bare(answer) = std::mem::replace(&mut self.state, State::AfterCall) {
            self.held.clear();
            for event in answer.events {
                match event {
                    CallEvent::Name { name, id } => self.add_name(name, id),
                    CallEvent::Arguments(text) => self.add_arguments(&text),
                }
            }
        }
    }

    fn give_back_bare(&mut self) {
        if let State::Bare(answer) = std::mem::replace(&mut self.state, State::Text) {
            self.held.insert_str(0, &answer.raw);
        }
    }
}
