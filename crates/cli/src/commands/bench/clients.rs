//! `cellar bench --clients`: many clients of a service in this process, and what each waits for.
//!
//! Each client sends its requests one after the other (a closed loop), or requests come at times of
//! their own (`--arrivals`, an open loop). Invariant: all requests have the same length. Knows no
//! HTTP: nothing of it is in the times.

mod driver;
mod schedule;

use std::io::Write;
use std::time::{Duration, Instant};

use cellar_engine::sampler::SamplerConfig;
use cellar_engine::serve::{ServiceConfig, Speculation, TextRequest, Usage};
use cellar_engine::{CompletionOptions, EngineConfig, PromptOutputs};
use kv_backend::Backend;
use kv_core::TokenId;
use kv_rows::KvType;
use serde::Serialize;

use self::driver::{Answered, drive};
use self::schedule::Schedule;
use super::load::{Depth, Tokens};
use crate::args::{Arrivals, BenchArgs};
use crate::failure::{Exit, usage};
use crate::models::ModelSource;
use crate::progress::Progress;
use crate::resolve;
use crate::service::ServiceFlags;
use crate::terminal;

/// Requests that are sent so much later than they are due are worth a line, in milliseconds.
const LATE_MS: f64 = 5.0;

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report {
    model: String,
    backend: String,
    device: String,
    n_clients: u32,
    n_requests: usize,
    /// Absent in a closed loop.
    #[serde(skip_serializing_if = "Option::is_none")]
    arrivals: Option<Arriving>,
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
    /// With --speculate: tokens that were drafted, and those of them that were right.
    drafted_tokens: u64,
    accepted_tokens: u64,
    /// Until a request is admitted, which is a part of the time to its first token.
    queued_ms: Percentiles,
    first_token_ms: Percentiles,
    /// Absent where each text came in one piece.
    #[serde(skip_serializing_if = "Option::is_none")]
    inter_token_ms: Option<Percentiles>,
    total_ms: Percentiles,
}

/// How requests came in an open loop.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Arriving {
    #[serde(flatten)]
    arrivals: Arrivals,
    seed: u64,
    /// The most that one was sent later than it was due; its times include it.
    max_late_ms: f64,
}

/// Of many times, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Percentiles {
    mean: f64,
    p50: f64,
    p90: f64,
    p99: f64,
    max: f64,
}

pub(super) fn run(args: &BenchArgs, n_clients: u32, out: &mut impl Write) -> anyhow::Result<Exit> {
    let Some(n_prompt) = args.prompt.checked_add(args.depth).filter(|&n| n > 0) else {
        return usage("--clients needs a prompt: -p and --depth together are at least 1");
    };
    if args.predict == 0 {
        return usage("--clients needs texts to read: -n is at least 1");
    }
    let trace = args.trace.writer()?;
    let source = ModelSource::new(args.model.path());
    let mut file = source.load_with(&args.engine.compute.changes())?;
    args.speculation.use_head(&mut file)?;
    resolve::continues_without_source(&file)?;
    let config = resolve::engine_config(&args.engine, &**file.model(), KvType::F16);
    let n_needed = n_ctx(args, n_prompt, n_clients)?;
    let config = EngineConfig {
        n_ctx: Some(config.n_ctx.unwrap_or(n_needed)),
        // A cached prefix for each that runs.
        n_seqs: 2 * n_clients,
        n_active: Some(n_clients),
        ..config
    };
    let engine = resolve::open_engine(&file, &args.engine.compute, &config, PromptOutputs::Last)?;
    let info = engine.backend().info();
    let n_vocab = engine.settings().rules.n_vocab;
    let n_requests = n_clients as usize * args.reps as usize;
    let service_config = ServiceConfig {
        max_queued: n_requests,
        max_queued_tokens: usize::MAX,
        step_time: (args.step_ms > 0).then(|| Duration::from_millis(args.step_ms.into())),
        ..ServiceConfig::default()
    };
    let flags = ServiceFlags {
        engine: &args.engine,
        speculation: &args.speculation,
        trace,
        blocks: None,
        swap_disk: None,
        swap_host: None,
        prefix_tiers: None,
        tower: None,
    };
    let service = flags.start(engine, file.tokenizer(), &service_config)?;
    let speculation = args.speculation.speculation();
    let progress = Progress::spinner("measuring");
    let mut tokens = Tokens::new(n_vocab);
    let n_predict = args.predict as usize;
    // Programs are compiled and weights have been read.
    service
        .submit(request(tokens.take(args.prompt.max(1)), 2, speculation))?
        .finish()?;
    let before = service.counters();
    let prompts = prompts(args, n_requests, &mut tokens).into_iter();
    let requests = prompts.map(|prompt| request(prompt, n_predict, speculation));
    let requests = requests.collect();
    let schedule = match args.arrivals {
        Some(arrivals) => Schedule::open(arrivals, n_requests, args.seed),
        None => Schedule::Closed {
            n_clients: n_clients as usize,
            n_requests,
        },
    };
    let started = Instant::now();
    let answered = drive(&service, requests, &schedule)?;
    let seconds = started.elapsed().as_secs_f64();
    let after = service.counters();
    drop(progress);

    let waited = Waited::of(&answered)?;
    let usage = || answered.iter().map(|answered| &answered.usage);
    let n_text: usize = usage().map(|usage| usage.n_tokens).sum();
    let report = Report {
        model: source.name(),
        backend: info.name,
        device: info.device,
        n_clients,
        n_requests: answered.len(),
        arrivals: args.arrivals.map(|arrivals| Arriving {
            arrivals,
            seed: args.seed,
            max_late_ms: milliseconds(waited.max_late),
        }),
        n_prompt: args.prompt,
        n_predict: args.predict,
        depth: args.depth,
        depth_tokens: if args.share_depth {
            Depth::Shared
        } else {
            Depth::Own
        },
        step_ms: args.step_ms,
        seconds,
        requests_per_second: answered.len() as f64 / seconds,
        text_tokens_per_second: n_text as f64 / seconds,
        prompt_tokens: usage().map(|usage| usage.n_prompt).sum(),
        reused_tokens: usage().map(Usage::n_reused).sum(),
        preemptions: after.n_preemptions - before.n_preemptions,
        drafted_tokens: after.n_drafted_tokens - before.n_drafted_tokens,
        accepted_tokens: after.n_accepted_tokens - before.n_accepted_tokens,
        queued_ms: waited.queued,
        first_token_ms: waited.first_token,
        inter_token_ms: waited.inter_token,
        total_ms: waited.total,
    };
    if args.json {
        writeln!(out, "{}", terminal::json(&report)?)?;
    } else {
        print(&report, out)?;
    }
    out.flush()?;
    Ok(Exit::Done)
}

/// What clients waited for.
struct Waited {
    queued: Percentiles,
    first_token: Percentiles,
    inter_token: Option<Percentiles>,
    total: Percentiles,
    max_late: Duration,
}

impl Waited {
    fn of(answered: &[Answered]) -> anyhow::Result<Self> {
        let of = |time: fn(&Usage) -> Option<Duration>| {
            let times = answered.iter().filter_map(|answered| {
                let time = time(&answered.usage)?;
                Some(time + answered.late)
            });
            let percentiles = Percentiles::of(times);
            percentiles.ok_or_else(|| anyhow::anyhow!("no request got a token"))
        };
        let gaps = answered.iter().flat_map(|answered| answered.gaps.iter());
        let late = answered.iter().map(|answered| answered.late);
        Ok(Self {
            queued: of(|usage| Some(usage.queued))?,
            first_token: of(|usage| usage.first_token)?,
            inter_token: Percentiles::of(gaps.copied()),
            total: of(|usage| Some(usage.total))?,
            max_late: late.max().unwrap_or_default(),
        })
    }
}

/// The context that all clients together need.
fn n_ctx(args: &BenchArgs, n_prompt: u32, n_clients: u32) -> anyhow::Result<u32> {
    let n_each = u64::from(n_prompt) + u64::from(args.predict);
    // With --streams each sequence has cells of its own.
    let n_together = if args.engine.streams.streams {
        1
    } else {
        n_clients
    };
    u32::try_from(n_each * u64::from(n_together)).or_else(|_| {
        usage(format!(
            "{n_clients} requests of {n_each} tokens are more than a context can hold"
        ))
    })
}

/// The prompts: the tokens of --depth, of all or its own, then -p of its own.
fn prompts(args: &BenchArgs, n_requests: usize, tokens: &mut Tokens) -> Vec<Vec<TokenId>> {
    let common = tokens.take(args.depth);
    let prompt = |_| {
        let before = if args.share_depth {
            common.clone()
        } else {
            tokens.take(args.depth)
        };
        [before, tokens.take(args.prompt)].concat()
    };
    (0..n_requests).map(prompt).collect()
}

/// A greedy text of exactly so many tokens.
fn request(prompt: Vec<TokenId>, n_predict: usize, speculation: Speculation) -> TextRequest {
    TextRequest {
        prompt,
        speculation,
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
    let come = match report.arrivals.map(|arriving| arriving.arrivals) {
        None => "one after the other".to_owned(),
        Some(Arrivals::AtOnce) => "all at once".to_owned(),
        Some(Arrivals::Poisson { per_second }) => format!("at random, {per_second:.3} a second"),
        Some(Arrivals::Fixed { seconds }) => format!("one every {seconds:.3} s"),
    };
    writeln!(
        out,
        "{} clients, {} requests, {come}: {} tokens after {}{shared}, {} of text, in {:.2} s",
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
    if report.drafted_tokens > 0 {
        writeln!(
            out,
            "  {} tokens drafted, {} of them right",
            report.drafted_tokens, report.accepted_tokens
        )?;
    }
    let times = [
        ("queued", Some(report.queued_ms)),
        ("time to first token", Some(report.first_token_ms)),
        ("inter-token latency", report.inter_token_ms),
        ("whole request", Some(report.total_ms)),
    ];
    for (name, times) in times {
        if let Some(Percentiles {
            mean,
            p50,
            p90,
            p99,
            max,
        }) = times
        {
            writeln!(
                out,
                "  {name:19} ms  mean {mean:.1}  p50 {p50:.1}  p90 {p90:.1}  p99 {p99:.1}  max {max:.1}"
            )?;
        }
    }
    if let Some(late) = report.arrivals.map(|arriving| arriving.max_late_ms)
        && late > LATE_MS
    {
        writeln!(
            out,
            "  requests were sent up to {late:.1} ms late, which is in these times"
        )?;
    }
    Ok(())
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

impl Percentiles {
    /// `None` where nothing was measured.
    fn of(times: impl Iterator<Item = Duration>) -> Option<Self> {
        let mut ms: Vec<f64> = times.map(milliseconds).collect();
        ms.sort_by(f64::total_cmp);
        let last = ms.len().checked_sub(1)?;
        // The smallest that so many percent are not above.
        let at = |percent: usize| ms[(ms.len() * percent).div_ceil(100).saturating_sub(1)];
        Some(Self {
            mean: ms.iter().sum::<f64>() / ms.len() as f64,
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
        let percentiles = |mean, p50, p90, p99, max| {
            Some(Percentiles {
                mean,
                p50,
                p90,
                p99,
                max,
            })
        };
        assert_eq!(of(1), percentiles(1.0, 1.0, 1.0, 1.0, 1.0));
        assert_eq!(of(10), percentiles(5.5, 5.0, 9.0, 10.0, 10.0));
        assert_eq!(of(1000), percentiles(500.5, 500.0, 900.0, 990.0, 1000.0));
    }
}
