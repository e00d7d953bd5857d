//! [`CallReader`]: one call of a tool in the form of its family.
//!
//! Invariant: the name comes once and before all arguments. A reader that has given out no name has
//! taken nothing that its caller cannot give back as text.

use crate::elements::ElementsCall;
use crate::family::Body;
use crate::json_call::JsonCall;
use crate::named::NamedCall;
use crate::tagged::TaggedCall;
use crate::tool::Tool;

/// A part of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CallEvent {
    /// The name of the tool.
    Name {
        name: String,
        /// The model's id of the call.
        id: Option<String>,
    },
    /// A part of its arguments.
    Arguments(String),
}

/// The state of a call after the text so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// More is needed.
    Open,
    /// A part was read.
    Read,
    /// The call is complete.
    Done,
    /// The text of the answer follows, not a call.
    Text,
    /// It is no call, or no sound one.
    Broken,
}

/// A call that is being read.
#[derive(Clone, Debug)]
pub(crate) enum CallReader {
    Json(JsonCall),
    Named(NamedCall),
    Tagged(TaggedCall),
    Elements(ElementsCall),
}

impl CallReader {
    pub(crate) fn new(body: Body) -> Self {
        match body {
            Body::Json => Self::Json(JsonCall::new()),
            Body::Named { header, dialect } => Self::Named(NamedCall::new(header, dialect)),
            Body::Tagged(tags) => Self::Tagged(TaggedCall::new(tags)),
            Body::Elements(space) => Self::Elements(ElementsCall::new(space)),
        }
    }

    /// Reads from the front of what is held.
    pub(crate) fn step(
        &mut self,
        held: &mut String,
        tools: &[Tool],
        events: &mut Vec<CallEvent>,
    ) -> Progress {
        match self {
            Self::Json(call) => call.step(held, events),
            Self::Named(call) => call.step(held, events),
            Self::Tagged(call) => call.step(held, tools, events),
            Self::Elements(call) => call.step(held, tools, events),
        }
    }

    /// The arguments that it has taken and not given out, where the answer ends with what is held.
    pub(crate) fn last_arguments(&self, held: &str, tools: &[Tool]) -> String {
        match self {
            Self::Json(call) => call.last_arguments(),
            Self::Named(call) => call.last_arguments(),
            Self::Tagged(call) => call.last_arguments(held, tools),
            Self::Elements(_) => String::new(),
        }
    }
}

/// Events with arguments that follow each other joined.
#[cfg(test)]
pub(crate) fn joined(events: Vec<CallEvent>) -> Vec<CallEvent> {
    let mut joined: Vec<CallEvent> = Vec::new();
    for event in events {
        match (joined.last_mut(), &event) {
            (Some(CallEvent::Arguments(last)), CallEvent::Arguments(more)) => last.push_str(more),
            _ => joined.push(event),
        }
    }
    joined
}
