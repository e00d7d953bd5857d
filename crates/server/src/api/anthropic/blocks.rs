//! Anthropic's messages, of content blocks, as OpenAI's, which chat templates know.
//!
//! Invariant: what the model would not see is refused, with the path of the block, or named where
//! it is a tool's result or a tool that is merely offered. What an assistant thought is given to
//! the template, which leaves out that of earlier turns, as Anthropic does.

use model_core::media::MediaKind;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::api::openai::messages::{check_number, result_text};
use crate::api::openai::tools::{GivenTool, ToolForm, Tools, tool_list};
use crate::error::ApiError;
use crate::generate::CallNumber;
use crate::json::Body;
use crate::pictures;
use crate::skips::Skips;

/// One message.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Message {
    role: String,
    content: Content,
}

/// A text, or blocks.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text or a list of content blocks")]
pub(super) enum Content {
    /// A text.
    Text(String),
    /// Blocks.
    Blocks(Vec<Value>),
}

/// What the blocks of one message are.
#[derive(Default)]
struct Parts {
    texts: Vec<String>,
    /// Texts and pictures in their order.
    content: Vec<Value>,
    thoughts: Vec<String>,
    calls: Vec<Value>,
    results: Vec<Value>,
}

/// OpenAI's messages: the system's first, and the results of tools before what the user adds.
///
/// # Errors
/// [`ApiError`] 400 with the path of what is wrong.
pub(super) fn messages(
    system: Option<&Content>,
    list: &[Message],
    skips: &Skips,
) -> Result<Value, ApiError> {
    check_number(list.len(), "messages")?;
    let mut messages = Vec::new();
    if let Some(system) = system {
        let text = parts("system", system, skips)?.only_text("system")?;
        if !text.is_empty() {
            messages.push(json!({"role": "system", "content": text}));
        }
    }
    for (at, message) in list.iter().enumerate() {
        let path = format!("messages[{at}].content");
        let parts = parts(&path, &message.content, skips)?;
        match message.role.as_str() {
            "assistant" if parts.has_pictures() => {
                let message = format!("'{path}': an assistant's message takes no images");
                return Err(ApiError::unsupported_content(path, message));
            }
            "assistant" if parts.results.is_empty() => messages.push(parts.assistant()),
            "user" if parts.calls.is_empty() => {
                let content = parts.user_content();
                let has_results = !parts.results.is_empty();
                messages.extend(parts.results);
                if content != "" || !has_results {
                    messages.push(json!({"role": "user", "content": content}));
                }
            }
            // It stays where it is: what was computed of the messages before it is used again.
            "system" => {
                let text = parts.only_text(&path)?;
                messages.push(json!({"role": "system", "content": text}));
            }
            "assistant" | "user" => {
                let message =
                    format!("'{path}': the user gives 'tool_result', the assistant 'tool_use'");
                return Err(ApiError::invalid_param(path, message));
            }
            role => {
                let param = format!("messages[{at}].role");
                let message =
                    format!("'{param}' is '{role}': it must be user, assistant or system");
                return Err(ApiError::invalid_param(param, message));
            }
        }
    }
    if list.is_empty() {
        return Err(ApiError::invalid_param("messages", "there are no messages"));
    }
    Ok(Value::Array(messages))
}

impl Parts {
    fn only_text(self, path: &str) -> Result<String, ApiError> {
        if self.calls.is_empty() && self.results.is_empty() && !self.has_pictures() {
            Ok(self.texts.join("\n"))
        } else {
            let message = format!("'{path}' takes text blocks only");
            Err(ApiError::invalid_param(path, message))
        }
    }

    /// The text of a user's message, or where it has pictures, its parts.
    fn user_content(&self) -> Value {
        if self.has_pictures() {
            Value::Array(self.content.clone())
        } else {
            json!(self.texts.join("\n"))
        }
    }

    fn has_pictures(&self) -> bool {
        self.content.len() > self.texts.len()
    }

    fn push_text(&mut self, text: &str) {
        self.texts.push(text.to_owned());
        self.content.push(json!({"type": "text", "text": text}));
    }

    fn assistant(self) -> Value {
        let mut message = json!({"role": "assistant", "content": self.texts.join("\n")});
        if !self.thoughts.is_empty() {
            message["reasoning_content"] = json!(self.thoughts.join("\n"));
        }
        if !self.calls.is_empty() {
            message["tool_calls"] = json!(self.calls);
        }
        message
    }
}

fn parts(path: &str, content: &Content, skips: &Skips) -> Result<Parts, ApiError> {
    let mut parts = Parts::default();
    let blocks = match content {
        Content::Text(text) => {
            parts.push_text(text);
            return Ok(parts);
        }
        Content::Blocks(blocks) => blocks,
    };
    for (at, block) in blocks.iter().enumerate() {
        let text = |name: &str| block.get(name).and_then(Value::as_str);
        let missing = |name: &str| {
            let param = format!("{path}[{at}].{name}");
            ApiError::invalid_param(param.clone(), format!("'{param}' is missing, or no text"))
        };
        match text("type") {
            Some("text") => {
                let text = text("text").ok_or_else(|| missing("text"))?;
                parts.push_text(text);
            }
            Some("image") => {
                let url = image_url(block).ok_or_else(|| missing("source"))?;
                parts.content.push(pictures::part(
                    MediaKind::Picture,
                    &format!("{path}[{at}]"),
                    &url,
                ));
            }
            Some("thinking") => {
                parts.thoughts.extend(text("thinking").map(str::to_owned));
            }
            Some("redacted_thinking") => {}
            Some("tool_use") => {
                let id = text("id").ok_or_else(|| missing("id"))?;
                let name = text("name").ok_or_else(|| missing("name"))?;
                // This server's own answer has a text where a model wrote no JSON.
                let arguments = block.get("input").cloned().unwrap_or_default();
                let function = json!({"name": name, "arguments": arguments});
                let call = json!({"id": id, "type": "function", "function": function});
                parts.calls.push(call);
            }
            Some("tool_result") => {
                let id = text("tool_use_id").ok_or_else(|| missing("tool_use_id"))?;
                let content = block.get("content").filter(|content| !content.is_null());
                let text = match content {
                    None => String::new(),
                    Some(content) => result_text(&format!("{path}[{at}].content"), content, skips)?,
                };
                let result = json!({"role": "tool", "tool_call_id": id, "content": text});
                parts.results.push(result);
            }
            Some("document") if block.pointer("/source/type") == Some(&json!("text")) => {
                let text = block.pointer("/source/data").and_then(Value::as_str);
                let text = text.ok_or_else(|| missing("source.data"))?;
                parts.push_text(text);
            }
            // What Anthropic's servers did in an earlier answer.
            Some(kind) if kind == "server_tool_use" || kind.ends_with("_tool_result") => {
                let param = format!("{path}[{at}]");
                skips.skip(
                    &param,
                    "the tools of Anthropic's servers are not known here",
                )?;
            }
            kind => {
                let param = format!("{path}[{at}]");
                let what = match kind {
                    Some(kind) => format!("a block of type '{kind}'"),
                    None => "a block without a type".to_owned(),
                };
                let message = format!("'{param}' is {what}: this model takes text");
                return Err(ApiError::unsupported_content(param, message));
            }
        }
    }
    Ok(parts)
}

/// The address of an image block.
fn image_url(block: &Value) -> Option<String> {
    let source = block.get("source")?;
    let text = |name: &str| source.get(name).and_then(Value::as_str);
    match text("type")? {
        "base64" => Some(pictures::data_url(text("media_type")?, text("data")?)),
        "url" => Some(text("url")?.to_owned()),
        _ => None,
    }
}

/// The tools of a request, and which of them are to be called.
///
/// # Errors
/// [`ApiError`] 400 with the path of what is wrong.
pub(super) fn tools(body: &Body) -> Result<Tools, ApiError> {
    let list = tool_list(body)?;
    let mut tools = Vec::with_capacity(list.len());
    for (at, tool) in list.iter().enumerate() {
        let kind = tool.get("type").and_then(Value::as_str);
        if kind.is_some_and(|kind| kind != "custom") {
            let kind = kind.unwrap_or_default();
            let why =
                format!("tools of type '{kind}' are not known here, and the model may do without");
            body.skips().skip(&format!("tools[{at}]"), &why)?;
            continue;
        }
        let of = |name: &str| tool.get(name).cloned().unwrap_or_default();
        let mut function = json!({"name": of("name"), "parameters": of("input_schema")});
        if let Some(description) = tool.get("description") {
            function["description"] = description.clone();
        }
        if let Some(strict) = tool.get("strict") {
            function["strict"] = strict.clone();
        }
        let function = json!({"type": "function", "function": function});
        tools.push(GivenTool { at, function });
    }
    let given = body.field("tool_choice");
    let choice = given.map(choice).transpose()?;
    let tools = Tools::new(tools, choice.as_ref(), ToolForm::InputSchema)?;
    Ok(tools.with_number(number(given)?))
}

/// `disable_parallel_tool_use` of a `tool_choice`.
fn number(choice: Option<&Value>) -> Result<CallNumber, ApiError> {
    match choice.and_then(|choice| choice.get("disable_parallel_tool_use")) {
        None | Some(Value::Null | Value::Bool(false)) => Ok(CallNumber::Several),
        Some(Value::Bool(true)) => Ok(CallNumber::One),
        Some(_) => {
            let param = "tool_choice.disable_parallel_tool_use";
            let message = format!("'{param}' is neither true nor false");
            Err(ApiError::invalid_param(param, message))
        }
    }
}

/// A `tool_choice` in the words of OpenAI.
fn choice(choice: &Value) -> Result<Value, ApiError> {
    let name = choice.get("name").cloned().unwrap_or_default();
    match choice.get("type").and_then(Value::as_str) {
        Some("auto") => Ok(json!("auto")),
        Some("any") => Ok(json!("required")),
        Some("none") => Ok(json!("none")),
        Some("tool") => Ok(json!({"type": "function", "function": {"name": name}})),
        _ => {
            let message = "'tool_choice.type' must be auto, any, tool or none";
            Err(ApiError::invalid_param("tool_choice.type", message))
        }
    }
}
