//! [`SettingsCheck`]: every setting of a recipe's `config.json` is changed, and left out: it is
//! refused by its key, or by the metadata key that it becomes, or by the key or tensor that
//! contradicts it; or it makes another model; or it is one of those that have no part in what the
//! model computes. Left out, it is missed, or the model is the one that states transformers'
//! default for it.
//!
//! Invariant: what has an effect on a graph or on a tensor is seen; whether it is the right one is
//! for references to say. Knows no class of models.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::Arc;

use kv_graph::GraphShape;
use kv_graph::weights::WeightSource;
use model_core::architecture::{Model, Registry};
use model_core::directory::HfDirectory;
use model_core::head_file::HeadFile;
use serde_json::{Map, Value, json};

use crate::Recipe;
use crate::defaults::{Default, Defaults, set};

/// The known facts of the settings of some classes.
#[derive(Clone, Copy, Debug)]
pub struct SettingsCheck<'a> {
    /// The classes.
    pub registry: &'a Registry,
    /// The value that transformers takes for a setting that is left out.
    pub defaults: &'a Defaults,
    /// Settings without effect: of training, libraries, tokenizers, kernels. Those inside of an
    /// object are named by a path (`rope_parameters.rope_type`), or by the object.
    pub without_effect: &'a [&'a str],
    /// Settings that repeat what tensors are there, or their shapes: the tensors count.
    pub tensors_say: &'a [&'a str],
    /// Settings without effect in one recipe alone.
    pub without_effect_in: &'a [(&'a str, &'a str)],
    /// What classes take for a setting that their config does not hold, or that transformers has no
    /// class for; as [`Self::defaults`] otherwise.
    pub stated: &'a [StatedDefault],
    /// Settings that say which class a model is of: without them it is of another, or of none.
    pub choices: &'a [&'a str],
    /// The model that the recipes are heads for, where they are no models of their own.
    pub heads_of: Option<HeadsOf<'a>>,
}

/// A model that heads in directories of their own draft for.
#[derive(Clone, Copy, Debug)]
pub struct HeadsOf<'a> {
    /// The model.
    pub model: &'a HfDirectory,
    /// The folder where a head's directory is written.
    pub folder: &'a Path,
}

/// A recipe's directory, or a head's with the model that it drafts for.
struct Opened {
    architecture: String,
    model: Arc<dyn Model>,
    /// The recipe's own.
    weights: Arc<dyn WeightSource>,
    /// The rest of the head's work.
    head: String,
}

/// The default of a setting, with where it is from next to it.
#[derive(Clone, Copy, Debug)]
pub struct StatedDefault {
    /// The recipe's name.
    pub recipe: &'static str,
    /// The setting's path.
    pub path: &'static str,
    /// Its value, as JSON.
    pub value: &'static str,
}

/// The results of a model, as far as its settings say.
#[derive(PartialEq, Eq)]
struct ModelResult {
    context_length: usize,
    graph: String,
}

/// The shape of the graphs that are compared.
const SHAPE: GraphShape = GraphShape {
    n_tokens: 3,
    n_outputs: 1,
};

/// The objects that hold the settings of a model of text, or of a head's layer.
const SECTIONS: [&str; 2] = ["text_config.", "transformer_layer_config."];

/// The stand-in for an object.
const NOT_AN_OBJECT: &str = "no object";

/// The same kind of value, but another one; of an object, something else.
fn changed(value: &Value) -> Value {
    match value {
        Value::Null => json!(3),
        Value::Bool(flag) => json!(!flag),
        Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(count), _) => json!(count + 1),
            // A default in disguise becomes a number that counts.
            (None, Some(negative)) => json!(4 - negative),
            (None, None) => json!(number.as_f64().unwrap_or(0.0) * 2.0 + 0.5),
        },
        Value::String(_) => json!("no such thing"),
        Value::Array(list) => {
            let mut list = list.clone();
            match list.first_mut() {
                Some(first) => *first = changed(first),
                None => list.push(json!(1)),
            }
            list.into()
        }
        Value::Object(_) => json!(NOT_AN_OBJECT),
    }
}

/// The paths of all settings, those of objects behind the objects themselves.
fn paths(config: &Map<String, Value>) -> Vec<String> {
    let mut all = Vec::new();
    for (key, value) in config {
        all.push(key.clone());
        if let Value::Object(object) = value {
            let inner = paths(object).into_iter();
            all.extend(inner.map(|rest| format!("{key}.{rest}")));
        }
    }
    all
}

/// The object that a path leads into, and its key there.
fn place<'a, 'p>(
    config: &'a mut Map<String, Value>,
    path: &'p str,
) -> (&'a mut Map<String, Value>, &'p str) {
    match path.split_once('.') {
        None => (config, path),
        Some((object, rest)) => {
            let object = config.get_mut(object).and_then(Value::as_object_mut);
            place(
                object.unwrap_or_else(|| panic!("no object in {path}")),
                rest,
            )
        }
    }
}

impl SettingsCheck<'_> {
    /// Checks the settings of all these recipes.
    ///
    /// # Panics
    /// If something is wrong, with a line for each.
    pub fn check(&self, recipes: impl IntoIterator<Item = Recipe>) {
        let faults = recipes.into_iter().flat_map(|recipe| self.faults(&recipe));
        let faults: Vec<String> = faults.collect();
        assert!(faults.is_empty(), "{}", faults.join("\n"));
    }

    /// The faults of a recipe's settings, a line for each.
    fn faults(&self, recipe: &Recipe) -> Vec<String> {
        let sound = self
            .opened(recipe)
            .unwrap_or_else(|e| panic!("{}: {e}", recipe.name()));
        let paths = paths(recipe.config());
        let faults = paths.iter().flat_map(|path| {
            let faults = [
                self.changed_fault(recipe, &sound, path),
                self.missing_fault(recipe, &sound, path),
            ];
            faults.into_iter().flatten()
        });
        faults.collect()
    }

    fn opened(&self, recipe: &Recipe) -> Result<Opened, String> {
        match self.heads_of {
            None => self.directory(recipe),
            Some(of) => self.head(recipe, of),
        }
    }

    fn directory(&self, recipe: &Recipe) -> Result<Opened, String> {
        let directory = recipe.directory(self.registry);
        let directory = directory.map_err(|error| error.to_string())?;
        Ok(Opened {
            architecture: directory.model().architecture().to_owned(),
            model: Arc::clone(directory.model()),
            weights: Arc::clone(directory.weights()) as Arc<dyn WeightSource>,
            head: String::new(),
        })
    }

    fn head(&self, recipe: &Recipe, of: HeadsOf<'_>) -> Result<Opened, String> {
        let own = recipe.translated(self.registry);
        let (_, weights) = own.map_err(|error| error.to_string())?.into_parts();
        recipe.expand(of.folder);
        let file = HeadFile::open(of.folder, self.registry);
        let file = file.map_err(|error| error.to_string())?;
        let file = file.ok_or("no head")?;
        let architecture: &str = file.metadata().get("general.architecture").unwrap();
        let model = Arc::clone(of.model.weights());
        let joined = file.join(&**of.model.model(), model, self.registry);
        let joined = joined.map_err(|error| format!("{}: {error}", file.label()))?;
        let model = joined.model.draft_head().ok_or("no head")?;
        // What it reads is in the graph of the model that it is joined to.
        let read = joined.model.graph(SHAPE).map_err(|e| e.to_string())?;
        Ok(Opened {
            architecture: architecture.to_owned(),
            head: format!("{:?} {}", model.head_reading(), read.text()),
            model,
            weights: Arc::new(weights),
        })
    }

    fn computed(directory: &Opened) -> ModelResult {
        let model = &directory.model;
        let text = |model: &dyn Model| model.graph(SHAPE).map(|graph| graph.text().to_string());
        // Some settings count in long contexts alone: longer than the 16, 256 or 512 tokens of
        // recipes.
        let longer = [17, 257, 513, usize::MAX].map(|n| model.for_context(n));
        let longer = longer.map(|model| model.map(|model| text(&*model)));
        let graphs = (text(&**model), longer);
        let source = model.source_encoder();
        let source = source.map(|encoder| (encoder.start, text(&*encoder.model)));
        ModelResult {
            context_length: model.context_length(),
            graph: format!("{graphs:?} {source:?} {}", directory.head),
        }
    }

    fn digest(directory: &Opened) -> u64 {
        let weights = &directory.weights;
        let mut hasher = DefaultHasher::new();
        for name in weights.names() {
            let weight = weights.get(&name);
            weight
                .map(|w| w.bytes().hash(&mut hasher))
                .hash(&mut hasher);
        }
        hasher.finish()
    }

    fn has_no_part(&self, recipe: &Recipe, path: &str) -> bool {
        let mut sections = SECTIONS.iter();
        let inner = sections.find_map(|section| path.strip_prefix(section));
        let path = inner.unwrap_or(path);
        let here = (&*recipe.name(), path);
        let first = path.split('.').next().unwrap_or(path);
        let everywhere = [self.without_effect, self.tensors_say].concat();
        everywhere
            .iter()
            .any(|&other| other == path || other == first)
            || self.without_effect_in.contains(&here)
    }

    fn is_named(&self, error: &str, path: &str, architecture: &str) -> bool {
        let first = path.split('.').next().unwrap_or(path);
        self.choices.contains(&first)
            || error.contains(&format!("'{path}'"))
            || error.contains(&format!("'{path}."))
            || error.contains(&format!("': {architecture}."))
            || error.starts_with("'config.json': '")
            || error.contains("tensor '")
    }

    fn changed_fault(&self, recipe: &Recipe, sound: &Opened, path: &str) -> Option<String> {
        let (mut other, mut shown) = (recipe.clone(), Value::Null);
        other = other.with_config(|config| {
            let (object, key) = place(config, path);
            shown = changed(&object[key]);
            object.insert(key.to_owned(), shown.clone());
        });
        let fault = match self.opened(&other) {
            Ok(_) if self.has_no_part(recipe, path) => return None,
            Ok(_) if shown == NOT_AN_OBJECT => Some("is taken".to_owned()),
            Ok(same) => {
                let is_same = Self::computed(&same) == Self::computed(sound)
                    && Self::digest(&same) == Self::digest(sound);
                is_same.then(|| "changes nothing".to_owned())
            }
            Err(error) => (!self.is_named(&error, path, &sound.architecture)).then_some(error),
        };
        fault.map(|fault| format!("{}: '{path}' as {shown}: {fault}", recipe.name()))
    }

    /// What is left out is missed; or the model is the one with the class's default in its place.
    fn missing_fault(&self, recipe: &Recipe, sound: &Opened, path: &str) -> Option<String> {
        let other = recipe.clone().with_config(|config| {
            let (object, key) = place(config, path);
            object.remove(key);
        });
        let fault = match self.opened(&other) {
            Ok(found) => self.default_fault(recipe, sound, path, &found)?,
            // A class may have another name for it.
            Err(error) => {
                let is_missed = self.is_named(&error, path, &sound.architecture)
                    || error.contains("' is missing (");
                (!is_missed).then_some(error)?
            }
        };
        Some(format!("{}: without '{path}': {fault}", recipe.name()))
    }

    /// The fault of a model that was found without a setting.
    fn default_fault(
        &self,
        recipe: &Recipe,
        sound: &Opened,
        path: &str,
        found: &Opened,
    ) -> Option<String> {
        let is_same = |wanted: &Opened| {
            Self::computed(found) == Self::computed(wanted)
                && Self::digest(found) == Self::digest(wanted)
        };
        if self.has_no_part(recipe, path) && is_same(sound) {
            return None;
        }
        match self.default_of(recipe, path) {
            Default::Unchanged => (!is_same(sound)).then(|| "another model".to_owned()),
            Default::Changed(change) => {
                let shown = Value::from(change.clone());
                let stated = recipe.clone().with_config(|config| set(config, &change));
                match self.opened(&stated) {
                    Ok(stated) if is_same(&stated) => None,
                    Ok(_) => Some(format!("another model than with {shown}")),
                    Err(error) => Some(format!("a model, but with {shown}: {error}")),
                }
            }
        }
    }

    fn default_of(&self, recipe: &Recipe, path: &str) -> Default {
        let is_it = |s: &&StatedDefault| s.recipe == recipe.name() && s.path == path;
        match self.stated.iter().find(is_it) {
            Some(stated) => {
                let value = serde_json::from_str(stated.value).unwrap();
                Default::Changed([(path.to_owned(), value)].into_iter().collect())
            }
            None => self.defaults.without(recipe, path),
        }
    }
}
