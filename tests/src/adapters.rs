//! Adapters of any model, made of hashes of names as recipes are.

use std::path::Path;

use kv_graph::weights::{Weight, WeightSource};
use model_core::gguf::GgufWriter;

use crate::{Distribution, TensorKey};

/// The rank of the matrices.
const RANK: usize = 2;

/// Writes an adapter of some matrices of each layer as a GGUF file; `seed` tells it from others.
pub fn write_adapter(path: &Path, architecture: &str, weights: &dyn WeightSource, seed: u64) {
    let mut writer = GgufWriter::new();
    writer.set("general.type", "adapter");
    writer.set("general.architecture", architecture);
    writer.set("adapter.type", "lora");
    // Strong enough for other words.
    writer.set("adapter.lora.alpha", 30.0 * RANK as f32);
    let ends = ["attn_q.weight", "ffn_down.weight"];
    let names = weights.names().into_iter();
    for name in names.filter(|name| ends.iter().any(|end| name.ends_with(end))) {
        let shape = weights.describe(&name).unwrap().shape;
        let part = |part: &str, shape: [usize; 2]| {
            let name = format!("{name}.lora_{part}");
            let distribution = Distribution {
                mean: 0.0,
                scale: 0.2,
            };
            let key = TensorKey::new(&name, seed);
            let values: Vec<f32> = key.values(shape[0] * shape[1], distribution).collect();
            Weight::from_f32(name, shape.to_vec(), &values).unwrap()
        };
        writer.add(part("a", [RANK, shape[1]])).unwrap();
        writer.add(part("b", [shape[0], RANK])).unwrap();
    }
    std::fs::write(path, writer.to_bytes().unwrap()).unwrap();
}
