//! `cellar list`: the models in the cache.

use std::io::Write;

use cellar_hub::{Cache, CachedModel, Format};
use serde::Serialize;

use crate::args::ListArgs;
use crate::failure::Exit;
use crate::machine::bytes;
use crate::terminal::{escape, json, note};

#[derive(Debug, Serialize)]
struct Row {
    name: String,
    format: &'static str,
    n_bytes: u64,
    path: String,
}

impl From<CachedModel> for Row {
    fn from(model: CachedModel) -> Self {
        Self {
            name: model.name.to_string(),
            format: match model.format {
                Format::Gguf => "gguf",
                Format::Safetensors => "safetensors",
            },
            n_bytes: model.n_bytes,
            path: model.path.display().to_string(),
        }
    }
}

pub(super) fn run(args: &ListArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    let cache = Cache::from_env()?;
    let rows: Vec<Row> = cache.models().into_iter().map(Row::from).collect();
    if args.json {
        writeln!(out, "{}", json(&rows)?)?;
    } else if rows.is_empty() {
        let root = cache.root().display().to_string();
        note(format_args!(
            "no models in {}; 'cellar pull OWNER/NAME' downloads one",
            escape(&root)
        ));
    } else {
        let width = rows.iter().map(|row| row.name.chars().count()).max();
        let width = width.unwrap_or(0);
        writeln!(out, "{:<width$}  {:>12}  format", "name", "size")?;
        for row in &rows {
            let name = escape(&row.name);
            writeln!(
                out,
                "{name:<width$}  {:>12}  {}",
                bytes(row.n_bytes),
                row.format
            )?;
        }
    }
    let n_incomplete = cache.n_incomplete_bytes();
    if n_incomplete > 0 && !args.json {
        note(format_args!(
            "interrupted downloads hold {}; 'cellar pull' continues them",
            bytes(n_incomplete)
        ));
    }
    out.flush()?;
    Ok(Exit::Done)
}
