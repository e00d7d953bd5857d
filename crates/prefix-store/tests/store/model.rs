//! Random operations on stores, compared with a map that forgets nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use cellar_prefix_store::{
    DirectoryConfig, DirectoryStore, GroupName, GroupStore, HostStore, StoreError,
};

use crate::{Random, frame, name};

/// Each answer of a store is what was put under that name, or nothing; what it keeps is within its
/// budget; a group that was put and evicted by nobody is there while all groups fit.
fn agrees_with_a_map(mut store: impl GroupStore, bytes: impl Fn() -> u64, budget: u64, seed: u64) {
    let mut random = Random(seed);
    let mut known: BTreeMap<GroupName, Arc<[u8]>> = BTreeMap::new();
    let mut all_fit = true;
    for step in 0..600 {
        let name = name(random.below(24) as u8);
        let at = format!("seed {seed}, step {step}");
        match random.below(8) {
            0..4 => {
                let payload = vec![name.0[0]; 10 * (1 + usize::from(name.0[0]))];
                let frame = frame(name, &payload);
                match store.put(name, &frame) {
                    Ok(_) => {
                        known.insert(name, frame);
                    }
                    Err(StoreError::TooLarge { n_bytes, .. }) => assert!(n_bytes > budget),
                    Err(error) => panic!("{at}: {error}"),
                }
            }
            4..7 => {
                let others = [name, crate::name(random.below(24) as u8)];
                let has = store.has(&others).unwrap();
                let got = store.get(&others).unwrap();
                for ((other, has), got) in others.iter().zip(has).zip(got) {
                    assert!(!has || got.is_some(), "{at}");
                    if let Some(got) = got {
                        assert_eq!(Some(&got), known.get(other), "{at}");
                    } else {
                        let is_lost = all_fit && known.contains_key(other);
                        assert!(!is_lost, "{at}: {other} is lost");
                    }
                }
            }
            _ => {
                store.evict(name).unwrap();
                known.remove(&name);
                assert_eq!(store.get(&[name]).unwrap(), [None], "{at}");
            }
        }
        let all: u64 = known.values().map(|frame| frame.len() as u64).sum();
        all_fit &= all <= budget;
        assert!(bytes() <= budget, "{at}: {} bytes", bytes());
    }
}

#[test]
fn a_memory_agrees_with_a_map() {
    for seed in 0..20 {
        for budget in [0, 150, 1000, 1 << 20] {
            // The store's own count is tested with it; its budget is not seen from outside.
            agrees_with_a_map(HostStore::new(budget), || 0, budget, seed);
        }
    }
}

#[test]
fn a_directory_agrees_with_a_map() {
    for seed in 0..4 {
        for max_bytes in [0, 150, 1000, 1 << 20] {
            let dir = tempfile::tempdir().unwrap();
            let dir = dir.path().join("store");
            let store = DirectoryStore::open(DirectoryConfig {
                dir: dir.clone(),
                max_bytes,
            });
            let bytes = || {
                let files = std::fs::read_dir(&dir).unwrap();
                files
                    .map(|file| file.unwrap().metadata().unwrap().len())
                    .sum()
            };
            agrees_with_a_map(store.unwrap(), bytes, max_bytes, seed);
        }
    }
}
