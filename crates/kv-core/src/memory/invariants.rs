//! Recounts a memory from its cells and compares the result with all other bookkeeping.
//!
//! For tests and debugging: looks at every cell.

use std::collections::BTreeMap;

use super::stream::Stream;
use super::unified::Unified;
use crate::ids::{CellIdx, Pos, SeqId};
use crate::visibility::CellRun;
use crate::window::Window;

/// Recounts everything.
///
/// # Errors
/// The first disagreement.
pub fn check(memory: &Unified) -> Result<(), String> {
    memory
        .streams
        .iter()
        .try_for_each(|stream| check_stream(stream, memory.config().window))
}

fn check_stream(stream: &Stream, window: Window) -> Result<(), String> {
    let cells = &stream.cells;
    let n_cells = cells.n_cells();
    let mut n_free = 0;
    for i in 0..n_cells {
        let cell = cells.first_cell().offset(i);
        let n_seqs = cells.get(cell).map_or(0, |held| held.seqs.len());
        let is_free = cells.free().is_free(i);
        if is_free != (n_seqs == 0) {
            return Err(format!(
                "cell {cell} is in use by {n_seqs} sequences, but its free bit is {is_free}"
            ));
        }
        n_free += u32::from(is_free);
    }
    if n_free != cells.free().n_free() {
        let kept = cells.free().n_free();
        return Err(format!("{n_free} cells are free, not {kept}"));
    }
    let mut grids = cells.grids().iter();
    if let Some((&cell, &grid)) = grids.find(|(cell, _)| cells.get(**cell).is_none()) {
        return Err(format!("cell {cell} is free but lies at {grid}"));
    }
    if stream.head > n_cells {
        let head = stream.head;
        return Err(format!("the head is {head}, of {n_cells} cells"));
    }
    let mut cells_of = cells_by_seq(stream);
    for seq in cells.seqs() {
        let counted = longest_runs(cells_of.remove(&seq).unwrap_or_default());
        let kept = cells.runs(seq).map_or(&[][..], |runs| runs.as_slice());
        if kept != counted {
            return Err(format!(
                "sequence {seq} has the runs {kept:?}, but its cells make {counted:?}"
            ));
        }
        stream
            .end(seq)
            .check(seq, window)
            .map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// The cells of each sequence with their positions.
fn cells_by_seq(stream: &Stream) -> BTreeMap<SeqId, Vec<(Pos, CellIdx)>> {
    let cells = &stream.cells;
    let mut by_seq: BTreeMap<SeqId, Vec<(Pos, CellIdx)>> = BTreeMap::new();
    for at in (0..cells.n_cells()).map(|i| cells.first_cell().offset(i)) {
        let Some(held) = cells.get(at) else { continue };
        for seq in &held.seqs {
            by_seq.entry(seq).or_default().push((held.pos, at));
        }
    }
    by_seq
}

/// The longest runs that these cells make, in order of position and cell.
fn longest_runs(mut own: Vec<(Pos, CellIdx)>) -> Vec<CellRun> {
    own.sort_unstable();
    let mut runs: Vec<CellRun> = Vec::new();
    for (pos, cell) in own {
        match runs.last_mut() {
            Some(run) if run.last_pos().next() == pos && run.last_cell().offset(1) == cell => {
                run.len += 1;
            }
            _ => runs.push(CellRun { cell, pos, len: 1 }),
        }
    }
    runs
}
