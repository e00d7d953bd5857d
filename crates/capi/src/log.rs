//! Log lines: to the callback of the program, else to the standard error.
//!
//! Invariant: a line ends with a line break and reaches the callback once. Decides nothing.

use std::ffi::{CString, c_void};
use std::io::Write;
use std::sync::{PoisonError, RwLock};

use crate::abi::LogCallback;
use crate::ffi::{Out, c_api};

/// `ggml_log_level`.
const INFO: i32 = 2;
const WARN: i32 = 3;
const ERROR: i32 = 4;

/// A callback and what it is given.
#[derive(Clone, Copy)]
struct Target {
    callback: LogCallback,
    /// An address of the program's, which is handed back and never followed.
    user_data: usize,
}

static TARGET: RwLock<Target> = RwLock::new(Target {
    callback: None,
    user_data: 0,
});

fn target() -> Target {
    *TARGET.read().unwrap_or_else(PoisonError::into_inner)
}

fn line(level: i32, text: &str) {
    let Target {
        callback,
        user_data,
    } = target();
    let text = format!("{}\n", text.replace('\0', " "));
    match (callback, CString::new(text.as_str())) {
        (Some(callback), Ok(text)) => {
            // SAFETY: the program gave the callback for such calls, and the text lives until it
            // returns.
            unsafe { callback(level, text.as_ptr(), user_data as *mut c_void) };
        }
        _ => {
            // A closed standard error is no reason to fail.
            let _ = std::io::stderr().write_all(text.as_bytes());
        }
    }
}

/// Why a call failed.
pub(crate) fn error(text: &str) {
    line(ERROR, text);
}

/// Something was done otherwise than asked for.
pub(crate) fn warn(text: &str) {
    line(WARN, text);
}

/// Something happened.
pub(crate) fn info(text: &str) {
    line(INFO, text);
}

/// The value, or a line that says which function failed and why.
pub(crate) fn or_line<T, E: std::fmt::Display>(name: &str, result: Result<T, E>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(reason) => {
            error(&format!("{name}: {reason}"));
            None
        }
    }
}

c_api! {
    fn llama_log_set(callback: LogCallback, user_data: *mut c_void); {
        let mut target = TARGET.write().unwrap_or_else(PoisonError::into_inner);
        *target = Target { callback, user_data: user_data as usize };
    }

    fn llama_log_get(callback: Out<LogCallback>, user_data: Out<*mut c_void>); {
        let target = target();
        callback.set(target.callback);
        user_data.set(target.user_data as *mut c_void);
    }
}
