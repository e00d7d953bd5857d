//! Models by name: where `-m OWNER/NAME:QUANT` is on disk.
//!
//! Invariant: a path that exists is taken as a path. Opens no connection.

use std::borrow::Cow;
use std::path::Path;

/// The path itself where it exists or is no model's name; or else the model of that name in the
/// cache.
///
/// # Errors
/// Where the cache has no such model; the error names the command that downloads it.
#[cfg(feature = "hub")]
pub(crate) fn locate(path: &Path) -> anyhow::Result<Cow<'_, Path>> {
    use cellar_hub::{Cache, HubError, ModelName};

    use crate::input;

    if path.exists() || input::is_stdin(path) || is_file_name(path) {
        return Ok(Cow::Borrowed(path));
    }
    let name = path.to_str().map(str::parse::<ModelName>);
    let Some(Ok(name)) = name else {
        return Ok(Cow::Borrowed(path));
    };
    match Cache::from_env()?.find(&name) {
        Ok(found) => Ok(Cow::Owned(found)),
        Err(HubError::NotCached { cache, .. }) => anyhow::bail!(
            "no file '{name}', and no model of that name in {}; 'cellar pull {name}' downloads it",
            cache.display()
        ),
        Err(error) => Err(error.into()),
    }
}

/// The path: this build knows no names.
#[cfg(not(feature = "hub"))]
pub(crate) fn locate(path: &Path) -> anyhow::Result<Cow<'_, Path>> {
    Ok(Cow::Borrowed(path))
}

/// Whether it ends like a file, as a model's name hardly does.
#[cfg(feature = "hub")]
fn is_file_name(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    extension.is_some_and(|e| ["gguf", "json", "safetensors", "txt", "bin"].contains(&e))
}
