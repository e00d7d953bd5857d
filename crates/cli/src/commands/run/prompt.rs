//! The prompt of `cellar run`: where it comes from, and whether it is a message.
//!
//! Invariant: whether the prompt is a message or the beginning of a text is decided once, by the
//! flags and the model's chat template. Knows nothing of memory.

use kv_core::TokenId;
use model_core::chat_template::ChatMessage;
use model_core::model_file::ModelFile;
use model_core::picture::PromptTokens;
use model_core::tokenizer::{AddSpecial, EncodeOptions};
use serde_json::{Map, Value, json};

use crate::args::RunArgs;
use crate::failure::usage;
use crate::given_text;
use crate::input;
use crate::models::ModelSource;
use crate::pictures::{self, Sight};

/// What the prompt is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PromptMode {
    /// A message, which the model's chat template surrounds.
    Chat,
    /// The beginning of the text, as it is.
    Raw,
}

/// The prompt of the command line, or the beginning of the story.
///
/// # Errors
/// Where it cannot be read; a usage error where there is none.
pub(super) fn prompt(args: &RunArgs, source: &ModelSource) -> anyhow::Result<String> {
    let files = [
        &args.model.model,
        &args.session.load_state,
        &args.constraint.schema,
        &args.constraint.grammar,
    ];
    let stdin_is_taken = files
        .into_iter()
        .flatten()
        .any(|path| input::is_stdin(path));
    if stdin_is_taken && args.file.as_deref().is_some_and(input::is_stdin) {
        return input::given_twice();
    }
    let given = match (args.prompt(), &args.file) {
        (Some(prompt), Some(file)) => Some(join(Some(input::text(file)?), prompt)),
        (None, None) if stdin_is_taken || args.no_stdin => None,
        (Some(prompt), None) if stdin_is_taken || args.no_stdin => Some(prompt.to_owned()),
        (Some(prompt), None) => Some(join(given_text::piped_text()?, prompt)),
        (None, file) => {
            given_text::text(None, file.as_deref())?.map(given_text::without_last_line_break)
        }
    };
    match (given, source) {
        (Some(prompt), _) => Ok(prompt),
        (None, _) if args.session.load_state.is_some() && !args.chat => Ok(String::new()),
        (None, ModelSource::Embedded) => Ok(cellar_stories::PROMPT.to_owned()),
        (None, ModelSource::File(_)) => {
            // A model that is not there is the first thing to say.
            source.open()?;
            usage(
                "no prompt: give one as an argument, with -f FILE, or through a pipe; 'cellar chat MODEL' \
             talks with a model",
            )
        }
    }
}

/// What came through a pipe, an empty line, and the argument.
fn join(piped: Option<String>, argument: &str) -> String {
    match piped.map(given_text::without_last_line_break) {
        Some(text) if argument.is_empty() => text,
        Some(text) => format!("{text}\n\n{argument}"),
        None => argument.to_owned(),
    }
}

impl PromptMode {
    /// What the prompt is for this model.
    ///
    /// # Errors
    /// Where the template cannot be read; a usage error where the flags need one and there is none.
    pub(super) fn new(args: &RunArgs, file: &ModelFile, prompt: &str) -> anyhow::Result<Self> {
        let has_template = file.chat_template()?.is_some();
        let only_continues = args.session.load_state.is_some() && prompt.is_empty();
        if args.chat {
            return Ok(Self::Chat);
        }
        if args.system.is_some() && !has_template {
            return usage("--system needs a chat template, and this model has none");
        }
        if args.reasoning_budget.is_some() && !has_template {
            return usage("--reasoning-budget needs a chat template, and this model has none");
        }
        if has_template && !args.raw && !args.no_bos && !only_continues {
            Ok(Self::Chat)
        } else {
            Ok(Self::Raw)
        }
    }
}

/// The text that the model continues, and its tokens.
///
/// # Errors
/// Where the template refuses the prompt; a usage error where it is an empty message.
pub(super) fn encode(
    file: &ModelFile,
    args: &RunArgs,
    mode: PromptMode,
    prompt: String,
) -> anyhow::Result<(String, Vec<TokenId>)> {
    let tokenizer = file.tokenizer();
    let continues = args.session.load_state.is_some();
    if mode == PromptMode::Chat && prompt.trim().is_empty() {
        return usage("the prompt is an empty message: give a text, or --raw, which begins one");
    }
    if mode == PromptMode::Chat && continues {
        let text = next_turn(file, &prompt)?;
        let options = EncodeOptions {
            add: AddSpecial::Continuation,
            ..EncodeOptions::CHAT
        };
        let ids = tokenizer.encode(&text, options);
        return Ok((text, ids));
    }
    if mode == PromptMode::Chat {
        let text = chat_prompt(file, args.system.as_deref(), &prompt)?;
        let ids = tokenizer.encode(&text, EncodeOptions::CHAT);
        return Ok((text, ids));
    }
    if continues && prompt.is_empty() {
        return Ok((prompt, Vec::new()));
    }
    let add = if continues {
        AddSpecial::Continuation
    } else if args.no_bos {
        AddSpecial::Never
    } else {
        AddSpecial::AsModel
    };
    let options = EncodeOptions {
        add,
        ..EncodeOptions::PROMPT
    };
    let mut ids = tokenizer.encode(&prompt, options);
    // A model that ends texts with EOS would have nothing to continue, unless that ends a source.
    let has_source = file.model().source_encoder().is_some();
    if !has_source && !args.no_bos && !continues && tokenizer.adds_last().is_some() {
        ids.pop();
    }
    Ok((prompt, ids))
}

/// The text of a message with pictures or sounds before its words, and its tokens. The text has the
/// model's mark in the place of each.
///
/// # Errors
/// Where one cannot be read, or the model does not take it; where the template refuses the message.
pub(super) fn with_pictures(
    file: &ModelFile,
    args: &RunArgs,
    sight: &Sight,
    prompt: &str,
) -> anyhow::Result<(String, PromptTokens)> {
    let read = pictures::read(sight, &args.image, &args.audio)?;
    let reader = pictures::reader(sight).map_err(anyhow::Error::msg)?;
    let system = args
        .system
        .as_ref()
        .map(|text| json!({"role": "system", "content": text}));
    let message = cellar::media_message(reader.media(), prompt, read.len());
    let messages: Vec<Value> = system.into_iter().chain([message]).collect();
    let chat = cellar::picture_chat(file, &reader, &messages, &Map::new(), &read)?;
    Ok((chat.text, chat.prompt))
}

fn chat_prompt(file: &ModelFile, system: Option<&str>, user: &str) -> anyhow::Result<String> {
    let system = system.map(|text| ChatMessage::new("system", text));
    let messages: Vec<ChatMessage> = system
        .into_iter()
        .chain([ChatMessage::new("user", user)])
        .collect();
    rendered(file, &messages)
}

/// Placeholders for the messages that a loaded state has read.
const EARLIER: [&str; 2] = ["the-message-before", "the-answer-before"];

/// The text after an answer: its end, as the template renders it, and the next message. A state
/// holds tokens and not messages, so placeholders are rendered and only the text after them is
/// used.
fn next_turn(file: &ModelFile, user: &str) -> anyhow::Result<String> {
    let [before, answer] = EARLIER;
    let messages = [("user", before), ("assistant", answer), ("user", user)];
    let messages = messages.map(|(role, text)| ChatMessage::new(role, text));
    let text = rendered(file, &messages)?;
    match text.split_once(answer) {
        Some((_, after)) if after.contains(user.trim()) => Ok(after.to_owned()),
        _ => anyhow::bail!(
            "this model's chat template leaves out earlier messages, so no message can follow a saved \
             state; --raw appends the prompt to the text of the state"
        ),
    }
}

fn rendered(file: &ModelFile, messages: &[ChatMessage]) -> anyhow::Result<String> {
    match cellar::render_chat(file, messages) {
        Ok(Some(text)) => Ok(text),
        Ok(None) => anyhow::bail!("this model has no chat template: run it without --chat"),
        Err(error) => anyhow::bail!("{error}; --raw continues the prompt without the template"),
    }
}
