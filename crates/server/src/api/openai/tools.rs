//! `tools` and `tool_choice`: what a template gets, and what an answer is held to.
//!
//! Invariant: an answer that has to call a tool can be nothing but one call of it, with arguments
//! that its schema allows.

use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::generate::{Constraint, Tool, ToolUse};
use crate::json::Body;

/// The tools of a request.
#[derive(Clone, Debug, Default)]
pub struct Tools {
    list: Vec<Value>,
    names: Vec<String>,
    choice: Choice,
}

/// Which of them the answer calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Choice {
    #[default]
    Auto,
    None,
    Required,
    Named(String),
}

impl Tools {
    /// The tools of a request; none where it has no `tools`.
    ///
    /// # Errors
    /// [`ApiError`] 400 with the path of what is wrong.
    pub fn read(body: &Body) -> Result<Self, ApiError> {
        Self::new(tool_list(body)?.to_vec(), body.field("tool_choice"))
    }

    /// These tools, and the choice among them.
    ///
    /// # Errors
    /// [`ApiError`] 400 with the path of what is wrong.
    pub fn new(list: Vec<Value>, choice: Option<&Value>) -> Result<Self, ApiError> {
        let mut names = Vec::with_capacity(list.len());
        for (at, tool) in list.iter().enumerate() {
            names.push(name_of(at, tool)?);
        }
        let choice = match choice {
            None => Choice::Auto,
            Some(choice) => read_choice(choice, &names)?,
        };
        Ok(Self {
            list,
            names,
            choice,
        })
    }

    fn are_used(&self) -> bool {
        !self.list.is_empty() && self.choice != Choice::None
    }

    /// Adds them to the variables of a template.
    pub fn add_to(&self, variables: &mut Map<String, Value>) {
        if self.are_used() {
            variables.insert("tools".to_owned(), json!(self.list));
        }
    }

    /// Which calls the answer is looked through for.
    pub fn used(&self) -> ToolUse {
        match self.choice {
            _ if !self.are_used() => ToolUse::None,
            Choice::Required | Choice::Named(_) => ToolUse::Forced,
            Choice::Auto | Choice::None => {
                let tools = self.list.iter().zip(&self.names);
                let tools = tools.map(|(tool, name)| Tool {
                    name: name.clone(),
                    parameters: tool
                        .pointer("/function/parameters")
                        .cloned()
                        .unwrap_or_default(),
                });
                ToolUse::Auto(tools.collect())
            }
        }
    }

    /// What an answer is held to that has to call a tool.
    pub fn constraint(&self) -> Option<Constraint> {
        let is_chosen = |name: &String| match &self.choice {
            Choice::Required => true,
            Choice::Named(chosen) => chosen == name,
            Choice::Auto | Choice::None => false,
        };
        let chosen = self.list.iter().zip(&self.names);
        let chosen = chosen.filter(|(_, name)| is_chosen(name)).enumerate();
        let calls: Vec<Value> = chosen
            .map(|(at, (tool, name))| call(at, tool, name))
            .collect();
        (!calls.is_empty()).then(|| Constraint::JsonSchema {
            schema: json!({"anyOf": calls}),
            param: "tools",
        })
    }
}

/// The `tools` of a request in the words of its API; none where it has no such field.
///
/// # Errors
/// [`ApiError`] 400 where they are no list.
pub fn tool_list(body: &Body) -> Result<&[Value], ApiError> {
    match body.field("tools") {
        None => Ok(&[]),
        Some(Value::Array(list)) => Ok(list),
        Some(_) => Err(ApiError::invalid_param("tools", "'tools' is not a list")),
    }
}

/// The schema of a call, as number `at` of several.
fn call(at: usize, tool: &Value, name: &str) -> Value {
    let parameters = tool.pointer("/function/parameters");
    let mut parameters = match parameters {
        Some(schema) if schema.is_object() => schema.clone(),
        _ => json!({"type": "object"}),
    };
    move_references(
        &mut parameters,
        &format!("#/anyOf/{at}/properties/arguments"),
    );
    json!({
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": false,
    })
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

fn name_of(at: usize, tool: &Value) -> Result<String, ApiError> {
    let wrong = |part: &str, why: &str| {
        let param = format!("tools[{at}]{part}");
        Err(ApiError::invalid_param(&param, format!("'{param}' {why}")))
    };
    match tool.get("type").and_then(Value::as_str) {
        Some("function") | None => {}
        Some(other) => {
            return Err(ApiError::unsupported(
                format!("tools[{at}].type"),
                format!("tools of type '{other}' are not supported: 'function' is"),
            ));
        }
    }
    match tool.pointer("/function/name") {
        Some(Value::String(name)) if !name.is_empty() => Ok(name.clone()),
        _ => wrong(".function.name", "is missing, or not a text"),
    }
}

fn read_choice(choice: &Value, names: &[String]) -> Result<Choice, ApiError> {
    let wrong = |message: String| Err(ApiError::invalid_param("tool_choice", message));
    let choice = match (choice.as_str(), choice.pointer("/function/name")) {
        (Some("auto"), _) => Choice::Auto,
        (Some("none"), _) => Choice::None,
        (Some("required"), _) => Choice::Required,
        (None, Some(Value::String(name))) => Choice::Named(name.clone()),
        _ => {
            return wrong(
                "'tool_choice' is one of auto, none, required, or {\"type\": \"function\", \
                 \"function\": {\"name\": NAME}}"
                    .to_owned(),
            );
        }
    };
    match &choice {
        Choice::Named(name) if !names.contains(name) => wrong(format!(
            "'tool_choice' names '{name}', which is not among the tools"
        )),
        Choice::Required if names.is_empty() => {
            wrong("'tool_choice' is 'required', but there are no tools".to_owned())
        }
        _ => Ok(choice),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    fn read(choice: Value) -> Result<Tools, ApiError> {
        let body = json!({"tools": [
            {"type": "function", "function": {"name": "f", "parameters": {
                "type": "object", "$defs": {"n": {"type": "integer"}},
                "properties": {"a": {"$ref": "#/$defs/n"}}}}},
            {"type": "function", "function": {"name": "g"}},
        ], "tool_choice": choice});
        Tools::read(&Body::parse(body.to_string().as_bytes()).unwrap())
    }

    fn has_variable(tools: &Tools) -> bool {
        let mut variables = Map::new();
        tools.add_to(&mut variables);
        variables.contains_key("tools")
    }

    #[test]
    fn choices_decide_what_an_answer_may_be() {
        let auto = read(Value::Null).unwrap();
        let ToolUse::Auto(tools) = auto.used() else {
            unreachable!("it is free")
        };
        let names: Vec<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
        assert_eq!(names, ["f", "g"]);
        assert_eq!(tools[0].parameters["type"], "object");
        assert!(has_variable(&auto) && auto.constraint().is_none());
        let none = read(json!("none")).unwrap();
        assert_eq!(none.used(), ToolUse::None);
        assert!(!has_variable(&none) && none.constraint().is_none());
        for (choice, names) in [
            (json!("required"), &["f", "g"][..]),
            (
                json!({"type": "function", "function": {"name": "g"}}),
                &["g"],
            ),
        ] {
            let tools = read(choice).unwrap();
            assert_eq!(tools.used(), ToolUse::Forced);
            let Some(Constraint::JsonSchema { schema, .. }) = tools.constraint() else {
                unreachable!("it is forced")
            };
            let calls = schema["anyOf"].as_array().unwrap().iter();
            let called: Vec<&Value> = calls.map(|c| &c["properties"]["name"]["const"]).collect();
            assert_eq!(json!(called), json!(names));
        }
    }

    #[test]
    fn references_follow_their_schema() {
        let tools = read(json!("required")).unwrap();
        let Some(Constraint::JsonSchema { schema, .. }) = tools.constraint() else {
            unreachable!("it is forced")
        };
        let target = schema
            .pointer("/anyOf/0/properties/arguments/properties/a/$ref")
            .unwrap();
        let target = target.as_str().unwrap().trim_start_matches('#');
        assert_eq!(schema.pointer(target), Some(&json!({"type": "integer"})));
    }

    #[test]
    fn wrong_choices_are_refused() {
        for choice in [json!("f"), json!(1), json!({"function": {"name": "h"}})] {
            assert_eq!(
                read(choice).unwrap_err().param.as_deref(),
                Some("tool_choice")
            );
        }
        let body = Body::parse(b"{\"tool_choice\": \"required\"}").unwrap();
        assert!(Tools::read(&body).is_err());
        let body =
            Body::parse(b"{\"tools\": [{\"type\": \"function\", \"function\": {}}]}").unwrap();
        assert_eq!(
            Tools::read(&body).unwrap_err().param.as_deref(),
            Some("tools[0].function.name")
        );
    }
}
