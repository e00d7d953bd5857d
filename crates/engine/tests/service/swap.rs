//! Preempted requests whose state goes to the host and comes back: texts are what they are alone,
//! and the host has nothing in the end.

// A part of a test.
#![allow(unreachable_pub)]

use cellar_engine::serve::{
    Counters, PrefixCaching, Service, ServiceConfig, ServiceExtras, SwapDisk, TextStream,
};
use cellar_engine::{ConfigError, EngineConfig};
use cellar_prefix_store::{GroupName, GroupStore, HostStore};
use cellar_trace::{ReplayConfig, Trace, TraceWriter, replay};
use kv_cpu::CpuBackend;
use kv_rows::KvType;

use crate::service::models::{Case, Generated, last_counters, preempting, stories};
use crate::service::trace::Buffer;

pub const N: u64 = 8;
const N_CTX: u32 = 120;

/// Where states may go.
#[derive(Debug, Default)]
pub struct Room {
    pub bytes: u64,
    pub disk: Option<SwapDisk>,
    /// The tier of prefixes whose bytes these are.
    pub host: Option<HostStore>,
}

/// An engine that has no room for all requests.
fn small_engine() -> EngineConfig {
    EngineConfig {
        n_ctx: Some(N_CTX),
        n_seqs: 8,
        n_active: Some(4),
        n_ubatch: 32,
        ..EngineConfig::default()
    }
}

fn start(case: &Case, room: Room, config: &ServiceConfig) -> (Service<CpuBackend>, Buffer) {
    let engine = case.engine_with(&small_engine());
    let config = ServiceConfig {
        swap_bytes: room.bytes,
        ..*config
    };
    let buffer = Buffer::default();
    let extras = ServiceExtras {
        trace: Some(TraceWriter::new(buffer.clone())),
        swap_disk: room.disk,
        swap_host: room.host,
        ..ServiceExtras::default()
    };
    let service = Service::start_with(engine, &case.tokenizer, &config, extras).unwrap();
    (service, buffer)
}

/// The texts of a service, what it counted, and its trace.
pub fn serve(
    case: &Case,
    room: Room,
    config: &ServiceConfig,
) -> (Vec<Generated>, Counters, Vec<u8>) {
    let n_bytes = room.bytes;
    let n_disk_bytes = room.disk.as_ref().map_or(0, |disk| disk.n_bytes);
    let (service, buffer) = start(case, room, config);
    let submit = |number| service.submit(case.request(number)).unwrap();
    // However slow this thread is, the requests compete for memory.
    let held = buffer.hold();
    let streams: Vec<TextStream> = (0..N).map(submit).collect();
    drop(held);
    let texts = streams.into_iter().map(|stream| {
        let end = stream.finish().unwrap();
        let status = service.status();
        assert!(status.swapped_bytes <= n_bytes && status.spilled_bytes <= n_disk_bytes);
        Generated::from(end)
    });
    let texts = texts.collect();
    let counters = last_counters(&service);
    let status = service.status();
    assert_eq!(
        (status.swapped_bytes, status.spilled_bytes),
        (0, 0),
        "states are left"
    );
    let engine = service.stop().unwrap();
    assert_eq!(engine.memory().n_used(), 0, "cells are in use");
    (texts, counters, buffer.bytes())
}

/// What each request gets alone.
pub fn alone(case: &Case) -> Vec<Generated> {
    let mut engine = case.engine(1, N_CTX);
    let alone = (0..N).map(|number| case.alone_on(&mut engine, &case.request(number)));
    alone.collect()
}

/// With preemptions forced every 3 and 17 steps, and those that memory forces alone; with room for
/// all states, for few, and for none.
fn check(case: &Case) {
    let alone = alone(case);
    for (every, swap_bytes) in [
        (3, 1 << 30),
        (17, 1 << 30),
        (0, 1 << 30),
        (3, 200_000),
        (3, 1),
    ] {
        let config = ServiceConfig {
            prefix_cache: match swap_bytes {
                200_000 => PrefixCaching::Off,
                _ => PrefixCaching::On,
            },
            ..preempting(every)
        };
        let room = Room {
            bytes: swap_bytes,
            ..Room::default()
        };
        let (texts, counters, trace) = serve(case, room, &config);
        let name = format!("{}: every {every}, {swap_bytes} bytes", case.name);
        assert_eq!(texts, alone, "{name}");
        assert!(counters.n_swapped_in <= counters.n_swapped_out, "{name}");
        match (every, swap_bytes) {
            (_, 1) => assert_eq!(counters.n_swapped_out, 0, "{name}"),
            (3, 0x4000_0000) => {
                assert!(counters.n_swapped_in > 0, "{name}: {counters:?}");
                // Those that had next to nothing of their own are computed again.
                let n = 2 * counters.n_swapped_out;
                assert!(n > counters.n_preemptions, "{name}: {counters:?}");
                check_trace(&trace, &counters);
            }
            _ => {}
        }
    }
}

/// The trace has what was swapped, and a replay swaps as much as its budget allows.
fn check_trace(bytes: &[u8], counters: &Counters) {
    let trace = Trace::read(bytes).unwrap();
    let recorded = trace.recorded();
    assert_eq!(recorded.n_swapped_bytes, counters.n_swapped_bytes);
    assert!(recorded.n_recomputed as u64 <= counters.n_dropped_tokens);
    let replayed = replay(&trace, &ReplayConfig::default()).unwrap();
    assert!(replayed.n_swapped_bytes > 0, "{replayed:?}");
    let without = ReplayConfig {
        swap_bytes: Some(0),
        ..ReplayConfig::default()
    };
    let without = replay(&trace, &without).unwrap();
    assert_eq!(without.n_swapped_bytes, 0);
    assert!(without.n_recomputed >= replayed.n_recomputed, "{without:?}");
}

for_each_memory!(check);

/// States are in the bytes of the tier of prefixes: these go for them, and nothing is left there.
/// Where others have all of it, requests are computed again.
#[test]
fn states_take_the_place_of_stored_prefixes() {
    let case = stories("stories-llama");
    let alone = alone(&case);
    let config = preempting(3);
    let exact = Room {
        bytes: 1 << 30,
        ..Room::default()
    };
    let (_, counters, _) = serve(&case, exact, &config);
    let n_bytes = 4 * counters.n_swapped_bytes / counters.n_swapped_out;
    let mut host = HostStore::new(n_bytes);
    let prefix = GroupName([1; 32]);
    let frame = vec![0; usize::try_from(n_bytes).unwrap()].into();
    host.put(prefix, &frame).unwrap();
    let shared = || Room {
        bytes: n_bytes / 2,
        host: Some(host.clone()),
        ..Room::default()
    };
    let (texts, counters, _) = serve(&case, shared(), &config);
    assert_eq!(texts, alone);
    assert!(counters.n_swapped_in > 0, "{counters:?}");
    assert_eq!(host.clone().has(&[prefix]).unwrap(), [false]);
    assert_eq!(host.n_bytes(), 0);
    let others = host.reserve(n_bytes).unwrap();
    let (texts, counters, _) = serve(&case, shared(), &config);
    assert_eq!(texts, alone);
    assert_eq!(counters.n_swapped_out, 0, "{counters:?}");
    assert_eq!(host.n_bytes(), n_bytes);
    drop(others);
}

fn rounding(kv_type: KvType) -> ServiceConfig {
    ServiceConfig {
        prefix_cache: PrefixCaching::On,
        swap_bytes: 1 << 30,
        swap_type: Some(kv_type),
        ..preempting(3)
    }
}

#[test]
fn what_is_rounded_is_nobody_elses() {
    check_rounded("stories-llama");
}

#[test]
fn recurrent_states_are_rounded_too() {
    check_rounded("stories-mamba");
}

/// Rounded, states have fewer bytes, and only texts of requests that had to wait may be others.
fn check_rounded(name: &'static str) {
    let case = stories(name);
    let alone = alone(&case);
    let config = ServiceConfig {
        prefix_cache: PrefixCaching::On,
        ..preempting(3)
    };
    let exact = Room {
        bytes: 1 << 30,
        ..Room::default()
    };
    let (_, exact, _) = serve(&case, exact, &config);
    let engine = case.engine_with(&small_engine());
    let service = Service::start(engine, &case.tokenizer, &rounding(KvType::Q8_0)).unwrap();
    let submit = |number| service.submit(case.request(number)).unwrap();
    let streams: Vec<TextStream> = (0..N).map(submit).collect();
    let mut n_others = 0;
    for (stream, alone) in streams.into_iter().zip(&alone) {
        let end = stream.finish().unwrap();
        if end.usage.n_preemptions == 0 {
            n_others += 1;
            assert_eq!(Generated::from(end), *alone);
        }
    }
    assert!(n_others > 0);
    let rounded = last_counters(&service);
    assert!(rounded.n_swapped_in > 0, "{rounded:?}");
    let mean = |c: Counters| c.n_swapped_bytes / c.n_swapped_out;
    assert!(
        4 * mean(rounded) < 3 * mean(exact),
        "{rounded:?}, {exact:?}"
    );
    // What is cached by then is exact. One at a time, none has to wait.
    for (number, alone) in (0..N).zip(&alone) {
        let end = submit(number).finish().unwrap();
        assert_eq!(Generated::from(end), *alone);
    }
}

#[test]
fn a_type_that_saves_no_bytes_is_refused() {
    let refusal = |name, kv_type| {
        let case = stories(name);
        let settings = small_engine().settings(&*case.model).unwrap();
        let error = rounding(kv_type).check(&settings).unwrap_err();
        // A service says the same.
        let engine = case.engine_with(&small_engine());
        let refused = Service::start(engine, &case.tokenizer, &rounding(kv_type)).unwrap_err();
        assert_eq!(refused.to_string(), error.to_string());
        error
    };
    let stored = KvType::F16;
    for kv_type in [KvType::F16, KvType::F32, KvType::BF16] {
        let error = refusal("stories-llama", kv_type);
        assert_eq!(error, ConfigError::SwapType { kv_type, stored });
    }
    let (kv_type, stored) = (KvType::F32, KvType::F32);
    let error = refusal("stories-mamba", kv_type);
    assert_eq!(error, ConfigError::SwapType { kv_type, stored });
}
