//! Preempted requests whose state goes to the host and comes back: texts are what they are alone, and the
//! host has nothing in the end.

use engine::EngineConfig;
use engine::serve::{Counters, PrefixCaching, Service, ServiceConfig, ServiceExtras, TextStream};
use engine::trace::{ReplayConfig, Trace, TraceWriter, replay};
use kv_cpu::CpuBackend;

use crate::models::{Case, Generated, last_counters, preempting};
use crate::trace::Buffer;

const N: u64 = 8;
const N_CTX: u32 = 120;

fn start(case: &Case, swap_bytes: u64, config: &ServiceConfig) -> (Service<CpuBackend>, Buffer) {
    let engine = case.engine_with(&EngineConfig {
        n_ctx: Some(N_CTX),
        n_seqs: 8,
        n_active: Some(4),
        n_ubatch: 32,
        swap_bytes,
        ..EngineConfig::default()
    });
    let buffer = Buffer::default();
    let extras = ServiceExtras {
        trace: Some(TraceWriter::new(buffer.clone())),
        ..ServiceExtras::default()
    };
    let service = Service::start_with(engine, &case.tokenizer, config, extras).unwrap();
    (service, buffer)
}

/// The texts of a service, what it counted, and its trace.
fn serve(
    case: &Case,
    swap_bytes: u64,
    config: &ServiceConfig,
) -> (Vec<Generated>, Counters, Vec<u8>) {
    let (service, buffer) = start(case, swap_bytes, config);
    let submit = |number| service.submit(case.request(number)).unwrap();
    let streams: Vec<TextStream> = (0..N).map(submit).collect();
    let texts = streams.into_iter().map(|stream| {
        let end = stream.finish().unwrap();
        assert!(service.status().swapped_bytes <= swap_bytes);
        Generated::from(end)
    });
    let texts = texts.collect();
    let counters = last_counters(&service);
    assert_eq!(service.status().swapped_bytes, 0, "the host has states");
    let engine = service.stop().unwrap();
    assert_eq!(engine.memory().n_used(), 0, "cells are in use");
    (texts, counters, buffer.bytes())
}

/// With preemptions forced every 3 and 17 steps, and those that memory forces alone; with room for all
/// states, for few, and for none.
fn check(case: &Case) {
    let mut engine = case.engine(1, N_CTX);
    let alone = (0..N).map(|number| case.alone_on(&mut engine, &case.request(number)));
    let alone: Vec<Generated> = alone.collect();
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
        let (texts, counters, trace) = serve(case, swap_bytes, &config);
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
