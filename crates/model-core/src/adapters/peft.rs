//! Adapters in directories of the PEFT library: `adapter_config.json` and
//! `adapter_model.safetensors`.
//!
//! A setting that would give other numbers and is not computed is refused by its name.

use std::collections::BTreeMap;
use std::path::Path;

use fancy_regex::Regex;
use kv_core::TokenId;
use kv_graph::weights::Weight;
use serde_json::Value;

use super::modules::Modules;
use super::{AdapterError, LowRank, RawAdapter, wrong};
use crate::architecture::Registry;
use crate::error::ModelFileError;
use crate::hf::{HfConfig, ModuleTarget, TensorFiles};
use crate::model_file::OpenModel;

const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";

/// Settings that turn LoRA into something else where they are on.
const OTHER_METHODS: [(&str, &str); 7] = [
    ("use_dora", "DoRA"),
    ("use_qalora", "QALoRA"),
    ("lora_bias", "biases (lora_bias)"),
    ("use_bdlora", "BD-LoRA"),
    ("arrow_config", "Arrow"),
    ("layer_replication", "repeated layers (layer_replication)"),
    (
        "target_parameters",
        "parameters outside of modules (target_parameters)",
    ),
];

/// Initial values that change the model's own matrices.
const OTHER_BASES: [&str; 4] = ["pissa", "olora", "corda", "loftq"];

/// The parts of a module's pair.
#[derive(Default)]
struct Parts {
    a: Option<Weight>,
    b: Option<Weight>,
    is_embedding: bool,
}

/// Ranks and alphas as the settings have them.
struct Scales<'a> {
    label: &'a str,
    config: &'a HfConfig,
    rank: usize,
    alpha: f64,
    by_root: bool,
}

/// Reads a directory and finds the model's matrices for its modules.
pub(super) fn read(
    directory: &Path,
    model: &OpenModel,
    registry: &Registry,
) -> Result<RawAdapter, ModelFileError> {
    let label = format!("'{}'", directory.display());
    let wrong = |reason| wrong(&label, reason);
    let config = HfConfig::open(&directory.join(CONFIG))?;
    check_method(&config, &label)?;
    let scales = Scales {
        label: &label,
        config: &config,
        rank: config.optional_count("r")?.unwrap_or(8),
        alpha: config.optional_number("lora_alpha")?.unwrap_or(8.0),
        by_root: config.optional_flag("use_rslora")?.unwrap_or(false),
    };
    let mut files = TensorFiles::default();
    files.add(&directory.join(TENSORS))?;
    let modules = modules_of(&files).map_err(wrong)?;
    let lookup = Modules::new(&label, model, registry);
    let mut found: BTreeMap<String, Found> = BTreeMap::new();
    for (module, parts) in modules {
        let (a, b) = match parts {
            Parts {
                a: Some(a),
                b: Some(b),
                is_embedding,
            } => (if is_embedding { transposed(&a)? } else { a }, b),
            Parts { a, .. } => {
                let missing = if a.is_none() { "lora_A" } else { "lora_B" };
                let matrix = module;
                return Err(wrong(AdapterError::Pair { matrix, missing }));
            }
        };
        let scale = scales.of(&module, b.n_columns())?;
        for target in lookup.targets(&module)? {
            let rows = target.rows(&b).map_err(|reason| {
                let module = module.clone();
                ModelFileError::Tensor {
                    name: module,
                    reason: format!("it cannot be added to '{}': {reason}", target.matrix),
                }
            })?;
            let pair = LowRank {
                a: a.clone(),
                b: rows,
                scale,
            };
            let entry = found.entry(target.matrix.clone()).or_default();
            entry.add(&target, pair).map_err(wrong)?;
        }
    }
    let weights = model.weights();
    let mut pairs = BTreeMap::new();
    for (matrix, found) in found {
        let shape = weights.describe(&matrix)?.shape;
        let pair = found.pair(&label, &matrix, &shape)?;
        pairs.insert(matrix, pair);
    }
    let invocation = invocation(&config)?;
    Ok(RawAdapter {
        label: label.clone(),
        pairs,
        invocation,
        files: files.maps,
    })
}

/// Checks that the settings are those of plain LoRA.
fn check_method(config: &HfConfig, label: &str) -> Result<(), ModelFileError> {
    let other = |method: String| Err(wrong(label, AdapterError::Method { method }));
    let method = config.optional_text("peft_type")?.unwrap_or("LORA");
    if method != "LORA" {
        return other(method.to_owned());
    }
    for (key, method) in OTHER_METHODS {
        let is_on = match config.value(key) {
            None | Some(Value::Bool(false)) => false,
            Some(Value::Array(list)) => !list.is_empty(),
            Some(Value::Object(object)) => !object.is_empty(),
            Some(_) => true,
        };
        if is_on {
            return other(method.to_owned());
        }
    }
    let bias = config.optional_text("bias")?.unwrap_or("none");
    if bias != "none" {
        return other(format!("biases (bias = {bias})"));
    }
    if let Some(Value::Array(saved)) = config.value("modules_to_save")
        && let Some(module) = saved.first()
    {
        return other(format!("whole modules (modules_to_save has {module})"));
    }
    if let Some(Value::String(init)) = config.value("init_lora_weights") {
        let init = init.to_lowercase();
        if OTHER_BASES.iter().any(|base| init.starts_with(base)) {
            return other(format!("a changed model (init_lora_weights = {init})"));
        }
    }
    Ok(())
}

fn invocation(config: &HfConfig) -> Result<Vec<TokenId>, ModelFileError> {
    let key = "alora_invocation_tokens";
    let Some(value) = config.value(key) else {
        return Ok(Vec::new());
    };
    let ids = value.as_array().map(|ids| {
        let ids = ids.iter().map(|id| u32::try_from(id.as_u64()?).ok());
        ids.map(|id| id.map(TokenId)).collect::<Option<Vec<_>>>()
    });
    let ids = ids.flatten();
    ids.ok_or_else(|| config.wrong(key, "a list of token numbers"))
}

/// The pairs of a file, by module.
fn modules_of(files: &TensorFiles) -> Result<BTreeMap<String, Parts>, AdapterError> {
    let mut modules: BTreeMap<String, Parts> = BTreeMap::new();
    for (name, stored) in &files.tensors {
        let unknown = || AdapterError::Tensor {
            tensor: name.clone(),
        };
        if name.contains("lora_magnitude_vector") {
            let method = "DoRA".to_owned();
            return Err(AdapterError::Method { method });
        }
        let bare = name.strip_prefix("base_model.model.").unwrap_or(name);
        let parts = [
            (".lora_A", false, false),
            (".lora_B", true, false),
            (".lora_embedding_A", false, true),
            (".lora_embedding_B", true, true),
        ];
        let found = parts.iter().find_map(|part| {
            let (module, rest) = bare.rsplit_once(part.0)?;
            let is_whole = ["", ".weight", ".default", ".default.weight"].contains(&rest);
            is_whole.then_some((module, part))
        });
        let (module, &(_, is_second, is_embedding)) = found.ok_or_else(unknown)?;
        let format = match &stored.format {
            Ok(format) => *format,
            Err(stored) => {
                let method = format!("values in {stored} ('{name}')");
                return Err(AdapterError::Method { method });
            }
        };
        let weight = Weight::new(
            name.as_str(),
            stored.shape.clone(),
            format,
            stored.bytes.clone(),
        );
        let weight = weight.map_err(|_| unknown())?;
        if weight.shape().len() != 2 {
            return Err(unknown());
        }
        let parts = modules.entry(module.to_owned()).or_default();
        parts.is_embedding |= is_embedding;
        if is_second {
            parts.b = Some(weight);
        } else {
            parts.a = Some(weight);
        }
    }
    Ok(modules)
}

/// `[rank, vocab]` as `[vocab, rank]`: a row for each token.
fn transposed(weight: &Weight) -> Result<Weight, ModelFileError> {
    let (n_rows, n_columns) = (weight.n_rows(), weight.n_columns());
    let values = weight.to_f32();
    let of_column = |column: usize| values.iter().skip(column).step_by(n_columns.max(1));
    let turned: Vec<f32> = (0..n_columns).flat_map(of_column).copied().collect();
    let shape = vec![n_columns, n_rows];
    Ok(Weight::from_f32(weight.name(), shape, &turned)?)
}

impl Scales<'_> {
    /// The factor of a module's pair, whose rank its settings say, too.
    fn of(&self, module: &str, rank: usize) -> Result<f32, ModelFileError> {
        let wanted = match self.pattern("rank_pattern", module)? {
            Some(rank) => rank as usize,
            None => self.rank,
        };
        if rank != wanted || rank == 0 {
            let reason = AdapterError::Rank {
                matrix: module.to_owned(),
                found: rank,
                wanted: format!("{wanted} ('r' or 'rank_pattern')"),
            };
            return Err(wrong(self.label, reason));
        }
        let alpha = self.pattern("alpha_pattern", module)?.unwrap_or(self.alpha);
        let by = if self.by_root {
            (rank as f64).sqrt()
        } else {
            rank as f64
        };
        Ok((alpha / by) as f32)
    }

    /// The value of a table for a module: its keys are ends of names, or expressions for them.
    fn pattern(&self, key: &str, module: &str) -> Result<Option<f64>, ModelFileError> {
        let Some(Value::Object(table)) = self.config.value(key) else {
            return Ok(None);
        };
        for (pattern, value) in table {
            let whole = Regex::new(&format!(r"^(?:.*\.)?(?:{pattern})$"));
            let wrong = || {
                self.config
                    .wrong(key, "names of modules with a number for each")
            };
            let whole = whole.map_err(|_| wrong())?;
            if whole.is_match(module).map_err(|_| wrong())? {
                let value = value.as_f64().ok_or_else(wrong)?;
                return Ok(Some(value));
            }
        }
        Ok(None)
    }
}

/// The tensors that were found for one matrix of the model.
#[derive(Default)]
struct Found {
    one: Option<LowRank>,
    experts: BTreeMap<usize, LowRank>,
}

impl Found {
    fn add(&mut self, target: &ModuleTarget, pair: LowRank) -> Result<(), AdapterError> {
        let before = match target.expert {
            Some(expert) => self.experts.insert(expert, pair),
            None => self.one.replace(pair),
        };
        match before {
            None => Ok(()),
            Some(other) => Err(AdapterError::Tensor {
                tensor: other.a.name().to_owned(),
            }),
        }
    }

    /// The pair of the whole matrix, in which an expert without one has zeros.
    fn pair(self, label: &str, matrix: &str, shape: &[usize]) -> Result<LowRank, ModelFileError> {
        if let Some(pair) = self.one {
            return Ok(pair);
        }
        let rank = self.experts.values().map(LowRank::rank).max().unwrap_or(0);
        let &[n_experts, out, columns] = shape else {
            let missing = "lora_A";
            let matrix = matrix.to_owned();
            return Err(wrong(label, AdapterError::Pair { matrix, missing }));
        };
        let (mut a, mut b) = (
            vec![0.0f32; n_experts * rank * columns],
            vec![0.0f32; n_experts * out * rank],
        );
        for (&expert, pair) in &self.experts {
            let own = pair.rank();
            let fits = pair.a.shape() == [own, columns] && pair.b.shape() == [out, own];
            if !fits || expert >= n_experts {
                let reason = AdapterError::Shape {
                    matrix: matrix.to_owned(),
                    model: vec![n_experts, out, columns],
                    a: pair.a.shape().to_vec(),
                    b: pair.b.shape().to_vec(),
                };
                return Err(wrong(label, reason));
            }
            let to = a.iter_mut().skip(expert * rank * columns);
            to.zip(pair.a.to_f32()).for_each(|(to, v)| *to = v);
            let rows = pair.b.to_f32();
            let rows = rows.chunks_exact(own.max(1));
            let to = b.chunks_exact_mut(rank.max(1)).skip(expert * out);
            for (to, row) in to.zip(rows) {
                let pairs = to.iter_mut().zip(row);
                pairs.for_each(|(to, v)| *to = v * pair.scale);
            }
        }
        let shape = |last: [usize; 2]| [&[n_experts], last.as_slice()].concat();
        Ok(LowRank {
            a: Weight::from_f32(matrix, shape([rank, columns]), &a)?,
            b: Weight::from_f32(matrix, shape([out, rank]), &b)?,
            scale: 1.0,
        })
    }
}
