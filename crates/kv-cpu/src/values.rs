//! [`Buf`]: where values are; [`Frame`]: the buffers of one run; [`SharedValues`]: a buffer that
//! the tasks of one job fill, each its own range.
//!
//! Invariant: nothing here checks that ranges are disjoint, everything checks that they are inside.

use std::marker::PhantomData;
use std::ops::Range;

use kv_graph::RowCount;

/// The memory that a buffer is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BufLoc {
    /// The arena, from this value on.
    Arena(usize),
    /// The caller's buffer for this output.
    Output(usize),
    /// The caller's embedding rows.
    Embeddings,
}

/// `rows` rows of `width` values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Buf {
    pub(crate) loc: BufLoc,
    /// The things that there are as many rows of in a run.
    pub(crate) count: RowCount,
    /// In the present run; there is memory for those of the graph.
    pub(crate) rows: usize,
    pub(crate) width: usize,
}

impl Buf {
    /// No rows.
    pub(crate) const EMPTY: Self = Self {
        loc: BufLoc::Arena(0),
        count: RowCount::Tokens,
        rows: 0,
        width: 0,
    };

    pub(crate) fn len(&self) -> usize {
        self.rows * self.width
    }
}

/// Values that several threads write, each its own range.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedValues<'a, T = f32> {
    start: *mut T,
    len: usize,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: plain memory borrowed for `'a`; every access is an unsafe call whose caller promises that
// no two threads use one range.
unsafe impl<T: Send> Send for SharedValues<'_, T> {}
// SAFETY: see `Send`.
unsafe impl<T: Send> Sync for SharedValues<'_, T> {}

impl<'a, T> SharedValues<'a, T> {
    pub(crate) fn new(values: &'a mut [T]) -> Self {
        Self {
            start: values.as_mut_ptr(),
            len: values.len(),
            owner: PhantomData,
        }
    }

    /// No values, of any lifetime.
    pub(crate) fn emptied<'b>(self) -> SharedValues<'b, T> {
        SharedValues {
            start: self.start,
            len: 0,
            owner: PhantomData,
        }
    }

    pub(crate) fn start(&self) -> *mut T {
        self.start
    }

    /// The values in `range`; what lies outside is left out.
    ///
    /// # Safety
    /// While the result is in use, no other thread reads or writes this range.
    pub(crate) unsafe fn range(&self, range: Range<usize>) -> &'a mut [T] {
        debug_assert!(range.start <= range.end && range.end <= self.len);
        let end = range.end.min(self.len);
        let start = range.start.min(end);
        // SAFETY: inside the borrowed buffer, and the caller promises that it is the only access.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), end - start) }
    }
}

/// The buffers of one run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frame<'a> {
    pub(crate) arena: SharedValues<'a>,
    pub(crate) outputs: &'a [SharedValues<'a>],
    pub(crate) embeddings: &'a [f32],
}

impl<'a> Frame<'a> {
    /// The values of a buffer, for reading.
    ///
    /// # Safety
    /// No thread writes this buffer while the result is in use.
    pub(crate) unsafe fn read(&self, buf: Buf) -> &'a [f32] {
        match buf.loc {
            BufLoc::Embeddings => &self.embeddings[..buf.len()],
            _ => {
                let values = self.write(buf);
                // SAFETY: inside the borrowed buffer, and the caller promises that none writes.
                unsafe { std::slice::from_raw_parts(values.start, values.len) }
            }
        }
    }

    /// A buffer that tasks write; empty for the caller's embeddings, which no step writes.
    pub(crate) fn write(&self, buf: Buf) -> SharedValues<'a> {
        let (whole, start) = match buf.loc {
            BufLoc::Arena(start) => (self.arena, start),
            BufLoc::Output(at) => (self.outputs[at], 0),
            BufLoc::Embeddings => (SharedValues::new(&mut []), 0),
        };
        assert!(
            buf.loc == BufLoc::Embeddings || start + buf.len() <= whole.len,
            "a buffer of {} values at {start} in {} values",
            buf.len(),
            whole.len
        );
        let len = buf.len().min(whole.len);
        // SAFETY: inside `whole` (asserted above).
        let start = unsafe { whole.start.add(start.min(whole.len)) };
        SharedValues {
            start,
            len,
            owner: PhantomData,
        }
    }
}
