//! [`StepPictures`]: rows of pictures in the ubatches of a step, and the places that they take.
//!
//! Invariant: a token that names a row gets that row's values, or the step fails. Computes no row.

use std::collections::BTreeMap;
use std::sync::Arc;

use kv_core::batch::{PositionRule, UBatch};
use kv_core::{Pos, SeqId, TokenId};
use kv_graph::{Graph, Input, Node, Op};
use model_core::picture::PictureRun;

use crate::error::EngineError;

/// The pictures of the sequences of a step, in order.
pub(crate) type StepPictures = BTreeMap<SeqId, Vec<StepRun>>;

/// Rows of a picture in a sequence.
#[derive(Clone, Debug)]
pub(crate) struct StepRun {
    pub(crate) run: PictureRun,
    /// The rows of the whole picture, where the step computes some of the run.
    pub(crate) values: Option<Arc<[f32]>>,
}

/// The rows that stand in place of the names in a ubatch, written over what `to` held: none where
/// it has tokens.
///
/// # Errors
/// [`EngineError::UnknownRow`] for a name that is none of a picture of the step;
/// [`EngineError::WrongRows`].
pub(crate) fn write_rows(
    ubatch: &UBatch,
    pictures: &StepPictures,
    width: usize,
    to: &mut Vec<f32>,
) -> Result<(), EngineError> {
    to.clear();
    if !ubatch
        .tokens
        .first()
        .is_some_and(|&token| TokenId(token).names_row())
    {
        return Ok(());
    }
    for (&seq, &pos) in ubatch.first_seqs.iter().zip(&ubatch.positions) {
        let unknown = || EngineError::UnknownRow { seq, pos: Pos(pos) };
        let at = pos as usize;
        let runs = pictures.get(&seq).ok_or_else(unknown)?;
        let found = runs.iter().find(|run| run.run.places().contains(&at));
        let StepRun { run, values } = found.ok_or_else(unknown)?;
        let values = values.as_ref().ok_or_else(unknown)?;
        let n_rows = run.picture.n_rows();
        if values.len() != n_rows * width {
            let (got, wanted) = (values.len(), n_rows * width);
            return Err(EngineError::WrongRows { wanted, got });
        }
        let row = run.rows.start + at - run.at;
        let row = values.get(row * width..(row + 1) * width);
        to.extend_from_slice(row.ok_or_else(unknown)?);
    }
    Ok(())
}

/// The check of positions of tokens: those of pictures have rows and columns, where the graph
/// takes them.
pub(crate) fn position_rule(graph: &Graph) -> PositionRule {
    let takes_places = |node: &Node| node.op == Op::Input(Input::Coordinates);
    if graph.nodes().iter().any(takes_places) {
        PositionRule::Grid
    } else {
        PositionRule::Linear
    }
}

/// Position, row and column of each token of a ubatch: a picture counts as many positions as it is
/// high or wide (M-RoPE: Wang et al., arXiv 2409.12191).
pub(crate) fn coordinates<'a>(
    ubatch: &'a UBatch,
    pictures: &'a StepPictures,
) -> impl Iterator<Item = [u32; 3]> + 'a {
    let own = ubatch.coordinates().zip(&ubatch.first_seqs);
    own.map(move |(own, seq)| match pictures.get(seq) {
        Some(runs) => behind(runs, own),
        None => own,
    })
}

/// The place of a token that would be at `own` if each row of the pictures before it counted.
fn behind(runs: &[StepRun], own: [u32; 3]) -> [u32; 3] {
    let mut saved = 0;
    for StepRun { run, .. } in runs {
        let Some(grid) = run.picture.grid() else {
            continue;
        };
        let (at, n) = (run.at as u32, run.rows.len() as u32);
        if own[0] < at {
            break;
        }
        if own[0] < at + n {
            let (start, row, width) = (at - saved, own[0] - at, grid.width.max(1) as u32);
            return [start, start + row / width, start + row % width];
        }
        saved += n.saturating_sub(grid.height.max(grid.width) as u32);
    }
    own.map(|pos| pos.saturating_sub(saved))
}

#[cfg(test)]
mod tests {
    use crate::pictures::tests::{picture, run};

    use super::*;

    #[test]
    fn pictures_count_as_many_positions_as_they_are_high_or_wide() {
        let (a, b) = (picture(1, 2, 3), picture(2, 4, 1));
        let runs = [run(2, &a), run(10, &b)].map(|run| StepRun { run, values: None });
        let at = |pos| behind(&runs, [pos; 3]);
        assert_eq!([at(0), at(1)], [[0; 3], [1; 3]]);
        assert_eq!([at(2), at(4), at(5)], [[2, 2, 2], [2, 2, 4], [2, 3, 2]]);
        // Six rows count as three.
        assert_eq!([at(8), at(9)], [[5; 3], [6; 3]]);
        assert_eq!([at(10), at(13)], [[7, 7, 7], [7, 10, 7]]);
        assert_eq!(at(14), [11; 3]);
    }
}
