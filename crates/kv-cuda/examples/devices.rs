//! Prints the GPUs of this machine, one a line; fails with the reason where none can be
//! used.

use std::process::ExitCode;

fn main() -> ExitCode {
    let devices = match kv_cuda::devices() {
        Ok(devices) => devices,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let mut n_usable = 0;
    for device in devices {
        match device {
            Ok(device) => {
                let (n, gib) = (device.ordinal, device.memory.total >> 30);
                println!("GPU {n}: {device}, {gib} GiB");
                n_usable += 1;
            }
            Err(error) => eprintln!("{error}"),
        }
    }
    match n_usable {
        0 => ExitCode::FAILURE,
        _ => ExitCode::SUCCESS,
    }
}
