//! `tools` and `tool_choice`: what a template gets, and what an answer is held to.
//!
//! Invariant: an answer that has to call a tool can be nothing but calls, with arguments that the
//! schemas of their tools allow; `strict` and `parallel_tool_calls` are kept to, or refused.

use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::generate::{Arguments, CallNumber, Constraint, Tool, ToolPaths, ToolUse};
use crate::json::Body;

/// The tools of a request.
#[derive(Clone, Debug, Default)]
pub struct Tools {
    /// As templates get them.
    list: Vec<Value>,
    tools: Vec<Tool>,
    choice: Choice,
    number: CallNumber,
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

/// A tool that is known here.
#[derive(Clone, Debug)]
pub(crate) struct GivenTool {
    /// Its place in the request, where others may be skipped before it.
    pub(crate) at: usize,
    /// In the words of OpenAI's chat.
    pub(crate) function: Value,
}

/// How an API writes a tool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ToolForm {
    /// OpenAI's chat: what a function is stands in `function`.
    Nested,
    /// OpenAI's responses.
    Flat,
    /// Anthropic's.
    InputSchema,
}

impl ToolForm {
    fn paths(self, at: usize) -> ToolPaths {
        let (prefix, parameters) = match self {
            Self::Nested => (".function", "parameters"),
            Self::Flat => ("", "parameters"),
            Self::InputSchema => ("", "input_schema"),
        };
        ToolPaths {
            strict: format!("tools[{at}]{prefix}.strict"),
            parameters: format!("tools[{at}]{prefix}.{parameters}"),
        }
    }
}

impl Tools {
    /// The tools of a request; none where it has no `tools`.
    ///
    /// # Errors
    /// [`ApiError`] 400 with the path of what is wrong.
    pub(crate) fn read(body: &Body) -> Result<Self, ApiError> {
        let mut list = Vec::new();
        for (at, tool) in tool_list(body)?.iter().enumerate() {
            match tool.get("type").and_then(Value::as_str) {
                Some("function") | None => list.push(GivenTool {
                    at,
                    function: tool.clone(),
                }),
                Some(kind) => {
                    let why = format!("tools of type '{kind}' are not known here: 'function' is");
                    body.skips().skip(&format!("tools[{at}]"), &why)?;
                }
            }
        }
        let tools = Self::new(list, body.field("tool_choice"), ToolForm::Nested)?;
        Ok(tools.with_number(parallel(body)?))
    }

    /// These tools in the words of OpenAI's chat, which an API has in this form, and the choice
    /// among them.
    ///
    /// # Errors
    /// [`ApiError`] 400 with the path of what is wrong.
    pub(crate) fn new(
        given: Vec<GivenTool>,
        choice: Option<&Value>,
        form: ToolForm,
    ) -> Result<Self, ApiError> {
        let (mut list, mut tools) = (Vec::new(), Vec::with_capacity(given.len()));
        for GivenTool { at, function } in given {
            let paths = form.paths(at);
            let part = |name: &str| function.pointer(&format!("/function/{name}"));
            tools.push(Tool {
                name: name_of(at, &function)?,
                arguments: strictness(part("strict"), &paths.strict)?,
                parameters: part("parameters").cloned().unwrap_or_default(),
                paths,
            });
            list.push(function);
        }
        let choice = match choice {
            None => Choice::Auto,
            Some(choice) => read_choice(choice, &tools)?,
        };
        Ok(Self {
            list,
            tools,
            choice,
            number: CallNumber::Several,
        })
    }

    /// The same with so many calls in an answer.
    pub(crate) fn with_number(self, number: CallNumber) -> Self {
        Self { number, ..self }
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
            Choice::Auto | Choice::None => ToolUse::Auto {
                tools: self.tools.clone(),
                number: self.number,
            },
        }
    }

    /// What an answer is held to that has to call a tool.
    pub fn constraint(&self) -> Option<Constraint> {
        let (tools, number) = match &self.choice {
            Choice::Required => (self.tools.clone(), self.number),
            Choice::Named(chosen) => {
                let named = self.tools.iter().filter(|tool| tool.name == *chosen);
                (named.cloned().collect(), CallNumber::One)
            }
            Choice::Auto | Choice::None => return None,
        };
        (!tools.is_empty()).then_some(Constraint::Calls { tools, number })
    }
}

/// `parallel_tool_calls`.
///
/// # Errors
/// [`ApiError`] 400 where it is neither true nor false.
pub(crate) fn parallel(body: &Body) -> Result<CallNumber, ApiError> {
    match body.field("parallel_tool_calls") {
        None | Some(Value::Bool(true)) => Ok(CallNumber::Several),
        Some(Value::Bool(false)) => Ok(CallNumber::One),
        Some(_) => {
            let message = "'parallel_tool_calls' is neither true nor false";
            Err(ApiError::invalid_param("parallel_tool_calls", message))
        }
    }
}

/// `strict` of a tool, which stands at this path.
fn strictness(strict: Option<&Value>, path: &str) -> Result<Arguments, ApiError> {
    match strict {
        None | Some(Value::Null | Value::Bool(false)) => Ok(Arguments::Free),
        Some(Value::Bool(true)) => Ok(Arguments::Strict),
        Some(_) => {
            let message = format!("'{path}' is neither true nor false");
            Err(ApiError::invalid_param(path, message))
        }
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

fn name_of(at: usize, tool: &Value) -> Result<String, ApiError> {
    let wrong = |part: &str, why: &str| {
        let param = format!("tools[{at}]{part}");
        Err(ApiError::invalid_param(&param, format!("'{param}' {why}")))
    };
    match tool.pointer("/function/name") {
        Some(Value::String(name)) if !name.is_empty() => Ok(name.clone()),
        _ => wrong(".function.name", "is missing, or not a text"),
    }
}

fn read_choice(choice: &Value, tools: &[Tool]) -> Result<Choice, ApiError> {
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
        Choice::Named(name) if !tools.iter().any(|tool| tool.name == *name) => wrong(format!(
            "'tool_choice' names '{name}', which is not among the tools"
        )),
        Choice::Required if tools.is_empty() => {
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
        let ToolUse::Auto { tools, .. } = auto.used() else {
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
            let Some(Constraint::Calls { tools, .. }) = tools.constraint() else {
                unreachable!("it is forced")
            };
            let called: Vec<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
            assert_eq!(called, names);
        }
    }

    #[test]
    fn strict_and_parallel_are_read() {
        let tools = |strict: Value, parallel: Value| {
            let function = json!({"name": "f", "strict": strict});
            let body = json!({"tools": [{"type": "function", "function": function}],
                              "parallel_tool_calls": parallel});
            let body = Body::parse(body.to_string().as_bytes()).unwrap();
            Tools::read(&body).map(|tools| tools.used())
        };
        let ToolUse::Auto {
            tools: list,
            number,
        } = tools(json!(true), json!(false)).unwrap()
        else {
            unreachable!("it is free")
        };
        assert_eq!(
            (list[0].arguments, number),
            (Arguments::Strict, CallNumber::One)
        );
        let usual = tools(Value::Null, Value::Null).unwrap();
        assert_eq!(usual, tools(json!(false), json!(true)).unwrap());
        assert_ne!(usual, tools(json!(true), json!(true)).unwrap());
        let param = |strict, parallel| tools(strict, parallel).unwrap_err().param.unwrap();
        let strict = param(json!("yes"), Value::Null);
        assert_eq!(strict, "tools[0].function.strict");
        assert_eq!(param(Value::Null, json!(1)), "parallel_tool_calls");
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

    #[test]
    fn places_are_those_of_the_request_where_tools_are_skipped() {
        let body = json!({"tools": [
            {"type": "web_search"},
            {"type": "function", "function": {"name": "f", "strict": 1}},
        ]});
        let body = Body::parse(body.to_string().as_bytes()).unwrap();
        let error = Tools::read(&body).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("tools[1].function.strict"));
    }
}
