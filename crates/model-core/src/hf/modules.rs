//! [`ModuleTarget`]: which matrices of a model a module of transformers is, for adapters that name
//! modules.
//!
//! Invariant: the rows of an adapter's second matrix are moved as those of the module's matrix are.
//! Knows no adapter's files.

use kv_graph::weights::Weight;
use serde_json::{Map, Value};

use super::names::{Numbers, filled};
use super::steps::{Action, Values};
use super::tensor_rule::TensorRule;
use super::{HfClass, HfConfig, ModelFileError};
use crate::gguf::Metadata;

/// A matrix of a model that has, perhaps among others, the rows of a module.
#[derive(Clone, Debug)]
pub(crate) struct ModuleTarget {
    /// Its name in GGUF.
    pub(crate) matrix: String,
    /// The expert that the module is, where the matrix is a stack of those of all.
    pub(crate) expert: Option<usize>,
    pub(super) actions: Vec<Action>,
}

impl ModuleTarget {
    /// The rows of this matrix out of those of the module: `[out, rank]`.
    ///
    /// # Errors
    /// In words, where the matrix is made of the module's in a way that is not one of rows.
    pub(crate) fn rows(&self, rows: &Weight) -> Result<Weight, String> {
        let mut values = Values {
            shape: rows.shape().to_vec(),
            format: rows.format(),
            bytes: rows.bytes().clone(),
        };
        for (at, action) in self.actions.iter().enumerate() {
            match action {
                // The matrices of an adapter lie as those of a product do.
                Action::Transposed if at == 0 => continue,
                Action::Pairs { .. }
                | Action::RowPart { .. }
                | Action::PartsTogether { .. }
                | Action::PickedRows(_)
                | Action::RowsAfter(_)
                | Action::Scaled(_)
                | Action::ScaledRows(_) => values = action.apply(&values)?,
                _ => return Err("its values are rearranged by columns".to_owned()),
            }
        }
        let made = Weight::new(
            self.matrix.as_str(),
            values.shape,
            values.format,
            values.bytes,
        );
        made.map_err(|error| error.to_string())
    }
}

/// What a rule makes of a tensor of this name, as the numbers in it say: the GGUF name, and the
/// expert where those of all are stacked.
pub(super) fn made_by(rule: &TensorRule, name: &str) -> Option<(String, Option<usize>)> {
    let numbers = rule.numbers(name)?;
    let to = rule.to();
    if to.contains("{e}") {
        return Some((filled(&to, numbers), None));
    }
    let of_layer = Numbers {
        expert: None,
        ..numbers
    };
    Some((filled(&to, of_layer), numbers.expert.map(|e| e as usize)))
}

impl HfClass {
    /// The matrices of a GGUF file of this class that have the rows of a tensor with this name.
    pub(crate) fn targets_in_gguf(
        &self,
        name: &str,
        metadata: &Metadata,
    ) -> Result<Vec<ModuleTarget>, ModelFileError> {
        let config = config_of(metadata, self).with_aliases(self.aliases);
        let rules = self.tensors.iter().copied().flatten();
        let rules = rules.map(|rule| rule.with_groups(self, &config));
        let rules: Vec<TensorRule> = rules.collect::<Result<_, _>>()?;
        let made = rules
            .iter()
            .filter_map(|rule| Some((rule, made_by(rule, name)?)));
        let target = |(rule, (matrix, expert)): (&TensorRule, (String, Option<usize>))| {
            let actions = rule.steps().iter().map(|step| step.resolve(&config));
            Ok(ModuleTarget {
                matrix,
                expert,
                actions: actions.collect::<Result<_, _>>()?,
            })
        };
        made.map(target).collect()
    }
}

/// The settings that moving rows needs, out of a GGUF file's.
fn config_of(metadata: &Metadata, class: &HfClass) -> HfConfig {
    let count = |key: &str| {
        let key = format!("{}.{key}", class.architecture);
        metadata.optional::<u32>(&key).ok().flatten()
    };
    let mut root = Map::new();
    let mut set = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            root.insert(key.to_owned(), value);
        }
    };
    let heads = count("attention.head_count");
    let width = count("embedding_length");
    let of_head = count("attention.key_length").or_else(|| Some(width? / heads?.max(1)));
    set("num_attention_heads", heads.map(Value::from));
    let kv_heads = count("attention.head_count_kv").or(heads);
    set("num_key_value_heads", kv_heads.map(Value::from));
    set("hidden_size", width.map(Value::from));
    set("head_dim", of_head.map(Value::from));
    set("num_hidden_layers", count("block_count").map(Value::from));
    if let Some((key, of_config)) = class.group_len {
        set(of_config, count(key).map(Value::from));
    }
    let inner = count("feed_forward_length");
    set("intermediate_size", inner.map(Value::from));
    let rotated = count("rope.dimension_count").zip(of_head);
    let part = rotated.map(|(n, of)| f64::from(n) / f64::from(of.max(1)));
    set("partial_rotary_factor", part.map(Value::from));
    HfConfig::new("the model's metadata", root)
}
