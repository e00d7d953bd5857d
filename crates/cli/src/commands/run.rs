//! `cellar run`: answers or continues a prompt, streaming the text to stdout.
//!
//! Invariant: a text that a schema or grammar constrains is complete, or the program fails. Knows
//! nothing of how the prompt becomes text, and of what is printed how.

mod denoise;
mod printer;
mod prompt;
mod report;

use std::io::Write;
use std::time::{Duration, Instant};

use cellar_engine::{
    CancelFlag, CompletionOptions, Engine, EngineError, FinishReason, GenerateOptions, Generation,
    Logprobs, PromptOutputs,
};
use kv_core::backend::{Backend, BoxedBackend};
use kv_core::batch::Batch;
use kv_core::memory::Memory;
use kv_core::state::SeqTokens;
use kv_core::{KvType, TokenId};
use model_core::model_file::ModelFile;

use super::answer::ThinkingFormat;
use super::session;
use crate::args::{PredictLimit, RunArgs, Seed};
use crate::constraint::{self, Constraint, Failure};
use crate::draft_model::{self, DraftFor};
use crate::failure::{Exit, usage, warn};
use crate::interrupt::cancel_on_interrupt;
use crate::logprobs::shown_logprobs;
use crate::long_context;
use crate::models::ModelSource;
use crate::output_file;
use crate::progress::{Progress, PromptBar};
use crate::resolve;
use crate::terminal::{self, Reader};
use printer::Printer;
use prompt::PromptMode;
use report::{Report, ReportTimings, answer_parts, statistics};

/// The input of a generation.
struct Start {
    mode: PromptMode,
    prompt: String,
    ids: Vec<TokenId>,
    /// The tokens of a loaded state, which precede the prompt.
    history: Option<Vec<TokenId>>,
    /// The token with which the text begins, where the prompt is its source.
    encoder_start: Option<Vec<TokenId>>,
    constraint: Option<Constraint>,
    load: Duration,
}

/// A generation, and what is needed to report on it.
struct Text {
    generation: Generation,
    seed: u64,
    n_predict: Option<usize>,
    failure: Option<Failure>,
}

pub(super) fn run(args: &RunArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    if args.quiet {
        terminal::set_quiet();
    }
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
    resolve::sampler(&args.sampler)?;
    if let Some(at) = args.stop.iter().position(String::is_empty) {
        return usage(format!("--stop number {} is empty", at + 1));
    }
    long_context::check(&args.long_context)?;
    session::check(args)?;
    args.speculation.draft_model()?;
    let prompt = prompt::prompt(args, &source)?;
    let cancel = cancel_on_interrupt()?;
    let started = Instant::now();
    let loading = Progress::spinner(format!("loading {}", source.name()));
    let file = source.load()?;
    denoise::check_flags(args, &file)?;
    if denoise::is_diffusion(&file) {
        drop(loading);
        let task = denoise::Task {
            args,
            file: &file,
            model: source.name(),
            cancel,
            started,
        };
        return denoise::run(&task, &prompt, out);
    }
    let (mut engine, mut start) = open(args, &file, prompt)?;
    drop(loading);
    start.load = started.elapsed();
    warn_of_long_context(&engine);

    let mut text = begin(args, &file, &engine, &start, cancel)?;
    let n_fed = feed(args, &mut text, &mut engine, &start)?;
    let answer_to = match start.mode {
        // What a grammar allows is the answer itself.
        PromptMode::Chat if start.constraint.is_none() => Some(start.prompt.as_str()),
        _ => None,
    };
    let mut printer = Printer::new(args, &file, answer_to, reader)?;
    let continues = start.encoder_start.is_none();
    if start.mode == PromptMode::Raw && continues && !args.no_echo && start.constraint.is_none() {
        printer.echo(&start.prompt, out)?;
    }
    while text.next_piece(&mut engine)?.is_some() {
        printer.print(&text.generation, out)?;
    }
    printer.finish(out)?;
    resolve::warn_of_stopped_speculation(text.generation.speculated());
    let saved_bytes = match &args.session.save_state {
        Some(path) => {
            let tokens = tokens_so_far(&engine, &text.generation, &start, n_fed);
            Some(session::save(&engine, path, tokens, &args.session)?)
        }
        None => None,
    };
    let info = engine.backend().info();
    let generation = &text.generation;
    if printer.wants_report() {
        let (answer, thinking) = answer_parts(printer.answer());
        let shown = |places| shown_logprobs(file.tokenizer(), places);
        let report = Report {
            text: generation.text(),
            answer,
            thinking,
            tokens: generation.tokens(),
            logprobs: args.logprobs.map(|_| shown(generation.logprobs())),
            prompt_logprobs: args
                .prompt_logprobs
                .map(|_| shown(generation.prompt_logprobs())),
            prompt: &start.prompt,
            prompt_tokens: start.ids.len(),
            prompt_ids: &start.ids,
            finish: generation.finish_reason(),
            seed: text.seed,
            model: source.name(),
            backend: &info.name,
            device: &info.device,
            n_ctx: engine.settings().n_ctx,
            loaded_tokens: start.history.as_ref().map(Vec::len),
            saved_bytes,
            steps: None,
            timings: ReportTimings::new(start.load, generation.timings())
                .with_speculation(generation.speculated()),
        };
        writeln!(out, "{}", terminal::json(&report)?)?;
    }
    out.flush()?;
    terminal::info(statistics(
        generation,
        start.load,
        &info,
        shown_seed(args, text.seed),
    ));
    text.exit()
}

/// The engine, and what the text starts with.
fn open(
    args: &RunArgs,
    file: &ModelFile,
    prompt: String,
) -> anyhow::Result<(Engine<BoxedBackend>, Start)> {
    resolve::continues_texts(file)?;
    let constraint = Constraint::new(&args.constraint, file.tokenizer())?;
    let mode = PromptMode::new(args, file, &prompt)?;
    let (prompt, mut ids) = prompt::encode(file, args, mode, prompt)?;
    let config = resolve::engine_config(&args.engine, &**file.model(), KvType::F16);
    let mut engine =
        resolve::open_engine(file, &args.engine.compute, &config, PromptOutputs::Last)?;
    if let Some(kv_type) = args.session.save_kv_type {
        engine.check_save_type(kv_type)?;
    }
    if let Some(kv_type) = args.session.save_state_type {
        engine.check_save_state_type(kv_type)?;
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
    let encoder = file.model().source_encoder();
    let encoder = encoder.filter(|_| engine.memory().source_positions(session::SEQ).is_none());
    let start = Start {
        encoder_start: encoder.map(|encoder| encoder.start),
        mode,
        prompt,
        ids,
        history,
        constraint,
        load: Duration::ZERO,
    };
    Ok((engine, start))
}

/// The generation, before its prompt is read.
fn begin(
    args: &RunArgs,
    file: &ModelFile,
    engine: &Engine<BoxedBackend>,
    start: &Start,
    cancel: CancelFlag,
) -> anyhow::Result<Text> {
    let sampler = resolve::sampler(&args.sampler)?;
    let seed = sampler.seed;
    let n_predict = match (args.predict, start.mode) {
        (None, PromptMode::Raw) if start.constraint.is_none() => Some(resolve::DEFAULT_N_PREDICT),
        (predict, _) => predict.and_then(PredictLimit::tokens),
    };
    let text = CompletionOptions {
        sampler,
        n_predict,
        stop: args.stop.clone(),
        logprobs: logprobs(args.logprobs),
        prompt_logprobs: logprobs(args.prompt_logprobs),
        ..CompletionOptions::default()
    };
    resolve::check_options(&text, file.tokenizer())?;
    let bos = file.tokenizer().special_ids().bos;
    let history = start.history.clone().unwrap_or_default();
    let first = history.first().or(start.ids.first()).copied();
    let n_bos = u32::from(bos.is_some() && first == bos);
    let long_context = long_context::of_text(&args.long_context, engine.settings().n_ctx, n_bos)?;
    let options = GenerateOptions {
        sampler: text.sampler,
        n_predict,
        stop: text.stop,
        logprobs: text.logprobs,
        prompt_logprobs: text.prompt_logprobs,
        cancel,
        long_context,
        history,
        speculation: args.speculation.speculation(),
        draft_model: draft_model::open(
            &args.speculation,
            &args.engine,
            DraftFor::engine(file.tokenizer(), engine.settings()),
        )?,
        ..Default::default()
    };
    let generation = Generation::new(engine, file.tokenizer(), options)?;
    resolve::warn_of_no_speculation(generation.speculated().off);
    let (generation, failure) = match start.constraint.as_ref().map(Constraint::step) {
        Some((step, failure)) => (generation.with_step(step), Some(failure)),
        None => (generation, None),
    };
    let generation = match (
        start.mode,
        args.reasoning_budget.and_then(PredictLimit::tokens),
    ) {
        (PromptMode::Chat, Some(n_tokens)) => {
            let format = ThinkingFormat::of_template(file.chat_template()?.unwrap_or_default());
            let budget = format.budget(n_tokens, &start.prompt, file.tokenizer());
            generation.with_step(Box::new(budget))
        }
        _ => generation,
    };
    Ok(Text {
        generation,
        seed,
        n_predict,
        failure,
    })
}

/// The seed, where it is of any use: the likeliest token needs none.
fn shown_seed(args: &RunArgs, seed: u64) -> Option<u64> {
    let is_random = args.sampler.temp != Some(0.0);
    (is_random || matches!(args.sampler.seed, Some(Seed::Fixed(_)))).then_some(seed)
}

/// The log probabilities that a flag asks for.
fn logprobs(n_top: Option<u32>) -> Logprobs {
    n_top.map_or(Logprobs::Off, |n| Logprobs::Top(n as usize))
}

/// Evaluates the prompt and returns how many of its tokens were, before it was interrupted.
fn feed(
    args: &RunArgs,
    text: &mut Text,
    engine: &mut Engine<BoxedBackend>,
    start: &Start,
) -> anyhow::Result<usize> {
    // With -n 0 the last token stays pending: the run that continues needs its logits.
    let keeps_last = args.session.save_state.is_some() && text.n_predict == Some(0);
    if keeps_last && start.encoder_start.is_some() {
        engine.encode(&Batch::source(session::SEQ, start.ids.iter().copied()))?;
        return Ok(start.ids.len());
    }
    let ids = match start.ids.split_last() {
        Some((_, [])) if keeps_last => return Ok(0),
        Some((_, before)) if keeps_last => before,
        _ => &start.ids,
    };
    let mut n_fed = 0;
    let n_ubatch = engine.settings().n_ubatch as usize;
    let reading = PromptBar::new("reading the prompt", ids.len(), n_ubatch);
    engine.set_run_progress(Some(reading.run()));
    let fed = text.generation.feed(engine, ids, |progress| {
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

impl Text {
    /// The next piece. Where a grammar failed, the error has the reason.
    fn next_piece(&mut self, engine: &mut Engine<BoxedBackend>) -> anyhow::Result<Option<String>> {
        let piece = self.generation.next_piece(engine);
        piece.map_err(
            |error| match self.failure.as_ref().and_then(Failure::reason) {
                Some(reason) => anyhow::Error::from(error).context(reason),
                None => error.into(),
            },
        )
    }

    /// How the program ends: a constrained text must be complete.
    fn exit(&self) -> anyhow::Result<Exit> {
        let finish = self.generation.finish_reason();
        if finish == Some(&FinishReason::Cancelled) {
            return Ok(Exit::Interrupted);
        }
        if self.failure.is_some() {
            constraint::check_complete(finish)?;
        }
        Ok(Exit::Done)
    }
}

/// All tokens of the text: those that were evaluated, and those that were not.
fn tokens_so_far(
    engine: &Engine<BoxedBackend>,
    generation: &Generation,
    start: &Start,
    n_fed: usize,
) -> SeqTokens {
    let (fed, not_fed) = start.ids.split_at(n_fed.min(start.ids.len()));
    let generated = generation.tokens();
    let n_pending = usize::from(generation.pending().is_some()).min(generated.len());
    let (evaluated, pending) = generated.split_at(generated.len() - n_pending);
    let history = start.history.as_deref().unwrap_or_default();
    if let Some(first) = &start.encoder_start {
        // The prompt is no part of the text, unless it was not encoded.
        let has_begun = engine.memory().positions(session::SEQ).is_some();
        let (begun, not_begun): (&[_], &[_]) = match (has_begun, fed.is_empty()) {
            (true, _) => (first, &[]),
            (false, true) => (&[], not_fed),
            (false, false) => (&[], first),
        };
        return SeqTokens {
            seq: session::SEQ,
            evaluated: [begun, evaluated].concat(),
            pending: [not_begun, pending].concat(),
        };
    }
    SeqTokens {
        seq: session::SEQ,
        evaluated: [history, fed, evaluated].concat(),
        pending: [not_fed, pending].concat(),
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
