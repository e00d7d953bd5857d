//! [`Recipe`]: a model directory whose weights are generated from the tensors' names.
//!
//! A recipe stores `config.json`, the name, shape, mean and scale of every tensor, and a seed. The
//! values come from a hash of the name and the element's index, which `recipe.py` computes to the
//! same bits; `fixtures/MANIFEST.md` defines it. Invariant: a tensor depends on its own line and
//! the seed alone. Knows no architecture.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use kv_block::BlockFormat;
use kv_graph::weights::{Weight, WeightError, WeightInfo, WeightSource};
use model_core::architecture::Registry;
use model_core::directory::HfDirectory;
use model_core::hf::{HfConfig, HfTranslation, ModelFileError};
use safetensors::tensor::{Dtype, TensorView};
use serde::Deserialize;
use serde_json::{Map, Number, Value};

use crate::{Reference, fixture};

/// The values of one tensor: uniform in `[mean - scale, mean + scale)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Distribution {
    /// Middle of the interval.
    pub mean: f32,
    /// Half of its width; 0 makes a constant.
    pub scale: f32,
}

/// A hash of a tensor's name and seed, from which its values follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorKey(u64);

impl TensorKey {
    /// The key of a tensor.
    pub fn new(name: &str, seed: u64) -> Self {
        Self(fnv1a64(name.bytes()) ^ seed)
    }

    /// 24 hashed bits for an element.
    fn bits(self, index: u64) -> u32 {
        let golden = 0x9E37_79B9_7F4A_7C15;
        let mut z = self.0.wrapping_add((index + 1).wrapping_mul(golden));
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 40) as u32
    }

    /// The value in `[-1, 1)` of an element, exact in f32.
    pub fn unit(self, index: u64) -> f32 {
        let half = 1 << 23;
        (self.bits(index) as i32 - half) as f32 / half as f32
    }

    /// The first `n` values of a tensor.
    pub fn values(self, n: usize, distribution: Distribution) -> impl Iterator<Item = f32> {
        // Two roundings: a fused multiply-add would give other bits.
        (0..n as u64).map(move |index| distribution.mean + distribution.scale * self.unit(index))
    }
}

/// The hash FNV-1a of 64 bits.
pub(crate) fn fnv1a64(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
    })
}

/// One line of `recipe.json`.
#[derive(Deserialize)]
struct TensorEntry {
    name: String,
    shape: Vec<usize>,
    mean: Number,
    scale: Number,
}

/// A tensor of whole numbers at the same distance.
#[derive(Clone, Debug, Deserialize)]
struct IntegerEntry {
    name: String,
    first: i64,
    step: i64,
    n: usize,
}

impl IntegerEntry {
    fn bytes(&self) -> Vec<u8> {
        let numbers = (0i64..).take(self.n).map(|at| self.first + at * self.step);
        numbers.flat_map(i64::to_le_bytes).collect()
    }
}

/// `recipe.json`.
#[derive(Deserialize)]
struct RecipeFile {
    format: u32,
    seed: u64,
    tensors: Vec<TensorEntry>,
    /// The recipe whose config and tensors it has besides.
    #[serde(default)]
    extends: Option<String>,
    /// Tensors of whole numbers, which only files have.
    #[serde(default)]
    integers: Vec<IntegerEntry>,
    /// Rows that prompts have in place of tokens; not part of the model.
    #[serde(default)]
    inputs: Vec<TensorEntry>,
}

/// A decimal number as the nearest f32, not by way of f64.
fn parsed(number: &Number) -> f32 {
    number.to_string().parse().unwrap()
}

/// The statements of a recipe on one tensor.
#[derive(Clone, Debug)]
struct TensorRecipe {
    shape: Vec<usize>,
    distribution: Distribution,
}

/// The tensors of a recipe, computed each time they are asked for.
#[derive(Clone, Debug)]
struct GeneratedWeights {
    seed: u64,
    tensors: BTreeMap<String, TensorRecipe>,
}

impl GeneratedWeights {
    fn new(seed: u64, lines: Vec<TensorEntry>) -> Self {
        let tensors = lines.into_iter().map(|line| {
            let distribution = Distribution {
                mean: parsed(&line.mean),
                scale: parsed(&line.scale),
            };
            let shape = line.shape;
            (
                line.name,
                TensorRecipe {
                    shape,
                    distribution,
                },
            )
        });
        Self {
            seed,
            tensors: tensors.collect(),
        }
    }
}

impl WeightSource for GeneratedWeights {
    fn get(&self, name: &str) -> Option<Weight> {
        let tensor = self.tensors.get(name)?;
        let key = TensorKey::new(name, self.seed);
        let values = key.values(tensor.shape.iter().product(), tensor.distribution);
        let values: Vec<f32> = values.collect();
        Some(Weight::from_f32(name, tensor.shape.clone(), &values).unwrap())
    }

    fn names(&self) -> Vec<String> {
        self.tensors.keys().cloned().collect()
    }

    fn describe(&self, name: &str) -> Result<WeightInfo, WeightError> {
        let missing = || WeightError::Missing {
            name: name.to_owned(),
        };
        let tensor = self.tensors.get(name).ok_or_else(missing)?;
        Ok(WeightInfo {
            shape: tensor.shape.clone(),
            format: BlockFormat::F32,
        })
    }
}

const MODEL_FILES: [&str; 2] = ["config.json", "model.safetensors"];
const ADAPTER_FILES: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];

/// A model directory without stored weights.
#[derive(Clone, Debug)]
pub struct Recipe {
    folder: PathBuf,
    /// Settings and tensors, as a directory has them.
    files: [&'static str; 2],
    config: Map<String, Value>,
    weights: GeneratedWeights,
    integers: Vec<IntegerEntry>,
    inputs: GeneratedWeights,
}

impl Recipe {
    /// The recipe of this name in `fixtures/recipes`.
    pub fn named(name: &str) -> Self {
        Self::open(&fixture("recipes").join(name))
    }

    /// All recipes of a folder, by name.
    pub fn all_in(folder: &Path) -> Vec<Self> {
        let entries = fs::read_dir(folder).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        let mut paths: Vec<_> = paths
            .filter(|path| path.join("recipe.json").exists())
            .collect();
        paths.sort();
        paths.iter().map(|path| Self::open(path)).collect()
    }

    /// The recipe in a folder.
    pub fn open(folder: &Path) -> Self {
        Self::with_files(folder, MODEL_FILES)
    }

    /// The adapter in a folder: a directory of the PEFT library.
    pub fn adapter(folder: &Path) -> Self {
        Self::with_files(folder, ADAPTER_FILES)
    }

    fn with_files(folder: &Path, files: [&'static str; 2]) -> Self {
        let read = |file: &str| {
            let path = folder.join(file);
            fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
        };
        let file: RecipeFile = serde_json::from_slice(&read("recipe.json")).unwrap();
        assert_eq!(file.format, 1, "{}", folder.display());
        let (config, more) = match file.extends {
            None => {
                let config = serde_json::from_slice(&read(files[0])).unwrap();
                (config, BTreeMap::new())
            }
            Some(name) => {
                let Self {
                    config, weights, ..
                } = Self::named(&name);
                assert_eq!(weights.seed, file.seed, "{}", folder.display());
                (config, weights.tensors)
            }
        };
        let mut weights = GeneratedWeights::new(file.seed, file.tensors);
        weights.tensors.extend(more);
        Self {
            folder: folder.to_owned(),
            files,
            config,
            weights,
            integers: file.integers,
            inputs: GeneratedWeights::new(file.seed, file.inputs),
        }
    }

    /// Its name: that of its folder.
    pub fn name(&self) -> String {
        let name = self.folder.file_name().unwrap();
        name.to_string_lossy().into_owned()
    }

    /// The folder of its files.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// `config.json`.
    pub fn config(&self) -> &Map<String, Value> {
        &self.config
    }

    /// The same with another config.
    #[must_use]
    pub fn with_config(mut self, edit: impl FnOnce(&mut Map<String, Value>)) -> Self {
        edit(&mut self.config);
        self
    }

    /// The tensors under the names of `model.safetensors`.
    pub fn weights(&self) -> &dyn WeightSource {
        &self.weights
    }

    /// The rows that a prompt has in place of tokens, one after the other, where it has any.
    pub fn given_rows(&self, prompt: usize) -> Option<Vec<f32>> {
        let rows = self.inputs.get(&format!("image_embeds_{prompt}"))?;
        Some(rows.to_f32())
    }

    /// The final rows that a head which drafts reads.
    pub fn rows_before(&self) -> Vec<f32> {
        self.inputs.get("rows").unwrap().to_f32()
    }

    /// The same without the tensor of this name.
    #[must_use]
    pub fn without(mut self, name: &str) -> Self {
        let n = self.integers.len();
        self.integers.retain(|entry| entry.name != name);
        let is_there = self.weights.tensors.remove(name).is_some() || self.integers.len() < n;
        assert!(is_there, "{name}");
        self
    }

    /// The same with the tensor of this name in another shape.
    #[must_use]
    pub fn reshaped(mut self, name: &str, shape: &[usize]) -> Self {
        self.weights.tensors.get_mut(name).unwrap().shape = shape.to_vec();
        self
    }

    /// The same with another step from number to number of a tensor of whole ones.
    #[must_use]
    pub fn with_step(mut self, name: &str, step: i64) -> Self {
        let mut named = self.integers.iter_mut();
        named.find(|entry| entry.name == name).unwrap().step = step;
        self
    }

    fn hf_config(&self) -> HfConfig {
        HfConfig::new("'config.json'", self.config.clone())
    }

    /// The directory in the keys and names of GGUF.
    ///
    /// # Errors
    /// As [`HfTranslation::from_parts`].
    pub fn translated(&self, registry: &Registry) -> Result<HfTranslation, ModelFileError> {
        let (name, config) = (self.name(), self.hf_config());
        HfTranslation::from_parts(&name, config, &self.weights, registry.hf_classes())
    }

    /// The directory with its model, in memory.
    ///
    /// # Errors
    /// As [`Self::translated`], and [`HfDirectory::from_translation`].
    pub fn directory(&self, registry: &Registry) -> Result<HfDirectory, ModelFileError> {
        HfDirectory::from_translation(self.translated(registry)?, registry)
    }

    /// Writes `config.json` and `model.safetensors`, or those of an adapter, into a folder, which
    /// is made.
    pub fn expand(&self, to: &Path) {
        fs::create_dir_all(to).unwrap();
        let config = serde_json::to_vec(&self.config).unwrap();
        fs::write(to.join(self.files[0]), config).unwrap();
        let names = self.weights.names();
        let weights: Vec<Weight> = names
            .iter()
            .map(|name| self.weights.get(name).unwrap())
            .collect();
        let views = weights.iter().map(|weight| {
            let shape = weight.shape().to_vec();
            let view = TensorView::new(Dtype::F32, shape, weight.bytes()).unwrap();
            (weight.name(), view)
        });
        let integers = self.integers.iter().map(|entry| (entry, entry.bytes()));
        let integers: Vec<_> = integers.collect();
        let of_integers = integers.iter().map(|(entry, bytes)| {
            let view = TensorView::new(Dtype::I64, vec![entry.n], bytes).unwrap();
            (&*entry.name, view)
        });
        let bytes = safetensors::serialize(views.chain(of_integers), None).unwrap();
        fs::write(to.join(self.files[1]), bytes).unwrap();
    }

    /// The results of an independent implementation.
    pub fn reference(&self) -> Reference {
        Reference::open(&self.folder.join("reference.safetensors"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One of the worked vectors of `MANIFEST.md`.
    struct Vector {
        name: &'static str,
        seed: u64,
        distribution: Distribution,
        index: u64,
        hash: u64,
        key: u64,
        bits: u32,
        unit: f32,
        value: u32,
        first_4096: u64,
    }

    const VECTORS: [Vector; 3] = [
        Vector {
            name: "model.embed_tokens.weight",
            seed: 1,
            distribution: Distribution {
                mean: 0.0,
                scale: 0.65,
            },
            index: 0,
            hash: 0xa88f_d795_d5c6_d156,
            key: 0xa88f_d795_d5c6_d157,
            bits: 0x5a_02f2,
            unit: -0.296_785_12,
            value: 0xbe45_8a48,
            first_4096: 0x62fa_6398_1f40_b6f2,
        },
        Vector {
            name: "model.norm.weight",
            seed: 7,
            distribution: Distribution {
                mean: 1.0,
                scale: 0.346,
            },
            index: 63,
            hash: 0xd6d6_e5af_d116_04e4,
            key: 0xd6d6_e5af_d116_04e3,
            bits: 0xce_a071,
            unit: 0.614_271_3,
            value: 0x3f9b_3471,
            first_4096: 0xc495_39b4_c3be_a481,
        },
        Vector {
            name: "backbone.layers.0.mixer.A_log",
            seed: 123_456_789,
            distribution: Distribution {
                mean: -0.52,
                scale: 1.7,
            },
            index: 1000,
            hash: 0x99a1_390b_c9b0_933d,
            key: 0x99a1_390b_ceeb_5e28,
            bits: 0xd8_1e47,
            unit: 0.688_424,
            value: 0x3f26_7b6e,
            first_4096: 0x4416_d980_c652_4d80,
        },
    ];

    #[test]
    fn values_are_those_of_the_worked_vectors() {
        for vector in VECTORS {
            let Vector { name, index, .. } = vector;
            assert_eq!(fnv1a64(name.bytes()), vector.hash, "{name}");
            let key = TensorKey::new(name, vector.seed);
            assert_eq!(key.0, vector.key, "{name}");
            assert_eq!(key.bits(index), vector.bits, "{name}");
            assert_eq!(key.unit(index).to_bits(), vector.unit.to_bits(), "{name}");
            let values: Vec<f32> = key.values(4096, vector.distribution).collect();
            assert_eq!(values[index as usize].to_bits(), vector.value, "{name}");
            let bytes = values.iter().flat_map(|v| v.to_le_bytes());
            assert_eq!(fnv1a64(bytes), vector.first_4096, "{name}");
        }
    }

    #[test]
    fn the_unit_interval_is_closed_below_and_open_above() {
        let key = TensorKey::new("a", 0);
        let units = (0..100_000).map(|index| key.unit(index));
        let (low, high) = units.fold((0f32, 0f32), |(low, high), u| (low.min(u), high.max(u)));
        assert!((-1.0..-0.999).contains(&low), "{low}");
        assert!((0.999..1.0).contains(&high), "{high}");
    }

    #[test]
    fn an_expanded_recipe_holds_what_the_recipe_generates() {
        let recipe = Recipe::named("llama_gqa_tied");
        let made = tempfile::tempdir().unwrap();
        recipe.expand(made.path());
        let bytes = fs::read(made.path().join("model.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.len(), recipe.weights().names().len());
        for name in recipe.weights().names() {
            let (stored, weight) = (file.tensor(&name), recipe.weights().get(&name).unwrap());
            let stored = stored.unwrap();
            assert_eq!(stored.shape(), weight.shape(), "{name}");
            assert_eq!(
                recipe.weights().describe(&name),
                Ok(weight.info()),
                "{name}"
            );
            assert!(stored.data() == &**weight.bytes(), "{name}");
        }
    }

    #[test]
    fn the_manifest_names_every_fixture() {
        let manifest = fs::read_to_string(fixture("MANIFEST.md")).unwrap();
        for entry in fs::read_dir(fixture("recipes")).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            assert!(manifest.contains(&format!("| {name} |")), "{name}");
        }
        for entry in fs::read_dir(fixture("")).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let is_named = manifest.contains(&format!("`{name}"));
            assert!(is_named || name == "MANIFEST.md", "{name}");
        }
    }
}
