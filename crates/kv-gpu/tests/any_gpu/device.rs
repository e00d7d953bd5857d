//! The device on any GPU, which the program's root names [`Gpu`]: bytes come back as they were
//! sent, launches do the same recorded as not, and what cannot be is an error with numbers.

use kv_backend::BackendError;
use kv_gpu::{Argument, Device, Region};

use crate::{Gpu, any_gpu};

fn at(buffer: &<Gpu as Device>::Buffer, at: usize) -> Region<'_, Gpu> {
    Region { buffer, at }
}

fn bytes(n: usize, seed: usize) -> Vec<u8> {
    (0..n).map(|i| ((i + seed) * 31 % 251) as u8).collect()
}

#[test]
fn memory_is_zero_and_keeps_what_is_written() {
    let device = any_gpu::device();
    // Longer than what is under way at a time on any of them, and odd.
    let n = (65 << 20) + 5;
    let buffer = device.allocate(n, "a test").unwrap();
    let mut read = vec![1; n];
    device.read(at(&buffer, 0), &mut read).unwrap();
    assert!(read.iter().all(|&b| b == 0));
    let mut sent = bytes(n - 3, 0);
    device.write(at(&buffer, 3), &sent).unwrap();
    let wanted = sent.clone();
    // They are the caller's again.
    sent.fill(0);
    for i in 0..3000 {
        device
            .write(at(&buffer, 3 + i * 7000), &wanted[i * 7000..][..6000])
            .unwrap();
    }
    device.read(at(&buffer, 0), &mut read).unwrap();
    assert!(read[..3] == [0; 3] && read[3..] == wanted[..]);
    let other = device.allocate(n, "a test").unwrap();
    device.copy(at(&buffer, 3), at(&other, 1), n - 3).unwrap();
    device.read(at(&other, 1), &mut read[..n - 3]).unwrap();
    assert!(read[..n - 3] == wanted[..]);
}

#[test]
fn threads_may_share_a_device() {
    let device = any_gpu::device();
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let device = &device;
            scope.spawn(move || {
                let (n, mut read) = (100_000, vec![0; 100_000]);
                let buffer = device.allocate(n, "a test").unwrap();
                for round in 0..50 {
                    let sent = bytes(n, seed + round);
                    device.write(at(&buffer, 0), &sent).unwrap();
                    device.read(at(&buffer, 0), &mut read).unwrap();
                    assert!(sent == read);
                }
            });
        }
    });
}

/// The settings of kv-gpu's kernel `add`: n, and what others of its file take.
fn settings(n: u32) -> [u8; 20] {
    let mut settings = [0; 20];
    settings[..4].copy_from_slice(&n.to_ne_bytes());
    settings
}

#[test]
fn what_is_recorded_runs_when_it_is_replayed() {
    let device = any_gpu::device();
    let add = device.kernel("add").unwrap();
    let n = 1000u32;
    let ones: Vec<u8> = std::iter::repeat_n(1f32.to_ne_bytes(), n as usize)
        .flatten()
        .collect();
    let one = device.allocate(ones.len(), "a test").unwrap();
    let sum = device.allocate(ones.len(), "a test").unwrap();
    device.write(at(&one, 0), &ones).unwrap();
    let settings = settings(n);
    let launch = || {
        let buffers = [&sum, &one, &sum].map(|buffer| Argument::Buffer(at(buffer, 0)));
        let [x, z, y] = buffers;
        device.launch(
            &add,
            [n.div_ceil(256), 1],
            &[x, z, y, Argument::Settings(&settings)],
        )
    };
    let value = || {
        let mut read = vec![0; ones.len()];
        device.read(at(&sum, 0), &mut read).unwrap();
        assert!(read.chunks(4).all(|value| value == &read[..4]));
        f32::from_ne_bytes([read[0], read[1], read[2], read[3]])
    };
    launch().unwrap();
    assert_eq!(value(), 1.0);
    let twice = device
        .record(&mut || launch().and_then(|()| launch()))
        .unwrap();
    assert_eq!(value(), 1.0, "recording runs nothing");
    for wanted in [3.0, 5.0, 7.0] {
        device.replay(&twice).unwrap();
        assert_eq!(value(), wanted);
    }
    let refused = device.record(&mut || device.launch(&add, [1, 1], &[]));
    assert!(
        refused
            .unwrap_err()
            .to_string()
            .contains("takes 4 arguments, got 0")
    );
    launch().unwrap();
    assert_eq!(
        value(),
        8.0,
        "a recording that fails leaves the device as it was"
    );
    drop(twice);
    device.wait().unwrap();
}

#[test]
fn what_cannot_be_is_an_error_with_numbers() {
    let device = any_gpu::device();
    let memory = device.memory().unwrap();
    assert!(memory.free <= memory.total && memory.total > 1 << 30);
    let wanted = memory.total as usize * 2;
    let error = device.allocate(wanted, "a test").unwrap_err();
    let BackendError::OutOfMemory {
        wanted: got, what, ..
    } = error
    else {
        panic!("{error}");
    };
    assert_eq!(got, wanted);
    assert!(
        what.contains(&format!("of {} bytes free", memory.total)),
        "{what}"
    );
    assert!(device.kernel("no_such_kernel").is_err());
    let buffer = device.allocate(8, "a test").unwrap();
    let error = device
        .write(at(&buffer, 4), &[0; 5])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("5 bytes from byte 4 on are not in a buffer of 8"),
        "{error}"
    );
    assert!(
        Gpu::open(99)
            .unwrap_err()
            .to_string()
            .contains("there is no GPU 99")
    );
}
