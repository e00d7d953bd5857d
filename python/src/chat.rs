//! Messages to JSON objects, as chat templates take them, and their pictures and sounds. Knows no
//! models.

use std::io;
use std::path::{Path, PathBuf};

use cellar::{MediaKind, MediaPart, PictureError, PictureReader, PreparedPicture, data_url_bytes};
use numpy::{PyReadonlyArray1, PyReadonlyArray3, PyUntypedArrayMethods};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use serde_json::{Map, Value, json as json_value};

use crate::values::json;

/// Messages and what else a template reads.
pub(crate) struct Chat {
    pub(crate) messages: Vec<Value>,
    pub(crate) variables: Map<String, Value>,
}

impl Chat {
    /// # Errors
    /// `ValueError` for a message without a role, or with parts that are neither texts nor pictures
    /// nor sounds; `TypeError` where it is no dict.
    pub(crate) fn new(
        messages: &Bound<'_, PyAny>,
        tools: Option<&Bound<'_, PyAny>>,
        variables: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let Value::Array(messages) = json(messages)? else {
            return Err(PyTypeError::new_err("messages: a list of dicts is needed"));
        };
        let messages = messages.into_iter().map(message);
        let mut chat = Self {
            messages: messages.collect::<PyResult<_>>()?,
            variables: match variables {
                None => Map::new(),
                Some(variables) => match json(variables)? {
                    Value::Object(variables) => variables,
                    _ => Map::new(), // a dict is an object
                },
            },
        };
        if let Some(tools) = tools {
            chat.variables.insert("tools".to_owned(), json(tools)?);
        }
        Ok(chat)
    }
}

impl Chat {
    /// True if parts of its messages are pictures or sounds.
    pub(crate) fn shows_media(&self) -> bool {
        let parts = self.messages.iter().filter_map(|m| m["content"].as_array());
        parts.flatten().any(|part| part["type"] != "text")
    }

    /// True if parts of its messages are sounds.
    pub(crate) fn plays_sounds(&self) -> bool {
        let parts = self.messages.iter().filter_map(|m| m["content"].as_array());
        let is_sound = |part: &Value| {
            let media = MediaPart::of(part).map(|part| part.media);
            part["type"] == "audio" || media == Some(MediaKind::Sound)
        };
        parts.flatten().any(is_sound)
    }

    /// The pictures and sounds of its messages, each of which a part `{"type": "image"}` or
    /// `{"type": "audio"}` takes the place of. Those parts that are there already take `given` of
    /// their kind in their order; where there are none, the last message of the user shows all of
    /// them.
    ///
    /// # Errors
    /// `ValueError` where there are more or fewer than parts, or one cannot be read; `OSError`
    /// where a file cannot be read.
    pub(crate) fn take_media(
        &mut self,
        reader: &PictureReader,
        given: GivenMedia,
    ) -> PyResult<Vec<PreparedPicture>> {
        let (n_images, n_sounds) = (given.images.len(), given.sounds.len());
        if !self.shows_media() {
            self.show_at_end(n_images, n_sounds)?;
        }
        let (mut images, mut sounds) = (given.images.into_iter(), given.sounds.into_iter());
        let mut read = Vec::new();
        let contents = self
            .messages
            .iter_mut()
            .filter_map(|m| m["content"].as_array_mut());
        let is_media = |part: &&mut Value| part["type"] != "text";
        for part in contents.flatten().filter(is_media) {
            let media = if let Some(MediaPart { media, address }) = MediaPart::of(part) {
                let bytes = data_url_bytes(media, &address);
                let prepared = bytes.and_then(|bytes| reader.read_media(media, &bytes));
                read.push(prepared.map_err(|error| unreadable(&error))?);
                media
            } else if part["type"] == "audio" {
                let sound = sounds.next().ok_or_else(|| fewer("audio", n_sounds))?;
                read.push(sound.read(reader)?);
                MediaKind::Sound
            } else {
                let image = images.next().ok_or_else(|| fewer("image", n_images))?;
                read.push(image.read(reader)?);
                MediaKind::Picture
            };
            *part = json_value!({"type": media.part_type()});
        }
        match (images.count(), sounds.count()) {
            (0, 0) => Ok(read),
            (0, n) => Err(PyValueError::new_err(format!(
                "audio: {n} of {n_sounds} have no part {{'type': 'audio'}} in the messages"
            ))),
            (n, _) => Err(PyValueError::new_err(format!(
                "images: {n} of {n_images} have no part {{'type': 'image'}} in the messages"
            ))),
        }
    }

    /// Parts for pictures and sounds before the text of the last message of the user.
    fn show_at_end(&mut self, n_images: usize, n_sounds: usize) -> PyResult<()> {
        let of_user = |message: &&mut Value| message["role"] == "user";
        let Some(message) = self.messages.iter_mut().rfind(of_user) else {
            return Err(PyValueError::new_err(
                "images, audio: no message has the role 'user'",
            ));
        };
        let text = message["content"].take();
        let mut parts = vec![json_value!({"type": "image"}); n_images];
        parts.extend(vec![json_value!({"type": "audio"}); n_sounds]);
        parts.push(json_value!({"type": "text", "text": text}));
        message["content"] = Value::Array(parts);
        Ok(())
    }
}

/// Fewer pictures or sounds than parts of this type.
fn fewer(part: &str, n: usize) -> PyErr {
    let name = if part == "audio" { "audio" } else { "images" };
    PyValueError::new_err(format!(
        "{name}: {n} are fewer than the parts {{'type': '{part}'}} of the messages"
    ))
}

/// The pictures and sounds that are given next to messages.
pub(crate) struct GivenMedia {
    pub(crate) images: Vec<Image>,
    pub(crate) sounds: Vec<Audio>,
}

impl GivenMedia {
    pub(crate) fn is_empty(&self) -> bool {
        self.images.is_empty() && self.sounds.is_empty()
    }
}

/// A sound: the bytes of a file, its name, or the samples at 16 kHz.
pub(crate) enum Audio {
    Bytes(Vec<u8>),
    Path(PathBuf),
    Samples(Vec<f32>),
}

/// Samples of a second, where they are given as numbers.
const SAMPLE_RATE: u32 = 16_000;

impl<'py> FromPyObject<'_, 'py> for Audio {
    type Error = PyErr;

    fn extract(sound: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(bytes) = sound.cast::<PyBytes>() {
            return Ok(Self::Bytes(bytes.as_bytes().to_vec()));
        }
        if let Ok(path) = sound.extract::<PathBuf>() {
            return Ok(Self::Path(path));
        }
        let samples: PyReadonlyArray1<'_, f32> = sound.extract().map_err(|_| {
            PyTypeError::new_err(
                "a sound is bytes of a file, its path, or a numpy array of float32, 16000 a second",
            )
        })?;
        Ok(Self::Samples(samples.as_array().iter().copied().collect()))
    }
}

impl Audio {
    fn read(self, reader: &PictureReader) -> PyResult<PreparedPicture> {
        let read = match self {
            Self::Bytes(bytes) => reader.read_sound(&bytes),
            Self::Path(path) => reader.read_sound(&bytes_of(&path)?),
            Self::Samples(samples) => reader.read_samples(SAMPLE_RATE, &samples),
        };
        read.map_err(|error| unreadable(&error))
    }
}

fn bytes_of(path: &Path) -> io::Result<Vec<u8>> {
    let named = |e: io::Error| io::Error::new(e.kind(), format!("'{}': {e}", path.display()));
    std::fs::read(path).map_err(named)
}

/// A picture: the bytes of a file, its name, or the pixels.
pub(crate) enum Image {
    Bytes(Vec<u8>),
    Path(PathBuf),
    Pixels { size: [u32; 2], values: Vec<u8> },
}

impl<'py> FromPyObject<'_, 'py> for Image {
    type Error = PyErr;

    fn extract(image: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(bytes) = image.cast::<PyBytes>() {
            return Ok(Self::Bytes(bytes.as_bytes().to_vec()));
        }
        if let Ok(path) = image.extract::<PathBuf>() {
            return Ok(Self::Path(path));
        }
        let wrong = || {
            PyTypeError::new_err(
                "an image is bytes of a file, its path, or a numpy array [height, width, 3] of uint8",
            )
        };
        let pixels: PyReadonlyArray3<'_, u8> = image.extract().map_err(|_| wrong())?;
        let &[height, width, 3] = pixels.shape() else {
            return Err(wrong());
        };
        let side = |n: usize| u32::try_from(n).map_err(|_| wrong());
        Ok(Self::Pixels {
            size: [side(height)?, side(width)?],
            values: pixels.as_array().iter().copied().collect(),
        })
    }
}

impl Image {
    fn read(self, reader: &PictureReader) -> PyResult<PreparedPicture> {
        let read = match self {
            Self::Bytes(bytes) => reader.read(&bytes),
            Self::Path(path) => reader.read(&bytes_of(&path)?),
            Self::Pixels { size, values } => reader.read_rgb(size, values),
        };
        read.map_err(|error| unreadable(&error))
    }
}

fn unreadable(error: &PictureError) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// A message whose content is one text: parts are joined, unless there is a picture or a sound
/// among them.
fn message(message: Value) -> PyResult<Value> {
    let Value::Object(mut message) = message else {
        return Err(PyTypeError::new_err("a message is no dict"));
    };
    if !message.get("role").is_some_and(Value::is_string) {
        return Err(PyValueError::new_err("a message has no 'role'"));
    }
    let text = match message.get("content") {
        Some(Value::Array(parts)) => {
            let texts = parts
                .iter()
                .map(part)
                .collect::<PyResult<Option<String>>>()?;
            if texts.is_none() {
                return Ok(Value::Object(message));
            }
            texts
        }
        Some(Value::String(_) | Value::Null) => None,
        None if message.contains_key("tool_calls") => None,
        None => return Err(PyValueError::new_err("a message has no 'content'")),
        Some(_) => {
            let wrong = "the 'content' of a message is neither a text nor a list of parts";
            return Err(PyTypeError::new_err(wrong));
        }
    };
    if let Some(text) = text {
        message.insert("content".to_owned(), Value::String(text));
    }
    Ok(Value::Object(message))
}

/// The text of a part; `None` where it is a picture or a sound.
fn part(part: &Value) -> PyResult<Option<&str>> {
    let kind = part["type"].as_str();
    match (kind, part["text"].as_str()) {
        (Some("text"), Some(text)) => Ok(Some(text)),
        (Some("image" | "audio"), _) => Ok(None),
        _ if MediaPart::of(part).is_some() => Ok(None),
        _ => Err(PyValueError::new_err(format!(
            "a part of type '{}' in a message: parts are {{'type': 'text', 'text': …}}, {{'type': 'image'}}, \
             {{'type': 'image_url', …}}, {{'type': 'audio'}} and {{'type': 'input_audio', …}}",
            kind.unwrap_or("none")
        ))),
    }
}
