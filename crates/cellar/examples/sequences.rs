//! Two texts in turns on one engine, each in its own sequence.
//!
//!     cargo run --release -p cellar-llm --example sequences -- models/stories-llama-f16.gguf

use cellar::engine::{Engine, Generation};
use cellar::kv_core::SeqId;
use cellar::model_core::tokenizer::EncodeOptions;
use cellar::{
    BackendOptions, EngineConfig, Error, GenerateOptions, ModelFile, architectures, open_backend,
};

fn main() -> Result<(), Error> {
    let path = std::env::args().nth(1);
    let path = path.unwrap_or_else(|| "models/stories-llama-f16.gguf".to_owned());
    let file = ModelFile::open(path, &architectures())?;
    let backend = open_backend(BackendOptions::default())?;
    let config = EngineConfig {
        n_seqs: 2,
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(backend, file.model().clone(), file.weights(), &config)?;

    let mut texts = Vec::new();
    for (seq, prompt) in [(0, "Once upon a time"), (1, "The little dog")] {
        let options = GenerateOptions {
            seq: SeqId(seq),
            n_predict: Some(40),
            ..GenerateOptions::default()
        };
        let mut text = Generation::new(&engine, file.tokenizer(), options)?;
        let tokens = file.tokenizer().encode(prompt, EncodeOptions::PROMPT);
        text.feed(&mut engine, &tokens, |_| ())?;
        texts.push((prompt, text));
    }
    let mut n_live = texts.len();
    while n_live > 0 {
        n_live = 0;
        for (_, text) in &mut texts {
            n_live += usize::from(text.next_piece(&mut engine)?.is_some());
        }
    }
    for (prompt, text) in texts {
        println!("{prompt}{}\n", text.text());
    }
    Ok(())
}
