//! A story, piece by piece.

use cellar::{GenerateOptions, Model};

fn main() -> Result<(), cellar::Error> {
    let mut model = Model::open("models/stories-llama-f16.gguf")?;
    let options = GenerateOptions {
        n_predict: Some(60),
        ..GenerateOptions::default()
    };
    let mut text = model.generate("Once upon a time", options)?;
    for piece in &mut text {
        print!("{}", piece?);
    }
    println!("\n({:?})", text.finish_reason());
    Ok(())
}
