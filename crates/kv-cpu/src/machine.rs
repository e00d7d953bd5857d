//! Cores and memory of this machine: what the system has, and what the process's cgroup allows.
//!
//! If the system does not report its memory, any amount is taken to fit; allocating it may then
//! fail. Knows nothing of weights.

use std::num::NonZeroUsize;

use kv_core::backend::DeviceMemory;
use sysinfo::System;

/// One part in this many of the available memory is left to other programs.
const RESERVED_PART: u64 = 8;

/// Whether `n_bytes` more can be allocated without taking the memory of other programs.
pub(crate) fn has_room_for(n_bytes: usize) -> bool {
    memory().is_none_or(|m| n_bytes as u64 <= m.free - m.free / RESERVED_PART)
}

/// What this process may allocate; file caches that the system can drop count as free.
pub(crate) fn memory() -> Option<DeviceMemory> {
    let mut system = System::new().ok()?;
    system.refresh_memory();
    let machine = DeviceMemory {
        total: system.total_memory(),
        free: Some(system.available_memory()).filter(|n| *n > 0)?,
    };
    let Some(group) = system.cgroup_limits() else {
        return Some(machine);
    };
    // Not the group's free memory: it counts file caches as used.
    let free = group.total_memory.saturating_sub(group.rss);
    Some(DeviceMemory {
        total: machine.total.min(group.total_memory),
        free: machine.free.min(free),
    })
}

/// Physical cores that this process may use.
pub(crate) fn n_cores() -> NonZeroUsize {
    let allowed = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let physical = System::physical_core_count()
        .ok()
        .and_then(NonZeroUsize::new);
    physical.map_or(allowed, |physical| physical.min(allowed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_machine_has_room_for_everything() {
        assert!(has_room_for(0));
        // A machine that does not report its memory is taken to have enough.
        assert!(memory().is_none_or(|m| m.free > 1 << 20 && m.free <= m.total));
        assert!(memory().is_none() || !has_room_for(usize::MAX));
    }

    #[test]
    fn no_more_cores_than_the_process_may_use() {
        assert!(n_cores() <= std::thread::available_parallelism().unwrap());
    }
}
