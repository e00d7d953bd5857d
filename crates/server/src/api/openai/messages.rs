//! Messages of OpenAI's chat, as chat templates take them.
//!
//! Invariant: what a template would not see is refused, with the path of the part; an earlier
//! answer of this server is taken as it was given, also with arguments that are no JSON. The form
//! in which a template wants calls and reasoning is not known here (`HistoryShape`).

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::generate::ChatPrompt;
use crate::json::Body;
use crate::pictures;
use crate::skips::Skips;

/// Messages of one request: rendering them takes time and memory.
const MAX_MESSAGES: usize = 16_384;

/// Roles that chat templates know.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// Names under which clients send an assistant's reasoning.
const REASONING: [&str; 3] = ["reasoning_content", "reasoning", "thinking"];

/// Refuses more messages than a template should render, under the name of their field.
///
/// # Errors
/// [`ApiError`] 400 with the numbers.
pub(crate) fn check_number(n: usize, param: &str) -> Result<(), ApiError> {
    if n > MAX_MESSAGES {
        let message = format!("there are {n} messages: at most {MAX_MESSAGES} are taken");
        Err(ApiError::invalid_param(param, message))
    } else {
        Ok(())
    }
}

/// The messages of a request.
///
/// # Errors
/// [`ApiError`] 400 with the path of the first that is wrong.
pub(crate) fn messages(list: &Value, skips: &Skips) -> Result<Vec<Value>, ApiError> {
    let Value::Array(list) = list else {
        return Err(ApiError::invalid_param(
            "messages",
            "'messages' is not a list",
        ));
    };
    if list.is_empty() {
        return Err(ApiError::invalid_param("messages", "there are no messages"));
    }
    check_number(list.len(), "messages")?;
    let number = list.iter().enumerate();
    number
        .map(|(at, message)| read_message(at, message, skips))
        .collect()
}

/// The fields that say how a prompt of messages ends.
#[derive(Deserialize)]
struct EndFields {
    continue_final_message: Option<bool>,
    add_generation_prompt: Option<bool>,
}

/// Checks `continue_final_message` and `add_generation_prompt`. The last message is always
/// continued where it can be.
///
/// # Errors
/// [`ApiError`] 400 where they contradict each other or the messages.
pub(crate) fn check_end(body: &Body, chat: &ChatPrompt) -> Result<(), ApiError> {
    let fields: EndFields = body.get()?;
    match (fields.continue_final_message, fields.add_generation_prompt) {
        (Some(true), Some(true)) => {
            let message = "'continue_final_message' and 'add_generation_prompt' cannot both be true: an \
                           answer is continued, or a new one begins";
            Err(ApiError::invalid_param("continue_final_message", message))
        }
        (Some(true), _) if chat.begun_answer().is_none() => {
            let message = "'continue_final_message' needs a last message of the assistant's with text, and no \
                           calls or reasoning, behind another message";
            Err(ApiError::invalid_param("continue_final_message", message))
        }
        (None | Some(false), Some(false)) => {
            let message = "'add_generation_prompt' is not supported: use 'continue_final_message', or \
                           /apply-template and /v1/completions";
            Err(ApiError::unsupported("add_generation_prompt", message))
        }
        _ => Ok(()),
    }
}

fn read_message(at: usize, message: &Value, skips: &Skips) -> Result<Value, ApiError> {
    let wrong = |part: &str, why: &str| {
        let param = format!("messages[{at}]{part}");
        ApiError::invalid_param(&param, format!("'{param}' {why}"))
    };
    let Value::Object(members) = message else {
        return Err(wrong("", "is not an object"));
    };
    let Some(Value::String(role)) = members.get("role") else {
        return Err(wrong(".role", "is missing, or not a text"));
    };
    if !ROLES.contains(&role.as_str()) {
        let why = format!("is '{role}': it must be one of {}", ROLES.join(", "));
        return Err(wrong(".role", &why));
    }
    for name in ["function_call", "audio"] {
        let value = members.get(name).filter(|value| !value.is_null());
        if value.is_some_and(|value| value.as_array().is_none_or(|list| !list.is_empty())) {
            return Err(ApiError::unsupported(
                format!("messages[{at}].{name}"),
                format!("'messages[{at}].{name}' is not supported"),
            ));
        }
    }
    let calls = read_calls(at, members.get("tool_calls").unwrap_or(&Value::Null))?;
    let content = match members.get("content") {
        None | Some(Value::Null) if role == "assistant" || role == "tool" => json!(""),
        None | Some(Value::Null) => return Err(wrong(".content", "is missing")),
        Some(content) => {
            let path = format!("messages[{at}].content");
            if role == "tool" {
                json!(result_text(&path, content, skips)?)
            } else {
                content_value(&path, content)?
            }
        }
    };
    let mut out = Map::new();
    // OpenAI's newer name of the system's role, which templates do not know.
    let role = if role == "developer" { "system" } else { role };
    out.insert("role".to_owned(), json!(role));
    out.insert("content".to_owned(), json!(content));
    if !calls.is_empty() {
        out.insert("tool_calls".to_owned(), Value::Array(calls));
    }
    for name in ["name", "tool_call_id"] {
        if let Some(Value::String(text)) = members.get(name) {
            out.insert(name.to_owned(), json!(text));
        }
    }
    let texts = REASONING
        .iter()
        .filter_map(|name| members.get(*name)?.as_str());
    if let Some(text) = texts.into_iter().find(|text| !text.is_empty()) {
        out.insert("reasoning_content".to_owned(), json!(text));
    }
    Ok(Value::Object(out))
}

/// Calls of tools in an earlier answer, whose arguments are JSON, a text that a model wrote
/// instead, or an object.
fn read_calls(at: usize, calls: &Value) -> Result<Vec<Value>, ApiError> {
    let param = format!("messages[{at}].tool_calls");
    let calls = match calls {
        Value::Null => return Ok(Vec::new()),
        Value::Array(calls) => calls.iter().enumerate(),
        _ => {
            let message = format!("'{param}' is not a list");
            return Err(ApiError::invalid_param(param, message));
        }
    };
    let read = |(number, call): (usize, &Value)| {
        let function = call.get("function");
        let name = function.and_then(|function| function.get("name")?.as_str());
        let arguments = function.and_then(|function| function.get("arguments"));
        let arguments = match arguments {
            None | Some(Value::Null) => Some(json!({})),
            Some(value) => {
                Some(value.clone()).filter(|value| value.is_string() || value.is_object())
            }
        };
        match (name, arguments) {
            (Some(name), Some(arguments)) => {
                let function = json!({"name": name, "arguments": arguments});
                let mut out = json!({"type": "function", "function": function});
                if let Some(Value::String(id)) = call.get("id") {
                    out["id"] = json!(id);
                }
                Ok(out)
            }
            (None, _) => {
                let param = format!("{param}[{number}].function.name");
                let message = format!("'{param}' is missing, or not a text");
                Err(ApiError::invalid_param(param, message))
            }
            (_, None) => {
                let param = format!("{param}[{number}].function.arguments");
                let message = format!("'{param}' is neither a text nor an object");
                Err(ApiError::invalid_param(param, message))
            }
        }
    };
    calls.map(read).collect()
}

/// The text of a tool's result, at this path of the request: as [`content_text`], with a note in
/// the place of what is no text. A client cannot choose what a tool gives, and its conversation
/// goes on.
///
/// # Errors
/// [`ApiError`] 400 with the path of the part, of images and files on strict servers alone.
pub(crate) fn result_text(path: &str, content: &Value, skips: &Skips) -> Result<String, ApiError> {
    let Value::Array(parts) = content else {
        return content_text(path, content);
    };
    let mut texts = Vec::with_capacity(parts.len());
    for (number, part) in parts.iter().enumerate() {
        let note = match part.get("type").and_then(Value::as_str) {
            Some("image" | "image_url" | "input_image") => "[image]",
            Some("document" | "file" | "input_file") => "[file]",
            Some("audio" | "audio_url" | "input_audio") => "[audio]",
            Some("tool_reference") => "[tool]",
            _ => {
                texts.push(part_text(&format!("{path}[{number}]"), part)?.to_owned());
                continue;
            }
        };
        let why = format!("the model takes text only, and sees '{note}' in its place");
        skips.skip(&format!("{path}[{number}]"), &why)?;
        texts.push(note.to_owned());
    }
    Ok(texts.join("\n"))
}

/// The content of a message, at this path of the request: its text, or where it has pictures or
/// sounds, its parts.
///
/// # Errors
/// [`ApiError`] 400 with the path of the part.
pub(crate) fn content_value(path: &str, content: &Value) -> Result<Value, ApiError> {
    let parts = content.as_array().into_iter().flatten().enumerate();
    let mut read = Vec::new();
    let mut has_media = false;
    for (number, part) in parts {
        let path = format!("{path}[{number}]");
        match pictures::read_part(&path, part) {
            Some(part) => {
                has_media = true;
                read.push(part?);
            }
            None => read.push(json!({"type": "text", "text": part_text(&path, part)?})),
        }
    }
    if has_media {
        Ok(Value::Array(read))
    } else {
        Ok(json!(content_text(path, content)?))
    }
}

/// The text of a message, at this path of the request: a text, or text parts, one line each.
///
/// # Errors
/// [`ApiError`] 400 with the path of the part.
pub(crate) fn content_text(path: &str, content: &Value) -> Result<String, ApiError> {
    let parts = match content {
        Value::String(text) => return Ok(text.clone()),
        Value::Array(parts) => parts,
        _ => {
            let message = format!("'{path}' is neither a text nor a list of parts");
            return Err(ApiError::invalid_param(path, message));
        }
    };
    let texts = parts
        .iter()
        .enumerate()
        .map(|(number, part)| part_text(&format!("{path}[{number}]"), part));
    Ok(texts.collect::<Result<Vec<_>, _>>()?.join("\n"))
}

/// The text of a part of a message, at this path.
fn part_text<'p>(path: &str, part: &'p Value) -> Result<&'p str, ApiError> {
    let kind = part.get("type").and_then(Value::as_str);
    let name = match kind {
        Some("text" | "input_text" | "output_text") => "text",
        Some("refusal") => "refusal",
        _ => {
            let kind = kind.unwrap_or("without a type");
            let message = format!("'{path}' is a part '{kind}': this model takes text only");
            return Err(ApiError::unsupported_content(path, message));
        }
    };
    part.get(name)
        .and_then(Value::as_str)
        .ok_or_else(|| ApiError::invalid_param(path, format!("'{path}' has no text")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use model_core::media::MediaKind;

    use super::*;

    #[test]
    fn text_parts_become_one_text() {
        let list = json!([
            {"role": "developer", "content": "Be brief.", "x": 1},
            {"role": "user", "name": "ada", "content": [
                {"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]},
        ]);
        let expected = json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello\nthere", "name": "ada"},
        ]);
        assert_eq!(json!(messages(&list, &Skips::default()).unwrap()), expected);
    }

    #[test]
    fn calls_and_results_reach_the_template() {
        let call = |arguments: Value| {
            json!({"id": "call_1", "type": "function",
            "function": {"name": "f", "arguments": arguments}})
        };
        let list = json!([
            {"role": "assistant", "content": null, "tool_calls": [call(json!("{\"a\": 1}"))]},
            {"role": "tool", "tool_call_id": "call_1", "content": "2"},
        ]);
        let expected = json!([
            {"role": "assistant", "content": "", "tool_calls": [call(json!("{\"a\": 1}"))]},
            {"role": "tool", "content": "2", "tool_call_id": "call_1"},
        ]);
        assert_eq!(json!(messages(&list, &Skips::default()).unwrap()), expected);
        // As a model may write them.
        for arguments in [json!("{\"a\": \"b\nc\"}"), json!("{a"), json!({"a": 1})] {
            let list = json!([{"role": "assistant", "tool_calls": [call(arguments.clone())]}]);
            let read = messages(&list, &Skips::default()).unwrap();
            assert_eq!(read[0]["tool_calls"], json!([call(arguments)]));
        }
        let broken = json!([{"role": "assistant", "tool_calls": [call(json!([1]))]}]);
        let error = messages(&broken, &Skips::default()).unwrap_err();
        let param = "messages[0].tool_calls[0].function.arguments";
        assert_eq!(error.param.as_deref(), Some(param));
    }

    #[test]
    fn answers_and_results_may_have_no_text() {
        let list = json!([
            {"role": "assistant", "reasoning": "a"},
            {"role": "assistant", "content": null, "reasoning_content": null, "thinking": "b"},
            {"role": "tool", "tool_call_id": "call_1", "content": null},
        ]);
        let expected = json!([
            {"role": "assistant", "content": "", "reasoning_content": "a"},
            {"role": "assistant", "content": "", "reasoning_content": "b"},
            {"role": "tool", "content": "", "tool_call_id": "call_1"},
        ]);
        assert_eq!(json!(messages(&list, &Skips::default()).unwrap()), expected);
    }

    #[test]
    fn pictures_stay_parts_with_their_places() {
        let image = json!({"type": "image_url", "image_url": {"url": "data:x"}});
        let list = json!([{"role": "user", "content": [image, {"type": "text", "text": "a"}]}]);
        let read = messages(&list, &Skips::default()).unwrap();
        let picture = pictures::part(MediaKind::Picture, "messages[0].content[0]", "data:x");
        assert_eq!(
            read[0]["content"],
            json!([picture, {"type": "text", "text": "a"}])
        );
    }

    #[test]
    fn errors_name_the_part() {
        let audio = json!({"type": "input_audio", "input_audio": {"data": ""}});
        for (list, param) in [
            (json!("hello"), "messages"),
            (json!([]), "messages"),
            (json!([1]), "messages[0]"),
            (json!([{"content": "a"}]), "messages[0].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (
                json!([{"role": "wizard", "content": "a"}]),
                "messages[0].role",
            ),
            (
                json!(vec![
                    json!({"role": "user", "content": "a"});
                    MAX_MESSAGES + 1
                ]),
                "messages",
            ),
            (
                json!([{"role": "user", "content": 1}]),
                "messages[0].content",
            ),
            (
                json!([{"role": "user", "content": "a"}, {"role": "user", "content": [
                {"type": "text", "text": "a"}, audio]}]),
                "messages[1].content[1].input_audio.data",
            ),
        ] {
            let error = messages(&list, &Skips::default()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{list}");
        }
    }
}
