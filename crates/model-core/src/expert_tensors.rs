//! Which tensors are a mixture's matrices of experts, and of which layers, by their names; and
//! [`ExpertLayers`], which layers' experts are wanted.
//!
//! Invariant: of a layer, all experts are wanted or none. Does not know where they go.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use regex_automata::meta;

/// The most memory that an expression may take.
const MAX_BYTES: usize = 1 << 20;

/// The layer whose experts' matrix has this name: `blk.3.ffn_up_exps.weight`.
pub fn expert_layer(name: &str) -> Option<u32> {
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let is_matrix = rest.starts_with("ffn_") && rest.ends_with("_exps.weight");
    layer.parse().ok().filter(|_| is_matrix)
}

/// A regular expression that is looked for in the names of tensors.
#[derive(Clone, Debug)]
pub struct TensorPattern {
    text: String,
    regex: meta::Regex,
}

impl TensorPattern {
    /// # Errors
    /// A text that says where the expression is wrong.
    pub fn new(text: &str) -> Result<Self, String> {
        let config = meta::Config::new().nfa_size_limit(Some(MAX_BYTES));
        let regex = meta::Builder::new().configure(config).build(text);
        let regex = regex.map_err(|error| {
            let reason = match error.syntax_error() {
                Some(error) => error.to_string(),
                None => error.to_string(),
            };
            format!("'{text}' is no regular expression: {reason}")
        })?;
        Ok(Self {
            text: text.to_owned(),
            regex,
        })
    }

    fn is_in(&self, name: &str) -> bool {
        self.regex.is_match(name)
    }
}

impl fmt::Display for TensorPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The layers whose experts are wanted: those that any of its fields says.
#[derive(Clone, Debug, Default)]
pub struct ExpertLayers {
    /// The first so many layers of the model, of which some may have no experts.
    pub n_first: u32,
    /// Layers whose experts' tensors these name, and no others.
    pub patterns: Vec<TensorPattern>,
}

impl ExpertLayers {
    /// All layers.
    pub fn all() -> Self {
        Self {
            n_first: u32::MAX,
            patterns: Vec::new(),
        }
    }

    /// True if no layer is wanted.
    pub fn is_empty(&self) -> bool {
        self.n_first == 0 && self.patterns.is_empty()
    }

    /// The matrices of wanted experts among the tensors of a model, by layer. Models without
    /// experts have none.
    ///
    /// # Errors
    /// A text with the tensors that are not all experts of some layers.
    pub fn matrices(&self, names: &[String]) -> Result<BTreeMap<u32, BTreeSet<String>>, String> {
        let mut layers: BTreeMap<u32, BTreeSet<String>> = BTreeMap::new();
        for name in names {
            if let Some(layer) = expert_layer(name) {
                layers.entry(layer).or_default().insert(name.clone());
            }
        }
        let mut named = BTreeSet::new();
        for pattern in &self.patterns {
            named.extend(pattern.experts(names, &layers)?);
        }
        let patterns: Vec<_> = self.patterns.iter().map(ToString::to_string).collect();
        for (&layer, matrices) in &layers {
            let mut missing = matrices.iter().filter(|name| !named.contains(*name));
            let n_named = matrices.iter().filter(|name| named.contains(*name)).count();
            if let Some(missing) = missing
                .next()
                .filter(|_| n_named > 0 && layer >= self.n_first)
            {
                let patterns = patterns.join(",");
                return Err(format!(
                    "'{patterns}' names some experts of layer {layer} and not '{missing}': a layer's \
                     experts stay together, as in 'blk\\.{layer}\\.ffn_.*_exps'"
                ));
            }
        }
        layers.retain(|&layer, matrices| {
            layer < self.n_first || matrices.iter().any(|name| named.contains(name))
        });
        Ok(layers)
    }
}

impl TensorPattern {
    /// The matrices of experts that it names.
    fn experts(
        &self,
        names: &[String],
        layers: &BTreeMap<u32, BTreeSet<String>>,
    ) -> Result<BTreeSet<String>, String> {
        let Some(example) = layers.values().flatten().next() else {
            return Ok(BTreeSet::new());
        };
        let named: BTreeSet<String> = names.iter().filter(|n| self.is_in(n)).cloned().collect();
        // Biases and scales go where their matrices go.
        let mut others = named.iter().filter(|name| !name.contains("_exps"));
        if let Some(first) = others.next() {
            let n = 1 + others.count();
            return Err(format!(
                "'{self}' names {n} tensors that are no experts, '{first}' first: only the experts of \
                 whole layers can be apart from the rest, as in 'exps' or 'blk\\.(0|1)\\.ffn_.*_exps'"
            ));
        }
        let matrices = named
            .into_iter()
            .filter(|name| expert_layer(name).is_some());
        let matrices: BTreeSet<String> = matrices.collect();
        if matrices.is_empty() {
            return Err(format!(
                "'{self}' names no tensor: experts are '{example}' and the like"
            ));
        }
        Ok(matrices)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A dense layer, and three with experts.
    fn names() -> Vec<String> {
        let mut names = vec!["token_embd.weight".to_owned()];
        names.extend(["attn_q", "ffn_up"].map(|what| format!("blk.0.{what}.weight")));
        for layer in 1..4 {
            let of_layer = [
                "attn_q.weight",
                "ffn_gate_inp.weight",
                "ffn_gate_exps.weight",
                "ffn_up_exps.weight",
                "ffn_down_exps.weight",
                "ffn_down_exps.bias",
                "ffn_up_shexp.weight",
                "exp_probs_b.bias",
            ];
            names.extend(of_layer.map(|what| format!("blk.{layer}.{what}")));
        }
        names
    }

    fn choice(n_first: u32, patterns: &[&str]) -> ExpertLayers {
        let patterns = patterns
            .iter()
            .map(|text| TensorPattern::new(text).unwrap());
        ExpertLayers {
            n_first,
            patterns: patterns.collect(),
        }
    }

    fn layers(n_first: u32, patterns: &[&str]) -> Vec<u32> {
        let chosen = choice(n_first, patterns).matrices(&names()).unwrap();
        assert!(chosen.values().all(|names| names.len() == 3), "{chosen:?}");
        chosen.into_keys().collect()
    }

    #[test]
    fn layers_are_counted_or_named() {
        assert_eq!(layers(0, &[]), [0; 0]);
        assert_eq!(layers(1, &[]), [0; 0]);
        assert_eq!(layers(3, &[]), [1, 2]);
        assert_eq!(layers(u32::MAX, &[]), [1, 2, 3]);
        for all in [
            "exps",
            r"\.ffn_.*_exps\.",
            r"\.ffn_(up|down|gate|gate_up)_(ch|)exps",
            "ffn_.*_exps.weight",
        ] {
            assert_eq!(layers(0, &[all]), [1, 2, 3], "{all}");
        }
        assert_eq!(layers(0, &[r"blk\.(0|1|2)\.ffn_.*exps.*"]), [1, 2]);
        assert_eq!(layers(2, &[r"blk\.3\..*_exps"]), [1, 3]);
        // Together they name a layer.
        assert_eq!(layers(0, &["2.ffn_(up|gate)_exps", "2.ffn_down_exps"]), [2]);
        // What a count names need not be named again.
        assert_eq!(layers(2, &["1.ffn_up_exps"]), [1]);
    }

    #[test]
    fn what_is_not_the_experts_of_whole_layers_is_refused() {
        let refused = |pattern: &str| choice(0, &[pattern]).matrices(&names()).unwrap_err();
        let others = refused(r"blk\.[23]\.ffn");
        assert!(
            others.contains("names 4 tensors that are no experts"),
            "{others}"
        );
        assert!(
            others.contains("'blk.2.ffn_gate_inp.weight' first"),
            "{others}"
        );
        let part = refused("ffn_(up|gate)_exps");
        assert!(
            part.contains("and not 'blk.1.ffn_down_exps.weight'"),
            "{part}"
        );
        for nothing in ["attention", "down_exps.bias"] {
            let nothing = refused(nothing);
            assert!(nothing.contains("names no "), "{nothing}");
        }
        let error = TensorPattern::new("ffn_(up").unwrap_err();
        assert!(
            error.contains("'ffn_(up' is no regular expression"),
            "{error}"
        );
        assert!(TensorPattern::new("((a{999}){999}){999}").is_err());
    }

    #[test]
    fn models_without_experts_have_none() {
        let dense: Vec<String> = names().into_iter().filter(|n| !n.contains("exp")).collect();
        assert!(
            choice(9, &["exps", "attn"])
                .matrices(&dense)
                .unwrap()
                .is_empty()
        );
        for name in [
            "blk.1.ffn_up.weight",
            "blk.x.ffn_up_exps.weight",
            "ffn_up_exps.weight",
        ] {
            assert_eq!(expert_layer(name), None);
        }
    }
}
