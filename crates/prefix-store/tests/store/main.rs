//! Stores and tiers from outside: against a naive map, with disks that fill and processes that die
//! at each step, slow and broken stores, and real servers.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a panic is how a test fails

mod directory;
mod faults;
mod model;
mod pins;
#[cfg(feature = "tier")]
mod remote;
mod tiers;

use std::sync::Arc;
use std::time::{Duration, Instant};

use cellar_prefix_store::{
    Group, GroupKind, GroupName, GroupNamer, Identity, Job, JobId, MIN_SECRET, Outcome, StoreKey,
    Tier,
};

/// More than any of these tests takes.
const LONG: Duration = Duration::from_secs(60);

fn key(byte: u8) -> StoreKey {
    StoreKey::new(&[byte; MIN_SECRET]).unwrap()
}

fn name(n: u8) -> GroupName {
    GroupName([n; 32])
}

fn frame(name: GroupName, payload: &[u8]) -> Arc<[u8]> {
    Group::seal(&key(1), name, payload).unwrap().frame().clone()
}

/// The names of the groups of a text.
fn names_of(key: &StoreKey, salt: u64, tokens: &[u32]) -> Vec<GroupName> {
    let identity = Identity {
        version: "1",
        backend: "cpu",
        fingerprint: b"model",
        kv_types: "f16",
        adapters: "",
    };
    GroupNamer::new(key, &identity, salt).names(tokens, GroupKind::Rows)
}

fn in_time() -> Instant {
    Instant::now() + LONG
}

/// What a tier has of these groups.
fn fetch(tier: &Tier, id: u64, names: &[GroupName]) -> Vec<Vec<u8>> {
    let id = JobId(id);
    let names = names.to_vec();
    let deadline = in_time();
    tier.submit(Job::Get {
        id,
        names,
        deadline,
    })
    .unwrap();
    match tier.next_within(LONG) {
        Some(Outcome::Got { id: of, groups }) if of == id => {
            let groups = groups.iter();
            groups.map(|group| group.payload().to_vec()).collect()
        }
        other => panic!("{other:?}"),
    }
}

fn store(tier: &Tier, names: &[GroupName], payload: impl Fn(usize) -> Vec<u8>) {
    for (at, name) in names.iter().enumerate() {
        tier.submit(Job::Put {
            name: *name,
            payload: payload(at).into(),
        })
        .unwrap();
    }
    assert!(tier.flush(LONG));
}

/// Numbers that look random, from a seed: the same on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        // A linear congruential generator's upper bits.
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) % n
    }
}
