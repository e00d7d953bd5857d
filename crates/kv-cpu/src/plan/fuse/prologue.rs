//! A norm or gate of rows that only quantized matrices read becomes the prologue of their step.

use kv_backend::BackendError;

use super::{FusedSteps, StepOp};
use crate::plan::{Elementwise, NormOp, Prologue};

/// Fuses the step before each multiplication, if it makes the rows one by one.
pub(super) fn prologue(s: &mut FusedSteps<'_>) -> Result<(), BackendError> {
    let mut at = 1;
    while at < s.steps.len() {
        match fuse_step_before(s, at) {
            // The multiplication is where that step was.
            Some(()) => {}
            None => at += 1,
        }
    }
    Ok(())
}

fn fuse_step_before(s: &mut FusedSteps<'_>, at: usize) -> Option<()> {
    let matmul = s.steps[at].matmul()?;
    if !matches!(matmul.prologue, Prologue::None) || !s.quantizes_alone(at) {
        return None;
    }
    let x = *s.steps[at].reads.first()?;
    let before = s.steps.get(at.checked_sub(1)?)?;
    if before.writes != [x] {
        return None;
    }
    let (_, width) = s.shape(x);
    let read = s.steps[at].reads.len();
    let prologue = match &before.op {
        StepOp::Norm(NormOp::Rms { gain, dim, eps }) if *dim == width && gain.len() == width => {
            Prologue::RmsNorm {
                gain: gain.clone(),
                eps: *eps,
            }
        }
        &StepOp::Elementwise(Elementwise::Gate(activation)) => Prologue::Gate { activation, read },
        _ => return None,
    };
    let operands = before.reads.clone();
    let (&first, others) = operands.split_first()?;
    let step = &mut s.steps[at];
    *step.reads.first_mut()? = first;
    step.reads.extend(others);
    step.matmul_mut()?.prologue = prologue;
    s.steps.remove(at - 1);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Scene, embeddings};
    use super::*;
    use kv_block::BlockFormat;

    #[test]
    fn a_norm_before_quantized_matrices_is_their_prologue() {
        let scene = |n_readers: usize| {
            Scene::new(3, move |b| {
                let x = embeddings(b);
                let normed = b.rms_norm("norm", x, "gain", 1e-5).unwrap();
                let y = b.linear("y", normed, "w", 64).unwrap();
                [y, normed][..n_readers].to_vec()
            })
        };
        let n_steps = |scene: Scene| scene.apply(prologue).len();
        assert_eq!(n_steps(scene(1).in_format(BlockFormat::Q8_0)), 1);
        assert_eq!(
            n_steps(scene(2).in_format(BlockFormat::Q8_0)),
            2,
            "read elsewhere"
        );
        assert_eq!(n_steps(scene(1)), 2, "float weights");
    }
}
