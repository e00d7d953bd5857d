//! [`Case`]: a model with a reference.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kv_core::LayerIdx;
use kv_graph::weights::WeightSource;
use model_core::architecture::{Model, Registry};
use model_core::directory::HfDirectory;
use model_core::gguf::{GgufFile, Metadata};

use crate::checks::TOLERANCE;
use crate::recorded::{RecordedValues, TiledHeads, ssm_state};
use crate::{Recipe, Reference, fixture};

/// The order of the values of a key, next to the reference's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyOrder {
    /// The same.
    Same,
    /// Each head's halves as pairs.
    Pairs,
    /// The halves of the first values of each head, so many, as pairs.
    FirstPairs(usize),
    /// Rows of latents: the reference has the latents as keys, and the shared keys as values.
    Latents,
    /// The same, with the halves of the shared keys as pairs.
    LatentsInPairs,
    /// The same, with the halves of what rotates of an indexer's keys, so much, as pairs, too.
    IndexInPairs(usize),
}

/// The source of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The recipe of the case's name.
    Recipe,
    /// That in this folder of the fixtures.
    RecipeIn(&'static str),
    /// A GGUF file of the case's name in this folder of the fixtures.
    Gguf(&'static str),
    /// The directory of the case's name in this folder, with stored weights and a reference.
    Directory(&'static str),
    /// `model-f32.gguf` in that directory.
    GgufInDirectory(&'static str),
}

/// The state of a layer after a prompt, where the reference recorded it.
pub type StateReference = fn(&Reference, LayerIdx, usize) -> Option<RecordedValues>;

/// The place where the reference made a choice between equals that another implementation makes
/// otherwise: from this token of a prompt on its numbers are one of several that are right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fork {
    /// The prompt.
    pub prompt: usize,
    /// The token whose choice it was.
    pub token: usize,
    /// The layer whose choice it was: what it and earlier ones remember does not depend on it.
    pub layer: LayerIdx,
}

/// A model with a reference: tokens, logits and continuations, keys, values and states.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Name of the recipe, or of the GGUF file without its ending.
    pub name: &'static str,
    /// Adds the architectures that the model may be of.
    pub register: fn(&mut Registry),
    /// The source of the model.
    pub source: Source,
    /// The order of the values of its keys.
    pub keys: KeyOrder,
    /// Reads states from the reference.
    pub states: StateReference,
    /// The order of the value heads of a delta rule, where it is another than the reference's.
    pub tiled_heads: Option<TiledHeads>,
    /// Largest difference of a logit.
    pub tolerance: f32,
    /// Tokens of the context that the reference was computed for, where that chooses how the model
    /// rotates and is not the longest one.
    pub context: Option<usize>,
    /// The place where its reference is one of several.
    pub fork: Option<Fork>,
}

impl KeyOrder {
    /// True if rows hold latents, which are keys and values.
    pub fn is_latent(self) -> bool {
        matches!(
            self,
            Self::Latents | Self::LatentsInPairs | Self::IndexInPairs(_)
        )
    }
}

impl Case {
    /// A recipe whose keys and states have the order of the reference.
    pub const fn recipe(name: &'static str, register: fn(&mut Registry)) -> Self {
        Self {
            name,
            register,
            source: Source::Recipe,
            keys: KeyOrder::Same,
            states: ssm_state,
            tiled_heads: None,
            tolerance: TOLERANCE,
            context: None,
            fork: None,
        }
    }

    /// The case of this name among `cases`.
    pub fn named(cases: &'static [Self], name: &str) -> &'static Self {
        let case = cases.iter().find(|case| case.name == name);
        case.unwrap_or_else(|| panic!("no case {name}"))
    }

    /// The architectures.
    pub fn registry(&self) -> Registry {
        let mut registry = Registry::new();
        (self.register)(&mut registry);
        registry
    }

    fn file(folder: &str, name: &str) -> PathBuf {
        fixture(folder).join(name)
    }

    fn open_gguf(path: &Path) -> (Arc<dyn WeightSource>, Metadata) {
        let file = GgufFile::open(path).unwrap();
        let metadata = file.metadata().clone();
        (Arc::new(file), metadata)
    }

    /// The recipe that the model comes from.
    pub fn generated(&self) -> Recipe {
        match self.source {
            Source::RecipeIn(folder) => Recipe::open(&fixture(folder).join(self.name)),
            _ => Recipe::named(self.name),
        }
    }

    /// The tensors and the metadata, in the names and keys of GGUF.
    pub fn open(&self) -> (Arc<dyn WeightSource>, Metadata) {
        match self.source {
            Source::Recipe | Source::RecipeIn(_) => {
                let recipe = self.generated();
                let directory = recipe.directory(&self.registry());
                let directory = directory.unwrap_or_else(|e| panic!("{}: {e}", self.name));
                let weights = Arc::clone(directory.weights());
                (weights, directory.metadata().clone())
            }
            Source::Gguf(folder) => {
                let path = Self::file(folder, &format!("{}.gguf", self.name));
                Self::open_gguf(&path)
            }
            Source::GgufInDirectory(folder) => {
                Self::open_gguf(&Self::file(folder, self.name).join("model-f32.gguf"))
            }
            Source::Directory(folder) => {
                let directory = HfDirectory::open(Self::file(folder, self.name), &self.registry());
                let directory = directory.unwrap_or_else(|e| panic!("{}: {e}", self.name));
                let weights = Arc::clone(directory.weights());
                (weights, directory.metadata().clone())
            }
        }
    }

    /// The model.
    pub fn model(&self) -> Arc<dyn Model> {
        let (file, metadata) = self.open();
        self.model_of(&metadata, &*file)
    }

    /// The model of what was [opened](Case::open).
    pub(crate) fn model_of(
        &self,
        metadata: &Metadata,
        weights: &dyn WeightSource,
    ) -> Arc<dyn Model> {
        let model = self.registry().model(metadata, weights).unwrap();
        let chosen = self
            .context
            .and_then(|n_tokens| model.for_context(n_tokens));
        chosen.unwrap_or(model)
    }

    /// The fork of a prompt's reference.
    pub fn fork_of(&self, prompt: usize) -> Option<Fork> {
        self.fork.filter(|fork| fork.prompt == prompt)
    }

    /// The results of an independent implementation.
    pub fn reference(&self) -> Reference {
        match self.source {
            Source::Recipe | Source::RecipeIn(_) => self.generated().reference(),
            Source::Gguf(folder) => {
                let name = format!("{}.reference.safetensors", self.name);
                Reference::open(&Self::file(folder, &name))
            }
            Source::Directory(folder) | Source::GgufInDirectory(folder) => {
                Reference::open(&Self::file(folder, self.name).join("reference.safetensors"))
            }
        }
    }
}
