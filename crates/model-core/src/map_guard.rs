//! [`MapGuard`]: reads of a mapped file that has become shorter, which the system ends with SIGBUS.
//!
//! Invariant: a fault inside a guarded map never ends the process. The whole map becomes zeros, and
//! its guard says so from then on; any other fault goes to whoever handled it before. Knows nothing
//! of files: whether they changed otherwise is asked elsewhere.

use std::ffi::c_int;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::{io, mem, ptr};

/// The place of a map, for the handler. They make a list that only grows, so that the handler needs
/// no lock; those of maps that are gone are taken again.
struct Place {
    is_taken: AtomicBool,
    start: AtomicUsize,
    /// 0 where there is no map.
    end: AtomicUsize,
    has_faulted: AtomicBool,
    next: Option<&'static Place>,
}

static PLACES: AtomicPtr<Place> = AtomicPtr::new(ptr::null_mut());

/// The map of a file, as long as this lives.
pub(crate) struct MapGuard(&'static Place);

impl MapGuard {
    /// Guards these bytes, which must be dropped after it.
    ///
    /// # Errors
    /// The system refuses the handler.
    pub(crate) fn new(map: &[u8]) -> io::Result<Self> {
        static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
        INSTALLED
            .get_or_init(install)
            .map_err(io::Error::from_raw_os_error)?;
        let Range { start, end } = map.as_ptr_range();
        let place = free_place().unwrap_or_else(add_place);
        place.has_faulted.store(false, Ordering::SeqCst);
        place.start.store(start.addr(), Ordering::SeqCst);
        place.end.store(end.addr(), Ordering::SeqCst);
        Ok(Self(place))
    }

    /// True if bytes of the map were lost, and zeros were read in place of them.
    pub(crate) fn has_faulted(&self) -> bool {
        self.0.has_faulted.load(Ordering::SeqCst)
    }
}

impl Drop for MapGuard {
    fn drop(&mut self) {
        self.0.end.store(0, Ordering::SeqCst);
        self.0.start.store(0, Ordering::SeqCst);
        self.0.is_taken.store(false, Ordering::SeqCst);
    }
}

fn places() -> impl Iterator<Item = &'static Place> {
    // SAFETY: null, or a place that is never freed and was complete before it was published.
    let first = unsafe { PLACES.load(Ordering::SeqCst).as_ref() };
    std::iter::successors(first, |place| place.next)
}

fn free_place() -> Option<&'static Place> {
    places().find(|place| !place.is_taken.swap(true, Ordering::SeqCst))
}

fn add_place() -> &'static Place {
    let place = Box::leak(Box::new(Place {
        is_taken: AtomicBool::new(true),
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        has_faulted: AtomicBool::new(false),
        next: None,
    }));
    let place: *mut Place = place;
    let mut first = PLACES.load(Ordering::SeqCst);
    loop {
        // SAFETY: not published yet, so that nobody else refers to it; `first` is never freed.
        unsafe { (*place).next = first.as_ref() };
        match PLACES.compare_exchange(first, place, Ordering::SeqCst, Ordering::SeqCst) {
            // SAFETY: leaked just now, and only shared from here on.
            Ok(_) => return unsafe { &*place },
            Err(other) => first = other,
        }
    }
}

/// The earlier handler of the signal. Written once, before our handler can be called.
static EARLIER: OnceLock<libc::sigaction> = OnceLock::new();

fn install() -> Result<(), i32> {
    let failed = || Err(io::Error::last_os_error().raw_os_error().unwrap_or(0));
    // SAFETY: all of a `sigaction` may be zero.
    let mut earlier: libc::sigaction = unsafe { mem::zeroed() };
    // SAFETY: asks for the handler alone, into a value of the right type.
    if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut earlier) } != 0 {
        return failed();
    }
    let _first = EARLIER.set(earlier);
    // SAFETY: as above.
    let mut ours: libc::sigaction = unsafe { mem::zeroed() };
    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut libc::c_void) = handle;
    ours.sa_sigaction = handler as *const () as usize;
    // On a stack of its own, where the thread has one.
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: `handle` has the signature that SA_SIGINFO asks for, and only does what a handler
    // may: atomics, mmap and sigaction.
    match unsafe { libc::sigaction(libc::SIGBUS, &raw const ours, ptr::null_mut()) } {
        0 => Ok(()),
        _ => failed(),
    }
}

extern "C" fn handle(signal: c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the system gives a valid description of the fault.
    let address = unsafe { (*info).si_addr() }.addr();
    let mut is_ours = false;
    for place in places() {
        let start = place.start.load(Ordering::SeqCst);
        let end = place.end.load(Ordering::SeqCst);
        if start != 0 && (start..end).contains(&address) {
            // Before the reader goes on, who asks after it has read.
            place.has_faulted.store(true, Ordering::SeqCst);
            is_ours = zero(start, end - start);
        }
    }
    if !is_ours {
        pass_on(signal, info, context);
    }
}

/// Puts zeros where a map is. All of it at once: a call for each page would end where a process may
/// have no more maps.
fn zero(start: usize, len: usize) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANON | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // The kernel rounds the length up to whole pages, as it did for the file.
    let at = ptr::without_provenance_mut(start);
    // SAFETY: the range is a map of ours that lives, as somebody just read it. It is only ever
    // read, and zeros are as good as any bytes there.
    unsafe { libc::mmap(at, len, libc::PROT_READ, flags, -1, 0) != libc::MAP_FAILED }
}

/// Does what would happen without our handler.
fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let Some(earlier) = EARLIER.get() else {
        return;
    };
    match earlier.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: all of a `sigaction` may be zero, which is the default: the instruction fails
            // again, and the system ends the process.
            unsafe {
                let default: libc::sigaction = mem::zeroed();
                libc::sigaction(signal, &raw const default, ptr::null_mut());
            }
        }
        handler if earlier.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: whoever set SA_SIGINFO gave a handler of this signature.
            let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                unsafe { mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: without SA_SIGINFO, a handler takes the signal alone.
            let handler: extern "C" fn(c_int) = unsafe { mem::transmute(handler) };
            handler(signal);
        }
    }
}
