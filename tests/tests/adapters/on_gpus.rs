//! Adapters on the simulator of GPU kernels: each row is what it is on the CPU, also where others
//! with other adapters are in its step.

use std::sync::Arc;

use cellar_engine::{Engine, EngineConfig, TextAdapters};
use kv_backend::{Backend, Split};
use kv_core::batch::Batch;
use kv_core::{SeqId, TokenId};
use kv_gpu::sim::{Order, Sim};
use kv_gpu::{GpuBackend, GpuConfig, Precision};
use kv_graph::SplitPoint;
use model_tests::checks::ONE;
use model_tests::{cpu, distance};

use super::references::ALL;
use super::{Files, adapter, engine, logits};

/// Tokens that the simulator computes in a second: more than one pass over a matrix takes.
const SHORT: usize = 9;

fn sim(precision: Precision) -> GpuBackend<Sim> {
    GpuBackend::new(Sim::new(Order::Reverse), GpuConfig { precision })
}

#[test]
fn logits_are_those_of_the_cpu() {
    for (name, model) in ALL {
        let files = Files::new();
        let file = files.open_with(&files.model(model), &[(name, 1.0)]);
        let ids = adapter(name).reference().ids("ids_0").unwrap();
        let ids = &ids[..SHORT];
        let wanted = logits(&mut engine(cpu(), &file, EngineConfig::default()), ids);
        for (precision, most) in [(Precision::Precise, 2e-4), (Precision::Fast, 0.05)] {
            let got = logits(
                &mut engine(sim(precision), &file, EngineConfig::default()),
                ids,
            );
            let off = distance(&got, &wanted);
            println!("{name}, {precision:?}: off by {off:.1e}");
            assert!(off < most, "{name}, {precision:?}: off by {off}");
        }
    }
}

fn together<B: Backend>(engine: &mut Engine<B>) -> Vec<f32> {
    let adapters = Arc::clone(engine.model().adapters().unwrap());
    let all = [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.5, 0.0, -0.5]];
    let mut batch = Batch::new();
    for (seq, scales) in (0..).zip(all) {
        let text = TextAdapters::new(&adapters, &Arc::from(scales), &[]).unwrap();
        engine.set_adapters(SeqId(seq), Some(text));
        for at in 0..4 {
            let entry = batch.push_token(TokenId(40 + at * 7 + seq));
            entry.in_sequence(SeqId(seq)).with_output();
        }
    }
    engine.decode(&batch).unwrap().values().to_vec()
}

#[test]
fn rows_with_different_adapters_are_in_one_step() {
    let files = Files::new();
    let set = [("all_linear", 0.0), ("patterns", 0.0), ("ends", 0.0)];
    let file = files.open_with(&files.model("llama_gqa_untied"), &set);
    let config = EngineConfig {
        n_seqs: 3,
        ..EngineConfig::default()
    };
    let wanted = together(&mut engine(cpu(), &file, config.clone()));
    let got = together(&mut engine(sim(Precision::Precise), &file, config.clone()));
    let off = distance(&got, &wanted);
    assert!(off < 2e-4, "off by {off}");
    // The CPU computes the first layers.
    let graph = file.model().graph(ONE).unwrap();
    let point = SplitPoint::new(&graph, graph.n_blocks() / 2).unwrap();
    let both = Split::new(cpu(), sim(Precision::Precise), point);
    let off = distance(&together(&mut engine(both, &file, config)), &wanted);
    assert!(off < 2e-4, "in two: off by {off}");
}
