//! `cellar batch`: a file of requests, many at once, through a service.
//!
//! Invariant: answers come in the order of the requests, one line each, and a line that was written
//! is complete. Knows nothing of how requests are computed together.

mod answers;
mod openai;
mod requests;

use std::collections::VecDeque;
use std::io::Write;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Context;
use cellar_engine::sampler::Step;
use cellar_engine::serve::{
    Choices, FinishedText, Service, ServiceConfig, ServiceError, TextRequest, TextStream,
};
use cellar_engine::{CancelFlag, CompletionOptions, Logprobs, PromptOutputs, Speculation, Tower};
use kv_backend::BoxedBackend;
use kv_rows::KvType;
use model_core::model_file::ModelFile;

use crate::args::BatchArgs;
use crate::constraint::{Constraint, Schemas};
use crate::failure::{Exit, usage, warn};
use crate::input;
use crate::interrupt::cancel_on_interrupt;
use crate::long_context;
use crate::models::ModelSource;
use crate::output_file;
use crate::pictures::{self, PictureUse};
use crate::progress::Progress;
use crate::resolve;
use crate::service::ServiceFlags;
use crate::terminal;
use answers::{Answer, Answers, Existing, Shown};
use requests::{LineContext, RequestLine};

/// How long the wait for a text is, until Ctrl-C is looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Requests that are with the service, for each that is computed at once: enough to have the next
/// when one ends.
const N_AHEAD: usize = 4;

/// What was done.
#[derive(Debug, Default)]
struct Total {
    n_done: usize,
    n_failed: usize,
    n_prompt: usize,
    n_reused: usize,
    n_tokens: usize,
}

pub(super) fn run(args: &BatchArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    let source = ModelSource::new(args.model.path());
    let sampler = resolve::sampler(&args.sampler)?;
    args.speculation.draft_model()?;
    if args.trace.is_on_stdout() && args.output.as_deref().is_none_or(output_file::is_stdout) {
        return usage(
            "--trace and the answers both write to stdout: name a file with -o, or for --trace",
        );
    }
    let of_file = || format!("--file '{}'", args.file.display());
    let lines = requests::read(&input::text(&args.file)?).with_context(of_file)?;
    let mut answers = match &args.output {
        Some(path) => {
            let existing = if args.resume {
                Existing::Continued
            } else {
                Existing::Replaced
            };
            Answers::to_file(path, existing, &lines)?
        }
        None => Answers::to(out),
    };
    let cancel = cancel_on_interrupt()?;
    let loading = Progress::spinner(format!("loading {}", source.name()));
    let mut file = source.load_with(&args.engine.compute.changes())?;
    args.speculation.use_head(&mut file)?;
    resolve::continues_texts(&file)?;
    // All requests are encoded before anything is computed, so that a template that refuses one
    // says so now.
    let first = answers.n_written();
    let flags = CompletionOptions {
        sampler,
        n_predict: args.predict.tokens(),
        logprobs: (args.logprobs).map_or(Logprobs::Off, |n| Logprobs::Top(n as usize)),
        ..CompletionOptions::default()
    };
    let shown = PictureUse::of(lines.iter().skip(first).map(RequestLine::n_pictures).sum());
    let sight = pictures::wanted_sight(shown, &args.vision, &file, &source)?;
    let context = LineContext {
        file: &file,
        flags: &flags,
        sight: sight.as_ref(),
    };
    let mut schemas = Schemas::new(file.tokenizer());
    let with = |line: &RequestLine| {
        let request = line.request(context)?;
        Ok(BatchRequest {
            constraint: line.constraint(&mut schemas)?,
            speculation: line.speculation(&args.speculation)?,
            // Pictures take megabytes each, so they are read again when their turn comes.
            request: Some(request).filter(|request| request.pictures.is_empty()),
            choices: line.choices()?,
        })
    };
    let requests: anyhow::Result<Vec<BatchRequest>> = lines.iter().skip(first).map(with).collect();
    let requests = requests.with_context(of_file)?;
    let tower = pictures::wanted_tower(shown, sight.as_ref(), &args.engine.compute)?;
    let service = start(args, &file, tower)?;
    answers.begin()?;
    drop(loading);
    let started = Instant::now();
    let mut batch = Batch {
        service: &service,
        context,
        lines: &lines,
        cancel: &cancel,
        n_ahead: args.parallel.parallel as usize * N_AHEAD,
        total: Total::default(),
        progress: Progress::texts("answering", lines.len()),
    };
    let is_complete = batch.run(first, requests, &mut answers)?;
    let Batch { total, .. } = batch;
    report(&total, first, lines.len(), started.elapsed());
    match (is_complete, total.n_failed) {
        (false, _) => Ok(Exit::Interrupted),
        (true, 0) => Ok(Exit::Done),
        (true, n) => {
            warn(&format!("{n} of {} requests failed", lines.len()));
            Ok(Exit::Failed)
        }
    }
}

fn start(
    args: &BatchArgs,
    file: &ModelFile,
    tower: Option<Tower>,
) -> anyhow::Result<Service<BoxedBackend>> {
    let config = resolve::engine_config(&args.engine, &**file.model(), KvType::F16);
    let config = args.parallel.engine_config(config);
    // Whole texts are written, so gaps between tokens do not matter.
    let limits = args.parallel.service_config(0);
    limits.check(&config.sizes(&**file.model())?)?;
    let engine = resolve::open_engine(file, &args.engine.compute, &config, PromptOutputs::Last)?;
    let n_ahead = args.parallel.parallel as usize * N_AHEAD;
    let config = ServiceConfig {
        max_queued: n_ahead + 1,
        max_queued_tokens: usize::MAX,
        long_context: long_context::of_service(
            &args.parallel.long_context,
            engine.settings().n_ctx,
            file.tokenizer(),
        )?,
        ..limits
    };
    let flags = ServiceFlags {
        engine: &args.engine,
        speculation: &args.speculation,
        trace: args.trace.writer()?,
        blocks: None,
        swap_disk: args.parallel.swap.disk()?,
        swap_host: None,
        prefix_tiers: None,
        tower,
    };
    flags.start(engine, file.tokenizer(), &config)
}

/// A run of requests through a service.
struct Batch<'a> {
    service: &'a Service<BoxedBackend>,
    context: LineContext<'a>,
    lines: &'a [RequestLine],
    cancel: &'a CancelFlag,
    n_ahead: usize,
    total: Total,
    progress: Progress,
}

/// A request, what its texts are held to, and how many they are.
struct BatchRequest {
    /// `None` where it has pictures: it is made again when it is computed.
    request: Option<TextRequest>,
    speculation: Speculation,
    constraint: Option<Rc<Constraint>>,
    choices: Choices,
}

/// The steps that hold one text.
fn steps(constraint: Option<&Constraint>) -> Vec<Box<dyn Step>> {
    constraint.map(|held| held.step().0).into_iter().collect()
}

/// A request that is with the service.
struct Pending {
    streams: anyhow::Result<Vec<TextStream>>,
    choices: Choices,
    logprobs: Logprobs,
}

impl Batch<'_> {
    /// Computes requests from number `first` on. Returns whether all were.
    fn run(
        &mut self,
        first: usize,
        requests: Vec<BatchRequest>,
        answers: &mut Answers<'_>,
    ) -> anyhow::Result<bool> {
        let mut left = self.lines.iter().skip(first).zip(requests);
        let mut pending: VecDeque<Pending> = VecDeque::new();
        for (index, line) in self.lines.iter().enumerate().skip(first) {
            while pending.len() < self.n_ahead
                && let Some((line, request)) = left.next()
            {
                pending.push_back(self.submit(line, request));
            }
            let Some(next) = pending.pop_front() else {
                break;
            };
            let Some(answer) = self.wait(index, line, next)? else {
                return Ok(false);
            };
            self.total.add(&answer);
            answers.write(&answer)?;
            self.progress.set(index + 1);
        }
        Ok(true)
    }

    fn submit(&self, line: &RequestLine, request: BatchRequest) -> Pending {
        let BatchRequest {
            request,
            speculation,
            constraint,
            choices,
        } = request;
        let mut logprobs = Logprobs::Off;
        let request = request.map_or_else(|| line.request(self.context), Ok);
        let streams = request.and_then(|mut request| {
            logprobs = request.options.logprobs;
            if choices.are_ranked() && logprobs == Logprobs::Off {
                request.options.logprobs = Logprobs::Top(0);
            }
            request.speculation = speculation;
            request.steps = steps(constraint.as_deref());
            let more_steps = || steps(constraint.as_deref());
            let n = choices.n_computed();
            Ok(self.service.submit_texts(request, n, more_steps)?)
        });
        Pending {
            streams,
            choices,
            logprobs,
        }
    }

    /// Waits for the end of a request; `None` where the user interrupts.
    fn wait(
        &self,
        index: usize,
        line: &RequestLine,
        pending: Pending,
    ) -> anyhow::Result<Option<Answer>> {
        let streams = match pending.streams {
            Ok(streams) => streams,
            Err(error) => match error.downcast::<ServiceError>() {
                Ok(ServiceError::Stopped) => return Err(ServiceError::Stopped.into()),
                Ok(error) => return Ok(Some(Answer::failed(index, line, &error))),
                Err(error) => return Ok(Some(Answer::failed(index, line, &error))),
            },
        };
        let mut texts = Vec::with_capacity(streams.len());
        for stream in streams {
            match self.wait_for_text(stream) {
                Ok(Some(text)) => texts.push(text),
                Ok(None) => return Ok(None),
                Err(ServiceError::Stopped) => return Err(ServiceError::Stopped.into()),
                Err(error) => return Ok(Some(Answer::failed(index, line, &error))),
            }
        }
        let shown = Shown {
            tokenizer: self.context.file.tokenizer(),
            choices: pending.choices,
            logprobs: pending.logprobs,
        };
        Ok(Some(Answer::of(index, line, texts, shown)))
    }

    /// Waits for the end of a text; `None` where the user interrupts.
    fn wait_for_text(&self, mut stream: TextStream) -> Result<Option<FinishedText>, ServiceError> {
        let mut text = String::new();
        let mut logprobs = Vec::new();
        loop {
            if self.cancel.is_cancelled() {
                return Ok(None);
            }
            match stream.next_piece_within(POLL_INTERVAL)? {
                Some(piece) => text.push_str(&piece),
                None => break,
            }
            logprobs.extend(stream.take_logprobs());
        }
        let mut finished = stream.finish()?;
        logprobs.append(&mut finished.logprobs);
        Ok(Some(FinishedText {
            text,
            logprobs,
            ..finished
        }))
    }
}

impl Total {
    fn add(&mut self, answer: &Answer) {
        let took = answer.n_tokens();
        self.n_done += 1;
        self.n_failed += usize::from(took.is_failed);
        self.n_prompt += took.n_prompt;
        self.n_reused += took.n_reused;
        self.n_tokens += took.n_text;
    }
}

fn report(total: &Total, first: usize, n_lines: usize, time: Duration) {
    let Total {
        n_done,
        n_prompt,
        n_reused,
        n_tokens,
        ..
    } = total;
    let seconds = time.as_secs_f64();
    let per_second = *n_tokens as f64 / seconds.max(1e-9);
    terminal::note(format_args!(
        "{n_done} requests in {seconds:.1} s: {n_prompt} tokens of prompts ({n_reused} of them \
         computed before), {n_tokens} tokens of text ({per_second:.1} per second)"
    ));
    let n_written = first + n_done;
    if n_written < n_lines {
        terminal::note(format_args!(
            "{n_written} of {n_lines} answers are written; with --output FILE, --resume continues"
        ));
    }
}
