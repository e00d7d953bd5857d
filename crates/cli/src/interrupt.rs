//! Ctrl-C: the first ends the text, the second ends the program.

use engine::CancelFlag;

use crate::failure::Exit;

/// A flag that Ctrl-C (or a termination signal) sets.
///
/// # Errors
/// Where the handler cannot be installed.
pub(crate) fn cancel_on_interrupt() -> anyhow::Result<CancelFlag> {
    let flag = CancelFlag::default();
    let in_handler = flag.clone();
    ctrlc::set_handler(move || {
        if in_handler.is_cancelled() {
            std::process::exit(i32::from(Exit::Interrupted.code()));
        }
        in_handler.cancel();
    })?;
    Ok(flag)
}
