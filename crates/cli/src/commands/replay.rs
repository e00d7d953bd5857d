//! `cellar replay`: what the requests of a trace would have reused with another memory or policy.
//!
//! Knows nothing of the format of traces.

use std::io::{BufReader, Write};

use anyhow::Context;
use cellar_engine::trace::{ReplayConfig, ReplayReport, Trace, replay};
use kv_core::BinaryUnits;
use serde::Serialize;

use crate::args::ReplayArgs;
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
    recorded: Rated,
    replayed: Rated,
}

#[derive(Debug, Serialize)]
struct Rated {
    hit_rate: f64,
    #[serde(flatten)]
    report: ReplayReport,
}

impl Rated {
    fn new(report: ReplayReport) -> Self {
        let hit_rate = report.hit_rate();
        Self { hit_rate, report }
    }
}

pub(super) fn run(args: &ReplayArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    let name = args.trace.display().to_string();
    let file = input::open(&args.trace).context("cannot read the trace")?;
    let trace = Trace::read(BufReader::new(file)).with_context(|| format!("'{name}'"))?;
    if let Some(at) = trace.cut_off()
        && !args.partial
    {
        let n = trace.n_requests();
        anyhow::bail!(
            "'{name}': the trace is cut off at byte {at} (requests before: {n}); --partial replays what \
             is before"
        );
    }
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
    let replayed = replay(&trace, &config).with_context(|| format!("'{name}'"))?;
    let report = Report {
        trace: name,
        cut_off: trace.cut_off(),
        recorded: Rated::new(trace.recorded()),
        replayed: Rated::new(replayed),
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
    writeln!(out, "  {:34} {:>16} {:>16}", "", "recorded", "replayed")?;
    let both = [&report.recorded, &report.replayed];
    let mut line = |name: &str, value: fn(&Rated) -> String| {
        let [recorded, replayed] = both.map(value);
        writeln!(out, "  {name:34} {recorded:>16} {replayed:>16}")
    };
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
    })
}
