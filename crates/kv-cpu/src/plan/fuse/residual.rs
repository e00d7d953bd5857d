//! A sum that alone reads a product becomes the epilogue of its matrix.

use kv_backend::BackendError;

use super::{Epilogue, FusedSteps, OutputAt, StepOp};
use crate::plan::Elementwise;

/// Fuses each sum of a product and a value that exists before the multiplication.
pub(super) fn residual(s: &mut FusedSteps<'_>) -> Result<(), BackendError> {
    let mut step = 0;
    while step < s.steps.len() {
        let n_outputs = s.steps[step].matmul().map_or(0, |m| m.outputs.len());
        for output in 0..n_outputs {
            fuse_sum(s, OutputAt { step, output });
        }
        step += 1;
    }
    Ok(())
}

fn fuse_sum(s: &mut FusedSteps<'_>, at: OutputAt) -> Option<()> {
    let (product, _) = s.plain_output(at)?;
    let reader = s.next_reader(at.step, product)?;
    let sum = &s.steps[reader];
    let (StepOp::Elementwise(Elementwise::Add), &[a, b], &[out]) =
        (&sum.op, &*sum.reads, &*sum.writes)
    else {
        return None;
    };
    let other = if a == product { b } else { a };
    let fits =
        s.n_reads(product) == 1 && s.is_known(at.step, other) && s.shape(product) == s.shape(out);
    if !fits {
        return None;
    }
    let step = &mut s.steps[at.step];
    let read = step.reads.len();
    step.matmul_mut()?.outputs.get_mut(at.output)?.epilogue = Epilogue::Residual { read };
    *step.writes.get_mut(at.output)? = out;
    step.reads.push(other);
    s.steps.remove(reader);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Scene, embeddings};
    use super::*;

    #[test]
    fn a_sum_with_an_earlier_value_is_fused() {
        let scene = Scene::new(3, |b| {
            let x = embeddings(b);
            let y = b.linear("y", x, "w", 64).unwrap();
            vec![b.add("sum", y, x).unwrap()]
        });
        let steps = scene.apply(residual);
        assert_eq!(steps.len(), 1, "{steps:?}");
        assert_eq!(steps[0].reads.len(), 2);
        assert_eq!(steps[0].writes, scene.outputs());
    }

    #[test]
    fn a_product_that_is_read_twice_stays() {
        let scene = Scene::new(3, |b| {
            let x = embeddings(b);
            let y = b.linear("y", x, "w", 64).unwrap();
            vec![b.add("sum", y, x).unwrap(), y]
        });
        assert_eq!(scene.apply(residual).len(), 2);
    }

    #[test]
    fn a_sum_with_a_later_value_is_fused_to_the_later_matrix() {
        let scene = Scene::new(3, |b| {
            let x = embeddings(b);
            let y = b.linear("y", x, "w", 64).unwrap();
            let twice = b.scale("twice", x, 2.0).unwrap();
            let z = b.linear("z", twice, "v", 64).unwrap();
            vec![b.add("sum", y, z).unwrap()]
        });
        let steps = scene.apply(residual);
        assert_eq!(steps.len(), 3, "{steps:?}");
        assert_eq!(steps[0].reads.len(), 1);
        assert_eq!(steps[2].reads.len(), 2);
    }
}
