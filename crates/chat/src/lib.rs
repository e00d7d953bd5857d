//! From the text of an answer to its reasoning, its text and its calls of tools, piece by piece.
//!
//! Invariant: where nothing is marked, the pieces are the text unchanged; a piece does not depend
//! on how the text was cut, and what looks like a mark but is none comes out as text. Which marks a
//! model writes follows from its chat template; how a family writes calls is a row of a table.

mod elements;
#[cfg(feature = "grammar")]
mod elements_grammar;
#[cfg_attr(not(feature = "grammar"), allow(dead_code))] // what grammars alone read
mod family;
#[cfg(feature = "grammar")]
mod format_grammar;
#[cfg(feature = "grammar")]
pub mod grammar;
mod harmony;
#[cfg(feature = "grammar")]
mod harmony_grammar;
mod header;
mod json_call;
#[cfg(feature = "grammar")]
mod mark_rules;
mod marks;
mod named;
mod reader;
mod schema;
mod split;
mod style;
mod table;
mod tagged;
#[cfg(feature = "grammar")]
mod tagged_grammar;
mod tool;
mod value;
#[cfg(feature = "grammar")]
mod value_grammar;

pub use split::{Calls, ChatSplitter, Part};
pub use style::{Marks, marks_in, reasoning_marks};
pub use tool::{Arguments, CallNumber, Tool, ToolPaths};

/// The models that write calls as this template shows, for people; `None` where it shows no form
/// that is known, so that calls come as text.
pub fn family_of(template: &str) -> Option<&'static str> {
    if harmony::calls_by(template) {
        Some("gpt-oss")
    } else {
        family::Family::of_template(template).map(|family| family.name)
    }
}
