//! `cellar tokenize`: the tokens of a text.

use std::io::Write;

use kv_core::TokenId;
use model_core::tokenizer::{AddSpecial, EncodeOptions, SpecialText};
use serde::Serialize;

use crate::args::TokenizeArgs;
use crate::failure::{Exit, usage};
use crate::models::ModelSource;
use crate::resolve;
use crate::terminal;

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report<'a> {
    tokens: &'a [TokenId],
    /// As the vocabulary has them.
    pieces: Vec<&'a str>,
}

pub(super) fn run(args: &TokenizeArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    let Some(text) = resolve::text(args.text.as_deref(), args.file.as_deref())? else {
        return usage("no text: give one as an argument, with -f FILE, or through a pipe");
    };
    let file = ModelSource::new(args.model.model.as_deref()).load()?;
    let tokenizer = file.tokenizer();
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
    let piece = |&id| tokenizer.token_text(id).unwrap_or_default();
    if args.json {
        let pieces = tokens.iter().map(piece).collect();
        let report = Report {
            tokens: &tokens,
            pieces,
        };
        writeln!(out, "{}", terminal::json(&report)?)?;
    } else {
        for id in &tokens {
            writeln!(out, "{id:>7}  {}", terminal::escape(piece(id)))?;
        }
    }
    out.flush()?;
    Ok(Exit::Done)
}
