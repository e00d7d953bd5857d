//! `cellar state inspect`: the contents of a saved state. Needs no model.

use std::collections::BTreeMap;
use std::io::Write;

use anyhow::Context;
use kv_backend::RowKind;
use kv_backend::state::{Fingerprint, RowEncoding, SavedState, SeqTokens};
use kv_core::SeqId;
use kv_core::memory::Snapshot;
use serde::Serialize;

use crate::args::{StateArgs, StateCommand, StateInspectArgs};
use crate::failure::Exit;
use crate::input;
use crate::machine;
use crate::terminal::{self, escape};

/// Everything that is shown.
#[derive(Debug, Serialize)]
struct Report<'a> {
    file: String,
    format_version: u32,
    written_by: &'a str,
    n_bytes: u64,
    model: &'a Fingerprint,
    parts: Vec<PartSummary>,
    sequences: Vec<SeqSummary>,
    rows: Vec<RowsSummary>,
}

#[derive(Debug, Serialize)]
struct PartSummary {
    part: u32,
    window: String,
    n_cells: usize,
}

#[derive(Debug, Serialize)]
struct SeqSummary {
    seq: u32,
    first_position: Option<u32>,
    last_position: Option<u32>,
    /// In the part that holds most of them; without attention layers, those of its state.
    n_tokens: u32,
    /// Recurrent states besides the current one.
    n_snapshots: usize,
    /// Token ids that are known.
    n_ids: usize,
    /// Of those, how many come next and were not evaluated yet.
    n_pending: usize,
}

/// Rows of one kind in all layers that store them in the same way.
#[derive(Debug, Default, Serialize)]
struct RowsSummary {
    kind: &'static str,
    stored: String,
    n_layers: usize,
    n_rows: u64,
    n_bytes: u64,
}

pub(super) fn run(args: &StateArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    let StateCommand::Inspect(args) = &args.command;
    inspect(args, out)
}

fn inspect(args: &StateInspectArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    let bytes = input::bytes(&args.file)?;
    let name = args.file.display().to_string();
    let state = SavedState::parse(&bytes).with_context(|| format!("cannot read '{name}'"))?;
    let snapshot = state.snapshot();
    let parts = snapshot.parts().iter().map(|part| PartSummary {
        part: part.part.0,
        window: part.window.to_string(),
        n_cells: part.cells.len(),
    });
    let seqs = snapshot.seqs();
    let report = Report {
        file: name,
        format_version: state.version(),
        written_by: state.written_by(),
        n_bytes: state.n_bytes(),
        model: state.fingerprint(),
        parts: parts.collect(),
        sequences: seqs
            .iter()
            .map(|seq| sequence(snapshot, state.tokens(), seq))
            .collect(),
        rows: rows(&state),
    };
    if args.json {
        writeln!(out, "{}", terminal::json(&report)?)?;
    } else {
        print(&report, out)?;
    }
    out.flush()?;
    Ok(Exit::Done)
}

fn sequence(snapshot: &Snapshot, tokens: &[SeqTokens], seq: SeqId) -> SeqSummary {
    let chain = snapshot
        .states()
        .unwrap_or_default()
        .iter()
        .find(|c| c.seq == seq);
    let in_state = || Some(chain?.states.last()?.n_tokens);
    let positions = snapshot.positions(seq);
    let tokens = tokens.iter().find(|t| t.seq == seq);
    let n_pending = tokens.map_or(0, |t| t.pending.len());
    SeqSummary {
        seq: seq.0,
        first_position: positions.map(|has| has.first.0),
        last_position: positions.map(|has| has.last.0),
        n_tokens: snapshot.n_tokens(seq).or_else(in_state).unwrap_or(0),
        n_snapshots: chain.map_or(0, |c| c.states.len().saturating_sub(1)),
        n_ids: tokens.map_or(0, |t| t.evaluated.len()) + n_pending,
        n_pending,
    }
}

fn rows(state: &SavedState<'_>) -> Vec<RowsSummary> {
    let mut kinds: BTreeMap<(RowKind, String), RowsSummary> = BTreeMap::new();
    for rows in state.rows() {
        let kind = rows.format.kind;
        let stored = match rows.format.stored {
            RowEncoding::Heads { shape, .. } => shape.kv_type.to_string(),
            RowEncoding::Floats(_) => "f32".to_owned(),
            RowEncoding::Values { kv_type, .. } => kv_type.to_string(),
        };
        let summary = kinds.entry((kind, stored.clone())).or_default();
        summary.kind = match kind {
            RowKind::K => "k",
            RowKind::V => "v",
            RowKind::Conv => "conv",
            RowKind::State => "state",
        };
        summary.stored = stored;
        summary.n_layers += 1;
        summary.n_rows += u64::from(rows.format.n_rows);
        summary.n_bytes += rows.bytes.len() as u64;
    }
    kinds.into_values().collect()
}

fn print(report: &Report<'_>, out: &mut impl Write) -> anyhow::Result<()> {
    let weights = report.model.weights;
    writeln!(
        out,
        "{}: state, format version {}, {}, written by {}",
        escape(&report.file),
        report.format_version,
        machine::bytes(report.n_bytes),
        escape(report.written_by),
    )?;
    writeln!(
        out,
        "model: {}, {} layers, {} tokens in the vocabulary, {} weights of {} ({:016x})",
        escape(&report.model.architecture),
        report.model.layers.n_layers(),
        report.model.n_vocab,
        weights.n_weights,
        machine::bytes(weights.n_bytes),
        weights.hash,
    )?;
    for part in &report.parts {
        writeln!(
            out,
            "part {}: window {}, {} cells",
            part.part, part.window, part.n_cells
        )?;
    }
    for seq in &report.sequences {
        let end = |pos: Option<u32>| pos.map_or("none".to_owned(), |pos| pos.to_string());
        writeln!(
            out,
            "sequence {}: positions {} to {}, {} tokens, {} snapshots; {} ids known, {} of them not \
             evaluated yet",
            seq.seq,
            end(seq.first_position),
            end(seq.last_position),
            seq.n_tokens,
            seq.n_snapshots,
            seq.n_ids,
            seq.n_pending,
        )?;
    }
    writeln!(
        out,
        "{:<6} {:<7} {:>7} {:>10} {:>12}",
        "rows", "stored", "layers", "rows", "bytes"
    )?;
    for rows in &report.rows {
        writeln!(
            out,
            "{:<6} {:<7} {:>7} {:>10} {:>12}",
            rows.kind, rows.stored, rows.n_layers, rows.n_rows, rows.n_bytes
        )?;
    }
    Ok(())
}
