//! The functions that the page's script calls. Bytes go through two buffers of this module.
//!
//! ```text
//! input(n)  makes the buffer of the question n bytes long, and returns its address
//! ask()     answers what is in it; returns the length of the answer
//! output()  the address of the answer, which lasts until the next question
//! ```

use std::cell::RefCell;

use crate::page::Page;

#[derive(Default)]
struct Buffers {
    page: Page,
    input: Vec<u8>,
    output: Vec<u8>,
}

thread_local! {
    static BUFFERS: RefCell<Buffers> = RefCell::default();
}

/// Makes room for a question of so many bytes; the address of the first.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn input(n_bytes: usize) -> *mut u8 {
    BUFFERS.with_borrow_mut(|buffers| {
        buffers.input = vec![0; n_bytes];
        buffers.input.as_mut_ptr()
    })
}

/// Answers the question; the length of the answer.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ask() -> usize {
    BUFFERS.with_borrow_mut(|buffers| {
        // A header can be long, and is not needed again.
        let question = std::mem::take(&mut buffers.input);
        buffers.output = buffers.page.answer(&question).into_bytes();
        buffers.output.len()
    })
}

/// The address of the answer.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn output() -> *const u8 {
    BUFFERS.with_borrow(|buffers| buffers.output.as_ptr())
}
