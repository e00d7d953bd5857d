//! [`Sampling`]: a sampler of this library's, behind the table of functions that C calls.
//!
//! Invariant: a sampler that two threads use at once makes them wait. Knows no kind of sampler.

use std::ffi::{CStr, c_char};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::abi::TokenDataArray;
use crate::ffi::{Handle, Out, guarded};
use crate::sampler::array::Array;
use crate::sampler::{Interface, Sampler};

/// What a sampler does.
pub(crate) trait Sampling: Send {
    /// Its name, as llama.cpp has it.
    fn name(&self) -> &'static CStr;

    /// Changes, leaves out or chooses candidates.
    fn apply(&mut self, array: &mut Array<'_>);

    /// Takes note of a token of the text.
    fn accept(&mut self, _token: i32) {}

    /// Forgets the text.
    fn reset(&mut self) {}

    /// The same sampler at the same place of the text.
    fn copied(&self) -> Box<dyn Sampling>;

    /// The seed of its random numbers, where it draws any.
    fn seed(&self) -> Option<u32> {
        None
    }
}

/// What the pointer of such a sampler points to.
pub(crate) struct Own(Mutex<Box<dyn Sampling>>);

impl Own {
    /// That of a sampler, if it is one of this library's.
    pub(crate) fn of<'a>(handle: Handle<Sampler>) -> Option<&'a Self> {
        let sampler = handle.get()?;
        if !std::ptr::eq(sampler.iface, &raw const OWN) {
            return None;
        }
        Handle::<Self>::of(sampler.ctx.get().cast()).get()
    }

    fn lock(&self) -> MutexGuard<'_, Box<dyn Sampling>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The seed of its random numbers, where it draws any.
    pub(crate) fn seed(&self) -> Option<u32> {
        self.lock().seed()
    }
}

/// A new sampler.
pub(crate) fn new_sampler(sampling: impl Sampling + 'static) -> Handle<Sampler> {
    boxed(Box::new(sampling))
}

fn boxed(sampling: Box<dyn Sampling>) -> Handle<Sampler> {
    let own = Handle::new(Own(Mutex::new(sampling)));
    Sampler::new(&raw const OWN, own.as_ptr().cast())
}

static OWN: Interface = Interface {
    name: Some(name),
    accept: Some(accept),
    apply: Some(apply),
    reset: Some(reset),
    clone: Some(clone),
    free: Some(free),
    backend_init: std::ptr::null(),
    backend_accept: std::ptr::null(),
    backend_apply: std::ptr::null(),
    backend_set_input: std::ptr::null(),
    backend_reset: std::ptr::null(),
    copy_state: Some(copy_state),
};

extern "C" fn name(handle: Handle<Sampler>) -> *const c_char {
    guarded("llama_sampler_name", std::ptr::null(), || {
        Own::of(handle).map_or(std::ptr::null(), |own| own.lock().name().as_ptr())
    })
}

extern "C" fn accept(handle: Handle<Sampler>, token: i32) {
    guarded("llama_sampler_accept", (), || {
        if let Some(own) = Own::of(handle) {
            own.lock().accept(token);
        }
    });
}

extern "C" fn apply(handle: Handle<Sampler>, array: Out<TokenDataArray>) {
    guarded("llama_sampler_apply", (), || {
        if let (Some(own), Some(array)) = (Own::of(handle), array.get()) {
            own.lock().apply(&mut Array::new(array));
        }
    });
}

extern "C" fn reset(handle: Handle<Sampler>) {
    guarded("llama_sampler_reset", (), || {
        if let Some(own) = Own::of(handle) {
            own.lock().reset();
        }
    });
}

extern "C" fn clone(handle: Handle<Sampler>) -> Handle<Sampler> {
    guarded("llama_sampler_clone", Handle::NULL, || {
        Own::of(handle).map_or(Handle::NULL, |own| boxed(own.lock().copied()))
    })
}

extern "C" fn free(handle: Handle<Sampler>) {
    guarded("llama_sampler_free", (), || {
        if let Some(sampler) = handle.get() {
            Handle::<Own>::of(sampler.ctx.get().cast()).take();
        }
    });
}

extern "C" fn copy_state(from: Handle<Sampler>, to: Handle<Sampler>) {
    guarded("llama_sampler_copy", (), || {
        if let (Some(from), Some(to)) = (Own::of(from), Own::of(to)) {
            let copied = from.lock().copied();
            *to.lock() = copied;
        }
    });
}
