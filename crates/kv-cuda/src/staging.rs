//! [`Staging`]: pinned memory of the host, through which bytes go to the device and come back.
//!
//! Invariant: the bytes of a slot stay as they are until the device has fetched them, so that the
//! caller's are free as soon as [`Staging::write`] returns. Nobody who writes waits for one who
//! reads.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdeviceptr};
use kv_backend::BackendError;

use crate::context::Context;
use crate::driver::failed;

/// Bytes of a slot.
const SLOT: usize = 4 << 20;
/// Slots for writing: one is filled while the device fetches from the others.
const N_SLOTS: usize = 4;
/// The alignment of writes in a slot, in bytes.
const ALIGN: usize = 64;

/// Pinned memory for writing, and some for reading.
#[derive(Debug)]
pub(crate) struct Staging {
    writing: Mutex<SlotRing>,
    reading: Mutex<Slot>,
}

/// Slots for writing, which take turns.
#[derive(Debug)]
struct SlotRing {
    slots: Vec<Slot>,
    /// The slot that is being filled.
    current: usize,
    /// Its bytes in use.
    used: usize,
}

/// Pinned memory.
#[derive(Debug)]
struct Slot {
    context: Arc<Context>,
    bytes: *mut u8,
    /// Passed when the device has fetched everything; recorded when the slot is left.
    fetched: sys::CUevent,
}

// SAFETY: plain memory and an event, which any thread may use; see `Context`.
unsafe impl Send for Slot {}

impl Slot {
    fn new(context: &Arc<Context>) -> Result<Self, BackendError> {
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        let fetched = result::event::create(flags).map_err(failed("creating an event"))?;
        let mut slot = Self {
            context: Arc::clone(context),
            bytes: std::ptr::null_mut(),
            fetched,
        };
        // SAFETY: freed in `drop`.
        let bytes = unsafe { result::malloc_host(SLOT, 0) };
        slot.bytes = bytes.map_err(failed("allocating pinned memory"))?.cast();
        Ok(slot)
    }

    /// `len` of its bytes from `at` on.
    fn bytes(&mut self, at: usize, len: usize) -> &mut [u8] {
        debug_assert!(at + len <= SLOT);
        // SAFETY: inside of the allocation, whose bytes are initialised by what was copied to them;
        // `write` and `read` let the host touch only what the device does not use.
        unsafe { std::slice::from_raw_parts_mut(self.bytes.add(at), len) }
    }
}

/// What a mutex guards: whole even where a holder of the lock panicked, as a slot is at worst left
/// early.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Staging {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, BackendError> {
        context.bind()?;
        let slots = (0..N_SLOTS).map(|_| Slot::new(context));
        let ring = SlotRing {
            slots: slots.collect::<Result<_, _>>()?,
            current: 0,
            used: 0,
        };
        Ok(Self {
            writing: Mutex::new(ring),
            reading: Mutex::new(Slot::new(context)?),
        })
    }

    /// Copies bytes to the device, after everything before on the stream. The caller has checked
    /// that they fit there, and bound the context.
    pub(crate) fn write(&self, to: CUdeviceptr, bytes: &[u8]) -> Result<(), BackendError> {
        locked(&self.writing).write(to, bytes)
    }

    /// Copies bytes from the device, after everything before on the stream, and waits. The caller
    /// has checked that they are there, and bound the context.
    pub(crate) fn read(&self, from: CUdeviceptr, out: &mut [u8]) -> Result<(), BackendError> {
        locked(&self.reading).read(from, out)
    }
}

impl SlotRing {
    fn write(&mut self, to: CUdeviceptr, bytes: &[u8]) -> Result<(), BackendError> {
        let mut to = to;
        let mut rest = bytes;
        while !rest.is_empty() {
            if self.used >= SLOT {
                self.next_slot()?;
            }
            let n = rest.len().min(SLOT - self.used);
            let (now, later) = rest.split_at(n);
            let slot = &mut self.slots[self.current];
            let stream = slot.context.stream();
            let staged = slot.bytes(self.used, n);
            staged.copy_from_slice(now);
            // SAFETY: the caller has checked the device's bytes; the host's stay until `fetched`.
            unsafe { result::memcpy_htod_async(to, staged, stream) }
                .map_err(failed("writing to the device"))?;
            self.used += n.next_multiple_of(ALIGN);
            to += n as u64;
            rest = later;
        }
        Ok(())
    }

    /// Goes on to the next slot, when the device has fetched from it.
    fn next_slot(&mut self) -> Result<(), BackendError> {
        let left = &self.slots[self.current];
        // SAFETY: event and stream are alive.
        unsafe { result::event::record(left.fetched, left.context.stream()) }
            .map_err(failed("recording an event"))?;
        self.current = (self.current + 1) % self.slots.len();
        self.used = 0;
        // An event that was never recorded is passed.
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(self.slots[self.current].fetched) }
            .map_err(failed("writing to the device"))
    }
}

impl Slot {
    fn read(&mut self, from: CUdeviceptr, out: &mut [u8]) -> Result<(), BackendError> {
        let mut from = from;
        for out in out.chunks_mut(SLOT) {
            let stream = self.context.stream();
            let staged = self.bytes(0, out.len());
            // SAFETY: the caller has checked the device's bytes; the host's are written by nothing
            // else before the wait.
            unsafe { result::memcpy_dtoh_async(staged, from, stream) }
                .map_err(failed("reading from the device"))?;
            self.context.wait()?;
            out.copy_from_slice(self.bytes(0, out.len()));
            from += out.len() as u64;
        }
        Ok(())
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // The device may still fetch from it. What fails here cannot be mended.
        let _ = self.context.wait();
        // SAFETY: created by `new`, and nothing on the stream uses it any more.
        let _ = unsafe { result::event::destroy(self.fetched) };
        if !self.bytes.is_null() {
            // SAFETY: as above.
            let _ = unsafe { result::free_host(self.bytes.cast()) };
        }
    }
}
