//! `cellar tokenize`: the tokens of a text.

use std::io::Write;

use kv_core::TokenId;
use model_core::tokenizer::{AddSpecial, EncodeOptions, SpecialPieces, SpecialText};
use serde::Serialize;

use crate::args::TokenizeArgs;
use crate::failure::{Exit, usage};
use crate::given_text;
use crate::models::ModelSource;
use crate::terminal;

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report<'a> {
    tokens: &'a [TokenId],
    /// What each token writes; `null` where that is not UTF-8.
    pieces: Vec<Option<String>>,
    /// The bytes of tokens that are parts of characters.
    not_utf8: Vec<NotUtf8>,
}

/// A token that is no UTF-8 by itself.
#[derive(Debug, Serialize)]
struct NotUtf8 {
    /// Which of the tokens.
    index: usize,
    bytes: Vec<u8>,
}

pub(super) fn run(args: &TokenizeArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    let Some(text) = given_text::text(args.input.text(), args.input.file.as_deref())? else {
        return usage("no text: give one as an argument, with -f FILE, or through a pipe");
    };
    let tokenizer = ModelSource::new(args.input.model()).load_tokenizer()?;
    let options = EncodeOptions {
        add: if args.no_bos {
            AddSpecial::Never
        } else {
            AddSpecial::AsModel
        },
        special: if args.no_special {
            SpecialText::AsText
        } else {
            SpecialText::Parse
        },
    };
    let tokens = tokenizer.encode(&text, options);
    let pieces: Vec<Vec<u8>> = tokens
        .iter()
        .map(|&id| tokenizer.piece(id, SpecialPieces::Render))
        .collect::<Result<_, _>>()?;
    if args.json {
        let mut report = Report {
            tokens: &tokens,
            pieces: Vec::with_capacity(pieces.len()),
            not_utf8: Vec::new(),
        };
        for (index, piece) in pieces.into_iter().enumerate() {
            match String::from_utf8(piece) {
                Ok(piece) => report.pieces.push(Some(piece)),
                Err(error) => {
                    report.pieces.push(None);
                    let bytes = error.into_bytes();
                    report.not_utf8.push(NotUtf8 { index, bytes });
                }
            }
        }
        writeln!(out, "{}", terminal::json(&report)?)?;
    } else {
        for (id, piece) in tokens.iter().zip(&pieces) {
            writeln!(out, "{id:>7}  '{}'", shown(piece))?;
        }
    }
    out.flush()?;
    Ok(Exit::Done)
}

/// A piece in one line; bytes that are no UTF-8 as in `<0xF0>`.
fn shown(piece: &[u8]) -> String {
    let chunks = piece.utf8_chunks();
    let shown = chunks.map(|chunk| {
        let bytes = chunk.invalid().iter().map(|byte| format!("<0x{byte:02X}>"));
        let text = terminal::escape(chunk.valid());
        format!("{text}{}", bytes.collect::<String>())
    });
    shown.collect()
}
