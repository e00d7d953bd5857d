//! [`map_file`]: the bytes of a file, mapped instead of read. Knows no format.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::Arc;

use kv_core::weights::{ByteOwner, SharedBytes};
use memmap2::Mmap;

/// Why a file is not mapped. Callers convert it into their own errors.
#[derive(Debug)]
pub(crate) enum MapError {
    /// The system's error.
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

/// Maps a file. It must not be changed while its bytes are in use; functions that return such bytes
/// document that.
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
    // SAFETY: private to this process, never written to, and read as plain bytes, of which every
    // value is valid. No reader of a map can keep other processes from changing or shortening
    // the file meanwhile: the documentation of the functions that open files forbids it.
    let map = unsafe { Mmap::map(&file) }?;
    Ok(SharedBytes::new(Arc::new(Mapped { map, file })))
}

/// A mapped file.
struct Mapped {
    map: Mmap,
    file: File,
}

impl ByteOwner for Mapped {
    fn bytes(&self) -> &[u8] {
        &self.map
    }

    fn copy(&self, start: usize, to: &mut [u8]) -> bool {
        read_at(&self.file, start as u64, to).is_ok()
    }

    /// Only where the system has a call for it.
    #[cfg(unix)]
    fn release(&self, bytes: std::ops::Range<usize>) {
        let Some(len) = bytes.end.checked_sub(bytes.start) else {
            return;
        };
        if bytes.end <= self.map.len() {
            // SAFETY: pages of a file that are never written to here have the same bytes when they
            // come back. That some stay is no loss but of memory.
            let advised = unsafe {
                let advice = memmap2::UncheckedAdvice::DontNeed;
                self.map.unchecked_advise_range(advice, bytes.start, len)
            };
            advised.unwrap_or_default();
        }
    }
}

/// Reads so many bytes from there on, without moving where the file is read from otherwise.
#[cfg(unix)]
fn read_at(file: &File, start: u64, to: &mut [u8]) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, to, start)
}

/// The same where each read returns how much it read.
#[cfg(windows)]
fn read_at(file: &File, mut start: u64, mut to: &mut [u8]) -> io::Result<()> {
    while !to.is_empty() {
        let n = std::os::windows::fs::FileExt::seek_read(file, to, start)?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        (start, to) = (start + n as u64, &mut to[n..]);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_released_is_read_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("bytes");
        let bytes: Vec<u8> = (0..100_000u32).map(|i| (i / 3) as u8).collect();
        fs::write(&path, &bytes).unwrap();
        let mapped = map_file(&path).unwrap();
        let part = mapped.slice(5_000..90_000).unwrap();
        assert_eq!(mapped[..], bytes[..]);
        let (from, to) = (9, 3);
        for range in [0..85_000, 1..2, 4_000..4_000, 70_000..900_000, from..to] {
            part.release(range);
            assert_eq!(part[..], bytes[5_000..90_000]);
        }
        let mut copy = vec![0; 1_000];
        assert!(part.copy(84_000, &mut copy));
        assert_eq!(copy[..], bytes[89_000..90_000]);
        assert!(!part.copy(84_001, &mut copy));
        assert_eq!(mapped[..], bytes[..]);
    }
}
