//! [`encode`]: from a prompt in any form to tokens, and where its messages end in them.
//!
//! Invariant: a prompt is encoded as the model was trained, with what its template and its vocabulary add; what
//! users say is never a control token.
//! Knows no request.

use kv_core::TokenId;
use model_core::tokenizer::EncodeOptions;

use crate::error::ApiError;
use crate::fim;
use crate::generate::{ChatPrompt, Prompt};
use crate::model::ServedModel;

/// Tokens that are left to what fills a gap, where a request gives no number.
const GAP_TOKENS: usize = 256;

/// A prompt as the model reads it.
pub(crate) struct Encoded {
    pub(crate) tokens: Vec<TokenId>,
    /// Messages, and what the template made of them.
    chat: Option<(ChatPrompt, String)>,
}

impl Encoded {
    /// What the template made of messages.
    pub(crate) fn rendered(&self) -> Option<&String> {
        self.chat.as_ref().map(|(_, text)| text)
    }

    /// After how many of its tokens messages end, where the model's service keeps copies there.
    pub(crate) fn checkpoints(&self, model: &ServedModel) -> Result<Vec<usize>, ApiError> {
        Ok(match &self.chat {
            Some((chat, _)) if model.service()?.keeps_checkpoints() => {
                model.message_ends(chat, &self.tokens)
            }
            _ => Vec::new(),
        })
    }
}

/// Encodes a prompt, whose answer may have so many tokens.
pub(crate) fn encode(
    model: &ServedModel,
    prompt: Prompt,
    max_tokens: Option<usize>,
) -> Result<Encoded, ApiError> {
    let (tokens, chat) = match prompt {
        Prompt::Text(text) => (model.tokenizer().encode(&text, EncodeOptions::PROMPT), None),
        Prompt::Tokens(tokens) => (tokens, None),
        Prompt::Gap(gap) => {
            let limit = model.service()?.prompt_limits().n_tokens;
            let n_answer = max_tokens.unwrap_or(GAP_TOKENS).min(limit / 2);
            let tokens = fim::prompt(model.tokenizer(), &gap, limit - n_answer);
            (tokens.ok_or_else(|| model.has_no_gaps())?, None)
        }
        Prompt::Chat(chat) => {
            let (tokens, text) = encode_chat(model, &chat)?;
            (tokens, Some((chat, text)))
        }
    };
    Ok(Encoded { tokens, chat })
}

/// The tokens of messages, and what the template made of them.
fn encode_chat(model: &ServedModel, chat: &ChatPrompt) -> Result<(Vec<TokenId>, String), ApiError> {
    let tokenizer = model.tokenizer();
    let Some(mut guarded) = model.control_texts().guard(&chat.messages) else {
        let text = model.render(chat)?;
        return Ok((tokenizer.encode(&text, EncodeOptions::CHAT), text));
    };
    let chat = ChatPrompt {
        messages: std::mem::take(&mut guarded.messages),
        variables: chat.variables.clone(),
    };
    let rendered = model.render(&chat)?;
    Ok((
        guarded.encode(tokenizer, &rendered),
        guarded.text(&rendered),
    ))
}
