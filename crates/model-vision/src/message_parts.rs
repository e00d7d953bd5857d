//! Pictures and sounds in messages: the parts that name them, and `data:` URLs.
//!
//! Invariant: a chat template sees parts `{"type": "image"}` and `{"type": "audio"}` alone, without
//! bytes. Knows no model and opens no file.

use std::borrow::Cow;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use model_core::media::MediaKind;
use model_core::picture::PictureError;
use serde_json::{Value, json};

/// A part of a message that is a picture or a sound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaPart<'a> {
    /// A picture or a sound.
    pub media: MediaKind,
    /// Its address: a `data:` URL, or another address; empty where the part has none.
    pub address: Cow<'a, str>,
}

impl<'a> MediaPart<'a> {
    /// The part in the words of OpenAI's APIs (`image_url`, `input_image`, `input_audio`), or of
    /// vLLM's (`audio_url`); `None` for another part.
    pub fn of(part: &'a Value) -> Option<Self> {
        let kind = part.get("type").and_then(Value::as_str)?;
        let (media, name) = match kind {
            "image_url" | "input_image" => (MediaKind::Picture, "image_url"),
            "audio_url" => (MediaKind::Sound, "audio_url"),
            "input_audio" => (MediaKind::Sound, "input_audio"),
            _ => return None,
        };
        let field = part.get(name).unwrap_or(&Value::Null);
        let own = part.get("url").filter(|_| field.is_null());
        if let Some(data) = field.get("data").and_then(Value::as_str) {
            // OpenAI's sounds are in base64 alone.
            let address = if data.is_empty() || data.starts_with("data:") {
                data.into()
            } else {
                format!("data:;base64,{data}").into()
            };
            return Some(Self { media, address });
        }
        let url = own.or_else(|| field.get("url")).unwrap_or(field);
        let address = url.as_str().unwrap_or_default().into();
        Some(Self { media, address })
    }
}

/// Replaces each part of messages that is a picture or a sound by `{"type": "image"}` or
/// `{"type": "audio"}`, and returns what `read` made of them, in their order.
///
/// # Errors
/// The first error of `read`; the messages may have been changed before.
pub fn take_pictures<P, E>(
    messages: &mut [Value],
    mut read: impl FnMut(&MediaPart<'_>) -> Result<P, E>,
) -> Result<Vec<P>, E> {
    let mut taken = Vec::new();
    for message in messages {
        let parts = message.get_mut("content").and_then(Value::as_array_mut);
        for part in parts.into_iter().flatten() {
            let Some(found) = MediaPart::of(part) else {
                continue;
            };
            taken.push(read(&found)?);
            let kind = found.media.part_type();
            *part = json!({"type": kind});
        }
    }
    Ok(taken)
}

/// The bytes of a picture or a sound in a `data:` URL, or in plain base64, as Ollama's clients send
/// it.
///
/// # Errors
/// [`PictureError::Unreadable`] where it is not in base64.
pub fn data_url_bytes(media: MediaKind, url: &str) -> Result<Vec<u8>, PictureError> {
    let unreadable = |reason: String| PictureError::Unreadable { media, reason };
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

    fn picture(address: &'static str) -> MediaPart<'static> {
        MediaPart {
            media: MediaKind::Picture,
            address: address.into(),
        }
    }

    #[test]
    fn addresses_of_all_forms_are_read() {
        for given in [
            json!({"type": "image_url", "image_url": {"url": "data:a"}}),
            json!({"type": "image_url", "image_url": "data:a"}),
            json!({"type": "image_url", "url": "data:a"}),
            json!({"type": "input_image", "image_url": "data:a"}),
        ] {
            assert_eq!(MediaPart::of(&given), Some(picture("data:a")), "{given}");
        }
        let without = json!({"type": "input_image"});
        assert_eq!(MediaPart::of(&without), Some(picture("")));
        assert_eq!(MediaPart::of(&json!({"type": "text", "text": "a"})), None);
        let sound = |address: &'static str| MediaPart {
            media: MediaKind::Sound,
            ..picture(address)
        };
        let audio = |audio: Value| json!({"type": "input_audio", "input_audio": audio});
        for (given, wanted) in [
            (
                audio(json!({"data": "AQI=", "format": "wav"})),
                "data:;base64,AQI=",
            ),
            (audio(json!({"data": "data:a"})), "data:a"),
            (audio(json!({"data": ""})), ""),
            (audio(json!({})), ""),
            (
                json!({"type": "audio_url", "audio_url": {"url": "a.wav"}}),
                "a.wav",
            ),
        ] {
            assert_eq!(MediaPart::of(&given), Some(sound(wanted)), "{given}");
        }
    }

    #[test]
    fn bytes_come_out_of_data_urls_alone() {
        for url in [
            "data:image/png;base64,AQI=",
            "data:;base64,AQI",
            "AQ\nI=",
            "AQI=",
        ] {
            assert_eq!(
                data_url_bytes(MediaKind::Picture, url).unwrap(),
                [1, 2],
                "{url}"
            );
        }
        for (url, why) in [
            ("data:image/png,abc", "not in base64"),
            ("data:image/png;base64,???", "no base64"),
            ("file:///etc/passwd", "no base64"),
        ] {
            let error = |media| data_url_bytes(media, url).unwrap_err().to_string();
            assert!(error(MediaKind::Picture).contains(why), "{url}");
            let error = error(MediaKind::Sound);
            assert!(
                error.contains(why) && error.contains("the sound"),
                "{error}"
            );
        }
    }

    #[test]
    fn templates_see_no_bytes() {
        let text = json!({"type": "text", "text": "What?"});
        let picture = json!({"type": "image_url", "image_url": {"url": "data:a"}});
        let sound = json!({"type": "input_audio", "input_audio": {"data": "AQI="}});
        let mut messages = [
            json!({"role": "system", "content": "Look."}),
            json!({"role": "user", "content": [picture, text, sound]}),
        ];
        let taken = take_pictures(&mut messages, |part| Ok::<_, ()>(part.address.to_string()));
        assert_eq!(taken.unwrap(), ["data:a", "data:;base64,AQI="]);
        let seen = json!([{"type": "image"}, text, {"type": "audio"}]);
        assert_eq!(messages[1]["content"], seen);
        assert_eq!(messages[0]["content"], "Look.");
    }
}
