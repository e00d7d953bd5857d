//! Every model of the fixtures that has logits of an independent implementation.

use std::panic::{AssertUnwindSafe, catch_unwind};

use kv_gpu::Precision;
use model_tests::{Case, Source, fixture};

use super::{register, tolerance};

/// A few of them, of one kind each.
pub(crate) fn four() -> Vec<Case> {
    let names = ["llama_gqa_untied", "gemma3_iswa8", "mamba2", "mixtral"];
    names.map(|name| Case::recipe(name, register)).into()
}

/// Every model with a reference, by name.
pub(crate) fn all() -> Vec<Case> {
    let entries = std::fs::read_dir(fixture("recipes")).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("recipe.json").exists())
        .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
        .collect();
    names.sort();
    assert!(names.len() > 30, "{names:?}");
    // The names of cases live as long as the program.
    let names = names.into_iter().map(|name| &*Box::leak(name.into()));
    let mut cases: Vec<Case> = names.map(|name| Case::recipe(name, register)).collect();
    cases.push(Case {
        source: Source::Gguf("gguf"),
        ..Case::recipe("granite_llama_cpp", register)
    });
    cases
}

/// Checks all cases, whichever of them fail, and prints how far each is off.
///
/// # Panics
/// If one is off by its tolerance or more, or panics.
pub(crate) fn assert_near(cases: &[Case], precision: Precision, distance: impl Fn(&Case) -> f32) {
    let mut failed = Vec::new();
    for case in cases {
        let name = case.name;
        let limit = tolerance(precision, name);
        match catch_unwind(AssertUnwindSafe(|| distance(case))) {
            Ok(off) => {
                println!("{name}: off by {off:.1e}");
                if off >= limit || off.is_nan() {
                    failed.push(format!("{name}: off by {off}, at most {limit}"));
                }
            }
            Err(_) => failed.push(format!("{name}: panicked")),
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}
