//! A trace has what a service did, and its replay does the same; with another memory, something
//! else.

// A part of a test.
#![allow(unreachable_pub)]

use std::io::{self, Write};
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard};

use cellar_engine::EngineConfig;
use cellar_engine::serve::{
    Counters, EvictionPolicy, PrefixCaching, Service, ServiceConfig, ServiceExtras, TextStream,
};
use cellar_trace::{ReplayConfig, ReplayReport, Trace, TraceError, TraceWriter, replay};
use kv_core::TokenId;

use crate::service::models::{Case, last_counters, stories, tiny};

/// A file in memory.
#[derive(Clone, Default)]
pub struct Buffer(Arc<Mutex<Vec<u8>>>);

impl Buffer {
    pub fn bytes(&self) -> Vec<u8> {
        self.0.lock().unwrap().clone()
    }

    /// Nothing more is recorded while it is held: a service waits before its next step.
    pub fn hold(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap()
    }
}

impl Write for Buffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn start(case: &Case, n_ctx: u32, config: &ServiceConfig) -> (Service<kv_cpu::CpuBackend>, Buffer) {
    let engine = case.engine_with(&EngineConfig {
        n_ctx: Some(n_ctx),
        n_seqs: 12,
        n_active: Some(4),
        n_ubatch: 32,
        ..EngineConfig::default()
    });
    let buffer = Buffer::default();
    let trace = TraceWriter::new(buffer.clone());
    let extras = ServiceExtras {
        trace: Some(trace),
        ..ServiceExtras::default()
    };
    let service = Service::start_with(engine, &case.tokenizer, config, extras).unwrap();
    (service, buffer)
}

/// Two conversations that take turns, each message after the answer before. Returns the trace, and
/// what the service counted.
pub(super) fn conversations(case: &Case, n_ctx: u32) -> (Vec<u8>, Counters) {
    let (service, buffer) = start(case, n_ctx, &ServiceConfig::default());
    let _texts: [Vec<TokenId>; 2] = case.converse(&service, 8);
    let counters = last_counters(&service);
    drop(service);
    (buffer.bytes(), counters)
}

fn read(bytes: &[u8]) -> Trace {
    Trace::read(bytes).unwrap()
}

/// The trace of clients that send as early as they can: each request as soon as those before it
/// end.
fn hurried(bytes: &[u8]) -> Trace {
    let lines = std::str::from_utf8(bytes).unwrap().lines();
    let hurried = lines.map(|line| {
        let mut line: serde_json::Value = serde_json::from_str(line).unwrap();
        if line["event"].get("submit").is_some() {
            line["at"] = 0.into();
        }
        format!("{line}\n")
    });
    read(hurried.collect::<String>().as_bytes())
}

fn replay_with(trace: &Trace, config: ReplayConfig) -> ReplayReport {
    replay(trace, &config).unwrap()
}

fn error_at(bytes: &[u8]) -> (u64, String) {
    match Trace::read(bytes) {
        Err(TraceError::Wrong { at, what }) => (at, what),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_replay_reuses_what_the_service_reused() {
    for case in [
        stories("stories-llama"),
        stories("stories-gemma3"),
        stories("stories-mamba"),
        tiny("falcon_h1"),
    ] {
        for n_ctx in [700, 200] {
            let name = format!("{} in {n_ctx}", case.name);
            let (bytes, counters) = conversations(&case, n_ctx);
            let trace = read(&bytes);
            assert_eq!(trace.cut_off(), None, "{name}");
            let recorded = trace.recorded();
            assert_eq!(recorded.n_requests, 8, "{name}");
            assert_eq!(recorded.n_reused as u64, counters.n_reused_tokens, "{name}");
            assert_eq!(recorded.n_prompt as u64, counters.n_prompt_tokens, "{name}");
            assert_eq!(recorded.n_computed as u64, counters.n_tokens, "{name}");
            assert_eq!(recorded.n_evicted as u64, counters.n_evicted, "{name}");
            assert!(recorded.n_reused > 0, "{name}");
            let same = replay_with(&trace, ReplayConfig::default());
            let of = |r: &ReplayReport| {
                let sizes = (r.n_ctx, r.memory_bytes, r.n_requests, r.n_refused);
                let evicted = (r.n_evicted, r.n_evicted_tokens, r.n_preemptions);
                (sizes, r.n_prompt, r.n_reused, r.n_computed, evicted)
            };
            assert_eq!(of(&same), of(&recorded), "{name}");
            let hurried = replay_with(&hurried(&bytes), ReplayConfig::default());
            assert_eq!(of(&hurried), of(&recorded), "{name}, hurried");
            let peak = same.peak_bytes.unwrap();
            assert!(0 < peak && peak <= same.memory_bytes, "{name}: {same:?}");

            let without = ReplayConfig {
                prefix_cache: Some(PrefixCaching::Off),
                ..ReplayConfig::default()
            };
            let without = replay_with(&trace, without);
            assert_eq!((without.n_reused, without.n_evicted), (0, 0), "{name}");
            assert_eq!(without.n_prompt, recorded.n_prompt, "{name}");
            assert_eq!(
                without.n_computed,
                recorded.n_computed + recorded.n_reused,
                "{name}"
            );
        }
    }
}

#[test]
fn a_smaller_budget_evicts_and_a_larger_one_does_not() {
    let case = stories("stories-llama");
    let (bytes, _) = conversations(&case, 200);
    let trace = read(&bytes);
    let recorded = trace.recorded();
    assert!(recorded.n_evicted > 0, "{recorded:?}");
    let ample = ReplayConfig {
        n_ctx: Some(2000),
        ..ReplayConfig::default()
    };
    let ample = replay_with(&trace, ample);
    assert_eq!((ample.n_evicted, ample.n_refused), (0, 0), "{ample:?}");
    assert!(ample.n_reused > recorded.n_reused, "{ample:?}");
    assert!(ample.memory_bytes > recorded.memory_bytes);
    // The bytes of a context are those with which it is found again.
    let n_ctx = trace.n_ctx_within(ample.memory_bytes).unwrap();
    assert_eq!(n_ctx, 2000);
    assert_eq!(trace.n_ctx_within(ample.memory_bytes - 1).unwrap(), 1999);
    let Err(TraceError::Refused { reason }) = trace.n_ctx_within(1) else {
        panic!("nothing fits a byte");
    };
    assert!(reason.contains("takes at least"), "{reason}");
    // What does not fit is refused, as a service would.
    let tiny = ReplayConfig {
        n_ctx: Some(100),
        eviction: Some(EvictionPolicy::Lru),
        ..ReplayConfig::default()
    };
    let tiny = replay_with(&trace, tiny);
    assert!(tiny.n_refused > 0 && tiny.n_refused < 8, "{tiny:?}");
}

#[test]
fn requests_together_with_preemptions_and_cancellations_are_replayed_to_their_end() {
    let case = stories("stories-gemma3");
    let config = ServiceConfig {
        preempt_every: NonZeroU32::new(3),
        ..ServiceConfig::default()
    };
    let (service, buffer) = start(&case, 400, &config);
    let n = NonZeroU32::new(2).unwrap();
    let several = service.submit_texts(case.request(40), n, Vec::new).unwrap();
    let streams = (0..10).map(|number| service.submit(case.request(number)).unwrap());
    let mut streams: Vec<TextStream> = streams.collect();
    streams.pop().unwrap().cancel();
    for stream in several.into_iter().chain(streams) {
        stream.finish().unwrap();
    }
    let counters = last_counters(&service);
    drop(service);
    let trace = read(&buffer.bytes());
    let recorded = trace.recorded();
    assert!(recorded.n_preemptions > 0, "{recorded:?}");
    assert_eq!(recorded.n_preemptions as u64, counters.n_preemptions);
    assert_eq!(recorded.n_steps as u64, counters.n_steps);
    assert_eq!(recorded.n_requests, 11);
    let replayed = replay_with(&trace, ReplayConfig::default());
    assert_eq!((replayed.n_requests, replayed.n_refused), (11, 0));
    assert!(replayed.n_preemptions > 0, "{replayed:?}");
    assert!(replayed.micros > 0, "{replayed:?}");
}

#[test]
fn a_trace_that_was_cut_off_is_read_up_to_the_cut() {
    let case = stories("stories-llama");
    let (bytes, _) = conversations(&case, 200);
    let header = 1 + bytes.iter().position(|&byte| byte == b'\n').unwrap();
    let mut n_before = 0;
    for end in (header..bytes.len()).step_by(1 + bytes.len() / 97) {
        let trace = read(&bytes[..end]);
        let line = bytes[..end].iter().rposition(|&byte| byte == b'\n');
        assert_eq!(trace.cut_off(), Some(1 + line.unwrap() as u64));
        assert!(trace.n_requests() >= n_before);
        n_before = trace.n_requests();
        let replayed = replay_with(&trace, ReplayConfig::default());
        assert_eq!(replayed.n_requests, n_before);
    }
    assert_eq!(n_before, 8);
    let (at, what) = error_at(&bytes[..header - 1]);
    assert!(at == 0 && what.contains("no header of a trace"), "{what}");
}

#[test]
fn what_is_no_trace_is_refused_with_the_place() {
    let case = stories("stories-llama");
    let (bytes, _) = conversations(&case, 200);
    for foreign in ["", "hello\n", "{}\n", "[1, 2]\n", "\n"] {
        let (at, what) = error_at(foreign.as_bytes());
        assert!(at == 0 && what.contains("no header"), "{foreign}: {what}");
    }
    let text = String::from_utf8(bytes).unwrap();
    let newer = text.replacen("\"cellar_trace\":1", "\"cellar_trace\":2", 1);
    let (_, what) = error_at(newer.as_bytes());
    assert!(
        what.contains("version 2") && what.contains("version 1"),
        "{what}"
    );

    let lines: Vec<&str> = text.lines().collect();
    let with_line = |number: usize, line: &str| {
        let mut lines = lines.clone();
        lines.insert(number, line);
        lines.join("\n") + "\n"
    };
    let offset = |number: usize| {
        lines[..number]
            .iter()
            .map(|l| l.len() as u64 + 1)
            .sum::<u64>()
    };
    let (at, what) = error_at(with_line(5, "{\"at\":1,\"event\":\"nothing\"}").as_bytes());
    assert!(offset(5) <= at && at < offset(5) + 26, "{at}: {what}");
    let (at, what) = error_at(with_line(3, "not json").as_bytes());
    assert!(offset(3) <= at && at < offset(3) + 8, "{at}: {what}");
    let unknown = "{\"at\":1,\"event\":{\"preempt\":{\"request\":77,\"n_tokens\":1}}}";
    let (at, what) = error_at(with_line(4, unknown).as_bytes());
    assert_eq!((at, what.as_str()), (offset(4), "request 77 never came"));
    let twice = lines[1];
    assert!(twice.contains("submit"), "{twice}");
    let (at, what) = error_at(with_line(2, twice).as_bytes());
    assert_eq!((at, what.as_str()), (offset(2), "request 0 came before"));
    let (at, what) = error_at(with_line(lines.len(), lines[2]).as_bytes());
    assert_eq!(at, offset(lines.len()), "{what}");
}

/// The same tokens have other hashes in another trace.
#[test]
fn hashes_do_not_tell_tokens() {
    let case = stories("stories-llama");
    let prompt_of = |bytes: Vec<u8>| {
        let text = String::from_utf8(bytes).unwrap();
        let submit = text.lines().nth(1).unwrap();
        let line: serde_json::Value = serde_json::from_str(submit).unwrap();
        let hashes = line["event"]["submit"]["prompt"].as_str().unwrap();
        assert_eq!(hashes.len(), 20 * 8, "{hashes}");
        hashes.to_owned()
    };
    let [first, second] = [(); 2].map(|()| prompt_of(conversations(&case, 700).0));
    assert_ne!(first[..8], second[..8]);
}

/// A file that is full ends the trace, not the service.
#[test]
fn a_trace_that_cannot_be_written_ends_alone() {
    struct Full(usize);
    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            match self.0.checked_sub(1) {
                Some(left) => {
                    self.0 = left;
                    Ok(bytes.len())
                }
                None => Err(io::ErrorKind::StorageFull.into()),
            }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let case = stories("stories-llama");
    let start = |n_lines| {
        let extras = ServiceExtras {
            trace: Some(TraceWriter::new(Full(n_lines))),
            ..ServiceExtras::default()
        };
        let engine = case.engine(4, 300);
        Service::start_with(engine, &case.tokenizer, &ServiceConfig::default(), extras)
    };
    let refused = start(0).map(drop).unwrap_err().to_string();
    assert!(
        refused.starts_with("the trace cannot be written: "),
        "{refused}"
    );
    let service = start(3).unwrap();
    let text = service.submit(case.request(2)).unwrap().finish().unwrap();
    assert_eq!(text.tokens, case.alone(&case.request(2), 300).tokens);
}
