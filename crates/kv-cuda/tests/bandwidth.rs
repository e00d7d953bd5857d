//! GEMV and attention next to copies on the same GPU: shares of the bandwidth that it has.

#[path = "../../kv-gpu/tests/any_gpu/mod.rs"]
mod any_gpu;
#[path = "../../kv-gpu/tests/kernels/bandwidth.rs"]
mod bandwidth;

use bandwidth::{Matrices, Rate, Sequences, attention, copies, gemv};
use kv_block::BlockFormat;
use kv_cuda::CudaDevice as Gpu;
use kv_gpu::{GpuBackend, GpuConfig};
use kv_rows::KvType;

/// The share of a copy's bandwidth that GEMV must reach.
const GEMV_SHARE: f64 = 0.7;

#[test]
fn gemv_and_attention_use_the_bandwidth() {
    let backend = GpuBackend::new(any_gpu::device(), GpuConfig::default());
    let copied = copies(backend.device(), 1 << 30).gigabytes();
    println!("RATE copy {copied:.0} GB/s");
    let share = |what: &str, rate: Rate| {
        let share = rate.gigabytes() / copied;
        let percent = 100.0 * share;
        println!(
            "RATE {what} {:.0} GB/s, {percent:.0} % of copies",
            rate.gigabytes()
        );
        share
    };
    let matrices = Matrices { width: 8192, n: 8 };
    let mut too_slow = Vec::new();
    for format in [BlockFormat::Q4_K, BlockFormat::Q8_0, BlockFormat::F16] {
        let share = share(&format!("GEMV {format}"), gemv(&backend, format, matrices));
        if share < GEMV_SHARE || share.is_nan() {
            too_slow.push(format!("{format}: {share:.2} of the bandwidth of copies"));
        }
    }
    for n in [1, 16] {
        for kv_type in [KvType::F16, KvType::Q8_0] {
            let sequences = Sequences {
                n,
                depth: 32768,
                n_layers: 2,
            };
            let what = format!("attention {kv_type}, {n} x 32768 tokens");
            share(&what, attention(&backend, kv_type, sequences));
        }
    }
    assert!(too_slow.is_empty(), "{too_slow:?}");
}
