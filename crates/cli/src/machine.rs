//! Memory and threads of this machine, as the system reports them. Decides nothing.

use kv_backend::DeviceMemory;
use kv_core::BinaryUnits;
use sysinfo::{ProcessRefreshKind, ProcessesToUpdate, System};

use crate::failure::warn;

/// Bytes of memory that this process may still take, where the system reports them.
pub(crate) fn available_memory() -> Option<u64> {
    DeviceMemory::of_host().map(|memory| memory.free)
}

/// Bytes of memory that this process has now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OwnMemory {
    /// Its data.
    pub(crate) data: u64,
    /// Pages of files that it has read so far, its code among them. 0 where the system does not
    /// report them apart from data.
    pub(crate) files: u64,
}

/// What this process has now, where the system reports it.
pub(crate) fn own_memory() -> Option<OwnMemory> {
    if let Ok(status) = std::fs::read_to_string("/proc/self/status") {
        let of = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
            Some(kib * 1024)
        };
        if let (Some(data), Some(files)) = (of("RssAnon:"), of("RssFile:")) {
            return Some(OwnMemory { data, files });
        }
    }
    let own = sysinfo::get_current_pid().ok()?;
    let mut system = System::new().ok()?;
    let memory = ProcessRefreshKind::nothing().with_memory();
    system.refresh_processes_specifics(ProcessesToUpdate::Some(&[own]), false, memory);
    let process = system.process(own)?;
    Some(OwnMemory {
        data: process.memory(),
        files: 0,
    })
}

/// Formats a number of bytes in binary units.
pub(crate) fn bytes(n: u64) -> String {
    BinaryUnits(n).to_string()
}

/// The threads that were asked for. Warns of more than this machine runs at once: they wait for
/// each other.
pub(crate) fn threads(asked: Option<u16>) -> Option<u16> {
    let n_cpus = std::thread::available_parallelism().map_or(usize::MAX, usize::from);
    if let Some(n) = asked.filter(|&n| usize::from(n) > n_cpus) {
        warn(&format!(
            "-t {n}: this machine runs {n_cpus} threads at once, and more make each step slower"
        ));
    }
    asked
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_has_something() {
        assert!(own_memory().is_none_or(|own| own.data + own.files > 1 << 20));
        assert!(available_memory().is_none_or(|bytes| bytes > 1 << 20));
    }
}
