//! From cells to visibility: what the rows of a ubatch see of one part.
//!
//! A row sees the cells of its first sequence, within its window. Rows of one sequence form a group,
//! since they look at the same runs. Knows nothing of how cells were chosen.

use crate::batch::UBatch;
use crate::cells::SeqRuns;
use crate::ids::{MAX_SEQS, SeqId};
use crate::visibility::{Visibility, VisibleGroup};
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
