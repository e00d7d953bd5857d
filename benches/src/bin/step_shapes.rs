//! Steps of changing shapes on a model, with programs for capacities and with one for each exact
//! shape, in turns: what compiling costs, and what a step costs by its tokens. Times are those that
//! one thread computes (`/proc/thread-self/schedstat`), so other programs disturb them little.
//!
//! ```sh
//! step_shapes MODEL.gguf [ROUNDS [TOKENS…]]
//! ```
//!
//! Knows nothing of services.

use std::num::NonZeroUsize;
use std::sync::Arc;

use cellar_benches::{ExactShapes, Failure, SeededRandom, cpu_seconds, median};
use cellar_engine::{Engine, EngineConfig};
use kv_backend::{Backend, OnProgress};
use kv_core::batch::Batch;
use kv_core::{SeqId, TokenId};
use kv_cpu::{CpuBackend, CpuConfig};
use kv_graph::GraphShape;
use model_core::architecture::Registry;
use model_core::model_file::ModelFile;

/// Sequences of mixed steps, and how many of these there are in a round.
const N_SEQS: u32 = 16;
const N_MIXED: usize = 24;
/// Compilations that are timed together.
const N_COMPILATIONS: u32 = 50;
/// Tokens of prompts that are timed one by one, where none are named.
const PROMPTS: [usize; 12] = [8, 9, 15, 16, 17, 32, 33, 40, 64, 511, 512, 513];

fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (path, rounds, prompts) = match args.as_slice() {
        [path] => (path, 9, PROMPTS.to_vec()),
        [path, rounds] => (path, rounds.parse()?, PROMPTS.to_vec()),
        [path, rounds, prompts @ ..] => {
            let prompts: Result<_, _> = prompts.iter().map(|n| n.parse()).collect();
            (path, rounds.parse()?, prompts?)
        }
        _ => return Err("usage: step_shapes MODEL.gguf [ROUNDS [TOKENS…]]".into()),
    };
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    model_mamba::register(&mut registry);
    let file = ModelFile::open(path, &registry)?;
    let backend = || {
        CpuBackend::new(CpuConfig {
            n_threads: NonZeroUsize::new(1),
            ..CpuConfig::default()
        })
    };
    let config = EngineConfig {
        n_ctx: Some(4096),
        n_seqs: N_SEQS,
        ..EngineConfig::default()
    };
    let (model, weights) = (file.model(), || file.weights());
    let mut capacities = Engine::new(backend()?, Arc::clone(model), weights(), &config)?;
    let exact = ExactShapes(backend()?);
    let mut exact = Engine::new(exact, Arc::clone(model), weights(), &config)?;
    let loaded = (exact.backend()).load_weights(weights(), OnProgress::default())?;
    for shape in [[1, 1], [9, 9], [120, 5]] {
        print_compiling(&exact, &loaded, shape)?;
    }
    let mut times: Vec<[Vec<f64>; 2]> = Vec::new();
    for round in 0..=rounds {
        let of_round = [
            measure(&mut capacities, round, &prompts)?,
            measure(&mut exact, round, &prompts)?,
        ];
        times.resize_with(of_round[0].len(), Default::default);
        if round > 0 {
            for (times, at) in times.iter_mut().zip(0..) {
                times[0].push(of_round[0][at]);
                times[1].push(of_round[1][at]);
            }
        }
    }
    let names = prompts.iter().map(|n| format!("prompt of {n}"));
    let names = ["one token".to_owned(), "mixed steps".to_owned()]
        .into_iter()
        .chain(names);
    println!("what: ms with capacities, ms with exact shapes, ratio; medians");
    for (name, [capacities, exact]) in names.zip(&times) {
        let ratios = capacities.iter().zip(exact).map(|(a, b)| a / b).collect();
        let [a, b, ratio] = [capacities.clone(), exact.clone(), ratios].map(median);
        println!("{name}: {:.3} {:.3} {ratio:.3}", a * 1e3, b * 1e3);
    }
    println!(
        "programs compiled: {}, {}",
        capacities.n_compiled(),
        exact.n_compiled()
    );
    Ok(())
}

/// Prints what the parts of a compilation cost.
fn print_compiling<B: Backend>(
    engine: &Engine<B>,
    weights: &B::Weights,
    [n_tokens, n_outputs]: [usize; 2],
) -> Result<(), Failure> {
    let shape = GraphShape {
        n_tokens,
        n_outputs,
    };
    let (model, backend) = (engine.model(), engine.backend());
    let layout = &engine.settings().layout;
    // The first packs weights.
    backend.compile(&model.graph(shape)?, weights, layout)?;
    let start = cpu_seconds()?;
    for _ in 0..N_COMPILATIONS {
        model.graph(shape)?;
    }
    let built = cpu_seconds()?;
    let graph = model.graph(shape)?;
    for _ in 0..N_COMPILATIONS {
        backend.compile(&graph, weights, layout)?;
    }
    let compiled = cpu_seconds()?;
    let [graph, compile] =
        [built - start, compiled - built].map(|s| s * 1e3 / f64::from(N_COMPILATIONS));
    println!(
        "{n_tokens} tokens, {n_outputs} outputs: graph {graph:.3} ms, compile {compile:.3} ms"
    );
    Ok(())
}

/// Seconds of one token after some, of mixed steps, and of each prompt.
fn measure<B: Backend>(
    engine: &mut Engine<B>,
    round: usize,
    prompts: &[usize],
) -> Result<Vec<f64>, Failure> {
    let mut random = SeededRandom::new(round as u64);
    let mut times = Vec::new();
    engine.clear();
    engine.decode(&prompt(100, &mut random))?;
    let one = prompt(1, &mut random);
    let start = cpu_seconds()?;
    for _ in 0..8 {
        engine.decode(&one)?;
    }
    times.push((cpu_seconds()? - start) / 8.0);
    engine.clear();
    times.push(mixed(engine, &mut random)?);
    for &n in prompts {
        let batch = prompt(n, &mut random);
        engine.clear();
        engine.decode(&batch)?;
        engine.clear();
        let start = cpu_seconds()?;
        engine.decode(&batch)?;
        times.push(cpu_seconds()? - start);
    }
    Ok(times)
}

/// Steps of one token of some sequences, and often a piece of another's prompt.
fn mixed<B: Backend>(engine: &mut Engine<B>, random: &mut SeededRandom) -> Result<f64, Failure> {
    let below = |random: &mut SeededRandom, n: u64| (random.bits() % n) as u32;
    let start = cpu_seconds()?;
    for _ in 0..N_MIXED {
        let mut batch = Batch::new();
        let first = below(random, u64::from(N_SEQS));
        let n_chunk = below(random, 100).saturating_sub(20);
        for _ in 0..n_chunk {
            batch.push_token(token(random)).in_sequence(SeqId(first));
        }
        for seq in 1..=below(random, u64::from(N_SEQS)) {
            let seq = SeqId((first + seq) % N_SEQS);
            batch
                .push_token(token(random))
                .in_sequence(seq)
                .with_output();
        }
        if batch.is_empty() {
            batch = prompt(1, random);
        }
        engine.decode(&batch)?;
    }
    Ok(cpu_seconds()? - start)
}

fn token(random: &mut SeededRandom) -> TokenId {
    TokenId((random.bits() % 1000) as u32)
}

fn prompt(n: usize, random: &mut SeededRandom) -> Batch {
    Batch::prompt(SeqId(0), (0..n).map(|_| token(random)))
}
