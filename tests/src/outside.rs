//! Model directories from outside the repository: every directory of the folder that
//! `CELLAR_FIXTURES` names, or those of them that `CELLAR_FIXTURES_ONLY` lists, separated by
//! commas.
//!
//! Invariant: a directory that is not checked is printed, with the reason.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use model_core::architecture::Registry;
use model_core::directory::HfDirectory;
use model_core::hf::ModelFileError;

/// The last part of a directory's path.
pub fn name_of(path: &Path) -> String {
    path.file_name().unwrap().to_string_lossy().into_owned()
}

/// The directories to check.
fn directories() -> Vec<PathBuf> {
    let Some(folder) = std::env::var_os("CELLAR_FIXTURES") else {
        println!("CELLAR_FIXTURES names no folder: nothing was checked");
        return Vec::new();
    };
    let only = std::env::var("CELLAR_FIXTURES_ONLY").unwrap_or_default();
    let is_wanted = |path: &PathBuf| {
        let name = name_of(path);
        only.is_empty() || only.split(',').any(|wanted| wanted == name)
    };
    let entries = std::fs::read_dir(folder).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let mut paths: Vec<_> = paths
        .filter(|path| path.join("model.safetensors").exists() && is_wanted(path))
        .collect();
    paths.sort();
    paths
}

/// Why the model of a directory is not supported, where it is not. A directory that fails to open
/// for any other reason is a failing case.
pub fn unsupported(path: &Path, registry: &Registry) -> Option<String> {
    match HfDirectory::open(path, registry) {
        Err(ModelFileError::UnknownClass { class, .. }) => {
            Some(format!("{class} is not supported"))
        }
        Err(declined @ ModelFileError::Declined { .. }) => Some(declined.to_string()),
        _ => None,
    }
}

/// Runs a check on each directory, but for those that are left out for a reason.
///
/// # Panics
/// After all of them, where one panicked.
pub fn check_all(left_out: impl Fn(&Path) -> Option<String>, check: impl Fn(&Path)) {
    let (mut checked, mut others, mut failed) = (Vec::new(), Vec::new(), Vec::new());
    for path in directories() {
        let name = name_of(&path);
        if let Some(reason) = left_out(&path) {
            others.push(format!("{name}: {reason}"));
            continue;
        }
        match catch_unwind(AssertUnwindSafe(|| check(&path))) {
            Ok(()) => checked.push(name),
            Err(_) => failed.push(name),
        }
    }
    println!("{} agree: {}", checked.len(), checked.join(", "));
    println!("{} were not checked:", others.len());
    others.iter().for_each(|line| println!("  {line}"));
    assert!(failed.is_empty(), "{} fail: {failed:?}", failed.len());
}
