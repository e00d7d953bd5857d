//! How much memory may be asked for: what the system says is there, and what it allows this process.
//!
//! Where it says nothing, there is always room: asking for it may fail then. Knows nothing of weights.

use sysinfo::System;

/// Part of what is there that is left to others: an eighth.
const KEPT_FREE: u64 = 8;

/// Whether so many bytes can be taken without driving others out of memory.
pub(crate) fn has_room_for(n_bytes: usize) -> bool {
    available().is_none_or(|n| n_bytes as u64 <= n - n / KEPT_FREE)
}

/// Bytes that can be taken, file caches that can be dropped included.
fn available() -> Option<u64> {
    let mut system = System::new();
    system.refresh_memory();
    let of_machine = Some(system.available_memory()).filter(|n| *n > 0)?;
    let limits = system.cgroup_limits();
    // Not what is free in the group: caches of files count as used there.
    let of_group = limits.map(|l| l.total_memory.saturating_sub(l.rss));
    Some(of_group.map_or(of_machine, |n| n.min(of_machine)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_has_room_for_everything() {
        assert!(has_room_for(0));
        // A machine that does not say what it has is taken to have it.
        assert!(available().is_none_or(|n| n > 1 << 20));
        assert!(available().is_none() || !has_room_for(usize::MAX));
    }
}
