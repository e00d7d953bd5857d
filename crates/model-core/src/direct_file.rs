//! [`DirectFile`]: reads of a file past the system's cache.
//!
//! What is read goes from the disk to the buffer: nothing is copied, and no memory of other
//! programs is taken for the cache. Invariant: what is read is what the file has; where it cannot
//! be read like this, nothing is. Knows no formats.

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Such reads begin and end at multiples of this, in the file and in memory. Disks want 512 or
/// 4096.
const ALIGNMENT: usize = 4096;

/// A file that is open for direct reads.
pub(crate) struct DirectFile(File);

impl DirectFile {
    /// Opens a file that is open already once more; `None` where its file system has no direct
    /// reads, or its path has another file now.
    pub(crate) fn open(path: &Path, opened: &File) -> Option<Self> {
        let direct = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECT)
            .open(path)
            .ok()?;
        let (found, wanted) = (direct.metadata().ok()?, opened.metadata().ok()?);
        let is_same = (found.dev(), found.ino()) == (wanted.dev(), wanted.ino());
        is_same.then_some(Self(direct))
    }

    /// Reads a range to `buffer`, with what is around it, and returns where in it the range is.
    pub(crate) fn read(&self, range: Range<usize>, buffer: &mut Vec<u8>) -> Option<Range<usize>> {
        let first = range.start / ALIGNMENT * ALIGNMENT;
        if range.start > range.end {
            return None;
        }
        let wanted = range.end - first;
        let len = wanted.checked_next_multiple_of(ALIGNMENT)?;
        let most = len.checked_add(ALIGNMENT)?;
        if buffer.len() < most {
            buffer.resize(most, 0);
        }
        let skipped = buffer.as_ptr().align_offset(ALIGNMENT);
        let to = buffer.get_mut(skipped..skipped.checked_add(len)?)?;
        let mut n_read = 0;
        while n_read < wanted {
            match self
                .0
                .read_at(to.get_mut(n_read..)?, (first + n_read) as u64)
            {
                Ok(0) => return None,
                Ok(n) => n_read += n,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return None,
            }
        }
        let start = skipped + (range.start - first);
        Some(start..start + range.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_is_what_the_file_has() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bytes");
        let bytes: Vec<u8> = (0..50_001u32).map(|i| (i / 7) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let opened = File::open(&path).unwrap();
        let Some(direct) = DirectFile::open(&path, &opened) else {
            println!("SKIPPED: no direct reads here");
            return;
        };
        let mut buffer = Vec::new();
        for range in [
            0..1,
            4095..4097,
            5000..30_000,
            4096..8192,
            7..7,
            49_000..50_001,
        ] {
            let found = direct.read(range.clone(), &mut buffer).unwrap();
            assert_eq!(buffer[found], bytes[range]);
        }
        let (start, end) = (9, 3);
        for range in [50_000..50_002, 90_000..90_001, start..end, 0..usize::MAX] {
            assert_eq!(direct.read(range, &mut buffer), None);
        }
        // Another file at this path is not the one that is open.
        let other = folder.path().join("other");
        std::fs::write(&other, &bytes).unwrap();
        std::fs::rename(&other, &path).unwrap();
        assert!(DirectFile::open(&path, &opened).is_none());
        assert!(DirectFile::open(&folder.path().join("none"), &opened).is_none());
    }
}
