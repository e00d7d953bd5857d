//! From cells to visibility: what the rows of a ubatch see of one part.
//!
//! A row sees the cells of its first sequence, within its window. Rows of one sequence form a
//! group, since they look at the same runs; a token of an image that does not see all others at its
//! position is a group by itself. Knows nothing of how cells were chosen.

use std::collections::HashMap;

use crate::batch::UBatch;
use crate::cells::{CopyOrigin, KvCells, SeqRuns};
use crate::grid::GridPos;
use crate::ids::{CellIdx, Pos, SeqId};
use crate::visibility::{CellRun, Visibility, VisibleGroup};
use crate::window::{Causality, PosRange, Window};

/// Whom a part lets see whom.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reach {
    pub(super) window: Window,
    pub(super) causality: Causality,
}

/// Writes what the rows of `ubatch` see, over what `visibility` held; its buffers are reused.
pub(super) fn write<'a>(
    ubatch: &UBatch,
    reach: Reach,
    cells_of: impl Fn(SeqId) -> Option<&'a KvCells>,
    visibility: &mut Visibility,
) {
    let seqs = write_rows(ubatch, reach, visibility);
    let mut apart = Vec::new();
    for (group, &seq) in visibility.groups.iter_mut().zip(&seqs) {
        write_runs(group, cells_of(seq).and_then(|cells| cells.runs(seq)));
        if let Some(cells) = cells_of(seq)
            && reach.causality.is_causal()
            && !cells.grids().is_empty()
        {
            set_apart(ubatch, cells, group, &mut apart);
        }
    }
    if !apart.is_empty() {
        visibility.groups.retain(|group| !group.rows.is_empty());
        visibility.groups.append(&mut apart);
    }
}

/// Writes the runs that the rows of a group see, of those of their sequence.
fn write_runs(group: &mut VisibleGroup, runs: Option<&SeqRuns>) {
    let hull = |all: PosRange, &limits: &PosRange| all.hull(limits);
    let seen = group.limits.iter().fold(PosRange::EMPTY, hull);
    match (runs, runs.and_then(SeqRuns::positions)) {
        // A decode step adds one token: all but the last run are there already.
        (Some(runs), Some(has)) if seen.first <= has.first && has.last <= seen.last => {
            runs.update_copy(&mut group.runs, &mut group.origin);
        }
        (runs, _) => {
            group.runs.clear();
            group
                .runs
                .extend(runs.into_iter().flat_map(|runs| runs.within(seen)));
            group.origin = CopyOrigin::default();
        }
    }
}

/// Gives each row from which a token at its own position is hidden, because it comes later in the
/// image, a group of its own without that token.
fn set_apart(
    ubatch: &UBatch,
    cells: &KvCells,
    group: &mut VisibleGroup,
    apart: &mut Vec<VisibleGroup>,
) {
    let grid_of = |cell: CellIdx, pos: Pos| {
        let grid = cells.grids().get(&cell);
        grid.copied().unwrap_or(GridPos::of_text(pos))
    };
    let (rows, limits) = (
        std::mem::take(&mut group.rows),
        std::mem::take(&mut group.limits),
    );
    for (row, limits) in rows.into_iter().zip(limits) {
        let at = row as usize;
        let pos = ubatch
            .positions
            .get(at)
            .map_or(limits.last, |&pos| Pos(pos));
        let own = ubatch.grids.get(at).copied().flatten();
        let own = own.unwrap_or(GridPos::of_text(pos));
        let here = PosRange::new(pos, pos);
        let start = group.runs.partition_point(|run| run.last_pos() < pos);
        let peers = group.runs[start..].iter().take_while(|run| run.pos <= pos);
        // One cell each: a run holds a position once.
        let peers = peers.filter_map(|run| run.clip(here));
        let is_hidden = |run: &CellRun| grid_of(run.cell, pos) > own;
        if !peers.clone().any(|run| is_hidden(&run)) {
            group.rows.push(row);
            group.limits.push(limits);
            continue;
        }
        let before = PosRange::from(limits.first..pos);
        let mut runs: Vec<CellRun> = group.runs.iter().filter_map(|r| r.clip(before)).collect();
        runs.extend(peers.filter(|run| !is_hidden(run)));
        apart.push(VisibleGroup::new(vec![row], runs, vec![limits]));
    }
}

/// The same without a memory: rows see rows of their own sequence in the ubatch, whose numbers are
/// the cells. Chunks end where the next one begins, for rows that see later ones, too.
pub(super) fn write_within(ubatch: &UBatch, reach: Reach, visibility: &mut Visibility) {
    let seqs = write_rows(ubatch, reach, visibility);
    for (group, &seq) in visibility.groups.iter_mut().zip(&seqs) {
        group.runs.clear();
        group.origin = CopyOrigin::default();
        if let Window::Chunked(n) = reach.window {
            for limits in &mut group.limits {
                let end = limits.first.0.saturating_add(n.saturating_sub(1));
                limits.last = limits.last.min(Pos(end));
            }
        }
        let rows = (0u32..).map(CellIdx).zip(ubatch.rows());
        for (cell, row) in rows.filter(|(_, row)| row.seqs.contains(seq)) {
            match group.runs.last_mut() {
                Some(run)
                    if (run.last_cell().offset(1), run.last_pos().next()) == (cell, row.pos) =>
                {
                    run.len += 1;
                }
                // Positions of a sequence do not go back, so runs are in order.
                _ => group.runs.push(CellRun {
                    cell,
                    pos: row.pos,
                    len: 1,
                }),
            }
        }
    }
}

/// Writes the rows of all groups and their limits, and gives the sequence of each. The runs are
/// those of the step before.
fn write_rows(ubatch: &UBatch, reach: Reach, visibility: &mut Visibility) -> Vec<SeqId> {
    let mut group_of: HashMap<SeqId, usize> = HashMap::new();
    let mut seqs: Vec<SeqId> = Vec::new();
    let mut last: Option<(SeqId, usize)> = None;
    visibility.n_rows = ubatch.n_tokens();
    // Others show older positions alone, or another sequence.
    let shows_last = match reach.window {
        Window::Full => reach.causality != Causality::CausalInFull,
        Window::Sliding(_) | Window::Chunked(_) | Window::Ends { .. } => true,
        _ => false,
    };
    for (number, (&seq, &pos)) in (0u32..).zip(ubatch.first_seqs.iter().zip(&ubatch.positions)) {
        let at = match last {
            Some((known, at)) if known == seq => at,
            _ => *group_of.entry(seq).or_insert_with(|| {
                seqs.push(seq);
                clear_group(&mut visibility.groups, seqs.len() - 1);
                seqs.len() - 1
            }),
        };
        last = Some((seq, at));
        if let Some(group) = visibility.groups.get_mut(at) {
            let mut limits = reach.window.visible_keys(Pos(pos), reach.causality);
            if let (Some(&Some(last)), true) = (ubatch.sees_to.get(number as usize), shows_last) {
                limits.last = limits.last.max(last);
            }
            group.rows.push(number);
            group.limits.push(limits);
        }
    }
    visibility.groups.truncate(seqs.len());
    seqs
}

/// Makes group `at`, the first unused one, exist and have no rows.
fn clear_group(groups: &mut Vec<VisibleGroup>, at: usize) {
    match groups.get_mut(at) {
        Some(group) => {
            group.rows.clear();
            group.limits.clear();
        }
        None => groups.push(VisibleGroup::default()),
    }
}
