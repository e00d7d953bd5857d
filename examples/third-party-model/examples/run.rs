//! Text from a RetNet file, on the CPU backend.
//!
//!     cargo run --release --example run -- tests/data/retnet-tiny.gguf

use cellar_engine::session::{ServiceConfig, Session, TextRequest};
use cellar_engine::{CompletionOptions, Engine, EngineConfig};
use kv_backend::Backend;
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
    let engine = Engine::new(backend, file.model().clone(), file.weights(), &config)?;

    let tokens = file
        .tokenizer()
        .encode("Once upon a time", EncodeOptions::PROMPT);
    let mut session = Session::new(engine, file.tokenizer(), &ServiceConfig::default())?;
    let mut text = session.submit(TextRequest {
        prompt: tokens,
        options: CompletionOptions {
            n_predict: Some(30),
            ..CompletionOptions::default()
        },
        ..TextRequest::default()
    })?;
    while let Some(piece) = session.next_piece(&mut text)? {
        print!("{piece}");
    }
    println!();
    Ok(())
}
