//! `input` of `/v1/responses`: items, as messages for a chat template.
//!
//! Invariant: what the model would not see is refused, with the path of the item. What an assistant
//! thought, said and called in a row is one message, as templates have it.

use serde_json::{Map, Value, json};

use crate::api::openai::messages::{check_number, content_text, content_value, result_text};
use crate::conversations::AssistantMessage;
use crate::error::ApiError;
use crate::skips::Skips;

/// What was said before, and what a request adds to it.
///
/// # Errors
/// [`ApiError`] 400 with the path of the first item that is wrong.
pub(super) fn messages(
    previous: Vec<Value>,
    input: &Value,
    skips: &Skips,
) -> Result<Vec<Value>, ApiError> {
    let mut reader = Reader {
        messages: previous,
        answer: None,
        skips,
    };
    match input {
        Value::String(text) => reader
            .messages
            .push(json!({"role": "user", "content": text})),
        // Clients ask so whether a server answers at all.
        Value::Array(items) if items.is_empty() && reader.messages.is_empty() => {
            reader.messages.push(json!({"role": "user", "content": ""}));
        }
        Value::Array(items) => {
            check_number(items.len() + reader.messages.len(), "input")?;
            for (at, item) in items.iter().enumerate() {
                reader.item(&format!("input[{at}]"), item)?;
            }
        }
        _ => {
            let message = "'input' is needed: a text or a list of items";
            return Err(ApiError::invalid_param("input", message));
        }
    }
    reader.end_answer();
    Ok(reader.messages)
}

/// The messages with the instructions before them. Templates have one message of the system at
/// most, so instructions and those at the beginning are one.
pub(super) fn with_instructions(instructions: Option<&str>, messages: &[Value]) -> Vec<Value> {
    let is_system = |message: &&Value| message["role"] == "system";
    let n_system = messages.iter().take_while(is_system).count();
    let (system, others) = messages.split_at(n_system);
    let texts = system
        .iter()
        .filter_map(|message| message["content"].as_str());
    let texts: Vec<&str> = instructions.into_iter().chain(texts).collect();
    let mut all = Vec::with_capacity(others.len() + 1);
    if !texts.is_empty() {
        all.push(json!({"role": "system", "content": texts.join("\n\n")}));
    }
    all.extend(others.iter().cloned());
    all
}

struct Reader<'s> {
    messages: Vec<Value>,
    /// The assistant's message that the next item may belong to.
    answer: Option<AssistantMessage>,
    skips: &'s Skips,
}

impl Reader<'_> {
    fn item(&mut self, path: &str, item: &Value) -> Result<(), ApiError> {
        let Value::Object(members) = item else {
            let message = format!("'{path}' is not an object");
            return Err(ApiError::invalid_param(path, message));
        };
        let kind = members.get("type").and_then(Value::as_str);
        match kind {
            Some("message") => self.message(path, members),
            None if members.contains_key("role") => self.message(path, members),
            Some("reasoning") => self.reasoning(path, members),
            Some("function_call" | "custom_tool_call" | "local_shell_call") => {
                self.call(path, members)
            }
            Some(
                "function_call_output" | "custom_tool_call_output" | "local_shell_call_output",
            ) => self.output(path, members),
            Some("compaction" | "compaction_summary" | "context_compaction") => {
                self.compaction(path, members)
            }
            // What OpenAI's servers did in an earlier answer.
            Some(kind) if kind.ends_with("_call") || kind.starts_with("mcp_") => self
                .skips
                .skip(path, "the tools of OpenAI's servers are not known here"),
            Some("item_reference") => {
                let message = format!(
                    "'{path}' is a reference: send the item itself, or 'previous_response_id'"
                );
                Err(ApiError::unsupported(path, message))
            }
            _ => {
                let kind = kind.unwrap_or("without a type");
                let message = format!(
                    "'{path}' is an item '{kind}': message, reasoning, function_call and \
                     function_call_output are supported"
                );
                Err(ApiError::unsupported_content(path, message))
            }
        }
    }

    fn message(&mut self, path: &str, members: &Map<String, Value>) -> Result<(), ApiError> {
        let role = text(path, members, "role")?;
        let content = members.get("content").unwrap_or(&Value::Null);
        let content_path = format!("{path}.content");
        let role = match role {
            "assistant" => {
                let content = content_text(&content_path, content)?;
                let answer = self.answer_where(|answer| answer.content.is_none());
                answer.content = Some(content);
                return Ok(());
            }
            "user" => "user",
            // OpenAI's newer name of the system's role, which templates do not know.
            "system" | "developer" => "system",
            other => {
                let param = format!("{path}.role");
                let message = format!(
                    "'{param}' is '{other}': it must be user, assistant, system or developer"
                );
                return Err(ApiError::invalid_param(param, message));
            }
        };
        let content = match role {
            "user" => content_value(&content_path, content)?,
            _ => json!(content_text(&content_path, content)?),
        };
        self.end_answer();
        self.messages
            .push(json!({"role": role, "content": content}));
        Ok(())
    }

    /// What a model thought: its text, or where there is none, its summary. Encrypted reasoning
    /// comes from another server and is left out.
    fn reasoning(&mut self, path: &str, members: &Map<String, Value>) -> Result<(), ApiError> {
        let texts = |name: &str| {
            let parts = members.get(name).and_then(Value::as_array);
            let texts = parts.into_iter().flatten();
            let texts = texts.filter_map(|part| part.get("text")?.as_str());
            texts.collect::<Vec<_>>().join("\n")
        };
        for name in ["content", "summary"] {
            let value = members.get(name).filter(|value| !value.is_null());
            if value.is_some_and(|value| !value.is_array()) {
                let param = format!("{path}.{name}");
                let message = format!("'{param}' is not a list of parts");
                return Err(ApiError::invalid_param(param, message));
            }
        }
        let text = match texts("content") {
            none if none.is_empty() => texts("summary"),
            text => text,
        };
        if !text.is_empty() {
            let answer = self.answer_where(AssistantMessage::is_empty);
            answer.reasoning = text;
        }
        Ok(())
    }

    fn call(&mut self, path: &str, members: &Map<String, Value>) -> Result<(), ApiError> {
        let id = text(path, members, "call_id")?;
        let written = |name: &str| members.get(name).unwrap_or(&Value::Null);
        // Calls of other types than functions are such in the words of a template.
        let call = match members.get("type").and_then(Value::as_str) {
            Some("custom_tool_call") => {
                let arguments = json!({"input": text(path, members, "input")?}).to_string();
                AssistantMessage::call(id, text(path, members, "name")?, &arguments)
            }
            Some("local_shell_call") => {
                AssistantMessage::call(id, "local_shell", &written("action").to_string())
            }
            _ => {
                let name = text(path, members, "name")?;
                AssistantMessage::call(id, name, text(path, members, "arguments")?)
            }
        };
        self.answer_where(|_| true).calls.push(call);
        Ok(())
    }

    fn output(&mut self, path: &str, members: &Map<String, Value>) -> Result<(), ApiError> {
        let id = text(path, members, "call_id")?;
        let output = match members.get("output") {
            None | Some(Value::Null) => String::new(),
            Some(output) => result_text(&format!("{path}.output"), output, self.skips)?,
        };
        self.end_answer();
        let Some(name) = self.name_of_call(id) else {
            let param = format!("{path}.call_id");
            let message = format!(
                "'{param}' is '{id}', but there is no function_call of this id before it: send it, \
                 or the 'previous_response_id' of the response with it"
            );
            return Err(ApiError::invalid_param(param, message));
        };
        self.messages.push(json!({
            "role": "tool", "tool_call_id": id, "name": name, "content": output,
        }));
        Ok(())
    }

    /// The summary that this server made of a conversation that was too long.
    fn compaction(&mut self, path: &str, members: &Map<String, Value>) -> Result<(), ApiError> {
        let Some(summary) = super::compact::summary_of(members) else {
            return self
                .skips
                .skip(path, "it is not of this server, which cannot read it");
        };
        self.end_answer();
        let content = super::compact::as_message(&summary);
        self.messages
            .push(json!({"role": "user", "content": content}));
        Ok(())
    }

    /// The function that a call of this id calls.
    fn name_of_call(&self, id: &str) -> Option<String> {
        let calls = self.messages.iter().rev();
        let mut calls = calls.filter_map(|message| message.get("tool_calls")?.as_array());
        calls.find_map(|calls| {
            let call = calls.iter().find(|call| call["id"] == id)?;
            call.pointer("/function/name")?.as_str().map(str::to_owned)
        })
    }

    /// The message that is open, where it can take more, or else a new one.
    fn answer_where(
        &mut self,
        can_take: impl FnOnce(&AssistantMessage) -> bool,
    ) -> &mut AssistantMessage {
        if self.answer.as_ref().is_some_and(|answer| !can_take(answer)) {
            self.end_answer();
        }
        self.answer.get_or_insert_default()
    }

    fn end_answer(&mut self) {
        if let Some(answer) = self.answer.take() {
            self.messages.push(answer.into_json());
        }
    }
}

/// A member that is a text.
fn text<'m>(path: &str, members: &'m Map<String, Value>, name: &str) -> Result<&'m str, ApiError> {
    let text = members.get(name).and_then(Value::as_str);
    text.ok_or_else(|| {
        let param = format!("{path}.{name}");
        ApiError::invalid_param(
            param.clone(),
            format!("'{param}' is missing, or not a text"),
        )
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    #[test]
    fn what_an_assistant_did_in_a_row_is_one_message() {
        let input = json!([
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [
                {"type": "input_text", "text": "How is"}, {"type": "input_text", "text": "it?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
                {"type": "reasoning_text", "text": "I look."}]},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [
                {"type": "output_text", "text": "Looking.", "annotations": []}]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{\"x\": 1}"},
            {"type": "function_call", "call_id": "b", "name": "g", "arguments": ""},
            {"type": "function_call_output", "call_id": "a", "output": "1"},
            {"type": "function_call_output", "call_id": "b", "output": [
                {"type": "input_text", "text": "2"}]},
            {"role": "assistant", "content": "One."},
            {"role": "assistant", "content": "Two."},
        ]);
        let read = messages(
            vec![json!({"role": "user", "content": "Hello"})],
            &input,
            &Skips::default(),
        )
        .unwrap();
        let call = AssistantMessage::call;
        let expected = json!([
            {"role": "user", "content": "Hello"},
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "How is\nit?"},
            {"role": "assistant", "content": "Looking.", "reasoning_content": "I look.",
             "tool_calls": [call("a", "f", "{\"x\": 1}"), call("b", "g", "")]},
            {"role": "tool", "tool_call_id": "a", "name": "f", "content": "1"},
            {"role": "tool", "tool_call_id": "b", "name": "g", "content": "2"},
            {"role": "assistant", "content": "One."},
            {"role": "assistant", "content": "Two."},
        ]);
        assert_eq!(json!(read), expected);
    }

    #[test]
    fn instructions_join_the_system_s_first_messages() {
        let list = [
            json!({"role": "system", "content": "b"}),
            json!({"role": "user", "content": "c"}),
            json!({"role": "system", "content": "d"}),
        ];
        let all = with_instructions(Some("a"), &list);
        assert_eq!(all[0], json!({"role": "system", "content": "a\n\nb"}));
        assert_eq!(all[1..], list[1..]);
        assert_eq!(with_instructions(None, &list[1..]), list[1..]);
    }

    #[test]
    fn errors_name_the_item() {
        let image = json!({"type": "input_image"});
        for (input, param) in [
            (json!(null), "input"),
            (json!([1]), "input[0]"),
            (json!([{"role": "user"}]), "input[0].content"),
            (json!([{"role": "wizard", "content": "a"}]), "input[0].role"),
            (
                json!([{"role": "user", "content": [image]}]),
                "input[0].content[0].image_url",
            ),
            (json!([{"type": "wish"}]), "input[0]"),
            (json!([{"type": "item_reference", "id": "x"}]), "input[0]"),
            (
                json!([{"type": "function_call", "call_id": "a", "name": "f", "arguments": {}}]),
                "input[0].arguments",
            ),
            (
                json!([{"type": "function_call", "name": "f"}]),
                "input[0].call_id",
            ),
            (
                json!([{"type": "function_call_output", "call_id": "a", "output": "1"}]),
                "input[0].call_id",
            ),
        ] {
            let error = messages(Vec::new(), &input, &Skips::default()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{input}");
        }
    }
}
