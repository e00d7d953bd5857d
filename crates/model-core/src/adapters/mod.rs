//! Adapters: pairs of narrow matrices that are added to a model's matrices (LoRA, Hu et al., arXiv
//! 2106.09685), for each token those that its text wants, with scales.
//!
//! An [`Adapter`] is read from a GGUF file or a PEFT directory and checked against a model.
//! [`Adapters`] are all that a model is loaded with; [`AdaptedModel`] has their products in its
//! graphs, made of the operations for experts: an adapter is an expert that a token is routed to,
//! so every matrix is read once for all tokens. Invariant: what loads fits the model, and every
//! value is a finite number. Knows no device.

mod check;
mod control_vector;
mod error;
mod gguf;
mod graph;
mod merge;
mod model;
mod modules;
mod peft;
mod stacks;
mod weights;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kv_core::TokenId;
use kv_graph::weights::{SharedBytes, SourceChanged, Weight};

pub use control_vector::{ControlVector, ControlVectorFile, LayerRange};
pub use error::AdapterError;
pub use merge::MergedWeights;
pub use model::AdaptedModel;
pub use weights::AdaptedWeights;

use crate::architecture::Registry;
use crate::error::ModelFileError;
use crate::gguf::GgufFile;
use crate::model_file::OpenModel;
use check::Use;

/// The most adapters that a model is loaded with.
pub const MAX_ADAPTERS: usize = 64;

/// A pair of narrow matrices whose product, times the scale, is added to a matrix.
#[derive(Clone, Debug)]
pub struct LowRank {
    /// `[rank, in]`; of experts `[experts, rank, in]`, of an embedding `[vocab, rank]`.
    pub a: Weight,
    /// `[out, rank]`; of experts `[experts, out, rank]`, of an embedding `[dim, rank]`.
    pub b: Weight,
    /// The factor that the adapter's settings give: its alpha by its rank.
    pub scale: f32,
}

impl LowRank {
    /// The width between both matrices.
    pub fn rank(&self) -> usize {
        self.b.n_columns()
    }
}

/// An adapter of one model.
#[derive(Clone)]
pub struct Adapter {
    name: String,
    path: String,
    /// By the name of the matrix that each is added to.
    pairs: BTreeMap<String, LowRank>,
    /// Tells its contents from those of others.
    id: u64,
    /// Tokens from which on it is active; none where it always is.
    invocation: Vec<TokenId>,
    /// Its files, to look whether they changed.
    files: Vec<SharedBytes>,
}

/// The contents of a file or directory, before a model is asked.
pub(crate) struct RawAdapter {
    pub(crate) label: String,
    pub(crate) pairs: BTreeMap<String, LowRank>,
    pub(crate) invocation: Vec<TokenId>,
    pub(crate) files: Vec<SharedBytes>,
}

/// An adapter that a model is to be loaded with.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterSpec {
    /// A GGUF file or a PEFT directory.
    pub path: PathBuf,
    /// The name of it; `None` for that of the file or directory.
    pub name: Option<String>,
    /// The scale of texts that do not say one; 0 leaves it out.
    pub scale: f32,
}

/// All that a model is to be loaded with.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AdapterOptions {
    /// Adapters.
    pub adapters: Vec<AdapterSpec>,
    /// Control vectors, which are added up.
    pub control_vectors: Vec<ControlVectorFile>,
    /// The layers that they are added to; `None` for all.
    pub control_layers: Option<LayerRange>,
}

impl AdapterOptions {
    /// Opens them for a model; `None` where there are none.
    ///
    /// # Errors
    /// [`ModelFileError`]: one cannot be read, or does not fit the model. Nothing is loaded then.
    pub fn open(
        &self,
        model: &OpenModel,
        registry: &Registry,
    ) -> Result<Option<Adapters>, ModelFileError> {
        if self.adapters.is_empty() && self.control_vectors.is_empty() {
            return Ok(None);
        }
        let mut adapters = Vec::with_capacity(self.adapters.len());
        for spec in &self.adapters {
            let adapter = Adapter::open(&spec.path, model, registry)?;
            let adapter = match &spec.name {
                Some(name) => adapter.named(name.as_str()),
                None => adapter,
            };
            adapters.push((adapter, spec.scale));
        }
        let files = self.control_vectors.as_slice();
        let control = if files.is_empty() {
            None
        } else {
            Some(ControlVector::open(files, self.control_layers, model)?)
        };
        let opened = Adapters::new(model, adapters, control);
        Ok(Some(opened.map_err(|reason| wrong(model.label(), reason))?))
    }
}

impl Adapter {
    /// Opens a GGUF file or a PEFT directory and checks it against a model.
    ///
    /// # Errors
    /// [`ModelFileError`] with the file and the reason; nothing is loaded then.
    pub fn open(
        path: &Path,
        model: &OpenModel,
        registry: &Registry,
    ) -> Result<Self, ModelFileError> {
        if !path.is_dir() {
            return Self::from_gguf(&GgufFile::open(path)?, path, model);
        }
        Self::checked(
            peft::read(path, model, registry)?,
            path,
            path.file_name(),
            model,
        )
    }

    /// The same from a GGUF file that is open. Its name and path are those of `path`.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn from_gguf(
        file: &GgufFile,
        path: &Path,
        model: &OpenModel,
    ) -> Result<Self, ModelFileError> {
        Self::checked(gguf::read(file, model)?, path, path.file_stem(), model)
    }

    fn checked(
        raw: RawAdapter,
        path: &Path,
        name: Option<&OsStr>,
        model: &OpenModel,
    ) -> Result<Self, ModelFileError> {
        check::check(&raw, model).map_err(|reason| wrong(&raw.label, reason))?;
        let name = name.map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        let id = check::content_id(&raw);
        let RawAdapter {
            pairs,
            invocation,
            files,
            ..
        } = raw;
        Ok(Self {
            name,
            path: path.display().to_string(),
            pairs,
            id,
            invocation,
            files,
        })
    }

    /// The same under another name.
    #[must_use]
    pub fn named(self, name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            ..self
        }
    }

    /// Its name: that of its file or directory, unless it was given one.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The path that was opened.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Its matrices, by the name of the one that each pair is added to.
    pub fn pairs(&self) -> &BTreeMap<String, LowRank> {
        &self.pairs
    }

    /// A number that tells its contents from those of others.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Tokens of a prompt from which on it is active, where it is an activated one.
    pub fn invocation(&self) -> &[TokenId] {
        &self.invocation
    }
}

impl fmt::Debug for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Adapter({}, {} matrices)", self.name, self.pairs.len())
    }
}

/// All adapters of a loaded model, each with the scale of texts that do not say one.
#[derive(Debug)]
pub struct Adapters {
    all: Vec<Adapter>,
    /// One for each.
    default_scales: Arc<[f32]>,
    /// The uses that the model has for each matrix that any of them changes.
    uses: BTreeMap<String, Use>,
    control: Option<ControlVector>,
}

impl Adapters {
    /// These adapters with their default scales, and a control vector, where there is one.
    ///
    /// # Errors
    /// [`AdapterError`] where there are too many, two have one name, or a scale is no number.
    pub fn new(
        model: &OpenModel,
        adapters: Vec<(Adapter, f32)>,
        control: Option<ControlVector>,
    ) -> Result<Self, AdapterError> {
        if adapters.len() > MAX_ADAPTERS {
            let got = adapters.len();
            return Err(AdapterError::TooMany {
                got,
                most: MAX_ADAPTERS,
            });
        }
        let (all, scales): (Vec<Adapter>, Vec<f32>) = adapters.into_iter().unzip();
        for (at, adapter) in all.iter().enumerate() {
            if all.iter().take(at).any(|other| other.name == adapter.name) {
                return Err(AdapterError::SameName {
                    name: adapter.name.clone(),
                });
            }
        }
        let uses = check::uses_of(model.model().as_ref())?;
        let used = |name: &String| all.iter().any(|adapter| adapter.pairs.contains_key(name));
        let uses = uses.into_iter().filter(|(name, _)| used(name)).collect();
        let adapters = Self {
            all,
            default_scales: Arc::from(scales),
            uses,
            control,
        };
        adapters.check_scales(&adapters.default_scales)?;
        Ok(adapters)
    }

    /// All of them.
    pub fn all(&self) -> &[Adapter] {
        &self.all
    }

    /// Their number.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// True if there is none, but perhaps a control vector.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// The number of the adapter with this name.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.all.iter().position(|adapter| adapter.name == name)
    }

    /// The scales of texts that do not say any, one for each adapter.
    pub fn default_scales(&self) -> &Arc<[f32]> {
        &self.default_scales
    }

    /// The control vector of all texts.
    pub fn control(&self) -> Option<&ControlVector> {
        self.control.as_ref()
    }

    /// Checks scales that a text wants.
    ///
    /// # Errors
    /// [`AdapterError::ScaleCount`] and [`AdapterError::Scale`].
    pub fn check_scales(&self, scales: &[f32]) -> Result<(), AdapterError> {
        if scales.len() != self.all.len() {
            return Err(AdapterError::ScaleCount {
                wanted: self.all.len(),
                got: scales.len(),
            });
        }
        let wrong = self.all.iter().zip(scales).find(|(_, s)| !s.is_finite());
        match wrong {
            Some((adapter, &scale)) => Err(AdapterError::Scale {
                name: adapter.name.clone(),
                scale,
            }),
            None => Ok(()),
        }
    }

    /// A description that tells texts with these scales from others: a line of names, contents and
    /// scales; empty where no adapter is active.
    pub fn describe(&self, scales: &[f32]) -> String {
        let active = self.all.iter().zip(scales).filter(|(_, s)| **s != 0.0);
        let parts = active.map(|(adapter, scale)| {
            let Adapter { name, id, .. } = adapter;
            format!("{name} ({id:016x}) at {scale:?}")
        });
        parts.collect::<Vec<_>>().join(", ")
    }

    /// A number that differs with what [`Self::describe`] says; 0 where no adapter is active.
    pub fn key(&self, scales: &[f32]) -> u64 {
        let mut key = check::Fnv::default();
        for (adapter, scale) in self.all.iter().zip(scales) {
            if *scale != 0.0 {
                key.update(&adapter.id.to_le_bytes());
                key.update(&scale.to_bits().to_le_bytes());
            }
        }
        if scales.iter().all(|scale| *scale == 0.0) {
            0
        } else {
            key.finish().max(1)
        }
    }

    /// Values of a token's row in the input of graphs for at most `n_active` adapters a token.
    pub fn row_width(&self, n_active: usize) -> usize {
        if n_active == 0 {
            0
        } else {
            2 * self.all.len() + n_active
        }
    }

    /// Appends the row of a token with these scales.
    pub fn push_row(&self, scales: &[f32], n_active: usize, to: &mut Vec<f32>) {
        let width = self.row_width(n_active);
        let start = to.len();
        let logit = |scale: &f32| if *scale == 0.0 { -CHOSEN } else { CHOSEN };
        to.extend(scales.iter().map(logit));
        to.extend_from_slice(scales);
        let active = scales.iter().copied().filter(|scale| *scale != 0.0);
        to.extend(active.take(n_active));
        to.resize(start + width, 0.0);
    }

    /// Bytes of all matrices, as graphs have them.
    pub fn n_bytes(&self) -> u64 {
        let infos = self.weight_names().into_iter();
        let infos = infos.filter_map(|name| self.describe_weight(&name));
        infos.map(|info| info.n_bytes()).sum()
    }

    fn check_files(&self) -> Result<(), SourceChanged> {
        let files = self.all.iter().flat_map(|adapter| &adapter.files);
        files.into_iter().try_for_each(SharedBytes::check)
    }
}

fn wrong(file: &str, reason: AdapterError) -> ModelFileError {
    ModelFileError::Adapter {
        file: file.to_owned(),
        reason: Box::new(reason),
    }
}

/// The number of adapters with these scales that are active.
pub fn n_active(scales: &[f32]) -> usize {
    scales.iter().filter(|scale| **scale != 0.0).count()
}

/// The logit of an adapter that a token is routed to: its sigmoid is 1, and that of the negative
/// exactly 0.
const CHOSEN: f32 = 200.0;
