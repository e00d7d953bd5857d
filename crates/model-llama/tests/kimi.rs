//! Directories of Kimi K2.5, Kimi K2.6 and Kimi-VL: their text is a DeepSeek V3.

#![allow(clippy::unwrap_used)] // helpers of tests

use kv_graph::weights::{MemoryWeights, Weight, WeightSource};
use model_core::hf::{HfConfig, HfTranslation};
use model_tests::{Case, Recipe};
use serde_json::{Map, json};

use crate::common::CASES;

/// A directory of this class, translated: the recipe's text under other names, and a tensor of a
/// tower.
fn translated(
    class: &str,
    recipe: &Recipe,
    name_of: impl Fn(&str) -> String,
    other_part: &str,
) -> Result<HfTranslation, String> {
    let mut weights = MemoryWeights::new();
    for name in recipe.weights().names() {
        let weight = recipe.weights().require(&name).unwrap();
        let (shape, format) = (weight.shape().to_vec(), weight.format());
        let renamed = Weight::new(name_of(&name), shape, format, weight.bytes().clone());
        weights.insert(renamed.unwrap());
    }
    weights.insert_f32(other_part, &[2, 2], &[0.0; 4]).unwrap();
    let mut config = Map::new();
    config.insert("architectures".to_owned(), json!([class]));
    config.insert("model_type".to_owned(), json!("kimi_k25"));
    config.insert("text_config".to_owned(), recipe.config().clone().into());
    config.insert("vision_config".to_owned(), json!({"patch_size": 14}));
    let config = HfConfig::new("'config.json'", config);
    let registry = Case::named(CASES, "deepseek_v3").registry();
    let translated = HfTranslation::from_parts("kimi", config, &weights, registry.hf_classes());
    translated.map_err(|error| error.to_string())
}

#[test]
fn texts_of_kimi_are_those_of_deepseek() {
    let case = Case::named(CASES, "deepseek_v3");
    let recipe = case.generated();
    let wanted = recipe.translated(&case.registry()).unwrap();
    let published = |name: &str| format!("language_model.{name}");
    let saved = |name: &str| match name.strip_prefix("model.") {
        Some(rest) => format!("model.language_model.{rest}"),
        None => name.to_owned(),
    };
    type Naming<'a> = &'a dyn Fn(&str) -> String;
    let classes: [(&str, Naming<'_>, &str); 3] = [
        (
            "KimiK25ForConditionalGeneration",
            &published,
            "mm_projector.proj.0.weight",
        ),
        (
            "Kimi_K25ForConditionalGeneration",
            &saved,
            "model.mm_projector.in_proj.weight",
        ),
        (
            "KimiVLForConditionalGeneration",
            &published,
            "multi_modal_projector.linear_1.weight",
        ),
    ];
    for (class, naming, other_part) in classes {
        let found = translated(class, &recipe, naming, other_part).unwrap();
        let keys = |translation: &HfTranslation| -> Vec<String> {
            let keys = translation.metadata().iter();
            let keys = keys.filter(|(key, _)| !key.starts_with("general."));
            keys.map(|(key, value)| format!("{key} {value:?}"))
                .collect()
        };
        assert_eq!(keys(&found), keys(&wanted), "{class}");
        let [mut ours, mut theirs] = [&found, &wanted].map(|from| from.weights().names());
        ours.sort();
        theirs.sort();
        assert_eq!(ours, theirs, "{class}");
        for name in theirs {
            let [ours, theirs] = [&found, &wanted].map(|from| from.weights().require(&name));
            assert!(
                ours.unwrap().bytes()[..] == theirs.unwrap().bytes()[..],
                "{name}"
            );
        }
    }
    // A tensor that is of neither part.
    let odd = translated(classes[0].0, &recipe, published, "audio_tower.weight");
    let error = odd.map(drop).unwrap_err();
    assert!(error.contains("audio_tower.weight"), "{error}");
}
