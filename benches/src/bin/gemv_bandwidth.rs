//! GEMV against read bandwidth: multiplies a large matrix with one token and reads as many bytes
//! with as many threads, alternately, so that both get the same memory bandwidth. Prints one line
//! of JSON per format.
//!
//! ```sh
//! gemv_bandwidth COLUMNS FORMAT[,FORMAT…] [THREADS]
//! ```
//!
//! `ratio` is the median over all rounds; on a shared machine the bandwidth may change from one
//! round to the next. Knows no model.

use std::hint::black_box;
use std::num::NonZeroUsize;
use std::time::Instant;

use cellar_benches::{Failure, linear_graph, load, random_matrix};
use kv_backend::Backend;
use kv_backend::{GraphInputs, GraphOutputs};
use kv_block::BlockFormat;
use kv_cpu::{CpuBackend, CpuConfig};
use kv_rows::RowLayout;

/// Approximate size of the matrix: far more than caches hold.
const MATRIX_BYTES: usize = 256 << 20;
const ROUNDS: usize = 60;

fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (columns, formats, threads) = match args.as_slice() {
        [columns, formats] => (columns, formats, std::thread::available_parallelism()?),
        [columns, formats, threads] => (columns, formats, threads.parse()?),
        _ => return Err("usage: gemv_bandwidth COLUMNS FORMAT[,FORMAT…] [THREADS]".into()),
    };
    for name in formats.split(',') {
        let is_named = |f: &BlockFormat| f.to_string().eq_ignore_ascii_case(name);
        let format = BlockFormat::ALL.into_iter().find(is_named);
        let format = format.ok_or_else(|| format!("there is no format '{name}'"))?;
        measure(columns.parse()?, format, threads)?;
    }
    Ok(())
}

/// Multiplies and reads alternately.
fn measure(columns: usize, format: BlockFormat, threads: NonZeroUsize) -> Result<(), Failure> {
    let row_bytes = format.row_bytes(columns);
    let row_bytes =
        row_bytes.ok_or_else(|| format!("{columns} columns are not whole blocks of {format}"))?;
    let n_rows = MATRIX_BYTES / row_bytes.max(1);
    let backend = CpuBackend::new(CpuConfig {
        n_threads: Some(threads),
        ..CpuConfig::default()
    })?;
    let layout = RowLayout::default();
    let graph = linear_graph(1, [n_rows, columns])?;
    let mut rows = backend.allocate(&layout)?;
    let weights = load(&backend, random_matrix("w", [n_rows, columns], format)?)?;
    let mut program = backend.compile(&graph, &weights, &layout)?;
    let mut outputs = GraphOutputs::default();
    let x = vec![0.25; columns];
    let inputs = GraphInputs {
        embeddings: &x,
        ..GraphInputs::default()
    };
    let n_words = n_rows * row_bytes / size_of::<u64>() / threads;
    let memory = vec![vec![1u64; n_words]; threads.get()];
    let per_second =
        |n_bytes: usize, start: Instant| n_bytes as f64 / start.elapsed().as_secs_f64() / 1e9;
    let mut speeds = [const { Vec::new() }; 3];
    for _ in 0..ROUNDS {
        let start = Instant::now();
        backend.run(&mut program, &mut rows, &inputs, &mut outputs)?;
        let multiplied = per_second(n_rows * row_bytes, start);
        let start = Instant::now();
        std::thread::scope(|scope| {
            for words in &memory {
                scope.spawn(|| black_box(words.iter().fold(0, |all, word| all ^ word)));
            }
        });
        let read = per_second(n_words * size_of::<u64>() * threads.get(), start);
        for (all, one) in speeds.iter_mut().zip([multiplied, read, multiplied / read]) {
            all.push(one);
        }
    }
    let [multiplied, read, ratio] = speeds.map(|mut all| {
        all.sort_by(f64::total_cmp);
        all[ROUNDS / 2]
    });
    println!(
        "{{\"format\": \"{format}\", \"columns\": {columns}, \"threads\": {threads}, \
         \"multiplied_gb_per_second\": {multiplied:.1}, \"read_gb_per_second\": {read:.1}, \
         \"ratio\": {ratio:.3}}}"
    );
    Ok(())
}
