//! `cellar chat`: a conversation, one message per line.
//!
//! Invariant: the model evaluates the conversation as its template renders it; the part of it that
//! is in the memory is not evaluated again, and other tokens are removed. Knows of terminals only
//! whether there is one.

mod lines;

use std::io::Write;

use engine::sampler::SamplerConfig;
use engine::{CancelFlag, Engine, EngineError, FinishReason, GenerateOptions, Generation};
use kv_core::backend::BoxedBackend;
use kv_core::memory::Seqs;
use kv_core::{KvType, Pos, PosRange, SeqId, TokenId};
use model_core::chat_template::ChatMessage;
use model_core::model_file::ModelFile;
use model_core::tokenizer::EncodeOptions;

use super::{messages, run::warn_of_long_context};
use crate::args::ChatArgs;
use crate::failure::{Exit, one_line, usage};
use crate::interrupt::cancel_on_interrupt;
use crate::models::ModelSource;
use crate::progress::Progress;
use crate::resolve;
use crate::terminal::{Reader, write_text};
use lines::{Command, Line, Lines};

const SEQ: SeqId = SeqId(0);

const HELP: &str = "a line is a message; \\ at its end continues it. /clear forgets the \
                    conversation, /exit or Ctrl-D ends the program, Ctrl-C ends an answer";

/// A conversation with a model.
struct Chat<'f> {
    file: &'f ModelFile,
    engine: Engine<BoxedBackend>,
    args: &'f ChatArgs,
    sampler: SamplerConfig,
    cancel: CancelFlag,
    messages: Vec<ChatMessage>,
    /// Tokens in the memory.
    evaluated: Vec<TokenId>,
}

pub(super) fn run(args: &ChatArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    let source = ModelSource::new(args.model.model.as_deref());
    let sampler = resolve::sampler(&args.sampler)?;
    if let Some(at) = args.stop.iter().position(String::is_empty) {
        return usage(format!("--stop number {} is empty", at + 1));
    }
    let cancel = cancel_on_interrupt()?;
    let loading = Progress::spinner(format!("loading {}", source.name()));
    let file = source.load()?;
    resolve::continues_texts(&file)?;
    if file.chat_template()?.is_none() {
        return usage(format!(
            "{} has no chat template: 'cellar run' continues its texts; -m selects another model",
            source.name()
        ));
    }
    let config = resolve::engine_config(&args.engine, &**file.model(), KvType::F16);
    let engine = resolve::open_engine(&file, &args.engine, &config)?;
    drop(loading);
    warn_of_long_context(&engine);
    let mut chat = Chat {
        file: &file,
        engine,
        args,
        sampler,
        cancel,
        messages: Vec::new(),
        evaluated: Vec::new(),
    };
    chat.clear();
    let mut lines = Lines::open()?;
    if lines.is_terminal() {
        complain(HELP);
    }
    loop {
        // At the prompt, a signal ends the program.
        chat.cancel.cancel();
        let line = lines.next()?;
        chat.cancel.reset();
        match line {
            Line::End | Line::Command(Command::Exit) => break,
            Line::Command(Command::Clear) => chat.clear(),
            Line::Command(Command::Help) => complain(HELP),
            Line::Message(message) => match chat.answer(message, out) {
                Err(error) if lines.is_terminal() && Exit::of(&error) == Exit::Failed => {
                    complain(&format!("error: {}", one_line(&error)));
                }
                answered => answered?,
            },
        }
    }
    Ok(Exit::Done)
}

/// Prints a remark for the user on stderr.
fn complain(text: &str) {
    // Where stderr is closed, nobody reads remarks.
    let _ = writeln!(std::io::stderr(), "({text})");
}

impl Chat<'_> {
    /// Begins again, with the system message alone.
    fn clear(&mut self) {
        let system = self.args.system.iter();
        self.messages = system
            .map(|text| ChatMessage::new("system", text))
            .collect();
    }

    /// Answers a message. One that fails is not part of the conversation.
    fn answer(&mut self, message: String, out: &mut impl Write) -> anyhow::Result<()> {
        self.messages.push(ChatMessage::new("user", message));
        let answer = self.generate_answer(out);
        match answer {
            Ok(Some(text)) => self.messages.push(ChatMessage::new("assistant", text)),
            Ok(None) => drop(self.messages.pop()),
            Err(error) => {
                self.messages.pop();
                self.forget();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Streams the answer and returns it; `None` where it was ended before it began.
    fn generate_answer(&mut self, out: &mut impl Write) -> anyhow::Result<Option<String>> {
        let ids = self.conversation()?;
        self.recall(&ids)?;
        let n_known = self.evaluated.len();
        tracing::debug!(n_known, n_new = ids.len() - n_known, "reading a message");
        let mut sampler = self.sampler.clone();
        sampler.seed = sampler.seed.wrapping_add(self.messages.len() as u64);
        let options = GenerateOptions {
            seq: SEQ,
            sampler,
            n_predict: self.args.predict.map(|n| n as usize),
            stop: self.args.stop.clone(),
            cancel: self.cancel.clone(),
            history: self.evaluated.clone(),
            ..GenerateOptions::default()
        };
        let mut generation = Generation::new(&self.engine, self.file.tokenizer(), options)?;
        let new = &ids[n_known..];
        let reading = Progress::tokens("reading", new.len());
        let mut n_read = 0;
        let fed = generation.feed(&mut self.engine, new, |progress| {
            n_read = progress.n_done;
            reading.set(n_read);
        });
        drop(reading);
        fed.map_err(with_advice)?;
        self.evaluated.extend(&new[..n_read]);
        if n_read < new.len() {
            return Ok(None);
        }
        let reader = Reader::of(&std::io::stdout());
        while let Some(piece) = generation.next_piece(&mut self.engine)? {
            write_text(out, reader, &piece)?;
        }
        writeln!(out)?;
        out.flush()?;
        if generation.finish_reason() == Some(&FinishReason::ContextFull) {
            complain("the context is full: /clear, or start with a larger --ctx");
        }
        let generated = generation.tokens();
        let n_pending = usize::from(generation.pending().is_some());
        let n_evaluated = generated.len() - n_pending.min(generated.len());
        self.evaluated.extend(&generated[..n_evaluated]);
        Ok(Some(generation.text().to_owned()))
    }

    /// The tokens of all messages, up to where the answer begins.
    fn conversation(&self) -> anyhow::Result<Vec<TokenId>> {
        let text = messages::render(self.file, &self.messages)?.unwrap_or_default();
        let ids = self.file.tokenizer().encode(&text, EncodeOptions::CHAT);
        match ids.is_empty() {
            true => anyhow::bail!("the chat template makes nothing of this message"),
            false => Ok(ids),
        }
    }

    /// Removes everything after the common prefix with `ids` from the memory. The last of `ids` is
    /// always evaluated again: the answer begins with its logits.
    fn recall(&mut self, ids: &[TokenId]) -> Result<(), EngineError> {
        let both = ids.iter().zip(&self.evaluated);
        let n_same = both.take_while(|(new, old)| new == old).count();
        let n_same = n_same.min(ids.len().saturating_sub(1));
        if n_same == self.evaluated.len() {
            return Ok(());
        }
        let first = u32::try_from(n_same).unwrap_or(u32::MAX);
        match self
            .engine
            .remove(Seqs::One(SEQ), PosRange::from(Pos(first)..))
        {
            Ok(_) => self.evaluated.truncate(n_same),
            // A recurrent state does not go back so far.
            Err(EngineError::Refused(_)) => self.forget(),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn forget(&mut self) {
        let _ = self.engine.clear();
        self.evaluated.clear();
    }
}

fn with_advice(error: EngineError) -> anyhow::Error {
    match error {
        EngineError::PromptTooLong { .. } => {
            anyhow::anyhow!(
                "{error}; /clear forgets the conversation, --ctx makes the context larger"
            )
        }
        error => error.into(),
    }
}
