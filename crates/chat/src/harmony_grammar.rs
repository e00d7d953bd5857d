//! Grammars of messages to functions: gpt-oss.
//!
//! Invariant: as of [`crate::grammar`]. Every message has a header, and those without a function
//! are free text.

use cellar_grammar::json_rule;
use serde_json::json;

use crate::grammar::{CallGrammar, SchemaOf, allowed, one_of, parameters};
use crate::mark_rules::Marks;
use crate::tool::Tool;

/// An answer that is one message to a function.
pub(crate) fn of_required(mut marks: Marks<'_>, tools: &[Tool]) -> CallGrammar {
    let (channel, message) = (marks.mark("<|channel|>"), marks.mark("<|message|>"));
    let header = |name: &str| {
        let to = json!(format!(" to=functions.{name}"));
        format!("{to} {channel} \"commentary json\" {message}")
    };
    let rules = calls(tools, parameters, header);
    let start = format!("start: {}\n", one_of(tools));
    marks.grammar(start + &rules)
}

/// An answer of messages, some of them to functions.
pub(crate) fn of_free(mut marks: Marks<'_>, tools: &[Tool]) -> CallGrammar {
    let (channel, message) = (marks.mark("<|channel|>"), marks.mark("<|message|>"));
    let (start, end) = (marks.mark("<|start|>"), marks.mark("<|end|>"));
    let constrain = marks.mark("<|constrain|>");
    let header = |name: &str| {
        let to = json!(format!(" to=functions.{name}"));
        format!("({channel} CHANNEL {to} | {to} {channel} CHANNEL) kind {message}")
    };
    let rules = calls(tools, allowed, header);
    let until = marks.until("text_end", "<|end|>");
    let next = format!("{start} \"assistant\" part");
    let text = format!("{channel} CHANNEL {message}");
    let rules = format!(
        "start: part\n\
         part: {text} TEXT | {text} text_end {next} | call ({end} {next})?\n\
         call: {}\n\
         kind: (SPACES? {constrain})? (SPACES? \"json\")?\n\
         CHANNEL: \"analysis\" | \"commentary\" | \"final\"\n{until}{rules}",
        one_of(tools)
    );
    marks.grammar(rules)
}

/// An answer of thoughts, and then of a final message of this form or a call.
pub(crate) fn of_format(mut marks: Marks<'_>, tools: &[Tool], format: &str) -> CallGrammar {
    let (channel, message) = (marks.mark("<|channel|>"), marks.mark("<|message|>"));
    let start = marks.mark("<|start|>");
    let constrain = marks.mark("<|constrain|>");
    let header = |name: &str| {
        let to = json!(format!(" to=functions.{name}"));
        format!("({channel} CHANNEL {to} | {to} {channel} CHANNEL) kind {message}")
    };
    let rules = calls(tools, allowed, header);
    let until = marks.until("thought", "<|end|>");
    let call = if tools.is_empty() {
        String::new()
    } else {
        format!(" | {}", one_of(tools))
    };
    let rules = format!(
        "start: part\n\
         part: {channel} \"analysis\" {message} thought {start} \"assistant\" part \
         | {channel} \"final\" kind {message} format{call}\n\
         format: {format}\n\
         kind: (SPACES? {constrain})? (SPACES? \"json\")?\n\
         CHANNEL: \"analysis\" | \"commentary\" | \"final\"\n{until}{rules}"
    );
    marks.grammar(rules)
}

/// The rules of a call of each tool, behind a header made of its name.
fn calls(tools: &[Tool], schema_of: SchemaOf, header: impl Fn(&str) -> String) -> String {
    let mut rules = String::new();
    for (at, tool) in tools.iter().enumerate() {
        let schema = json_rule(&schema_of(tool));
        rules += &format!("call_{at}: {} args_{at}\n", header(&tool.name));
        rules += &format!("args_{at}: {schema}\n");
    }
    rules
}
