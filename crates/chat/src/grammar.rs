//! Grammars of answers that call tools, in the Lark syntax of `llguidance`.
//!
//! Invariant: the text before and after calls is free; once a call has begun, in the form that the
//! model's template shows, only arguments that the tool's schema allows can follow. A form that is
//! not written down is `None`. Knows no request.

use cellar_grammar::json_rule;
use kv_core::TokenId;
use model_core::tokenizer::{TokenKind, Tokenizer};
use serde_json::{Map, Value, json};

use crate::family::{Body, CallSyntax, Family, Keys, Piece, Start, Wrap};
use crate::harmony;
use crate::style::Style;
use crate::tagged_grammar;
use crate::tool::{Arguments, CallNumber, Tool};

/// A grammar for the text of a whole answer, and the control tokens that it names.
#[derive(Debug)]
pub struct CallGrammar {
    /// The grammar.
    pub lark: String,
    /// The control tokens.
    pub named: Vec<TokenId>,
}

/// The model and the prompt that an answer is of.
#[derive(Clone, Copy, Debug)]
pub struct AnswerContext<'t> {
    /// The model's chat template.
    pub template: &'t str,
    /// The prompt, which may have begun reasoning.
    pub prompt: &'t str,
    /// The model's tokenizer.
    pub tokenizer: &'t Tokenizer,
}

/// The schema of a tool's arguments.
pub(crate) type SchemaOf = fn(&Tool) -> Value;

/// An answer that is nothing but calls, each a JSON object, in no model's form.
pub fn of_forced(tools: &[Tool], number: CallNumber) -> String {
    let more = match number {
        CallNumber::One => "",
        CallNumber::Several => " (\"\\n\" call)*",
    };
    let calls = calls(tools, Keys::USUAL, parameters);
    format!("start: call{more}\ncall: {}\n", json_rule(&calls))
}

/// An answer that is nothing but calls, in the form of the model. `None` where the form is not
/// written down.
pub fn of_required(
    context: AnswerContext<'_>,
    tools: &[Tool],
    number: CallNumber,
) -> Option<CallGrammar> {
    let AnswerContext {
        template,
        prompt,
        tokenizer,
    } = context;
    let mut marks = Marks::new(tokenizer);
    if harmony::calls_by(template) {
        return Some(to_function(marks, tools));
    }
    let family = Family::of_template(template)?;
    let rules = rules(family, &mut marks, tools, parameters)?;
    let prompt = prompt.trim_end();
    let pairs = Style::of_template(template).pairs;
    let thinks = pairs.iter().find(|pair| prompt.ends_with(pair.open));
    let close = thinks.map(|pair| format!("{} SPACES? ", marks.mark(pair.close)));
    let open = family.open.first()?;
    // Without a mark, a call is as well the whole answer.
    let mark = match family.start {
        Start::With(_) if matches!(family.written, CallSyntax::Object { .. }) => String::new(),
        _ => marks.mark(open),
    };
    let first = if prompt.ends_with(open) { "" } else { &mark };
    let several = number == CallNumber::Several;
    let (each, all) = match family.wrap {
        Wrap::Nothing => (EMPTY, EMPTY),
        Wrap::Each { before, behind } => (Around { before, behind }, EMPTY),
        Wrap::All { before, behind } => (EMPTY, Around { before, behind }),
    };
    let (before, behind) = (marks.all(each.before), marks.all(each.behind));
    let start = match family.written {
        CallSyntax::List { .. } => {
            let list = if several { "list" } else { "one" };
            format!("{first} {list}")
        }
        _ if several && family.start == Start::Marked => format!(
            "{} {before} {first} call {behind} (SPACES? {before} {mark} call {behind})* {}",
            marks.all(all.before),
            marks.all(all.behind),
        ),
        _ => format!(
            "{} {before} {first} call {behind} {}",
            marks.all(all.before),
            marks.all(all.behind),
        ),
    };
    let start = format!("start: {}{start}\n", close.unwrap_or_default());
    Some(marks.grammar(start + &rules))
}

/// The texts around calls.
#[derive(Clone, Copy)]
struct Around {
    before: &'static [Piece],
    behind: &'static [Piece],
}

const EMPTY: Around = Around {
    before: &[],
    behind: &[],
};

/// A message to a function: gpt-oss.
fn to_function(mut marks: Marks<'_>, tools: &[Tool]) -> CallGrammar {
    let (channel, message) = (marks.mark("<|channel|>"), marks.mark("<|message|>"));
    let mut rules = String::new();
    for (at, tool) in tools.iter().enumerate() {
        let name = json!(format!(" to=functions.{}", tool.name));
        let schema = json_rule(&parameters(tool));
        rules += &format!("call_{at}: {name} {channel} \"commentary json\" {message} args_{at}\n");
        rules += &format!("args_{at}: {schema}\n");
    }
    let start = format!("start: {}\n", one_of(tools));
    marks.grammar(start + &rules)
}

/// An answer that may have calls, where the arguments of some tools are held to their schema.
pub fn of_free(template: &str, tokenizer: &Tokenizer, tools: &[Tool]) -> Option<CallGrammar> {
    if harmony::calls_by(template) {
        return None;
    }
    let family = Family::of_template(template)?;
    let is_bare = family.start != Start::Marked;
    let pairs = Style::of_template(template).pairs;
    // After reasoning a call without a mark would begin in the middle of the text.
    if is_bare && pairs.iter().any(|pair| template.contains(pair.close)) {
        return None;
    }
    let mut marks = Marks::new(tokenizer);
    let rules = rules(family, &mut marks, tools, allowed)?;
    let open = family.open.first()?;
    let start = if is_bare {
        let tag = marks.mark(open);
        format!(
            "start: OTHER | SPACES? ({tag})? call (SPACES? \";\" SPACES? call)*\n\
             OTHER: /[ \\n]*([^{{ \\n](.|\\n)*)?/\n"
        )
    } else {
        let head = marks.until("head", open);
        match family.written {
            CallSyntax::List { .. } => format!("start: TEXT | head SPACES? list\n{head}"),
            _ => format!("start: (head call)* TEXT\n{head}"),
        }
    };
    Some(marks.grammar(start + &rules))
}

/// The rules `call` of one call behind the mark, and `list` and `one` of calls in brackets.
fn rules(
    family: &Family,
    marks: &mut Marks<'_>,
    tools: &[Tool],
    schema_of: SchemaOf,
) -> Option<String> {
    match (family.written, family.body) {
        (CallSyntax::Object { keys, close }, _) => {
            let close = close.map(|close| format!(" SPACES? {}", marks.mark(close)));
            let call = json_rule(&calls(tools, keys, schema_of));
            Some(format!(
                "call: SPACES? object{}\nobject: {call}\n",
                close.unwrap_or_default()
            ))
        }
        (CallSyntax::List { keys, close }, _) => {
            let close = close.map(|close| format!(" SPACES? {}", marks.mark(close)));
            let close = close.unwrap_or_default();
            let call = json_rule(&calls(tools, keys, schema_of));
            Some(format!(
                "list: SPACES? \"[\" SPACES? call SPACES? (\",\" SPACES? call SPACES?)* \"]\"{close}\n\
                 one: SPACES? \"[\" SPACES? call SPACES? \"]\"{close}\ncall: {call}\n"
            ))
        }
        (
            CallSyntax::Named {
                before,
                behind,
                close,
            },
            _,
        ) => {
            let (before, behind) = (marks.all(before), marks.all(behind));
            let close = marks.all(close);
            let mut rules = format!("call: {}\n", one_of(tools));
            for (at, tool) in tools.iter().enumerate() {
                let (name, schema) = (json!(tool.name), json_rule(&schema_of(tool)));
                rules += &format!("call_{at}: {before} {name} {behind} args_{at} {close}\n");
                rules += &format!("args_{at}: {schema}\n");
            }
            Some(rules)
        }
        (CallSyntax::Tagged, Body::Tagged(tags)) => {
            let mut rules = format!("call: {}\n", one_of(tools));
            rules += &marks.until("until_value_end", tags.value_end);
            rules += &marks.until("until_end", tags.end);
            for (at, tool) in tools.iter().enumerate() {
                let is_held = tool.arguments == Arguments::Strict;
                let schema = schema_of(tool);
                let schema = (is_held || schema == parameters(tool)).then_some(&schema);
                rules += &tagged_grammar::call(marks, tags, at, &tool.name, schema)?;
            }
            Some(rules)
        }
        _ => None,
    }
}

/// One of the rules of tools.
fn one_of(tools: &[Tool]) -> String {
    let names: Vec<String> = (0..tools.len()).map(|at| format!("call_{at}")).collect();
    names.join(" | ")
}

/// Marks as grammars write them.
pub(crate) struct Marks<'t> {
    tokenizer: &'t Tokenizer,
    named: Vec<TokenId>,
}

impl<'t> Marks<'t> {
    fn new(tokenizer: &'t Tokenizer) -> Self {
        Self {
            tokenizer,
            named: Vec::new(),
        }
    }

    /// The grammar with these rules.
    fn grammar(self, rules: String) -> CallGrammar {
        // A rule without a reference to it is no error.
        let lark = format!("{rules}TEXT: /(.|\\n)*/\nSPACES: /[ \\n]{{1,8}}/\n");
        CallGrammar {
            lark,
            named: self.named,
        }
    }

    fn control(&mut self, mark: &str) -> Option<TokenId> {
        let id = self.tokenizer.token_id(mark)?;
        let is_control = self.tokenizer.token_kind(id) == Some(TokenKind::Control);
        is_control.then(|| {
            self.named.push(id);
            id
        })
    }

    /// A mark alone.
    pub(crate) fn mark(&mut self, mark: &str) -> String {
        match self.control(mark) {
            Some(id) => format!("<[{}]>", id.0),
            None => json!(mark).to_string(),
        }
    }

    /// Marks and texts after each other.
    pub(crate) fn all(&mut self, pieces: &[Piece]) -> String {
        let mut all = Vec::with_capacity(pieces.len());
        for piece in pieces {
            all.push(match piece {
                Piece::Mark(mark) => self.mark(mark),
                Piece::Digits => "/[0-9]{1,4}/".to_owned(),
                Piece::Id => "/[a-zA-Z0-9]{9}/".to_owned(),
            });
        }
        all.join(" ")
    }

    /// The rule of text up to a mark, which ends with the first one.
    pub(crate) fn until(&mut self, rule: &str, mark: &str) -> String {
        match self.control(mark) {
            Some(id) => format!("{rule}: TEXT <[{}]>\n", id.0),
            None => format!("{rule}[lazy]: TEXT {}\n", json!(mark)),
        }
    }
}

/// The schema of a tool's arguments; any object where it has none.
fn parameters(tool: &Tool) -> Value {
    if tool.parameters.is_object() {
        tool.parameters.clone()
    } else {
        json!({"type": "object"})
    }
}

/// The schema of a free call's arguments.
fn allowed(tool: &Tool) -> Value {
    match tool.arguments {
        Arguments::Strict => parameters(tool),
        Arguments::Free => json!({"type": "object"}),
    }
}

/// The schema of a call of one of these tools, with its parts under these names.
fn calls(tools: &[Tool], keys: Keys, schema_of: SchemaOf) -> Value {
    let call = |(at, tool): (usize, &Tool)| {
        let mut schema = schema_of(tool);
        let to = format!("#/anyOf/{at}/properties/{}", keys.arguments);
        move_references(&mut schema, &to);
        let mut properties = Map::new();
        if let Some(id) = keys.id {
            properties.insert(id.to_owned(), json!({"type": "string", "maxLength": 16}));
        }
        properties.insert(keys.name.to_owned(), json!({"const": tool.name}));
        properties.insert(keys.arguments.to_owned(), schema);
        let required: Vec<&String> = properties.keys().collect();
        json!({
            "type": "object",
            "required": required,
            "properties": properties,
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
    use crate::tool::ToolPaths;

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
        let schema = calls(&[tool("f"), tool("g")], Keys::USUAL, allowed);
        let target = schema.pointer("/anyOf/1/properties/arguments/properties/a/$ref");
        let target = target.and_then(Value::as_str).unwrap_or_default();
        let target = schema.pointer(target.trim_start_matches('#'));
        assert_eq!(target, Some(&json!({"type": "integer"})));
        assert_eq!(schema["anyOf"][1]["properties"]["name"]["const"], "g");
    }
}
