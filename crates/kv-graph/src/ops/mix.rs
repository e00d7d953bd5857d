//! Linear combinations of the parts of a row, with coefficients of that row.
//!
//! AltUp (Baykal et al., arXiv 2301.13310) predicts and corrects its streams so. [`mix`] is the
//! definition. Does not know where coefficients come from.

use crate::op::Op;
use crate::spec::{OpResult, OpSpec};
use crate::{Claim, GraphBuilder, GraphError, NodeId};

/// `out[i] = sum_j coefficients[i, j] x[j]` of one row: `x [inputs, dim]`,
/// `coefficients [outputs, inputs]`, `out [outputs, dim]`. Sums run over ascending `j`.
pub fn mix(x: &[f32], coefficients: &[f32], dim: usize, out: &mut [f32]) {
    let dim = dim.max(1);
    let n_inputs = (x.len() / dim).max(1);
    for (out, coefficients) in out
        .chunks_exact_mut(dim)
        .zip(coefficients.chunks_exact(n_inputs))
    {
        out.fill(0.0);
        for (x, coefficient) in x.chunks_exact(dim).zip(coefficients) {
            let pairs = out.iter_mut().zip(x);
            pairs.for_each(|(out, x)| *out += coefficient * x);
        }
    }
}

pub(crate) fn spec<'a>() -> OpSpec<'a> {
    OpSpec::new("mix", 2, |given| match given.shapes() {
        [&[n, inputs, dim], &[n_rows, outputs, of]] if n == n_rows && inputs == of && dim > 0 => {
            Ok(OpResult::f32([n, outputs, dim]))
        }
        _ => Err("[n, inputs, dim], [n, outputs, inputs]".into()),
    })
}

impl GraphBuilder {
    /// Linear combinations of the parts of each row: `x [n, inputs, dim]` with the coefficients
    /// `[n, outputs, inputs]` gives `[n, outputs, dim]`; see [`Op::Mix`].
    ///
    /// # Errors
    /// [`GraphError::Shape`] where there are other coefficients than that.
    pub fn mix(
        &mut self,
        name: &str,
        x: NodeId,
        coefficients: NodeId,
    ) -> Result<NodeId, GraphError> {
        self.push(name, Op::Mix, &[x, coefficients], Claim::default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Graph, GraphShape, Input};

    #[test]
    fn parts_are_combined() {
        let mut out = [7.0; 4];
        mix(&[1.0, 2.0, 10.0, 20.0], &[1.0, 0.5, 0.0, -1.0], 2, &mut out);
        assert_eq!(out, [6.0, 12.0, -10.0, -20.0]);
        // A dot product.
        let mut dot = [0.0];
        mix(&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0], 1, &mut dot);
        assert_eq!(dot, [32.0]);
        // Multiples of one part.
        mix(&[1.0, 2.0], &[3.0, -1.0], 2, &mut out);
        assert_eq!(out, [3.0, 6.0, -1.0, -2.0]);
    }

    #[test]
    fn coefficients_fit_their_parts() {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 1,
        });
        let x = b.input(Input::Embeddings { dim: 12 }).unwrap();
        let parts = b.reshape("parts", x, &[3, 2, 6]).unwrap();
        let four = b.columns("four", x, 0..4).unwrap();
        let square = b.reshape("square", four, &[3, 2, 2]).unwrap();
        let y = b.mix("y", parts, square).unwrap();
        assert_eq!(b.shape_of(y), [3, 2, 6]);
        for refused in [b.mix("wide", parts, parts), b.mix("flat", x, square)] {
            assert!(
                matches!(refused, Err(GraphError::Shape { .. })),
                "{refused:?}"
            );
        }
        let graph = b.finish(&[y]).unwrap();
        assert!(graph.text().to_string().contains("= mix(%1, %3)"));
        assert_eq!(Graph::from_json(&graph.to_json().unwrap()), Ok(graph));
    }
}
