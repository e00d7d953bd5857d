//! What the simulator finds: a wait or a barrier that is forgotten gives wrong results.
#![allow(clippy::unwrap_used)]

use kv_backend::BackendError;
use kv_gpu::sim::{Dialect, Order, Sim};
use kv_gpu::{Argument, Device, Region};

/// Runs a kernel on one block, which takes `x`, gives as many values, and has so many waits and
/// barriers.
fn launch(
    kernel: &str,
    sim: Sim,
    x: &[f32],
    waits_and_syncs: [u32; 2],
) -> Result<Vec<f32>, BackendError> {
    let bytes = bytemuck::cast_slice(x);
    let buffers = [(); 2].map(|()| sim.allocate(bytes.len(), "values").unwrap());
    let [from, to] = [0, 1].map(|i| Region {
        buffer: &buffers[i],
        at: 0,
    });
    sim.write(from, bytes)?;
    let settings = Argument::Settings(bytemuck::cast_slice(&waits_and_syncs));
    let arguments = [Argument::Buffer(from), Argument::Buffer(to), settings];
    sim.launch(&sim.kernel(kernel)?, [1, 1], &arguments)?;
    let mut y = vec![0.0; x.len()];
    sim.read(to, bytemuck::cast_slice_mut(&mut y))?;
    Ok(y)
}

/// The simulators whose threads run in this order.
fn dialects(order: Order) -> [Sim; 2] {
    [Dialect::Cpp, Dialect::Metal].map(|dialect| Sim::new(order).with_dialect(dialect))
}

fn numbers(n: u8) -> Vec<f32> {
    (1..=n).map(f32::from).collect()
}

#[test]
fn asynchronous_copies_arrive_when_they_are_waited_for() {
    let x: Vec<f32> = numbers(128).iter().flat_map(|&x| [x; 4]).collect();
    let mut wanted = x.clone();
    wanted[..256].rotate_left(4);
    wanted[256..].rotate_left(4);
    for order in [Order::Forward, Order::Reverse] {
        let run =
            |waits, syncs| launch("check_copies", Sim::new(order), &x, [waits, syncs]).unwrap();
        assert_eq!(run(2, 1), wanted);
        // Without the last wait, the second group has not arrived, and the first one has.
        let partly = run(1, 1);
        assert_eq!(partly[..256], wanted[..256]);
        assert!(partly[256..].iter().all(|y| y.is_nan()));
        assert!(run(0, 1).iter().all(|y| y.is_nan()));
        // Without the barrier, only the thread's own copies have arrived.
        assert!(run(2, 0).iter().any(|y| y.is_nan()));
    }
}

#[test]
fn fragments_multiply_what_all_threads_have_written() {
    let x: Vec<f32> = (0..768).map(|i| (i * 7 % 23) as f32 - 9.0).collect();
    let product = |i: usize| -> f32 {
        let terms = (0..16).map(|k| x[i / 16 * 16 + k] * x[256 + k * 16 + i % 16]);
        terms.sum()
    };
    let transposed = |i: usize| -> f32 {
        let terms = (0..16).map(|k| x[i / 16 * 16 + k] * x[512 + i % 16 * 16 + k]);
        terms.sum::<f32>() * if i < 128 { 2.0 } else { 3.0 }
    };
    let wanted: Vec<f32> = (0..256)
        .map(product)
        .chain((0..256).map(transposed))
        .collect();
    for order in [Order::Forward, Order::Reverse] {
        for sim in dialects(order) {
            let y = launch("check_fragments", sim, &x, [0, 1]).unwrap();
            assert_eq!(y[..512], wanted, "{sim:?}");
        }
    }
    // The second warp is the first to run: without the barrier, it reads what is not yet written.
    for sim in dialects(Order::Reverse) {
        let reversed = launch("check_fragments", sim, &x, [0, 0]).unwrap();
        assert_ne!(reversed[..512], wanted, "{sim:?}");
    }
}

#[test]
fn what_a_part_of_a_warp_does_is_an_error() {
    let x = numbers(64);
    let wanted = "what a warp does together is done by some of its lanes";
    for sim in [Order::Forward, Order::Reverse].map(dialects).concat() {
        let sums = launch("check_warp", sim, &x, [0, 1]).unwrap();
        assert_eq!(sums, [[528.0; 32], [1552.0; 32]].concat(), "{sim:?}");
        let error = launch("check_warp", sim, &x, [0, 0]).unwrap_err();
        assert!(error.to_string().contains(wanted), "{error}");
    }
    // Metal's functions are not told where they are called.
    for order in [Order::Forward, Order::Reverse] {
        let error = launch("check_warp", Sim::new(order), &x, [1, 0]).unwrap_err();
        assert!(error.to_string().contains(wanted), "{error}");
    }
}

#[test]
fn threads_at_different_barriers_are_an_error() {
    let x = numbers(64);
    for sim in [Order::Forward, Order::Reverse].map(dialects).concat() {
        assert_eq!(launch("check_barrier", sim, &x, [0, 1]).unwrap(), x);
        let error = launch("check_barrier", sim, &x, [0, 0]).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("a barrier that not all threads reach"),
            "{text}"
        );
    }
}
