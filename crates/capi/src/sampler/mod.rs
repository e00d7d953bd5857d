//! Samplers: `llama_sampler` objects of this library and of the program's own.
//!
//! A sampler is a table of functions and a pointer of its own, laid out as C has it, so that
//! programs can bring theirs. Invariant: a function that a table leaves out does nothing. Knows no
//! kind of sampler.

mod array;
pub(crate) mod chain;
pub(crate) mod change;
pub(crate) mod grammar;
pub(crate) mod narrow;
mod own;
pub(crate) mod pick;
mod random;
pub(crate) mod step;

use std::cell::{Cell, RefCell};
use std::ffi::{c_char, c_void};

pub(crate) use own::{Own, Sampling, new_sampler};

use crate::abi::{DEFAULT_SEED, NO_TOKEN, TokenData, TokenDataArray};
use crate::context::{Context, context};
use crate::ffi::{Handle, In, Out, c_api};
use crate::log;
use crate::output::logits_row;

/// `llama_sampler`.
#[repr(C)]
pub(crate) struct Sampler {
    pub(crate) iface: *const Interface,
    pub(crate) ctx: Cell<*mut c_void>,
}

/// `llama_sampler_i`.
#[repr(C)]
pub(crate) struct Interface {
    pub(crate) name: Option<unsafe extern "C" fn(Handle<Sampler>) -> *const c_char>,
    pub(crate) accept: Option<unsafe extern "C" fn(Handle<Sampler>, i32)>,
    pub(crate) apply: Option<unsafe extern "C" fn(Handle<Sampler>, Out<TokenDataArray>)>,
    pub(crate) reset: Option<unsafe extern "C" fn(Handle<Sampler>)>,
    pub(crate) clone: Option<unsafe extern "C" fn(Handle<Sampler>) -> Handle<Sampler>>,
    pub(crate) free: Option<unsafe extern "C" fn(Handle<Sampler>)>,
    pub(crate) backend_init: *const c_void,
    pub(crate) backend_accept: *const c_void,
    pub(crate) backend_apply: *const c_void,
    pub(crate) backend_set_input: *const c_void,
    pub(crate) backend_reset: *const c_void,
    pub(crate) copy_state: Option<unsafe extern "C" fn(Handle<Sampler>, Handle<Sampler>)>,
}

// SAFETY: a table is never written, and the addresses in it are not followed here.
unsafe impl Sync for Interface {}

impl Sampler {
    pub(crate) fn new(iface: *const Interface, ctx: *mut c_void) -> Handle<Self> {
        Handle::new(Self {
            iface,
            ctx: Cell::new(ctx),
        })
    }

    fn table<'a>(&self) -> Option<&'a Interface> {
        In::of(self.iface).get()
    }
}

/// The sampler of a handle and its functions, or a line; no sampler at all is no mistake.
fn sampler<'a>(name: &str, handle: Handle<Sampler>) -> Option<(&'a Sampler, &'a Interface)> {
    let found = handle
        .get()
        .and_then(|sampler| Some((sampler, sampler.table()?)));
    if found.is_none() && !handle.is_null() {
        log::error(&format!("{name}: there is no such sampler"));
    }
    found
}

pub(crate) fn accept(handle: Handle<Sampler>, token: i32) {
    if let Some((_, table)) = sampler("llama_sampler_accept", handle)
        && let Some(accept) = table.accept
    {
        // SAFETY: the sampler exists, and the function came with it for such calls.
        unsafe { accept(handle, token) };
    }
}

pub(crate) fn apply(handle: Handle<Sampler>, array: Out<TokenDataArray>) {
    if let Some((_, table)) = sampler("llama_sampler_apply", handle)
        && let Some(apply) = table.apply
    {
        // SAFETY: as in `accept`; the array is the caller's.
        unsafe { apply(handle, array) };
    }
}

pub(crate) fn reset(handle: Handle<Sampler>) {
    if let Some((_, table)) = sampler("llama_sampler_reset", handle)
        && let Some(reset) = table.reset
    {
        // SAFETY: as in `accept`.
        unsafe { reset(handle) };
    }
}

pub(crate) fn clone(handle: Handle<Sampler>) -> Handle<Sampler> {
    let Some((sampler, table)) = sampler("llama_sampler_clone", handle) else {
        return Handle::NULL;
    };
    match table.clone {
        // SAFETY: as in `accept`.
        Some(clone) => unsafe { clone(handle) },
        None if sampler.ctx.get().is_null() => Sampler::new(sampler.iface, sampler.ctx.get()),
        None => {
            log::error("llama_sampler_clone: the sampler has no function that clones it");
            Handle::NULL
        }
    }
}

pub(crate) fn free(handle: Handle<Sampler>) {
    if handle.is_null() {
        return;
    }
    if let Some((_, table)) = sampler("llama_sampler_free", handle) {
        if let Some(free) = table.free {
            // SAFETY: as in `accept`.
            unsafe { free(handle) };
        }
        handle.take();
    }
}

/// Makes a sampler what another of its kind is.
fn copy(from: Handle<Sampler>, to: Handle<Sampler>) {
    let name = "llama_sampler_copy";
    if from == to || from.is_null() || to.is_null() {
        return;
    }
    let (Some((source, table)), Some((target, _))) = (sampler(name, from), sampler(name, to))
    else {
        return;
    };
    if source.iface != target.iface {
        log::error(&format!("{name}: the samplers are of different kinds"));
        return;
    }
    if let Some(copy_state) = table.copy_state {
        // SAFETY: as in `accept`, for both.
        unsafe { copy_state(from, to) };
        return;
    }
    let Some(clone) = clone(from).take() else {
        return;
    };
    if let Some(free) = table.free {
        // SAFETY: as in `accept`; what it frees is replaced below.
        unsafe { free(to) };
    }
    target.ctx.set(clone.ctx.get());
}

fn seed(handle: Handle<Sampler>) -> u32 {
    let own = Own::of(handle).and_then(Own::seed);
    own.or_else(|| chain::seed(handle)).unwrap_or(DEFAULT_SEED)
}

thread_local! {
    /// The candidates of a vocabulary, kept from one token to the next.
    static CANDIDATES: RefCell<Vec<TokenData>> = const { RefCell::new(Vec::new()) };
}

/// The token that a sampler chooses from logits.
fn chosen(handle: Handle<Sampler>, tokens: &mut [TokenData]) -> Option<i32> {
    let mut array = TokenDataArray {
        data: tokens.as_mut_ptr(),
        size: tokens.len(),
        selected: -1,
        sorted: false,
    };
    apply(handle, Out::of(&raw mut array));
    let selected = usize::try_from(array.selected).ok()?;
    let kept = In::of(array.data.cast_const()).slice(array.size);
    kept.get(selected).map(|token| token.id)
}

fn sample(handle: Handle<Sampler>, context: &Context, index: i32) -> Result<i32, String> {
    let mut tokens = CANDIDATES.take();
    tokens.clear();
    logits_row(context, index, |row| {
        let of = |(id, &logit): (i32, &f32)| TokenData { id, logit, p: 0.0 };
        tokens.extend((0..).zip(row).map(of));
    })?;
    let token = chosen(handle, &mut tokens);
    CANDIDATES.set(tokens);
    let token = token.ok_or("no sampler chose a token: end the chain with one that does")?;
    accept(handle, token);
    Ok(token)
}

c_api! {
    fn llama_sampler_init(iface: *const Interface, ctx: *mut c_void)
        -> Handle<Sampler> = Handle::NULL; {
        if iface.is_null() {
            log::error("llama_sampler_init: there is no table of functions");
            return Handle::NULL;
        }
        Sampler::new(iface, ctx)
    }

    fn llama_sampler_name(handle: Handle<Sampler>) -> *const c_char = std::ptr::null(); {
        let named = sampler("llama_sampler_name", handle).and_then(|(_, table)| table.name);
        match named {
            // SAFETY: the sampler exists, and the function came with it for such calls.
            Some(name) => unsafe { name(handle) },
            None => c"(null)".as_ptr(),
        }
    }

    fn llama_sampler_accept(handle: Handle<Sampler>, token: i32); {
        accept(handle, token);
    }

    fn llama_sampler_apply(handle: Handle<Sampler>, array: Out<TokenDataArray>); {
        apply(handle, array);
    }

    fn llama_sampler_reset(handle: Handle<Sampler>); {
        reset(handle);
    }

    fn llama_sampler_clone(handle: Handle<Sampler>) -> Handle<Sampler> = Handle::NULL; {
        clone(handle)
    }

    fn llama_sampler_copy(from: Handle<Sampler>, to: Handle<Sampler>); {
        copy(from, to);
    }

    fn llama_sampler_free(handle: Handle<Sampler>); {
        free(handle);
    }

    fn llama_sampler_get_seed(handle: Handle<Sampler>) -> u32 = DEFAULT_SEED; {
        seed(handle)
    }

    fn llama_sampler_sample(handle: Handle<Sampler>, from: Handle<Context>, index: i32)
        -> i32 = NO_TOKEN; {
        let name = "llama_sampler_sample";
        let Some(context) = context(name, from) else {
            return NO_TOKEN;
        };
        log::or_line(name, sample(handle, context, index)).unwrap_or(NO_TOKEN)
    }
}
