//! The files of sentence-transformers in a model's directory: `modules.json`, the pooling's
//! `config.json`, and the longest text of `sentence_bert_config.json`, in the keys of
//! [`crate::sentence`].
//!
//! Invariant: a module that would change vectors and that is not known is an error that names it.
//! Dense modules without a bias and a curve are matrices that may as well be applied to rows before
//! these become one; the model's class has to take them.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{HfConfig, Keys, ModelFileError};
use crate::sentence::{MAX_TOKENS, NORMALIZE, POOLING, Pooling};

/// Names of the flags of pooling, of which one is true, and of their short forms.
const MODES: &[(&str, &str, Option<Pooling>)] = &[
    ("pooling_mode_mean_tokens", "mean", Some(Pooling::Mean)),
    ("pooling_mode_cls_token", "cls", Some(Pooling::Cls)),
    ("pooling_mode_lasttoken", "lasttoken", Some(Pooling::Last)),
    ("pooling_mode_max_tokens", "max", None),
    (
        "pooling_mode_mean_sqrt_len_tokens",
        "mean_sqrt_len_tokens",
        None,
    ),
    ("pooling_mode_weightedmean_tokens", "weightedmean", None),
];

/// The folder of the pooling in a directory without a list of modules.
const USUAL_FOLDER: &str = "1_Pooling";

/// The support of a class of models for dense modules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DenseModules {
    Refused,
    Taken,
}

/// Translates what is there; a directory of a model alone has none of it. Returns the folders of
/// dense modules, in order.
pub(super) fn translate(
    directory: &Path,
    dense: DenseModules,
    keys: &mut Keys,
) -> Result<Vec<PathBuf>, ModelFileError> {
    let mut dense_folders = Vec::new();
    let folder = match directory.join("modules.json") {
        list if list.exists() => {
            let modules = Modules::read(&list, dense)?;
            keys.set(NORMALIZE, modules.normalize);
            dense_folders.extend(modules.dense_folders.iter().map(|at| directory.join(at)));
            modules.pooling_folder
        }
        _ => Some(USUAL_FOLDER.to_owned()),
    };
    for folder in &dense_folders {
        check_dense(&HfConfig::open(&folder.join("config.json"))?)?;
    }
    let config = folder.map(|folder| directory.join(folder).join("config.json"));
    if let Some(config) = config.filter(|config| config.exists())
        && let Some(pooling) = pooling(&HfConfig::open(&config)?)?
    {
        keys.set(POOLING, pooling.code());
    }
    refuse_default_prompt(&directory.join("config_sentence_transformers.json"))?;
    let config = directory.join("sentence_bert_config.json");
    if config.exists()
        && let Some(n) = HfConfig::open(&config)?.optional_count("max_seq_length")?
    {
        keys.set(MAX_TOKENS, u32::try_from(n).unwrap_or(u32::MAX));
    }
    Ok(dense_folders)
}

/// A matrix and nothing else.
fn check_dense(config: &HfConfig) -> Result<(), ModelFileError> {
    if config.optional_flag("bias")? != Some(false) {
        return Err(config.wrong("bias", "false"));
    }
    let key = "activation_function";
    match config.optional_text(key)? {
        Some(name) if name.rsplit('.').next() == Some("Identity") => Ok(()),
        _ => Err(config.wrong(key, "torch.nn.modules.linear.Identity")),
    }
}

/// A text that comes before every text would be missing from vectors.
fn refuse_default_prompt(config: &Path) -> Result<(), ModelFileError> {
    if !config.exists() {
        return Ok(());
    }
    let config = HfConfig::open(config)?;
    let key = "default_prompt_name";
    let Some(name) = config.optional_text(key)? else {
        return Ok(());
    };
    match config.optional_text(&format!("prompts.{name}"))? {
        Some("") => Ok(()),
        _ => Err(config.wrong(key, "null: a prompt before every text is not supported")),
    }
}

/// The modules that a list names.
#[derive(Debug, Default)]
struct Modules {
    /// The folder of the pooling, where there is one.
    pooling_folder: Option<String>,
    /// The folders of dense modules, in order.
    dense_folders: Vec<String>,
    /// True if vectors get length 1.
    normalize: bool,
}

impl Modules {
    fn read(list: &Path, dense: DenseModules) -> Result<Self, ModelFileError> {
        let format = |reason: String| ModelFileError::Format {
            path: list.to_owned(),
            reason,
        };
        let text = std::fs::read(list).map_err(|source| ModelFileError::Io {
            attempt: "read",
            path: list.to_owned(),
            source,
        })?;
        let modules: Vec<Value> = serde_json::from_slice(&text)
            .map_err(|error| format(format!("no list of modules: {error}")))?;
        let mut read = Self::default();
        for (at, module) in modules.iter().enumerate() {
            let text = |key: &str| module.get(key).and_then(Value::as_str);
            let kind = text("type").ok_or_else(|| format(format!("module {at} has no 'type'")))?;
            match kind.rsplit('.').next() {
                Some("Transformer") => {}
                Some("Normalize") => read.normalize = true,
                Some("Pooling") => {
                    read.pooling_folder = text("path").filter(|p| is_plain(p)).map(str::to_owned);
                }
                // Behind a pooling, and before vectors get their length.
                Some("Dense")
                    if dense == DenseModules::Taken
                        && read.pooling_folder.is_some()
                        && !read.normalize =>
                {
                    let folder = text("path").filter(|p| is_plain(p));
                    let folder = folder
                        .ok_or_else(|| format(format!("module {at} has no 'path' to a folder")))?;
                    read.dense_folders.push(folder.to_owned());
                }
                _ => {
                    let known = "Transformer, Pooling, Normalize";
                    return Err(format(format!(
                        "module '{kind}' is not supported; known are: {known}"
                    )));
                }
            }
        }
        Ok(read)
    }
}

/// True if a path stays inside the directory.
fn is_plain(path: &str) -> bool {
    !path.is_empty() && !path.contains(['/', '\\']) && path != ".."
}

/// The one mode of pooling; `None` where the file names none.
fn pooling(config: &HfConfig) -> Result<Option<Pooling>, ModelFileError> {
    let unsupported = |key: &str| Err(config.wrong(key, "a mean, cls or lasttoken pooling"));
    let mut found = None;
    for &(flag, _, mode) in MODES {
        if config.optional_flag(flag)? != Some(true) {
            continue;
        }
        match mode {
            None => return unsupported(flag),
            Some(_) if found.is_some() => {
                return Err(config.wrong(flag, "false, since another pooling is true"));
            }
            mode => found = mode,
        }
    }
    let key = "pooling_mode";
    match config.optional_text(key)? {
        None => Ok(found),
        Some(text) => match MODES.iter().find(|(_, name, _)| *name == text) {
            Some(&(.., Some(mode))) => Ok(Some(mode)),
            _ => unsupported(key),
        },
    }
}
