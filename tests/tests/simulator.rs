//! Whole models on the simulator of GPU kernels: a Llama, sliding windows, Mamba-2 and a mixture of
//! experts, with sequences that share batches.

use kv_gpu::sim::{Order, Sim};
use kv_gpu::{GpuBackend, GpuConfig, Precision};
use model_tests::{Case, gpu};

/// What int8 activations and halves move these logits by, in units of what f32 may.
const FAST: f32 = 400.0;

fn sim(order: Order, precision: Precision) -> GpuBackend<Sim> {
    GpuBackend::new(Sim::new(order), GpuConfig { precision })
}

fn agrees(case: &Case) {
    gpu::logits_agree(sim(Order::Forward, Precision::Precise), case, 1.0);
    gpu::logits_agree(sim(Order::Reverse, Precision::Fast), case, FAST);
}

#[test]
fn a_llama_agrees() {
    agrees(&Case::recipe("llama_gqa_untied", model_llama::register));
}

#[test]
fn sliding_windows_agree() {
    agrees(&Case::recipe("gemma3_iswa8", model_llama::register));
}

#[test]
fn mamba_2_agrees() {
    agrees(&Case::recipe("mamba2", model_mamba::register));
}

#[test]
fn a_mixture_of_experts_agrees() {
    agrees(&Case::recipe("mixtral", model_llama::register));
}
