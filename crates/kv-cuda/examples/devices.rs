//! Prints the GPUs of this machine, one a line; fails with the reason where there is none.

use std::process::ExitCode;

fn main() -> ExitCode {
    match kv_cuda::devices() {
        Ok(devices) if !devices.is_empty() => {
            for device in devices {
                let (n, gib) = (device.ordinal, device.memory.total >> 30);
                println!("GPU {n}: {device}, {gib} GiB");
            }
            ExitCode::SUCCESS
        }
        Ok(_) => {
            eprintln!("there is no NVIDIA GPU");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
