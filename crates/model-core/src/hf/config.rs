//! [`HfConfig`]: `config.json` with typed access.
//!
//! Invariant: an error names the file, the key, what was found and what was expected. A key that is
//! `null` counts as absent, as it does for the library that writes these files. Knows the meaning
//! of no key.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Map, Value};

use super::ModelFileError;
use crate::error::lfs_pointer;

/// Longest JSON file that is read: vocabularies take tens of megabytes.
const MAX_BYTES: u64 = 512 << 20;

/// A JSON object in a file.
#[derive(Clone, Debug)]
pub struct HfConfig {
    file: String,
    root: Map<String, Value>,
    /// Other names of keys: the one that is asked for, then the one in the file.
    aliases: &'static [(&'static str, &'static str)],
    /// The object that keys were taken out of, where there is one.
    section: Option<Section>,
    /// The keys that were read, of this and of all that were made from it.
    read_keys: ReadKeys,
    /// The bounds of counts, where there are tensors that give them.
    bounds: Option<Bounds>,
}

/// The bounds of a model's sizes by its tensors: memory is taken for each layer, head and token, so
/// a count that no tensor has must end as an error before.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Number of tensors: each layer has one.
    pub(super) n_tensors: usize,
    /// The longest dimension of all tensors.
    pub(super) longest: usize,
}

/// Counts up to here cost little, whatever the tensors are: not all are dimensions.
const SMALL_COUNT: usize = 1 << 16;

/// Parts of the names of lengths, which no tensor needs to have.
const LENGTHS: [&str; 7] = [
    "max", "position", "window", "length", "context", "chunk", "ctx",
];

impl Bounds {
    /// Of a model whose tensors are not known: larger than any model's so far.
    pub(super) const UNKNOWN: Self = Self {
        n_tensors: 1 << 16,
        longest: 1 << 22,
    };

    /// Why a key cannot have this value.
    fn refusal(self, key: &str, count: usize) -> Option<String> {
        let Self { n_tensors, longest } = self;
        if LENGTHS.iter().any(|part| key.contains(part)) {
            None
        } else if key.contains("layer") || key.contains("blocks") {
            let reason = || format!("at most {n_tensors}, the number of tensors");
            (count > n_tensors).then(reason)
        } else {
            let most = longest.max(SMALL_COUNT);
            let reason =
                || format!("at most {most}: no tensor has more than {longest} rows or columns");
            (count > most).then(reason)
        }
    }
}

/// First parts of keys.
type ReadKeys = Arc<Mutex<BTreeSet<String>>>;

/// An object whose keys were taken out of it.
#[derive(Clone, Debug)]
struct Section {
    name: &'static str,
    keys: Vec<String>,
}

impl HfConfig {
    /// Reads a file, where there is one.
    ///
    /// # Errors
    /// As [`HfConfig::open`].
    pub(super) fn open_optional(path: &Path) -> Result<Option<Self>, ModelFileError> {
        path.exists().then(|| Self::open(path)).transpose()
    }

    /// Reads a file.
    ///
    /// # Errors
    /// [`ModelFileError`] where it cannot be read or holds no JSON object.
    pub fn open(path: &Path) -> Result<Self, ModelFileError> {
        let io = |source| ModelFileError::Io {
            attempt: "read",
            path: path.to_owned(),
            source,
        };
        let wrong = |reason: String| ModelFileError::Format {
            path: path.to_owned(),
            reason,
        };
        let n_bytes = fs::metadata(path).map_err(io)?.len();
        if n_bytes > MAX_BYTES {
            return Err(wrong(format!(
                "{n_bytes} bytes; at most {MAX_BYTES} are read"
            )));
        }
        let text = fs::read(path).map_err(io)?;
        if let Some(reason) = lfs_pointer(&text) {
            return Err(wrong(reason));
        }
        let root =
            serde_json::from_slice(&text).map_err(|e| wrong(format!("no JSON object: {e}")))?;
        Ok(Self {
            file: format!("'{}'", path.display()),
            root,
            aliases: &[],
            section: None,
            read_keys: ReadKeys::default(),
            bounds: None,
        })
    }

    /// An object that is in memory; `file` is what errors call it.
    pub fn new(file: impl Into<String>, root: Map<String, Value>) -> Self {
        let file = file.into();
        Self {
            file,
            root,
            aliases: &[],
            section: None,
            read_keys: ReadKeys::default(),
            bounds: None,
        }
    }

    /// The same, for a model of tensors that allow these counts and no others.
    #[must_use]
    pub(super) fn with_bounds(mut self, bounds: Bounds) -> Self {
        self.bounds = Some(bounds);
        self
    }

    /// More rows than any tensor has that a vocabulary could be for.
    pub(super) fn most_rows(&self) -> usize {
        let most = |bounds: Bounds| bounds.longest.max(SMALL_COUNT);
        self.bounds.map_or(usize::MAX, most)
    }

    /// The same, with the keys of an object in place of the root's of these names, where the file
    /// has it.
    #[must_use]
    pub(super) fn with_section(mut self, name: &'static str) -> Self {
        if let Some(Value::Object(object)) = self.root.get_mut(name) {
            let object = std::mem::take(object);
            let keys = object.keys().cloned().collect();
            self.root.extend(object);
            self.section = Some(Section { name, keys });
        }
        self
    }

    /// The key's name in errors: its place in the file.
    fn shown(&self, key: &str) -> String {
        let own = self.own(key);
        let first = own.split('.').next().unwrap_or(own);
        match &self.section {
            Some(Section { name, keys })
                if keys.iter().any(|k| k == first) || !self.root.contains_key(first) =>
            {
                format!("{name}.{own}")
            }
            _ => own.to_owned(),
        }
    }

    /// The same, with keys that the file calls otherwise: the usual name, then its own.
    #[must_use]
    pub(super) fn with_aliases(mut self, aliases: &'static [(&'static str, &'static str)]) -> Self {
        self.aliases = aliases;
        self
    }

    /// The key's name in the file: its other name where the file has that, or has neither.
    pub(super) fn own<'a>(&self, key: &'a str) -> &'a str {
        let other = self.aliases.iter().find(|(usual, _)| *usual == key);
        match other {
            Some((usual, own))
                if self.root.contains_key(*own) || !self.root.contains_key(*usual) =>
            {
                own
            }
            _ => key,
        }
    }

    /// The same, with values for keys that it does not have. A key that is `null` stays so.
    #[must_use]
    pub(super) fn with_defaults(mut self, defaults: &[(&str, u32)]) -> Self {
        for &(key, value) in defaults {
            let key = self.own(key);
            self.set_default(key, value.into());
        }
        self
    }

    /// The same, with the part of a head that rotates where it does not have that. The usual key of
    /// a class that has a name of its own for it counts for nothing.
    #[must_use]
    pub(super) fn with_rotated_part(mut self, part: f64) -> Self {
        let usual = "partial_rotary_factor";
        let alias = self.aliases.iter().find(|(key, _)| *key == usual);
        let key = alias.map_or(usual, |(_, own)| own);
        self.set_default(key, part.into());
        self
    }

    /// The same, with the tokens that begin a text as `generation_config.json` has them: there,
    /// they come before those of `config.json`.
    #[must_use]
    pub(super) fn with_start_of(mut self, generation: &Self) -> Self {
        for key in ["decoder_start_token_id", "forced_bos_token_id"] {
            if let Some(id) = generation.value(key) {
                self.root.insert(key.to_owned(), id.clone());
            }
        }
        self
    }

    /// Sets a key that the file does not have; it is none of those that were not read.
    fn set_default(&mut self, key: &str, value: Value) {
        if !self.root.contains_key(key) {
            self.mark_read(key);
            self.root.insert(key.to_owned(), value);
        }
    }

    /// The same without a key, for settings that a class reads by itself.
    #[must_use]
    pub fn without(&self, key: &str) -> Self {
        let mut rest = self.clone();
        match key.rsplit_once('.') {
            None => drop(rest.root.remove(key)),
            Some((object, last)) => {
                let mut parts = object.split('.');
                let first = parts.next().and_then(|part| rest.root.get_mut(part));
                let object = parts.fold(first, |value, part| value?.get_mut(part));
                if let Some(Value::Object(object)) = object {
                    object.remove(last);
                }
            }
        }
        rest
    }

    /// The file's name in errors.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// The value of a key; a dot leads into an object or list
    /// (`rope_parameters.rope_theta`, `mlp_multipliers.0`). `null` counts
    /// as absent.
    pub fn value(&self, key: &str) -> Option<&Value> {
        let mut parts = self.own(key).split('.');
        let first = parts.next()?;
        self.mark_read(first);
        let mut value = self.root.get(first)?;
        for part in parts {
            value = match value {
                Value::Array(list) => list.get(part.parse::<usize>().ok()?)?,
                other => other.get(part)?,
            };
        }
        Some(value).filter(|value| !value.is_null())
    }

    /// Checks that an object has no other settings than the known ones: ignored, they would give
    /// other numbers. Objects inside it are not settings.
    ///
    /// # Errors
    /// [`ModelFileError::WrongKey`] with the first that is not known.
    pub fn check_known(&self, object: &str, known: &[&str]) -> Result<(), ModelFileError> {
        let Some(Value::Object(settings)) = self.value(object) else {
            return Ok(());
        };
        let unknown = settings.iter().find(|(key, value)| {
            !value.is_object() && !value.is_null() && !known.contains(&key.as_str())
        });
        match unknown {
            Some((key, _)) => {
                Err(self.wrong(&format!("{object}.{key}"), "a setting that Cellar knows"))
            }
            None => Ok(()),
        }
    }

    fn mark_read(&self, key: &str) {
        let mut read = self
            .read_keys
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        read.insert(key.to_owned());
    }

    /// The keys of the file that were not read, with their values.
    pub(super) fn unread(&self) -> Vec<(&str, &Value)> {
        let read = self
            .read_keys
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let entries = self.root.iter().filter(|(key, _)| !read.contains(*key));
        entries.map(|(key, value)| (key.as_str(), value)).collect()
    }

    /// Checks that what is there is an object: something else would be read as if it were not
    /// there.
    ///
    /// # Errors
    /// [`ModelFileError::WrongKey`] where it is something else.
    pub fn check_object(&self, key: &str) -> Result<(), ModelFileError> {
        match self.value(key) {
            // RND1 says `false` of what it has not.
            None | Some(Value::Object(_) | Value::Bool(false)) => Ok(()),
            Some(_) => Err(self.wrong(key, "an object")),
        }
    }

    /// The error that a key is absent.
    pub fn missing(&self, key: &str, expected: impl Into<String>) -> ModelFileError {
        ModelFileError::MissingKey {
            file: self.file.clone(),
            key: self.shown(key),
            expected: expected.into(),
        }
    }

    /// The error that a key has a value that it cannot have.
    pub fn wrong(&self, key: &str, expected: impl Into<String>) -> ModelFileError {
        let found = self.value(key).map_or("absent".to_owned(), shortened);
        ModelFileError::WrongKey {
            file: self.file.clone(),
            key: self.shown(key),
            found,
            expected: expected.into(),
        }
    }

    fn read<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelFileError> {
        match self.value(key) {
            None => Ok(None),
            Some(value) => match read(value) {
                Some(read) => Ok(Some(read)),
                None => Err(self.wrong(key, expected)),
            },
        }
    }

    /// A whole number of at least 1 that may be absent.
    ///
    /// # Errors
    /// [`ModelFileError::WrongKey`] where it is anything else.
    pub fn optional_count(&self, key: &str) -> Result<Option<usize>, ModelFileError> {
        let count = |value: &Value| {
            let count = value.as_u64().filter(|&n| n > 0)?;
            u32::try_from(count).ok().map(|n| n as usize)
        };
        let count = self.read(key, "a whole number of at least 1", count)?;
        let refusal = self.bounds.zip(count);
        let refusal = refusal.and_then(|(bounds, count)| bounds.refusal(self.own(key), count));
        match refusal {
            None => Ok(count),
            Some(wanted) => Err(self.wrong(key, wanted)),
        }
    }

    /// A whole number of at least 1.
    ///
    /// # Errors
    /// [`ModelFileError`] where it is absent or anything else.
    pub fn count(&self, key: &str) -> Result<usize, ModelFileError> {
        self.optional_count(key)?
            .ok_or_else(|| self.missing(key, "a whole number of at least 1"))
    }

    /// A number that may be absent. `{"__float__": "Infinity"}` is one.
    ///
    /// # Errors
    /// [`ModelFileError::WrongKey`] where it is anything else.
    pub fn optional_number(&self, key: &str) -> Result<Option<f64>, ModelFileError> {
        self.read(key, "a number", number)
    }

    /// A number.
    ///
    /// # Errors
    /// [`ModelFileError`] where it is absent or anything else.
    pub fn number(&self, key: &str) -> Result<f64, ModelFileError> {
        self.optional_number(key)?
            .ok_or_else(|| self.missing(key, "a number"))
    }

    /// A list of numbers that may be absent.
    ///
    /// # Errors
    /// [`ModelFileError::WrongKey`] where it is anything else.
    pub fn optional_numbers(&self, key: &str) -> Result<Option<Vec<f64>>, ModelFileError> {
        let list = |value: &Value| value.as_array()?.iter().map(number).collect();
        self.read(key, "a list of numbers", list)
    }

    /// A truth value that may be absent.
    ///
    /// # Errors
    /// [`ModelFileError::WrongKey`] where it is anything else.
    pub fn optional_flag(&self, key: &str) -> Result<Option<bool>, ModelFileError> {
        self.read(key, "true or false", Value::as_bool)
    }

    /// A text that may be absent.
    ///
    /// # Errors
    /// [`ModelFileError::WrongKey`] where it is anything else.
    pub fn optional_text(&self, key: &str) -> Result<Option<&str>, ModelFileError> {
        self.read(key, "a text", Value::as_str)
    }

    /// A list of texts that may be absent.
    ///
    /// # Errors
    /// [`ModelFileError::WrongKey`] where it is anything else.
    pub fn optional_texts(&self, key: &str) -> Result<Option<Vec<&str>>, ModelFileError> {
        let list = |value| Value::as_array(value)?.iter().map(Value::as_str).collect();
        self.read(key, "a list of texts", list)
    }
}

/// A number, also one that JSON has no notation for.
fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Number(number) => number.as_f64(),
        Value::Object(object) if object.len() == 1 => match object.get("__float__")?.as_str()? {
            "Infinity" => Some(f64::INFINITY),
            "-Infinity" => Some(f64::NEG_INFINITY),
            "NaN" => Some(f64::NAN),
            _ => None,
        },
        _ => None,
    }
}

/// A value as an error shows it.
fn shortened(value: &Value) -> String {
    const N_SHOWN: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(N_SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> HfConfig {
        HfConfig::new("'config.json'", serde_json::from_str(text).unwrap())
    }

    #[test]
    fn numbers_that_json_cannot_write() {
        let config = config(
            r#"{"a": {"__float__": "Infinity"}, "b": [0.0, {"__float__": "NaN"}], "c": {"d": 3}}"#,
        );
        assert_eq!(config.number("a").unwrap(), f64::INFINITY);
        assert!(config.optional_numbers("b").unwrap().unwrap()[1].is_nan());
        assert_eq!(config.count("c.d").unwrap(), 3);
    }

    #[test]
    fn defaults_are_for_keys_that_are_not_there_and_null_is_there() {
        let config = config(r#"{"own": 8, "none": null}"#);
        let config = config.with_defaults(&[("own", 1), ("none", 2), ("absent", 3)]);
        assert_eq!(config.count("own").unwrap(), 8);
        assert_eq!(config.optional_count("none").unwrap(), None);
        assert_eq!(config.number("absent").unwrap(), 3.0);
        assert_eq!(config.count("absent").unwrap(), 3);
    }

    #[test]
    fn keys_of_an_object_come_before_the_others() {
        let text =
            r#"{"a": 1, "b": 2, "text": {"b": 3, "c": 4, "d": null, "e": {"f": 5}}, "d": 6}"#;
        let config = config(text).with_section("text");
        let counts = ["a", "b", "c", "e.f"].map(|key| config.count(key).unwrap());
        assert_eq!(counts, [1, 3, 4, 5]);
        assert_eq!(config.optional_count("d").unwrap(), None);
        let shown = ["a", "b", "e.f", "g"].map(|key| config.shown(key));
        assert_eq!(shown, ["a", "text.b", "text.e.f", "text.g"]);
        assert_eq!(config.with_section("none").shown("a"), "a");
    }

    #[test]
    fn errors_name_file_key_and_both_values() {
        let config = config(r#"{"window": 0, "heads": "many", "none": null}"#);
        let text = |error: ModelFileError| error.to_string();
        assert_eq!(
            text(config.optional_count("window").unwrap_err()),
            "'config.json': 'window' is 0, not a whole number of at least 1"
        );
        assert_eq!(
            text(config.optional_number("heads").unwrap_err()),
            "'config.json': 'heads' is \"many\", not a number"
        );
        assert_eq!(config.optional_count("none").unwrap(), None);
        assert_eq!(
            text(config.count("none").unwrap_err()),
            "'config.json': 'none' is missing (a whole number of at least 1 wanted)"
        );
    }
}
