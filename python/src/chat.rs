//! Messages to JSON objects, as chat templates take them, and their pictures. Knows no models.

use std::io;
use std::path::PathBuf;

use cellar::{PictureError, PictureReader, PreparedPicture, data_url_bytes, picture_address};
use numpy::{PyReadonlyArray3, PyUntypedArrayMethods};
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
    /// `ValueError` for a message without a role, or with parts that are neither texts nor
    /// pictures; `TypeError` where it is no dict.
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
    /// True if parts of its messages are pictures.
    pub(crate) fn shows_pictures(&self) -> bool {
        let parts = self.messages.iter().filter_map(|m| m["content"].as_array());
        parts.flatten().any(|part| part["type"] != "text")
    }

    /// The pictures of its messages, each of which a part `{"type": "image"}` takes the place of.
    /// Those parts that are there already take `images` in their order; where there are none, the
    /// last message of the user shows all of them.
    ///
    /// # Errors
    /// `ValueError` where there are more or fewer `images` than parts, or one cannot be read;
    /// `OSError` where a file cannot be read.
    pub(crate) fn take_pictures(
        &mut self,
        reader: &PictureReader,
        images: Vec<Image>,
    ) -> PyResult<Vec<PreparedPicture>> {
        let n_images = images.len();
        if !self.shows_pictures() {
            self.show_at_end(n_images)?;
        }
        let (mut images, mut pictures) = (images.into_iter(), Vec::new());
        let contents = self
            .messages
            .iter_mut()
            .filter_map(|m| m["content"].as_array_mut());
        let is_picture = |part: &&mut Value| part["type"] != "text";
        for part in contents.flatten().filter(is_picture) {
            pictures.push(match picture_address(part) {
                Some(url) => data_url_bytes(url)
                    .and_then(|bytes| reader.read(&bytes))
                    .map_err(|error| unreadable(&error))?,
                None => match images.next() {
                    Some(image) => image.read(reader)?,
                    None => {
                        return Err(PyValueError::new_err(format!(
                            "images: {n_images} are fewer than the parts {{'type': 'image'}} of the messages"
                        )));
                    }
                },
            });
            *part = json_value!({"type": "image"});
        }
        match images.count() {
            0 => Ok(pictures),
            n => Err(PyValueError::new_err(format!(
                "images: {n} of {n_images} have no part {{'type': 'image'}} in the messages"
            ))),
        }
    }

    /// Parts for pictures before the text of the last message of the user.
    fn show_at_end(&mut self, n_images: usize) -> PyResult<()> {
        let of_user = |message: &&mut Value| message["role"] == "user";
        let Some(message) = self.messages.iter_mut().rfind(of_user) else {
            return Err(PyValueError::new_err(
                "images: no message has the role 'user'",
            ));
        };
        let text = message["content"].take();
        let mut parts = vec![json_value!({"type": "image"}); n_images];
        parts.push(json_value!({"type": "text", "text": text}));
        message["content"] = Value::Array(parts);
        Ok(())
    }
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
            Self::Path(path) => {
                let read = std::fs::read(&path);
                let named =
                    |e: io::Error| io::Error::new(e.kind(), format!("'{}': {e}", path.display()));
                reader.read(&read.map_err(named)?)
            }
            Self::Pixels { size, values } => reader.read_rgb(size, values),
        };
        read.map_err(|error| unreadable(&error))
    }
}

fn unreadable(error: &PictureError) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// A message whose content is one text: parts are joined, unless there is a picture among them.
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

/// The text of a part; `None` where it is a picture.
fn part(part: &Value) -> PyResult<Option<&str>> {
    let kind = part["type"].as_str();
    match (kind, part["text"].as_str()) {
        (Some("text"), Some(text)) => Ok(Some(text)),
        (Some("image" | "image_url" | "input_image"), _) => Ok(None),
        _ => Err(PyValueError::new_err(format!(
            "a part of type '{}' in a message: parts are {{'type': 'text', 'text': …}}, {{'type': 'image'}} and \
             {{'type': 'image_url', …}}",
            kind.unwrap_or("none")
        ))),
    }
}
