//! Memory of this machine, as the system reports it. Decides nothing.

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
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = n as f64;
    let mut unit = "bytes";
    for next in UNITS {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    if unit == "bytes" {
        format!("{n} bytes")
    } else {
        format!("{value:.2} {unit}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_readable() {
        assert_eq!(bytes(1023), "1023 bytes");
        assert_eq!(bytes(1536), "1.50 KiB");
        assert_eq!(bytes(3 << 30), "3.00 GiB");
    }

    #[test]
    fn the_machine_has_something() {
        assert!(own_memory().is_none_or(|bytes| bytes > 1 << 20));
        assert!(available_memory().is_none_or(|bytes| bytes > 1 << 20));
    }
}
