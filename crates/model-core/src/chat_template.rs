//! Chat templates: messages to the text that a model was trained on.
//!
//! Invariant: rendering equals what `transformers` renders from the same Jinja template (blocks
//! trimmed, `tojson` as Python writes JSON, `raise_exception`, `strftime_now`, Python's string
//! methods), and every template terminates, on a stack and with a memory that its messages bound.
//! Knows nothing of tokens except the texts of two.

mod arguments;
mod arithmetic;
mod filters;
mod json;
mod literals;
mod methods;
mod printf;
mod python;
mod shape;
mod source;
mod strftime;
mod text_methods;
mod texts;
mod values;
mod variadic;

use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value, context};
use serde::{Deserialize, Serialize};

pub use self::shape::HistoryShape;
use self::strftime::strftime;

/// The name of the only template in an environment.
const NAME: &str = "chat_template";

/// The fuel of any rendering, whatever its messages are, in units of the engine: one for an
/// instruction or 64 bytes of text that are written, made or looked through. Some 100 ms, and 100
/// MB.
const BASE_FUEL: u64 = 1_500_000;

/// Units of fuel for each byte of the messages and other variables, as JSON.
const FUEL_PER_BYTE: u64 = 10;

/// The most that it may take: about a second.
const MAX_FUEL: u64 = 20_000_000;

/// Stack to parse and render on: the engine's functions call themselves for values in values.
/// Memory is only taken where one is used.
const STACK_BYTES: usize = 256 << 20;

/// One message of a chat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// The speaker: `system`, `user`, `assistant`, or another that the template knows. `system`,
    /// `user`, `assistant`, or what else the template knows.
    pub role: String,
    /// The text of the message.
    pub content: String,
}

impl ChatMessage {
    /// A message of `role`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: content.into(),
        }
    }
}

/// The choice to end the text with the start of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GenerationPrompt {
    /// It does: the model's next token is the first of its answer.
    Add,
    /// It ends with the last message.
    Omit,
}

/// The texts of the special tokens that templates write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TemplateTokens<'t> {
    /// Begin of sequence; empty where the model has none.
    pub bos: &'t str,
    /// End of sequence; empty where the model has none.
    pub eos: &'t str,
}

/// The time for `strftime_now`, which some templates write into the system message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// Now, in UTC.
    System,
    /// Always the same.
    Fixed(SystemTime),
}

/// Why a template cannot be read or rendered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChatTemplateError {
    /// The template is not valid Jinja, or uses a tag that is not supported.
    #[error("chat template, line {line}: {message}")]
    Syntax {
        /// Line in the template, from 1 on; 0 where it is not known.
        line: usize,
        /// The reason.
        message: String,
    },
    /// The template refuses these messages (`raise_exception`), for example because roles must
    /// alternate.
    #[error("the chat template refuses these messages (line {line}): {message}")]
    Refused {
        /// Line in the template, from 1 on; 0 where it is not known.
        line: usize,
        /// The template's message.
        message: String,
    },
    /// The template failed.
    #[error("the chat template failed in line {line}: {message}")]
    Render {
        /// Line in the template, from 1 on; 0 where it is not known.
        line: usize,
        /// The reason.
        message: String,
    },
}

/// The error of `raise_exception`.
#[derive(Debug)]
struct Refusal(String);

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refusal {}

/// A chat template, ready to render.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Found when it is first needed: it takes some renderings.
    shape: Arc<OnceLock<HistoryShape>>,
}

impl ChatTemplate {
    /// Reads a template (`tokenizer.chat_template`).
    ///
    /// # Errors
    /// [`ChatTemplateError::Syntax`] with the line.
    pub fn new(source: &str) -> Result<Self, ChatTemplateError> {
        Self::with_clock(source, Clock::System)
    }

    /// Reads a template for which it is always the same time.
    ///
    /// # Errors
    /// [`ChatTemplateError::Syntax`] with the line.
    pub fn with_clock(source: &str, clock: Clock) -> Result<Self, ChatTemplateError> {
        let mut environment = Environment::new();
        let mut syntax = SyntaxConfig::builder();
        syntax.trim_blocks(true).lstrip_blocks(true);
        let syntax = syntax.build().map_err(syntax_error)?;
        environment.set_syntax(syntax.clone());
        values::bound(&mut environment);
        filters::add_to(&mut environment);
        environment.add_function(
            "raise_exception",
            |message: String| -> Result<Value, Error> {
                let error = Error::new(ErrorKind::InvalidOperation, "raise_exception");
                Err(error.with_source(Refusal(message)))
            },
        );
        environment.add_function("strftime_now", move |format: String| {
            let now = match clock {
                Clock::System => SystemTime::now(),
                Clock::Fixed(time) => time,
            };
            strftime(&format, now)
        });
        let source = literals::readable(source);
        let parsed = on_own_stack(|| {
            let bounded = source::bounded(&source, &syntax)?;
            let added = environment.add_template_owned(NAME, bounded);
            added.map_err(syntax_error)
        });
        parsed.map_err(syntax_error)??;
        Ok(Self {
            environment,
            shape: Arc::default(),
        })
    }

    /// The form in which the template wants earlier messages, found by rendering short chats; once
    /// for all clones.
    pub fn history_shape(&self) -> &HistoryShape {
        self.shape.get_or_init(|| HistoryShape::of(self))
    }

    /// The text of `messages`.
    ///
    /// # Errors
    /// [`ChatTemplateError::Refused`] if the template does not take these messages,
    /// [`ChatTemplateError::Render`] if it fails otherwise or does not end.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        prompt: GenerationPrompt,
        tokens: TemplateTokens<'_>,
    ) -> Result<String, ChatTemplateError> {
        let n_bytes = messages
            .iter()
            .map(|m| m.role.len() + m.content.len() + MESSAGE_BYTES);
        let n_bytes = n_bytes.sum();
        let messages = Value::from(Serde(messages));
        self.render_variables(variables(messages, prompt, tokens), n_bytes)
    }

    /// The text of messages that are plain JSON objects: with parts, tool calls and results. The
    /// extra variables are others that templates read: `tools`, `documents`, `enable_thinking`;
    /// they come before the usual ones of the same names.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`].
    pub fn render_json(
        &self,
        messages: &[serde_json::Value],
        extra: &serde_json::Map<String, serde_json::Value>,
        prompt: GenerationPrompt,
        tokens: TemplateTokens<'_>,
    ) -> Result<String, ChatTemplateError> {
        let usual = variables(Value::from(Serde(messages)), prompt, tokens);
        let n_bytes = messages.iter().chain(extra.values()).map(json_bytes).sum();
        let extra = Value::from(Serde(extra));
        self.render_variables(context! { ..extra, ..usual }, n_bytes)
    }

    /// Renders with variables of so many bytes.
    fn render_variables(
        &self,
        variables: Value,
        n_bytes: usize,
    ) -> Result<String, ChatTemplateError> {
        let fuel = (n_bytes as u64).saturating_mul(FUEL_PER_BYTE);
        let fuel = fuel.saturating_add(BASE_FUEL).min(MAX_FUEL);
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(fuel));
        let rendered = on_own_stack(move || environment.get_template(NAME)?.render(variables));
        let rendered = rendered.flatten();
        rendered.map_err(|error| {
            let line = error.line().unwrap_or(0);
            match refusal(&error) {
                Some(message) => ChatTemplateError::Refused { line, message },
                None if error.kind() == ErrorKind::OutOfFuel => ChatTemplateError::Render {
                    line,
                    message: format!(
                        "it takes more than {fuel} steps (or 64 bytes of text for each) for {n_bytes} \
                         bytes of messages"
                    ),
                },
                None => ChatTemplateError::Render {
                    line,
                    message: describe(&error),
                },
            }
        })
    }
}

/// Bytes of a message as JSON, without its texts.
const MESSAGE_BYTES: usize = 28;

/// About what a value takes as JSON.
fn json_bytes(value: &serde_json::Value) -> usize {
    use serde_json::Value;
    match value {
        Value::String(text) => text.len() + 2,
        Value::Array(items) => items.iter().map(json_bytes).sum::<usize>() + 2,
        Value::Object(object) => {
            let pairs = object.iter();
            pairs
                .map(|(key, value)| key.len() + 4 + json_bytes(value))
                .sum::<usize>()
                + 2
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => 4,
    }
}

/// Runs the engine on a thread of its own, for its stack. The engine may have bugs that panic (2.24
/// had one), and the template is not ours: a panic is an error.
fn on_own_stack<T: Send>(run: impl FnOnce() -> T + Send) -> Result<T, Error> {
    let fail = |message: String| Err(Error::new(ErrorKind::InvalidOperation, message));
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("chat-template".to_owned());
        match thread.stack_size(STACK_BYTES).spawn_scoped(scope, run) {
            Ok(thread) => match thread.join() {
                Ok(done) => Ok(done),
                Err(_) => fail("the template engine panicked".to_owned()),
            },
            Err(error) => fail(format!(
                "no thread with {STACK_BYTES} bytes of address space for its stack: {error}"
            )),
        }
    })
}

/// The variables of every template.
fn variables(messages: Value, prompt: GenerationPrompt, tokens: TemplateTokens<'_>) -> Value {
    let none = Value::from(());
    context! {
        messages,
        add_generation_prompt => prompt == GenerationPrompt::Add,
        bos_token => tokens.bos,
        eos_token => tokens.eos,
        tools => none.clone(),
        documents => none,
    }
}

fn syntax_error(error: Error) -> ChatTemplateError {
    ChatTemplateError::Syntax {
        line: error.line().unwrap_or(0),
        message: describe(&error),
    }
}

fn describe(error: &Error) -> String {
    match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    }
}

/// The message given to `raise_exception`, if that is why the template failed.
fn refusal(error: &Error) -> Option<String> {
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        if let Some(Refusal(message)) = cause.downcast_ref() {
            return Some(message.clone());
        }
        source = cause.source();
    }
    None
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use std::time::UNIX_EPOCH;

    use super::*;

    fn render(source: &str) -> Result<String, ChatTemplateError> {
        let time = UNIX_EPOCH + Duration::from_secs(1_709_211_600);
        let template = ChatTemplate::with_clock(source, Clock::Fixed(time))?;
        let messages = [ChatMessage::new("user", "<a> & 'é'\n")];
        let tokens = TemplateTokens {
            bos: "<s>",
            eos: "</s>",
        };
        template.render(&messages, GenerationPrompt::Add, tokens)
    }

    #[test]
    fn blocks_are_trimmed() {
        let source =
            "{{ bos_token }}\n  {% for m in messages %}\n{{ m.role }}\n  {% endfor %}\nend\n";
        assert_eq!(render(source).unwrap(), "<s>\nuser\nend");
    }

    #[test]
    fn json_is_python_s() {
        let one_line = r#"[{"role": "user", "content": "<a> & 'é'\n"}]"#;
        assert_eq!(render("{{ messages | tojson }}").unwrap(), one_line);
        let indented = "{\n    \"a\": [\n        1,\n        true\n    ]\n}";
        assert_eq!(
            render("{{ {'a': [1, true]} | tojson(indent=4) }}").unwrap(),
            indented
        );
        assert!(matches!(
            render("{{ 1 | tojson(nonsense=1) }}"),
            Err(ChatTemplateError::Render { .. })
        ));
    }

    #[test]
    fn dates() {
        assert_eq!(
            render("{{ strftime_now('%d %b %Y') }}").unwrap(),
            "29 Feb 2024"
        );
    }

    #[test]
    fn errors_carry_the_line() {
        let refused = render("a\n{% if true %}\n{{ raise_exception('no ' + 'way') }}{% endif %}");
        let message = "no way".to_owned();
        assert_eq!(
            refused,
            Err(ChatTemplateError::Refused { line: 3, message })
        );
        let syntax = ChatTemplate::new("a\nb\n{% nonsense %}").unwrap_err();
        assert!(
            matches!(syntax, ChatTemplateError::Syntax { line: 3, .. }),
            "{syntax}"
        );
        let render = render("a\n{{ messages[0].content.nonsense() }}").unwrap_err();
        assert!(
            matches!(render, ChatTemplateError::Render { line: 2, .. }),
            "{render}"
        );
    }

    #[test]
    fn a_template_that_does_not_end_is_an_error() {
        let source =
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
        assert!(matches!(
            render(source),
            Err(ChatTemplateError::Render { .. })
        ));
    }

    #[test]
    fn marks_for_training_write_nothing() {
        let source = "{% if true %}a{%- generation -%} b {%- endgeneration %}c{% endif %}";
        assert_eq!(render(source).unwrap(), "abc");
        assert_eq!(render("{{ 'generation' }}").unwrap(), "generation");
    }

    #[test]
    fn none_is_not_iterable() {
        let source = "{{ tools is iterable }} {{ messages is iterable }} {{ 'a' is iterable }}";
        assert_eq!(render(source).unwrap(), "False True True");
    }

    #[test]
    fn a_bug_of_the_engine_is_an_error() {
        assert_eq!(render("{{ messages[::-1] | length }}").unwrap(), "1");
        // Nothing, as Jinja2 has it, or an error: not a panic.
        match render("{% for m in [][::-1] %}x{% endfor %}") {
            Ok(text) => assert_eq!(text, ""),
            Err(error) => assert!(matches!(error, ChatTemplateError::Render { .. }), "{error}"),
        }
    }

    #[test]
    fn python_s_string_methods_and_loop_controls() {
        let source = "{% for m in messages %}{{ m.content.strip().upper().split(' ')[0] }}\
                      {% break %}{% endfor %}{{ tools is none }}";
        assert_eq!(render(source).unwrap(), "<A>True");
    }
}
