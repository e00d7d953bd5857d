//! Memory of this machine, as the system reports it. Decides nothing.

use kv_core::BinaryUnits;
use kv_core::backend::DeviceMemory;
use sysinfo::{ProcessRefreshKind, ProcessesToUpdate, System};

/// Bytes of memory that this process may still take, where the system reports them.
pub(crate) fn available_memory() -> Option<u64> {
    DeviceMemory::of_host().map(|memory| memory.free)
}

/// Bytes of memory that this process has now, where the system reports them.
pub(crate) fn own_memory() -> Option<u64> {
    let own = sysinfo::get_current_pid().ok()?;
    let mut system = System::new().ok()?;
    let memory = ProcessRefreshKind::nothing().with_memory();
    system.refresh_processes_specifics(ProcessesToUpdate::Some(&[own]), false, memory);
    system.process(own).map(|process| process.memory())
}

/// Formats a number of bytes in binary units.
pub(crate) fn bytes(n: u64) -> String {
    BinaryUnits(n).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_has_something() {
        assert!(own_memory().is_none_or(|bytes| bytes > 1 << 20));
        assert!(available_memory().is_none_or(|bytes| bytes > 1 << 20));
    }
}
