//! What to do about an error, where its cause tells.
//!
//! Invariant: advice is true for every error of its kind. Knows errors only by their types.

use std::error::Error;
use std::fs;
use std::io;
use std::path::Path;

use cellar_engine::serve::ServiceError;
use cellar_engine::{ConfigError, EngineError};
use kv_backend::BackendError;
use kv_backend::state::StateError;
use kv_core::memory::Refusal;
use kv_rows::LayoutError;
use model_core::error::{GgufError, ModelFileError};

/// What the names of models' files end with.
const MODEL_FILES: [&str; 4] = [".gguf", ".safetensors", ".bin", ".json"];

/// The first bytes of a saved state.
const STATE_MAGIC: [u8; 4] = *b"\x89KVS";

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
    if let Some(advice) = causes().find_map(|e| config_error(e).and_then(of_setting)) {
        return Some(advice);
    }
    if let Some(advice) = causes().filter_map(state_error).find_map(of_state) {
        return Some(advice.to_owned());
    }
    let mut of_files = causes().filter_map(|e| e.downcast_ref());
    let of_file = of_files.find_map(|error| match error {
        ModelFileError::Gguf {
            file,
            reason: GgufError::Magic { found },
        } => of_magic(file.trim_matches('\''), *found),
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

/// The setting that is refused, where that is what an error is about.
fn config_error<'e>(error: &'e (dyn Error + 'static)) -> Option<&'e ConfigError> {
    match engine_error(error) {
        Some(EngineError::Config(error)) => Some(error),
        Some(_) => None,
        None => error.downcast_ref(),
    }
}

/// The engine's error, where this is it. Errors of texts and models pass the message of their cause
/// on, and are not followed by it.
fn engine_error<'e>(error: &'e (dyn Error + 'static)) -> Option<&'e EngineError> {
    let of_text = |error: &'e ServiceError| match error {
        ServiceError::Engine(error) => Some(&**error),
        _ => None,
    };
    match (error.downcast_ref(), error.downcast_ref()) {
        (Some(cellar::Error::Engine(error)), _) => Some(error),
        (Some(cellar::Error::Text(error)), _) | (_, Some(error)) => of_text(error),
        _ => error.downcast_ref(),
    }
}

/// The flag of a setting.
fn flag(error: &ConfigError) -> Option<&'static str> {
    Some(match error {
        ConfigError::OutOfRange { name, .. } => match *name {
            "the number of recent tokens" => "--kv-recent",
            "the number of first tokens" => "--kv-sinks",
            _ => return None,
        },
        ConfigError::Layout(LayoutError::NoSuchLayer { .. }) => "--kv-type-layer",
        ConfigError::LogitBias { .. } | ConfigError::BiasToken { .. } => "--logit-bias",
        ConfigError::MinTokens { .. } => "--min-tokens",
        ConfigError::PenaltyWindow { .. } => "--repeat-last-n",
        ConfigError::NothingGetsOld => "--kv-type-old",
        _ => return None,
    })
}

fn of_setting(error: &ConfigError) -> Option<String> {
    let advice = match (flag(error)?, error) {
        ("--kv-type-old", _) => "leave out --kv-type-old".to_owned(),
        ("--kv-recent", _) => "choose it with --kv-recent, or a larger --ctx".to_owned(),
        ("--kv-type-layer", ConfigError::Layout(LayoutError::NoSuchLayer { n_layers, .. })) => {
            format!(
                "choose layers up to {} with --kv-type-layer",
                n_layers.saturating_sub(1)
            )
        }
        (flag, _) => format!("choose it with {flag}"),
    };
    Some(advice)
}

/// What is refused, after the flag that it was given with.
pub(crate) fn with_flag(error: &ConfigError) -> String {
    match flag(error) {
        Some(flag) => format!("{flag}: {error}"),
        None => error.to_string(),
    }
}

/// What is wrong with a state, where that is what an error is about.
fn state_error<'e>(error: &'e (dyn Error + 'static)) -> Option<&'e StateError> {
    match engine_error(error) {
        Some(EngineError::State(error)) => Some(error),
        _ => error.downcast_ref(),
    }
}

/// Of a file that holds no state, not all of it, or too much.
fn of_state(error: &StateError) -> Option<&'static str> {
    match error {
        StateError::NotAState => Some(
            "--save-state makes states; a model is given with -m, and 'cellar inspect' shows one",
        ),
        StateError::Truncated { .. } => Some("copy the file again, or save the state again"),
        StateError::Refused(Refusal::NoRoom(_)) => Some("choose a larger --ctx"),
        _ => None,
    }
}

/// Of a file that begins with these bytes and is no GGUF file.
fn of_magic(file: &str, found: [u8; 4]) -> Option<String> {
    if STATE_MAGIC.starts_with(&found) {
        return Some(
            "it is a saved state: 'cellar state inspect' shows it, and --load-state continues it"
                .to_owned(),
        );
    }
    let path = Path::new(file);
    let name = path.file_name()?.to_str()?;
    let is_of_directory = name.ends_with(".safetensors") || name.ends_with(".json");
    Some(if is_of_directory {
        format!(
            "give the directory that has it: '{}'",
            parent(path).display()
        )
    } else {
        "give a GGUF file, or a directory with config.json, *.safetensors and tokenizer.json"
            .to_owned()
    })
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
    if let Ok(target) = path.read_link() {
        return Some(format!(
            "it is a link to '{}', which is not there",
            target.display()
        ));
    }
    let parent = parent(path);
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
    // What follows the dot of a version, as in qwen2.5:7b, is no extension.
    let is_file_name = MODEL_FILES.iter().any(|end| wanted.ends_with(end));
    let is_bare = parent == Path::new(".") && !is_file_name;
    (is_bare && cfg!(feature = "hub")).then(|| {
        "check the path; models by name are OWNER/NAME ('cellar list', 'cellar pull')".to_owned()
    })
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// The name of which `given` may be a misspelling.
pub(crate) fn most_similar<'n>(given: &str, names: &[&'n str]) -> Option<&'n str> {
    let similar = names.iter().filter(|name| is_similar(given, name));
    let distance = |name: &&&str| strsim::damerau_levenshtein(given, name);
    similar.min_by_key(distance).copied()
}

fn is_similar(a: &str, b: &str) -> bool {
    // Two letters that changed places are much of a short word.
    strsim::jaro_winkler(a, b) > 0.85 || a.len() > 2 && strsim::damerau_levenshtein(a, b) == 1
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
