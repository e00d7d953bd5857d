//! Requests of a trace over several services: what each router finds, and what a shared tier adds.

// A part of a test.
#![allow(unreachable_pub)]

use std::num::NonZeroUsize;

use cellar_engine::serve::EvictionPolicy;
use cellar_trace::{
    FleetConfig, FleetReport, MooncakeFormat, ReplayConfig, Router, Trace, TraceError, replay,
    replay_fleet,
};

use crate::service::models::{stories, tiny};
use crate::service::trace::conversations;

const BLOCK: u64 = 512;
const FORMAT: MooncakeFormat = MooncakeFormat {
    tokens_per_block: BLOCK as u32,
    token_bytes: 1000,
};

/// Conversations that take turns in an order that looks random: each begins with the block of all,
/// and each turn adds three blocks to those before. Returns the lines, and the tokens that a memory
/// without bounds would find.
fn service(n_conversations: usize, n_turns: usize) -> (String, usize) {
    let mut open: Vec<(Vec<u64>, usize)> = vec![(vec![1], 0); n_conversations];
    let (mut lines, mut next_block, mut n_found, mut n_sent) = (String::new(), 2, 0, 0);
    let mut random = 7_u64;
    while open.iter().any(|(_, n)| *n < n_turns) {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let at = (random >> 33) as usize % n_conversations;
        let (blocks, n) = &mut open[at];
        if *n == n_turns {
            continue;
        }
        n_found += if n_sent == 0 { 0 } else { blocks.len() };
        blocks.extend(next_block..next_block + 3);
        next_block += 3;
        *n += 1;
        let length = blocks.len() as u64 * BLOCK;
        let line = serde_json::json!({
            "timestamp": n_sent * 10, "input_length": length, "output_length": 1, "hash_ids": blocks,
        });
        lines += &format!("{line}\n");
        n_sent += 1;
    }
    (lines, n_found * BLOCK as usize)
}

fn read(lines: &str) -> Trace {
    Trace::read_mooncake(lines.as_bytes(), &FORMAT).unwrap()
}

fn fleet(trace: &Trace, n_ctx: u32, fleet: FleetConfig) -> FleetReport {
    let config = ReplayConfig {
        n_ctx: Some(n_ctx),
        eviction: Some(EvictionPolicy::Lru),
        ..ReplayConfig::default()
    };
    replay_fleet(trace, &config, &fleet).unwrap()
}

fn of(n: usize, router: Router) -> FleetConfig {
    FleetConfig {
        n_replicas: NonZeroUsize::new(n).unwrap(),
        router,
        tier_bytes: None,
    }
}

const HASH: Router = Router::Hash { n_tokens: 1024 };

#[test]
fn one_large_memory_finds_all_that_came_before() {
    let (lines, n_found) = service(8, 4);
    let trace = read(&lines);
    let report = fleet(&trace, 1_000_000, of(1, Router::RoundRobin)).total();
    let n_all: usize = (1..=4)
        .map(|turn| (1 + 3 * turn) * 8 * BLOCK as usize)
        .sum();
    assert_eq!((report.n_requests, report.n_prompt), (32, n_all));
    assert_eq!(report.n_reused, n_found, "{report:?}");
    assert_eq!((report.n_ctx, report.n_refused), (1_000_000, 0));
    // A memory of so many bytes has room for so many tokens, with those of the engine for each.
    let n_ctx = trace.n_ctx_within(1_128_000_000).unwrap();
    assert!((990_000..=1_000_000).contains(&n_ctx), "{n_ctx}");
}

#[test]
fn routers_keep_conversations_together() {
    let (lines, n_found) = service(24, 5);
    let trace = read(&lines);
    // Each memory has room for its part of the conversations, and not for all.
    let n_ctx = 16 * 12 * BLOCK as u32;
    let report = |router| fleet(&trace, n_ctx, of(4, router));
    let reused = |report: &FleetReport| report.total().n_reused as f64 / n_found as f64;
    let [rr, hash, longest] = [Router::RoundRobin, HASH, Router::Longest].map(report);
    assert!(reused(&rr) < 0.6, "{rr:?}");
    assert!(reused(&hash) > 0.85, "{hash:?}");
    assert!(reused(&longest) > 0.85, "{longest:?}");
    assert!(longest.imbalance() < 1.5, "{longest:?}");
    for report in [&rr, &hash, &longest] {
        let sent: Vec<usize> = report.replicas.iter().map(|one| one.n_requests).collect();
        assert_eq!(sent.iter().sum::<usize>(), 120, "{sent:?}");
        assert!(sent.iter().all(|n| *n > 0), "{sent:?}");
        assert_eq!(report.total().n_fetched, 0);
    }
    assert!(rr.replicas.iter().all(|one| one.n_requests == 30));
    // The same trace gives the same report.
    assert_eq!(report(HASH), hash);
}

#[test]
fn a_shared_tier_has_what_other_services_computed() {
    let (lines, n_found) = service(24, 5);
    let trace = read(&lines);
    let n_ctx = 16 * 12 * BLOCK as u32;
    let with_tier = |tier_bytes| {
        let config = FleetConfig {
            tier_bytes,
            ..of(4, Router::RoundRobin)
        };
        fleet(&trace, n_ctx, config).total()
    };
    let without = with_tier(None);
    let ample = with_tier(Some(1 << 40));
    // A service's own memory holds what it held, and the tier all the rest.
    assert_eq!(ample.n_reused, without.n_reused);
    assert_eq!(ample.n_reused + ample.n_fetched, n_found);
    assert!(ample.hit_rate_with_tier() > ample.hit_rate());
    // One of a quarter of the tokens has less, and one without room nothing.
    let quarter = with_tier(Some(24 * 16 * BLOCK * 1128 / 4));
    assert!(
        0 < quarter.n_fetched && quarter.n_fetched < ample.n_fetched,
        "{quarter:?}"
    );
    assert_eq!(with_tier(Some(1)).n_fetched, 0);
}

#[test]
fn requests_of_a_service_are_replayed_by_several() {
    let case = stories("stories-llama");
    let (bytes, _) = conversations(&case, 700);
    let trace = Trace::read(&bytes[..]).unwrap();
    let config = ReplayConfig::default();
    let alone = replay(&trace, &config).unwrap();
    let two = |router, tier_bytes| {
        let fleet = FleetConfig {
            tier_bytes,
            ..of(2, router)
        };
        replay_fleet(&trace, &config, &fleet).unwrap().total()
    };
    for router in [Router::RoundRobin, HASH, Router::Longest] {
        let report = two(router, None);
        assert_eq!(report.n_requests, alone.n_requests, "{router:?}");
        assert_eq!(report.n_prompt, alone.n_prompt, "{router:?}");
        assert!(report.n_reused <= alone.n_reused, "{router:?}");
        let with_tier = two(router, Some(1 << 30));
        assert_eq!(with_tier.n_reused, report.n_reused, "{router:?}");
    }
    assert_eq!(two(Router::Longest, None).n_reused, alone.n_reused);

    // What a prompt with windows or states begins with is more than its tokens.
    for case in [stories("stories-gemma3"), tiny("falcon_h1")] {
        let (bytes, _) = conversations(&case, 700);
        let trace = Trace::read(&bytes[..]).unwrap();
        let fleet = FleetConfig {
            tier_bytes: Some(1 << 30),
            ..FleetConfig::default()
        };
        let Err(TraceError::Refused { reason }) = replay_fleet(&trace, &config, &fleet) else {
            panic!("{} has a tier", case.name);
        };
        assert!(reason.contains("windows or recurrent states"), "{reason}");
    }
}

#[test]
fn what_is_wrong_in_a_trace_of_blocks_has_its_line() {
    let good = r#"{"timestamp": 5, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}"#;
    assert_eq!(read(&format!("{good}\n\n{good}")).n_requests(), 2);
    for (bad, wanted) in [
        (
            r#"{"timestamp": 4, "input_length": 600, "hash_ids": [1, 2]}"#,
            "at 5 ms",
        ),
        (
            r#"{"timestamp": 9, "input_length": 600, "hash_ids": [1]}"#,
            "in 1 blocks of 512: it has 2",
        ),
        (
            r#"{"timestamp": 9, "input_length": 0, "hash_ids": []}"#,
            "a prompt of 0 tokens",
        ),
        (
            r#"{"timestamp": 9, "input_length": -3, "hash_ids": [1]}"#,
            "invalid value",
        ),
        (
            r#"{"timestamp": 9, "hash_ids": [1]}"#,
            "missing field `input_length`",
        ),
        ("Once upon a time", "no request of this format"),
    ] {
        let error = Trace::read_mooncake(format!("{good}\n{bad}\n").as_bytes(), &FORMAT);
        let Err(TraceError::Wrong { at, what }) = error else {
            panic!("{bad} is taken");
        };
        assert_eq!(at, good.len() as u64 + 1, "{bad}");
        assert!(
            what.starts_with("line 2: ") && what.contains(wanted),
            "{what}"
        );
    }
    let error = Trace::read_mooncake(&b"\n"[..], &FORMAT).unwrap_err();
    assert!(
        error.to_string().contains("there are no requests"),
        "{error}"
    );
    for tokens_per_block in [0, 17, 500] {
        let format = MooncakeFormat {
            tokens_per_block,
            ..FORMAT
        };
        let error = Trace::read_mooncake(good.as_bytes(), &format).unwrap_err();
        assert!(error.to_string().contains("a multiple of it"), "{error}");
    }
}
