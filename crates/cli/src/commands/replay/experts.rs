//! The replay of what routers chose: hits and reads with another budget, by each rule.
//!
//! Knows nothing of the format of traces.

use std::io::{BufRead, Write};

use anyhow::Context;
use expert_cache::{ReplayCounts, ReplayRule, RouteTrace};
use kv_core::BinaryUnits;
use serde::Serialize;

use crate::args::ReplayArgs;
use crate::failure::{Exit, usage};
use crate::terminal;

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report {
    trace: String,
    /// Bytes of all experts.
    total: u64,
    budget: u64,
    /// Choices of routers.
    steps: usize,
    rules: Vec<RuleReport>,
}

#[derive(Debug, Serialize)]
struct RuleReport {
    rule: &'static str,
    hit_percent: f64,
    #[serde(flatten)]
    replayed: ReplayCounts,
}

/// Replays a trace that begins with the stacks of a model.
///
/// # Errors
/// Where it cannot be read, or a flag is for other traces.
pub(super) fn run(
    args: &ReplayArgs,
    trace: impl BufRead,
    out: &mut impl Write,
) -> anyhow::Result<Exit> {
    let of_requests = [
        ("--ctx", args.ctx.is_some()),
        ("--policy", args.policy.is_some()),
        ("--swap-memory", args.swap_memory.is_some()),
        ("--swap-disk", args.swap_disk.is_some()),
        ("--partial", args.partial),
    ];
    let name = args.trace.display().to_string();
    if let Some((flag, _)) = of_requests.iter().find(|(_, is_given)| *is_given) {
        return usage(format!(
            "'{name}' is a trace of experts, which --budget replays; {flag} is for a trace of requests"
        ));
    }
    let trace = RouteTrace::read(trace).map_err(anyhow::Error::msg);
    let trace = trace.with_context(|| format!("'{name}'"))?;
    let budget = args.budget.map_or(trace.budget, |size| size.0);
    let rules = ReplayRule::ALL.map(|rule| {
        let replayed = trace.replay(budget, rule);
        RuleReport {
            rule: rule.name(),
            hit_percent: replayed.hit_percent(),
            replayed,
        }
    });
    let report = Report {
        trace: name,
        total: trace.total_bytes(),
        budget,
        steps: trace.steps.len(),
        rules: rules.into(),
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
    let Report {
        trace,
        total,
        budget,
        steps,
        rules,
    } = report;
    let (budget, total) = (BinaryUnits(*budget), BinaryUnits(*total));
    let trace = terminal::escape(trace);
    writeln!(
        out,
        "{trace}: {steps} choices, {budget} of {total} for experts"
    )?;
    writeln!(
        out,
        "  {:10} {:>8} {:>12} {:>12} {:>12}",
        "rule", "hit rate", "hits", "reads", "read"
    )?;
    for of_rule in rules {
        let RuleReport {
            rule,
            hit_percent,
            replayed,
        } = of_rule;
        writeln!(
            out,
            "  {rule:10} {hit_percent:>6.1} % {:>12} {:>12} {:>12}",
            replayed.n_hits,
            replayed.n_misses,
            BinaryUnits(replayed.bytes_read).to_string()
        )?;
    }
    Ok(())
}
