//! Signals. Ctrl-C: the first ends the text, the second ends the program; no partial file stays. A
//! file that may not grow (`ulimit -f`) is an error of the write.

use cellar_engine::CancelFlag;

use crate::failure::Exit;
use crate::keyboard;
use crate::output_file;

/// A flag that Ctrl-C (or a termination signal) sets.
///
/// # Errors
/// The system refuses the handler.
pub(crate) fn cancel_on_interrupt() -> anyhow::Result<CancelFlag> {
    let flag = CancelFlag::default();
    let in_handler = flag.clone();
    ctrlc::set_handler(move || {
        if in_handler.is_cancelled() {
            exit();
        }
        in_handler.cancel();
    })?;
    Ok(flag)
}

/// Ends the program at Ctrl-C (or a termination signal), without the file that it was writing.
///
/// # Errors
/// The system refuses the handler.
pub(crate) fn exit_on_interrupt() -> anyhow::Result<()> {
    Ok(ctrlc::set_handler(|| exit())?)
}

/// The same, after a line on stderr.
///
/// # Errors
/// The system refuses the handler.
#[cfg(feature = "hub")]
pub(crate) fn exit_on_interrupt_saying(note: String) -> anyhow::Result<()> {
    Ok(ctrlc::set_handler(move || {
        // The line break ends a progress bar.
        crate::terminal::note(format_args!("\n{}", crate::failure::words(&note)));
        exit()
    })?)
}

/// Makes writing beyond the largest file that the system allows an error, as a full disk is.
/// Without it the system ends the process, and the partial file stays.
///
/// # Errors
/// The system refuses the handler.
#[cfg(unix)]
pub(crate) fn survive_file_size_limit() -> std::io::Result<()> {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    /// The signal's number on Linux and macOS.
    const SIGXFSZ: i32 = 25;
    // The flag is not read: the write fails.
    signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false))).map(drop)
}

/// Nothing: the system has no such limit.
///
/// # Errors
/// None.
#[cfg(not(unix))]
pub(crate) fn survive_file_size_limit() -> std::io::Result<()> {
    Ok(())
}

fn exit() -> ! {
    let _no_new_files = output_file::remove_partial();
    keyboard::restore();
    std::process::exit(i32::from(Exit::Interrupted.code()));
}
