//! What the tests of model crates share: the fixtures and [`Recipe`], a model directory whose
//! weights are generated; [`Case`], a model with a reference; [`Runner`], a decode loop of a few
//! lines, so that these tests depend on memory, model and backend alone; and the [`checks`] that
//! every model has to pass.
//!
//! Only tests depend on this crate: a panic is how a check fails. Knows no architecture by name.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod adapters;
mod case;
pub mod checks;
pub mod defaults;
pub mod gpu;
pub mod heads;
pub mod http;
pub mod images;
pub mod outside;
pub mod quantized;
mod recipe;
pub mod recorded;
mod reference;
mod refusal;
mod runner;
pub mod settings;
pub mod sizes;
pub mod sound;
pub mod vision;

use std::num::NonZero;
use std::path::PathBuf;

use kv_candle::CandleBackend;
use kv_cpu::{CpuBackend, CpuConfig};

pub use adapters::write_adapter;
pub use case::{Case, Fork, KeyOrder, Source, StateReference};
pub use recipe::{Distribution, Recipe, TensorKey};
pub use reference::{LogitsRows, Reference};
pub use refusal::{refusal, remove_key};
pub use runner::{Runner, Setup};

/// The CPU backend with two threads.
pub fn cpu() -> CpuBackend {
    cpu_with(2)
}

/// The CPU backend with so many threads.
pub fn cpu_with(n_threads: usize) -> CpuBackend {
    CpuBackend::new(CpuConfig {
        n_threads: NonZero::new(n_threads),
        ..CpuConfig::default()
    })
    .unwrap()
}

/// The reference backend.
pub fn candle() -> CandleBackend {
    CandleBackend::cpu()
}

/// The root folder of the repository: the one that `CELLAR_ROOT` names, for test programs that were
/// moved to another machine, or the one that this crate was built in.
pub fn root() -> PathBuf {
    let moved = std::env::var_os("CELLAR_ROOT").filter(|root| !root.is_empty());
    moved.map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/..")),
        PathBuf::from,
    )
}

/// A file or folder of the fixtures, by its path in `tests/fixtures`.
pub fn fixture(path: &str) -> PathBuf {
    root().join("tests/fixtures").join(path)
}

/// Largest absolute difference.
pub fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let differences = a.iter().zip(b).map(|(x, y)| (x - y).abs());
    // A difference that is no number is not a small one.
    differences.fold(0.0, |most, d| if d > most || d.is_nan() { d } else { most })
}

/// The likeliest token.
pub fn best(logits: &[f32]) -> u32 {
    let by_logit = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    u32::try_from(by_logit.unwrap().0).unwrap()
}
