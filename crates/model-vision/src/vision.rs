//! [`Vision`]: the tower of a model, which sees or hears: in its directory, or in a `mmproj` file.
//!
//! Invariant: a tower whose rows do not fit the decoder is refused before anything is computed.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kv_backend::Backend;
use kv_core::TokenId;
use kv_graph::weights::WeightSource;
use model_core::gguf::{GgufFile, Metadata};
use model_core::hf::{HfConfig, HfTranslation};
use model_core::model_file::ModelFile;
use model_core::picture::PictureError;
use sha2::{Digest, Sha256};

use crate::encoder::TowerEncoder;
use crate::hf;
use crate::read::{ReadTower, read_tower};
use crate::reader::PictureReader;
use crate::tower::{PATCH_EMBEDDING, Tower};

/// The tower of a model.
pub struct Vision {
    tower: Arc<Tower>,
    weights: Arc<dyn WeightSource>,
    reader: Arc<PictureReader>,
}

impl Vision {
    /// The tower of a model: in the file `mmproj` where one is given, in its directory, or in the
    /// one `mmproj*.gguf` file next to its GGUF file. `None` where there is none.
    ///
    /// # Errors
    /// [`PictureError`] naming what is wrong or not supported.
    pub fn of(
        model: &ModelFile,
        path: &Path,
        mmproj: Option<&Path>,
    ) -> Result<Option<Self>, PictureError> {
        let beside = || {
            if path.is_dir() {
                None
            } else {
                mmproj_beside(path)
            }
        };
        let file = mmproj.map(Path::to_path_buf).or_else(beside);
        if let Some(file) = file {
            let gguf = GgufFile::open(&file)?;
            let metadata = gguf.metadata().clone();
            if let Ok(architecture) = metadata.get::<&str>("general.architecture")
                && architecture != "clip"
            {
                return Err(PictureError::NoTower {
                    path: file,
                    architecture: architecture.to_owned(),
                });
            }
            let source: Arc<dyn WeightSource> = Arc::new(gguf);
            return Self::read(model, &file, &metadata, &source, None).map(Some);
        }
        if !path.is_dir() {
            return Ok(None);
        }
        let config = HfConfig::open(&path.join("config.json"))?;
        let parts = ["vision_config", "audio_config"];
        if parts.iter().all(|part| config.value(part).is_none()) {
            return Ok(None);
        }
        let classes = hf::classes();
        let named = config.optional_texts("architectures")?.unwrap_or_default();
        if let Some(class) = named.iter().find(|class| classes.get(class).is_none()) {
            return Err(PictureError::Unsupported {
                class: (*class).to_owned(),
                known: classes.iter().map(|class| class.name.to_owned()).collect(),
            });
        }
        let translation = HfTranslation::open(path, &classes)?;
        // Some directories have a decoder alone.
        if translation.weights().describe(PATCH_EMBEDDING).is_err() {
            return Ok(None);
        }
        let (mut metadata, weights) = translation.into_parts();
        hf::add_processor(path, &mut metadata)?;
        let keys = [
            "image_token_id",
            "image_token_index",
            "audio_token_id",
            "audio_token_index",
        ];
        let id = keys.iter().find_map(|key| config.value(key)?.as_u64());
        let id = id.and_then(|id| u32::try_from(id).ok()).map(TokenId);
        let source: Arc<dyn WeightSource> = Arc::new(weights);
        Self::read(model, path, &metadata, &source, id).map(Some)
    }

    fn read(
        model: &ModelFile,
        path: &Path,
        metadata: &Metadata,
        source: &Arc<dyn WeightSource>,
        placeholder: Option<TokenId>,
    ) -> Result<Self, PictureError> {
        let in_file = |reason| PictureError::Tower {
            path: path.to_owned(),
            reason,
        };
        let read = read_tower(metadata, source).map_err(in_file)?;
        let (got, wanted) = (read.tower.output_dim(), model.model().given_dim());
        if got != wanted {
            let path = path.to_owned();
            return Err(PictureError::OtherModel { path, got, wanted });
        }
        let tokenizer = model.tokenizer();
        let text = read.family.placeholder;
        let found = placeholder.or_else(|| tokenizer.token_id(text));
        let token = found.and_then(|id| Some((id, tokenizer.token_text(id)?.to_owned())));
        let Some(placeholder) = token else {
            return Err(PictureError::NoPlaceholder {
                path: path.to_owned(),
                token: text.to_owned(),
            });
        };
        let ReadTower {
            family,
            tower,
            weights,
            preparation,
            sees_itself,
        } = read;
        let mut hash = Sha256::new();
        hash.update(format!("{family:?} {tower:?} {preparation:?}"));
        for name in [Some(PATCH_EMBEDDING), tower.first_matrix()]
            .into_iter()
            .flatten()
        {
            if let Some(weight) = weights.get(name) {
                hash.update(&weight.bytes()[..]);
            }
        }
        let reader = PictureReader {
            family,
            preparation,
            arrangement: tower.arrangement,
            sees_itself,
            fingerprint: hash.finalize().into(),
            placeholder,
        };
        Ok(Self {
            tower,
            weights,
            reader: Arc::new(reader),
        })
    }

    /// The reader of pictures or sounds for it.
    pub fn reader(&self) -> &Arc<PictureReader> {
        &self.reader
    }

    /// The tower.
    pub fn tower(&self) -> &Arc<Tower> {
        &self.tower
    }

    /// Its weights.
    pub fn weights(&self) -> &Arc<dyn WeightSource> {
        &self.weights
    }

    /// The tower on a backend.
    ///
    /// # Errors
    /// [`PictureError`] where the backend cannot hold it.
    pub fn encoder<B: Backend>(&self, backend: B) -> Result<TowerEncoder<B>, PictureError> {
        TowerEncoder::new(backend, Arc::clone(&self.tower), Arc::clone(&self.weights))
    }
}

impl std::fmt::Debug for Vision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vision")
            .field("tower", &self.tower)
            .field("reader", &self.reader)
            .finish_non_exhaustive()
    }
}

/// The one file of a projector next to a model's, where there is one only.
fn mmproj_beside(model: &Path) -> Option<PathBuf> {
    let folder = match model.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let entries = std::fs::read_dir(folder).ok()?;
    let is_one = |path: &PathBuf| {
        let name = path
            .file_name()
            .map(|name| name.to_string_lossy().to_lowercase());
        name.is_some_and(|name| name.contains("mmproj") && name.ends_with(".gguf"))
    };
    let mut found = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(is_one);
    let first = found.next()?;
    (found.next().is_none() && first != model).then_some(first)
}
