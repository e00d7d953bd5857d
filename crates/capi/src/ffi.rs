//! Pointers that cross the C boundary: [`In`] and [`Out`] (arrays of the caller's), [`CText`] (its
//! strings), [`Handle`] (objects of this library's), and [`c_api`], which exports functions.
//!
//! Invariant: only C makes an [`In`], [`Out`] or [`CText`], and vouches for what it points to, as
//! `llama.h` demands; a null pointer is an empty array or no text. A [`Handle`] is followed only
//! while the object that it was made for exists: one that was freed, or is of another kind, is
//! nothing. No panic leaves a function.

use std::any::TypeId;
use std::collections::HashMap;
use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{PoisonError, RwLock};

use crate::log;

/// An array that is read.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

/// An array that is written.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

/// A text that ends with a NUL.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct CText(*const c_char);

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> In<T> {
    /// An array that a structure of the caller's names.
    pub(crate) const fn of(pointer: *const T) -> Self {
        Self(pointer)
    }

    /// True if there is none.
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// The first value.
    pub(crate) fn get<'a>(self) -> Option<&'a T> {
        // SAFETY: the caller vouches that a pointer which is not null points to a value that stays
        // for the call.
        unsafe { self.0.as_ref() }
    }

    /// `n` values; none where the pointer is null or `n` values cannot be.
    pub(crate) fn slice<'a>(self, n: usize) -> &'a [T] {
        if self.0.is_null() || n == 0 || n > isize::MAX as usize / size_of::<T>().max(1) {
            return &[];
        }
        // SAFETY: the caller vouches for `n` values behind a pointer that is not null, for the
        // call; their bytes can be counted.
        unsafe { std::slice::from_raw_parts(self.0, n) }
    }

    /// The values before the first that `is_end`.
    pub(crate) fn until<'a>(self, is_end: impl Fn(&T) -> bool) -> &'a [T] {
        let mut n = 0;
        // SAFETY: the caller vouches that a pointer which is not null begins an array with such an
        // end; no value behind that is read.
        while !self.0.is_null() && !is_end(unsafe { &*self.0.add(n) }) {
            n += 1;
        }
        self.slice(n)
    }
}

impl<T> Out<T> {
    /// An array that a structure of the caller's names.
    pub(crate) const fn of(pointer: *mut T) -> Self {
        Self(pointer)
    }

    /// True if there is none.
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// The first value.
    pub(crate) fn get<'a>(self) -> Option<&'a mut T> {
        // SAFETY: the caller vouches that a pointer which is not null points to a value that
        // nothing else uses during the call.
        unsafe { self.0.as_mut() }
    }

    /// Writes the first value, where there is an array.
    pub(crate) fn set(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: the caller vouches for room for a value behind a pointer that is not null,
            // which may not be initialised.
            unsafe { self.0.write(value) };
        }
    }

    /// `n` values that are initialised; none where the pointer is null or `n` cannot be.
    pub(crate) fn slice<'a>(self, n: usize) -> &'a mut [T] {
        if self.0.is_null() || n == 0 || n > isize::MAX as usize / size_of::<T>().max(1) {
            return &mut [];
        }
        // SAFETY: the caller vouches for `n` values behind a pointer that is not null, which
        // nothing else uses during the call; their bytes can be counted.
        unsafe { std::slice::from_raw_parts_mut(self.0, n) }
    }
}

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
impl<T> Out<T> {
    /// Its address.
    pub(crate) fn address(self) -> usize {
        self.0 as usize
    }
}

impl<T: Copy> Out<T> {
    /// Writes the values, as many as `room` holds. True if there was room for all.
    pub(crate) fn write(self, room: usize, values: &[T]) -> bool {
        let n = if self.0.is_null() {
            0
        } else {
            values.len().min(room)
        };
        if n > 0 {
            // SAFETY: the caller vouches for room for `room` values, `n` is no more, and the
            // values are this library's own, apart from the caller's.
            unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), self.0, n) };
        }
        n == values.len()
    }
}

impl Out<c_char> {
    /// Writes a text and the NUL behind it, cut to `size` bytes, as `snprintf` does. Returns the
    /// bytes of the whole text.
    pub(crate) fn write_text(self, size: usize, text: &str) -> i32 {
        let n = text.len().min(size.saturating_sub(1));
        let bytes: Vec<c_char> = text.as_bytes()[..n]
            .iter()
            .map(|&byte| byte as c_char)
            .chain([0])
            .collect();
        if size > 0 {
            self.write(size, &bytes);
        }
        count(text.len())
    }
}

impl CText {
    /// A text that a structure of the caller's names.
    pub(crate) const fn of(pointer: *const c_char) -> Self {
        Self(pointer)
    }

    /// The text; `None` where there is none or it is not UTF-8.
    pub(crate) fn get<'a>(self) -> Option<&'a str> {
        if self.0.is_null() {
            return None;
        }
        // SAFETY: the caller vouches for a NUL behind a pointer that is not null.
        unsafe { CStr::from_ptr(self.0) }.to_str().ok()
    }
}

/// A number of things, as C has it.
pub(crate) fn count(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

/// A pointer to an object of this library's.
#[repr(transparent)]
pub(crate) struct Handle<T>(*mut T);

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Handle<T> {}

impl<T> PartialEq for Handle<T> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

/// The objects that exist, by their addresses.
static LIVE: RwLock<Option<HashMap<usize, TypeId>>> = RwLock::new(None);

impl<T: 'static> Handle<T> {
    /// No object.
    pub(crate) const NULL: Self = Self(std::ptr::null_mut());

    /// The object at an address, if one is there.
    pub(crate) const fn of(pointer: *mut T) -> Self {
        Self(pointer)
    }

    /// A new object.
    pub(crate) fn new(value: T) -> Self {
        let pointer = Box::into_raw(Box::new(value));
        let mut live = LIVE.write().unwrap_or_else(PoisonError::into_inner);
        let live = live.get_or_insert_default();
        live.insert(pointer as usize, TypeId::of::<T>());
        Self(pointer)
    }

    /// True if it names nothing.
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    fn is_live(self) -> bool {
        let live = LIVE.read().unwrap_or_else(PoisonError::into_inner);
        let kind = live.as_ref().and_then(|live| live.get(&(self.0 as usize)));
        kind == Some(&TypeId::of::<T>())
    }

    /// The object, unless it was freed or never was.
    pub(crate) fn get<'a>(self) -> Option<&'a T> {
        if self.is_live() {
            // SAFETY: an object of this type lives there, and goes only by `take`, which the
            // caller does not call during another call with it.
            unsafe { self.0.as_ref() }
        } else {
            None
        }
    }

    /// The object itself: the handle names nothing afterwards.
    pub(crate) fn take(self) -> Option<Box<T>> {
        let mut live = LIVE.write().unwrap_or_else(PoisonError::into_inner);
        let live = live.as_mut()?;
        if live.get(&(self.0 as usize)) != Some(&TypeId::of::<T>()) {
            return None;
        }
        live.remove(&(self.0 as usize));
        // SAFETY: it was made by `new` of this type and is taken once: it is no longer in the list.
        Some(unsafe { Box::from_raw(self.0) })
    }

    /// The address.
    pub(crate) fn as_ptr(self) -> *mut T {
        self.0
    }
}

/// Runs the body of an exported function: a panic becomes a log line and `failed`.
pub(crate) fn guarded<R>(name: &str, failed: R, body: impl FnOnce() -> R) -> R {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(result) => result,
        Err(_) => {
            log::error(&format!("{name}: a defect of the library ended the call"));
            failed
        }
    }
}

/// Exports functions of `llama.h`. What follows `=` is returned where the function fails, and
/// where it panics.
macro_rules! c_api {
    ($($(#[$attribute:meta])* fn $name:ident($($arg:ident: $kind:ty),* $(,)?)
        $(-> $result:ty = $failed:expr)? ; $body:block)*) => {$(
        $(#[$attribute])*
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $name($($arg: $kind),*) $(-> $result)? {
            $crate::ffi::guarded(stringify!($name), $crate::ffi::failed!($($failed)?), move || $body)
        }
    )*};
}

/// The value that a function returns when it fails.
macro_rules! failed {
    () => {
        ()
    };
    ($failed:expr) => {
        $failed
    };
}

pub(crate) use {c_api, failed};
