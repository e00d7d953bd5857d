//! What is left of a row above a threshold that its own mean and deviation give.
//!
//! Of values that are normally distributed, a known part is left, without sorting them
//! (You et al., arXiv 2506.06644; Gemma 3n). [`gaussian_top_k`] is the definition.

use crate::op::Op;
use crate::spec::{OpResult, OpSpec};
use crate::{Claim, GraphBuilder, GraphError, NodeId};

/// `x[i] = max(x[i] - (mean + deviations * deviation), 0)`, where the deviation is that of the
/// whole population: the root of the mean square of distances to the mean. Sums are of `f64`.
pub fn gaussian_top_k(x: &mut [f32], deviations: f32) {
    let n = x.len().max(1) as f64;
    let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
    let squares = x.iter().map(|&v| (f64::from(v) - mean).powi(2));
    let deviation = (squares.sum::<f64>() / n).sqrt();
    let threshold = (mean + f64::from(deviations) * deviation) as f32;
    x.iter_mut().for_each(|v| *v = (*v - threshold).max(0.0));
}

pub(crate) fn spec<'a>(deviations: f32) -> OpSpec<'a> {
    let spec = OpSpec::new("gaussian_top_k", 1, |given| match given.shape(0) {
        shape @ [_, _] => Ok(OpResult::f32(shape)),
        _ => Err("[n, dim]".into()),
    });
    spec.setting("deviations", deviations)
}

impl GraphBuilder {
    /// The rest of each row of `x [n, dim]` above so many deviations from its mean; see
    /// [`Op::GaussianTopK`].
    ///
    /// # Errors
    /// [`GraphError::Shape`] where `x` is no matrix.
    pub fn gaussian_top_k(
        &mut self,
        name: &str,
        x: NodeId,
        deviations: f32,
    ) -> Result<NodeId, GraphError> {
        let op = Op::GaussianTopK { deviations };
        self.push(name, op, &[x], Claim::default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_above_the_threshold_is_left() {
        // Mean 3, deviation sqrt(2).
        let mut x = [1.0, 2.0, 3.0, 4.0, 5.0];
        gaussian_top_k(&mut x, 0.5);
        let left = 2f32.sqrt() / 2.0;
        let wanted = [0.0, 0.0, 0.0, 1.0 - left, 2.0 - left];
        let near = x.iter().zip(wanted).all(|(x, w)| (x - w).abs() < 1e-6);
        assert!(near, "{x:?}");
        let mut equal = [2.0; 3];
        gaussian_top_k(&mut equal, 1.0);
        assert_eq!(equal, [0.0; 3]);
        let mut single = [4.0];
        gaussian_top_k(&mut single, 1.0);
        assert_eq!(single, [0.0]);
    }
}
