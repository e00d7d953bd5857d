//! [`QuantizedDirectory`]: a model directory that others quantized, in memory: a recipe, some of
//! whose matrices are those of a fixture (`fixtures/quantized/make.py`).

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Map, Value};

use crate::{Recipe, fixture};

/// A tensor of a safetensors file.
#[derive(Clone, Debug)]
pub struct StoredTensor {
    /// Its type.
    pub dtype: Dtype,
    /// Outermost dimension first.
    pub shape: Vec<usize>,
    /// Its values.
    pub bytes: Vec<u8>,
}

impl StoredTensor {
    /// Whole numbers of 4 bytes.
    pub fn of_i32(shape: &[usize], numbers: impl IntoIterator<Item = i32>) -> Self {
        Self {
            dtype: Dtype::I32,
            shape: shape.to_vec(),
            bytes: numbers.into_iter().flat_map(i32::to_le_bytes).collect(),
        }
    }
}

/// A model directory in memory.
#[derive(Clone, Debug)]
pub struct QuantizedDirectory {
    /// `config.json`.
    pub config: Map<String, Value>,
    /// All tensors, by name.
    pub tensors: BTreeMap<String, StoredTensor>,
}

impl QuantizedDirectory {
    /// A recipe without the matrices of these modules.
    pub fn without(recipe: &Recipe, is_packed: impl Fn(&str) -> bool) -> Self {
        let weights = recipe.weights();
        let kept = weights.names().into_iter().filter(|name| {
            let module = name.strip_suffix(".weight");
            !module.is_some_and(&is_packed)
        });
        let tensor = |name: String| {
            let weight = weights.require(&name).unwrap();
            let stored = StoredTensor {
                dtype: Dtype::F32,
                shape: weight.shape().to_vec(),
                bytes: weight.bytes().to_vec(),
            };
            (name, stored)
        };
        Self {
            config: recipe.config().clone(),
            tensors: kept.map(tensor).collect(),
        }
    }

    /// The fixture of this name.
    pub fn named(name: &str) -> Self {
        let folder = fixture("quantized").join(name);
        let settings = std::fs::read(folder.join("config.json")).unwrap();
        let settings: Value = serde_json::from_slice(&settings).unwrap();
        let bytes = std::fs::read(folder.join("packed.safetensors")).unwrap();
        let packed = SafeTensors::deserialize(&bytes).unwrap();
        let is_packed = |module: &str| {
            let place = format!("{module}.");
            packed.names().iter().any(|name| name.starts_with(&place))
        };
        let recipe = Recipe::named(settings["recipe"].as_str().unwrap());
        let mut directory = Self::without(&recipe, is_packed);
        let quantization = settings["quantization_config"].clone();
        let key = "quantization_config".to_owned();
        directory.config.insert(key, quantization);
        let tensors = packed.iter().map(|(name, tensor)| {
            let stored = StoredTensor {
                dtype: tensor.dtype(),
                shape: tensor.shape().to_vec(),
                bytes: tensor.data().to_vec(),
            };
            (name.to_owned(), stored)
        });
        directory.tensors.extend(tensors);
        directory
    }

    /// Writes its files into this folder.
    pub fn write(&self, to: &Path) {
        let config = serde_json::to_vec(&self.config).unwrap();
        std::fs::write(to.join("config.json"), config).unwrap();
        let views = self.tensors.iter().map(|(name, tensor)| {
            let view = TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes);
            (name, view.unwrap())
        });
        let bytes = safetensors::serialize(views, None).unwrap();
        std::fs::write(to.join("model.safetensors"), bytes).unwrap();
    }
}
