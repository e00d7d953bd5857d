//! Clients that leave at any byte: of the request, in the queue, in the prompt, in the stream.
//! Nothing of them stays, and everybody else gets the text that a request gets alone.
//!
//! `CELLAR_LEAVING_SECONDS=600` runs for as long, and then also checks that the process stays as
//! large as it is after a fifth of the time.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cellar_engine::sampler::SamplerConfig;
use cellar_engine::serve::{Frame, ServiceConfig};
use kv_contract::Random;
use model_tests::http::{post, request};
use serde_json::{Value, json};

use crate::support::{Alone, Server, Setup, Stories};

/// Clients at once.
const N_CLIENTS: u64 = 64;

/// Different requests, whose texts alone are known.
const N_REQUESTS: u64 = 24;

/// From so many seconds on, the size of the process is checked, too.
const LONG: u64 = 120;

/// How an answer comes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Answer {
    Whole,
    Streamed,
}

/// Whole once in so many.
fn answer(random: &mut Random, n: usize) -> Answer {
    match random.below(n) {
        0 => Answer::Whole,
        _ => Answer::Streamed,
    }
}

/// What became of requests.
#[derive(Debug, Default)]
struct Counts {
    whole: AtomicUsize,
    left_in_request: AtomicUsize,
    left_without_answer: AtomicUsize,
    left_in_answer: AtomicUsize,
}

fn prompt(at: u64) -> String {
    const PROMPTS: [&str; 4] = [
        "Once upon a time there was a little girl named Lily.",
        "Tom and his dog went to the park. It was a sunny day.",
        "Once upon a time there was a big red ball.",
        "The sun was warm.",
    ];
    // Some are long, so that clients leave in them.
    let n = [1, 2, 9][at as usize % 3];
    PROMPTS[at as usize % 4].repeat(n)
}

fn temperature(at: u64) -> f32 {
    [0.0, 0.8][at as usize % 2]
}

fn n_tokens(at: u64) -> usize {
    8 + at as usize * 5 % 33
}

fn body(at: u64, answer: Answer) -> Value {
    json!({
        "prompt": prompt(at), "temperature": temperature(at), "seed": at, "max_tokens": n_tokens(at),
        "stream": answer == Answer::Streamed,
    })
}

/// The text of a request that is answered whole, or as a stream.
fn ask(address: SocketAddr, at: u64, answer: Answer) -> String {
    let reply = post(address, "/v1/completions", &body(at, answer));
    assert_eq!(reply.status, 200, "{}", reply.body);
    let text = |answer: &Value| answer["choices"][0]["text"].as_str().map(str::to_owned);
    match answer {
        Answer::Whole => text(&reply.json()).unwrap(),
        Answer::Streamed => reply.json_events().iter().filter_map(text).collect(),
    }
}

/// Sends a request or a part of it, waits, reads a part of the answer or nothing, and goes.
fn leave(address: SocketAddr, at: u64, random: &mut Random, counts: &Counts) {
    let body = body(at, answer(random, 4)).to_string();
    let text = request("POST", "/v1/completions", &[], &body);
    let mut stream = TcpStream::connect(address).unwrap();
    if random.below(8) == 0 {
        let n = random.below(text.len());
        stream.write_all(&text.as_bytes()[..n]).unwrap();
        counts.left_in_request.fetch_add(1, Ordering::Relaxed);
        return;
    }
    stream.write_all(text.as_bytes()).unwrap();
    if random.below(2) == 0 {
        std::thread::sleep(Duration::from_millis(random.below(400) as u64));
        counts.left_without_answer.fetch_add(1, Ordering::Relaxed);
        return;
    }
    stream
        .set_read_timeout(Some(Duration::from_secs(120)))
        .unwrap();
    let mut left = 1 + random.below(4000);
    let mut bytes = [0; 512];
    while left > 0 {
        let most = left.min(bytes.len());
        match stream.read(&mut bytes[..most]).unwrap() {
            0 => break,
            n => left -= n,
        }
    }
    counts.left_in_answer.fetch_add(1, Ordering::Relaxed);
}

/// Bytes of memory that this process has, where the system tells.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// Prints how large the process is ten times, and returns what it was after a fifth of the time,
/// and at the end.
fn watch_size(until: Instant) -> [Option<u64>; 2] {
    let time = until.saturating_duration_since(Instant::now());
    let mut sizes = Vec::new();
    for tenth in 1..=10u32 {
        let next = until - time * (10 - tenth) / 10;
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        let size = resident_bytes();
        println!("after {tenth}/10 of the time: {size:?} bytes resident");
        sizes.push(size);
    }
    [sizes[1], sizes[9]]
}

/// What the service has when nothing is left to do.
fn last_frame(server: &Server) -> Arc<Frame> {
    server.await_metric("cellar_requests_running{", 0.0);
    server.await_metric("cellar_requests_waiting{", 0.0);
    let models = server.app.models();
    let mut watcher = models[0].service().unwrap().watch();
    let update = watcher.next_update_within(Duration::from_secs(60));
    update.expect("a frame").frame
}

#[test]
fn clients_that_leave_keep_no_cells() {
    clients_leave(Stories::Llama);
}

#[test]
fn clients_that_leave_keep_no_states() {
    clients_leave(Stories::Mamba);
}

fn clients_leave(stories: Stories) {
    let seconds = std::env::var("CELLAR_LEAVING_SECONDS");
    let seconds: u64 = seconds.map_or(8, |n| n.parse().unwrap());
    let alone = Alone::of(stories);
    let expected = (0..N_REQUESTS).map(|at| {
        let sampler = SamplerConfig {
            temperature: temperature(at),
            seed: at,
            ..SamplerConfig::default()
        };
        alone.text(&prompt(at), sampler, n_tokens(at)).text
    });
    let expected: Arc<Vec<String>> = Arc::new(expected.collect());
    let setup = Setup {
        n_seqs: 24,
        n_ctx: 1200,
        service: ServiceConfig {
            // Most clients wait.
            max_running: Some(8),
            ..ServiceConfig::default()
        },
        stories,
        ..Setup::default()
    };
    let server = setup.start();
    let (address, counts) = (server.address, Arc::<Counts>::default());
    if seconds >= LONG {
        // The system gives the process the memory of cells and states when they are used first.
        for at in 0..60 {
            let body = json!({"prompt": format!("{at}. {}", prompt(2)), "max_tokens": 2});
            assert_eq!(post(address, "/v1/completions", &body).status, 200);
        }
    }
    let until = Instant::now() + Duration::from_secs(seconds);
    let clients = (0..N_CLIENTS).map(|client| {
        let (expected, counts) = (Arc::clone(&expected), Arc::clone(&counts));
        std::thread::spawn(move || {
            let mut random = Random::new(client);
            while Instant::now() < until {
                let at = random.below(N_REQUESTS as usize) as u64;
                if random.below(3) == 0 {
                    leave(address, at, &mut random, &counts);
                    continue;
                }
                let text = ask(address, at, answer(&mut random, 2));
                assert_eq!(
                    text, expected[at as usize],
                    "request {at} of client {client}"
                );
                counts.whole.fetch_add(1, Ordering::Relaxed);
            }
        })
    });
    let clients: Vec<_> = clients.collect();
    let sizes = watch_size(until);
    clients
        .into_iter()
        .for_each(|client| client.join().unwrap());
    println!("{counts:?}");
    for left in [
        &counts.whole,
        &counts.left_in_request,
        &counts.left_without_answer,
        &counts.left_in_answer,
    ] {
        assert!(left.load(Ordering::Relaxed) > 0, "{counts:?}");
    }

    // All that is left is of cached prefixes.
    let frame = last_frame(&server);
    assert_eq!((frame.running.len(), frame.waiting.len()), (0, 0));
    let of_prefixes = |seq| frame.cached.iter().any(|prefix| prefix.seq == seq);
    let parts = frame.occupancy.parts.iter().flat_map(|part| &part.runs);
    let states = frame
        .occupancy
        .states
        .iter()
        .flat_map(|states| &states.rows);
    let used: Vec<_> = parts.chain(states).collect();
    assert!(!used.is_empty());
    for run in used {
        assert!(
            run.seqs.iter().all(of_prefixes),
            "{run:?}: {:?}",
            frame.cached
        );
    }
    assert!(server.metric("cellar_requests_total{end=\"cancelled\"}") > 0.0);
    assert!(server.app.running().is_empty());
    for at in 0..N_REQUESTS {
        assert_eq!(
            ask(address, at, Answer::Streamed),
            expected[at as usize],
            "request {at}"
        );
    }
    if let ([Some(before), Some(after)], true) = (sizes, seconds >= LONG) {
        let most = before + before / 50;
        assert!(after <= most, "{before} bytes became {after}");
    }
    server.join();
}
