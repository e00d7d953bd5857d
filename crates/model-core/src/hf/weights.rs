//! [`HfWeights`]: tensors of the files under GGUF names.
//!
//! What only has another name is handed out where it lies in the map; what is rearranged is made
//! when requested and not kept. Invariant: shapes are known without converting anything.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

use kv_block::{BlockFormat, dequantize};
use kv_graph::weights::{
    SharedBytes, SourceChanged, Weight, WeightError, WeightInfo, WeightSource,
};

use super::files::{TensorCoding, TensorFiles, TensorLocation};
use super::modules::{ModuleTarget, made_by};
use super::names::{Numbers, filled, matched};
use super::packed;
use super::steps::{Action, Values};
use super::tensor_rule::TensorRule;
use super::{HfClass, HfConfig, ModelFileError};
use crate::gguf::integers;
use crate::head_file::HeadWeights;

/// The sources of a GGUF tensor.
#[derive(Clone, Debug)]
struct Source {
    /// Name of the first part, for errors.
    name: String,
    /// One, or one for each expert.
    parts: Vec<TensorLocation>,
    stacked: ExpertStack,
    /// Of one part.
    part_shape: Vec<usize>,
    stored: Result<BlockFormat, String>,
    actions: Vec<Action>,
    info: WeightInfo,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExpertStack {
    No,
    Experts,
}

/// Computes a tensor out of others.
type Derivation = dyn Fn(&HfWeights) -> Result<Weight, WeightError> + Send + Sync;

/// A tensor that is computed out of others when it is requested.
struct DerivedTensor {
    info: WeightInfo,
    make: Box<Derivation>,
}

impl fmt::Debug for DerivedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Derived")
            .field("info", &self.info)
            .finish_non_exhaustive()
    }
}

/// The tensors of a directory under GGUF names.
#[derive(Debug)]
pub struct HfWeights {
    sources: BTreeMap<String, Source>,
    derived: BTreeMap<String, DerivedTensor>,
    /// Tensors that others are derived from and a model has no other use for.
    hidden: HashSet<String>,
    computed: Vec<Weight>,
    rules: Vec<TensorRule>,
    /// All files, to look whether they changed.
    maps: Vec<SharedBytes>,
}

impl HfWeights {
    pub(super) fn new(
        class: &HfClass,
        config: &HfConfig,
        files: &TensorFiles,
        computed: Vec<Weight>,
    ) -> Result<Self, ModelFileError> {
        let rules = class.tensors.iter().copied().flatten();
        let rules = rules.map(|rule| rule.with_groups(class, config));
        let mut rules: Vec<TensorRule> = rules.collect::<Result<_, _>>()?;
        // A model that was saved without its class of texts, as sentence-transformers does.
        let body = class.body;
        // The whole decoder, its output matrix too, is a part of older files with a tower.
        let outer = format!("{}{body}", class.text);
        let is_part =
            !class.text.is_empty() && files.tensors.keys().any(|name| name.starts_with(&outer));
        if is_part {
            for rule in &mut rules {
                *rule = rule.beginning_with("", [class.text, ""]);
            }
        } else if !files.tensors.keys().any(|name| name.starts_with(body)) {
            rules.iter_mut().for_each(|rule| *rule = rule.without(body));
        }
        if !class.text.is_empty() && !is_part {
            let text = class.text;
            let is_text = |name: &String| {
                let rest = name.strip_prefix(body);
                rest.is_some_and(|rest| rest.starts_with(text))
            };
            if files.tensors.keys().any(is_text) {
                for rule in &mut rules {
                    *rule = rule.beginning_with(body, [body, text]);
                }
            }
        }
        let elsewhere: Vec<_> = rules
            .iter()
            .flat_map(|rule| rule.in_places(class))
            .collect();
        rules.extend(elsewhere);
        let layers_behind = LayersBehind::new(&rules, config)?;
        let mut sources = BTreeMap::new();
        let mut used = HashSet::new();
        for rule in &rules {
            for (to, found) in grouped(rule, files, layers_behind.as_ref()) {
                used.extend(found.iter().map(|(_, name, _)| *name));
                let source = Source::new(rule, &found, config)?;
                if let Some(other) = sources.insert(to.clone(), source) {
                    let reason = format!("it becomes '{to}', and so does '{}'", other.name);
                    let name = found.first().map_or(to, |(_, name, _)| (*name).to_owned());
                    return Err(ModelFileError::Tensor { name, reason });
                }
            }
        }
        let is_unused = |name: &str| {
            class.unused.iter().any(|p| matched(p, name).is_some())
                || class.other_parts.iter().any(|p| name.starts_with(p))
        };
        let unknown = |name: &&String| {
            !used.contains(name.as_str()) && !is_unused(name) && !files.is_idle(name)
        };
        match files.tensors.keys().find(unknown) {
            None => Ok(Self {
                sources,
                derived: BTreeMap::new(),
                hidden: HashSet::new(),
                computed,
                rules,
                maps: files.maps.clone(),
            }),
            Some(name) => Err(ModelFileError::Tensor {
                name: name.clone(),
                reason: format!("a {} has no such tensor", class.name),
            }),
        }
    }

    /// Drops a tensor that the config makes meaningless.
    pub fn forget(&mut self, name: &str) {
        self.sources.remove(name);
    }

    /// Takes a tensor of one value out of each layer, and gives these values. Of files of which
    /// only the headers are known they are 0.
    pub(super) fn take_numbers(
        &mut self,
        n_layers: usize,
        tensor: &str,
    ) -> Result<Vec<f32>, ModelFileError> {
        let number = |layer| {
            let name = format!("blk.{layer}.{tensor}");
            let wrong = |weights: &Self, reason: String| ModelFileError::Tensor {
                name: weights.name_in_files(&name).unwrap_or_else(|| name.clone()),
                reason,
            };
            let Some(source) = self.sources.get(&name) else {
                return Err(wrong(self, "it is missing".to_owned()));
            };
            if source.info.shape.iter().product::<usize>() != 1 {
                let reason = format!("shape {:?} is not that of one value", source.info.shape);
                return Err(wrong(self, reason));
            }
            if source.parts.iter().all(|part| part.bytes.is_empty()) {
                return Ok(0.0);
            }
            let weight = source.make(&name);
            let weight = weight.map_err(|error| wrong(self, error.to_string()))?;
            let mut value = [0.0];
            dequantize(weight.format(), weight.bytes(), &mut value);
            Ok(value[0])
        };
        let numbers = (0..n_layers).map(number).collect::<Result<_, _>>()?;
        for layer in 0..n_layers {
            self.sources.remove(&format!("blk.{layer}.{tensor}"));
        }
        Ok(numbers)
    }

    /// Adds a tensor that is computed out of others each time it is requested.
    pub fn derive(
        &mut self,
        name: &str,
        info: WeightInfo,
        make: impl Fn(&Self) -> Result<Weight, WeightError> + Send + Sync + 'static,
    ) {
        let make = Box::new(make);
        self.derived
            .insert(name.to_owned(), DerivedTensor { info, make });
    }

    /// Takes a tensor off the list of names: others are derived from it.
    pub fn hide(&mut self, name: &str) {
        self.hidden.insert(name.to_owned());
    }

    /// The name in the files of what becomes the GGUF tensor `name`, whether it is there or not.
    pub fn name_in_files(&self, name: &str) -> Option<String> {
        if let Some(source) = self.sources.get(name) {
            return Some(source.name.clone());
        }
        let of = |rule: &TensorRule| {
            let numbers = matched(&rule.to(), name)?;
            let expert = numbers.expert.or(Some(0));
            let numbers = Numbers { expert, ..numbers };
            Some(filled(&rule.from(), numbers.in_groups(rule.group_len)))
        };
        self.rules.iter().find_map(of)
    }

    /// The form in the files of a tensor that is `F32` here because no format holds its numbers and
    /// scales as they are.
    pub(crate) fn widened(&self, name: &str) -> Option<String> {
        let source = self.sources.get(name)?;
        let codings = source.parts.iter().filter_map(|part| part.coding.as_ref());
        let widened = codings.map(TensorCoding::description).next();
        widened.filter(|_| source.stored == Ok(BlockFormat::F32))
    }

    /// The GGUF tensors that have the rows of a tensor of the files.
    pub(crate) fn targets_of(&self, name: &str) -> Vec<ModuleTarget> {
        let target = |rule: &TensorRule| {
            let (matrix, expert) = made_by(rule, name)?;
            let source = self.sources.get(&matrix)?;
            let actions = source.actions.clone();
            Some(ModuleTarget {
                matrix,
                expert,
                actions,
            })
        };
        self.rules.iter().filter_map(target).collect()
    }

    /// Names of GGUF tensors that come out of the files as they are.
    pub fn translated(&self) -> impl Iterator<Item = &String> {
        let names = self.sources.keys();
        names.filter(|name| !self.hidden.contains(*name))
    }
}

/// The names of tensors of layers behind the last one (`mtp.layers.0.` and `mtp.`), as those of
/// layers with the numbers that follow (`model.layers.N.`).
#[derive(Debug)]
struct LayersBehind {
    /// The name of a layer before its number.
    place: String,
    n_layers: usize,
}

impl LayersBehind {
    /// `None` where no rule is for such layers.
    fn new(rules: &[TensorRule], config: &HfConfig) -> Result<Option<Self>, ModelFileError> {
        let own = rules.iter().find(|rule| rule.makes(FIRST_BEHIND));
        let place = own.and_then(|rule| Some(rule.from().split_once("{l}")?.0.to_owned()));
        let Some(place) = place else {
            return Ok(None);
        };
        let n_layers = config.count("num_hidden_layers")?;
        Ok(Some(Self { place, n_layers }))
    }

    fn name(&self, name: &str) -> Option<String> {
        let rest = name.strip_prefix("mtp.")?;
        let (number, rest) = match rest.strip_prefix("layers.") {
            Some(rest) => {
                let (number, rest) = rest.split_once('.')?;
                (number.parse().ok()?, rest)
            }
            None => (0, rest),
        };
        let rest = match rest {
            "fc.weight" => "eh_proj.weight",
            "pre_fc_norm_embedding.weight" => "enorm.weight",
            "pre_fc_norm_hidden.weight" => "hnorm.weight",
            "norm.weight" => "shared_head.norm.weight",
            rest => rest,
        };
        let number = self.n_layers.checked_add(number)?;
        Some(format!("{}{number}.{rest}", self.place))
    }
}

/// The tensor by which rules are known to be for layers behind the last one.
pub(super) const FIRST_BEHIND: &str = "blk.0.nextn.eh_proj.weight";

type TensorSource<'a> = Vec<(Option<u32>, &'a str, &'a TensorLocation)>;

/// The tensors of the files that a rule is for, by the GGUF tensor that they become; experts in
/// order.
fn grouped<'a>(
    rule: &TensorRule,
    files: &'a TensorFiles,
    layers_behind: Option<&LayersBehind>,
) -> Vec<(String, TensorSource<'a>)> {
    let (from, to) = (rule.from(), rule.to());
    let mut groups: HashMap<Numbers, TensorSource<'a>> = HashMap::new();
    for (name, stored) in &files.tensors {
        let as_layer = layers_behind.and_then(|layers| layers.name(name));
        let found = matched(&from, as_layer.as_deref().unwrap_or(name));
        if let Some(numbers) = found.and_then(|numbers| numbers.joined(rule.group_len)) {
            let is_stacked = !to.contains("{e}");
            let (group, expert) = if is_stacked {
                (None, numbers.expert)
            } else {
                (numbers.expert, None)
            };
            let group = Numbers {
                expert: group,
                ..numbers
            };
            let found = (expert, name.as_str(), stored);
            groups.entry(group).or_default().push(found);
        }
    }
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by_key(|(numbers, _)| *numbers);
    let named = groups.into_iter().map(|(numbers, mut found)| {
        found.sort_by_key(|(expert, ..)| *expert);
        (filled(&to, numbers), found)
    });
    named.collect()
}

impl Source {
    fn new(
        rule: &TensorRule,
        found: &TensorSource<'_>,
        config: &HfConfig,
    ) -> Result<Self, ModelFileError> {
        let Some(&(first_expert, name, first)) = found.first() else {
            return Err(ModelFileError::Tensor {
                name: rule.from(),
                reason: "it is missing".to_owned(),
            });
        };
        let wrong = |name: &str, reason: String| ModelFileError::Tensor {
            name: name.to_owned(),
            reason,
        };
        let mut stored_format = first.format.clone();
        for ((expert, name, stored), at) in found.iter().zip(0u32..) {
            if expert.is_some_and(|expert| expert != at) {
                return Err(wrong(name, format!("that of expert {at} is missing")));
            }
            let joint = stored.joint_format(first);
            let Some(joint) = joint.filter(|_| stored.shape == first.shape) else {
                let reason = format!(
                    "shape {:?}, but expert 0 has {:?}, or its values are stored otherwise",
                    stored.shape, first.shape
                );
                return Err(wrong(name, reason));
            };
            if let (Ok(so_far), Ok(joint)) = (&mut stored_format, joint) {
                *so_far = packed::wider(*so_far, joint);
            }
        }
        let actions = rule.steps().iter().map(|step| step.resolve(config));
        let mut actions: Vec<Action> = actions.collect::<Result<_, _>>()?;
        if matches!(first.coding, Some(TensorCoding::Packed(_))) {
            actions = packed::of_product(actions);
            if !packed::keep_rows(&actions) {
                stored_format = Ok(BlockFormat::F32);
            }
        }
        let (stacked, mut shape) = match first_expert {
            None => (ExpertStack::No, first.shape.clone()),
            Some(_) => {
                let shape = [&[found.len()], first.shape.as_slice()].concat();
                (ExpertStack::Experts, shape)
            }
        };
        let mut format = stored_format.clone().unwrap_or(BlockFormat::F32);
        for action in &actions {
            shape = action.shape(&shape).map_err(|reason| wrong(name, reason))?;
            format = action.format(format);
        }
        Ok(Self {
            name: name.to_owned(),
            parts: found.iter().map(|(.., stored)| (*stored).clone()).collect(),
            stacked,
            part_shape: first.shape.clone(),
            stored: stored_format,
            actions,
            info: WeightInfo { shape, format },
        })
    }

    fn format(&self) -> Result<BlockFormat, WeightError> {
        let unsupported = |stored: &String| WeightError::UnsupportedFormat {
            name: self.name.clone(),
            stored: stored.clone(),
        };
        self.stored.as_ref().copied().map_err(unsupported)
    }

    fn make(&self, name: &str) -> Result<Weight, WeightError> {
        let format = self.format()?;
        let (shape, bytes) = match (self.stacked, self.parts.as_slice()) {
            (ExpertStack::No, [part]) => (self.part_shape.clone(), part.values(format)),
            (_, parts) => {
                let shape = [&[parts.len()], self.part_shape.as_slice()].concat();
                let mut bytes = Vec::new();
                for part in parts {
                    bytes.extend_from_slice(&part.values(format));
                }
                (shape, bytes.into())
            }
        };
        let mut values = Values {
            shape,
            format,
            bytes,
        };
        for action in &self.actions {
            // Shapes were tried when this was made.
            let missing = |_| WeightError::Missing {
                name: name.to_owned(),
            };
            values = action.apply(&values).map_err(missing)?;
        }
        Weight::new(name, values.shape, values.format, values.bytes)
    }
}

impl WeightSource for HfWeights {
    fn get(&self, name: &str) -> Option<Weight> {
        self.require(name).ok()
    }

    fn names(&self) -> Vec<String> {
        let computed = self.computed.iter().map(|w| w.name().to_owned());
        let all = self.sources.keys().chain(self.derived.keys()).cloned();
        let listed = all.filter(|name| !self.hidden.contains(name));
        listed.chain(computed).collect()
    }

    fn require(&self, name: &str) -> Result<Weight, WeightError> {
        if let Some(source) = self.sources.get(name) {
            return source.make(name);
        }
        if let Some(derived) = self.derived.get(name) {
            return (derived.make)(self);
        }
        let computed = self.computed.iter().find(|w| w.name() == name);
        computed.cloned().ok_or_else(|| WeightError::Missing {
            name: name.to_owned(),
        })
    }

    fn describe(&self, name: &str) -> Result<WeightInfo, WeightError> {
        if let Some(derived) = self.derived.get(name) {
            return Ok(derived.info.clone());
        }
        match self.sources.get(name) {
            Some(source) => source.format().map(|_| source.info.clone()),
            None => self.require(name).map(|weight| weight.info()),
        }
    }

    fn check(&self) -> Result<(), SourceChanged> {
        self.maps.iter().try_for_each(SharedBytes::check)
    }
}

impl HeadWeights for HfWeights {
    fn integers(&self, name: &str) -> Result<Option<Vec<i64>>, WeightError> {
        let Some(source) = self.sources.get(name) else {
            return Ok(None);
        };
        let stored = match &source.stored {
            Ok(format) => format.to_string(),
            Err(stored) => stored.clone(),
        };
        let part = source.parts.first();
        match part.and_then(|part| integers(&stored, &part.bytes)) {
            Some(numbers) => Ok(Some(numbers)),
            None => Err(WeightError::UnsupportedFormat {
                name: source.name.clone(),
                stored,
            }),
        }
    }
}
