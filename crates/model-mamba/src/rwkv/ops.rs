//! How RWKV mixes each token with the one before it, which graphs have no operation for:
//! [`PreviousRows`] and [`Lerp`].
//!
//! Invariant: a row's result follows from the row and the state alone, so it is the same however a
//! sequence is cut up. Knows nothing of sequences, cells or devices.

use kv_backend::{CustomOp, CustomRows, CustomShape};

/// For `x [tokens, dim]`: the rows before each, `[tokens, dim]`. The state, `[dim]`, is the row
/// before the first; zeros in the beginning.
#[derive(Clone, Copy, Debug)]
pub(super) struct PreviousRows;

impl PreviousRows {
    pub(super) const NAME: &'static str = "rwkv.before";
}

impl CustomOp for PreviousRows {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn check(&self, node: &CustomShape<'_>) -> Result<(), String> {
        match *node.widths {
            [dim]
                if dim > 0
                    && (node.width, node.n_state) == (dim, dim)
                    && node.weights.is_empty() =>
            {
                Ok(())
            }
            _ => Err(node.refusal("x, and a result and a state as wide")),
        }
    }

    fn rows(
        &self,
        rows: &CustomRows<'_>,
        before: &mut [f32],
        out: &mut [f32],
    ) -> Result<(), String> {
        let [x] = rows.all_operands()?;
        let dim = before.len();
        for (x, out) in x.chunks_exact(dim).zip(out.chunks_exact_mut(dim)) {
            out.copy_from_slice(before);
            before.copy_from_slice(x);
        }
        Ok(())
    }
}

/// For `x` and `before`, `[tokens, dim]` each, and weights that are shares one behind the other,
/// `[dim]` each: for every share, `x (1 - share) + before share`, concatenated. A third operand,
/// `[tokens, shares * dim]`, is added to the shares.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lerp;

impl Lerp {
    pub(super) const NAME: &'static str = "rwkv.lerp";
}

impl CustomOp for Lerp {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn check(&self, node: &CustomShape<'_>) -> Result<(), String> {
        let lens = node
            .weights
            .iter()
            .map(|shape| shape.iter().product::<usize>());
        match *node.widths {
            [dim, before, ref more @ ..]
                if dim > 0
                    && before == dim
                    && node.width > 0
                    && node.width.is_multiple_of(dim)
                    && lens.sum::<usize>() == node.width
                    && (more.is_empty() || *more == [node.width])
                    && node.n_state == 0 =>
            {
                Ok(())
            }
            _ => Err(node.refusal(
                "x, as wide the row before, shares for a result of several such rows, and it may \
                 be as many values to add to the shares",
            )),
        }
    }

    fn rows(&self, rows: &CustomRows<'_>, _: &mut [f32], out: &mut [f32]) -> Result<(), String> {
        let [x, before, more @ ..] = rows.operands else {
            return Err(format!("{} operands, not 2 or 3", rows.operands.len()));
        };
        let n = rows.n_rows.max(1);
        let (dim, width) = (x.len() / n, out.len() / n);
        if dim == 0 {
            return Ok(());
        }
        let added = more.first();
        let tokens = x.chunks_exact(dim).zip(before.chunks_exact(dim));
        for (at, ((x, before), out)) in tokens.zip(out.chunks_exact_mut(width)).enumerate() {
            let shares = rows.weights.iter().flat_map(|shares| shares.iter());
            for (i, (y, share)) in out.iter_mut().zip(shares).enumerate() {
                let share = match added {
                    Some(added) => share + added[at * width + i],
                    None => *share,
                };
                let (x, before) = (x[i % dim], before[i % dim]);
                *y = x * (1.0 - share) + before * share;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Arc;

    use kv_graph::CustomSpec;

    use super::*;

    #[test]
    fn nodes_of_other_sizes_are_refused_with_the_numbers() {
        let spec = CustomSpec::new("any");
        let node = |widths, weights, (width, n_state)| CustomShape {
            spec: &spec,
            widths,
            weights,
            width,
            n_state,
        };
        let two: &[&[usize]] = &[&[4], &[4]];
        assert_eq!(PreviousRows.check(&node(&[4], &[], (4, 4))), Ok(()));
        for wrong in [
            node(&[4], &[], (4, 3)),
            node(&[4], &[], (5, 4)),
            node(&[4], two, (4, 4)),
        ] {
            let error = PreviousRows.check(&wrong).unwrap_err();
            assert!(error.contains("wanted: x, and a result"), "{error}");
        }
        let fused: &[&[usize]] = &[&[2, 1, 1, 4]];
        for right in [
            node(&[4, 4], two, (8, 0)),
            node(&[4, 4, 8], two, (8, 0)),
            node(&[4, 4, 8], fused, (8, 0)),
        ] {
            assert_eq!(Lerp.check(&right), Ok(()));
        }
        for wrong in [
            node(&[4, 4], two, (4, 0)),
            node(&[4, 3], two, (8, 0)),
            node(&[4, 4, 4], two, (8, 0)),
            node(&[4, 4, 8, 8], two, (8, 0)),
            node(&[4, 4], two, (8, 4)),
            node(&[3, 3], two, (8, 0)),
        ] {
            let error = Lerp.check(&wrong).unwrap_err();
            assert!(error.contains("wanted: x, as wide"), "{error}");
        }
    }

    #[test]
    fn shares_are_what_comes_from_the_row_before() {
        let (x, before) = ([1.0f32, 2.0, 5.0, 6.0], [3.0f32, 4.0, 1.0, 2.0]);
        let added = [0.5f32, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0];
        let shares: [Arc<[f32]>; 2] = [[0.0, 1.0].into(), [0.5, 0.25].into()];
        let spec = CustomSpec::new(Lerp::NAME);
        let mut rows = CustomRows {
            spec: &spec,
            n_rows: 2,
            operands: &[&x, &before],
            weights: &shares,
        };
        let mut out = [0.0; 8];
        Lerp.rows(&rows, &mut [], &mut out).unwrap();
        assert_eq!(out, [1.0, 4.0, 2.0, 2.5, 5.0, 2.0, 3.0, 5.0]);
        let operands: &[&[f32]] = &[&x, &before, &added];
        rows.operands = operands;
        Lerp.rows(&rows, &mut [], &mut out).unwrap();
        assert_eq!(out, [2.0, 4.0, 2.0, 2.5, 5.0, 2.0, 3.0, 1.0]);
    }
}
