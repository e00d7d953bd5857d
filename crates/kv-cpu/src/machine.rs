//! Cores of this machine, and whether its memory has room.
//!
//! If the system does not report its memory, any amount is taken to fit; allocating it may then
//! fail. Knows nothing of weights.

use std::num::NonZeroUsize;

use kv_backend::DeviceMemory;
use sysinfo::System;

/// One part in this many of the available memory is left to other programs.
const RESERVED_PART: u64 = 8;

/// True if `n_bytes` more can be allocated without taking the memory of other programs.
pub(crate) fn has_room_for(n_bytes: usize) -> bool {
    DeviceMemory::of_host().is_none_or(|m| n_bytes as u64 <= m.free - m.free / RESERVED_PART)
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
        assert!(DeviceMemory::of_host().is_none() || !has_room_for(usize::MAX));
    }

    #[test]
    fn no_more_cores_than_the_process_may_use() {
        assert!(n_cores() <= std::thread::available_parallelism().unwrap());
    }
}
