//! `cellar run`: continues a prompt, streaming the text to stdout.

use std::io::Write;
use std::time::{Duration, Instant};

use engine::{
    Engine, EngineError, FinishReason, GenerateOptions, Generation, LongContext, Pace, Timings,
};
use kv_core::KvType;
use kv_core::TokenId;
use kv_core::backend::{Backend, BackendInfo, BoxedBackend};
use kv_core::state::SeqTokens;
use model_core::chat_template::ChatMessage;
use model_core::model_file::ModelFile;
use model_core::tokenizer::{AddSpecial, EncodeOptions};
use serde::Serialize;

use super::{messages, session};
use crate::args::{PredictLimit, RunArgs};
use crate::failure::{Exit, usage, warn};
use crate::input;
use crate::interrupt::cancel_on_interrupt;
use crate::models::ModelSource;
use crate::output_file;
use crate::progress::{Progress, PromptBar};
use crate::resolve;
use crate::terminal::{self, Reader, write_text};

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report<'a> {
    text: &'a str,
    tokens: &'a [TokenId],
    prompt: &'a str,
    prompt_tokens: usize,
    prompt_ids: &'a [TokenId],
    finish: Option<&'a FinishReason>,
    seed: u64,
    model: String,
    backend: String,
    device: String,
    n_ctx: u32,
    /// Tokens of the loaded state that were evaluated before.
    #[serde(skip_serializing_if = "Option::is_none")]
    loaded_tokens: Option<usize>,
    /// Bytes of the state that was saved.
    #[serde(skip_serializing_if = "Option::is_none")]
    saved_bytes: Option<u64>,
    timings: ReportTimings,
}

#[derive(Debug, Serialize)]
struct ReportTimings {
    load_ms: f64,
    prompt_ms: f64,
    prompt_tokens_per_second: Option<f64>,
    generation_ms: f64,
    generation_tokens_per_second: Option<f64>,
}

/// The input of a generation.
struct Start {
    prompt: String,
    ids: Vec<TokenId>,
    /// The tokens of a loaded state, which precede the prompt.
    history: Option<Vec<TokenId>>,
    load: Duration,
}

pub(super) fn run(args: &RunArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    match &args.session.save_state {
        // The state is alone on stdout.
        Some(path) if output_file::is_stdout(path) => {
            let out = std::io::stderr();
            let reader = Reader::of(&out);
            generate(args, reader, &mut { out })
        }
        _ => generate(args, Reader::of(&std::io::stdout()), out),
    }
}

fn generate(args: &RunArgs, reader: Reader, out: &mut impl Write) -> anyhow::Result<Exit> {
    let source = ModelSource::new(args.model.model.as_deref());
    let sampler = resolve::sampler(&args.sampler)?;
    if let Some(at) = args.stop.iter().position(String::is_empty) {
        return usage(format!("--stop number {} is empty", at + 1));
    }
    resolve::long_context(&args.long_context, 0)?;
    session::check(args)?;
    let prompt = prompt(args, &source)?;
    let cancel = cancel_on_interrupt()?;
    let started = Instant::now();
    let loading = Progress::spinner(format!("loading {}", source.name()));
    let file = source.load()?;
    resolve::continues_texts(&file)?;
    let (prompt, mut ids) = encode(&file, args, prompt)?;
    let config = resolve::engine_config(&args.engine, &**file.model(), KvType::F16);
    let mut engine = resolve::open_engine(&file, &args.engine, &config)?;
    if let Some(kv_type) = args.session.save_kv_type {
        engine.check_save_type(kv_type)?;
    }
    let history = match &args.session.load_state {
        Some(path) => {
            let tokens = session::load(&mut engine, path)?;
            ids.splice(0..0, tokens.pending);
            Some(tokens.evaluated)
        }
        None => None,
    };
    if history.is_some() && ids.is_empty() {
        return usage("the saved text has ended: give a prompt to continue it with");
    }
    drop(loading);
    let start = Start {
        prompt,
        ids,
        history,
        load: started.elapsed(),
    };
    warn_of_long_context(&engine);

    let info = engine.backend().info();
    let n_ctx = engine.settings().n_ctx;
    let n_predict = match (args.predict, args.chat) {
        (None, false) => Some(resolve::DEFAULT_N_PREDICT),
        (predict, _) => predict.and_then(PredictLimit::tokens),
    };
    let seed = sampler.seed;
    let bos = file.tokenizer().special_ids().bos;
    let history = start.history.clone().unwrap_or_default();
    let first = history.first().or(start.ids.first()).copied();
    let n_bos = u32::from(bos.is_some() && first == bos);
    let long_context = resolve::long_context(&args.long_context, n_bos)?;
    check_keep(long_context, n_ctx, n_bos)?;
    let options = GenerateOptions {
        sampler,
        n_predict,
        stop: args.stop.clone(),
        cancel,
        long_context,
        history,
        ..Default::default()
    };
    let mut generation = Generation::new(&engine, file.tokenizer(), options)?;
    // With -n 0 the last token stays pending: the run that continues needs its logits.
    let keeps_last = args.session.save_state.is_some() && n_predict == Some(0);
    let n_fed = match start.ids.split_last() {
        Some((_, [])) if keeps_last => 0,
        Some((_, before)) if keeps_last => feed(&mut generation, &mut engine, before)?,
        _ => feed(&mut generation, &mut engine, &start.ids)?,
    };
    if !args.chat && !args.no_echo {
        write_text(out, reader, &start.prompt)?;
    }
    while let Some(piece) = generation.next_piece(&mut engine)? {
        write_text(out, reader, &piece)?;
    }
    writeln!(out)?;
    let saved_bytes = match &args.session.save_state {
        Some(path) => {
            let tokens = tokens_so_far(&generation, &start, n_fed);
            let kv_type = args.session.save_kv_type;
            Some(session::save(&engine, path, tokens, kv_type)?)
        }
        None => None,
    };
    if args.json {
        let timings = generation.timings();
        let report = Report {
            text: generation.text(),
            tokens: generation.tokens(),
            prompt: &start.prompt,
            prompt_tokens: start.ids.len(),
            prompt_ids: &start.ids,
            finish: generation.finish_reason(),
            seed,
            model: source.name(),
            backend: info.name.clone(),
            device: info.device.clone(),
            n_ctx,
            loaded_tokens: start.history.as_ref().map(Vec::len),
            saved_bytes,
            timings: ReportTimings::new(start.load, timings),
        };
        writeln!(out, "{}", terminal::json(&report)?)?;
    }
    out.flush()?;
    let line = statistics(&generation, &start, &info, seed);
    // Where stderr is closed, nobody reads the statistics.
    let _ = writeln!(std::io::stderr(), "{line}");
    Ok(match generation.finish_reason() {
        Some(FinishReason::Cancelled) => Exit::Interrupted,
        _ => Exit::Done,
    })
}

/// Checks that --keep leaves tokens to drop: half of the others go, which must be at least one.
///
/// # Errors
/// A usage error with the largest number that works.
fn check_keep(long_context: LongContext, n_ctx: u32, n_bos: u32) -> anyhow::Result<()> {
    let LongContext::Shift { n_keep } = long_context else {
        return Ok(());
    };
    let most = n_ctx.saturating_sub(2);
    if n_keep <= most {
        return Ok(());
    }
    usage(format!(
        "--keep {} leaves no tokens to drop from a context of {n_ctx}: keep at most {}, or choose a \
         larger --ctx",
        n_keep - n_bos,
        most.saturating_sub(n_bos)
    ))
}

/// Evaluates the prompt and returns how many of its tokens were, before it was interrupted.
fn feed(
    generation: &mut Generation,
    engine: &mut Engine<BoxedBackend>,
    ids: &[TokenId],
) -> anyhow::Result<usize> {
    let mut n_fed = 0;
    let n_ubatch = engine.settings().n_ubatch as usize;
    let reading = PromptBar::new("reading the prompt", ids.len(), n_ubatch);
    engine.set_run_progress(Some(reading.run()));
    let fed = generation.feed(engine, ids, |progress| {
        n_fed = progress.n_done;
        reading.set(n_fed);
    });
    engine.set_run_progress(None);
    drop(reading);
    match fed {
        Err(error @ EngineError::PromptTooLong { .. }) => {
            anyhow::bail!("{error}; choose a larger --ctx or a shorter prompt")
        }
        fed => fed?,
    }
    Ok(n_fed)
}

/// All tokens of the text: those that were evaluated, and those that were not.
fn tokens_so_far(generation: &Generation, start: &Start, n_fed: usize) -> SeqTokens {
    let (fed, not_fed) = start.ids.split_at(n_fed.min(start.ids.len()));
    let generated = generation.tokens();
    let n_pending = usize::from(generation.pending().is_some()).min(generated.len());
    let (evaluated, pending) = generated.split_at(generated.len() - n_pending);
    let history = start.history.as_deref().unwrap_or_default();
    SeqTokens {
        seq: session::SEQ,
        evaluated: [history, fed, evaluated].concat(),
        pending: [not_fed, pending].concat(),
    }
}

/// The prompt of the command line, or the beginning of the story.
fn prompt(args: &RunArgs, source: &ModelSource) -> anyhow::Result<String> {
    let files = [&args.model.model, &args.session.load_state];
    let stdin_is_taken = files
        .into_iter()
        .flatten()
        .any(|path| input::is_stdin(path));
    let given = match (args.prompt(), &args.file) {
        (None, None) if stdin_is_taken => None,
        (prompt, file) => resolve::text(prompt, file.as_deref())?,
    };
    let given = match args.prompt() {
        Some(_) => given,
        None => given.map(resolve::without_last_line_break),
    };
    match (given, source) {
        (Some(prompt), _) => Ok(prompt),
        (None, _) if args.session.load_state.is_some() && !args.chat => Ok(String::new()),
        (None, ModelSource::Embedded) => Ok(cellar_stories::PROMPT.to_owned()),
        (None, ModelSource::File(_)) => {
            usage("no prompt: give one as an argument, with -f FILE, or through a pipe")
        }
    }
}

/// The text that the model continues, and its tokens.
fn encode(
    file: &ModelFile,
    args: &RunArgs,
    prompt: String,
) -> anyhow::Result<(String, Vec<TokenId>)> {
    let tokenizer = file.tokenizer();
    let continues = args.session.load_state.is_some();
    if args.chat && continues {
        let text = next_turn(file, &prompt)?;
        let options = EncodeOptions {
            add: AddSpecial::Never,
            ..EncodeOptions::CHAT
        };
        let ids = tokenizer.encode(&text, options);
        return Ok((text, ids));
    }
    if args.chat {
        let text = chat_prompt(file, args.system.as_deref(), &prompt)?;
        let ids = tokenizer.encode(&text, EncodeOptions::CHAT);
        return Ok((text, ids));
    }
    if continues && prompt.is_empty() {
        return Ok((prompt, Vec::new()));
    }
    let options = if args.no_bos || continues {
        EncodeOptions {
            add: AddSpecial::Never,
            ..EncodeOptions::PROMPT
        }
    } else {
        EncodeOptions::PROMPT
    };
    let mut ids = tokenizer.encode(&prompt, options);
    // A model that ends texts with EOS would have nothing to continue.
    if !args.no_bos && !continues && tokenizer.adds_last().is_some() {
        ids.pop();
    }
    Ok((prompt, ids))
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
             state: run it without --chat"
        ),
    }
}

fn rendered(file: &ModelFile, messages: &[ChatMessage]) -> anyhow::Result<String> {
    match messages::render(file, messages)? {
        Some(text) => Ok(text),
        None => anyhow::bail!("this model has no chat template: run it without --chat"),
    }
}

pub(super) fn warn_of_long_context(engine: &Engine<BoxedBackend>) {
    let (n_ctx, trained) = (
        engine.settings().n_ctx as usize,
        engine.model().context_length(),
    );
    if n_ctx > trained {
        warn(&format!(
            "a context of {n_ctx} tokens is longer than the {trained} that the model was trained with"
        ));
    }
}

impl ReportTimings {
    fn new(load: Duration, timings: Timings) -> Self {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        Self {
            load_ms: ms(load),
            prompt_ms: ms(timings.prompt.time),
            prompt_tokens_per_second: timings.prompt.tokens_per_second(),
            generation_ms: ms(timings.generation.time),
            generation_tokens_per_second: timings.generation.tokens_per_second(),
        }
    }
}

fn statistics(generation: &Generation, start: &Start, info: &BackendInfo, seed: u64) -> String {
    let pace = |pace: Pace| match pace.tokens_per_second() {
        Some(rate) => format!("{:.2} s, {rate:.1} tokens/s", pace.time.as_secs_f64()),
        None => format!("{:.2} s", pace.time.as_secs_f64()),
    };
    let Timings {
        prompt,
        generation: own,
    } = generation.timings();
    let finish = match generation.finish_reason() {
        Some(FinishReason::EndOfGeneration { .. }) => "the model ended it",
        Some(FinishReason::StopString { .. }) => "a stop string",
        Some(FinishReason::Length) => "--predict reached",
        Some(FinishReason::ContextFull) => "the context is full",
        Some(FinishReason::Cancelled) => "interrupted",
        _ => "unknown",
    };
    format!(
        "loaded in {:.2} s | prompt: {} tokens in {} | generated: {} tokens in {} | end: {finish} | \
         seed {seed} | {} ({})",
        start.load.as_secs_f64(),
        prompt.n_tokens,
        pace(prompt),
        generation.tokens().len(),
        pace(own),
        info.name,
        info.device,
    )
}
