//! How much memory may be asked for: what the system says is there, and what it allows this process.
//!
//! Where it says nothing, there is always room: asking for it may fail then. Knows nothing of weights.

use std::fs;

/// Part of what is there that is left to others: an eighth.
const KEPT_FREE: u64 = 8;

/// Whether so many bytes can be taken without driving others out of memory.
pub(crate) fn has_room_for(n_bytes: usize) -> bool {
    available().is_none_or(|n| n_bytes as u64 <= n - n / KEPT_FREE)
}

/// Bytes that can be taken, file caches that can be dropped included; Linux says so.
fn available() -> Option<u64> {
    let read = |path: &str| fs::read_to_string(path).ok();
    let of_machine = available_in(&read("/proc/meminfo")?)?;
    let of_group = || {
        let number = |path| read(path)?.trim().parse::<u64>().ok();
        let limit = number("/sys/fs/cgroup/memory.max")?;
        let used = number("/sys/fs/cgroup/memory.current")?;
        let droppable = read("/sys/fs/cgroup/memory.stat").and_then(|stat| file_in(&stat));
        Some(limit.saturating_sub(used.saturating_sub(droppable.unwrap_or(0))))
    };
    Some(of_group().map_or(of_machine, |n| n.min(of_machine)))
}

/// `MemAvailable` of `/proc/meminfo`, which is in kibibytes.
fn available_in(info: &str) -> Option<u64> {
    let line = info.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    line.split_whitespace()
        .next()?
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
}

/// Bytes of cached files in a control group's `memory.stat`.
fn file_in(stat: &str) -> Option<u64> {
    let line = stat.lines().find_map(|l| l.strip_prefix("file "))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_says_is_read() {
        let info =
            "MemTotal:       24618064 kB\nMemFree:        1 kB\nMemAvailable:   23618064 kB\n";
        assert_eq!(available_in(info), Some(23_618_064 * 1024));
        assert_eq!(available_in("MemTotal: 3 kB\n"), None);
        assert_eq!(available_in("MemAvailable: many kB\n"), None);
        assert_eq!(file_in("anon 12\nfile 345\nfile_mapped 6\n"), Some(345));
        assert_eq!(file_in("anon 12\n"), None);
    }

    #[test]
    fn nobody_has_room_for_everything() {
        assert!(has_room_for(0));
        // A machine that does not say what it has is taken to have it.
        assert!(available().is_none() || !has_room_for(usize::MAX));
    }
}
