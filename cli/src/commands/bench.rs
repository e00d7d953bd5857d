//! `cellar bench`: how many tokens a second, prompt and generation apart.

use std::io::Write;
use std::time::{Duration, Instant};

use engine::{Engine, EngineConfig, Pace};
use kv_core::backend::{Backend, BoxedBackend};
use kv_core::batch::Batch;
use kv_core::memory::Seqs;
use kv_core::{KvType, Pos, PosRange, SeqId, TokenId};
use serde::Serialize;

use crate::args::BenchArgs;
use crate::failure::{Exit, usage};
use crate::models::ModelSource;
use crate::progress::Progress;
use crate::resolve;

const SEQ: SeqId = SeqId(0);

/// What `--json` prints. A measurement that was left out is absent.
#[derive(Debug, Serialize)]
struct Report {
    model: String,
    backend: String,
    device: String,
    n_prompt: u32,
    n_predict: u32,
    depth: u32,
    reps: u32,
    load_ms: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens_per_second: Option<Spread>,
    #[serde(skip_serializing_if = "Option::is_none")]
    generation_tokens_per_second: Option<Spread>,
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
    let n_needed = args.depth + args.prompt.max(args.predict);
    if let Some(n_ctx) = args.engine.ctx
        && n_needed > n_ctx
    {
        return usage(format!(
            "{n_needed} tokens do not fit the context of {n_ctx}"
        ));
    }
    let started = Instant::now();
    let source = ModelSource::new(args.model.model.as_deref());
    let file = source.open()?;
    let n_ctx = Some(args.engine.ctx.unwrap_or(n_needed));
    let config = EngineConfig {
        n_ctx,
        ..resolve::engine_config(&args.engine, KvType::F16)
    };
    let mut engine = resolve::open_engine(&file, &args.engine, &config)?;
    let load = started.elapsed();

    let progress = Progress::spinner("measuring");
    let mut bench = Bench::new(&mut engine, args);
    bench.repetition()?;
    let mut paces = (Vec::new(), Vec::new());
    for _ in 0..args.reps {
        let (prompt, generation) = bench.repetition()?;
        paces.0.extend(prompt.tokens_per_second());
        paces.1.extend(generation.tokens_per_second());
    }
    drop(progress);
    let info = engine.backend().info();
    let report = Report {
        model: source.name(),
        backend: info.name,
        device: info.device,
        n_prompt: args.prompt,
        n_predict: args.predict,
        depth: args.depth,
        reps: args.reps,
        load_ms: load.as_secs_f64() * 1e3,
        prompt_tokens_per_second: Spread::of(paces.0),
        generation_tokens_per_second: Spread::of(paces.1),
    };
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
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
        reps,
        load_ms,
        ..
    } = report;
    writeln!(
        out,
        "{model} on {backend} ({device}), loaded in {load_ms:.0} ms"
    )?;
    writeln!(out, "tokens/s of {reps} repetitions after {depth} tokens:")?;
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
    Ok(())
}

struct Bench<'e> {
    engine: &'e mut Engine<BoxedBackend>,
    args: &'e BenchArgs,
    /// Ids that look nothing like each other.
    state: u64,
}

impl<'e> Bench<'e> {
    fn new(engine: &'e mut Engine<BoxedBackend>, args: &'e BenchArgs) -> Self {
        Self {
            engine,
            args,
            state: 1,
        }
    }

    /// How fast a prompt and a generation were, each from the same depth.
    fn repetition(&mut self) -> anyhow::Result<(Pace, Pace)> {
        self.engine.clear();
        self.feed(self.args.depth)?;
        let mut paces = (Pace::default(), Pace::default());
        if self.args.prompt > 0 {
            let time = self.feed(self.args.prompt)?;
            paces.0.add(self.args.prompt as usize, time);
            let above = PosRange::from(Pos(self.args.depth)..);
            self.engine.remove(Seqs::One(SEQ), above)?;
        }
        let started = Instant::now();
        for _ in 0..self.args.predict {
            let token = self.next_token();
            self.engine.decode(&Batch::prompt(SEQ, [token]))?;
        }
        paces.1.add(self.args.predict as usize, started.elapsed());
        Ok(paces)
    }

    /// Evaluates so many tokens and wants the logits of the last.
    fn feed(&mut self, n_tokens: u32) -> anyhow::Result<Duration> {
        let n_batch = self.engine.settings().rules.n_batch;
        let mut left = n_tokens;
        let mut time = Duration::ZERO;
        while left > 0 {
            let n = left.min(n_batch);
            left -= n;
            let mut batch = Batch::new();
            for at in 0..n {
                let entry = batch.push_token(self.next_token()).in_sequence(SEQ);
                if left == 0 && at + 1 == n {
                    entry.with_output();
                }
            }
            let started = Instant::now();
            self.engine.decode(&batch)?;
            time += started.elapsed();
        }
        Ok(time)
    }

    /// The next number of a 64-bit linear congruential generator (Knuth's MMIX), as a token.
    fn next_token(&mut self) -> TokenId {
        self.state = self
            .state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let n_vocab = u64::from(self.engine.settings().rules.n_vocab.max(1));
        TokenId(((self.state >> 33) % n_vocab) as u32)
    }
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
