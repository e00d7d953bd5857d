//! Model directories whose weights are stored once, in the GGUF file that a converter made of them:
//! a recipe says which values go where. What comes out is checked to be the original, bit for bit.
//!
//! Knows no architecture and none of the rules that translate directories: only copies.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use kv_core::weights::WeightSource;
use model_core::gguf::GgufFile;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;

/// Name, shape and little-endian values of a tensor.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<u8>)>;

/// Writes the directory that the recipe in `from` describes: its config, its weights, its
/// reference, and the GGUF file where that is a conversion of this very directory.
pub(crate) fn prepare(root: &Path, from: &Path, to: &Path) {
    let text = fs::read_to_string(from.join("recipe.json")).unwrap();
    let recipe: Value = serde_json::from_str(&text).unwrap();
    let stored = |key: &str| root.join(recipe[key].as_str().unwrap());
    fs::create_dir_all(to).unwrap();
    fs::copy(from.join("config.json"), to.join("config.json")).unwrap();
    fs::copy(stored("reference"), to.join("reference.safetensors")).unwrap();
    if recipe["own_gguf"] == true {
        fs::copy(stored("gguf"), to.join("model-f32.gguf")).unwrap();
    }
    let mut tensors = rest(&from.join("rest.safetensors"));
    let file = GgufFile::open(stored("gguf")).unwrap();
    for (name, tensor) in recipe["tensors"].as_object().unwrap() {
        let shape = numbers(&tensor["shape"]);
        let mut values = vec![f32::NAN; shape.iter().product()];
        for copy in tensor["copies"].as_array().unwrap() {
            let source = file.require(copy[0].as_str().unwrap()).unwrap().to_f32();
            copied(copy, &source, &mut values);
        }
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        tensors.insert(name.clone(), (shape, bytes));
    }
    let all = tensors.values().flat_map(|(_, bytes)| bytes);
    let hash = format!("{:016x}", fnv1a(all.copied()));
    assert_eq!(recipe["fnv1a"], hash, "{}", from.display());
    let views = tensors.iter().map(|(name, (shape, bytes))| {
        let view = TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap();
        (name, view)
    });
    let bytes = safetensors::serialize(views, None).unwrap();
    fs::write(to.join("model.safetensors"), bytes).unwrap();
}

/// Tensors that the conversion rounded.
fn rest(path: &Path) -> Tensors {
    let Ok(bytes) = fs::read(path) else {
        return Tensors::new();
    };
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.iter().map(|(name, tensor)| {
        let content = (tensor.shape().to_vec(), tensor.data().to_vec());
        (name.to_owned(), content)
    });
    tensors.collect()
}

/// `[tensor, counts, from, steps there, to, steps here]`: for every index of so many counts, a
/// value from the one place to the other.
fn copied(copy: &Value, source: &[f32], values: &mut [f32]) {
    let [counts, there, here] = [1, 3, 5].map(|i| numbers(&copy[i]));
    let [from, to] = [2, 4].map(|i| number(&copy[i]));
    for at in 0..counts.iter().product() {
        let (mut rest, mut from, mut to) = (at, from, to);
        for axis in (0..counts.len()).rev() {
            let index = rest % counts[axis];
            rest /= counts[axis];
            from += index * there[axis];
            to += index * here[axis];
        }
        values[to] = source[from];
    }
}

fn number(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(number).collect()
}

/// The hash FNV-1a of 64 bits.
fn fnv1a(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
