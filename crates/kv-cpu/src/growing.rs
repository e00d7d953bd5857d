//! [`Growing`]: memory that is written once, from its beginning to its end, and read as far as it is written.
//!
//! Invariant: bytes below [`Growing::written`] never change again, those above are seen by nobody but who writes them.
//! Knows nothing of what they mean.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use memmap2::{MmapMut, MmapRaw};

/// Memory in large pages where the system has them, taken from it as it is written.
#[derive(Debug)]
pub(crate) struct Growing {
    map: MmapRaw,
    written: AtomicUsize,
    /// Held by whoever writes.
    writing: Mutex<()>,
}

impl Growing {
    /// Room for so many bytes, or nothing where the system has no addresses for them.
    pub(crate) fn of(n_bytes: usize) -> Option<Self> {
        let map = MmapMut::map_anon(n_bytes).ok()?;
        #[cfg(target_os = "linux")]
        // Small pages do as well, only not as fast.
        map.advise(memmap2::Advice::HugePage).unwrap_or_default();
        Some(Self {
            map: map.into(),
            written: AtomicUsize::new(0),
            writing: Mutex::new(()),
        })
    }

    /// How many bytes are there to be read.
    pub(crate) fn written(&self) -> usize {
        self.written.load(Ordering::Acquire)
    }

    /// Some of the bytes, or nothing where not all of them are written yet.
    pub(crate) fn get(&self, range: Range<usize>) -> Option<&[u8]> {
        let len = range.end.checked_sub(range.start)?;
        (range.end <= self.written()).then(|| {
            // SAFETY: `start..end` is inside the map, below what is written: it was written before `written` was, which
            // was read acquiring what its store released, and nobody writes there again.
            unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(range.start), len) }
        })
    }

    /// Has the next `n` bytes written (zeros before, or what failed writing left); they are there to be read unless it fails.
    ///
    /// # Errors
    /// What `write` says. It is not called where there is no room for so many bytes, which changes nothing.
    pub(crate) fn append<E>(
        &self,
        n: usize,
        write: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let start = self.written();
        let end = start.saturating_add(n);
        if end > self.map.len() {
            return Ok(());
        }
        // SAFETY: inside the map, above what is read, and nobody else writes while `writing` is held.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().add(start), n) };
        write(bytes)?;
        self.written.store(end, Ordering::Release);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_written_is_read() {
        let Some(memory) = Growing::of(100) else {
            panic!("100 bytes");
        };
        assert_eq!(memory.get(0..0), Some(&[][..]));
        assert_eq!(memory.get(0..1), None);
        let fill = |with: u8| {
            move |to: &mut [u8]| -> Result<(), u8> {
                assert!(to.iter().all(|b| *b == 0));
                to.fill(with);
                Ok(())
            }
        };
        assert_eq!(memory.append(3, fill(1)), Ok(()));
        assert_eq!(memory.append(2, |_| Err(7)), Err(7));
        assert_eq!(memory.get(0..3), Some(&[1, 1, 1][..]));
        assert_eq!(memory.get(2..4), None);
        assert_eq!(memory.append(2, fill(2)), Ok(()));
        assert_eq!(memory.get(2..5), Some(&[1, 2, 2][..]));
        let (start, end) = (3, 2);
        assert_eq!(memory.get(start..end), None);
        assert_eq!(memory.append(96, fill(3)), Ok(()));
        assert_eq!((memory.written(), memory.get(5..6)), (5, None));
        assert_eq!(memory.append(95, fill(3)), Ok(()));
        assert_eq!(memory.get(99..100), Some(&[3][..]));
    }

    #[test]
    fn what_is_read_stays_while_more_is_written() {
        let Some(memory) = Growing::of(1 << 20) else {
            panic!("a MiB");
        };
        let step = 4096;
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut seen = 0;
                while seen < 1 << 20 {
                    let until = memory.written();
                    let bytes = memory.get(seen..until).unwrap_or_default();
                    let wanted = (seen..until).map(|at| (at / step) as u8 | 1);
                    assert!(bytes.iter().copied().eq(wanted));
                    seen = until;
                }
            });
            for n in 0..(1 << 20) / step {
                let done = memory.append(step, |to| -> Result<(), ()> {
                    to.fill(n as u8 | 1);
                    Ok(())
                });
                assert_eq!(done, Ok(()));
            }
            assert!(reader.join().is_ok());
        });
    }
}
