//! [`Defaults`]: what transformers takes for a setting that a recipe's `config.json` lacks, from
//! `fixtures/defaults.json`, which `fixtures/defaults.py` writes.
//!
//! Invariant: the values are those of transformers' classes, never Cellar's. Knows no key.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::{Recipe, fixture};

/// The new values of settings, by path.
type Change = Map<String, Value>;

/// The outcome for a recipe's config where it lacks a setting.
#[derive(Clone, Debug)]
pub enum Default {
    /// The same: what is there is the default, or the class does not know the setting; or
    /// transformers has no class for the recipe, or none that loads without the setting.
    Unchanged,
    /// A config with these values, by path.
    Changed(Change),
}

/// The defaults of all recipes.
#[derive(Clone, Debug)]
pub struct Defaults(BTreeMap<String, Map<String, Value>>);

impl Defaults {
    /// Those of the fixture.
    pub fn open() -> Self {
        let file = std::fs::read(fixture("defaults.json")).unwrap();
        Self(serde_json::from_slice(&file).unwrap())
    }

    /// The outcome for a recipe's config without the setting at this path.
    pub fn without(&self, recipe: &Recipe, path: &str) -> Default {
        let change = self
            .0
            .get(&recipe.name())
            .and_then(|settings| settings.get(path));
        match change {
            None => Default::Unchanged,
            Some(Value::Object(change)) => Default::Changed(change.clone()),
            Some(value) => {
                let alone = (path.to_owned(), value.clone());
                Default::Changed([alone].into_iter().collect())
            }
        }
    }
}

/// Sets values by path; objects on the way are made where there are none.
pub fn set(config: &mut Map<String, Value>, change: &Change) {
    for (path, value) in change {
        let (mut object, mut rest) = (&mut *config, path.as_str());
        while let Some((first, behind)) = rest.split_once('.') {
            let inner = object.entry(first).or_insert(Value::Null);
            if !inner.is_object() {
                *inner = Map::new().into();
            }
            object = inner.as_object_mut().unwrap();
            rest = behind;
        }
        object.insert(rest.to_owned(), value.clone());
    }
}
