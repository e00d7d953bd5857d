//! The GPU of a test program, whose root names the device [`Gpu`]. Without one, a test program says
//! so and ends; with `CELLAR_REQUIRE_GPU` set, it fails.

use std::io::Write;
use std::sync::Mutex;

use kv_backend::BackendError;

use crate::Gpu;

/// The first GPU.
///
/// # Panics
/// If there is none that can be used and one is required.
#[allow(clippy::panic)]
pub(crate) fn device() -> Gpu {
    match Gpu::open(0) {
        Ok(device) => device,
        Err(BackendError::Unavailable { reason, .. })
            if std::env::var_os("CELLAR_REQUIRE_GPU").is_none() =>
        {
            skip(&reason)
        }
        Err(error) => panic!("{error}"),
    }
}

/// Ends the process: whatever its other tests would find, they need the GPU, too.
fn skip(reason: &str) -> ! {
    static FIRST: Mutex<()> = Mutex::new(());
    let _first = FIRST.lock();
    // Not through the macros, whose lines the test harness keeps to itself.
    let _ = writeln!(
        std::io::stderr(),
        "\nSKIPPED, none of these tests ran: {reason}; CELLAR_REQUIRE_GPU=1 makes this a failure"
    );
    std::process::exit(0)
}
