//! Matrices that multiply the same rows become one step.

use kv_backend::BackendError;

use super::{FusedSteps, StepOp};

/// Moves the outputs of later multiplications of the same rows to the first one.
pub(super) fn share_input(s: &mut FusedSteps<'_>) -> Result<(), BackendError> {
    let mut at = 0;
    while at < s.steps.len() {
        let x = s.steps[at].matmul().and(s.steps[at].reads.first().copied());
        let mut later = at + 1;
        while x.is_some() && later < s.steps.len() {
            if s.steps[later].matmul().is_none() || s.steps[later].reads.first().copied() != x {
                later += 1;
                continue;
            }
            let other = s.steps.remove(later);
            let step = &mut s.steps[at];
            if let (Some(matmul), StepOp::MatMul(other_matmul)) = (step.matmul_mut(), other.op) {
                matmul.outputs.extend(other_matmul.outputs);
                step.writes.extend(other.writes);
            }
        }
        at += 1;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Scene, embeddings};
    use super::*;

    #[test]
    fn matrices_of_one_input_share_a_step_and_others_do_not() {
        let scene = Scene::new(3, |b| {
            let x = embeddings(b);
            let q = b.linear("q", x, "wq", 32).unwrap();
            let other = b.scale("other", x, 2.0).unwrap();
            let o = b.linear("o", other, "wo", 32).unwrap();
            let k = b.linear("k", x, "wk", 32).unwrap();
            vec![q, o, k]
        });
        let steps = scene.apply(share_input);
        let outputs: Vec<usize> = steps.iter().map(|s| s.writes.len()).collect();
        assert_eq!(outputs, [2, 1, 1], "{steps:?}");
        assert_eq!(steps[0].matmul().unwrap().outputs.len(), 2);
    }
}
