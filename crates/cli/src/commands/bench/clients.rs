//! `cellar bench --clients`: many clients of a service in this process, and what each waits for.
//!
//! Each client sends its requests one after the other, and reads the text as it comes. Invariant:
//! all requests have the same length. Knows no HTTP: nothing of it is in the times.

use std::io::Write;
use std::time::{Duration, Instant};

use engine::sampler::SamplerConfig;
use engine::serve::{Service, ServiceConfig, ServiceError, TextRequest, Usage};
use engine::{CompletionOptions, EngineConfig, PromptOutputs};
use kv_core::backend::{Backend, BoxedBackend};
use kv_core::{KvType, TokenId};
use serde::Serialize;

use super::load::{Depth, Tokens};
use crate::args::BenchArgs;
use crate::failure::{Exit, usage};
use crate::models::ModelSource;
use crate::progress::Progress;
use crate::resolve;
use crate::terminal;

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report {
    model: String,
    backend: String,
    device: String,
    n_clients: u32,
    n_requests: usize,
    n_prompt: u32,
    n_predict: u32,
    depth: u32,
    depth_tokens: Depth,
    step_ms: u32,
    seconds: f64,
    requests_per_second: f64,
    text_tokens_per_second: f64,
    prompt_tokens: usize,
    /// Of these, those that were there already.
    reused_tokens: usize,
    preemptions: u64,
    first_token_ms: Percentiles,
    #[serde(skip_serializing_if = "Option::is_none")]
    gap_ms: Option<Percentiles>,
}

/// Of many times, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Percentiles {
    p50: f64,
    p90: f64,
    p99: f64,
    max: f64,
}

/// What one client saw.
#[derive(Debug, Default)]
struct Seen {
    usage: Vec<Usage>,
    /// Between pieces of a text.
    gaps: Vec<Duration>,
}

pub(super) fn run(args: &BenchArgs, n_clients: u32, out: &mut impl Write) -> anyhow::Result<Exit> {
    let Some(n_prompt) = args.prompt.checked_add(args.depth).filter(|&n| n > 0) else {
        return usage("--clients needs a prompt: -p and --depth together are at least 1");
    };
    if args.predict == 0 {
        return usage("--clients needs texts to read: -n is at least 1");
    }
    let source = ModelSource::new(args.model.model.as_deref());
    let file = source.load()?;
    resolve::continues_without_source(&file)?;
    let config = resolve::engine_config(&args.engine, &**file.model(), KvType::F16);
    let n_each = u64::from(n_prompt) + u64::from(args.predict);
    // With --streams each sequence has cells of its own.
    let n_together = if args.engine.streams { 1 } else { n_clients };
    let Ok(n_needed) = u32::try_from(n_each * u64::from(n_together)) else {
        return usage(format!(
            "{n_clients} requests of {n_each} tokens are more than a context can hold"
        ));
    };
    let config = EngineConfig {
        n_ctx: Some(config.n_ctx.unwrap_or(n_needed)),
        // A cached prefix for each that runs.
        n_seqs: 2 * n_clients,
        n_active: Some(n_clients),
        ..config
    };
    let engine = resolve::open_engine(&file, &args.engine, &config, PromptOutputs::Last)?;
    let info = engine.backend().info();
    let n_vocab = engine.settings().rules.n_vocab;
    let service_config = ServiceConfig {
        max_queued: n_clients as usize,
        max_queued_tokens: usize::MAX,
        step_time: (args.step_ms > 0).then(|| Duration::from_millis(args.step_ms.into())),
        ..ServiceConfig::default()
    };
    let service = Service::start(engine, file.tokenizer(), &service_config)?;
    let progress = Progress::spinner("measuring");
    let mut tokens = Tokens::new(n_vocab);
    // Programs are compiled and weights have been read.
    service
        .submit(request(tokens.take(args.prompt.max(1)), 2))?
        .finish()?;
    let n_before = service.counters().n_preemptions;
    let prompts = prompts(args, n_clients, &mut tokens);
    let started = Instant::now();
    let seen = serve(&service, prompts, args.predict as usize)?;
    let seconds = started.elapsed().as_secs_f64();
    drop(progress);

    let usage: Vec<Usage> = seen.iter().flat_map(|seen| seen.usage.clone()).collect();
    let gaps = seen.iter().flat_map(|seen| seen.gaps.iter().copied());
    let first = usage.iter().filter_map(|usage| usage.first_token);
    let Some(first_token_ms) = Percentiles::of(first) else {
        anyhow::bail!("no request got a token");
    };
    let n_text: usize = usage.iter().map(|usage| usage.n_tokens).sum();
    let report = Report {
        model: source.name(),
        backend: info.name,
        device: info.device,
        n_clients,
        n_requests: usage.len(),
        n_prompt: args.prompt,
        n_predict: args.predict,
        depth: args.depth,
        depth_tokens: match args.share_depth {
            true => Depth::Shared,
            false => Depth::Own,
        },
        step_ms: args.step_ms,
        seconds,
        requests_per_second: usage.len() as f64 / seconds,
        text_tokens_per_second: n_text as f64 / seconds,
        prompt_tokens: usage.iter().map(|usage| usage.n_prompt).sum(),
        reused_tokens: usage.iter().map(Usage::n_reused).sum(),
        preemptions: service.counters().n_preemptions - n_before,
        first_token_ms,
        gap_ms: Percentiles::of(gaps),
    };
    match args.json {
        true => writeln!(out, "{}", terminal::json(&report)?)?,
        false => print(&report, out)?,
    }
    out.flush()?;
    Ok(Exit::Done)
}

/// The prompts of each client: the tokens of --depth, of all or its own, then -p of its own.
fn prompts(args: &BenchArgs, n_clients: u32, tokens: &mut Tokens) -> Vec<Vec<Vec<TokenId>>> {
    let common = tokens.take(args.depth);
    let mut prompt = || {
        let before = match args.share_depth {
            true => common.clone(),
            false => tokens.take(args.depth),
        };
        [before, tokens.take(args.prompt)].concat()
    };
    (0..n_clients)
        .map(|_| (0..args.reps).map(|_| prompt()).collect())
        .collect()
}

/// A greedy text of exactly so many tokens.
fn request(prompt: Vec<TokenId>, n_predict: usize) -> TextRequest {
    TextRequest {
        prompt,
        options: CompletionOptions {
            sampler: SamplerConfig {
                min_tokens: n_predict,
                ..SamplerConfig::greedy()
            },
            n_predict: Some(n_predict),
            ..CompletionOptions::default()
        },
        ..TextRequest::default()
    }
}

/// All clients at once, each on a thread of its own.
fn serve(
    service: &Service<BoxedBackend>,
    prompts: Vec<Vec<Vec<TokenId>>>,
    n_predict: usize,
) -> anyhow::Result<Vec<Seen>> {
    let client = |prompts: Vec<Vec<TokenId>>| -> Result<Seen, ServiceError> {
        let mut seen = Seen::default();
        for prompt in prompts {
            let mut stream = service.submit(request(prompt, n_predict))?;
            let mut last: Option<Instant> = None;
            while stream.next_piece()?.is_some() {
                let now = Instant::now();
                seen.gaps.extend(last.replace(now).map(|last| now - last));
            }
            seen.usage.push(stream.finish()?.usage);
        }
        Ok(seen)
    };
    std::thread::scope(|scope| {
        let client = &client;
        let clients = prompts
            .into_iter()
            .map(|prompts| scope.spawn(move || client(prompts)));
        let clients: Vec<_> = clients.collect();
        let seen = clients.into_iter().map(|client| match client.join() {
            Ok(seen) => Ok(seen?),
            Err(_) => anyhow::bail!("a client's thread has panicked"),
        });
        seen.collect()
    })
}

fn print(report: &Report, out: &mut impl Write) -> std::io::Result<()> {
    let Report {
        backend, device, ..
    } = report;
    writeln!(
        out,
        "{} on {backend} ({device})",
        terminal::escape(&report.model)
    )?;
    let shared = match report.depth_tokens {
        Depth::Shared => " that all share",
        Depth::Own => "",
    };
    writeln!(
        out,
        "{} clients, {} requests: {} tokens after {}{shared}, {} of text, in {:.2} s",
        report.n_clients,
        report.n_requests,
        report.n_prompt,
        report.depth,
        report.n_predict,
        report.seconds
    )?;
    writeln!(
        out,
        "  {:.3} requests/s, {:.2} tokens of text/s, {} of {} prompt tokens reused, {} preemptions",
        report.requests_per_second,
        report.text_tokens_per_second,
        report.reused_tokens,
        report.prompt_tokens,
        report.preemptions
    )?;
    let times = [
        ("first token", Some(report.first_token_ms)),
        ("gap", report.gap_ms),
    ];
    for (name, times) in times {
        if let Some(Percentiles { p50, p90, p99, max }) = times {
            writeln!(
                out,
                "  {name:12} ms  p50 {p50:.1}  p90 {p90:.1}  p99 {p99:.1}  max {max:.1}"
            )?;
        }
    }
    Ok(())
}

impl Percentiles {
    /// `None` where nothing was measured.
    fn of(times: impl Iterator<Item = Duration>) -> Option<Self> {
        let mut ms: Vec<f64> = times.map(|time| time.as_secs_f64() * 1e3).collect();
        ms.sort_by(f64::total_cmp);
        let last = ms.len().checked_sub(1)?;
        // The smallest that so many percent are not above.
        let at = |percent: usize| ms[(ms.len() * percent).div_ceil(100).saturating_sub(1)];
        Some(Self {
            p50: at(50),
            p90: at(90),
            p99: at(99),
            max: ms[last],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_times_that_were_measured() {
        let of = |n: u64| Percentiles::of((1..=n).rev().map(Duration::from_millis));
        assert_eq!(of(0), None);
        let percentiles = |p50, p90, p99, max| Some(Percentiles { p50, p90, p99, max });
        assert_eq!(of(1), percentiles(1.0, 1.0, 1.0, 1.0));
        assert_eq!(of(10), percentiles(5.0, 9.0, 10.0, 10.0));
        assert_eq!(of(1000), percentiles(500.0, 900.0, 990.0, 1000.0));
    }
}
