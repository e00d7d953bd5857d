//! What to do about an error, where its cause tells.
//!
//! Invariant: advice is true for every error of its kind. Knows errors only by their types.

use std::fs;
use std::io;
use std::path::Path;

use kv_core::backend::BackendError;
use model_core::error::{GgufError, ModelFileError};

/// Names that are shown at most.
const N_SHOWN: usize = 4;

/// What to do next, in a few words.
pub(crate) fn advice(error: &anyhow::Error) -> Option<String> {
    let causes = || error.chain();
    if causes().filter_map(|e| e.downcast_ref()).any(is_disk_full) {
        return Some("free some space, or choose another place".to_owned());
    }
    if let Some(cellar::Error::Backend(error)) = causes().find_map(|e| e.downcast_ref()) {
        return of_backend(error);
    }
    let mut of_files = causes().filter_map(|e| e.downcast_ref());
    let of_file = of_files.find_map(|error| match error {
        ModelFileError::Io { path, source, .. } if is_not_found(source) => not_found(path),
        ModelFileError::Gguf {
            reason: GgufError::Truncated { .. },
            ..
        } => Some("the file is incomplete: download or copy it again".to_owned()),
        _ => None,
    });
    let mut of_system = causes().filter_map(|e| e.downcast_ref());
    let not_found = || {
        of_system
            .any(is_not_found)
            .then(|| "check the path".to_owned())
    };
    of_file.or_else(not_found)
}

/// Of a backend that was asked for.
fn of_backend(error: &BackendError) -> Option<String> {
    match error {
        BackendError::Unavailable { backend, .. } if *backend != "cpu" => {
            Some("'cellar devices' lists what there is; --backend cpu needs no GPU".to_owned())
        }
        BackendError::UnsupportedOp { backend, .. } if *backend != "cpu" => {
            Some("--backend cpu computes it".to_owned())
        }
        _ => None,
    }
}

fn is_not_found(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
}

fn is_disk_full(error: &io::Error) -> bool {
    let full = [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded];
    full.contains(&error.kind())
}

/// Of a file that does not exist: what there is instead.
fn not_found(path: &Path) -> Option<String> {
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    if path.file_name()? == "config.json" {
        let models = names_in(parent, |name| name.ends_with(".gguf"));
        return Some(match models.as_slice() {
            [] => "give a GGUF file, or a directory with config.json, *.safetensors and \
                   tokenizer.json"
                .to_owned(),
            models => format!(
                "the directory has GGUF files; give one of them: {}",
                list(models)
            ),
        });
    }
    let wanted = path.file_name()?.to_str()?;
    let near = names_in(parent, |name| is_similar(wanted, name));
    if !near.is_empty() {
        return Some(format!("similar names there: {}", list(&near)));
    }
    let is_bare = parent == Path::new(".") && path.extension().is_none();
    (is_bare && cfg!(feature = "hub")).then(|| {
        "check the path; models by name are OWNER/NAME ('cellar list', 'cellar pull')".to_owned()
    })
}

/// The name of which `given` may be a misspelling.
pub(crate) fn most_similar<'n>(given: &str, names: &[&'n str]) -> Option<&'n str> {
    let similar = names.iter().filter(|name| is_similar(given, name));
    let distance = |name: &&&str| strsim::damerau_levenshtein(given, name);
    similar.min_by_key(distance).copied()
}

fn is_similar(a: &str, b: &str) -> bool {
    strsim::jaro_winkler(a, b) > 0.85
}

fn names_in(directory: &Path, is_wanted: impl Fn(&str) -> bool) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| is_wanted(name)).collect();
    names.sort();
    names
}

fn list(names: &[String]) -> String {
    let shown = names.iter().take(N_SHOWN);
    let mut text = shown
        .map(|name| format!("'{name}'"))
        .collect::<Vec<_>>()
        .join(", ");
    if names.len() > N_SHOWN {
        text.push_str(", …");
    }
    text
}
