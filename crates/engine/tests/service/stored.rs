//! A store of prefixes under a service: what was cached comes back in another one, whatever its
//! memory is and whatever the store does, and texts are what they are alone.

use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use cellar_engine::EngineConfig;
use cellar_engine::serve::{
    FetchPolicy, Missed, PrefixTiers, PrefixUse, Salt, Service, ServiceConfig, ServiceExtras,
    ServiceStatus, TextRequest, Usage,
};
use cellar_prefix_store::{
    DirectoryConfig, DirectoryStore, GroupName, GroupStore, HostStore, Kept, MIN_SECRET,
    StoreError, StoreKey, Tier, TierConfig,
};
use kv_core::TokenId;
use kv_cpu::CpuBackend;

use crate::service::models::{Case, Generated, stories, tiny};

/// Tokens of the prompts: two groups, and small ones.
const N_PROMPT: usize = 600;

fn key() -> StoreKey {
    StoreKey::new(&[7; MIN_SECRET]).unwrap()
}

fn tiers(stores: Vec<Box<dyn GroupStore>>) -> PrefixTiers {
    let tier = |store| Tier::start(key(), vec![store], TierConfig::default()).unwrap();
    PrefixTiers {
        key: key(),
        tiers: stores.into_iter().map(tier).collect(),
        fetching: FetchPolicy::Always,
    }
}

fn directory(dir: &Path) -> PrefixTiers {
    let config = DirectoryConfig {
        dir: dir.to_owned(),
        max_bytes: 1 << 30,
    };
    tiers(vec![Box::new(DirectoryStore::open(config).unwrap())])
}

fn start(case: &Case, n_ctx: u32, prefix_tiers: PrefixTiers) -> Service<CpuBackend> {
    let engine = case.engine_with(&EngineConfig {
        n_ctx: Some(n_ctx),
        n_seqs: 12,
        n_active: Some(8),
        n_ubatch: 64,
        ..EngineConfig::default()
    });
    let extras = ServiceExtras {
        prefix_tiers: Some(prefix_tiers),
        ..ServiceExtras::default()
    };
    let config = ServiceConfig {
        max_running: Some(4),
        ..ServiceConfig::default()
    };
    Service::start_with(engine, &case.tokenizer, &config, extras).unwrap()
}

/// Prompts that share their first tokens with no other.
fn request(case: &Case, number: u64) -> TextRequest {
    let token = |at: usize| TokenId(3 + (at * at + 31 * number as usize * (at + 1)) as u32 % 490);
    let mut request = case.request(number);
    request.prompt = (0..N_PROMPT).map(token).collect();
    request
}

/// The text of a request, which is what it is alone.
fn serve(service: &Service<CpuBackend>, case: &Case, request: TextRequest) -> Usage {
    let wanted = case.alone(&request, 900);
    let end = service.submit(request).unwrap().finish().unwrap();
    let usage = end.usage;
    assert_eq!(Generated::from(end), wanted, "{}", case.name);
    usage
}

fn reused(usage: &Usage) -> usize {
    usage.reuse.unwrap().n_tokens
}

fn cases() -> Vec<Case> {
    vec![
        stories("stories-llama"),
        stories("stories-gemma3"),
        stories("stories-mamba"),
        tiny("jamba"),
    ]
}

/// Tokens that may be computed again: less than the smallest group, where there are such.
fn n_again(case: &Case) -> usize {
    match case.name {
        "stories-llama" => 16,
        _ => 1,
    }
}

/// Another service finds what one stored at its end, and the status says how much.
#[test]
fn what_was_cached_is_there_in_the_next_service() {
    for case in cases() {
        let dir = tempfile::tempdir().unwrap();
        let first = start(&case, 2000, directory(dir.path()));
        for number in 0..2 {
            assert_eq!(reused(&serve(&first, &case, request(&case, number))), 0);
        }
        let saved = first.publish_prefixes().unwrap();
        assert!(saved.n_prefixes >= 2 && saved.n_left_out == 0, "{saved:?}");
        first.stop().unwrap();
        let second = start(&case, 2000, directory(dir.path()));
        for number in 0..2 {
            let n_reused = reused(&serve(&second, &case, request(&case, number)));
            let least = N_PROMPT - n_again(&case);
            assert!(n_reused >= least, "{}: {n_reused}", case.name);
            // And once more of the memory.
            let usage = serve(&second, &case, request(&case, number));
            assert_eq!(reused(&usage), N_PROMPT - 1, "{}", case.name);
        }
        let ServiceStatus {
            counters, tiers, ..
        } = second.status();
        assert!(counters.n_restored_tokens as usize >= 2 * (N_PROMPT - 16));
        assert!(tiers.n_fetched > 0 && tiers.n_refused == 0, "{tiers:?}");
        // A prompt that is known nowhere says so.
        let usage = serve(&second, &case, request(&case, 9));
        assert_eq!(usage.reuse.unwrap().missed, Some(Missed::TierMiss));
    }
}

/// One service computes a prompt, and another one goes on with it: the first one says when it is
/// stored, while it computes others.
#[test]
fn a_prompt_is_computed_by_one_service_and_continued_by_another() {
    for case in cases() {
        let dir = tempfile::tempdir().unwrap();
        let first = start(&case, 3000, directory(dir.path()));
        let second = start(&case, 3000, directory(dir.path()));
        let others = [7, 8].map(|number| first.submit(request(&case, number)).unwrap());
        let wanted = request(&case, 1);
        let prefix = wanted.prefix;
        let prompt = wanted.prompt.clone();
        let mut only_prompt = request(&case, 1);
        only_prompt.options.n_predict = Some(1);
        first.submit(only_prompt).unwrap().finish().unwrap();
        let n_stored = first.store_prompt(prefix, prompt.clone()).unwrap().unwrap();
        assert!(
            n_stored >= N_PROMPT - n_again(&case),
            "{}: {n_stored}",
            case.name
        );
        let n_reused = reused(&serve(&second, &case, wanted));
        assert!(
            n_reused >= n_stored.min(N_PROMPT - 1),
            "{}: {n_reused}",
            case.name
        );
        for other in others {
            other.finish().unwrap();
        }
        // Of another tenant it has nothing.
        let foreign = PrefixUse::Within(Salt(99));
        assert_eq!(first.store_prompt(foreign, prompt).unwrap(), Some(0));
    }
    let case = stories("stories-llama");
    let service = case.service(12, 900);
    let prefix = PrefixUse::Within(Salt(0));
    assert_eq!(
        service.store_prompt(prefix, vec![TokenId(3)]).unwrap(),
        None
    );
}

/// Requests that come together wait for their fetches, in any order: more than the memory holds at
/// once, and some that are alike. (A prompt that the memory holds when it comes is not asked of the
/// store, so those that are alike have room for all.)
#[test]
fn many_requests_fetch_together() {
    let case = stories("stories-llama");
    let host = HostStore::new(1 << 30);
    let with_host = || tiers(vec![Box::new(host.clone())]);
    let first = start(&case, 2000, with_host());
    for number in 0..6 {
        serve(&first, &case, request(&case, number));
    }
    first.stop().unwrap();
    for (n_ctx, n_requests) in [(2000, 6), (9000, 12)] {
        let second = start(&case, n_ctx, with_host());
        let all = (0..n_requests).map(|number| request(&case, number % 6));
        let streams: Vec<_> = all.map(|request| second.submit(request).unwrap()).collect();
        for (number, stream) in (0..).zip(streams) {
            let end = stream.finish().unwrap();
            let reuse = end.usage.reuse.unwrap();
            assert!(reuse.n_tokens >= N_PROMPT - 16, "{number}: {reuse:?}");
            let wanted = case.alone(&request(&case, number % 6), 900);
            assert_eq!(Generated::from(end), wanted, "{number}");
        }
        second.stop().unwrap();
    }
}

/// Whole groups that hold the last token of a prompt are of no use to somebody who asks the same
/// again, who computes that token: small ones of the prompt are there, too.
#[test]
fn a_prompt_is_found_whose_answer_fills_its_group() {
    for case in cases() {
        let prompt_of = |n_prompt: usize| {
            let mut request = request(&case, 0);
            request.prompt.truncate(n_prompt);
            request.options.sampler.min_tokens = 16;
            request.options.n_predict = Some(20);
            request
        };
        for n_prompt in [2 * 256 - 8, 256] {
            let dir = tempfile::tempdir().unwrap();
            let first = start(&case, 2000, directory(dir.path()));
            let usage = serve(&first, &case, prompt_of(n_prompt));
            assert!(usage.n_tokens > 8, "{usage:?}");
            first.stop().unwrap();
            let second = start(&case, 2000, directory(dir.path()));
            let n_reused = reused(&serve(&second, &case, prompt_of(n_prompt)));
            let least = n_prompt - n_again(&case);
            assert!(n_reused >= least, "{}: {n_reused} of {n_prompt}", case.name);
            second.stop().unwrap();
        }
    }
}

/// In a memory for one and a half of them, prompts take turns: each comes back from the host.
#[test]
fn what_was_evicted_comes_back() {
    for case in cases() {
        let host = HostStore::new(1 << 30);
        let service = start(&case, 900, tiers(vec![Box::new(host)]));
        for turn in 0..3 {
            for number in 0..3 {
                let usage = serve(&service, &case, request(&case, number));
                // Windows and states of all of them have room.
                if turn > 0 {
                    let least = N_PROMPT - n_again(&case);
                    let n_reused = reused(&usage);
                    assert!(n_reused >= least, "{}: {n_reused}, {usage:?}", case.name);
                }
            }
        }
        let counters = service.counters();
        let is_full = case.name == "stories-llama";
        assert!(counters.n_restored_tokens > 0 || !is_full, "{counters:?}");
    }
}

/// Neither another salt nor another key finds anything.
#[test]
fn tenants_share_nothing() {
    let case = stories("stories-llama");
    let host = HostStore::new(1 << 30);
    let of_tenant = |salt: u64| TextRequest {
        prefix: PrefixUse::Within(Salt(salt)),
        ..request(&case, 1)
    };
    let first = start(&case, 2000, tiers(vec![Box::new(host.clone())]));
    serve(&first, &case, of_tenant(1));
    first.stop().unwrap();
    let second = start(&case, 2000, tiers(vec![Box::new(host.clone())]));
    assert_eq!(reused(&serve(&second, &case, of_tenant(2))), 0);
    assert!(reused(&serve(&second, &case, of_tenant(1))) >= N_PROMPT - 16);
    drop(second);
    let other = StoreKey::new(&[8; MIN_SECRET]).unwrap();
    let store: Box<dyn GroupStore> = Box::new(host);
    let tier = Tier::start(other.clone(), vec![store], TierConfig::default()).unwrap();
    let other = PrefixTiers {
        key: other,
        tiers: vec![tier],
        fetching: FetchPolicy::Always,
    };
    let third = start(&case, 2000, other);
    assert_eq!(reused(&serve(&third, &case, of_tenant(1))), 0);
}

/// Every group is damaged, in one place of it: it is counted, and its tokens are computed.
#[test]
fn damaged_groups_are_computed_again() {
    for case in [stories("stories-llama"), stories("stories-mamba")] {
        for at in [0, 70, 1000] {
            let dir = tempfile::tempdir().unwrap();
            let first = start(&case, 2000, directory(dir.path()));
            serve(&first, &case, request(&case, 3));
            first.stop().unwrap();
            let mut n_damaged = 0;
            for file in std::fs::read_dir(dir.path()).unwrap() {
                let path = file.unwrap().path();
                let mut bytes = std::fs::read(&path).unwrap();
                if let Some(byte) = bytes.get_mut(at) {
                    *byte ^= 4;
                    n_damaged += 1;
                    std::fs::write(&path, bytes).unwrap();
                }
            }
            assert!(n_damaged > 0);
            let second = start(&case, 2000, directory(dir.path()));
            assert_eq!(reused(&serve(&second, &case, request(&case, 3))), 0);
            assert!(second.status().tiers.n_refused > 0, "{}: {at}", case.name);
        }
    }
}

/// A store that never answers, or says that it does not work.
#[derive(Debug)]
struct BrokenTier {
    hangs: Option<Arc<HangingTier>>,
}

/// Until when it does not answer.
#[derive(Debug, Default)]
struct HangingTier {
    is_over: Mutex<bool>,
    end: Condvar,
}

impl BrokenTier {
    fn fail<T>(&self) -> Result<T, StoreError> {
        if let Some(hanging) = &self.hangs {
            let is_over = hanging.is_over.lock().unwrap();
            drop(
                hanging
                    .end
                    .wait_while(is_over, |is_over| !*is_over)
                    .unwrap(),
            );
        }
        let reason = "it is a test".to_owned();
        Err(StoreError::Unreachable { reason })
    }
}

impl GroupStore for BrokenTier {
    fn has(&mut self, _: &[GroupName]) -> Result<Vec<bool>, StoreError> {
        self.fail()
    }

    fn get(&mut self, _: &[GroupName]) -> Result<Vec<Option<Arc<[u8]>>>, StoreError> {
        self.fail()
    }

    fn put(&mut self, _: GroupName, _: &Arc<[u8]>) -> Result<Kept, StoreError> {
        self.fail()
    }

    fn evict(&mut self, _: GroupName) -> Result<(), StoreError> {
        self.fail()
    }
}

#[test]
fn a_store_that_is_down_costs_a_moment() {
    let case = stories("stories-llama");
    let hanging = Arc::new(HangingTier::default());
    for hangs in [None, Some(Arc::clone(&hanging))] {
        let is_hanging = hangs.is_some();
        let service = start(&case, 2000, tiers(vec![Box::new(BrokenTier { hangs })]));
        let usage = serve(&service, &case, request(&case, 1));
        assert_eq!(usage.reuse.unwrap().missed, Some(Missed::TierDown));
        assert!(usage.queued < Duration::from_secs(30), "{usage:?}");
        // It is left alone for a while, and what is in the memory is found.
        let usage = serve(&service, &case, request(&case, 1));
        assert_eq!(reused(&usage), N_PROMPT - 1);
        if is_hanging {
            *hanging.is_over.lock().unwrap() = true;
            hanging.end.notify_all();
        } else {
            assert!(service.status().tiers.n_down > 0);
        }
    }
}

/// Requests that are cancelled while their tokens are looked for or fetched leave nothing.
#[test]
fn cancelled_requests_fetch_nothing() {
    let case = stories("stories-llama");
    let host = HostStore::new(1 << 30);
    let service = start(&case, 2000, tiers(vec![Box::new(host.clone())]));
    for number in 0..3 {
        serve(&service, &case, request(&case, number));
    }
    service.stop().unwrap();
    let service = start(&case, 2000, tiers(vec![Box::new(host)]));
    for round in 0..20 {
        let streams = (0..3).map(|number| service.submit(request(&case, number)).unwrap());
        let streams: Vec<_> = streams.collect();
        if round % 2 == 0 {
            std::thread::yield_now();
        }
        drop(streams);
    }
    for number in 0..3 {
        assert!(reused(&serve(&service, &case, request(&case, number))) >= N_PROMPT - 16);
    }
}
