//! Chat messages to the text that a model was trained on. Knows nothing of how an answer is
//! written.

use kv_core::TokenId;
use model_core::chat_template::{ChatMessage, ChatTemplate, GenerationPrompt, TemplateTokens};
use model_core::message_ends::message_ends;
use model_core::model_file::ModelFile;
use model_core::tokenizer::EncodeOptions;
use serde_json::{Map, Value};

use crate::error::Error;

/// The messages as the model's own chat template renders them, with the beginning of an answer;
/// `None` where the model has no template.
///
/// # Errors
/// [`Error::Template`] where the template is broken or refuses these messages.
pub fn render_chat(file: &ModelFile, messages: &[ChatMessage]) -> Result<Option<String>, Error> {
    let Some(template) = file.chat_template()? else {
        return Ok(None);
    };
    let template = ChatTemplate::new(template)?;
    let prompt = GenerationPrompt::Add;
    Ok(Some(render(file, &template, messages, prompt)?))
}

/// The same for messages that are plain JSON objects, with tool calls and their results, in the
/// words of OpenAI's chat: they are given to the template in the form that it shows. `variables`
/// are others that templates read, such as `tools`.
///
/// # Errors
/// As [`render_chat`].
pub fn render_json_chat(
    file: &ModelFile,
    messages: &[Value],
    variables: &Map<String, Value>,
    prompt: GenerationPrompt,
) -> Result<Option<String>, Error> {
    let Some(template) = file.chat_template()? else {
        return Ok(None);
    };
    let template = ChatTemplate::new(template)?;
    let shape = template.history_shape();
    let (messages, variables) = (shape.apply(messages), shape.variables(variables));
    let tokens = template_tokens(file);
    Ok(Some(
        template.render_json(&messages, &variables, prompt, tokens)?,
    ))
}

/// A chat as tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatTokens {
    /// The messages, with the beginning of an answer.
    pub tokens: Vec<TokenId>,
    /// After how many tokens some of the messages end: where other prompts are likely to part from
    /// it.
    pub message_ends: Vec<usize>,
}

/// The same as tokens.
///
/// # Errors
/// As [`render_chat`].
pub fn chat_tokens(
    file: &ModelFile,
    messages: &[ChatMessage],
) -> Result<Option<ChatTokens>, Error> {
    let Some(template) = file.chat_template()? else {
        return Ok(None);
    };
    let template = ChatTemplate::new(template)?;
    let tokenizer = file.tokenizer();
    let text = render(file, &template, messages, GenerationPrompt::Add)?;
    let tokens = tokenizer.encode(&text, EncodeOptions::CHAT);
    let roles = messages.iter().map(|message| message.role.as_str());
    let message_ends = message_ends(tokenizer, &tokens, roles, |n| {
        let messages = messages.get(..n)?;
        render(file, &template, messages, GenerationPrompt::Omit).ok()
    });
    Ok(Some(ChatTokens {
        tokens,
        message_ends,
    }))
}

fn render(
    file: &ModelFile,
    template: &ChatTemplate,
    messages: &[ChatMessage],
    prompt: GenerationPrompt,
) -> Result<String, Error> {
    Ok(template.render(messages, prompt, template_tokens(file))?)
}

fn template_tokens(file: &ModelFile) -> TemplateTokens<'_> {
    let tokenizer = file.tokenizer();
    let ids = tokenizer.special_ids();
    let text_of = |id: Option<TokenId>| id.and_then(|id| tokenizer.token_text(id)).unwrap_or("");
    TemplateTokens {
        bos: text_of(ids.bos),
        eos: text_of(ids.eos),
    }
}
