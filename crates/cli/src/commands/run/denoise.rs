//! `cellar run` with a diffusion model: the masks behind the prompt are filled, then the text is
//! printed up to its end.
//!
//! Invariant: a flag that only means something for models that continue texts is refused. Knows
//! nothing of how masks are filled.

use std::io::Write;
use std::time::{Duration, Instant};

use cellar_engine::{CancelFlag, EngineConfig, EngineError, FinishReason, Pace, Timings};
use cellar_tasks::{DenoiseOptions, Denoiser, Denoising, FillSchedule};
use kv_backend::{Backend, BackendInfo, BoxedBackend};
use kv_core::TokenId;
use kv_rows::KvType;
use model_core::architecture::{MaskPlace, OutputKind};
use model_core::model_file::ModelFile;
use model_core::tokenizer::SpecialPieces;

use super::prompt::{self, PromptMode};
use super::report::{Report, ReportTimings};
use crate::args::{PredictLimit, RunArgs};
use crate::failure::{Exit, UsageError, usage};
use crate::progress::Progress;
use crate::resolve;
use crate::terminal::{self, Reader, write_text};

/// Tokens of a text, without -n.
const DEFAULT_LENGTH: usize = 128;
/// Tokens of a block of models that were trained to fill blocks.
const DEFAULT_BLOCK: usize = 32;
const DEFAULT_END: f32 = 1e-3;

/// What comes out: the filled masks up to where the text ends, and why it ends there.
struct FilledText {
    text: String,
    tokens: Vec<TokenId>,
    finish: FinishReason,
}

/// Refuses flags that are for another kind of model than this one.
///
/// # Errors
/// A usage error that names the flag.
pub(super) fn check_flags(args: &RunArgs, file: &ModelFile) -> anyhow::Result<()> {
    let name = file.model().architecture();
    if !is_diffusion(file) {
        return match args.diffusion.given() {
            None => Ok(()),
            Some(flag) => usage(format!(
                "{flag} is for diffusion models, and '{name}' continues its text token by token"
            )),
        };
    }
    let (session, constraint, long) = (&args.session, &args.constraint, &args.long_context);
    let flags = [
        (session.load_state.is_some(), "--load-state"),
        (session.save_state.is_some(), "--save-state"),
        (!args.image.is_empty(), "--image"),
        (!args.audio.is_empty(), "--audio"),
        (args.logprobs.is_some(), "--logprobs"),
        (args.prompt_logprobs.is_some(), "--prompt-logprobs"),
        (args.reasoning_budget.is_some(), "--reasoning-budget"),
        (constraint.schema.is_some(), "--schema"),
        (constraint.grammar.is_some(), "--grammar"),
        (long.context_shift, "--context-shift"),
        (
            long.group_attention_factor.is_some(),
            "--group-attention-factor",
        ),
    ];
    match flags.into_iter().find(|(is_given, _)| *is_given) {
        None => Ok(()),
        Some((_, flag)) => usage(format!(
            "{flag} is for models that continue texts, and the diffusion model '{name}' fills masks"
        )),
    }
}

/// Whether the model fills masks.
pub(super) fn is_diffusion(file: &ModelFile) -> bool {
    matches!(file.model().output(), OutputKind::MaskLogits(_))
}

/// What is asked of the model.
pub(super) struct Task<'a> {
    pub(super) args: &'a RunArgs,
    pub(super) file: &'a ModelFile,
    /// The model's name, for the report.
    pub(super) model: String,
    pub(super) cancel: CancelFlag,
    /// When reading the model's file began.
    pub(super) started: Instant,
}

/// A text of filled masks, and what is reported of it.
struct Outcome {
    mode: PromptMode,
    prompt: String,
    ids: Vec<TokenId>,
    filled: FilledText,
    seed: u64,
    n_steps: usize,
    /// How long it took to load the model.
    load: Duration,
    /// How long it took to fill the masks.
    fill: Pace,
}

/// Fills the masks behind a prompt, prints the text and reports.
///
/// # Errors
/// Usage errors where flags contradict each other or the text is too long; errors of the engine,
/// and of stdout.
pub(super) fn run(task: &Task<'_>, prompt: &str, out: &mut impl Write) -> anyhow::Result<Exit> {
    let Task { args, file, .. } = *task;
    let mode = PromptMode::new(args, file, prompt)?;
    let (prompt, ids) = prompt::encode(file, args, mode, prompt.to_owned())?;
    let options = options(task)?;
    let seed = options.sampler.seed;
    let mut denoiser = open(args, file, ids.len(), &options)?;
    let load = task.started.elapsed();
    let started = Instant::now();
    let mut text = denoiser.start(&ids, options)?;
    if !fill(&mut text, &mut denoiser)? {
        return Ok(Exit::Interrupted);
    }
    let fill = Pace {
        n_tokens: text.text().count(),
        time: started.elapsed(),
    };
    let outcome = Outcome {
        mode,
        prompt,
        ids,
        filled: FilledText::of(&text, file, &args.stop)?,
        seed,
        n_steps: text.n_steps(),
        load,
        fill,
    };
    let engine = denoiser.engine();
    let info = engine.backend().info();
    if args.json || args.jsonl {
        outcome.print_json(task, &info, engine.settings().n_ctx, out)?;
    } else {
        outcome.print(args, out)?;
    }
    out.flush()?;
    terminal::note(outcome.statistics(&info));
    Ok(Exit::Done)
}

impl Outcome {
    fn print(&self, args: &RunArgs, out: &mut impl Write) -> anyhow::Result<()> {
        let reader = Reader::of(&std::io::stdout());
        if self.mode == PromptMode::Raw && !args.no_echo {
            write_text(out, reader, &self.prompt)?;
        }
        write_text(out, reader, &self.filled.text)?;
        writeln!(out)?;
        Ok(())
    }

    /// The report; with --jsonl the text as one piece before it.
    fn print_json(
        &self,
        task: &Task<'_>,
        info: &BackendInfo,
        n_ctx: u32,
        out: &mut impl Write,
    ) -> anyhow::Result<()> {
        if task.args.jsonl {
            let piece = serde_json::json!({ "piece": self.filled.text });
            writeln!(out, "{}", terminal::json(&piece)?)?;
        }
        let timings = Timings {
            generation: self.fill,
            ..Timings::default()
        };
        let report = Report {
            text: &self.filled.text,
            answer: None,
            thinking: None,
            tokens: &self.filled.tokens,
            logprobs: None,
            prompt_logprobs: None,
            prompt: &self.prompt,
            prompt_tokens: self.ids.len(),
            prompt_ids: &self.ids,
            finish: Some(&self.filled.finish),
            seed: self.seed,
            model: task.model.clone(),
            backend: &info.name,
            device: &info.device,
            n_ctx,
            loaded_tokens: None,
            saved_bytes: None,
            steps: Some(self.n_steps),
            experts: None,
            timings: ReportTimings::new(self.load, timings),
        };
        writeln!(out, "{}", terminal::json(&report)?)?;
        Ok(())
    }

    /// The line of statistics.
    fn statistics(&self, info: &BackendInfo) -> String {
        format!(
            "loaded in {:.2} s | filled: {} tokens in {} steps, {:.2} s | seed {} | {} ({})",
            self.load.as_secs_f64(),
            self.fill.n_tokens,
            self.n_steps,
            self.fill.time.as_secs_f64(),
            self.seed,
            info.name,
            info.device,
        )
    }
}

/// How the flags and the model say that masks are filled.
///
/// # Errors
/// A usage error where they contradict each other.
fn options(task: &Task<'_>) -> anyhow::Result<DenoiseOptions> {
    let Task { args, file, .. } = *task;
    let mut sampler = resolve::sampler(&args.sampler)?;
    // Better texts, in fewer steps, than with the temperature of models that continue texts.
    sampler.temperature = args.sampler.temp.unwrap_or(0.0);
    let n_tokens = match args.predict.map(PredictLimit::tokens) {
        None => DEFAULT_LENGTH,
        Some(Some(n)) if n > 0 => n,
        Some(_) => {
            return usage(
                "a diffusion model fills a text of so many tokens: -n must be at least 1",
            );
        }
    };
    let flags = &args.diffusion;
    let block = flags.diffusion_block_length.map(|n| n as usize);
    let by_blocks = file.model().output() == OutputKind::MaskLogits(MaskPlace::Own);
    let schedule = match (block, flags.diffusion_eps) {
        (Some(n_tokens), _) => FillSchedule::Blocks { n_tokens },
        (None, None) if by_blocks => FillSchedule::Blocks {
            n_tokens: DEFAULT_BLOCK.min(n_tokens),
        },
        (None, end) => FillSchedule::Times {
            end: end.unwrap_or(DEFAULT_END),
        },
    };
    let options = DenoiseOptions {
        n_tokens,
        n_steps: flags.diffusion_steps.map_or(n_tokens, |n| n as usize),
        schedule,
        order: flags
            .diffusion_order
            .map_or_else(Default::default, |name| name.order()),
        guidance: flags.diffusion_guidance.unwrap_or(0.0),
        sampler,
        cancel: task.cancel.clone(),
    };
    let checked = options.check();
    let checked = checked.and_then(|()| options.sampler.check_for(file.tokenizer()));
    checked.map_err(|error| UsageError(error.to_string()))?;
    Ok(options)
}

/// The model on a backend, for this prompt and its masks.
fn open(
    args: &RunArgs,
    file: &ModelFile,
    n_prompt: usize,
    options: &DenoiseOptions,
) -> anyhow::Result<Denoiser<BoxedBackend>> {
    let model = &**file.model();
    let n_tokens = n_prompt + options.n_tokens;
    let limit = model.context_length();
    if n_tokens > limit {
        return usage(format!(
            "the prompt of {n_prompt} tokens and {} masks are more than the {limit} tokens that the \
             model was trained with: choose a smaller -n or a shorter prompt",
            options.n_tokens
        ));
    }
    let Some(mask) = file.tokenizer().special_ids().mask else {
        anyhow::bail!(
            "the file names no mask (tokenizer.ggml.mask_token_id), which a diffusion model needs"
        );
    };
    let config = EngineConfig {
        budget: resolve::compute_config(&args.engine.compute, model, KvType::F16).budget,
        ..options.engine_config(model, n_prompt)
    };
    let engine = resolve::open_denoiser(file, &args.engine.compute, &config)?;
    Ok(Denoiser::new(engine, mask)?)
}

/// Fills all masks, showing how far it is. Returns whether all were: Ctrl-C ends it.
fn fill(text: &mut Denoising, denoiser: &mut Denoiser<BoxedBackend>) -> anyhow::Result<bool> {
    let progress = Progress::steps("filling masks", text.n_steps());
    loop {
        match text.step(denoiser) {
            Ok(true) => progress.set(text.n_done()),
            Ok(false) => return Ok(true),
            Err(EngineError::Cancelled) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
}

impl FilledText {
    /// What comes before the token that ends the text, or a stop string.
    fn of(text: &Denoising, file: &ModelFile, stop: &[String]) -> anyhow::Result<Self> {
        let tokenizer = file.tokenizer();
        let mut tokens: Vec<TokenId> = text.text().flatten().collect();
        let end = tokens
            .iter()
            .position(|&token| tokenizer.is_end_of_generation(token));
        let mut finish = match end {
            Some(at) => FinishReason::EndOfGeneration { token: tokens[at] },
            None => FinishReason::Length,
        };
        tokens.truncate(end.unwrap_or(tokens.len()));
        let mut text = tokenizer.decode(&tokens, SpecialPieces::Skip)?;
        let first = |stop: &String| text.find(stop.as_str()).map(|at| (at, stop.clone()));
        if let Some((at, stop)) = stop.iter().filter_map(first).min() {
            text.truncate(at);
            finish = FinishReason::StopString { text: stop };
        }
        Ok(Self {
            text,
            tokens,
            finish,
        })
    }
}
