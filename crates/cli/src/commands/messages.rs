//! Renders chat messages with the model's own template. Knows nothing of where messages come from.

use kv_core::TokenId;
use model_core::chat_template::{ChatMessage, ChatTemplate, GenerationPrompt, TemplateTokens};
use model_core::model_file::ModelFile;

/// The messages, with the beginning of an answer; `None` where the model has no chat template.
///
/// # Errors
/// Where the template is broken, or refuses these messages.
pub(super) fn render(file: &ModelFile, messages: &[ChatMessage]) -> anyhow::Result<Option<String>> {
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
