//! What RWKV-4 computes and graphs have no operation for ([`ops`]): a mixture of each token with
//! the one before it ([`Shift`]), a gate ([`Gate`]) and a square ([`SquaredRelu`]); and [`Wkv`],
//! its average.
//!
//! Invariant: a row's result follows from the row and the state alone, so it is the same however a
//! sequence is cut up. Knows nothing of sequences, cells or devices.

use kv_core::backend::{CustomOp, CustomOps, CustomRows, CustomShape};

use super::wkv::Wkv;

/// All of them.
pub(super) fn ops() -> CustomOps {
    CustomOps::new()
        .with(Shift)
        .with(Gate)
        .with(SquaredRelu)
        .with(Wkv)
}

/// For `x [tokens, dim]` and shares `[dim]` each: for every share, `x share + before (1 - share)`,
/// concatenated, `[tokens, shares * dim]`. The state, `[dim]`, is the row before; zeros before the
/// first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shift;

impl Shift {
    pub(super) const NAME: &'static str = "rwkv.shift";
}

impl CustomOp for Shift {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn check(&self, node: &CustomShape<'_>) -> Result<(), String> {
        let shares = node.weights;
        match *node.widths {
            [dim]
                if dim > 0
                    && !shares.is_empty()
                    && shares.iter().all(|shape| **shape == [dim])
                    && node.width == shares.len() * dim
                    && node.n_state == dim =>
            {
                Ok(())
            }
            _ => Err(node.refusal("x, shares and a state as wide, to a row for each share")),
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
        let width = dim * rows.weights.len();
        for (x, out) in x.chunks_exact(dim).zip(out.chunks_exact_mut(width)) {
            for (out, share) in out.chunks_exact_mut(dim).zip(rows.weights) {
                let values = x.iter().zip(&*before).zip(share.iter());
                for (y, ((x, before), share)) in out.iter_mut().zip(values) {
                    *y = x * share + before * (1.0 - share);
                }
            }
            before.copy_from_slice(x);
        }
        Ok(())
    }
}

/// `x / (1 + e^-gate)` of two operands `(gate, x)` of one width.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gate;

impl Gate {
    pub(super) const NAME: &'static str = "rwkv.gate";
}

impl CustomOp for Gate {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn check(&self, node: &CustomShape<'_>) -> Result<(), String> {
        match *node.widths {
            [gate, x] if gate == x && x == node.width => Ok(()),
            _ => Err(node.refusal("a gate and as many values, to as many")),
        }
    }

    fn rows(&self, rows: &CustomRows<'_>, _: &mut [f32], out: &mut [f32]) -> Result<(), String> {
        let [gate, x] = rows.all_operands()?;
        for (y, (gate, x)) in out.iter_mut().zip(gate.iter().zip(x)) {
            *y = x / (1.0 + (-gate).exp());
        }
        Ok(())
    }
}

/// `max(x, 0)^2`
#[derive(Clone, Copy, Debug)]
pub(super) struct SquaredRelu;

impl SquaredRelu {
    pub(super) const NAME: &'static str = "rwkv.squared_relu";
}

impl CustomOp for SquaredRelu {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn check(&self, node: &CustomShape<'_>) -> Result<(), String> {
        match *node.widths {
            [x] if x == node.width => Ok(()),
            _ => Err(node.refusal("one operand, to as many values")),
        }
    }

    fn rows(&self, rows: &CustomRows<'_>, _: &mut [f32], out: &mut [f32]) -> Result<(), String> {
        let [x] = rows.all_operands()?;
        for (y, x) in out.iter_mut().zip(x) {
            // A value that is no number stays none.
            *y = if *x < 0.0 { 0.0 } else { x * x };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use kv_core::graph::CustomSpec;

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
        assert_eq!(Shift.check(&node(&[4], two, (8, 4))), Ok(()));
        for wrong in [
            node(&[4], two, (8, 3)),
            node(&[4], two, (4, 4)),
            node(&[4], &[], (0, 4)),
            node(&[0], &[&[0]], (0, 0)),
            node(&[4, 4], two, (8, 4)),
        ] {
            assert!(Shift.check(&wrong).is_err(), "{wrong:?}");
        }
        assert_eq!(Wkv.check(&node(&[4, 4], two, (4, 12))), Ok(()));
        for wrong in [
            node(&[4, 4], two, (4, 4)),
            node(&[4, 5], two, (4, 12)),
            node(&[4, 4], &[&[4]], (4, 12)),
            node(&[0, 0], &[&[0], &[0]], (0, 0)),
        ] {
            assert!(Wkv.check(&wrong).is_err(), "{wrong:?}");
        }
        assert_eq!(Gate.check(&node(&[4, 4], &[], (4, 0))), Ok(()));
        let error = Gate.check(&node(&[4, 3], &[], (4, 0))).unwrap_err();
        assert!(error.contains("[4, 3] values to 4"), "{error}");
        assert_eq!(SquaredRelu.check(&node(&[4], &[], (4, 0))), Ok(()));
        assert!(SquaredRelu.check(&node(&[4], &[], (5, 0))).is_err());
    }
}
