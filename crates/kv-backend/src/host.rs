//! The memory of the host: what the machine has, and what the process's group may take. Decides
//! nothing.

use sysinfo::System;

use crate::DeviceMemory;

impl DeviceMemory {
    /// That of this machine, as far as this process may take it; file caches that the system can
    /// drop count as free. `None` where the system does not report it.
    pub fn of_host() -> Option<Self> {
        let mut system = System::new().ok()?;
        system.refresh_memory();
        let machine = Self {
            total: system.total_memory(),
            free: Some(system.available_memory()).filter(|n| *n > 0)?,
        };
        let Some(group) = system.cgroup_limits() else {
            return Some(machine);
        };
        // Not the group's free memory: it counts file caches as used.
        let free = group.total_memory.saturating_sub(group.rss);
        Some(Self {
            total: machine.total.min(group.total_memory),
            free: machine.free.min(free),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_has_memory_and_not_more_free_than_it_has() {
        // A machine that does not report its memory is taken to have enough.
        let host = DeviceMemory::of_host();
        assert!(host.is_none_or(|m| m.free > 1 << 20 && m.free <= m.total));
    }
}
