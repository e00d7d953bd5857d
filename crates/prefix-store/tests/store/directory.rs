//! A directory that is shared, full, hostile, or left by a process that died.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use cellar_prefix_store::{
    DirectoryConfig, DirectoryStore, GroupStore, Kept, SealedPayload, StoreError,
};

use crate::{frame, key, name};

fn open(dir: &Path, max_bytes: u64) -> DirectoryStore {
    let dir = dir.to_owned();
    DirectoryStore::open(DirectoryConfig { dir, max_bytes }).unwrap()
}

fn path(dir: &Path, n: u8) -> PathBuf {
    dir.join(format!("{}.group", name(n)))
}

fn has(store: &mut impl GroupStore, n: u8) -> bool {
    store.get(&[name(n)]).unwrap()[0].is_some()
}

#[test]
fn groups_outlive_the_process_and_meet_in_another() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("new/store");
    let mut first = open(&dir, 10_000);
    let mut second = open(&dir, 10_000);
    assert_eq!(
        first.put(name(1), &frame(name(1), b"one")).unwrap(),
        Kept::New
    );
    // Another process finds it at once, and does not write it again.
    let found = second.get(&[name(1), name(2)]).unwrap();
    assert_eq!(found, [Some(frame(name(1), b"one")), None]);
    assert_eq!(
        second.put(name(1), &frame(name(1), b"one")).unwrap(),
        Kept::Known
    );
    drop((first, second));
    let mut third = open(&dir, 10_000);
    assert!(has(&mut third, 1));
    assert_eq!(third.n_bytes(), frame(name(1), b"one").len() as u64);
}

#[test]
fn the_budget_is_that_of_all_processes() {
    let dir = tempfile::tempdir().unwrap();
    let one = frame(name(0), &[0; 900]).len() as u64;
    let mut stores = [open(dir.path(), 8 * one), open(dir.path(), 8 * one)];
    for n in 0..40_u8 {
        let store = &mut stores[usize::from(n % 2)];
        store.put(name(n), &frame(name(n), &[n; 900])).unwrap();
        let groups = fs::read_dir(dir.path()).unwrap().flatten();
        let bytes: u64 = groups.map(|file| file.metadata().unwrap().len()).sum();
        // Each counts what the other wrote when it looks next: at most another budget.
        assert!(bytes <= 16 * one, "{bytes} bytes after {n}");
    }
    drop(stores);
    // A smaller budget holds from the start on.
    let store = open(dir.path(), 3 * one);
    assert!(store.n_bytes() <= 3 * one);
}

#[test]
fn groups_go_by_their_last_use_whatever_clocks_do() {
    let dir = tempfile::tempdir().unwrap();
    let one = frame(name(0), &[0; 100]).len() as u64;
    let mut store = open(dir.path(), 100 * one);
    for n in 0..6 {
        store.put(name(n), &frame(name(n), &[n; 100])).unwrap();
    }
    let touch = |n: u8, at: SystemTime| {
        let file = fs::File::options().write(true).open(path(dir.path(), n));
        file.unwrap().set_modified(at).unwrap();
    };
    // As if the clock had been in 1970, in 2200, and right.
    let epoch = SystemTime::UNIX_EPOCH;
    touch(0, epoch);
    touch(1, epoch + Duration::from_secs(7_258_118_400));
    touch(2, epoch + Duration::from_secs(1));
    let mut store = open(dir.path(), 4 * one);
    let left = [0, 1, 2, 3, 4, 5].map(|n| has(&mut store, n));
    assert_eq!(left, [false, true, false, false, true, true]);
    for n in 6..60 {
        store.put(name(n), &frame(name(n), &[n; 100])).unwrap();
        assert!(has(&mut store, n));
    }
}

/// The parts of a dead process go; those of a live one, and what is no part, stay.
#[test]
fn what_a_dead_process_left_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let part = |writer: &str| dir.path().join(format!("{}.{writer}.part", name(1)));
    let process = std::process::id();
    let dead = [
        part("1-0"),
        part(&format!("{process}-0")),
        part(&format!("{process}-1")),
    ];
    let mut others = ["x-0", "1", "-0", "1-"].map(part).to_vec();
    others.push(dir.path().join("notes.1-0.part"));
    for file in dead.iter().chain(&others) {
        fs::write(file, "left").unwrap();
    }
    let live = part("2-7");
    let locked = fs::File::create(&live).unwrap();
    locked.lock().unwrap();
    let mut store = open(dir.path(), 10_000);
    assert!(dead.iter().all(|file| !file.exists()));
    assert!(others.iter().all(|file| file.exists()) && live.exists());
    store.put(name(1), &frame(name(1), b"one")).unwrap();
    assert!(has(&mut store, 1));
}

#[cfg(unix)]
#[test]
fn hostile_files_are_neither_read_nor_removed() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let dir = tempfile::tempdir().unwrap();
    let outside = dir.path().join("outside");
    fs::write(&outside, frame(name(1), b"secret")).unwrap();
    let dir = dir.path().join("store");
    let mut store = open(&dir, 10_000);
    // A link to a file and one to itself, a directory, a pipe, and a file as large as no group.
    symlink(&outside, path(&dir, 1)).unwrap();
    symlink(path(&dir, 2), path(&dir, 2)).unwrap();
    fs::create_dir(path(&dir, 3)).unwrap();
    let made = std::process::Command::new("mkfifo")
        .arg(path(&dir, 4))
        .status();
    assert!(made.unwrap().success());
    let huge = fs::File::create(path(&dir, 5)).unwrap();
    huge.set_len(1 << 40).unwrap();
    // A part that is a link: its target is not removed either.
    symlink(&outside, dir.join(format!("{}.1-0.part", name(6)))).unwrap();
    for n in 1..=5 {
        assert!(!has(&mut store, n), "{n}");
    }
    let mut store = open(&dir, 10_000);
    assert_eq!(store.n_bytes(), 0);
    for n in 1..=5 {
        assert!(!has(&mut store, n), "{n}");
    }
    assert!(outside.exists());
    // A link in the way of a group is replaced by it.
    store.put(name(1), &frame(name(1), b"own")).unwrap();
    assert_eq!(
        store.get(&[name(1)]).unwrap(),
        [Some(frame(name(1), b"own"))]
    );
    assert_eq!(fs::read(&outside).unwrap(), &frame(name(1), b"secret")[..]);

    // A directory in which others may write, and a lock that is a link.
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
    let config = DirectoryConfig {
        dir: dir.clone(),
        max_bytes: 10_000,
    };
    let refused = DirectoryStore::open(config.clone()).unwrap_err();
    assert!(matches!(refused, StoreError::Unsafe { .. }), "{refused}");
    assert!(refused.to_string().contains("chmod go-w"), "{refused}");
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o700)).unwrap();
    symlink(&outside, dir.join("store.lock")).unwrap();
    let mut store = DirectoryStore::open(config.clone()).unwrap();
    store
        .put(name(7), &frame(name(7), &[7; 9_900]))
        .unwrap_err();
    // So is one that is needed at the start: there is too much.
    let config = DirectoryConfig {
        max_bytes: 10,
        ..config
    };
    assert!(DirectoryStore::open(config).is_err());
}

#[cfg(unix)]
#[test]
fn others_cannot_read_groups() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("store");
    let mut store = open(&dir, 10_000);
    store.put(name(1), &frame(name(1), b"one")).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!(mode(&dir), 0o700);
    assert_eq!(mode(&path(&dir, 1)), 0o600);
}

fn pin(store: &mut DirectoryStore, n: u8, payload: &[u8]) -> Result<(), StoreError> {
    let sealed = SealedPayload::new(&key(1), name(n), payload).unwrap();
    store.pin(name(n), &sealed)
}

/// A pinned group is its handle's, counts in the budget of all, and ends with the handle.
#[test]
fn pinned_groups_stay_and_others_go_for_them() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let one = frame(name(0), &[0; 900]).len() as u64;
    let mut store = open(dir, 4 * one);
    for n in 0..4 {
        store.put(name(n), &frame(name(n), &[n; 900])).unwrap();
    }
    for n in 10..13 {
        pin(&mut store, n, &[n; 900]).unwrap();
        assert!(store.n_bytes() <= 4 * one, "after {n}");
    }
    // At most one group has room next to them; new ones go for one another, never for a pin.
    for n in 20..30 {
        store.put(name(n), &frame(name(n), &[n; 900])).unwrap();
    }
    let pinned = [10, 11, 12].map(name);
    let found = store.get(&pinned).unwrap();
    let expected = [10, 11, 12].map(|n| Some(frame(name(n), &[n; 900])));
    assert_eq!(found, expected);
    assert_eq!(store.has(&pinned).unwrap(), [true; 3]);
    let bytes = || -> u64 {
        let files = fs::read_dir(dir).unwrap().flatten();
        files.map(|file| file.metadata().unwrap().len()).sum()
    };
    assert_eq!(bytes(), 4 * one);
    // Where pins leave no room, a group is not kept, nor is another pin; the pins stay.
    pin(&mut store, 13, &[13; 900]).unwrap();
    let refused = store.put(name(5), &frame(name(5), &[5; 900])).unwrap_err();
    assert!(matches!(refused, StoreError::Full), "{refused}");
    let refused = pin(&mut store, 14, &[14; 900]).unwrap_err();
    assert!(matches!(refused, StoreError::Full), "{refused}");
    // Another process finds none of them, removes none, and counts them all.
    let mut other = open(dir, 4 * one);
    assert_eq!(other.has(&pinned).unwrap(), [false; 3]);
    assert_eq!(other.n_bytes(), 4 * one);
    // One that is evicted makes room at once.
    store.evict(name(10)).unwrap();
    store.evict(name(10)).unwrap();
    assert_eq!(store.has(&[name(10), name(11)]).unwrap(), [false, true]);
    other.put(name(6), &frame(name(6), &[6; 900])).unwrap();
    drop(store);
    assert_eq!(bytes(), one, "pins end with their handle");
    assert!(has(&mut other, 6));
}

/// Pins alone leave nothing in the directory, not even a lock.
#[test]
fn a_directory_of_pins_is_empty_in_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = open(dir.path(), u64::MAX);
    pin(&mut store, 1, &[1; 100]).unwrap();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    // Also one that is open is read: whatever became of its name.
    let file = fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap();
    fs::rename(file.path(), dir.path().join("other")).unwrap();
    assert_eq!(
        store.get(&[name(1)]).unwrap(),
        [Some(frame(name(1), &[1; 100]))]
    );
    fs::rename(dir.path().join("other"), file.path()).unwrap();
    drop(store);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}
