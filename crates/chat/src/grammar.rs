//! What answers that call tools are held to, as grammars in the Lark syntax of `llguidance`.
//!
//! Invariant: the text before and after calls is free; once a call has begun, in the form that the
//! model's template shows, only arguments that the tool's schema allows can follow. A form that is not
//! written down here is `None`. Knows no request.

use cellar_grammar::json_rule;
use kv_core::TokenId;
use model_core::tokenizer::{TokenKind, Tokenizer};
use serde_json::{Value, json};

use super::{REASONING, ToolFormat, harmony};
use crate::generate::{Arguments, CallNumber, Tool};

/// A grammar for the text of a whole answer, and the control tokens that it names.
#[derive(Debug)]
pub(crate) struct CallGrammar {
    pub(crate) lark: String,
    pub(crate) named: Vec<TokenId>,
}

/// An answer that is nothing but calls, each a JSON object.
pub(crate) fn of_forced(tools: &[Tool], number: CallNumber) -> String {
    let more = match number {
        CallNumber::One => "",
        CallNumber::Several => " (\"\\n\" call)*",
    };
    let calls = calls(tools, "arguments", parameters);
    format!("start: call{more}\ncall: {}\n", json_rule(&calls))
}

/// An answer that may have calls, where the arguments of some tools are held to their schema.
pub(crate) fn of_free(
    template: &str,
    tokenizer: &Tokenizer,
    tools: &[Tool],
) -> Option<CallGrammar> {
    if harmony::is_of(template) {
        return None;
    }
    let mut marks = Marks {
        tokenizer,
        named: Vec::new(),
    };
    let lark = match ToolFormat::of_template(template) {
        ToolFormat::Hermes => hermes(&mut marks, tools),
        ToolFormat::Mistral if template.contains("[CALL_ID]") => return None,
        ToolFormat::Mistral if template.contains("[ARGS]") => named_calls(&mut marks, tools),
        ToolFormat::Mistral => listed_calls(&mut marks, tools),
        // After reasoning a call would begin in the middle of the text.
        ToolFormat::Llama if REASONING.iter().any(|pair| template.contains(pair.close)) => {
            return None;
        }
        ToolFormat::Llama => llama(&mut marks, tools),
        ToolFormat::DeepSeek | ToolFormat::Xml | ToolFormat::Forced => return None,
    };
    Some(CallGrammar {
        lark,
        named: marks.named,
    })
}

/// Any text.
const TEXT: &str = "TEXT: /(.|\\n)*/\n";
const SPACES: &str = "SPACES: /[ \\n]{1,8}/\n";

fn hermes(marks: &mut Marks<'_>, tools: &[Tool]) -> String {
    let (head, close) = (marks.head("<tool_call>"), marks.mark("</tool_call>"));
    let call = json_rule(&calls(tools, "arguments", allowed));
    format!("start: (head SPACES? call SPACES? {close})* TEXT\n{head}call: {call}\n{TEXT}{SPACES}")
}

fn listed_calls(marks: &mut Marks<'_>, tools: &[Tool]) -> String {
    let head = marks.head("[TOOL_CALLS]");
    let call = json_rule(&calls(tools, "arguments", allowed));
    format!(
        "start: TEXT | head SPACES? \"[\" SPACES? call SPACES? (\",\" SPACES? call SPACES?)* \"]\"\n\
         {head}call: {call}\n{TEXT}{SPACES}"
    )
}

fn named_calls(marks: &mut Marks<'_>, tools: &[Tool]) -> String {
    let (head, args) = (marks.head("[TOOL_CALLS]"), marks.mark("[ARGS]"));
    let call = |(at, tool): (usize, &Tool)| {
        let (name, schema) = (json!(tool.name), json_rule(&allowed(tool)));
        format!("call_{at}: {name} {args} {schema}\n")
    };
    let rules: String = tools.iter().enumerate().map(call).collect();
    let names: Vec<String> = (0..tools.len()).map(|at| format!("call_{at}")).collect();
    let names = names.join(" | ");
    format!("start: (head ({names}))* TEXT\n{head}{rules}{TEXT}")
}

fn llama(marks: &mut Marks<'_>, tools: &[Tool]) -> String {
    let tag = marks.mark("<|python_tag|>");
    let call = json_rule(&calls(tools, "parameters", allowed));
    format!(
        "start: OTHER | SPACES? ({tag})? call (SPACES? \";\" SPACES? call)*\ncall: {call}\n\
         OTHER: /[ \\n]*([^{{ \\n](.|\\n)*)?/\n{SPACES}"
    )
}

/// Marks as grammars write them.
struct Marks<'t> {
    tokenizer: &'t Tokenizer,
    named: Vec<TokenId>,
}

impl Marks<'_> {
    fn control(&mut self, mark: &str) -> Option<TokenId> {
        let id = self.tokenizer.token_id(mark)?;
        let is_control = self.tokenizer.token_kind(id) == Some(TokenKind::Control);
        is_control.then(|| {
            self.named.push(id);
            id
        })
    }

    /// A mark alone.
    fn mark(&mut self, mark: &str) -> String {
        match self.control(mark) {
            Some(id) => format!("<[{}]>", id.0),
            None => json!(mark).to_string(),
        }
    }

    /// The rule of text up to a mark, which ends with the first one.
    fn head(&mut self, mark: &str) -> String {
        match self.control(mark) {
            Some(id) => format!("head: TEXT <[{}]>\n", id.0),
            None => format!("head[lazy]: TEXT {}\n", json!(mark)),
        }
    }
}

/// The schema of a tool's arguments; any object where it has none.
fn parameters(tool: &Tool) -> Value {
    match tool.parameters.is_object() {
        true => tool.parameters.clone(),
        false => json!({"type": "object"}),
    }
}

/// What the arguments of a free call may be.
fn allowed(tool: &Tool) -> Value {
    match tool.arguments {
        Arguments::Strict => parameters(tool),
        Arguments::Free => json!({"type": "object"}),
    }
}

/// The schema of a call of one of these tools, with its arguments under this name.
fn calls(tools: &[Tool], arguments: &str, schema_of: fn(&Tool) -> Value) -> Value {
    let call = |(at, tool): (usize, &Tool)| {
        let mut schema = schema_of(tool);
        move_references(&mut schema, &format!("#/anyOf/{at}/properties/{arguments}"));
        json!({
            "type": "object",
            "properties": {"name": {"const": tool.name}, arguments: schema},
            "required": ["name", arguments],
            "additionalProperties": false,
        })
    };
    let calls: Vec<Value> = tools.iter().enumerate().map(call).collect();
    json!({ "anyOf": calls })
}

/// References to parts of a schema that has moved to another place.
fn move_references(schema: &mut Value, to: &str) {
    match schema {
        Value::Object(members) => {
            for (name, value) in members {
                match value {
                    Value::String(target) if name == "$ref" && target.starts_with('#') => {
                        *target = format!("{to}{}", target.trim_start_matches('#'));
                    }
                    other => move_references(other, to),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| move_references(item, to)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::ToolPaths;

    #[test]
    fn references_follow_their_schema() {
        let parameters = json!({
            "type": "object", "$defs": {"n": {"type": "integer"}},
            "properties": {"a": {"$ref": "#/$defs/n"}},
        });
        let tool = |name: &str| Tool {
            name: name.to_owned(),
            parameters: parameters.clone(),
            arguments: Arguments::Strict,
            paths: ToolPaths::default(),
        };
        let schema = calls(&[tool("f"), tool("g")], "arguments", allowed);
        let target = schema.pointer("/anyOf/1/properties/arguments/properties/a/$ref");
        let target = target.and_then(Value::as_str).unwrap_or_default();
        let target = schema.pointer(target.trim_start_matches('#'));
        assert_eq!(target, Some(&json!({"type": "integer"})));
        assert_eq!(schema["anyOf"][1]["properties"]["name"]["const"], "g");
    }
}
