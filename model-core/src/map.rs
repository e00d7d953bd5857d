//! [`map_file`]: the bytes of a file, mapped instead of read. Knows no format.

use std::fs::{self, File};
use std::io;
#[cfg(unix)]
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use kv_core::weights::{ByteOwner, SharedBytes};
use memmap2::Mmap;
#[cfg(unix)]
use memmap2::UncheckedAdvice;

/// Why a file is not mapped. Readers say it in errors of their own.
#[derive(Debug)]
pub(crate) enum MapError {
    /// What the system says.
    Io(io::Error),
    /// A directory or a device.
    NotAFile,
    /// No bytes, which no system maps.
    Empty,
}

impl From<io::Error> for MapError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Maps a file. It must not be changed while its bytes are in use; who hands out such bytes says so in
/// its documentation.
pub(crate) fn map_file(path: &Path) -> Result<SharedBytes, MapError> {
    // Asked before opening: opening a pipe would wait for somebody to write into it.
    let found = fs::metadata(path)?;
    if !found.is_file() {
        return Err(MapError::NotAFile);
    }
    if found.len() == 0 {
        return Err(MapError::Empty);
    }
    let file = File::open(path)?;
    // SAFETY: private to this process, never written to, and read as plain bytes, of which every value
    // is valid. That nobody else changes or shortens the file meanwhile, no reader of a map can see to
    // on any of our systems: the documentation of those who open files forbids it.
    let map = unsafe { Mmap::map(&file) }?;
    Ok(SharedBytes::new(Arc::new(Mapped(map))))
}

/// A mapped file.
struct Mapped(Mmap);

impl ByteOwner for Mapped {
    fn bytes(&self) -> &[u8] {
        &self.0
    }

    #[cfg(unix)]
    fn not_needed_soon(&self, range: Range<usize>) {
        // SAFETY: the map is of a file, never written to: what is dropped is read again from the file, or
        // from what the system keeps of it.
        let given = unsafe {
            self.0
                .unchecked_advise_range(UncheckedAdvice::DontNeed, range.start, range.len())
        };
        // It stays in memory then, which changes nothing but how much is used.
        given.unwrap_or_default();
    }
}
