//! Free disk space.

use std::path::Path;

/// Bytes that this user can still write to the file system of `path`, or of the nearest directory
/// above it that exists; `None` where the system does not say.
#[cfg(unix)]
pub(crate) fn free_bytes(path: &Path) -> Option<u64> {
    let existing = path.ancestors().find(|dir| dir.exists())?;
    let stat = rustix::fs::statvfs(existing).ok()?;
    stat.f_bavail.checked_mul(stat.f_frsize)
}

/// Nothing is known about other systems.
#[cfg(not(unix))]
pub(crate) fn free_bytes(_path: &Path) -> Option<u64> {
    None
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_does_not_exist_yet_is_where_it_will_be() {
        let dir = tempfile::tempdir().unwrap();
        let free = free_bytes(&dir.path().join("not/there/yet")).unwrap();
        assert!(free > 0);
    }
}
