//! The limits of the machine at hand: how fast its threads read memory, and how many int8 operations
//! they do. Prints one line of JSON, which `peer/compare.py` sets the speed of models against.
//!
//! ```sh
//! limits [THREADS]
//! ```
//!
//! Figures are of short samples in which all threads worked at the same time. Of reading it is the median:
//! a shared machine's memory is now and then much faster for some milliseconds, and what reads for longer
//! meets it as it is most of the time; the fastest sample is beside it. Of operations it is the best.
//! Knows no model.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use cellar_benches::Failure;
use kv_cpu::isa::Isa;
use kv_cpu::kernels::limits::int8_operations;
use memmap2::MmapMut;

/// Words that each thread reads in a sample: far more than caches hold.
const WORDS: usize = 8 << 20;
/// Rounds of dot products in a sample: some milliseconds.
const ROUNDS: usize = 1_000_000;
/// Samples of reading: some tenths of a second, as long as some tokens take.
const READINGS: usize = 48;
/// Samples of operations.
const COMPUTATIONS: usize = 12;

fn main() -> Result<(), Failure> {
    let threads = match std::env::args().nth(1) {
        Some(threads) => threads.parse()?,
        None => std::thread::available_parallelism()?.get(),
    };
    let memory = (0..threads)
        .map(|_| written())
        .collect::<Result<Vec<_>, _>>()?;
    let readings = sorted_times((threads, READINGS), |thread| {
        let words = memory[thread].as_chunks::<8>().0.iter();
        let words = words.map(|word| u64::from_ne_bytes(*word));
        black_box(words.fold(0u64, |sum, w| sum ^ w));
    });
    let n_bytes = (threads * WORDS * size_of::<u64>()) as f64;
    let speed = |of: usize| Some(n_bytes / readings.get(of)?.as_secs_f64() / 1e9);
    let none = "no sample of reading was taken";
    let (usual, fastest) = (
        speed(readings.len() / 2).ok_or(none)?,
        speed(0).ok_or(none)?,
    );
    let isa = Isa::from_environment()?;
    let tera = int8_operations(isa, 1).and_then(|(operations, _)| {
        let computing = sorted_times((threads, COMPUTATIONS), |_| {
            black_box(int8_operations(isa, ROUNDS));
        });
        let n_operations = (threads * ROUNDS) as f64 * operations as f64;
        Some(n_operations / computing.first()?.as_secs_f64() / 1e12)
    });
    let tera = tera.map_or("null".to_owned(), |tera| format!("{tera:.3}"));
    println!(
        "{{\"isa\": \"{isa}\", \"threads\": {threads}, \
         \"read_gb_per_second\": {usual:.1}, \"fastest_read_gb_per_second\": {fastest:.1}, \
         \"int8_tera_ops_per_second\": {tera}}}"
    );
    Ok(())
}

/// Memory of [`WORDS`], in large pages where the system has them.
fn written() -> std::io::Result<MmapMut> {
    let mut memory = MmapMut::map_anon(WORDS * size_of::<u64>())?;
    #[cfg(target_os = "linux")]
    memory.advise(memmap2::Advice::HugePage)?;
    // Not zeros: those would not be written, and all pages of them would be the same one.
    memory.fill(1);
    Ok(memory)
}

/// The times in which all threads did the work once, the shortest first.
fn sorted_times(
    (threads, n_samples): (usize, usize),
    work: impl Fn(usize) + Sync,
) -> Vec<Duration> {
    let barrier = Barrier::new(threads);
    let times = |thread: usize| -> Vec<[Instant; 2]> {
        let sample = |_| {
            barrier.wait();
            let start = Instant::now();
            work(thread);
            [start, Instant::now()]
        };
        (0..n_samples).map(sample).collect()
    };
    let all: Vec<Vec<[Instant; 2]>> = std::thread::scope(|scope| {
        let times = &times;
        let spawn = |thread| scope.spawn(move || times(thread));
        let spawned: Vec<_> = (0..threads).map(spawn).collect();
        let joined = spawned.into_iter().filter_map(|thread| thread.join().ok());
        joined.collect()
    });
    let sample = |i: usize| {
        let start = all.iter().map(|times| times[i][0]).min()?;
        let end = all.iter().map(|times| times[i][1]).max()?;
        Some(end - start)
    };
    let mut all: Vec<Duration> = (0..n_samples).filter_map(sample).collect();
    all.sort();
    all
}
