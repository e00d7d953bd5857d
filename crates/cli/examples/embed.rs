//! Embedding Cellar: a model file, a backend, an engine, and a text that streams.
//!
//!     cargo run --release --example embed -- models/stories-llama-f16.gguf

use engine::{Engine, EngineConfig, GenerateOptions, Generation};
use kv_cpu::{CpuBackend, CpuConfig};
use model_core::architecture::Registry;
use model_core::model_file::ModelFile;
use model_core::tokenizer::EncodeOptions;

fn main() -> anyhow::Result<()> {
    let path = std::env::args().nth(1);
    let path = path.unwrap_or_else(|| "models/stories-llama-f16.gguf".to_owned());

    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    let file = ModelFile::open(path, &registry)?;
    let backend = CpuBackend::new(CpuConfig::default())?;
    let config = EngineConfig::default();
    let mut engine = Engine::new(backend, file.model().clone(), file.weights(), &config)?;

    let prompt = file
        .tokenizer()
        .encode("Once upon a time", EncodeOptions::PROMPT);
    let options = GenerateOptions {
        n_predict: Some(60),
        ..GenerateOptions::default()
    };
    let mut text = Generation::new(&engine, file.tokenizer(), options)?;
    text.feed(&mut engine, &prompt, |_| ())?;
    while let Some(piece) = text.next_piece(&mut engine)? {
        print!("{piece}");
    }
    println!("\n({:?})", text.finish_reason());
    Ok(())
}
