//! One gated row that only quantized matrices of one kind read is quantized where it is gated.

use kv_backend::BackendError;

use super::FusedSteps;
use crate::plan::{Epilogue, Prologue};

/// Lets the step before quantize the rows of a multiplication.
pub(super) fn quantize_epilogue(s: &mut FusedSteps<'_>) -> Result<(), BackendError> {
    for at in 1..s.steps.len() {
        fuse_quantization(s, at);
    }
    Ok(())
}

fn fuse_quantization(s: &mut FusedSteps<'_>, at: usize) -> Option<()> {
    let step = &s.steps[at];
    let (matmul, x) = (step.matmul()?, *step.reads.first()?);
    let kind = matmul.matrices().next()?.activation_kind();
    let of_one_kind = matmul.matrices().all(|m| m.activation_kind() == kind);
    if !of_one_kind || s.shape(x).0 != 1 || !s.quantizes_alone(at) {
        return None;
    }
    let before = &mut s.steps[at - 1];
    let output = before.writes.iter().position(|&value| value == x)?;
    let matmul = before.matmul_mut()?;
    // There is memory for one such row: no step both reads and writes one.
    if matches!(matmul.prologue, Prologue::Quantized) {
        return None;
    }
    let Epilogue::Gate(gate) = &mut matmul.outputs.get_mut(output)?.epilogue else {
        return None;
    };
    gate.quantize = Some(kind);
    s.steps[at].matmul_mut()?.prologue = Prologue::Quantized;
    Some(())
}

#[cfg(test)]
mod tests {
    use super::super::gate_epilogue::gate_epilogue;
    use super::super::share_input::share_input;
    use super::super::testing::{Scene, embeddings};
    use super::*;
    use kv_block::BlockFormat;
    use kv_graph::Activation;

    #[test]
    fn a_gated_row_of_quantized_matrices_is_quantized_at_once() {
        let scene = |n_tokens| {
            Scene::new(n_tokens, |b| {
                let x = embeddings(b);
                let gate = b.linear("gate", x, "g", 64).unwrap();
                let up = b.linear("up", x, "u", 64).unwrap();
                let y = b.gate("y", Activation::Silu, gate, up).unwrap();
                vec![b.linear("down", y, "d", 64).unwrap()]
            })
        };
        let rules = |s: &mut FusedSteps<'_>| {
            share_input(s)?;
            gate_epilogue(s)?;
            quantize_epilogue(s)
        };
        let is_quantized = |scene: Scene| {
            let steps = scene.apply(rules);
            let last = steps.last().unwrap().matmul().unwrap();
            matches!(last.prologue, Prologue::Quantized)
        };
        assert!(is_quantized(scene(1).in_format(BlockFormat::Q8_0)));
        assert!(!is_quantized(scene(33).in_format(BlockFormat::Q8_0)));
        assert!(!is_quantized(scene(1)), "float weights");
    }
}
