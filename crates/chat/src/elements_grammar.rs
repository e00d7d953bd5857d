//! The grammar of a call whose arguments are elements in elements: MiniMax-M3.
//!
//! Invariant: as of [`crate::tagged_grammar`]; what has no elements in the schema is JSON.

use serde_json::{Value, json};

use crate::mark_rules::Marks;
use crate::schema::{MAX_DEPTH, referred};
use crate::tagged_grammar::{Held, Member, Members, json_of, members, text_of};

/// The end of a call.
pub(crate) fn end(space: &str) -> String {
    format!("{space}</invoke>")
}

/// The rules of a call of the tool with this number and name behind the mark; free but for the name
/// where no schema is given.
pub(crate) fn call(
    marks: &mut Marks<'_>,
    space: &str,
    at: usize,
    name: &str,
    schema: Option<&Value>,
) -> Option<String> {
    let head = format!("call_{at}: {} \"\\\">\"", json!(name));
    let listed = match schema {
        Some(schema) => members(schema, schema)?,
        None => Members::Any,
    };
    let (Members::Listed(listed), Some(whole)) = (listed, schema) else {
        return Some(format!("{head} until_end\n"));
    };
    let mut elements = Elements {
        marks,
        space,
        whole,
        at,
        n_rules: 0,
        rules: String::new(),
    };
    let all = elements.members(&listed, 0)?;
    let rules = std::mem::take(&mut elements.rules);
    let end = marks.mark(&end(space));
    Some(format!("{head} {all} {end}\n{rules}"))
}

struct Elements<'e, 't> {
    marks: &'e mut Marks<'t>,
    space: &'e str,
    whole: &'e Value,
    /// The number of the tool.
    at: usize,
    n_rules: usize,
    rules: String,
}

impl Elements<'_, '_> {
    fn rule_name(&mut self) -> String {
        self.n_rules += 1;
        format!("e_{}_{}", self.at, self.n_rules)
    }

    fn members(&mut self, members: &[Member<'_>], depth: usize) -> Option<String> {
        let mut all = Vec::with_capacity(members.len());
        for member in members {
            let element = self.element(member.key, member.schema, depth)?;
            let optional = if member.is_required { "" } else { "?" };
            all.push(format!("{element}{optional}"));
        }
        Some(all.join(" "))
    }

    /// The rule of an element with this name.
    fn element(&mut self, name: &str, schema: &Value, depth: usize) -> Option<String> {
        if depth > MAX_DEPTH {
            return None;
        }
        let schema = referred(self.whole, schema);
        let rule = self.rule_name();
        let open = self.marks.mark(&format!("{}<{name}>", self.space));
        let close = format!("{}</{name}>", self.space);
        let inside = self.inside(schema, depth)?;
        let value = match inside {
            Some(inside) => format!("{inside} {}", self.marks.mark(&close)),
            None => match text_of(schema)? {
                Held::Any => {
                    let until = format!("{rule}_text");
                    self.rules += &self.marks.until(&until, &close);
                    until
                }
                Held::OneOf(texts) => {
                    format!("({}) {}", texts.join(" | "), self.marks.mark(&close))
                }
                Held::Json => {
                    let json = json_of(self.whole, schema);
                    self.rules += &format!("{rule}_json: {json}\n");
                    format!("{rule}_json {}", self.marks.mark(&close))
                }
            },
        };
        self.rules += &format!("{rule}: {open} {value}\n");
        Some(rule)
    }

    /// The elements in one of this schema. `Some(None)` where it has a text or JSON in it: what is
    /// empty has no element, and would be read as a text.
    fn inside(&mut self, schema: &Value, depth: usize) -> Option<Option<String>> {
        match schema.get("type").and_then(Value::as_str) {
            Some("object") => match members(self.whole, schema)? {
                Members::Listed(listed) if listed.iter().any(|member| member.is_required) => {
                    self.members(&listed, depth + 1).map(Some)
                }
                _ => Some(None),
            },
            Some("array") => {
                let words = schema.as_object()?;
                let is_known = |word: &String| {
                    ["type", "items", "title", "description", "default"].contains(&word.as_str())
                };
                match words.get("items") {
                    Some(items) if words.keys().all(is_known) => {
                        let item = self.element("item", items, depth + 1)?;
                        Some(Some(format!("{item}+")))
                    }
                    _ => Some(None),
                }
            }
            _ => Some(None),
        }
    }
}
