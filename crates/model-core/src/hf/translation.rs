//! [`HfTranslation`]: a model directory in the keys and names of GGUF. Knows no architecture.

use std::path::Path;

use kv_graph::weights::{Weight, WeightSource};

use super::config::Bounds;
use super::files::TensorFiles;
use super::keys::Keys;
use super::sentence::DenseModules;
use super::weights::FIRST_BEHIND;
use super::{HfClass, HfClasses, HfConfig, HfHead, HfWeights, ModelFileError};
use super::{quantization, unread};
use crate::architecture::NO_HEAD;
use crate::blocks::{OUTPUT, TOKEN_EMBEDDING};
use crate::file_start::FileStart;
use crate::gguf::{Array, Metadata};

/// The tensor of the first dense module, in GGUF.
const FIRST_DENSE: &str = "dense_2.weight";

/// A model directory in the keys and names of GGUF. Its files are mapped: one that is changed in
/// place while it is open makes [`WeightSource::check`] of the weights fail from then on.
#[derive(Debug)]
pub struct HfTranslation {
    label: String,
    metadata: Metadata,
    weights: HfWeights,
}

/// A config of a known class, and the keys that it becomes.
struct TranslatedConfig<'a> {
    class: &'a HfClass,
    config: HfConfig,
    keys: Keys,
}

impl<'a> TranslatedConfig<'a> {
    fn new(
        config: HfConfig,
        name: Option<&str>,
        classes: &'a HfClasses,
    ) -> Result<Self, ModelFileError> {
        let class_name = class_of(&config)?;
        let class = classes.for_config(class_name, &config);
        let class = class.ok_or_else(|| classes.unsupported(&config, class_name))?;
        quantization::storage(&config)?;
        let config = match class.section {
            Some(section) => config.with_section(section),
            None => text_alone(config, class.name)?,
        };
        let config = config.with_aliases(class.aliases);
        let config = config.with_defaults(class.defaults);
        let config = match class.rotated_part {
            Some(part) => config.with_rotated_part(part),
            None => config,
        };
        for key in ["rope_parameters", "rope_scaling"] {
            config.check_object(key)?;
        }
        let mut keys = Keys::new(class.architecture);
        keys.set_whole("general.architecture", class.architecture);
        keys.set_whole("general.type", "model");
        if let Some(name) = name {
            keys.set_whole("general.name", name);
        }
        if class.head == HfHead::None {
            keys.set(NO_HEAD, true);
        }
        for key in class.keys.iter().copied().flatten() {
            key.apply(&config, &mut keys)?;
        }
        Ok(Self {
            class,
            config,
            keys,
        })
    }

    fn with_tensors(
        self,
        label: String,
        tensors: &TensorFiles,
    ) -> Result<HfTranslation, ModelFileError> {
        let (mut metadata, computed) = self.keys.into_parts();
        let mut weights = HfWeights::new(self.class, &self.config, tensors, computed)?;
        if self.class.has_tensor(FIRST_BEHIND) {
            let n_layers = self.config.count("num_hidden_layers")?;
            let architecture = self.class.architecture;
            count_layers_behind(architecture, n_layers, &weights, &mut metadata);
        }
        check_embedding(&self.config, &weights)?;
        for &(key, tensor) in self.class.layer_numbers {
            let numbers = weights.take_numbers(self.config.count("num_hidden_layers")?, tensor)?;
            metadata.insert(key, Array::F32(numbers));
        }
        if let Some(derive) = self.class.derive {
            derive(&self.config, &mut weights)?;
        }
        match self.class.head {
            HfHead::Logits => tie(&self.config, &mut weights)?,
            HfHead::Own => {}
            HfHead::None => weights.forget(OUTPUT),
        }
        unread::check(&self.config)?;
        Ok(HfTranslation {
            label,
            metadata,
            weights,
        })
    }
}

impl HfTranslation {
    /// Opens a directory with a `config.json` and one or more safetensors files. A tokenizer is
    /// translated where there is a `tokenizer.json`. Whether the tensors make a model is not
    /// checked.
    ///
    /// # Errors
    /// [`ModelFileError`] naming the file, key or tensor that is missing, wrong or not supported.
    pub fn open(directory: impl AsRef<Path>, classes: &HfClasses) -> Result<Self, ModelFileError> {
        let directory = directory.as_ref();
        let mut config = HfConfig::open(&directory.join("config.json"))?;
        let generation = HfConfig::open_optional(&directory.join("generation_config.json"))?;
        if let Some(generation) = &generation {
            config = config.with_start_of(generation);
        }
        let name = directory.file_name().map(|name| name.to_string_lossy());
        // What is wrong with the config is said first, then that the tensors are not there.
        let tensors = quantization::storage(&config)
            .and_then(|storage| TensorFiles::open(directory, storage));
        let bounds = tensors
            .as_ref()
            .map_or(Bounds::UNKNOWN, TensorFiles::bounds);
        let config = config.with_bounds(bounds);
        let mut translated = TranslatedConfig::new(config, name.as_deref(), classes)?;
        let generation = generation.as_ref();
        let TranslatedConfig { config, keys, .. } = &mut translated;
        super::tokenizer::translate(directory, config, generation, keys)?;
        let dense = if translated.class.has_tensor(FIRST_DENSE) {
            DenseModules::Taken
        } else {
            DenseModules::Refused
        };
        let dense = super::sentence::translate(directory, dense, &mut translated.keys)?;
        let mut tensors = tensors?;
        for (at, folder) in (2..).zip(&dense) {
            tensors.add_module(folder, &format!("dense_{at}."))?;
        }
        translated.with_tensors(format!("'{}'", directory.display()), &tensors)
    }

    /// A model in memory: a config, and tensors under the names that they have in safetensors
    /// files. It has no tokenizer.
    ///
    /// # Errors
    /// [`ModelFileError`] naming the key or tensor that is missing, wrong or not supported.
    pub fn from_parts(
        name: &str,
        config: HfConfig,
        tensors: &dyn WeightSource,
        classes: &HfClasses,
    ) -> Result<Self, ModelFileError> {
        let tensors = TensorFiles::from_source(tensors)?;
        let config = config.with_bounds(tensors.bounds());
        let translated = TranslatedConfig::new(config, Some(name), classes)?;
        translated.with_tensors(format!("'{name}'"), &tensors)
    }

    /// A model of which only the headers of its files are known: a config, what of
    /// `generation_config.json` begins texts, and the first bytes of each safetensors file. Its
    /// tensors have shapes and formats, but no values; it has no tokenizer, and no modules of
    /// sentence-transformers.
    ///
    /// # Errors
    /// [`ModelFileError`] naming the file, key or tensor that is missing, wrong or not supported.
    pub fn from_headers(
        name: &str,
        config: HfConfig,
        generation: Option<&HfConfig>,
        starts: &[FileStart],
        classes: &HfClasses,
    ) -> Result<Self, ModelFileError> {
        let config = match generation {
            Some(generation) => config.with_start_of(generation),
            None => config,
        };
        let tensors = TensorFiles::from_headers(starts)?;
        let config = config.with_bounds(tensors.bounds());
        let translated = TranslatedConfig::new(config, Some(name), classes)?;
        translated.with_tensors(format!("'{name}'"), &tensors)
    }

    /// The metadata that a GGUF file of this model would have.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The weights under GGUF names.
    pub fn weights(&self) -> &HfWeights {
        &self.weights
    }

    /// The directory's name in errors: its path in quotes.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// Metadata and weights, to keep.
    pub fn into_parts(self) -> (Metadata, HfWeights) {
        (self.metadata, self.weights)
    }
}

/// The settings of other parts that a class of text alone has no place for.
const OTHER_PARTS: [&str; 2] = ["vision_config", "audio_config"];

/// The same config of a class of text alone.
fn text_alone(config: HfConfig, class: &str) -> Result<HfConfig, ModelFileError> {
    let part = OTHER_PARTS.iter().find(|part| config.value(part).is_some());
    match part {
        None => Ok(config),
        Some(part) => Err(config.wrong(part, format!("absent, as '{class}' is of text alone"))),
    }
}

/// The one class that a config names.
fn class_of(config: &HfConfig) -> Result<&str, ModelFileError> {
    let key = "architectures";
    let wanted = "a list of one class, like [\"LlamaForCausalLM\"]";
    match config.optional_texts(key)?.as_deref() {
        Some([class]) => Ok(class),
        Some(_) => Err(config.wrong(key, wanted)),
        None => Err(config.missing(key, wanted)),
    }
}

/// Counts the layers that are there behind the config's last one: they predict the tokens after the
/// next. Configs count them whether they are there or not.
fn count_layers_behind(
    architecture: &str,
    n_layers: usize,
    weights: &HfWeights,
    metadata: &mut Metadata,
) {
    let is_there = |number: &usize| {
        let place = format!("blk.{number}.nextn.");
        weights.translated().any(|name| name.starts_with(&place))
    };
    let n_behind = (n_layers..).take_while(is_there).count();
    if n_behind > 0 {
        let number = |n| u32::try_from(n).unwrap_or(u32::MAX);
        let all = format!("{architecture}.block_count");
        metadata.insert(&all, number(n_layers + n_behind));
        let behind = format!("{architecture}.nextn_predict_layers");
        metadata.insert(&behind, number(n_behind));
    }
}

/// Checks that the embedding has as many rows as the config's vocabulary.
fn check_embedding(config: &HfConfig, weights: &HfWeights) -> Result<(), ModelFileError> {
    let (Some(vocab), Ok(found)) = (
        config.optional_count("vocab_size")?,
        weights.describe(TOKEN_EMBEDDING),
    ) else {
        return Ok(());
    };
    match found.shape.first() {
        Some(&rows) if rows != vocab => Err(ModelFileError::Tensor {
            name: weights.name_in_files(TOKEN_EMBEDDING).unwrap_or_default(),
            reason: format!(
                "shape {:?}, but 'vocab_size' in {} is {vocab}",
                found.shape,
                config.file()
            ),
        }),
        _ => Ok(()),
    }
}

/// True if two weights have the same values in the same form.
fn are_equal(a: &Weight, b: &Weight) -> bool {
    const CHUNK: usize = 1 << 20;
    if (a.shape(), a.format()) != (b.shape(), b.format()) {
        return false;
    }
    let (mut of_a, mut of_b) = (vec![0; CHUNK], vec![0; CHUNK]);
    let n_bytes = a.bytes().len();
    (0..n_bytes).step_by(CHUNK).all(|start| {
        let n = CHUNK.min(n_bytes - start);
        let (of_a, of_b) = (&mut of_a[..n], &mut of_b[..n]);
        a.bytes().copy(start, of_a) && b.bytes().copy(start, of_b) && of_a == of_b
    })
}

/// Drops an output matrix that is the embedding, where the config ties them, and requires one where
/// it does not. A tied matrix with other values is used, as in transformers 5: files of models that
/// were trained further or saved again have such configs.
fn tie(config: &HfConfig, weights: &mut HfWeights) -> Result<(), ModelFileError> {
    match config.optional_flag("tie_word_embeddings")? {
        Some(true) => {
            let (output, embedding) = (weights.get(OUTPUT), weights.get(TOKEN_EMBEDDING));
            match (output, embedding) {
                (Some(output), Some(embedding)) if !are_equal(&output, &embedding) => {
                    let name = weights.name_in_files(OUTPUT).unwrap_or_default();
                    tracing::warn!(
                        "'tie_word_embeddings' in {} is true, but '{name}' is not the embedding: it \
                         is used",
                        config.file()
                    );
                }
                _ => weights.forget(OUTPUT),
            }
        }
        Some(false) if weights.describe(OUTPUT).is_err() => {
            if let Some(name) = weights.name_in_files(OUTPUT) {
                let reason = format!(
                    "it is missing, but 'tie_word_embeddings' in {} is false",
                    config.file()
                );
                return Err(ModelFileError::Tensor { name, reason });
            }
        }
        _ => {}
    }
    Ok(())
}
