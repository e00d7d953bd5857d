//! Roofline of the machine: read bandwidth and int8 peak of its threads. Prints one line of JSON,
//! with which `peer/compare.py` compares the speed of models.
//!
//! ```sh
//! limits [THREADS]
//! ```
//!
//! Both are measured in short samples in which all threads work at the same time. The bandwidth is
//! the median: a shared machine's memory is at times much faster for some milliseconds, which no
//! longer read gets; the fastest sample is printed too. The int8 peak is the best sample. Knows no
//! model.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use cellar_benches::Failure;
use kv_cpu::isa::Isa;
use kv_cpu::kernels::limits::int8_operations;
use memmap2::MmapMut;

/// Words that each thread reads per sample: far more than caches hold.
const WORDS: usize = 8 << 20;
/// Rounds of dot products per sample: some milliseconds.
const ROUNDS: usize = 1_000_000;
/// Samples of the bandwidth: together as long as some tokens take.
const READ_SAMPLES: usize = 48;
/// Samples of the int8 peak.
const INT8_SAMPLES: usize = 12;

fn main() -> Result<(), Failure> {
    let threads = match std::env::args().nth(1) {
        Some(threads) => threads.parse()?,
        None => std::thread::available_parallelism()?.get(),
    };
    let memory = (0..threads)
        .map(|_| written_memory())
        .collect::<Result<Vec<_>, _>>()?;
    let readings = sorted_times(threads, READ_SAMPLES, |thread| {
        let words = memory[thread].as_chunks::<8>().0.iter();
        let words = words.map(|word| u64::from_ne_bytes(*word));
        black_box(words.fold(0u64, |sum, w| sum ^ w));
    });
    let n_bytes = (threads * WORDS * size_of::<u64>()) as f64;
    let speed = |of: usize| Some(n_bytes / readings.get(of)?.as_secs_f64() / 1e9);
    let none = "no sample of reading was taken";
    let (median, fastest) = (
        speed(readings.len() / 2).ok_or(none)?,
        speed(0).ok_or(none)?,
    );
    let isa = Isa::from_environment()?;
    let tera = int8_operations(isa, 1).and_then(|(operations, _)| {
        let computing = sorted_times(threads, INT8_SAMPLES, |_| {
            black_box(int8_operations(isa, ROUNDS));
        });
        let n_operations = (threads * ROUNDS) as f64 * operations as f64;
        Some(n_operations / computing.first()?.as_secs_f64() / 1e12)
    });
    let tera = tera.map_or("null".to_owned(), |tera| format!("{tera:.3}"));
    println!(
        "{{\"isa\": \"{isa}\", \"threads\": {threads}, \
         \"read_gb_per_second\": {median:.1}, \"fastest_read_gb_per_second\": {fastest:.1}, \
         \"int8_tera_ops_per_second\": {tera}}}"
    );
    Ok(())
}

/// [`WORDS`] words of memory, in huge pages if the system has them.
fn written_memory() -> std::io::Result<MmapMut> {
    let mut memory = MmapMut::map_anon(WORDS * size_of::<u64>())?;
    #[cfg(target_os = "linux")]
    memory.advise(memmap2::Advice::HugePage)?;
    // Untouched pages would all be the same zero page.
    memory.fill(1);
    Ok(memory)
}

/// The times in which all threads did `work` once, the shortest first.
fn sorted_times(threads: usize, n_samples: usize, work: impl Fn(usize) + Sync) -> Vec<Duration> {
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
