//! Models by name: where `-m OWNER/NAME:QUANT` is on disk.
//!
//! Invariant: a path that exists is taken as a path. Opens no connection.

use std::borrow::Cow;
use std::path::Path;

#[cfg(feature = "hub")]
use crate::{advice::most_similar, shortcut::is_tagged};

/// The path itself where it exists or is no model's name; or else the model of that name in the
/// cache.
///
/// # Errors
/// Where the cache has no such model; the error names the command that downloads it.
#[cfg(feature = "hub")]
pub(crate) fn locate(path: &Path) -> anyhow::Result<Cow<'_, Path>> {
    use cellar_hub::{Cache, HubError};

    let Some(name) = model_name(path)? else {
        return Ok(Cow::Borrowed(path));
    };
    match Cache::from_env()?.find(&name) {
        Ok(found) => Ok(Cow::Owned(found)),
        Err(HubError::NotCached { cache, .. }) => {
            let near = similar(&name.to_string())?;
            anyhow::bail!(
                "no file '{name}', and no model of that name in {}; 'cellar pull {name}' downloads \
                 it{near}",
                cache.display()
            )
        }
        Err(error) => Err(error.into()),
    }
}

/// The name of a model, where this is one and no path.
///
/// # Errors
/// The text is the address or the name of another program's model; the error says what to do.
#[cfg(feature = "hub")]
fn model_name(path: &Path) -> anyhow::Result<Option<cellar_hub::ModelName>> {
    if path.exists() || crate::input::is_stdin(path) {
        return Ok(None);
    }
    if let Some(text) = path.to_str()
        && let Some(instead) = foreign(text)
    {
        anyhow::bail!("no file '{text}': {instead}");
    }
    if is_file_name(path) {
        return Ok(None);
    }
    Ok(path.to_str().and_then(|text| text.parse().ok()))
}

/// The name of a model that is not in the cache, and could be downloaded.
///
/// # Errors
/// As [`locate`], but for what could be downloaded.
#[cfg(all(feature = "hub", feature = "serve"))]
pub(crate) fn not_downloaded(path: &Path) -> anyhow::Result<Option<cellar_hub::ModelName>> {
    use cellar_hub::{Cache, HubError};

    let Some(name) = model_name(path)? else {
        return Ok(None);
    };
    let found = Cache::from_env()?.find(&name);
    let is_missing = matches!(found, Err(HubError::NotCached { .. }));
    Ok(Some(name).filter(|_| is_missing))
}

/// The path: this build knows no names.
#[cfg(not(feature = "hub"))]
pub(crate) fn locate(path: &Path) -> anyhow::Result<Cow<'_, Path>> {
    Ok(Cow::Borrowed(path))
}

/// The command that downloads what stands behind an address or a name of another program's.
#[cfg(feature = "hub")]
fn foreign(text: &str) -> Option<String> {
    let address = text.split_once("://").map_or(text, |(_, rest)| rest);
    let parts: Vec<&str> = address.trim_end_matches('/').split('/').collect();
    let names = "names are OWNER/NAME-GGUF[:QUANT], as on huggingface.co";
    Some(match parts.as_slice() {
        [
            "huggingface.co" | "hf.co" | "www.huggingface.co",
            owner,
            name,
            ..,
        ] => {
            format!(
                "'cellar pull {owner}/{name}' downloads it, and -m {owner}/{name} names it then"
            )
        }
        ["ollama.com" | "www.ollama.com", .., name] => {
            format!(
                "models of Ollama's are not downloaded; 'cellar pull OWNER/NAME' takes {name}; {names}"
            )
        }
        _ if text.contains("://") => {
            "an address is no model: download the file, and give its path".to_owned()
        }
        _ if is_tagged(text) => format!(
            "{names}: 'cellar pull OWNER/NAME-GGUF:Q4_K_M' downloads one, 'cellar list' shows yours"
        ),
        _ => return None,
    })
}

/// Names of downloaded models that are similar, as the end of a sentence.
#[cfg(feature = "hub")]
fn similar(name: &str) -> anyhow::Result<String> {
    let models = cellar_hub::Cache::from_env()?.models();
    let names: Vec<String> = models.iter().map(|model| model.name.to_string()).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let near = most_similar(name, &names);
    Ok(near.map_or(String::new(), |near| format!("; '{near}' is there")))
}

/// Whether it ends like a file, as a model's name hardly does.
#[cfg(feature = "hub")]
fn is_file_name(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    extension.is_some_and(|e| ["gguf", "json", "safetensors", "txt", "bin"].contains(&e))
}
