//! What is timed on a GPU runs here, too: in small, for its results alone.

#![allow(clippy::unwrap_used)]

use kv_block::BlockFormat;
use kv_gpu::Precision;
use kv_rows::KvType;

use crate::bandwidth::{Matrices, Sequences, attention, copies, gemv};
use crate::devices::backends;

#[test]
fn rates_count_the_bytes_that_are_read() {
    let backend = backends(Precision::Fast).swap_remove(0);
    let copied = copies(backend.device(), 1 << 20);
    assert!(copied.bytes == 2.0 * f64::from(1 << 20) && copied.gigabytes() > 0.0);
    for format in [BlockFormat::Q4_K, BlockFormat::Q8_0, BlockFormat::F16] {
        let rate = gemv(&backend, format, Matrices { width: 256, n: 1 });
        let n_blocks = 256 * 256 / format.block_len();
        assert_eq!(rate.bytes, (n_blocks * format.block_bytes()) as f64);
    }
    let sequences = Sequences {
        n: 2,
        depth: 3,
        n_layers: 1,
    };
    let rate = attention(&backend, KvType::F16, sequences);
    assert_eq!(rate.bytes, f64::from(2 * 3 * 2 * 8 * 256));
}
