//! Chat messages to the text that a model was trained on. Knows nothing of how an answer is
//! written.

use kv_core::TokenId;
use model_core::chat_template::{ChatMessage, ChatTemplate, GenerationPrompt, TemplateTokens};
use model_core::model_file::ModelFile;

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
    let tokenizer = file.tokenizer();
    let ids = tokenizer.special_ids();
    let text_of = |id: Option<TokenId>| id.and_then(|id| tokenizer.token_text(id)).unwrap_or("");
    let tokens = TemplateTokens {
        bos: text_of(ids.bos),
        eos: text_of(ids.eos),
    };
    let text = ChatTemplate::new(template)?.render(messages, GenerationPrompt::Add, tokens)?;
    Ok(Some(text))
}
