//! `cellar replay`: what the requests of a trace would have reused with another memory or policy,
//! or with several servers; or what experts would have been read.
//!
//! Knows nothing of the format of traces.

mod experts;

use std::io::{BufRead, BufReader, Write};

use anyhow::Context;
use cellar_trace::{ReplayConfig, ReplayReport, Trace, replay_fleet};
use expert_cache::RouteTrace;
use kv_core::BinaryUnits;
use serde::Serialize;

use crate::args::{ReplayArgs, TraceFormat};
use crate::failure::{Exit, warn};
use crate::input;
use crate::terminal;

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report {
    trace: String,
    /// Where the trace was cut off, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    cut_off: Option<u64>,
    /// What the trace itself shows; a trace of another program shows nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    recorded: Option<Rated>,
    /// All servers together.
    replayed: Rated,
    /// Prompt tokens that the busiest server computes, for each that they compute on average.
    imbalance: f64,
    /// Each server, where there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    replicas: Vec<Rated>,
}

#[derive(Debug, Serialize)]
struct Rated {
    hit_rate: f64,
    hit_rate_with_tier: f64,
    #[serde(flatten)]
    report: ReplayReport,
}

impl Rated {
    fn new(report: ReplayReport) -> Self {
        Self {
            hit_rate: report.hit_rate(),
            hit_rate_with_tier: report.hit_rate_with_tier(),
            report,
        }
    }
}

/// The trace, whole or as far as it is wanted.
fn read(args: &ReplayArgs, name: &str, file: impl BufRead) -> anyhow::Result<Trace> {
    if args.trace_format == TraceFormat::Mooncake {
        anyhow::ensure!(
            args.ctx.is_some() || args.budget.is_some(),
            "--trace-format mooncake needs --ctx or --budget: the trace tells of no memory"
        );
        let trace = Trace::read_mooncake(file, &args.mooncake());
        return trace.with_context(|| format!("'{name}'"));
    }
    let trace = Trace::read(file).with_context(|| format!("'{name}'"))?;
    if let Some(at) = trace.cut_off()
        && !args.partial
    {
        let n = trace.n_requests();
        anyhow::bail!(
            "'{name}': the trace is cut off at byte {at} (requests before: {n}); --partial replays what \
             is before"
        );
    }
    Ok(trace)
}

pub(super) fn run(args: &ReplayArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    let name = args.trace.display().to_string();
    let file = input::open(&args.trace).context("cannot read the trace")?;
    let mut file = BufReader::new(file);
    if RouteTrace::begins(file.fill_buf().context("cannot read the trace")?) {
        return experts::run(args, file, out);
    }
    let trace = read(args, &name, file)?;
    if trace.has_drafts() {
        warn("tokens were drafted when the trace was written, and a replay drafts none");
    }
    let n_ctx = match args.budget {
        Some(budget) => Some(trace.n_ctx_within(budget.0)?),
        None => args.ctx,
    };
    let config = ReplayConfig {
        n_ctx,
        prefix_cache: args.policy.map(|policy| policy.caching()),
        eviction: args.policy.and_then(|policy| policy.eviction()),
        swap_bytes: args.swap_memory.map(|size| size.0),
        swap_disk_bytes: args.swap_disk.map(|size| size.0),
    };
    let fleet =
        replay_fleet(&trace, &config, &args.fleet()).with_context(|| format!("'{name}'"))?;
    let is_recorded = args.trace_format == TraceFormat::Cellar;
    let report = Report {
        trace: name,
        cut_off: trace.cut_off(),
        recorded: is_recorded.then(|| Rated::new(trace.recorded())),
        replayed: Rated::new(fleet.total()),
        imbalance: fleet.imbalance(),
        replicas: match &fleet.replicas[..] {
            [_] => Vec::new(),
            all => all.iter().copied().map(Rated::new).collect(),
        },
    };
    if args.json {
        writeln!(out, "{}", terminal::json(&report)?)?;
    } else {
        print(&report, out)?;
    }
    out.flush()?;
    Ok(Exit::Done)
}

fn print(report: &Report, out: &mut impl Write) -> std::io::Result<()> {
    writeln!(out, "{}", terminal::escape(&report.trace))?;
    let columns = report
        .recorded
        .iter()
        .map(|recorded| ("recorded", recorded));
    let columns = columns.chain([("replayed", &report.replayed)]);
    let columns: Vec<(&str, &Rated)> = columns.collect();
    let mut row = |name: &str, value: &dyn Fn(&(&str, &Rated)) -> String| {
        let values = columns
            .iter()
            .map(|column| format!(" {:>16}", value(column)));
        writeln!(out, "  {name:34}{}", values.collect::<String>())
    };
    row("", &|(name, _)| (*name).to_owned())?;
    let mut line = |name: &str, value: fn(&Rated) -> String| row(name, &|(_, rated)| value(rated));
    line("tokens of the context", |r| r.report.n_ctx.to_string())?;
    line("memory", |r| BinaryUnits(r.report.memory_bytes).to_string())?;
    line("most of it in use", |r| match r.report.peak_bytes {
        Some(bytes) => BinaryUnits(bytes).to_string(),
        None => "-".to_owned(),
    })?;
    line("requests", |r| r.report.n_requests.to_string())?;
    line("refused", |r| r.report.n_refused.to_string())?;
    line("prompt tokens", |r| r.report.n_prompt.to_string())?;
    line("reused", |r| r.report.n_reused.to_string())?;
    line("hit rate", |r| format!("{:.1} %", 100.0 * r.hit_rate))?;
    if report.replayed.report.n_fetched > 0 {
        line("fetched from the tier", |r| r.report.n_fetched.to_string())?;
        line("hit rate with the tier", |r| {
            format!("{:.1} %", 100.0 * r.hit_rate_with_tier)
        })?;
    }
    line("computed tokens", |r| r.report.n_computed.to_string())?;
    line("computed again", |r| r.report.n_recomputed.to_string())?;
    line("swapped to the host", |r| {
        BinaryUnits(r.report.n_swapped_bytes).to_string()
    })?;
    line("of these, on to the disk", |r| {
        BinaryUnits(r.report.n_spilled_bytes).to_string()
    })?;
    line("evicted prefixes", |r| r.report.n_evicted.to_string())?;
    line("tokens of these", |r| r.report.n_evicted_tokens.to_string())?;
    line("preemptions", |r| r.report.n_preemptions.to_string())?;
    line("steps", |r| r.report.n_steps.to_string())?;
    line("seconds", |r| {
        format!("{:.2}", r.report.micros as f64 / 1e6)
    })?;
    if report.replicas.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "  {:>6} {:>14} {:>14} {:>10} {:>14} {:>10}",
        "server", "prompt tokens", "reused", "hit rate", "fetched", "requests"
    )?;
    for (number, rated) in report.replicas.iter().enumerate() {
        let server = rated.report;
        let hit_rate = format!("{:.1} %", 100.0 * rated.hit_rate);
        writeln!(
            out,
            "  {:>6} {:>14} {:>14} {hit_rate:>10} {:>14} {:>10}",
            number + 1,
            server.n_prompt,
            server.n_reused,
            server.n_fetched,
            server.n_requests
        )?;
    }
    writeln!(
        out,
        "  the busiest computes {:.2} times the prompt tokens of the mean",
        report.imbalance
    )
}
