//! [`RowReader`]: reads bytes of weights that are looked at once.

use std::ops::Range;

use kv_graph::weights::SharedBytes;

/// The use of the system's cache of files for reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum FileCache {
    /// The system keeps them as long as it has memory for that.
    #[default]
    Used,
    /// They are read past it, where the file's system can do that: what it keeps takes memory, and
    /// finding that memory takes time.
    Passed,
}

/// Reads bytes to memory that it uses again.
#[derive(Debug, Default)]
pub(crate) struct RowReader {
    pub(crate) cache: FileCache,
    buffer: Vec<u8>,
}

impl RowReader {
    /// These bytes, where they can be read.
    pub(crate) fn read(&mut self, bytes: &SharedBytes, range: Range<usize>) -> Option<&[u8]> {
        match self.cache {
            FileCache::Passed => bytes.read_once(range, &mut self.buffer),
            FileCache::Used => {
                self.buffer.resize(range.len(), 0);
                bytes.copy(range.start, &mut self.buffer).then_some(())?;
                Some(&self.buffer)
            }
        }
    }

    /// The same to where they stay.
    pub(crate) fn read_to(
        &mut self,
        bytes: &SharedBytes,
        start: usize,
        to: &mut [u8],
    ) -> Option<()> {
        if self.cache == FileCache::Used {
            return bytes.copy(start, to).then_some(());
        }
        let found = self.read(bytes, start..start.checked_add(to.len())?)?;
        to.copy_from_slice(found);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_read_the_same() {
        let bytes: SharedBytes = (0..100u8).collect::<Vec<_>>().into();
        for cache in [FileCache::Used, FileCache::Passed] {
            let mut reader = RowReader {
                cache,
                ..RowReader::default()
            };
            let mut to = [0; 20];
            for start in [70, 0, 80] {
                let wanted = &bytes[start..start + 20];
                assert_eq!(reader.read(&bytes, start..start + 20), Some(wanted));
                assert_eq!(reader.read_to(&bytes, start, &mut to), Some(()));
                assert_eq!(to, wanted);
            }
            assert_eq!(reader.read(&bytes, 90..101), None);
            assert_eq!(reader.read_to(&bytes, 81, &mut to), None);
        }
    }
}
