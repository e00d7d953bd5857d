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

use cellar_engine::sampler::Step;
use cellar_engine::serve::{
    RequestError, Retention, ServiceConfig, ServiceError, ServiceExtras, TextRequest, TextStream,
    Usage,
};
use cellar_engine::session::{Activity, Session, TokenPiece};
use cellar_engine::{
    CancelFlag, CompletionOptions, Engine, FinishReason, Logprobs, PromptOutputs, TokenLogprobs,
    Tower,
};
use kv_backend::state::SeqTokens;
use kv_backend::{Backend, BoxedBackend};
use kv_core::{TokenId, batch::Batch, memory::Memory};
use kv_rows::KvType;
use model_core::model_file::ModelFile;
use model_core::picture::{PictureRun, PromptTokens};

use super::answer::ThinkingFormat;
use super::session::{self, LoadedState};
use crate::args::{PredictLimit, RunArgs, Seed};
use crate::constraint::{self, Constraint, Failure};
use crate::draft_model::{self, DraftFor};
use crate::failure::{Exit, usage, warn};
use crate::input;
use crate::interrupt::cancel_on_interrupt;
use crate::logprobs::shown_logprobs;
use crate::long_context;
use crate::models::ModelSource;
use crate::output_file;
use crate::pictures::{self, PictureUse, Sight};
use crate::progress::{Progress, PromptBar};
use crate::resolve;
use crate::terminal::{self, Reader};
use printer::Printer;
use prompt::PromptMode;
use report::{Report, ReportTimings, Statistics, answer_parts};

/// The engine of a run, with its text.
type RunSession = Session<BoxedBackend>;

/// The input of a text.
struct Start<'s> {
    mode: PromptMode,
    prompt: String,
    ids: Vec<TokenId>,
    /// The pictures whose rows some of them name.
    pictures: Vec<PictureRun>,
    /// The state that precedes the prompt.
    loaded: Option<LoadedState<'s>>,
    /// The token with which the text begins, where the prompt is its source.
    encoder_start: Option<Vec<TokenId>>,
    constraint: Option<Constraint>,
    load: Duration,
}

/// A text, and what is needed to report on it.
struct Text {
    /// `None` where nothing is computed.
    stream: Option<TextStream>,
    /// The last token of the prompt, where it is not computed: the run that continues needs its
    /// logits.
    kept_back: Option<TokenId>,
    text: String,
    tokens: Vec<TokenId>,
    logprobs: Vec<TokenLogprobs>,
    seed: u64,
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
    let mut file = source.load_with(&args.engine.compute.changes())?;
    args.speculation.use_head(&mut file)?;
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
    let bytes = match &args.session.load_state {
        Some(path) => Some(input::bytes(path)?),
        None => None,
    };
    let shown = PictureUse::of(args.image.len() + args.audio.len());
    let sight = pictures::wanted_sight(shown, &args.vision, &file, &source)?;
    let (mut engine, mut start) = open(args, &file, prompt, bytes.as_deref(), sight.as_ref())?;
    let tower = pictures::wanted_tower(shown, sight.as_ref(), &args.engine.compute)?;
    drop(loading);
    start.load = started.elapsed();
    warn_of_long_context(&engine);

    let saved_source = save_source(args, &mut engine, &start)?;
    let mut session = open_session(args, &file, engine, tower)?;
    let mut text = begin(args, &file, &mut session, &mut start, cancel)?;
    if let Some(stream) = &text.stream {
        read_prompt(&mut session, stream);
        // What cannot be computed is said before anything is printed.
        if stream.has_failed() {
            text.next_pieces(&mut session)?;
        }
    }
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
    while let Some(pieces) = text.next_pieces(&mut session)? {
        printer.print(&pieces, out)?;
    }
    printer.finish(out)?;
    let usage = text.usage();
    resolve::warn_of_stopped_speculation(usage.speculated);
    let saved_bytes = match &args.session.save_state {
        Some(path) if saved_source.is_none() => {
            let tokens = text.tokens_so_far(&mut session, &start)?;
            Some(session::save(
                session.engine(),
                path,
                tokens,
                &args.session,
            )?)
        }
        _ => saved_source,
    };
    let engine = session.engine();
    let info = engine.backend().info();
    let finish = text.finish();
    if printer.wants_report() {
        let (answer, thinking) = answer_parts(printer.answer());
        let shown = |places: &[TokenLogprobs]| shown_logprobs(file.tokenizer(), places);
        let prompt_logprobs = text.take_prompt_logprobs();
        let report = Report {
            text: &text.text,
            answer,
            thinking,
            tokens: &text.tokens,
            logprobs: args.logprobs.map(|_| shown(&text.logprobs)),
            prompt_logprobs: args.prompt_logprobs.map(|_| shown(&prompt_logprobs)),
            prompt: &start.prompt,
            prompt_tokens: start.ids.len(),
            prompt_ids: &start.ids,
            finish: finish.as_ref(),
            seed: text.seed,
            model: source.name(),
            backend: &info.name,
            device: &info.device,
            n_ctx: engine.settings().n_ctx,
            loaded_tokens: start.loaded.as_ref().map(|loaded| loaded.tokens.len()),
            saved_bytes,
            steps: None,
            experts: engine.backend().expert_meter().map(|meter| meter.get()),
            timings: ReportTimings::new(start.load, usage.timings())
                .with_speculation(usage.speculated),
        };
        writeln!(out, "{}", terminal::json(&report)?)?;
    }
    out.flush()?;
    let statistics = Statistics {
        usage,
        finish: finish.as_ref(),
        load: start.load,
        seed: shown_seed(args, text.seed),
        experts: engine.backend().expert_meter().map(|meter| meter.get()),
    };
    terminal::info(statistics.line(&info));
    text.exit(finish.as_ref())
}

/// The engine, and what the text starts with.
fn open<'s>(
    args: &'s RunArgs,
    file: &ModelFile,
    prompt: String,
    state: Option<&'s [u8]>,
    sight: Option<&Sight>,
) -> anyhow::Result<(Engine<BoxedBackend>, Start<'s>)> {
    resolve::continues_texts(file)?;
    let constraint = Constraint::new(&args.constraint, file.tokenizer())?;
    let mode = PromptMode::new(args, file, &prompt)?;
    let (prompt, tokens) = match sight {
        Some(sight) if !(args.image.is_empty() && args.audio.is_empty()) => {
            prompt::with_pictures(file, args, sight, &prompt)?
        }
        _ => {
            let (prompt, tokens) = prompt::encode(file, args, mode, prompt)?;
            let pictures = Vec::new();
            (prompt, PromptTokens { tokens, pictures })
        }
    };
    let PromptTokens {
        tokens: mut ids,
        pictures,
    } = tokens;
    let config = resolve::engine_config(&args.engine, &**file.model(), KvType::F16);
    let engine = resolve::open_engine(file, &args.engine.compute, &config, PromptOutputs::Last)?;
    if let Some(kv_type) = args.session.save_kv_type {
        engine.check_save_type(kv_type)?;
    }
    if let Some(kv_type) = args.session.save_state_type {
        engine.check_save_state_type(kv_type)?;
    }
    let mut loaded = match (state, &args.session.load_state) {
        (Some(bytes), Some(path)) => Some(LoadedState::parse(bytes, path)?),
        _ => None,
    };
    if let Some(loaded) = &mut loaded {
        ids.splice(0..0, std::mem::take(&mut loaded.pending));
    }
    if loaded.is_some() && ids.is_empty() {
        return usage("the saved text has ended: give a prompt to continue it with");
    }
    let encoder = file.model().source_encoder();
    let encoder = encoder.filter(|_| loaded.as_ref().is_none_or(|loaded| loaded.seq.is_none()));
    let start = Start {
        encoder_start: encoder.map(|encoder| encoder.start),
        mode,
        prompt,
        ids,
        pictures,
        loaded,
        constraint,
        load: Duration::ZERO,
    };
    Ok((engine, start))
}

/// Saves a source alone: with -n 0 the token after it is for the run that continues.
fn save_source(
    args: &RunArgs,
    engine: &mut Engine<BoxedBackend>,
    start: &Start<'_>,
) -> anyhow::Result<Option<u64>> {
    match (&args.session.save_state, &start.encoder_start) {
        (Some(path), Some(first)) if keeps_last(args) => {
            engine.encode(&Batch::source(session::SEQ, start.ids.iter().copied()))?;
            let tokens = SeqTokens {
                seq: session::SEQ,
                evaluated: Vec::new(),
                pending: first.clone(),
            };
            session::save(engine, path, tokens, &args.session).map(Some)
        }
        _ => Ok(None),
    }
}

/// The session of the text.
fn open_session(
    args: &RunArgs,
    file: &ModelFile,
    engine: Engine<BoxedBackend>,
    tower: Option<Tower>,
) -> anyhow::Result<RunSession> {
    let draft_for = DraftFor::engine(file.tokenizer(), engine.settings());
    let extras = ServiceExtras {
        tower,
        draft_model: draft_model::open(&args.speculation, &args.engine, draft_for)?,
        ..ServiceExtras::default()
    };
    let config = ServiceConfig {
        max_queued_tokens: usize::MAX,
        ..ServiceConfig::default()
    };
    Ok(Session::with(engine, file.tokenizer(), &config, extras)?)
}

/// The text, before its prompt is read.
fn begin(
    args: &RunArgs,
    file: &ModelFile,
    session: &mut RunSession,
    start: &mut Start<'_>,
    cancel: CancelFlag,
) -> anyhow::Result<Text> {
    let sampler = resolve::sampler(&args.sampler)?;
    let seed = sampler.seed;
    let n_predict = match (args.predict, start.mode) {
        (None, PromptMode::Raw) if start.constraint.is_none() => Some(resolve::DEFAULT_N_PREDICT),
        (predict, _) => predict.and_then(PredictLimit::tokens),
    };
    let options = CompletionOptions {
        sampler,
        n_predict,
        stop: args.stop.clone(),
        logprobs: logprobs(args.logprobs),
        prompt_logprobs: logprobs(args.prompt_logprobs),
        ..CompletionOptions::default()
    };
    resolve::check_options(&options, file.tokenizer())?;
    let bos = file.tokenizer().special_ids().bos;
    let loaded = start.loaded.as_ref();
    let first = loaded.and_then(|loaded| loaded.tokens.first());
    let first = first.or(start.ids.first()).copied();
    let n_bos = u32::from(bos.is_some() && first == bos);
    let n_ctx = session.engine().settings().n_ctx;
    let mut text = Text {
        stream: None,
        kept_back: None,
        text: String::new(),
        tokens: Vec::new(),
        logprobs: Vec::new(),
        seed,
        failure: None,
    };
    let mut steps: Vec<Box<dyn Step>> = Vec::new();
    if let Some((step, failure)) = start.constraint.as_ref().map(Constraint::step) {
        steps.push(step);
        text.failure = Some(failure);
    }
    let budget = args.reasoning_budget.and_then(PredictLimit::tokens);
    if let (PromptMode::Chat, Some(n_tokens)) = (start.mode, budget) {
        let format = ThinkingFormat::of_template(file.chat_template()?.unwrap_or_default());
        let budget = format.budget(n_tokens, &start.prompt, file.tokenizer());
        steps.push(Box::new(budget));
    }
    let mut prompt = start.ids.clone();
    if keeps_last(args) {
        if start.encoder_start.is_some() {
            return Ok(text);
        }
        text.kept_back = prompt.pop();
    }
    let retention = if args.session.save_state.is_some() {
        Retention::Park
    } else {
        Retention::Release
    };
    let request = TextRequest {
        prompt,
        pictures: start.pictures.clone(),
        options,
        steps,
        speculation: args.speculation.speculation(),
        long_context: if start.pictures.is_empty() {
            Some(long_context::of_text(&args.long_context, n_ctx, n_bos)?)
        } else {
            None
        },
        cancel: Some(cancel),
        retention,
        ..TextRequest::default()
    };
    text.stream = match &mut start.loaded {
        Some(loaded) if loaded.seq.is_some() || !request.prompt.is_empty() => {
            Some(loaded.restore(session, request)?)
        }
        _ if request.prompt.is_empty() && text.kept_back.is_some() => None,
        _ => Some(session.submit(request).map_err(with_advice)?),
    };
    resolve::warn_of_no_speculation(text.usage().speculated.off);
    Ok(text)
}

/// True if the last token of the prompt is not computed: with -n 0 a state is for the run that
/// continues, which needs its logits.
fn keeps_last(args: &RunArgs) -> bool {
    let limit = args.predict.and_then(PredictLimit::tokens);
    args.session.save_state.is_some() && limit == Some(0)
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

/// Computes the prompt, behind a bar.
pub(super) fn read_prompt(session: &mut RunSession, stream: &TextStream) {
    let progress = stream.progress();
    let n_new = progress.n_tokens.saturating_sub(progress.n_reused);
    let n_ubatch = session.engine().settings().n_ubatch as usize;
    let reading = PromptBar::new("reading the prompt", n_new, n_ubatch);
    session.set_run_progress(Some(reading.run()));
    while !stream.has_read_prompt() && session.step() == Activity::Busy {
        let progress = stream.progress();
        reading.set(progress.n_done.saturating_sub(progress.n_reused));
    }
    session.set_run_progress(None);
}

/// A refused request with what can be done about it.
pub(super) fn with_advice(error: ServiceError) -> anyhow::Error {
    match error {
        ServiceError::Refused(RequestError::TooLong { n_prompt, limit }) => anyhow::anyhow!(
            "the prompt of {n_prompt} tokens does not fit the context of {limit}; choose a larger \
             --ctx or a shorter prompt"
        ),
        error => error.into(),
    }
}

impl Text {
    /// The next tokens. Where a grammar failed, the error has the reason.
    fn next_pieces(&mut self, session: &mut RunSession) -> anyhow::Result<Option<Vec<TokenPiece>>> {
        let Some(stream) = &mut self.stream else {
            return Ok(None);
        };
        let pieces = session.next_tokens(stream).map_err(|error| {
            match self.failure.as_ref().and_then(Failure::reason) {
                Some(reason) => anyhow::Error::from(error).context(reason),
                None => error.into(),
            }
        })?;
        for piece in pieces.iter().flatten() {
            self.text.push_str(&piece.text);
            self.tokens.extend(piece.token);
            self.logprobs.extend(piece.logprobs.clone());
        }
        Ok(pieces)
    }

    fn usage(&self) -> Usage {
        self.stream
            .as_ref()
            .map(TextStream::usage)
            .unwrap_or_default()
    }

    /// Why it ended.
    fn finish(&self) -> Option<FinishReason> {
        match &self.stream {
            Some(stream) => stream.finish_reason(),
            None => Some(FinishReason::Length),
        }
    }

    fn take_prompt_logprobs(&mut self) -> Vec<TokenLogprobs> {
        let stream = self.stream.as_mut();
        stream.map_or_else(Vec::new, TextStream::take_prompt_logprobs)
    }

    /// All tokens of the text: those that were computed, and those that were not.
    fn tokens_so_far(
        &self,
        session: &mut RunSession,
        start: &Start<'_>,
    ) -> anyhow::Result<SeqTokens> {
        let known = match &self.stream {
            Some(stream) => session.parked(stream).ok(),
            None => None,
        };
        let has_source = known.as_ref().is_none_or(|known| {
            let memory = session.engine().memory();
            start.encoder_start.is_none() || memory.source_positions(known.seq).is_some()
        });
        match known {
            Some(mut known) if has_source => {
                known.pending.extend(self.kept_back);
                Ok(known)
            }
            // Nothing was computed.
            _ => Ok(SeqTokens {
                seq: session::SEQ,
                evaluated: Vec::new(),
                pending: start.ids.clone(),
            }),
        }
    }

    /// How the program ends: a constrained text must be complete.
    fn exit(&self, finish: Option<&FinishReason>) -> anyhow::Result<Exit> {
        if finish == Some(&FinishReason::Cancelled) {
            return Ok(Exit::Interrupted);
        }
        if self.failure.is_some() {
            constraint::check_complete(finish)?;
        }
        Ok(Exit::Done)
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
