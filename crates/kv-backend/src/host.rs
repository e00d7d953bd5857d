//! The memory of the host: what the machine has, and what the process's group may take. Decides
//! nothing.

use sysinfo::{CGroupLimits, ProcessRefreshKind, ProcessesToUpdate, System};

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
        // In a container the root of the groups is its own; `systemd-run` puts the process deeper.
        let groups = system.cgroup_limits().into_iter();
        let groups = groups.chain(limits_of_own_group(&mut system));
        Some(groups.fold(machine, |least, group| Self {
            total: least.total.min(group.total_memory),
            // Not the group's free memory: it counts file caches as used.
            free: least.free.min(group.total_memory.saturating_sub(group.rss)),
        }))
    }
}

/// `None` where the process is in no group, as on all systems but Linux.
fn limits_of_own_group(system: &mut System) -> Option<CGroupLimits> {
    let own = sysinfo::get_current_pid().ok()?;
    let asked = ProcessesToUpdate::Some(&[own]);
    system.refresh_processes_specifics(asked, false, ProcessRefreshKind::nothing());
    system.process(own)?.cgroup_limits()
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
