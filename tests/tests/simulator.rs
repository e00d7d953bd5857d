//! Whole models on the simulator of GPU kernels: a Llama, sliding windows, Mamba-2, a mixture of
//! experts and latent attention, with sequences that share batches; and all that `cuda.rs` checks
//! on a GPU, in small.

use crate::gpu::texts::Length;
use crate::gpu::{self, encoders, fixtures, replays, soak, sources, states, texts};
use kv_backend::{DetachedExperts, ExpertShare, Split};
use kv_core::layers::RecentTokens;
use kv_gpu::sim::{Dialect, Order, Sim};
use kv_gpu::{GpuBackend, GpuConfig, Precision};
use kv_graph::SplitPoint;
use kv_rows::KvType;
use model_core::expert_tensors::expert_layer;
use model_tests::checks::{ONE, expert_share};
use model_tests::gpu::{distance_from_cpu, distance_from_cpu_with};
use model_tests::{Case, Setup, cpu};

fn sim(order: Order, precision: Precision) -> GpuBackend<Sim> {
    GpuBackend::new(Sim::new(order), GpuConfig { precision })
}

fn precise() -> GpuBackend<Sim> {
    sim(Order::Forward, Precision::Precise)
}

fn fast() -> GpuBackend<Sim> {
    sim(Order::Reverse, Precision::Fast)
}

/// The kernels that Metal gets.
mod metal {
    use super::*;

    fn backend(precision: Precision) -> GpuBackend<Sim> {
        let device = Sim::new(Order::Reverse).with_dialect(Dialect::Metal);
        GpuBackend::new(device, GpuConfig { precision })
    }

    #[test]
    fn four_models_agree() {
        let cases = fixtures::four();
        for precision in [Precision::Precise, Precision::Fast] {
            fixtures::assert_near(&cases, precision, |case| {
                distance_from_cpu(backend(precision), case)
            });
        }
    }
}

fn agree(cases: &[Case]) {
    for (backend, precision) in [
        (precise as fn() -> _, Precision::Precise),
        (fast, Precision::Fast),
    ] {
        let distance = |case: &Case| distance_from_cpu(backend(), case);
        fixtures::assert_near(cases, precision, distance);
    }
}

/// The CPU computes the first half of the layers, and the GPU the others.
#[test]
fn layers_are_shared_with_the_cpu() {
    let names = [
        "llama_gqa_untied",
        "gemma3_iswa8",
        "mamba2",
        "deepseek_v32",
        "rwkv7",
    ];
    for name in names {
        let case = Case::recipe(name, gpu::register);
        let graph = case.model().graph(ONE).unwrap();
        let point = SplitPoint::new(&graph, graph.n_blocks() / 2).unwrap();
        fixtures::assert_near(&[case], Precision::Precise, |case| {
            distance_from_cpu(Split::new(cpu(), precise(), point.clone()), case)
        });
    }
}

/// The experts of all layers, and those of the last one that has any.
fn shares(case: &Case) -> [ExpertShare; 2] {
    let all = expert_share(case, |_| true);
    let last = all.weights.iter().filter_map(|name| expert_layer(name));
    let last = last.max();
    [all, expert_share(case, |layer| Some(layer) == last)]
}

/// The CPU computes experts, and the GPU all else.
#[test]
fn experts_are_left_to_the_cpu() {
    for name in [
        "mixtral",
        "phimoe",
        "deepseek_v3",
        "gemma4_moe",
        "gpt_oss_swa8",
    ] {
        let case = Case::recipe(name, gpu::register);
        let [all, last] = shares(&case);
        assert!(all.n_layers > 1 && last.n_layers == 1, "{all:?}");
        let left =
            |share: &ExpertShare| DetachedExperts::new(precise(), cpu(), share.clone()).unwrap();
        for share in [&all, &last] {
            fixtures::assert_near(
                &[Case::recipe(name, gpu::register)],
                Precision::Precise,
                |case| distance_from_cpu(left(share), case),
            );
        }
        let graph = case.model().graph(ONE).unwrap();
        let point = SplitPoint::new(&graph, 1).unwrap();
        fixtures::assert_near(&[case], Precision::Precise, |case| {
            distance_from_cpu(Split::new(cpu(), left(&last), point.clone()), case)
        });
    }
    let case = Case::recipe("mixtral", gpu::register);
    let [all, _] = shares(&case);
    fixtures::assert_near(&[case], Precision::Fast, |case| {
        distance_from_cpu(
            DetachedExperts::new(fast(), cpu(), all.clone()).unwrap(),
            case,
        )
    });
}

/// Rows of old tokens have another type, alone and where layers are shared with the CPU.
#[test]
fn old_rows_agree() {
    let recent = RecentTokens {
        n_last: 5,
        n_first: 2,
    };
    let setup = Setup::with_old(KvType::F16, recent);
    for name in [
        "llama_gqa_untied",
        "gemma3_iswa8",
        "deepseek_v2_lite",
        "falcon_h1",
    ] {
        let case = [Case::recipe(name, gpu::register)];
        for (backend, precision) in [
            (precise as fn() -> _, Precision::Precise),
            (fast, Precision::Fast),
        ] {
            let distance = |case: &Case| distance_from_cpu_with(backend(), case, &setup);
            fixtures::assert_near(&case, precision, distance);
        }
    }
    let case = [Case::recipe("gemma3_iswa8", gpu::register)];
    fixtures::assert_near(&case, Precision::Precise, |case| {
        let layers = case.model().layers().with_recent(recent).unwrap();
        let graph = case
            .model()
            .graph(ONE)
            .unwrap()
            .with_recent(&layers)
            .unwrap();
        let point = SplitPoint::new(&graph, graph.n_blocks() / 2).unwrap();
        distance_from_cpu_with(Split::new(cpu(), precise(), point), case, &setup)
    });
}

fn agrees(name: &'static str) {
    agree(&[Case::recipe(name, gpu::register)]);
}

#[test]
fn a_llama_agrees() {
    agrees("llama_gqa_untied");
}

#[test]
fn sliding_windows_agree() {
    agrees("gemma3_iswa8");
}

#[test]
fn mamba_2_agrees() {
    agrees("mamba2");
}

#[test]
fn a_mixture_of_experts_agrees() {
    agrees("mixtral");
    agrees("phimoe");
}

#[test]
fn latents_and_groups_of_experts_agree() {
    agrees("deepseek_v3");
}

#[test]
fn gains_mixes_and_cuts_agree() {
    agrees("gemma3n");
    agrees("gemma4_e");
}

#[test]
fn experts_with_gains_agree() {
    agrees("gemma4_moe");
}

#[test]
fn delta_rules_and_joined_convolutions_agree() {
    agrees("kimi_linear");
}

#[test]
fn recurrences_that_the_host_computes_agree() {
    agrees("recurrent_gemma");
    agrees("xlstm");
    agrees("rwkv7");
}

#[test]
fn shared_blocks_and_linear_attention_agree() {
    agrees("zamba2");
    agrees("minimax");
}

#[test]
fn layer_norms_without_gains_agree() {
    agrees("olmo");
    agrees("stablelm_qk");
}

#[test]
fn sparse_attention_agrees() {
    agrees("deepseek_v32");
}

#[test]
#[ignore = "takes minutes: every model of the fixtures"]
fn every_fixture_agrees() {
    agree(&fixtures::all());
}

#[test]
fn encoders_agree() {
    encoders::vectors_agree(precise(), "modern_bert_tiny", 1e-5);
    encoders::scores_agree(precise(), "roberta_classifier", 1e-4);
    encoders::scores_agree(precise(), "modernbert_classifier", 1e-4);
    encoders::rows_agree(precise(), "jina_bert_v2", 1e-4);
    encoders::rows_agree(precise(), "nomic_bert_moe", 1e-4);
}

#[test]
fn scores_by_distance_agree() {
    encoders::rows_agree(precise(), "mpnet", 1e-4);
    encoders::scores_agree(precise(), "deberta_v2_reranker", 1e-4);
}

#[test]
fn texts_over_sources_agree() {
    for name in ["t5_relu_tied", "t5_v1_1", "bart", "m2m_100"] {
        sources::logits_agree(precise(), name, 2e-4);
        sources::logits_agree(fast(), name, 8e-2);
    }
}

#[test]
fn stories_begin_as_the_references() {
    let length = Length {
        n_prompts: 1,
        n_tokens: 3,
    };
    texts::stories_are_the_references(precise, length);
    texts::choices_are_the_cpus(fast, length, 0.1);
}

#[test]
fn states_move_between_simulator_and_cpu() {
    let case = Case::recipe("gemma3_iswa8", gpu::register);
    states::states_move(precise, &case, KvType::F16, 0.05);
    let case = Case::recipe("mamba2", gpu::register);
    states::states_move(precise, &case, KvType::F32, 1e-3);
}

#[test]
fn replays_change_no_bit() {
    for name in ["llama_gqa_untied", "mamba2"] {
        let case = Case::recipe(name, gpu::register);
        replays::replays_change_no_bit(|| Sim::new(Order::Forward), &case);
    }
}

/// Launches between two steps of the host are replayed, too.
#[test]
fn replays_around_experts_change_no_bit() {
    let case = Case::recipe("mixtral", gpu::register);
    let share = expert_share(&case, |_| true);
    let around = |backend| DetachedExperts::new(backend, cpu(), share.clone()).unwrap();
    replays::replays_change_no_bit_of(|| Sim::new(Order::Forward), around, &case);
}

#[test]
fn random_operations_leave_both_the_same() {
    soak::soak(precise, 28, soak::SoakLimit::Operations(25));
}

/// One of the models has experts, which the CPU computes.
#[test]
fn random_operations_beside_experts_leave_both_the_same() {
    let share = expert_share(&Case::recipe("jamba", gpu::register), |_| true);
    assert!(share.n_layers > 0);
    let left = || DetachedExperts::new(precise(), cpu(), share.clone()).unwrap();
    soak::soak(left, 29, soak::SoakLimit::Operations(8));
}
