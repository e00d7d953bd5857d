//! Pictures and sounds in prompts: the tower of a model on a backend, and messages with pictures or
//! sounds as tokens. Knows nothing of how rows are computed.

use std::path::Path;

use cellar_engine::{DEFAULT_PICTURE_BYTES, Tower};
use model_core::chat_template::GenerationPrompt;
use model_core::expert_tensors::ExpertLayers;
use model_core::media::MediaKind;
use model_core::model_file::ModelFile;
use model_core::picture::{PreparedPicture, PromptTokens};
use model_core::tokenizer::EncodeOptions;
use model_vision::{PictureReader, Vision};
use serde_json::{Map, Value, json};

use crate::backends::{BackendOptions, open_backend};
use crate::chat::render_json_chat;
use crate::error::Error;

/// The vision or audio tower of a model, where it has one: in `mmproj`, in its directory, or in the
/// one `mmproj` file next to it.
///
/// # Errors
/// [`Error::Picture`] where it is not usable or not supported.
pub fn vision_of(
    file: &ModelFile,
    path: impl AsRef<Path>,
    mmproj: Option<&Path>,
) -> Result<Option<Vision>, Error> {
    Ok(Vision::of(file, path.as_ref(), mmproj)?)
}

/// A tower on a backend of its own: the one of this kind, or where none is named, the fastest on
/// the host.
///
/// # Errors
/// [`Error::Backend`], [`Error::Picture`] where the backend cannot hold it.
pub fn open_tower(vision: &Vision, backend: BackendOptions) -> Result<Tower, Error> {
    let backend = open_backend(BackendOptions {
        gpu_layers: None,
        host_experts: ExpertLayers::default(),
        profile: None,
        ..backend
    })?;
    let encoder = vision.encoder(backend)?;
    Ok(Tower::new(Box::new(encoder), DEFAULT_PICTURE_BYTES))
}

/// A chat with pictures or sounds.
#[derive(Clone, Debug, PartialEq)]
pub struct PictureChat {
    /// Its text as the model's own chat template renders it, with the model's text for each
    /// picture or sound.
    pub text: String,
    /// The same as tokens, with the names of their rows.
    pub prompt: PromptTokens,
}

/// Messages with pictures or sounds as the model's own chat template renders them: each part
/// `{"type": "image"}` or `{"type": "audio"}` of a content is the next of `pictures`
/// ([`take_pictures`](crate::take_pictures) makes such parts of OpenAI's). `variables` are others
/// that templates read, such as `tools`.
///
/// # Errors
/// [`Error::NoChatTemplate`]; [`Error::Template`] where the template refuses the messages;
/// [`Error::Picture`] where it writes no place for each picture.
pub fn picture_chat(
    file: &ModelFile,
    reader: &PictureReader,
    messages: &[Value],
    variables: &Map<String, Value>,
    pictures: &[PreparedPicture],
) -> Result<PictureChat, Error> {
    let text = render_json_chat(file, messages, variables, GenerationPrompt::Add)?;
    let text = text.ok_or(Error::NoChatTemplate)?;
    let text = reader.expand(&text, pictures)?;
    let tokens = file.tokenizer().encode(&text, EncodeOptions::CHAT);
    let prompt = reader.place(tokens, pictures)?;
    Ok(PictureChat { text, prompt })
}

/// A message of a user with so many pictures or sounds before its text.
pub fn media_message(media: MediaKind, text: &str, n: usize) -> Value {
    let mut parts = vec![json!({"type": media.part_type()}); n];
    parts.push(json!({"type": "text", "text": text}));
    json!({"role": "user", "content": parts})
}
