//! [`HfClass`]: how one class of models is translated, as data.
//!
//! Knows no class by name: crates with architectures bring theirs.

use super::{HfConfig, HfWeights, Keys, ModelFileError, TensorRule};

/// The translation of one class of models.
#[derive(Clone, Copy, Debug)]
pub struct HfClass {
    /// The name in `architectures` of `config.json`.
    pub name: &'static str,
    /// The models of that name that it is for.
    pub when: ClassWhen,
    /// The name in `general.architecture`.
    pub architecture: &'static str,
    /// The outcome for the keys of `config.json`, in tables that classes share.
    pub keys: &'static [&'static [Key]],
    /// The outcome for the tensors, in tables that classes share.
    pub tensors: &'static [&'static [TensorRule]],
    /// Metadata keys that have a number of each layer, where files have a tensor for it: the whole
    /// key, then the tensor's name in GGUF behind its layer.
    pub layer_numbers: &'static [(&'static str, &'static str)],
    /// The number of layers in a group, where names of tensors have an `{i}` for the place of a
    /// layer in its group: its metadata key, then its key in `config.json`. Absent, it is 1.
    pub group_len: Option<(&'static str, &'static str)>,
    /// Whole names of tensors that hold nothing a model needs; `{l}` is any layer.
    pub unused: &'static [&'static str],
    /// The beginnings of the names of tensors of other parts of a model (a vision tower's).
    pub other_parts: &'static [&'static str],
    /// The object of `config.json` whose keys count for the model, before those around it: files
    /// of models with several parts have one for each.
    pub section: Option<&'static str>,
    /// Keys of `config.json` that this class calls otherwise: the usual name, then its own.
    pub aliases: &'static [(&'static str, &'static str)],
    /// The beginning of the names of tensors, but for the output matrix; files that were saved
    /// without their head may lack it.
    pub body: &'static str,
    /// The text that may follow it in files of models with a vision or audio tower.
    pub text: &'static str,
    /// Beginnings of names of tensors, each with others that files may have in its place.
    pub places: &'static [(&'static str, &'static [&'static str])],
    /// The values of transformers for absent keys, where a reader would refuse that or take
    /// something else. A key that is `null` is there.
    pub defaults: &'static [(&'static str, u32)],
    /// The part of a head that rotates where the config does not say so, if not all of it.
    pub rotated_part: Option<f64>,
    /// The output matrix of models of the class.
    pub head: HfHead,
    /// The function that adds tensors that are computed out of others, where there are any.
    pub derive: Option<DeriveTensors>,
}

/// Adds tensors that are computed out of others.
pub type DeriveTensors = fn(&HfConfig, &mut HfWeights) -> Result<(), ModelFileError>;

/// The models of one class that a translation is for: some classes are two architectures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClassWhen {
    /// Those that no other translation is for.
    #[default]
    Otherwise,
    /// Those whose config counts at least one under this key.
    Counts(&'static str),
    /// Those whose config has `true` under this key.
    Flagged(&'static str),
    /// Those whose config has this text under this key: the key, then the text.
    Says(&'static str, &'static str),
}

impl ClassWhen {
    fn applies(self, config: &HfConfig) -> bool {
        match self {
            Self::Otherwise => false,
            Self::Counts(key) => config.optional_count(key).is_ok_and(|n| n.is_some()),
            Self::Flagged(key) => config
                .optional_flag(key)
                .is_ok_and(|flag| flag == Some(true)),
            Self::Says(key, wanted) => config
                .optional_text(key)
                .is_ok_and(|text| text == Some(wanted)),
        }
    }
}

/// The output matrix of a class of models.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HfHead {
    /// One of its own, or that of the embedding.
    #[default]
    Logits,
    /// One of its own where the files have it: a head that drafts, which has no embedding to tie it
    /// to.
    Own,
    /// None (`LlamaModel` and the like): a model of vectors. Names of tensors may lack their
    /// `model.`.
    None,
}

impl HfClass {
    /// A class without anything, for those to begin with that have little.
    pub const EMPTY: Self = Self {
        name: "",
        when: ClassWhen::Otherwise,
        architecture: "",
        keys: &[],
        tensors: &[],
        layer_numbers: &[],
        group_len: None,
        unused: &[],
        other_parts: &[],
        section: None,
        aliases: &[],
        body: "model.",
        text: "",
        places: &[],
        defaults: &[],
        rotated_part: None,
        head: HfHead::Logits,
        derive: None,
    };

    /// True if a rule makes the GGUF tensor of this name.
    pub(super) fn has_tensor(&self, name: &str) -> bool {
        let mut rules = self.tensors.iter().copied().flatten();
        rules.any(|rule| rule.makes(name))
    }
}

/// The classes of models that a program translates, and those that it declines.
#[derive(Clone, Debug, Default)]
pub struct HfClasses {
    classes: Vec<HfClass>,
    declined: Vec<DeclinedClass>,
}

/// A class of models that is not supported, on purpose.
#[derive(Clone, Copy, Debug)]
struct DeclinedClass {
    class: &'static str,
    reason: &'static str,
}

impl HfClasses {
    /// Adds the translation of a class, replacing one for the same models.
    pub fn register(&mut self, class: HfClass) {
        let is_other = |c: &HfClass| c.name != class.name || c.when != class.when;
        self.classes.retain(is_other);
        self.classes.push(class);
    }

    /// Records why a class has no translation, for the error on opening a model of it.
    pub fn decline(&mut self, class: &'static str, reason: &'static str) {
        self.declined.push(DeclinedClass { class, reason });
    }

    /// The translation of the class with this name.
    pub fn get(&self, name: &str) -> Option<&HfClass> {
        self.classes.iter().find(|c| c.name == name)
    }

    /// The translation of the class with this name for models with this config.
    pub(super) fn for_config(&self, name: &str, config: &HfConfig) -> Option<&HfClass> {
        let mut named = self.classes.iter().filter(|c| c.name == name);
        let special = named.clone().find(|c| c.when.applies(config));
        special.or_else(|| named.find(|c| c.when == ClassWhen::Otherwise))
    }

    /// Why the class with this name has no translation, where that was recorded.
    pub fn declined(&self, class: &str) -> Option<&'static str> {
        let declined = self.declined.iter().find(|d| d.class == class);
        declined.map(|d| d.reason)
    }

    /// All translations, in order of registration.
    pub fn iter(&self) -> impl Iterator<Item = &HfClass> {
        self.classes.iter()
    }

    /// Why there is no translation of the class that a config names.
    pub(super) fn unsupported(&self, config: &HfConfig, class: &str) -> ModelFileError {
        let (file, class) = (config.file().to_owned(), class.to_owned());
        match self.declined(&class) {
            Some(reason) => ModelFileError::Declined {
                file,
                class,
                reason,
            },
            None => ModelFileError::UnknownClass {
                file,
                class,
                known: self.iter().map(|c| c.name.to_owned()).collect(),
            },
        }
    }
}

/// The outcome for one key of `config.json`. `to` is without the architecture's name before it.
#[derive(Clone, Copy, Debug)]
pub enum Key {
    /// A whole number of at least 1 that must be there.
    Count {
        /// Metadata key.
        to: &'static str,
        /// Key in `config.json`.
        from: &'static str,
    },
    /// The same, from another key where the first is absent.
    CountOr {
        /// Metadata key.
        to: &'static str,
        /// Key in `config.json`.
        from: &'static str,
        /// The other key.
        or: &'static str,
    },
    /// A number that must be there.
    Number {
        /// Metadata key.
        to: &'static str,
        /// Key in `config.json`.
        from: &'static str,
    },
    /// A number, left out where it is absent.
    OptionalNumber {
        /// Metadata key.
        to: &'static str,
        /// Key in `config.json`.
        from: &'static str,
    },
    /// A fixed number.
    Constant {
        /// Metadata key.
        to: &'static str,
        /// The number.
        value: u32,
    },
    /// A key that can have one value only, because the architecture computes nothing else.
    Only {
        /// Key in `config.json`.
        from: &'static str,
        /// The value that it must have where it is there.
        is: FixedValue,
    },
    /// Those of a table.
    All(&'static [Key]),
    /// Whatever needs more than one key.
    With(fn(&HfConfig, &mut Keys) -> Result<(), ModelFileError>),
}

/// The one value that a key may have.
#[derive(Clone, Copy, Debug)]
pub enum FixedValue {
    /// One of these texts.
    Text(&'static [&'static str]),
    /// This truth value.
    Flag(bool),
    /// This truth value, which has to be there: transformers takes the other one where it is not.
    StatedFlag(bool),
}

impl Key {
    /// Translates.
    pub(super) fn apply(&self, config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
        match *self {
            Self::Count { to, from } => keys.set(to, as_u32(config.count(from)?)),
            Self::CountOr { to, from, or } => match config.optional_count(from)? {
                Some(count) => keys.set(to, as_u32(count)),
                None => keys.set(to, as_u32(config.count(or)?)),
            },
            Self::Number { to, from } => keys.set(to, config.number(from)? as f32),
            Self::OptionalNumber { to, from } => {
                if let Some(number) = config.optional_number(from)? {
                    keys.set(to, number as f32);
                }
            }
            Self::Constant { to, value } => keys.set(to, value),
            Self::Only { from, is } => is.check(config, from)?,
            Self::All(table) => table.iter().try_for_each(|key| key.apply(config, keys))?,
            Self::With(translate) => translate(config, keys)?,
        }
        Ok(())
    }
}

impl FixedValue {
    fn check(self, config: &HfConfig, key: &str) -> Result<(), ModelFileError> {
        match self {
            Self::Text(known) => match config.optional_text(key)? {
                Some(text) if !known.contains(&text) => {
                    Err(config.wrong(key, format!("one of: {}", known.join(", "))))
                }
                _ => Ok(()),
            },
            Self::Flag(wanted) => match config.optional_flag(key)? {
                Some(flag) if flag != wanted => Err(config.wrong(key, wanted.to_string())),
                _ => Ok(()),
            },
            Self::StatedFlag(wanted) => match config.optional_flag(key)? {
                Some(flag) if flag == wanted => Ok(()),
                _ => Err(config.wrong(key, wanted.to_string())),
            },
        }
    }
}

/// A count as metadata store it; counts of a config fit by the way they are read.
pub(super) fn as_u32(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
