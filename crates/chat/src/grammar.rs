//! Grammars of answers that call tools, in the Lark syntax of `llguidance`.
//!
//! Invariant: the text before and after calls is free; once a call has begun, in the form that the
//! model's template shows, only arguments that the tool's schema allows can follow. A form that is
//! not written down is `None`. Knows no request.

use cellar_grammar::json_rule;
use kv_core::TokenId;
use model_core::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

use crate::elements_grammar;
use crate::family::{Body, CallSyntax, Family, Keys, Piece, Separator, Start, Wrap};
use crate::harmony;
use crate::harmony_grammar;
use crate::mark_rules::Marks;
use crate::style::Style;
use crate::tagged_grammar;
use crate::tool::{Arguments, CallNumber, Tool};
use crate::value::Dialect;
use crate::value_grammar;

pub use crate::format_grammar::of_format;

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

/// Calls after each other, and nothing else.
pub(crate) struct CallRules {
    /// The right side of a rule of all calls.
    pub(crate) all: String,
    /// The rules that it refers to.
    pub(crate) rules: String,
}

/// An answer that is nothing but calls, each a JSON object, in no model's form.
pub fn of_forced(tools: &[Tool], number: CallNumber) -> String {
    let CallRules { all, rules } = forced(tools, number, parameters);
    format!("start: {all}\n{rules}")
}

/// Calls as JSON objects, in no model's form.
pub(crate) fn forced(tools: &[Tool], number: CallNumber, schema_of: SchemaOf) -> CallRules {
    let more = match number {
        CallNumber::One => "",
        CallNumber::Several => " (\"\\n\" call)*",
    };
    let calls = calls(tools, Keys::USUAL, schema_of);
    CallRules {
        all: format!("call{more}"),
        rules: format!("call: {}\n", json_rule(&calls)),
    }
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
        return Some(harmony_grammar::of_required(marks, tools));
    }
    let family = Family::of_template(template)?;
    let prompt = prompt.trim_end();
    let Style { pairs, answer, .. } = Style::of_template(template);
    let thinks = pairs.iter().find(|pair| prompt.ends_with(pair.open));
    let close = thinks.map(|pair| format!("{} SPACES? ", marks.mark(pair.close)));
    // Calls follow the answer, which is empty.
    let empty = answer.map(|answer| {
        let close = marks.mark(answer.close);
        if prompt.ends_with(answer.open) {
            format!("{close} SPACES? ")
        } else {
            format!("({} {close} SPACES?)? ", marks.mark(answer.open))
        }
    });
    let asked = CallsAsked {
        prompt,
        tools,
        number,
        schema_of: parameters,
    };
    let CallRules { all, rules } = of_family(family, &mut marks, asked)?;
    let before = close.unwrap_or_default() + &empty.unwrap_or_default();
    let start = format!("start: {before}{all}\n");
    Some(marks.grammar(start + &rules))
}

/// The calls that an answer has to have.
#[derive(Clone, Copy)]
pub(crate) struct CallsAsked<'t> {
    /// The prompt without spaces behind it, which may end with the mark of a call.
    pub(crate) prompt: &'t str,
    pub(crate) tools: &'t [Tool],
    pub(crate) number: CallNumber,
    pub(crate) schema_of: SchemaOf,
}

/// Calls in the form of a family. `None` where the form is not written down, or the answer would
/// end before a call.
pub(crate) fn of_family(
    family: &Family,
    marks: &mut Marks<'_>,
    asked: CallsAsked<'_>,
) -> Option<CallRules> {
    let CallsAsked {
        prompt,
        tools,
        number,
        schema_of,
    } = asked;
    let open = family.open.first()?;
    // Without a mark, a call is as well the whole answer.
    let mark = match family.start {
        Start::With(_) if matches!(family.written, CallSyntax::Object { .. }) => String::new(),
        _ => marks.mark(open),
    };
    let first = if prompt.ends_with(open) { "" } else { &mark };
    let (each, all) = match family.wrap {
        Wrap::Nothing => (EMPTY, EMPTY),
        Wrap::Each { before, behind } => (Around { before, behind }, EMPTY),
        Wrap::All { before, behind } => (EMPTY, Around { before, behind }),
    };
    let before_all = marks.all(all.before);
    let before = marks.all(each.before);
    if marks.names_an_end() {
        return None;
    }
    let rules = rules(family, marks, tools, schema_of)?;
    let behind = marks.behind(each.behind);
    let behind_all = marks.behind(all.behind);
    let several = number == CallNumber::Several;
    let all = match family.written {
        CallSyntax::List { .. } | CallSyntax::Python { .. } => {
            let list = if several { "list" } else { "one" };
            format!("{first} {list}")
        }
        _ if several && !matches!(family.start, Start::With(_)) => format!(
            "{before_all} {before} {first} call {behind} (SPACES? {before} {mark} call {behind})* {behind_all}",
        ),
        _ => format!("{before_all} {before} {first} call {behind} {behind_all}"),
    };
    let rules = rules + &names(tools);
    Some(CallRules { all, rules })
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

/// An answer that may have calls, where the arguments of some tools are held to their schema.
pub fn of_free(template: &str, tokenizer: &Tokenizer, tools: &[Tool]) -> Option<CallGrammar> {
    if harmony::calls_by(template) {
        let marks = Marks::new(tokenizer);
        return Some(harmony_grammar::of_free(marks, tools));
    }
    let family = Family::of_template(template)?;
    let is_bare = matches!(family.start, Start::With(_));
    let pairs = Style::of_template(template).pairs;
    // After reasoning a call without a mark would begin in the middle of the text.
    if is_bare && pairs.iter().any(|pair| template.contains(pair.close)) {
        return None;
    }
    let mut marks = Marks::new(tokenizer);
    let rules = rules(family, &mut marks, tools, allowed)?;
    let open = family.open.first()?;
    let start = match (family.start, family.written) {
        (Start::With(c), CallSyntax::Python { .. }) => {
            let tag = marks.mark(open);
            let head = marks.until_from("head", "OTHER", open);
            format!(
                "start: OTHER | head list | SPACES? ({tag})? list\n{}{head}",
                other(c)
            )
        }
        (Start::With(c), _) => {
            let tag = marks.mark(open);
            format!(
                "start: OTHER | SPACES? ({tag})? call (SPACES? \";\" SPACES? call)*\n{}",
                other(c)
            )
        }
        (Start::Recipient { user }, _) => {
            let (mark, user, head) = (marks.mark(open), json!(user), marks.until("head", open));
            format!(
                "start: part\npart: call (SPACES? {mark} part)? | {user} TEXT | {user} head part\n{head}"
            )
        }
        (Start::Marked, CallSyntax::List { .. }) => {
            let head = marks.until("head", open);
            match plain(&mut marks, template, family) {
                Some(plain) => format!("start: plain* (TEXT | head SPACES? list)\n{head}{plain}"),
                None => format!("start: TEXT | head SPACES? list\n{head}"),
            }
        }
        (Start::Marked, _) => {
            let head = marks.until("head", open);
            match plain(&mut marks, template, family) {
                Some(plain) => format!("start: (plain | head call)* TEXT\n{head}{plain}"),
                None => format!("start: (head call)* TEXT\n{head}"),
            }
        }
    };
    Some(marks.grammar(start + &rules))
}

/// The rule `plain` of text up to a mark that begins no call, but has control tokens of the
/// grammar; `None` where there is no such mark.
fn plain(marks: &mut Marks<'_>, template: &str, family: &Family) -> Option<String> {
    let Style { pairs, silent, .. } = Style::of_template(template);
    let around = family.before.iter().chain(family.after).copied();
    let around = around.chain(silent);
    let around = around.chain(pairs.iter().flat_map(|pair| [pair.open, pair.close]));
    let around: Vec<&str> = around.filter(|mark| marks.shares_a_token(mark)).collect();
    let (mut names, mut rules) = (Vec::new(), String::new());
    for (at, mark) in around.into_iter().enumerate() {
        let name = format!("plain_{at}");
        rules += &marks.until(&name, mark);
        names.push(name);
    }
    (!names.is_empty()).then(|| format!("plain: {}\n{rules}", names.join(" | ")))
}

/// Text that does not begin with this character.
fn other(first: char) -> String {
    format!("OTHER: /[ \\n]*([^\\{first} \\n](.|\\n)*)?/\n")
}

/// The rules `call` of one call behind the mark, and `list` and `one` of calls in a list.
fn rules(
    family: &Family,
    marks: &mut Marks<'_>,
    tools: &[Tool],
    schema_of: SchemaOf,
) -> Option<String> {
    match (family.written, family.body) {
        (CallSyntax::Object { keys, close }, _) => {
            let close = marks.close(close);
            let call = json_rule(&calls(tools, keys, schema_of));
            Some(format!("call: SPACES? object{close}\nobject: {call}\n"))
        }
        (
            CallSyntax::List {
                keys,
                between,
                close,
            },
            _,
        ) => {
            let list = list(between, &marks.close(close));
            let call = json_rule(&calls(tools, keys, schema_of));
            Some(format!("{list}call: {call}\n"))
        }
        (
            CallSyntax::Named {
                before,
                behind,
                close,
            },
            Body::Named { dialect, .. },
        ) => {
            let (before, behind) = (marks.all(before), marks.all(behind));
            let close = marks.behind(close);
            let around = |name: &str, at: usize| {
                format!("call_{at}: {before} {name} {behind} args_{at} {close}\n")
            };
            let rules = named(marks, dialect, tools, schema_of)?;
            Some(rules + &each(tools, around))
        }
        (CallSyntax::Python { close }, Body::Named { dialect, .. }) => {
            let list = list(Separator::Commas, &marks.close(Some(close)));
            let rules = named(marks, dialect, tools, schema_of)?;
            let around = |name: &str, at: usize| format!("call_{at}: {name} args_{at}\n");
            Some(list + &rules + &each(tools, around))
        }
        (CallSyntax::Tagged, Body::Tagged(tags)) => {
            let mut rules = format!("call: {}\n", one_of(tools));
            rules += &marks.until("until_value_end", tags.value_end);
            rules += &marks.until("until_end", tags.end);
            for (at, tool) in tools.iter().enumerate() {
                let schema = held_schema(tool, schema_of);
                rules += &tagged_grammar::call(marks, tags, at, &tool.name, schema.as_ref())?;
            }
            Some(rules)
        }
        (CallSyntax::Tagged, Body::Elements(space)) => {
            let mut rules = format!("call: {}\n", one_of(tools));
            rules += &marks.until("until_end", &elements_grammar::end(space));
            for (at, tool) in tools.iter().enumerate() {
                let schema = held_schema(tool, schema_of);
                rules += &elements_grammar::call(marks, space, at, &tool.name, schema.as_ref())?;
            }
            Some(rules)
        }
        _ => None,
    }
}

/// The schema that the arguments of a call are held to; `None` where they are free.
fn held_schema(tool: &Tool, schema_of: SchemaOf) -> Option<Value> {
    let schema = schema_of(tool);
    let is_held = tool.arguments == Arguments::Strict || schema == parameters(tool);
    is_held.then_some(schema)
}

/// The rules of a list of calls: of any number, and of one.
fn list(between: Separator, close: &str) -> String {
    match between {
        Separator::Commas => format!(
            "list: SPACES? \"[\" SPACES? call SPACES? (\",\" SPACES? call SPACES?)* \"]\"{close}\n\
             one: SPACES? \"[\" SPACES? call SPACES? \"]\"{close}\n"
        ),
        Separator::Lines => {
            format!("list: SPACES? call (\"\\n\" call)*{close}\none: SPACES? call{close}\n")
        }
    }
}

/// The rules of the arguments of calls, in a notation of values.
fn named(
    marks: &mut Marks<'_>,
    dialect: Dialect,
    tools: &[Tool],
    schema_of: SchemaOf,
) -> Option<String> {
    let mut rules = match dialect {
        Dialect::Json => String::new(),
        other => value_grammar::shared(marks, other),
    };
    for (at, tool) in tools.iter().enumerate() {
        rules += &match dialect {
            Dialect::Json => format!("args_{at}: {}\n", json_rule(&schema_of(tool))),
            other => {
                let schema = held_schema(tool, schema_of);
                value_grammar::arguments(marks, other, at, schema.as_ref())?
            }
        };
    }
    Some(rules)
}

/// The rule of calls, and one of each tool, made of its name.
fn each(tools: &[Tool], rule: impl Fn(&str, usize) -> String) -> String {
    let mut rules = format!("call: {}\n", one_of(tools));
    for (at, tool) in tools.iter().enumerate() {
        rules += &rule(&json!(tool.name).to_string(), at);
    }
    rules
}

/// The rule of names of tools.
fn names(tools: &[Tool]) -> String {
    let names: Vec<String> = tools
        .iter()
        .map(|tool| json!(tool.name).to_string())
        .collect();
    format!("tool_name: {}\n", names.join(" | "))
}

/// One of the rules of tools.
pub(crate) fn one_of(tools: &[Tool]) -> String {
    let names: Vec<String> = (0..tools.len()).map(|at| format!("call_{at}")).collect();
    names.join(" | ")
}

/// The schema of a tool's arguments; any object where it has none.
pub(crate) fn parameters(tool: &Tool) -> Value {
    if tool.parameters.is_object() {
        tool.parameters.clone()
    } else {
        json!({"type": "object"})
    }
}

/// The schema of a free call's arguments.
pub(crate) fn allowed(tool: &Tool) -> Value {
    match tool.arguments {
        Arguments::Strict => parameters(tool),
        Arguments::Free => json!({"type": "object"}),
    }
}

/// The schema of a call of one of these tools, with its parts under these names.
fn calls(tools: &[Tool], keys: Keys, schema_of: SchemaOf) -> Value {
    let call = |(at, tool): (usize, &Tool)| {
        let mut properties = Map::new();
        let key = match keys {
            Keys::Tool => tool.name.as_str(),
            Keys::Named {
                id,
                name,
                arguments,
            } => {
                if let Some(id) = id {
                    properties.insert(id.to_owned(), json!({"type": "string", "maxLength": 16}));
                }
                properties.insert(name.to_owned(), json!({"const": tool.name}));
                arguments
            }
        };
        let mut schema = schema_of(tool);
        let to = key.replace('~', "~0").replace('/', "~1");
        move_references(&mut schema, &format!("#/anyOf/{at}/properties/{to}"));
        properties.insert(key.to_owned(), schema);
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
