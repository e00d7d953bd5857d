//! Pictures in messages: the parts that name them, and `data:` URLs.
//!
//! Invariant: a chat template sees parts `{"type": "image"}` alone, without bytes. Knows no model
//! and opens no file.

use std::borrow::Cow;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use model_core::picture::PictureError;
use serde_json::{Value, json};

/// The address in a part that is a picture in the words of OpenAI's APIs (`image_url`,
/// `input_image`), empty where it has none; `None` for another part.
pub fn picture_address(part: &Value) -> Option<&str> {
    match part.get("type").and_then(Value::as_str) {
        Some("image_url" | "input_image") => {}
        _ => return None,
    }
    let field = part.get("image_url").unwrap_or(&Value::Null);
    let own = part.get("url").filter(|_| field.is_null());
    let url = own.or_else(|| field.get("url")).unwrap_or(field);
    Some(url.as_str().unwrap_or_default())
}

/// Replaces each part of messages that is a picture by `{"type": "image"}`, and returns what `read`
/// made of the addresses, in their order.
///
/// # Errors
/// The first error of `read`; the messages may have been changed before.
pub fn take_pictures<P, E>(
    messages: &mut [Value],
    mut read: impl FnMut(&str) -> Result<P, E>,
) -> Result<Vec<P>, E> {
    let mut pictures = Vec::new();
    for message in messages {
        let parts = message.get_mut("content").and_then(Value::as_array_mut);
        for part in parts.into_iter().flatten() {
            if let Some(address) = picture_address(part) {
                pictures.push(read(address)?);
                *part = json!({"type": "image"});
            }
        }
    }
    Ok(pictures)
}

/// The bytes of a `data:` URL, or of plain base64, as Ollama's clients send it.
///
/// # Errors
/// [`PictureError::Unreadable`] where it is not in base64.
pub fn data_url_bytes(url: &str) -> Result<Vec<u8>, PictureError> {
    let unreadable = |reason: String| PictureError::Unreadable { reason };
    let data = match url.strip_prefix("data:") {
        None => url,
        Some(rest) => match rest.split_once(',') {
            Some((kind, data)) if kind.ends_with(";base64") => data,
            _ => return Err(unreadable("its 'data:' URL is not in base64".to_owned())),
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
    decoded.map_err(|error| unreadable(format!("it is no base64: {error}")))
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
            json!({"type": "image_url", "url": "data:a"}),
            json!({"type": "input_image", "image_url": "data:a"}),
        ] {
            assert_eq!(picture_address(&given), Some("data:a"), "{given}");
        }
        assert_eq!(picture_address(&json!({"type": "input_image"})), Some(""));
        assert_eq!(picture_address(&json!({"type": "text", "text": "a"})), None);
    }

    #[test]
    fn bytes_come_out_of_data_urls_alone() {
        for url in [
            "data:image/png;base64,AQI=",
            "data:;base64,AQI",
            "AQ\nI=",
            "AQI=",
        ] {
            assert_eq!(data_url_bytes(url).unwrap(), [1, 2], "{url}");
        }
        for (url, why) in [
            ("data:image/png,abc", "not in base64"),
            ("data:image/png;base64,???", "no base64"),
            ("file:///etc/passwd", "no base64"),
        ] {
            let error = data_url_bytes(url).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn templates_see_no_bytes() {
        let text = json!({"type": "text", "text": "What?"});
        let picture = json!({"type": "image_url", "image_url": {"url": "data:a"}});
        let mut messages = [
            json!({"role": "system", "content": "Look."}),
            json!({"role": "user", "content": [picture, text]}),
        ];
        let taken = take_pictures(&mut messages, |url| Ok::<_, ()>(url.to_owned()));
        assert_eq!(taken.unwrap(), ["data:a"]);
        assert_eq!(messages[1]["content"], json!([{"type": "image"}, text]));
        assert_eq!(messages[0]["content"], "Look.");
    }
}
