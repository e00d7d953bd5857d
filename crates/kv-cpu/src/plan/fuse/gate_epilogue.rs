//! A gate that alone reads two products of the same rows becomes the epilogue of the first matrix.

use kv_backend::BackendError;

use super::{Epilogue, FusedSteps, OutputAt, StepOp};
use crate::plan::{Elementwise, GateEpilogue};

/// Rows from which products leave the cache before a gate reads them. Fewer are gated where they
/// are quantized, but for a single one, which is quantized where it is gated.
pub(crate) const MIN_GATE_EPILOGUE_ROWS: usize = 33;

/// Fuses gates of one row and of many.
pub(super) fn gate_epilogue(s: &mut FusedSteps<'_>) -> Result<(), BackendError> {
    let mut at = 0;
    while at < s.steps.len() {
        if !fuse_gate(s, at) {
            at += 1;
        }
    }
    Ok(())
}

/// Fuses the gate at `at`, if it is one that can be fused: returns whether it was.
fn fuse_gate(s: &mut FusedSteps<'_>, at: usize) -> bool {
    let step = &s.steps[at];
    let (&StepOp::Elementwise(Elementwise::Gate(activation)), &[gate, up], &[out]) =
        (&step.op, &*step.reads, &*step.writes)
    else {
        return false;
    };
    let is_alone = |value| {
        let (rows, _) = s.shape(value);
        s.n_reads(value) == 1 && matches!(rows, 1 | MIN_GATE_EPILOGUE_ROWS..)
    };
    if !is_alone(gate) || !is_alone(up) {
        return false;
    }
    let output_of = |value| {
        let is_it = |at: &OutputAt| s.plain_output(*at).is_some_and(|(v, _)| v == value);
        s.matmul_outputs().find(is_it)
    };
    let (Some(gate_at), Some(up_at)) = (output_of(gate), output_of(up)) else {
        return false;
    };
    if gate_at.step != up_at.step {
        return false;
    }
    let step = &mut s.steps[gate_at.step];
    let Some(matmul) = step.matmul_mut() else {
        return false;
    };
    let up = &matmul.outputs[up_at.output];
    if matmul.outputs[gate_at.output].matrix.n_rows() != up.matrix.n_rows() {
        return false;
    }
    let epilogue = Epilogue::Gate(GateEpilogue {
        activation,
        up: up.matrix.clone(),
        up_bias: up.bias.clone(),
        quantize: None,
    });
    matmul.outputs[gate_at.output].epilogue = epilogue;
    matmul.outputs.remove(up_at.output);
    step.writes[gate_at.output] = out;
    step.writes.remove(up_at.output);
    s.steps.remove(at);
    true
}

#[cfg(test)]
mod tests {
    use super::super::share_input::share_input;
    use super::super::testing::{Scene, embeddings};
    use super::*;
    use kv_graph::Activation;

    #[test]
    fn the_second_product_moves_into_the_epilogue_of_the_first() {
        for (n_tokens, n_steps) in [(1, 1), (2, 2), (33, 1)] {
            let scene = Scene::new(n_tokens, |b| {
                let x = embeddings(b);
                let up = b.linear("up", x, "u", 64).unwrap();
                let gate = b.linear("gate", x, "g", 64).unwrap();
                vec![b.gate("y", Activation::Silu, gate, up).unwrap()]
            });
            let steps = scene.apply(|s| share_input(s).and_then(|()| gate_epilogue(s)));
            assert_eq!(steps.len(), n_steps, "{n_tokens} tokens: {steps:?}");
            if n_steps == 1 {
                let outputs = &steps[0].matmul().unwrap().outputs;
                assert!(matches!(&**outputs, [output] if output.gate().is_some()));
                assert_eq!(steps[0].writes, scene.outputs());
            }
        }
    }
}
