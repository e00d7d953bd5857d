//! The grammar of a call's arguments in the notations of Gemma 4 and of Python.
//!
//! Invariant: a value is held to its schema, or there is no grammar. An object in Python's notation
//! is JSON, as the templates of its models write it.

use serde_json::{Map, Value, json};

use crate::mark_rules::Marks;
use crate::schema::{MAX_DEPTH, referred};
use crate::tagged_grammar::{Held, Member, Members, json_of, members, text_of};
use crate::value::{Dialect, GEMMA_QUOTE};

/// Words of a schema that say nothing of a value.
const NOTES: [&str; 7] = [
    "title",
    "description",
    "default",
    "examples",
    "$schema",
    "$defs",
    "definitions",
];

/// The rules that all calls share: `text`, `any` and `any_members`.
pub(crate) fn shared(marks: &mut Marks<'_>, dialect: Dialect) -> String {
    match dialect {
        Dialect::Python => "text: /'([^'\\\\\\n]|\\\\['\\\\nrt])*'/\n\
             any: %json {}\n\
             any_members: any_member (\", \" any_member)*\n\
             any_member: /[a-zA-Z_][a-zA-Z0-9_]*/ \"=\" (any | text | \"True\" | \"False\" | \"None\")\n"
            .to_owned(),
        Dialect::Gemma | Dialect::Json => {
            let until = marks.until("text_end", GEMMA_QUOTE);
            let quote = marks.mark(GEMMA_QUOTE);
            format!(
                "{until}text: {quote} text_end\n\
                 any: text | any_word | \"[\" (any (\",\" any)*)? \"]\" | \"{{\" any_members? \"}}\"\n\
                 any_word: %json {{\"type\": [\"number\", \"boolean\", \"null\"]}}\n\
                 any_members: any_member (\",\" any_member)*\n\
                 any_member: /[a-zA-Z_][a-zA-Z0-9_]*/ \":\" any\n"
            )
        }
    }
}

/// The rules of the arguments of the tool with this number; any where no schema is given.
pub(crate) fn arguments(
    marks: &mut Marks<'_>,
    dialect: Dialect,
    at: usize,
    schema: Option<&Value>,
) -> Option<String> {
    let free = Value::Object(Map::new());
    let whole = schema.unwrap_or(&free);
    let mut values = Values {
        marks,
        dialect,
        whole,
        at,
        n_rules: 0,
        rules: String::new(),
    };
    let around = match dialect {
        Dialect::Python => Around {
            open: "\"(\"",
            is: "=",
            between: "\", \"",
            close: "\")\"",
        },
        Dialect::Gemma | Dialect::Json => GEMMA_OBJECT,
    };
    let all = values.object(around, whole, 0)?;
    Some(format!("args_{at}: {all}\n{}", values.rules))
}

/// The texts around the members of an object.
#[derive(Clone, Copy)]
struct Around {
    open: &'static str,
    /// Between a key and its value.
    is: &'static str,
    between: &'static str,
    close: &'static str,
}

const GEMMA_OBJECT: Around = Around {
    open: "\"{\"",
    is: ":",
    between: "\",\"",
    close: "\"}\"",
};

struct Values<'v, 't> {
    marks: &'v mut Marks<'t>,
    dialect: Dialect,
    whole: &'v Value,
    /// The number of the tool.
    at: usize,
    n_rules: usize,
    rules: String,
}

impl Values<'_, '_> {
    /// A new rule, by its name.
    fn rule(&mut self, rule: &str) -> String {
        let name = format!("w_{}_{}", self.at, self.n_rules);
        self.n_rules += 1;
        self.rules += &format!("{name}: {rule}\n");
        name
    }

    fn object(&mut self, around: Around, schema: &Value, depth: usize) -> Option<String> {
        let Around { open, close, .. } = around;
        match members(self.whole, schema)? {
            Members::Any => Some(format!("{open} any_members? {close}")),
            Members::Listed(listed) => match self.members(around, &listed, depth)? {
                Some(all) => Some(format!("{open} {all} {close}")),
                None => Some(format!("{open} {close}")),
            },
        }
    }

    /// The rule of members with commas between them; `Some(None)` where there are none.
    fn members(
        &mut self,
        around: Around,
        members: &[Member<'_>],
        depth: usize,
    ) -> Option<Option<String>> {
        // From the last to the first: what may come first, and what may follow another.
        let (mut first, mut rest) = (None::<String>, None::<String>);
        let mut may_be_empty = true;
        for member in members.iter().rev() {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
            if member.key.is_empty() || !member.key.chars().all(is_plain) {
                return None;
            }
            let value = self.value(member.schema, depth + 1)?;
            let key = json!(format!("{}{}", member.key, around.is));
            let member_rule = self.rule(&format!("{key} {value}"));
            let behind = rest.as_deref().unwrap_or_default();
            let as_first = format!("{member_rule} {behind}");
            let as_next = format!("{} {member_rule}", around.between);
            let next = match (&first, member.is_required) {
                (Some(other), false) => self.rule(&format!("{as_first} | {other}")),
                _ => self.rule(&as_first),
            };
            let optional = if member.is_required { "" } else { "?" };
            rest = Some(self.rule(&format!("({as_next}){optional} {behind}")));
            first = Some(next);
            may_be_empty &= !member.is_required;
        }
        let optional = if may_be_empty { "?" } else { "" };
        Some(first.map(|first| format!("{first}{optional}")))
    }

    /// A value of this schema.
    fn value(&mut self, schema: &Value, depth: usize) -> Option<String> {
        if depth > MAX_DEPTH {
            return None;
        }
        let schema = referred(self.whole, schema);
        let words = match schema {
            Value::Bool(true) => return Some("any".to_owned()),
            other => other.as_object()?,
        };
        let says = |word: &String| !NOTES.contains(&word.as_str());
        if let Some(values) = words.get("enum").and_then(Value::as_array) {
            return self.one_of(values);
        }
        if let Some(value) = words.get("const") {
            return self.literal(value);
        }
        for word in ["anyOf", "oneOf"] {
            let Some(schemas) = words.get(word).and_then(Value::as_array) else {
                continue;
            };
            if words.keys().filter(|word| says(word)).count() > 1 {
                return None;
            }
            let mut values = Vec::with_capacity(schemas.len());
            for schema in schemas {
                values.push(self.value(schema, depth + 1)?);
            }
            return Some(format!("({})", values.join(" | ")));
        }
        match words.get("type") {
            None if !words.keys().any(says) => Some("any".to_owned()),
            Some(Value::String(kind)) => self.kind(kind, words, depth),
            Some(Value::Array(kinds)) => {
                let mut values = Vec::with_capacity(kinds.len());
                for kind in kinds {
                    let mut words = words.clone();
                    words.insert("type".to_owned(), kind.clone());
                    values.push(self.kind(kind.as_str()?, &words, depth)?);
                }
                Some(format!("({})", values.join(" | ")))
            }
            _ => None,
        }
    }

    fn kind(&mut self, kind: &str, words: &Map<String, Value>, depth: usize) -> Option<String> {
        let schema = Value::Object(words.clone());
        match kind {
            "string" => match text_of(&schema)? {
                Held::Any => Some("text".to_owned()),
                Held::OneOf(_) | Held::Json => None,
            },
            "boolean" => self.one_of(&[json!(true), json!(false)]),
            "null" => self.literal(&Value::Null),
            "array" => self.array(words, depth),
            "object" if self.dialect == Dialect::Gemma => self.object(GEMMA_OBJECT, &schema, depth),
            // Numbers have one notation.
            "object" | "number" | "integer" => {
                let json = json_of(self.whole, &schema);
                Some(self.rule(&json))
            }
            _ => None,
        }
    }

    fn array(&mut self, words: &Map<String, Value>, depth: usize) -> Option<String> {
        let known = ["type", "items", "minItems", "maxItems"];
        let is_known = |word: &&str| NOTES.contains(word) || known.contains(word);
        if !words.keys().all(|word| is_known(&word.as_str())) {
            return None;
        }
        let number = |word: &str| match words.get(word) {
            Some(number) => number.as_u64().map(Some),
            None => Some(None),
        };
        let (least, most) = (number("minItems")?.unwrap_or(0), number("maxItems")?);
        if most.is_some_and(|most| most < least.max(1)) {
            return None;
        }
        let item = match words.get("items") {
            Some(items) => self.value(items, depth + 1)?,
            None => "any".to_owned(),
        };
        let between = match self.dialect {
            Dialect::Python => "\", \"",
            Dialect::Gemma | Dialect::Json => "\",\"",
        };
        let most = most.map_or(String::new(), |most| (most - 1).to_string());
        let more = format!("{item} ({between} {item}){{{},{most}}}", least.max(1) - 1);
        let optional = if least == 0 { "?" } else { "" };
        Some(self.rule(&format!("\"[\" ({more}){optional} \"]\"")))
    }

    fn one_of(&mut self, values: &[Value]) -> Option<String> {
        let mut texts = Vec::with_capacity(values.len());
        for value in values {
            texts.push(self.literal(value)?);
        }
        Some(format!("({})", texts.join(" | ")))
    }

    /// This value and no other.
    fn literal(&mut self, value: &Value) -> Option<String> {
        let is_python = self.dialect == Dialect::Python;
        let word = match value {
            Value::String(text) if is_python => {
                let text = text.replace('\\', "\\\\").replace('\'', "\\'");
                format!("'{}'", text.replace('\n', "\\n"))
            }
            Value::String(text) => {
                let quote = self.marks.mark(GEMMA_QUOTE);
                let text = if text.is_empty() {
                    String::new()
                } else {
                    json!(text).to_string()
                };
                return (!text.contains(GEMMA_QUOTE)).then(|| format!("({quote} {text} {quote})"));
            }
            Value::Bool(true) if is_python => "True".to_owned(),
            Value::Bool(false) if is_python => "False".to_owned(),
            Value::Null if is_python => "None".to_owned(),
            Value::Array(_) | Value::Object(_) => return None,
            other => other.to_string(),
        };
        Some(json!(word).to_string())
    }
}
