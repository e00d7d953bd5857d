//! Pictures of a request: parts of messages, and their bytes.
//!
//! All APIs write a picture as one part, which names its place in the request: so it is decoded, or
//! refused, in one place, by the model that is to see it. Invariant: a template sees `image` parts
//! alone, without bytes. Fetches nothing: pictures come in the request.

use std::borrow::Cow;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use model_core::picture::PreparedPicture;
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::generate::ChatPrompt;
use crate::model::ServedModel;

/// The most pictures of a request.
const MAX_PICTURES: usize = 64;

/// The type of the part of a picture.
const PICTURE: &str = "image_url";

/// The part of a picture: its place in the request, and its address.
pub(crate) fn part(path: &str, url: &str) -> Value {
    json!({"type": PICTURE, "path": path, "url": url})
}

/// A picture in base64 as an address.
pub(crate) fn data_url(media_type: &str, data: &str) -> String {
    format!("data:{media_type};base64,{data}")
}

/// The part of a picture in the words of OpenAI's APIs: `image_url`, `input_image`; `None` for
/// another part.
///
/// # Errors
/// [`ApiError`] 400 with the path, where there is no address.
pub(crate) fn read_part(path: &str, given: &Value) -> Option<Result<Value, ApiError>> {
    match given.get("type").and_then(Value::as_str) {
        Some("image_url" | "input_image") => {}
        _ => return None,
    }
    let field = given.get("image_url").unwrap_or(&Value::Null);
    let own = given.get("url").filter(|_| field.is_null());
    let url = own.or_else(|| field.get("url")).unwrap_or(field);
    Some(match url.as_str() {
        Some(url) => Ok(part(path, url)),
        None => {
            let param = format!("{path}.image_url");
            let message = format!("'{param}' has no address: a 'data:' URL is needed");
            Err(ApiError::invalid_param(param, message))
        }
    })
}

/// The messages with `image` parts in place of pictures.
pub(crate) fn without_bytes(chat: &ChatPrompt) -> Cow<'_, ChatPrompt> {
    if chat
        .messages
        .iter()
        .all(|message| parts_of(message).next().is_none())
    {
        return Cow::Borrowed(chat);
    }
    let mut chat = chat.clone();
    for message in &mut chat.messages {
        let parts = message.get_mut("content").and_then(Value::as_array_mut);
        for part in parts.into_iter().flatten() {
            if part["type"] == PICTURE {
                *part = json!({"type": "image"});
            }
        }
    }
    Cow::Owned(chat)
}

/// The pictures of messages, decoded and prepared for a model.
///
/// # Errors
/// [`ApiError`] 400 with the path of the first that the model does not see, or that is no picture.
pub(crate) fn read(
    model: &ServedModel,
    chat: &ChatPrompt,
) -> Result<Vec<PreparedPicture>, ApiError> {
    let parts = chat.messages.iter().flat_map(parts_of);
    let mut pictures = Vec::new();
    for part in parts {
        let path = part["path"].as_str().unwrap_or("messages");
        let reader = model.picture_reader().map_err(|why| {
            let message = format!("'{path}' is a picture, and {why}");
            ApiError::unsupported_content(path, message)
        })?;
        if pictures.len() == MAX_PICTURES {
            let message =
                format!("'{path}' is one picture too many: at most {MAX_PICTURES} are taken");
            return Err(ApiError::invalid_param(path, message));
        }
        let bytes = bytes_of(path, part["url"].as_str().unwrap_or_default())?;
        let read = reader
            .read(&bytes)
            .map_err(|error| wrong(path, &error.to_string()))?;
        pictures.push(read);
    }
    Ok(pictures)
}

/// The parts of a message that are pictures.
fn parts_of(message: &Value) -> impl Iterator<Item = &Value> {
    let parts = message.get("content").and_then(Value::as_array);
    let parts = parts.into_iter().flatten();
    parts.filter(|part| part["type"] == PICTURE)
}

/// The bytes of a `data:` URL, or of plain base64, as Ollama's clients send it.
fn bytes_of(path: &str, url: &str) -> Result<Vec<u8>, ApiError> {
    if url.starts_with("http://") || url.starts_with("https://") {
        let message = format!(
            "'{path}' has an address on the network, and this server fetches none: send the picture as a \
             'data:' URL"
        );
        return Err(ApiError::unsupported_content(path, message));
    }
    let data = match url.strip_prefix("data:") {
        None => url,
        Some(rest) => match rest.split_once(',') {
            Some((kind, data)) if kind.ends_with(";base64") => data,
            _ => return Err(wrong(path, "its 'data:' URL is not in base64")),
        },
    };
    let data: Cow<'_, str> = if data.contains(char::is_whitespace) {
        data.split_whitespace().collect::<String>().into()
    } else {
        data.into()
    };
    let decoded = STANDARD
        .decode(&*data)
        .or_else(|_| STANDARD_NO_PAD.decode(&*data));
    decoded.map_err(|error| wrong(path, &format!("it is no base64: {error}")))
}

fn wrong(path: &str, why: &str) -> ApiError {
    let message = format!("'{path}' cannot be taken: {why}");
    ApiError::invalid_param(path, message)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    #[test]
    fn addresses_of_all_forms_are_read() {
        for given in [
            json!({"type": "image_url", "image_url": {"url": "data:a"}}),
            json!({"type": "image_url", "image_url": "data:a"}),
            json!({"type": "input_image", "image_url": "data:a"}),
        ] {
            let read = read_part("m[0]", &given).unwrap().unwrap();
            assert_eq!(read, part("m[0]", "data:a"), "{given}");
        }
        assert!(read_part("m[0]", &json!({"type": "text", "text": "a"})).is_none());
        let error = read_part("m[0]", &json!({"type": "input_image"}))
            .unwrap()
            .unwrap_err();
        assert_eq!(error.param.as_deref(), Some("m[0].image_url"));
    }

    #[test]
    fn bytes_come_out_of_data_urls_alone() {
        for url in [
            "data:image/png;base64,AQI=",
            "data:;base64,AQI",
            "AQ\nI=",
            "AQI=",
        ] {
            assert_eq!(bytes_of("m", url).unwrap(), [1, 2], "{url}");
        }
        for (url, why) in [
            ("https://example.com/a.png", "fetches none"),
            ("data:image/png,abc", "not in base64"),
            ("data:image/png;base64,???", "no base64"),
            ("file:///etc/passwd", "no base64"),
        ] {
            let error = bytes_of("m", url).unwrap_err();
            assert!(error.message.contains(why), "{error}");
        }
    }

    #[test]
    fn templates_see_no_bytes() {
        let text = json!({"type": "text", "text": "What?"});
        let chat = ChatPrompt {
            messages: vec![json!({"role": "user", "content": [part("m", "data:a"), text]})],
            ..ChatPrompt::default()
        };
        let seen = without_bytes(&chat);
        assert_eq!(
            seen.messages[0]["content"],
            json!([{"type": "image"}, text])
        );
        let plain = ChatPrompt {
            messages: vec![json!({"role": "user", "content": "a"})],
            ..ChatPrompt::default()
        };
        assert!(matches!(without_bytes(&plain), Cow::Borrowed(_)));
    }
}
