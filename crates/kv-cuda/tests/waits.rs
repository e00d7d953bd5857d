//! Who waits for a device, by the calls of a driver that was made for tests and computes nothing.
//!
//! A process finds one driver, so what is tested runs in a process of its own: this test with the
//! driver's folder in its environment.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::path::Path;
use std::process::Command;
use std::thread;

use kv_cuda::CudaDevice;
use kv_gpu::{Device, Region};

/// Runs a test of this file with the driver, where this process does not, and returns the calls
/// that it got.
fn calls(test: &str, settings: &[(&str, &str)]) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli/tests/support/fake_driver.cpp");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let library = folder.path().join("libcuda.so.1");
    let built = Command::new(compiler)
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .args([&library, &source])
        .status();
    assert!(built.unwrap().success(), "a C++ compiler makes the driver");
    std::fs::copy(&library, folder.path().join("libcuda.so")).unwrap();
    let log = folder.path().join("log");
    let ran = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test])
        .env("LD_LIBRARY_PATH", folder.path())
        .env(LOG, &log)
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    assert!(ran.status.success(), "{ran:?}");
    let log = std::fs::read_to_string(log).unwrap();
    log.lines().map(str::to_owned).collect()
}

/// The variable that names the log of the driver.
const LOG: &str = "FAKE_LOG";

#[test]
fn memory_is_freed_after_the_next_wait() {
    if std::env::var_os(LOG).is_none() {
        let calls = calls("memory_is_freed_after_the_next_wait", &[]);
        // To open, to give up and to allocate is to wait for nothing.
        assert_eq!(calls[..4], ["write", "wait", "waited", "free"]);
        return;
    }
    let device = CudaDevice::open(0).unwrap();
    drop(device.allocate(64, "test").unwrap());
    let kept = device.allocate(64, "test").unwrap();
    device.write(Region::start(&kept), &[1; 64]).unwrap();
    device.read(Region::start(&kept), &mut [0; 64]).unwrap();
}

#[test]
fn nobody_who_writes_waits_for_one_who_reads() {
    let Some(log) = std::env::var_os(LOG) else {
        let busy = [("FAKE_BUSY", "1")];
        let calls = calls("nobody_who_writes_waits_for_one_who_reads", &busy);
        assert_eq!(calls[..3], ["wait", "write", "waited"]);
        return;
    };
    let device = CudaDevice::open(0).unwrap();
    let buffer = device.allocate(64, "test").unwrap();
    thread::scope(|scope| {
        scope.spawn(|| device.read(Region::start(&buffer), &mut [0; 64]).unwrap());
        while !std::fs::read_to_string(&log).is_ok_and(|log| log.contains("wait")) {
            thread::yield_now();
        }
        device.write(Region::start(&buffer), &[1; 64]).unwrap();
    });
}
