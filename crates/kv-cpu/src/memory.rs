//! How much memory the process may still allocate: what the system has available, and what its
//! cgroup allows.
//!
//! If the system reports neither, any amount is taken to fit; allocating it may then fail. Knows
//! nothing of weights.

use sysinfo::System;

/// One part in this many of the available memory is left to other programs.
const RESERVED_PART: u64 = 8;

/// Whether `n_bytes` more can be allocated without taking the memory of other programs.
pub(crate) fn has_room_for(n_bytes: usize) -> bool {
    available().is_none_or(|n| n_bytes as u64 <= n - n / RESERVED_PART)
}

/// Bytes that can be allocated, including file caches that the system can drop.
fn available() -> Option<u64> {
    let mut system = System::new();
    system.refresh_memory();
    let machine = Some(system.available_memory()).filter(|n| *n > 0)?;
    let limits = system.cgroup_limits();
    // Not the group's free memory: it counts file caches as used.
    let group = limits.map(|l| l.total_memory.saturating_sub(l.rss));
    Some(group.map_or(machine, |n| n.min(machine)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_machine_has_room_for_everything() {
        assert!(has_room_for(0));
        // A machine that does not report its memory is taken to have enough.
        assert!(available().is_none_or(|n| n > 1 << 20));
        assert!(available().is_none() || !has_room_for(usize::MAX));
    }
}
