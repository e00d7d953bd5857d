//! [`encode`]: from a prompt in any form to tokens, and where its messages end in them.
//!
//! Invariant: a prompt is encoded as the model was trained, with what its template and its
//! vocabulary add; what users say is never a control token. Knows no request.

use kv_core::TokenId;
use model_core::picture::{PictureRun, PromptTokens};
use model_core::tokenizer::EncodeOptions;

use crate::error::ApiError;
use crate::fim;
use crate::generate::{ChatPrompt, Prompt};
use crate::model::ServedModel;
use crate::pictures;

/// Tokens that are left to what fills a gap, where a request gives no number.
const GAP_TOKENS: usize = 256;

/// A prompt as the model reads it.
pub(crate) struct Encoded {
    pub(crate) tokens: Vec<TokenId>,
    /// The pictures whose rows some of them name.
    pub(crate) pictures: Vec<PictureRun>,
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
    let mut pictures = Vec::new();
    let (tokens, chat) = match prompt {
        Prompt::Text(text) => (model.tokenizer().encode(&text, EncodeOptions::PROMPT), None),
        Prompt::Tokens(tokens) => (tokens, None),
        Prompt::Marked(marked) => {
            let (text, read) = pictures::read_marked(model, &marked)?;
            let tokens = model.tokenizer().encode(&text, EncodeOptions::PROMPT);
            let prompt = model.placed(tokens, &read)?;
            pictures = prompt.pictures;
            (prompt.tokens, None)
        }
        Prompt::Gap(gap) => {
            let limit = model.service()?.prompt_limits().n_tokens;
            let n_answer = max_tokens.unwrap_or(GAP_TOKENS).min(limit / 2);
            let tokens = fim::prompt(model.tokenizer(), &gap, limit - n_answer);
            (tokens.ok_or_else(|| model.has_no_gaps())?, None)
        }
        Prompt::Chat(chat) => {
            let (prompt, text) = encode_chat(model, &chat)?;
            pictures = prompt.pictures;
            let chat = pictures::without_bytes(&chat).into_owned();
            (prompt.tokens, Some((chat, text)))
        }
    };
    Ok(Encoded {
        tokens,
        pictures,
        chat,
    })
}

/// The tokens of messages, and what the template made of them.
fn encode_chat(model: &ServedModel, chat: &ChatPrompt) -> Result<(PromptTokens, String), ApiError> {
    let tokenizer = model.tokenizer();
    let pictures = pictures::read(model, chat)?;
    let chat = model.shaped(&pictures::without_bytes(chat))?;
    let guarded = model.control_texts().guard(&chat);
    let (tokens, text) = match guarded {
        None => {
            let text = model.with_places(model.render_shaped(&chat)?, &pictures)?;
            (tokenizer.encode(&text, EncodeOptions::CHAT), text)
        }
        Some(guarded) => {
            let rendered = model.render_shaped(&guarded.chat)?;
            let rendered = model.with_places(rendered, &pictures)?;
            let tokens = guarded.encode(tokenizer, &rendered);
            (tokens, guarded.text(&rendered))
        }
    };
    Ok((model.placed(tokens, &pictures)?, text))
}

/// The text of messages, to be sent on as a prompt: one whose tokens are those of the messages.
///
/// # Errors
/// [`ApiError`] 400 where a string of the request spells a control token: in a text it would be
/// one.
pub(crate) fn render_as_text(model: &ServedModel, chat: &ChatPrompt) -> Result<String, ApiError> {
    let shaped = model.shaped(&pictures::without_bytes(chat))?;
    let controls = model.control_texts();
    let Some(guarded) = controls.guard(&shaped) else {
        return model.render_shaped(&shaped);
    };
    let rendered = model.render_shaped(&guarded.chat)?;
    if guarded.is_safe_as_text(controls, model.tokenizer(), &rendered) {
        return Ok(guarded.text(&rendered));
    }
    let param = controls.spelled(chat);
    let param = param.unwrap_or_else(|| "messages".to_owned());
    let message = format!(
        "'{param}' spells a control token of the model, which it would be in a prompt that is a text: send \
         the messages to /v1/chat/completions, or to /v1/chat/completions/render for the tokens of the prompt"
    );
    Err(ApiError::invalid_param(param, message))
}
