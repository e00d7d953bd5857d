//! `cellar chat`: a conversation, one message per line.
//!
//! Invariant: a message that cannot be answered is no part of the conversation, and with a person
//! at a terminal no error but a closed terminal ends the program. Knows nothing of tokens.

mod commands;
mod conversation;
mod lines;
mod responder;
mod settings;

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use cellar::{MediaKind, Model};
use cellar_engine::serve::ServiceExtras;
use cellar_engine::{CancelFlag, CompletionOptions, FinishReason, Pace, PromptOutputs, Speculated};
use kv_rows::KvType;
use model_core::model_file::ModelFile;

use super::answer::AnswerPrinter;
use super::run::warn_of_long_context;
use crate::args::{ChatArgs, PredictLimit};
use crate::constraint::Constraint;
use crate::draft_model::{self, DraftFor};
use crate::failure::{Exit, one_line, usage};
use crate::input;
use crate::interrupt::cancel_on_interrupt;
use crate::keyboard;
use crate::long_context;
use crate::models::ModelSource;
use crate::output_file;
use crate::pictures::{self, Sight};
use crate::progress::Progress;
use crate::resolve;
use crate::terminal::{self, Reader, escape_lines, note, remark};
use commands::{Command, HELP, Line, SystemChange, Topic};
use conversation::{Conversation, ShownPicture, Turn, UserMessage};
use lines::{Input, Lines, history_path};
use responder::{Responder, Response};
use settings::Settings;

/// A conversation with a model.
struct Chat {
    model: String,
    template: String,
    responder: Responder,
    conversation: Conversation,
    settings: Settings,
    /// The tower of the model, or why it sees no pictures.
    sight: Sight,
    /// The pictures of the next message.
    pictures: Vec<ShownPicture>,
    /// Answers to the same message before this one, which had other seeds.
    n_again: u64,
    /// Whether the user knows that turns were dropped.
    has_told_of_dropped: bool,
    last: Option<Response>,
}

/// What happens after a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Line,
    End,
}

pub(super) fn run(args: &ChatArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    if args.quiet {
        terminal::set_quiet();
    }
    let source = ModelSource::new(args.model.path());
    let sampler = resolve::sampler(&args.sampler)?;
    if let Some(at) = args.stop.iter().position(String::is_empty) {
        return usage(format!("--stop number {} is empty", at + 1));
    }
    args.speculation.draft_model()?;
    long_context::check(&args.long_context)?;
    let constrained = [&args.constraint.schema, &args.constraint.grammar];
    if let Some(path) = constrained
        .into_iter()
        .flatten()
        .find(|p| input::is_stdin(p))
    {
        return usage(format!(
            "'{}' cannot be a schema or grammar of a chat: stdin brings messages; name a file",
            path.display()
        ));
    }
    let history = if args.no_history {
        None
    } else {
        history_path()?
    };
    let cancel = cancel_on_interrupt()?;
    let _restore = keyboard::RestoreOnDrop;
    keyboard::silence_keys();
    let loading = Progress::spinner(format!("loading {}", source.name()));
    let mut file = source.load_with(&args.engine.compute.changes())?;
    args.speculation.use_head(&mut file)?;
    resolve::continues_without_source(&file)?;
    let mut sight = pictures::sight(&file, &source, &args.vision)?;
    let shown = pictures::files(&args.image, &args.audio)
        .map(|(media, path)| shown_picture(&sight, media, path.to_owned()));
    let pictures = shown.collect::<anyhow::Result<Vec<_>>>()?;
    let n_predict = args.predict.and_then(PredictLimit::tokens);
    let options = CompletionOptions {
        sampler,
        n_predict,
        stop: args.stop.clone(),
        ..CompletionOptions::default()
    };
    resolve::check_options(&options, file.tokenizer())?;
    let constraint = Constraint::new(&args.constraint, file.tokenizer())?;
    let template = template_of(&file, &source)?.to_owned();
    let config = resolve::engine_config(&args.engine, &**file.model(), KvType::F16);
    let engine = resolve::open_engine(&file, &args.engine.compute, &config, PromptOutputs::Last)?;
    let extras = ServiceExtras {
        draft_model: draft_model::open(
            &args.speculation,
            &args.engine,
            DraftFor::engine(file.tokenizer(), engine.settings()),
        )?,
        tower: pictures::tower_or_warning(&mut sight, &args.engine.compute),
        ..ServiceExtras::default()
    };
    drop(loading);
    warn_of_long_context(&engine);
    let n_ctx = engine.settings().n_ctx;
    let long_context = long_context::of_service(&args.long_context, n_ctx, file.tokenizer())?;
    let model = Model::with_engine(file, engine, extras)?;
    let CompletionOptions { sampler, stop, .. } = options;
    let mut chat = Chat {
        model: source.name(),
        responder: Responder::new(model, &template, cancel.clone(), stop)
            .constrained(constraint)
            .seeing(pictures::reader(&sight).ok())
            .speculating(args.speculation.speculation())
            .with_long_context(long_context),
        template,
        conversation: Conversation::new(args.system.clone()),
        settings: Settings {
            sampler,
            n_predict,
            show_thinking: args.show_thinking,
            reasoning_tokens: args.reasoning_budget.and_then(PredictLimit::tokens),
        },
        sight,
        pictures,
        n_again: 0,
        has_told_of_dropped: false,
        last: None,
    };
    let mut lines = Lines::open(history)?;
    if lines.is_terminal() {
        remark("/help lists the commands; Ctrl-D ends the program");
    }
    talk(&mut chat, &mut lines, &cancel, out)?;
    Ok(Exit::Done)
}

/// Takes lines until there are no more.
fn talk(
    chat: &mut Chat,
    lines: &mut Lines,
    cancel: &CancelFlag,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    let mut was_interrupted = false;
    loop {
        // At the prompt, a signal ends the program.
        cancel.cancel();
        let input = lines.next()?;
        cancel.reset();
        let text = match input {
            Input::End => return Ok(()),
            Input::Interrupt if was_interrupted => return Ok(()),
            Input::Interrupt => {
                remark("Ctrl-C again ends the program");
                was_interrupted = true;
                continue;
            }
            Input::Text(text) => text,
        };
        was_interrupted = false;
        match chat.take(&text, out) {
            Ok(Next::Line) => {}
            Ok(Next::End) => return Ok(()),
            Err(error) if lines.is_terminal() && Exit::of(&error) != Exit::Done => {
                note(format_args!("error: {}", one_line(&error)));
            }
            Err(error) => return Err(error),
        }
    }
}

fn shown_picture(sight: &Sight, media: MediaKind, path: PathBuf) -> anyhow::Result<ShownPicture> {
    Ok(ShownPicture {
        media,
        prepared: pictures::read_one(sight, media, &path)?,
        path,
    })
}

fn template_of<'f>(file: &'f ModelFile, source: &ModelSource) -> anyhow::Result<&'f str> {
    match file.chat_template()? {
        Some(template) => Ok(template),
        None => usage(format!(
            "{} has no chat template: 'cellar run' continues its texts; -m selects another model",
            source.name()
        )),
    }
}

/// Prints what the user asked for on stderr: stdout is for answers.
fn print(text: &str) {
    note(escape_lines(text));
}

impl Chat {
    /// Answers a message or obeys a command.
    fn take(&mut self, text: &str, out: &mut impl Write) -> anyhow::Result<Next> {
        match commands::parse(text)? {
            None => Ok(Next::Line),
            Some(Line::Command(command)) => self.obey(command, out),
            Some(Line::Message(message)) => {
                self.n_again = 0;
                let user = UserMessage {
                    text: message,
                    pictures: self.pictures.clone(),
                };
                let n_turns = self.conversation.turns().len();
                self.answer(user, out)?;
                // Those of a message without an answer wait for the next.
                if self.conversation.turns().len() > n_turns {
                    self.pictures.clear();
                }
                Ok(Next::Line)
            }
        }
    }

    fn obey(&mut self, command: Command, out: &mut impl Write) -> anyhow::Result<Next> {
        match command {
            Command::Exit => return Ok(Next::End),
            Command::Help => print(HELP),
            Command::Clear => self.replace(Conversation::new(self.conversation.system.clone())),
            Command::Save(path) => self.save(&path)?,
            Command::Load(path) => self.load(&path)?,
            Command::System(SystemChange::Show) => match &self.conversation.system {
                Some(text) => print(text),
                None => remark("there is no system message"),
            },
            Command::System(SystemChange::Set(text)) => {
                remark(&format!("the system message is now: {text}"));
                self.conversation.system = Some(text);
            }
            Command::System(SystemChange::Remove) => {
                self.conversation.system = None;
                remark("there is no system message now");
            }
            Command::Image(path) => self.show_next(MediaKind::Picture, path)?,
            Command::Audio(path) => self.show_next(MediaKind::Sound, path)?,
            Command::Regenerate => self.answer_again(out)?,
            Command::Undo => match self.conversation.pop() {
                Some(turn) => remark(&format!("forgotten: {}", turn.user.text)),
                None => return usage("there is no message to forget"),
            },
            Command::Statistics => print(&self.statistics()),
            Command::Set(name, value) => {
                self.settings.set(&name, &value)?;
                remark(&format!("{name} is now {value}"));
            }
            Command::Show(topic) => self.show(topic)?,
        }
        Ok(Next::Line)
    }

    /// Keeps a picture or a sound for the next message.
    fn show_next(&mut self, media: MediaKind, path: PathBuf) -> anyhow::Result<()> {
        let shown = shown_picture(&self.sight, media, path)?;
        remark(&format!(
            "the next message has the {media} '{}': {} tokens",
            shown.path.display(),
            shown.prepared.picture.n_rows()
        ));
        self.pictures.push(shown);
        Ok(())
    }

    fn replace(&mut self, conversation: Conversation) {
        self.conversation = conversation;
        self.pictures.clear();
        self.has_told_of_dropped = false;
        self.last = None;
    }

    /// Answers a message. One that fails is not part of the conversation.
    fn answer(&mut self, message: UserMessage, out: &mut impl Write) -> anyhow::Result<()> {
        let mut settings = self.settings.clone();
        let n_messages = self.conversation.n_messages() as u64;
        let seed = &mut settings.sampler.seed;
        *seed = seed.wrapping_add(n_messages).wrapping_add(self.n_again);
        let mut printer =
            AnswerPrinter::new(settings.show_thinking, Reader::of(&std::io::stdout()));
        if self.responder.is_constrained() {
            printer = printer.unwrapped();
        }
        let n_dropped = self.conversation.n_dropped();
        let conversation = &mut self.conversation;
        let response = self
            .responder
            .answer(conversation, &message, &settings, |section, part| {
                Ok(printer.print(section, part, out)?)
            });
        let response = match response {
            Ok(Some(response)) => response,
            Ok(None) => return Ok(()),
            Err(error) => {
                printer.end_line(out)?;
                return Err(error);
            }
        };
        printer.finish(out)?;
        self.tell_of_dropped(n_dropped);
        if response.finish == Some(FinishReason::ContextFull) {
            remark("the answer fills the context: start with a larger --ctx");
        }
        self.conversation.push(Turn {
            user: message,
            answer: response.answer.clone(),
        });
        self.last = Some(response);
        Ok(())
    }

    /// Says once that the model does not see the oldest turns any more.
    fn tell_of_dropped(&mut self, n_before: usize) {
        if self.conversation.n_dropped() > n_before && !self.has_told_of_dropped {
            self.has_told_of_dropped = true;
            remark(&format!(
                "the context of {} tokens is full: the model no longer sees the oldest messages; \
                 --ctx makes it larger",
                self.responder.n_ctx()
            ));
        }
    }

    fn answer_again(&mut self, out: &mut impl Write) -> anyhow::Result<()> {
        let Some(turn) = self.conversation.pop() else {
            return usage("there is no message to answer again");
        };
        self.n_again += 1;
        let n_turns = self.conversation.turns().len();
        let answered = self.answer(turn.user.clone(), out);
        if self.conversation.turns().len() == n_turns {
            self.conversation.push(turn);
        }
        answered
    }

    /// Writes the conversation, but never over another kind of file.
    fn save(&self, path: &Path) -> anyhow::Result<()> {
        let is_other = path.is_file()
            && !std::fs::read_to_string(path).is_ok_and(|text| Conversation::is_saved(&text));
        if is_other {
            return usage(format!(
                "'{}' is there and is no saved conversation: choose another name",
                path.display()
            ));
        }
        let json = self.conversation.to_json(self.model.clone())?;
        output_file::write(path, |file| Ok(writeln!(file, "{json}")?))?;
        remark(&format!(
            "saved: {} messages in '{}'",
            self.conversation.n_messages(),
            path.display()
        ));
        Ok(())
    }

    fn load(&mut self, path: &Path) -> anyhow::Result<()> {
        if input::is_stdin(path) {
            return usage("/load needs the name of a file: stdin brings messages");
        }
        let text = input::text(path)?;
        let read = |media, path: &Path| pictures::read_one(&self.sight, media, path);
        let conversation = Conversation::from_json(&text, read)
            .with_context(|| format!("'{}' is no saved conversation", path.display()))?;
        self.replace(conversation);
        remark(&format!(
            "loaded: {} messages of '{}'",
            self.conversation.n_messages(),
            path.display()
        ));
        Ok(())
    }

    fn show(&self, topic: Topic) -> anyhow::Result<()> {
        match topic {
            Topic::Settings => print(&self.settings.to_string()),
            Topic::Template => print(&self.template),
            Topic::Prompt => print(&self.responder.prompt(&self.conversation, None)?.text),
            Topic::Messages => {
                if let Some(text) = &self.conversation.system {
                    print(&format!("system: {text}"));
                }
                for turn in self.conversation.turns() {
                    let answer = turn.answer.text.trim_start();
                    let UserMessage { text, pictures } = &turn.user;
                    let shown = pictures.iter().map(|p| format!("[{}] ", p.path.display()));
                    print(&format!("> {}{text}\n{answer}", shown.collect::<String>()));
                }
            }
        }
        Ok(())
    }

    fn statistics(&self) -> String {
        let (n_used, n_ctx) = (self.responder.n_seen(), self.responder.n_ctx());
        let n_messages = self.conversation.n_messages();
        let n_dropped = 2 * self.conversation.n_dropped();
        let mut text = format!(
            "model: {}\nmessages: {n_messages}, of which the model no longer sees {n_dropped}\n\
             context: {n_used} of {n_ctx} tokens",
            self.model
        );
        if let Some(last) = &self.last {
            let pace = |pace: Pace| match pace.tokens_per_second() {
                Some(rate) => format!("{:.2} s, {rate:.1} tokens/s", pace.time.as_secs_f64()),
                None => format!("{:.2} s", pace.time.as_secs_f64()),
            };
            let timings = last.usage.timings();
            text += &format!(
                "\nlast answer: read {} tokens in {} ({} were known), generated {} in {}",
                timings.prompt.n_tokens,
                pace(timings.prompt),
                last.usage.n_reused(),
                last.usage.n_tokens,
                pace(timings.generation),
            );
            let Speculated {
                n_drafted,
                n_accepted,
                off,
                ..
            } = last.usage.speculated;
            if n_drafted > 0 {
                text += &format!("; {n_accepted} of {n_drafted} drafted tokens were right");
            } else if let Some(off) = off {
                text += &format!("; no tokens were drafted: {off}");
            }
        }
        text
    }
}
