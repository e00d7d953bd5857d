//! Text from a RetNet file, on the CPU backend.
//!
//!     cargo run --release --example run -- tests/data/retnet-tiny.gguf

use cellar_engine::{Engine, EngineConfig, GenerateOptions, Generation};
use kv_core::backend::Backend;
use kv_cpu::{CpuBackend, CpuConfig};
use model_core::architecture::Registry;
use model_core::model_file::ModelFile;
use model_core::tokenizer::EncodeOptions;

fn main() -> anyhow::Result<()> {
    let path = std::env::args().nth(1);
    let path = path.unwrap_or_else(|| "tests/data/retnet-tiny.gguf".to_owned());
    let mut registry = Registry::new();
    retnet_for_cellar::register(&mut registry);
    let file = ModelFile::open(path, &registry)?;

    let mut backend = CpuBackend::new(CpuConfig::default())?;
    backend.set_custom_ops(retnet_for_cellar::custom_ops())?;
    let config = EngineConfig::default();
    let mut engine = Engine::new(backend, file.model().clone(), file.weights(), &config)?;

    let tokens = file
        .tokenizer()
        .encode("Once upon a time", EncodeOptions::PROMPT);
    let options = GenerateOptions {
        n_predict: Some(30),
        ..GenerateOptions::default()
    };
    let mut text = Generation::new(&engine, file.tokenizer(), options)?;
    text.feed(&mut engine, &tokens, |_| ())?;
    while let Some(piece) = text.next_piece(&mut engine)? {
        print!("{piece}");
    }
    println!();
    Ok(())
}
