//! Two texts in turns, computed together.
//!
//!     cargo run --release -p cellar-llm --example sequences -- models/stories-llama-f16.gguf

use cellar::model_core::tokenizer::EncodeOptions;
use cellar::{Error, GenerateOptions, ModelOptions};

fn main() -> Result<(), Error> {
    let path = std::env::args().nth(1);
    let path = path.unwrap_or_else(|| "models/stories-llama-f16.gguf".to_owned());
    let mut model = ModelOptions::default().with_sequences(2).open(path)?;

    let mut texts = Vec::new();
    for prompt in ["Once upon a time", "The little dog"] {
        let options = GenerateOptions {
            n_predict: Some(40),
            ..GenerateOptions::default()
        };
        let tokens = model.file().tokenizer();
        let tokens = tokens.encode(prompt, EncodeOptions::PROMPT);
        texts.push((prompt, model.begin(options.request(tokens))?));
    }
    let mut n_live = texts.len();
    while n_live > 0 {
        n_live = 0;
        for (_, text) in &mut texts {
            n_live += usize::from(text.next_piece(&mut model)?.is_some());
        }
    }
    for (prompt, text) in texts {
        println!("{prompt}{}\n", text.text());
    }
    Ok(())
}
