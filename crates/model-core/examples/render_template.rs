//! Renders chat templates: JSON lines in, JSON lines out. For `scripts/corpus/templates.py`, which
//! compares the texts with Jinja2's.
//!
//! A line is `{"template", "messages", "variables", "add_generation_prompt", "bos", "eos"}`;
//! without `template` it is that of the line before. The answer is `{"text"}` or `{"error"}`.

use std::io::{BufRead, Write};
use std::time::{Duration, UNIX_EPOCH};

use model_core::chat_template::{
    ChatTemplate, ChatTemplateError, Clock, GenerationPrompt, TemplateTokens,
};
use serde_json::{Map, Value, json};

/// 2024-02-29, 13:07:09 UTC.
const NOW: u64 = 1_709_212_029;

#[derive(serde::Deserialize)]
struct Chat {
    #[serde(default)]
    template: Option<String>,
    messages: Vec<Value>,
    variables: Map<String, Value>,
    add_generation_prompt: bool,
    bos: String,
    eos: String,
}

fn main() -> std::io::Result<()> {
    let mut template = None;
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let chat: Chat = serde_json::from_str(&line?)?;
        if let Some(source) = &chat.template {
            let clock = Clock::Fixed(UNIX_EPOCH + Duration::from_secs(NOW));
            template = Some(ChatTemplate::with_clock(source, clock));
        }
        let answer = match rendered(template.as_ref(), &chat) {
            Ok(text) => json!({"text": text}),
            Err(error) => json!({"error": error.to_string()}),
        };
        writeln!(out, "{answer}")?;
    }
    Ok(())
}

fn rendered(
    template: Option<&Result<ChatTemplate, ChatTemplateError>>,
    chat: &Chat,
) -> Result<String, ChatTemplateError> {
    let template = match template {
        Some(Ok(template)) => template,
        Some(Err(error)) => return Err(error.clone()),
        None => &ChatTemplate::new("")?,
    };
    let prompt = if chat.add_generation_prompt {
        GenerationPrompt::Add
    } else {
        GenerationPrompt::Omit
    };
    let tokens = TemplateTokens {
        bos: &chat.bos,
        eos: &chat.eos,
    };
    template.render_json(&chat.messages, &chat.variables, prompt, tokens)
}
