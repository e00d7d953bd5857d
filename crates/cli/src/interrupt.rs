//! Ctrl-C: the first one ends the text, the second one the program.

use engine::CancelFlag;

use crate::failure::Exit;

/// A flag that Ctrl-C (or a termination signal) sets.
///
/// # Errors
/// Where the system does not let a handler be installed.
pub(crate) fn cancel_on_interrupt() -> anyhow::Result<CancelFlag> {
    let flag = CancelFlag::default();
    let handler_s = flag.clone();
    ctrlc::set_handler(move || {
        if handler_s.is_cancelled() {
            std::process::exit(i32::from(Exit::Interrupted.code()));
        }
        handler_s.cancel();
    })?;
    Ok(flag)
}
