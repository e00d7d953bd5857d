//! The models in the directory of `--models`.
//!
//! Invariant: opens no file; what is listed has the ending of a model, or the files of one.

use std::path::{Path, PathBuf};

use anyhow::Context;

/// A model in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    /// The stem of its file, or the name of its directory.
    pub(super) id: String,
    /// The file, the first of several, or the directory.
    pub(super) path: PathBuf,
}

/// Every GGUF file (of a split model the first), and every directory with `config.json` and
/// safetensors files, by name.
///
/// # Errors
/// Where the directory cannot be read.
pub(super) fn models_in(dir: &Path) -> anyhow::Result<Vec<Found>> {
    let cannot = || format!("cannot read the directory '{}'", dir.display());
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).with_context(cannot)? {
        let path = entry.with_context(cannot)?.path();
        if let Some(id) = model_name(&path) {
            found.push(Found { id, path });
        }
    }
    found.sort_by(|a, b| (&a.id, &a.path).cmp(&(&b.id, &b.path)));
    Ok(found)
}

fn model_name(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    if name.starts_with('.') {
        return None;
    }
    if path.is_dir() {
        let is_model = path.join("config.json").is_file() && !files_of(path).is_empty();
        return is_model.then(|| name.to_owned());
    }
    let stem = stem_of(name, ".gguf")?;
    // The towers of images have files of their own, which are no models.
    if stem.starts_with("mmproj") {
        return None;
    }
    match split_part(stem) {
        None => Some(stem.to_owned()),
        Some(("00001", name)) => Some(name.to_owned()),
        Some(_) => None,
    }
}

/// The files of a model's weights.
pub(super) fn files_of(path: &Path) -> Vec<PathBuf> {
    if path.is_dir() {
        return files_in(path, |name| stem_of(name, ".safetensors").is_some());
    }
    let own = path.file_name().and_then(|name| name.to_str());
    let split = own.and_then(|name| split_part(stem_of(name, ".gguf")?));
    let Some((_, model)) = split else {
        return vec![path.to_owned()];
    };
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    files_in(dir.unwrap_or(Path::new(".")), |name| {
        let part = stem_of(name, ".gguf").and_then(split_part);
        part.is_some_and(|(_, of)| of == model)
    })
}

fn files_in(dir: &Path, is_one: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    let name_is_one = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.is_some_and(&is_one)
    };
    paths.filter(name_is_one).collect()
}

/// A name without an ending, whatever its case.
fn stem_of<'a>(name: &'a str, ending: &str) -> Option<&'a str> {
    let at = name.len().checked_sub(ending.len())?;
    let (stem, end) = (name.get(..at)?, name.get(at..)?);
    end.eq_ignore_ascii_case(ending).then_some(stem)
}

/// The number and the name of a part of a split model: `NAME-00001-of-00003`.
fn split_part(stem: &str) -> Option<(&str, &str)> {
    let (rest, n_parts) = stem.rsplit_once("-of-")?;
    let (name, part) = rest.rsplit_once('-')?;
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    (is_number(part) && is_number(n_parts)).then_some((part, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_found_by_their_files() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, name).unwrap();
        };
        for name in [
            "b.gguf",
            "a.Q4_K_M.GGUF",
            "big-00001-of-00002.gguf",
            "big-00002-of-00002.gguf",
            "mmproj-b.gguf",
            ".hidden.gguf",
            "notes.txt",
            "bert/config.json",
            "bert/model.safetensors",
            "empty/config.json",
        ] {
            write(name);
        }
        let found = models_in(dir.path()).unwrap();
        let ids: Vec<&str> = found.iter().map(|found| found.id.as_str()).collect();
        assert_eq!(ids, ["a.Q4_K_M", "b", "bert", "big"]);
        let files = |id: &str| {
            let found = found.iter().find(|found| found.id == id).unwrap();
            files_of(&found.path).len()
        };
        assert_eq!(["b", "bert", "big"].map(files), [1, 1, 2]);
        assert!(models_in(&dir.path().join("nowhere")).is_err());
    }
}
