//! Prints the tokens of many texts, for comparisons with other tokenizers:
//!
//! ```text
//! tokens MODEL < TEXTS
//! ```
//!
//! `TEXTS` has one JSON string a line; each becomes one line, a JSON list of token ids. `MODEL` is
//! a GGUF file, which may be a vocabulary alone, or a directory with a `tokenizer.json`. What the
//! tokenizer adds around a text is left out; marks in the text are found.

use std::io::{BufRead, Write};

use model_core::model_file::open_tokenizer;
use model_core::tokenizer::{AddSpecial, EncodeOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args()
        .nth(1)
        .ok_or("usage: tokens MODEL < TEXTS")?;
    let tokenizer = open_tokenizer(path)?;
    let options = EncodeOptions {
        add: AddSpecial::Never,
        ..EncodeOptions::PROMPT
    };
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let text: String = serde_json::from_str(&line?)?;
        let ids: Vec<u32> = tokenizer
            .encode(&text, options)
            .iter()
            .map(|id| id.0)
            .collect();
        writeln!(out, "{}", serde_json::to_string(&ids)?)?;
    }
    Ok(())
}
