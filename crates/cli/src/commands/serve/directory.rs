//! The models of `--models DIR` as they come and go.
//!
//! Invariant: a file is opened again only where its size or its time has changed. Names that `-m`
//! gave go first.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use cellar_server::{ApiError, FindModels, KeepLoaded, ModelEntry, ModelFacts};

use super::loading::{self, Loader};
use super::{model_settings, scan};
use crate::args::ServeArgs;
use crate::failure::{one_line, warn};
use crate::models::ModelSource;

/// A model that `-m` names.
#[derive(Clone, Debug)]
pub(super) struct Given {
    pub(super) id: String,
    pub(super) source: ModelSource,
}

/// A directory, and what is known of its files.
#[derive(Debug)]
pub(super) struct Directory {
    dir: PathBuf,
    args: Arc<ServeArgs>,
    given: Vec<Given>,
    /// Other names by the model.
    aliases: BTreeMap<String, Vec<String>>,
    known: Mutex<BTreeMap<PathBuf, Known>>,
}

/// What was read of a file when it looked like this.
#[derive(Clone, Debug)]
struct Known {
    stamp: Stamp,
    facts: ModelFacts,
}

/// Sizes and times of the files of a model.
type Stamp = Vec<(u64, Option<SystemTime>)>;

impl Directory {
    pub(super) fn new(args: &Arc<ServeArgs>, dir: &Path, given: Vec<Given>) -> Self {
        let mut aliases: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (alias, model) in args.aliases() {
            if let Some(model) = model {
                let of = aliases.entry(model.to_owned()).or_default();
                of.push(alias.to_owned());
            }
        }
        Self {
            dir: dir.to_owned(),
            args: Arc::clone(args),
            given,
            aliases,
            known: Mutex::default(),
        }
    }

    /// What is known of a model without loading it. What is wrong with its file is reported once.
    fn facts(&self, id: &str, source: &ModelSource, path: &Path) -> ModelFacts {
        let stamp = stamp(path);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = known.get(path)
            && known.stamp == stamp
        {
            return known.facts.clone();
        }
        let facts = loading::facts(&self.args, source, None);
        if let Some(error) = &facts.error {
            warn(&format!("'{id}' cannot be served: {error}"));
        }
        let now = Known {
            stamp,
            facts: facts.clone(),
        };
        known.insert(path.to_owned(), now);
        facts
    }

    /// Reports once that a file has the name of another model.
    fn warn_of_other(&self, id: &str, path: &Path) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.insert(path.to_owned(), Known::none()).is_none() {
            warn(&format!(
                "'{}' is not served: there is another model '{id}'",
                path.display()
            ));
        }
    }

    fn entry(&self, found: scan::Found) -> anyhow::Result<Option<ModelEntry>> {
        let scan::Found { id, path } = found;
        let source = ModelSource::File(path.clone());
        if let Some(other) = self.given.iter().find(|given| given.id == id) {
            if other.source != source {
                self.warn_of_other(&id, &path);
            }
            return Ok(None);
        }
        let facts = self.facts(&id, &source, &path);
        let mut settings = model_settings(&self.args, id)?;
        settings.aliases = self.aliases.get(&settings.id).cloned().unwrap_or_default();
        Ok(Some(ModelEntry {
            id: settings.id.clone(),
            aliases: settings.aliases.clone(),
            facts,
            keep: match u64::try_from(self.args.idle_unload) {
                Ok(seconds) => KeepLoaded::For(Duration::from_secs(seconds)),
                Err(_) => KeepLoaded::Forever,
            },
            loader: Some(Arc::new(Loader {
                args: Arc::clone(&self.args),
                source,
                settings,
            })),
            loaded: None,
        }))
    }

    /// The models that are there, by name.
    ///
    /// # Errors
    /// Where the directory cannot be read.
    pub(super) fn entries(&self) -> anyhow::Result<Vec<ModelEntry>> {
        let found = scan::models_in(&self.dir)?;
        let mut entries: Vec<ModelEntry> = Vec::with_capacity(found.len());
        for found in found {
            // Of two files with one name, the first in order is served.
            if entries.iter().any(|other| other.id == found.id) {
                self.warn_of_other(&found.id, &found.path);
            } else {
                entries.extend(self.entry(found)?);
            }
        }
        Ok(entries)
    }
}

impl Known {
    /// Of a file that is not read.
    fn none() -> Self {
        Self {
            stamp: Vec::new(),
            facts: ModelFacts::default(),
        }
    }
}

impl FindModels for Directory {
    fn find(&self) -> Result<Vec<ModelEntry>, ApiError> {
        let entries = self.entries();
        entries.map_err(|error| ApiError::internal(one_line(&error)))
    }
}

fn stamp(path: &Path) -> Stamp {
    let files = scan::files_of(path);
    let metadata = files.iter().filter_map(|file| std::fs::metadata(file).ok());
    let stamps = metadata.map(|metadata| (metadata.len(), metadata.modified().ok()));
    let mut stamps: Stamp = stamps.collect();
    stamps.sort_unstable();
    stamps
}
