//! Pictures and sounds of a request: parts of messages, and their bytes.
//!
//! All APIs write a picture or a sound as one part, which names its place in the request: so it is
//! decoded, or refused, in one place, by the model that is to see or hear it. Invariant: a template
//! sees `image` and `audio` parts alone, without bytes. Pictures come in the request, or by the
//! fetcher of the settings.

use std::borrow::Cow;
use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;

use model_core::media::MediaKind;
use model_core::picture::PreparedPicture;
use model_vision::{MediaPart, PictureReader, data_url_bytes, take_pictures};
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::generate::{ChatPrompt, MarkedText};
use crate::model::ServedModel;

/// The most pictures and sounds of a request.
const MAX_PICTURES: usize = 64;

/// The mark of a picture or a sound in a prompt with `multimodal_data`.
const MEDIA_MARK: &str = "<__media__>";

/// Fetches the bytes of a picture by its address, or says why not. It is called on threads that may
/// wait.
#[derive(Clone)]
pub struct PictureFetcher(Arc<Fetch>);

type Fetch = dyn Fn(&str) -> Result<Vec<u8>, String> + Send + Sync;

impl PictureFetcher {
    /// A fetcher that calls this.
    pub fn new(fetch: impl Fn(&str) -> Result<Vec<u8>, String> + Send + Sync + 'static) -> Self {
        Self(Arc::new(fetch))
    }
}

impl fmt::Debug for PictureFetcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PictureFetcher")
    }
}

/// The part of a picture or a sound: its place in the request, and its address.
pub(crate) fn part(media: MediaKind, path: &str, url: &str) -> Value {
    json!({"type": media.url_type(), "path": path, "url": url})
}

/// A picture in base64 as an address.
pub(crate) fn data_url(media_type: &str, data: &str) -> String {
    format!("data:{media_type};base64,{data}")
}

/// The part of a picture or a sound in the words of OpenAI's APIs (see [`MediaPart::of`]); `None`
/// for another part.
///
/// # Errors
/// [`ApiError`] 400 with the path, where there is no address.
pub(crate) fn read_part(path: &str, given: &Value) -> Option<Result<Value, ApiError>> {
    let MediaPart { media, address } = MediaPart::of(given)?;
    if !address.is_empty() {
        return Some(Ok(part(media, path, &address)));
    }
    let (name, wanted) = match given["type"].as_str() {
        Some("input_audio") => ("input_audio.data", "a sound in base64"),
        _ => (media.url_type(), "a 'data:' URL"),
    };
    let param = format!("{path}.{name}");
    let message = format!("'{param}' has no address: {wanted} is needed");
    Some(Err(ApiError::invalid_param(param, message)))
}

/// The messages with `image` and `audio` parts in place of pictures and sounds.
pub(crate) fn without_bytes(chat: &ChatPrompt) -> Cow<'_, ChatPrompt> {
    if chat
        .messages
        .iter()
        .all(|message| parts_of(message).next().is_none())
    {
        return Cow::Borrowed(chat);
    }
    let mut chat = chat.clone();
    let Ok(_) = take_pictures(&mut chat.messages, |_| Ok::<(), Infallible>(()));
    Cow::Owned(chat)
}

/// The pictures and sounds of messages, decoded and prepared for a model.
///
/// # Errors
/// [`ApiError`] 400 with the path of the first that the model does not take, or that is none.
pub(crate) fn read(
    model: &ServedModel,
    chat: &ChatPrompt,
) -> Result<Vec<PreparedPicture>, ApiError> {
    let parts = chat.messages.iter().flat_map(parts_of);
    let named = parts.map(|(part, given)| {
        let path = given["path"].as_str().unwrap_or("messages");
        (path.to_owned(), part)
    });
    read_all(model, named)
}

/// A text of llama.cpp's form, in which marks stand for its pictures or sounds: as a prompt, and
/// what is at the marks. They are what the model takes: their bytes alone are given.
///
/// # Errors
/// As [`read`]; [`ApiError`] 400 where there are more or fewer marks than pictures.
pub(crate) fn read_marked(
    model: &ServedModel,
    marked: &MarkedText,
) -> Result<(String, Vec<PreparedPicture>), ApiError> {
    let reader = model.picture_reader();
    let media = reader.map_or(MediaKind::Picture, PictureReader::media);
    let named = (0..).zip(&marked.pictures).map(|(at, data)| {
        let address = data.as_str().into();
        let path = format!("prompt.multimodal_data[{at}]");
        (path, MediaPart { media, address })
    });
    let pictures = read_all(model, named)?;
    let text = model.with_places_at(&marked.text, MEDIA_MARK, &pictures)?;
    Ok((text, pictures))
}

/// The pictures and sounds at these paths of a request.
fn read_all<'a>(
    model: &ServedModel,
    named: impl Iterator<Item = (String, MediaPart<'a>)>,
) -> Result<Vec<PreparedPicture>, ApiError> {
    let mut pictures = Vec::new();
    for (path, part) in named {
        let media = part.media;
        let reader = model.picture_reader().map_err(|why| {
            let message = format!("'{path}' is a {media}, and {why}");
            ApiError::unsupported_content(&path, message)
        })?;
        if pictures.len() == MAX_PICTURES {
            let message =
                format!("'{path}' is one {media} too many: at most {MAX_PICTURES} are taken");
            return Err(ApiError::invalid_param(path, message));
        }
        let fetcher = model.settings().picture_fetcher.as_ref();
        let bytes = bytes_of(&path, &part, fetcher)?;
        let read = reader
            .read_media(media, &bytes)
            .map_err(|error| wrong(&path, &error.to_string()))?;
        pictures.push(read);
    }
    Ok(pictures)
}

/// The parts of a message that are pictures or sounds, and as they are given.
fn parts_of(message: &Value) -> impl Iterator<Item = (MediaPart<'_>, &Value)> {
    let parts = message.get("content").and_then(Value::as_array);
    let parts = parts.into_iter().flatten();
    parts.filter_map(|part| Some((MediaPart::of(part)?, part)))
}

/// The bytes of a picture, which came in the request or are fetched, or of a sound, which came in
/// the request.
fn bytes_of(
    path: &str,
    part: &MediaPart<'_>,
    fetcher: Option<&PictureFetcher>,
) -> Result<Vec<u8>, ApiError> {
    let MediaPart { media, address } = part;
    let (media, url) = (*media, &**address);
    let is_remote = url.starts_with("http://") || url.starts_with("https://");
    match fetcher {
        _ if !is_remote => {
            data_url_bytes(media, url).map_err(|error| wrong(path, &error.to_string()))
        }
        _ if media == MediaKind::Sound => {
            let message = format!(
                "'{path}' has an address on the network, and sounds are not fetched: send it in base64, as \
                 'input_audio'"
            );
            Err(ApiError::unsupported_content(path, message))
        }
        Some(PictureFetcher(fetch)) => {
            fetch(url).map_err(|why| wrong(path, &format!("it is not fetched: {why}")))
        }
        None => {
            let message = format!(
                "'{path}' has an address on the network, and this server fetches none: send the picture as a \
                 'data:' URL, or start the server with --allow-image-urls"
            );
            Err(ApiError::unsupported_content(path, message))
        }
    }
}

fn wrong(path: &str, why: &str) -> ApiError {
    let message = format!("'{path}' cannot be taken: {why}");
    ApiError::invalid_param(path, message)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    fn at(media: MediaKind, address: &str) -> MediaPart<'_> {
        let address = address.into();
        MediaPart { media, address }
    }

    #[test]
    fn a_picture_needs_an_address_in_the_request() {
        let given = json!({"type": "image_url", "image_url": {"url": "data:a"}});
        let read = read_part("m[0]", &given).unwrap().unwrap();
        assert_eq!(read, part(MediaKind::Picture, "m[0]", "data:a"));
        let sound =
            json!({"type": "input_audio", "input_audio": {"data": "AQI=", "format": "wav"}});
        let read = read_part("m[0]", &sound).unwrap().unwrap();
        let wanted = part(MediaKind::Sound, "m[0]", "data:;base64,AQI=");
        assert_eq!(read, wanted);
        let without = json!({"type": "input_audio", "input_audio": {"format": "wav"}});
        let error = read_part("m[0]", &without).unwrap().unwrap_err();
        assert_eq!(error.param.as_deref(), Some("m[0].input_audio.data"));
        assert!(read_part("m[0]", &json!({"type": "text", "text": "a"})).is_none());
        let error = read_part("m[0]", &json!({"type": "input_image"}))
            .unwrap()
            .unwrap_err();
        assert_eq!(error.param.as_deref(), Some("m[0].image_url"));
        for (url, why) in [
            ("https://example.com/a.png", "fetches none"),
            ("data:image/png,abc", "not in base64"),
        ] {
            let error = bytes_of("m", &at(MediaKind::Picture, url), None).unwrap_err();
            assert!(error.message.contains(why), "{error}");
        }
        let fetcher = PictureFetcher::new(|url| match url {
            "https://a" => Ok(vec![1]),
            _ => Err("it is away".to_owned()),
        });
        let sound = at(MediaKind::Sound, "https://a");
        let error = bytes_of("m", &sound, Some(&fetcher)).unwrap_err();
        assert!(error.message.contains("not fetched"), "{error}");
        let fetched = |url| bytes_of("m", &at(MediaKind::Picture, url), Some(&fetcher));
        assert_eq!(fetched("https://a").unwrap(), [1]);
        let error = fetched("http://b").unwrap_err();
        assert!(error.message.contains("it is away"), "{error}");
        // What is in the request is not fetched.
        assert_eq!(fetched("data:;base64,AQI").unwrap(), [1, 2]);
    }

    #[test]
    fn templates_see_no_bytes() {
        let text = json!({"type": "text", "text": "What?"});
        let chat = ChatPrompt {
            messages: vec![json!({"role": "user", "content": [
                part(MediaKind::Picture, "m", "data:a"), text, part(MediaKind::Sound, "m", "data:a"),
            ]})],
            ..ChatPrompt::default()
        };
        let seen = without_bytes(&chat);
        assert_eq!(
            seen.messages[0]["content"],
            json!([{"type": "image"}, text, {"type": "audio"}])
        );
        let plain = ChatPrompt {
            messages: vec![json!({"role": "user", "content": "a"})],
            ..ChatPrompt::default()
        };
        assert!(matches!(without_bytes(&plain), Cow::Borrowed(_)));
    }
}
