//! From cells to visibility: what the rows of a ubatch see of one part.
//!
//! A row sees the cells of its first sequence, within its window. Rows of one sequence form a group,
//! since they look at the same runs. Knows nothing of how cells were chosen.

use crate::batch::UBatch;
use crate::cells::SeqRuns;
use crate::ids::{CellIdx, MAX_SEQS, SeqId};
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
    runs_of: impl Fn(SeqId) -> Option<&'a SeqRuns>,
    visibility: &mut Visibility,
) {
    let seqs = write_rows(ubatch, reach, visibility);
    for (group, &seq) in visibility.groups.iter_mut().zip(&seqs) {
        let seen = group
            .limits
            .iter()
            .copied()
            .fold(PosRange::EMPTY, PosRange::hull);
        group
            .runs
            .extend(runs_of(seq).into_iter().flat_map(|runs| runs.within(seen)));
    }
}

/// The same without a memory: rows see rows of their own sequence in the ubatch, whose numbers are
/// the cells.
pub(super) fn write_within(ubatch: &UBatch, reach: Reach, visibility: &mut Visibility) {
    let seqs = write_rows(ubatch, reach, visibility);
    for (group, &seq) in visibility.groups.iter_mut().zip(&seqs) {
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

/// Writes groups without runs and gives the sequence of each.
fn write_rows(ubatch: &UBatch, reach: Reach, visibility: &mut Visibility) -> Vec<SeqId> {
    let mut group_of = [None::<usize>; MAX_SEQS];
    let mut seqs: Vec<SeqId> = Vec::new();
    visibility.n_rows = ubatch.n_tokens();
    for (number, row) in (0u32..).zip(ubatch.rows()) {
        let Some(group) = group_of.get_mut(row.first_seq.as_usize()) else {
            continue;
        };
        let group = *group.get_or_insert_with(|| {
            seqs.push(row.first_seq);
            emptied(&mut visibility.groups, seqs.len() - 1);
            seqs.len() - 1
        });
        let group = &mut visibility.groups[group];
        group.rows.push(number);
        group
            .limits
            .push(reach.window.visible_keys(row.pos, reach.causality));
    }
    visibility.groups.truncate(seqs.len());
    seqs
}

/// Makes group `at`, the first unused one, exist and be empty.
fn emptied(groups: &mut Vec<VisibleGroup>, at: usize) {
    match groups.get_mut(at) {
        Some(group) => {
            group.rows.clear();
            group.runs.clear();
            group.limits.clear();
        }
        None => groups.push(VisibleGroup::default()),
    }
}
