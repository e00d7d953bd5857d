//! A matrix of whose product only parts are read becomes a matrix for each part.
//!
//! Models whose files have one matrix for several projections (Mamba's input and gate, fused
//! queries, keys and values) read columns of its product. Here every such step gets the weight rows
//! that it reads, so nothing is copied. The bits are the same: an output depends on its own weight
//! row.

use std::ops::Range;
use std::sync::Arc;

use kv_backend::BackendError;

use super::{Epilogue, FusedSteps, MatMulOutput, OutputAt, StepOp};
use crate::plan::RowsOp;

/// A step that reads columns of a product.
struct ColumnReader {
    step: usize,
    columns: Range<usize>,
}

/// Splits every product that is read in disjoint parts only.
pub(super) fn split_columns(s: &mut FusedSteps<'_>) -> Result<(), BackendError> {
    let mut step = 0;
    while step < s.steps.len() {
        let mut output = 0;
        while s.steps[step]
            .matmul()
            .is_some_and(|m| output < m.outputs.len())
        {
            let at = OutputAt { step, output };
            output += match parts(s, at) {
                Some(parts) => split(s, at, &parts)?,
                None => 1,
            };
        }
        step += 1;
    }
    Ok(())
}

/// The readers of a product; `None` where a step reads more than columns of it, or parts overlap,
/// or one is empty.
fn parts(s: &FusedSteps<'_>, at: OutputAt) -> Option<Vec<ColumnReader>> {
    let (product, output) = s.plain_output(at)?;
    let mut parts = Vec::new();
    for (step, reader) in s.steps.iter().enumerate().skip(at.step + 1) {
        if let (StepOp::Rows(RowsOp::Columns { first }), true) =
            (&reader.op, reader.reads == [product])
        {
            let (_, width) = s.shape(*reader.writes.first()?);
            let columns = *first..first.checked_add(width)?;
            parts.push(ColumnReader { step, columns });
        }
    }
    let mut ranges: Vec<_> = parts.iter().map(|part| part.columns.clone()).collect();
    ranges.sort_by_key(|range| range.start);
    let n_columns = output.matrix.n_rows();
    let fits = s.n_reads(product) == parts.len()
        && ranges.windows(2).all(|pair| pair[0].end <= pair[1].start)
        && ranges.iter().all(|r| !r.is_empty() && r.end <= n_columns);
    (fits && !parts.is_empty()).then_some(parts)
}

/// Replaces an output by one for each part: returns how many.
fn split(
    s: &mut FusedSteps<'_>,
    at: OutputAt,
    parts: &[ColumnReader],
) -> Result<usize, BackendError> {
    let Some((_, whole)) = s.plain_output(at) else {
        return Ok(1);
    };
    let (matrix, bias) = (Arc::clone(&whole.matrix), whole.bias.clone());
    let (mut outputs, mut writes) = (Vec::new(), Vec::new());
    for ColumnReader { step, columns } in parts {
        outputs.push(MatMulOutput {
            matrix: Arc::new(matrix.rows(columns.clone())?),
            bias: bias.as_ref().map(|bias| bias[columns.clone()].into()),
            epilogue: Epilogue::None,
        });
        writes.extend(&s.steps[*step].writes);
    }
    let step = &mut s.steps[at.step];
    step.writes.splice(at.output..=at.output, writes);
    if let Some(matmul) = step.matmul_mut() {
        matmul.outputs.splice(at.output..=at.output, outputs);
    }
    for part in parts.iter().rev() {
        s.steps.remove(part.step);
    }
    Ok(parts.len())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Scene, embeddings};
    use super::*;

    fn columns(ranges: &'static [Range<usize>]) -> Scene {
        Scene::new(3, move |b| {
            let x = embeddings(b);
            let y = b.linear("y", x, "w", 64).unwrap();
            let part = |(at, range): (usize, &Range<usize>)| {
                b.columns(&format!("part{at}"), y, range.clone()).unwrap()
            };
            ranges.iter().enumerate().map(part).collect()
        })
    }

    #[test]
    fn disjoint_columns_are_matrices_of_their_own() {
        let scene = columns(&[32..64, 0..16]);
        let steps = scene.apply(split_columns);
        assert_eq!(steps.len(), 1, "{steps:?}");
        let outputs = &steps[0].matmul().unwrap().outputs;
        let rows: Vec<usize> = outputs.iter().map(|o| o.matrix.n_rows()).collect();
        assert_eq!(rows, [32, 16]);
        assert_eq!(steps[0].writes, scene.outputs());
    }

    #[test]
    fn overlapping_columns_are_copied() {
        assert_eq!(columns(&[0..33, 32..64]).apply(split_columns).len(), 3);
    }
}
