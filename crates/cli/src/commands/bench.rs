//! `cellar bench`: tokens per second, of prompts and of generation separately; or, with clients,
//! what each waits for.

mod clients;
mod load;
mod profile;

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use cellar_engine::{EngineConfig, Speculation};
use kv_backend::{Backend, Profile};
use kv_rows::KvType;
use serde::Serialize;

use crate::args::BenchArgs;
use crate::failure::{Exit, usage};
use crate::models::ModelSource;
use crate::progress::Progress;
use crate::resolve;
use crate::terminal;
use load::{Depth, Load};
use profile::{KindReport, Measured};

/// What `--json` prints. A measurement that was left out is absent.
#[derive(Debug, Serialize)]
struct Report {
    model: String,
    backend: String,
    device: String,
    n_prompt: u32,
    n_predict: u32,
    depth: u32,
    n_seqs: u32,
    depth_tokens: Depth,
    reps: u32,
    load_ms: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens_per_second: Option<Spread>,
    #[serde(skip_serializing_if = "Option::is_none")]
    generation_tokens_per_second: Option<Spread>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_steps: Option<Vec<KindReport>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    generation_steps: Option<Vec<KindReport>>,
}

/// Of several measurements.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Spread {
    min: f64,
    median: f64,
    max: f64,
}

pub(super) fn run(args: &BenchArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    if args.prompt == 0 && args.predict == 0 {
        return usage("-p 0 and -n 0 leave nothing to measure");
    }
    args.speculation.draft_model()?;
    if let Some(n_clients) = args.clients {
        return match (args.trace.is_on_stdout(), args.json) {
            (false, _) => clients::run(args, n_clients, out),
            // The trace is alone on stdout.
            (true, false) => clients::run(args, n_clients, &mut std::io::stderr()),
            (true, true) => usage(
                "--trace and --json both write to stdout: name a file for the trace, or leave out --json",
            ),
        };
    }
    if let Some(path) = &args.trace.trace {
        return usage(format!(
            "--trace '{}' is of a service: give --clients, too",
            path.display()
        ));
    }
    let by_default = matches!(args.speculation.speculation(), Speculation::Auto { .. });
    let is_off = by_default || args.speculation.speculation() == Speculation::Off;
    if let Some(path) = args.speculation.file() {
        let path = path.display();
        return usage(format!(
            "--draft-model '{path}' drafts for a service: give --clients, too"
        ));
    }
    if !is_off {
        return usage("--speculate is of a service: give --clients, too");
    }
    if args.share_depth && args.seqs == 1 {
        return usage("--share-depth needs several --seqs, or --clients");
    }
    let profile = args.times.then(Arc::<Profile>::default);
    let mut load = Load::new(args, profile.clone());
    let n_needed = if args.engine.streams.streams {
        load.cells_of_one()
    } else {
        load.cells_of_all()
    };
    let Ok(n_needed) = u32::try_from(n_needed) else {
        return usage(format!(
            "{n_needed} tokens are more than a context can hold; choose smaller -p, -n, --depth or \
             --seqs"
        ));
    };
    let started = Instant::now();
    let source = ModelSource::new(args.model.path());
    let file = source.open_with(&args.engine.compute.changes())?;
    resolve::needs_no_source(&file)?;
    let config = resolve::engine_config(&args.engine, &**file.model(), KvType::F16);
    if let Some(n_ctx) = config.n_ctx
        && n_needed > n_ctx
    {
        return usage(format!(
            "{n_needed} tokens do not fit the context of {n_ctx}; choose a larger --ctx, or smaller \
             -p, -n, --depth or --seqs"
        ));
    }
    let config = EngineConfig {
        n_ctx: Some(config.n_ctx.unwrap_or(n_needed)),
        n_seqs: args.seqs,
        ..config
    };
    let mut engine = resolve::open_profiled_engine(&file, &args.engine.compute, &config, profile)?;
    let loaded = started.elapsed();

    let progress = Progress::spinner("measuring");
    load.warm_up(&mut engine)?;
    let mut paces = [Vec::new(), Vec::new()];
    let mut phases = [Measured::default(), Measured::default()];
    for _ in 0..args.reps {
        for (at, measured) in load.repetition(&mut engine)?.into_iter().enumerate() {
            paces[at].extend(measured.pace.tokens_per_second());
            phases[at].add(measured);
        }
    }
    drop(progress);
    let info = engine.backend().info();
    let [prompt_pace, generation_pace] = paces.map(Spread::of);
    let [prompt_steps, generation_steps] = phases.map(|phase| phase.report());
    let report = Report {
        model: source.name(),
        backend: info.name,
        device: info.device,
        n_prompt: args.prompt,
        n_predict: args.predict,
        depth: args.depth,
        n_seqs: args.seqs,
        depth_tokens: load.depth_tokens(),
        reps: args.reps,
        load_ms: loaded.as_secs_f64() * 1e3,
        prompt_tokens_per_second: prompt_pace,
        generation_tokens_per_second: generation_pace,
        prompt_steps,
        generation_steps,
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
        model,
        backend,
        device,
        depth,
        n_seqs,
        depth_tokens,
        reps,
        load_ms,
        ..
    } = report;
    writeln!(
        out,
        "{} on {backend} ({device}), loaded in {load_ms:.0} ms",
        terminal::escape(model)
    )?;
    let seqs = match (n_seqs, depth_tokens) {
        (1, _) => String::new(),
        (n, Depth::Own) => format!(", all of {n} sequences together"),
        (n, Depth::Shared) => format!(", which {n} sequences share, together"),
    };
    writeln!(
        out,
        "tokens/s of {reps} repetitions after {depth} tokens{seqs}:"
    )?;
    let lines = [
        ("prompt", report.n_prompt, report.prompt_tokens_per_second),
        (
            "generation",
            report.n_predict,
            report.generation_tokens_per_second,
        ),
    ];
    for (name, n, spread) in lines {
        if let Some(Spread { min, median, max }) = spread {
            writeln!(
                out,
                "  {name:10} {n:6} tokens  min {min:.2}  median {median:.2}  max {max:.2}"
            )?;
        }
    }
    for (name, kinds) in [
        ("prompt", &report.prompt_steps),
        ("generation", &report.generation_steps),
    ] {
        if let Some(kinds) = kinds {
            profile::print(name, kinds, out)?;
        }
    }
    Ok(())
}

impl Spread {
    /// `None` where nothing was measured.
    fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let (&min, &max) = (values.first()?, values.last()?);
        let middle = values.len() / 2;
        let upper = values.get(middle).copied()?;
        let lower = values.get((values.len() - 1) / 2).copied()?;
        Some(Self {
            min,
            median: (lower + upper) / 2.0,
            max,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(Spread::of(vec![]), None);
        let spread = |min, median, max| Some(Spread { min, median, max });
        assert_eq!(Spread::of(vec![3.0, 1.0, 2.0]), spread(1.0, 2.0, 3.0));
        assert_eq!(Spread::of(vec![4.0, 1.0, 2.0, 3.0]), spread(1.0, 2.5, 4.0));
    }
}
