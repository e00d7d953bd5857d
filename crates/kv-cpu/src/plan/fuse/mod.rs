//! Fuses steps by a list of named peephole rules.
//!
//! Each rule scans all steps once, in the order of [`RULES`]. Invariant: no rule changes a bit of a
//! result: the same values are combined in the same order, only in fewer passes over memory. Does
//! not know buffers.

mod gate_epilogue;
mod prologue;
mod quantize_epilogue;
mod residual;
mod share_input;
mod split_columns;
#[cfg(test)]
pub(super) mod testing;

pub(crate) use gate_epilogue::MIN_GATE_EPILOGUE_ROWS;
use kv_backend::BackendError;
use kv_graph::Graph;

use super::lower::{LoweredGraph, Value};
use super::{Epilogue, MatMulOutput, Step, StepOp};
use crate::activations::ActivationKind;

/// A peephole rule.
type Rule = fn(&mut FusedSteps<'_>) -> Result<(), BackendError>;

/// All rules, in order: later ones see what earlier ones have merged.
const RULES: &[Rule] = &[
    share_input::share_input,
    residual::residual,
    split_columns::split_columns,
    gate_epilogue::gate_epilogue,
    quantize_epilogue::quantize_epilogue,
    prologue::prologue,
];

/// Applies all rules.
pub(super) fn fuse(graph: &Graph, lowered: &mut LoweredGraph) -> Result<(), BackendError> {
    let mut steps = FusedSteps {
        graph,
        steps: std::mem::take(&mut lowered.steps),
        outputs: &lowered.outputs,
    };
    RULES.iter().try_for_each(|rule| rule(&mut steps))?;
    lowered.steps = steps.steps;
    Ok(())
}

/// The steps of a graph, while they are fused.
struct FusedSteps<'a> {
    graph: &'a Graph,
    steps: Vec<Step<Value>>,
    outputs: &'a [Value],
}

/// One output of a matrix multiplication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct OutputAt {
    step: usize,
    output: usize,
}

impl FusedSteps<'_> {
    /// The number of reads of a value, by steps and by the caller.
    fn n_reads(&self, value: Value) -> usize {
        let reads = self.steps.iter().flat_map(|step| &step.reads);
        reads.chain(self.outputs).filter(|&&v| v == value).count()
    }

    /// The next step after `at` that reads a value.
    fn next_reader(&self, at: usize, value: Value) -> Option<usize> {
        let later = self.steps.iter().enumerate().skip(at + 1);
        let mut readers = later.filter(|(_, step)| step.reads.contains(&value));
        readers.next().map(|(at, _)| at)
    }

    /// True if a value exists before step `at`.
    fn is_known(&self, at: usize, value: Value) -> bool {
        match value {
            Value::Embeddings(_) => true,
            value => self.steps[..at].iter().any(|s| s.writes.contains(&value)),
        }
    }

    /// Rows and width of a value.
    fn shape(&self, value: Value) -> (usize, usize) {
        value.shape(self.graph)
    }

    /// The outputs of all matrix multiplications, from the first step on.
    fn matmul_outputs(&self) -> impl Iterator<Item = OutputAt> {
        let steps = self.steps.iter().enumerate();
        let outputs = steps.flat_map(|(step, s)| {
            let n = s.matmul().map_or(0, |matmul| matmul.outputs.len());
            (0..n).map(move |output| OutputAt { step, output })
        });
        outputs.collect::<Vec<_>>().into_iter()
    }

    /// An output without an epilogue, with the value that it writes.
    fn plain_output(&self, at: OutputAt) -> Option<(Value, &MatMulOutput)> {
        let step = self.steps.get(at.step)?;
        let output = step.matmul()?.outputs.get(at.output)?;
        let value = *step.writes.get(at.output)?;
        matches!(output.epilogue, Epilogue::None).then_some((value, output))
    }

    /// True if a multiplication alone reads its rows, all quantized.
    fn quantizes_alone(&self, at: usize) -> bool {
        let step = &self.steps[at];
        match (step.matmul(), step.reads.first()) {
            (Some(matmul), Some(&x)) => !matmul.takes(ActivationKind::F32) && self.n_reads(x) == 1,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use kv_block::BlockFormat;
    use kv_contract::in_blocks;

    use super::testing::{tiny_plan, tiny_plan_with};
    use crate::plan::{Elementwise, Plan, Prologue, Step, StepOp};
    use crate::values::Buf;

    #[test]
    fn matrices_of_one_input_and_residual_sums_are_one_step() {
        let plan = tiny_plan(3, 1);
        let matmuls = plan.steps.iter().filter_map(|step| {
            let outputs = &step.matmul()?.outputs;
            // The input, and one operand for each residual.
            Some((outputs.len(), step.reads.len() - 1))
        });
        let layer = [(3, 0), (1, 1), (2, 0), (1, 1)];
        let wanted = [&layer[..], &layer[..], &[(1, 0)]].concat();
        assert_eq!(matmuls.collect::<Vec<_>>(), wanted);
    }

    #[test]
    fn gates_of_many_rows_or_one_are_epilogues() {
        for (n_tokens, is_fused) in [(1, true), (2, false), (32, false), (33, true)] {
            let plan = tiny_plan(n_tokens, 1);
            let outputs = plan.steps.iter().filter_map(Step::matmul);
            let outputs = outputs.flat_map(|matmul| &matmul.outputs);
            let gates = outputs.filter(|output| output.gate().is_some()).count();
            assert_eq!(gates, if is_fused { 2 } else { 0 }, "{n_tokens} tokens");
            let is_gate = |step: &&Step<Buf>| match &step.op {
                StepOp::Elementwise(op) => matches!(op, Elementwise::Gate(_)),
                StepOp::MatMul(matmul) => matches!(matmul.prologue, Prologue::Gate { .. }),
                _ => false,
            };
            let others = plan.steps.iter().filter(is_gate).count();
            assert_eq!(others, if is_fused { 0 } else { 2 }, "{n_tokens} tokens");
        }
    }

    /// Norms and gates are prologues where rows are quantized, and steps where they are not.
    #[test]
    fn norms_and_gates_are_prologues_of_quantized_rows() {
        let count = |plan: &Plan| {
            let mut n = [0; 5];
            for step in &plan.steps {
                match &step.op {
                    StepOp::Norm(_) => n[0] += 1,
                    StepOp::MatMul(matmul) => match matmul.prologue {
                        Prologue::RmsNorm { .. } => n[1] += 1,
                        Prologue::Gate { .. } => n[2] += 1,
                        Prologue::None => n[3] += 1,
                        Prologue::Quantized => n[4] += 1,
                    },
                    _ => {}
                }
            }
            n
        };
        // Of two layers: norms before attention and feed-forward, gates before the last matrix, and
        // attention's result as it is; then the output.
        let in_q8_0 = |n_tokens| {
            count(&tiny_plan_with(n_tokens, 1, |plain| {
                in_blocks(&*plain, BlockFormat::Q8_0)
            }))
        };
        assert_eq!(in_q8_0(3), [0, 5, 2, 2, 0]);
        assert_eq!(count(&tiny_plan(3, 1)), [5, 0, 0, 9, 0]);
        // One row is gated with its products, and quantized there.
        assert_eq!(in_q8_0(1), [0, 5, 0, 2, 2]);
        assert_eq!(count(&tiny_plan(1, 1)), [5, 0, 0, 9, 0]);
    }
}
