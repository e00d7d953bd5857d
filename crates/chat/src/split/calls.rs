//! The calls of an answer: from their marks to what follows them.
//!
//! Invariant: as of the answer: what turns out to be no call is text, unchanged, and what follows
//! its first mark may be a call again.

use super::{ChatSplitter, State, call_marks};
use crate::family::Body;
use crate::marks::{LastSpaces, find_first, take_front, undecided};
use crate::reader::{CallEvent, CallReader, Progress};

impl ChatSplitter {
    /// A call or several follow this text, which ends with a mark.
    pub(super) fn begin_call(&mut self, raw: &str, n_mark: usize) {
        raw.clone_into(&mut self.raw);
        self.n_mark = n_mark;
        self.has_started = false;
        self.is_bare = false;
        self.in_list = false;
        self.trims = false;
        self.state = State::Open;
    }

    pub(super) fn step_between(&mut self) -> bool {
        let Some(family) = self.family else {
            return self.is_no_call();
        };
        let begun = self.held.trim_start();
        let n_spaces = self.held.len() - begun.len();
        let mut marks = family.open.iter().chain(family.before);
        if let Some(mark) = marks.clone().find(|mark| begun.starts_with(**mark)) {
            let taken = take_front(&mut self.held, n_spaces + mark.len());
            self.raw.push_str(&taken);
            if family.open.contains(mark) {
                self.state = State::Open;
            }
            return true;
        }
        if marks.any(|mark| mark.starts_with(begun)) {
            false
        } else {
            self.is_no_call()
        }
    }

    /// Behind the mark: a call, or a list of calls.
    pub(super) fn step_open(&mut self) -> bool {
        let Some(family) = self.family else {
            return self.is_no_call();
        };
        let begun = self.held.trim_start();
        let n_spaces = self.held.len() - begun.len();
        if begun.is_empty() {
            return false;
        }
        let listed = family
            .listed
            .filter(|_| begun.starts_with('[') && !self.in_list);
        let body = match listed {
            Some(body) => {
                let taken = take_front(&mut self.held, n_spaces + 1);
                self.raw.push_str(&taken);
                self.in_list = true;
                body
            }
            None if self.in_list => family.listed.unwrap_or(family.body),
            None => family.body,
        };
        self.trims = false;
        self.state = State::Call(CallReader::new(body));
        true
    }

    pub(super) fn step_call(&mut self) -> bool {
        let State::Call(mut reader) = std::mem::replace(&mut self.state, State::Text) else {
            return false;
        };
        // A call of elements is taken as a whole.
        let keeps_raw = !self.has_started && !matches!(reader, CallReader::Elements(_));
        let before = if keeps_raw {
            self.held.clone()
        } else {
            String::new()
        };
        let mut events = Vec::new();
        let progress = reader.step(&mut self.held, &self.tools, &mut events);
        let taken = before.strip_suffix(self.held.as_str()).unwrap_or_default();
        self.raw.push_str(taken);
        for event in events {
            match event {
                CallEvent::Name { name, .. } if self.is_bare && !self.has_tool(&name) => {
                    return self.is_no_call();
                }
                CallEvent::Name { name, id } => self.add_name(name, id),
                CallEvent::Arguments(text) => self.add_arguments(&text),
            }
        }
        match progress {
            Progress::Open | Progress::Read => self.state = State::Call(reader),
            Progress::Done => self.state = State::AfterCall,
            Progress::Text => {
                self.raw.clear();
                self.end_calls();
            }
            Progress::Broken if self.has_started => self.state = State::Malformed,
            Progress::Broken => return self.is_no_call(),
        }
        progress != Progress::Open
    }

    fn has_tool(&self, name: &str) -> bool {
        self.tools.iter().any(|tool| tool.name == name)
    }

    /// The seeming call is text up to the end of its first mark; a call may follow.
    fn is_no_call(&mut self) -> bool {
        let mut raw = std::mem::take(&mut self.raw);
        let n_mark = self.n_mark.min(raw.len());
        let mark = take_front(&mut raw, n_mark);
        self.add_text(&mark);
        self.held.insert_str(0, &raw);
        self.in_list = false;
        self.state = State::Text;
        true
    }

    pub(super) fn step_malformed(&mut self) -> bool {
        let mut marks = call_marks(self.family);
        marks.extend(self.family.map_or(&[][..], |family| family.after));
        if let Some(Body::Tagged(tags)) = self.family.map(|family| family.body) {
            marks.push(tags.end);
        }
        marks.retain(|mark| mark.len() > 1);
        if let Some((at, mark)) = find_first(&self.held, &marks) {
            let text = take_front(&mut self.held, at);
            self.add_arguments(text.trim_end());
            let tags_end = self.family.is_some_and(
                |family| matches!(family.body, Body::Tagged(tags) if tags.end == mark),
            );
            if tags_end {
                self.drop_front(mark.len());
            }
            self.state = State::AfterCall;
            return true;
        }
        let n = undecided(&self.held, &marks, LastSpaces::Held);
        let ready = take_front(&mut self.held, n);
        self.add_arguments(&ready);
        false
    }

    pub(super) fn step_after_call(&mut self) -> bool {
        let begun = self.held.trim_start();
        let n_spaces = self.held.len() - begun.len();
        let (Some(family), Some(first)) = (self.family, begun.chars().next()) else {
            return false;
        };
        let mut after = family.after.iter();
        if let Some(mark) = after.clone().find(|mark| begun.starts_with(**mark)) {
            self.drop_front(n_spaces + mark.len());
            return true;
        }
        if after.any(|mark| mark.starts_with(begun)) {
            return false;
        }
        match first {
            ',' if self.in_list => {
                self.drop_front(n_spaces + 1);
                self.next_call();
            }
            ']' if self.in_list => {
                self.drop_front(n_spaces + 1);
                self.in_list = false;
            }
            '{' if !self.in_list && matches!(family.body, Body::Json) => self.next_call(),
            _ if self.is_forced() => {
                self.held.clear();
                return false;
            }
            _ => self.end_calls(),
        }
        true
    }

    /// Another call without a mark.
    fn next_call(&mut self) {
        let (is_bare, in_list) = (self.is_bare, self.in_list);
        self.begin_call("", 0);
        (self.is_bare, self.in_list) = (is_bare, in_list);
        self.trims = true;
    }

    fn end_calls(&mut self) {
        self.in_list = false;
        self.state = State::Text;
        self.trims = true;
    }
}
