//! Every value gets a buffer: in place where its operand dies, in the caller's memory where it is
//! an output, else in the arena for as long as somebody reads it.

use std::collections::HashMap;

use kv_core::graph::Graph;

use super::resolve::{Resolved, Value};
use super::{Buf, Place, Plan, Step};
use crate::arena::{Arena, Slot};

struct Placer<'a> {
    graph: &'a Graph,
    /// The first output that a value is.
    outputs: HashMap<Value, usize>,
    /// The last step that reads a value.
    last_use: HashMap<Value, usize>,
    places: HashMap<Value, Place>,
    slots: HashMap<Value, Slot>,
    arena: Arena,
}

pub(super) fn place(graph: &Graph, resolved: Resolved) -> Plan {
    let Resolved {
        steps,
        ropes,
        needs,
        outputs,
    } = resolved;
    let mut placer = Placer {
        graph,
        outputs: HashMap::new(),
        last_use: HashMap::new(),
        places: HashMap::new(),
        slots: HashMap::new(),
        arena: Arena::default(),
    };
    for (at, output) in outputs.iter().enumerate() {
        match output {
            // The caller's embeddings are copied at the end.
            Value::Embeddings(_) => {}
            Value::Node(_) => {
                placer.outputs.entry(*output).or_insert(at);
            }
        }
    }
    for (at, step) in steps.iter().enumerate() {
        for value in step.values().0 {
            placer.last_use.insert(value, at);
        }
    }
    for (at, step) in steps.iter().enumerate() {
        placer.step(at, step);
    }
    let mut placed: Vec<Step<Buf>> = steps
        .into_iter()
        .map(|step| step.map(&mut |_, v| placer.buf(v)))
        .collect();
    for (at, output) in outputs.iter().enumerate() {
        let x = placer.buf(*output);
        let out = Buf {
            place: Place::Output(at),
            ..x
        };
        if x != out {
            placed.push(Step::Copy { x, out });
        }
    }
    Plan {
        n_tokens: graph.shape().n_tokens,
        n_outputs: graph.shape().n_outputs,
        steps: placed,
        ropes,
        needs,
        output_lens: outputs.iter().map(|v| placer.buf(*v).len()).collect(),
        arena_len: placer.arena.len(),
        total_len: placer.arena.total(),
    }
}

impl Placer<'_> {
    fn step(&mut self, at: usize, step: &Step<Value>) {
        let (reads, writes) = step.values();
        for &out in &writes {
            if !self.take_over(at, step, out) {
                self.allocate(out);
            }
        }
        for value in reads.into_iter().chain(writes) {
            if self.last_use.get(&value).is_none_or(|&last| last <= at)
                && let Some(slot) = self.slots.remove(&value)
            {
                self.arena.give_back(slot);
            }
        }
    }

    /// Lets `out` have the buffer of an operand that dies here, where the step can work in place.
    fn take_over(&mut self, at: usize, step: &Step<Value>, out: Value) -> bool {
        let Step::Change { x, change, .. } = step else {
            return false;
        };
        let dies = self.last_use.get(x).is_none_or(|&last| last <= at);
        if !dies || change.other() == Some(*x) || self.outputs.contains_key(&out) {
            return false;
        }
        let Some(slot) = self.slots.remove(x) else {
            return false;
        };
        self.slots.insert(out, slot);
        self.places.insert(out, Place::Arena(slot.start));
        true
    }

    fn allocate(&mut self, value: Value) {
        if let Some(&output) = self.outputs.get(&value) {
            self.places.insert(value, Place::Output(output));
            return;
        }
        let slot = self.arena.take(value.len(self.graph));
        self.slots.insert(value, slot);
        self.places.insert(value, Place::Arena(slot.start));
    }

    fn buf(&self, value: Value) -> Buf {
        let (rows, width) = value.shape(self.graph);
        let place = match value {
            Value::Embeddings(_) => Place::Embeddings,
            // Every value that a step names was written by an earlier one (`resolve` checks it).
            Value::Node(_) => self.places.get(&value).copied().unwrap_or(Place::Arena(0)),
        };
        Buf { place, rows, width }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kv_contract::{in_blocks, tiny_llama, tiny_weights};
    use kv_core::KvType;
    use kv_core::backend::CustomOps;
    use kv_core::block::BlockFormat;
    use kv_core::graph::GraphShape;
    use kv_core::layers::{AttentionMemory, LayerMap, LayerMemory, RowLayout};
    use kv_core::weights::WeightSource;

    use super::*;
    use crate::activations::ActivationKind;
    use crate::isa::Isa;
    use crate::kernels::Kernels;
    use crate::plan::{Before, Change};
    use crate::repack::RepackChoice;
    use crate::weights::{ActivationChoice, CpuWeights};

    fn plan(n_tokens: usize, n_outputs: usize) -> Plan {
        plan_with(n_tokens, n_outputs, |weights| weights)
    }

    fn plan_with(
        n_tokens: usize,
        n_outputs: usize,
        change: impl Fn(Arc<dyn WeightSource>) -> Arc<dyn WeightSource>,
    ) -> Plan {
        let graph = tiny_llama(GraphShape {
            n_tokens,
            n_outputs,
        });
        let window = kv_core::Window::Full;
        let memory = AttentionMemory {
            kv_heads: 2,
            k_dim: 16,
            v_dim: 16,
            window,
        };
        let map = LayerMap::new(vec![LayerMemory::Attention(memory); 2]);
        let layout = RowLayout::new(&map, &[16], KvType::F16).unwrap();
        let weights = CpuWeights::new(
            change(tiny_weights(&graph, 1)),
            (
                ActivationChoice::Always(ActivationKind::Int8),
                RepackChoice::Auto,
            ),
            Kernels::for_isa(Isa::Scalar).unwrap(),
            CustomOps::new(),
        );
        Plan::new(&graph, &weights, &layout).unwrap()
    }

    fn range(buf: &Buf) -> Option<(usize, usize)> {
        match buf.place {
            Place::Arena(start) => Some((start, start + buf.len())),
            Place::Output(_) | Place::Embeddings => None,
        }
    }

    #[test]
    fn no_buffer_is_overwritten_before_its_last_reader() {
        for (n_tokens, n_outputs) in [(1, 1), (7, 2), (5, 0)] {
            let plan = plan(n_tokens, n_outputs);
            // Whoever wrote a value of the arena last: what is read must still be whole.
            let mut writer: Vec<Option<(usize, Buf)>> = vec![None; plan.arena_len];
            for (at, step) in plan.steps.iter().enumerate() {
                let (reads, writes) = step.values();
                for buf in &reads {
                    let Some((start, end)) = range(buf) else {
                        continue;
                    };
                    let mut owners = writer[start..end].iter();
                    let first = owners.next().copied().flatten();
                    assert!(
                        start == end || first.is_some(),
                        "step {at} reads what nobody wrote"
                    );
                    assert!(owners.all(|o| *o == first), "step {at} reads a torn buffer");
                    if let Some((_, owner)) = first {
                        assert_eq!(owner.len(), buf.len(), "step {at} reads another's buffer");
                    }
                }
                for buf in &writes {
                    let Some((start, end)) = range(buf) else {
                        continue;
                    };
                    assert!(end <= plan.arena_len);
                    writer[start..end].fill(Some((at, *buf)));
                    let overlaps = |r: &&Buf| range(r).is_some_and(|(s, e)| s < end && start < e);
                    let in_place = matches!(step, Step::Change { x, .. } if x.place == buf.place);
                    let apart = reads.iter().filter(overlaps).count();
                    assert!(
                        apart == usize::from(in_place && start < end),
                        "step {at}: {step:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_arena_is_smaller_than_its_buffers_together() {
        let plan = plan(16, 2);
        assert!(
            plan.arena_len * 3 < plan.total_len,
            "{} of {}",
            plan.arena_len,
            plan.total_len
        );
    }

    #[test]
    fn matrices_of_one_input_and_residual_sums_are_one_step() {
        let linears: Vec<(usize, usize)> = plan(3, 1)
            .steps
            .iter()
            .filter_map(|step| match step {
                Step::Linear { products, .. } => {
                    let sums = products.iter().filter(|p| p.residual.is_some()).count();
                    Some((products.len(), sums))
                }
                _ => None,
            })
            .collect();
        let layer = [(3, 0), (1, 1), (2, 0), (1, 1)];
        assert_eq!(linears, [&layer[..], &layer[..], &[(1, 0)]].concat());
    }

    /// Where many rows are gated, or one, the two products that take part are computed together, and only the result is put
    /// down.
    #[test]
    fn gates_of_many_rows_or_one_are_computed_with_their_products() {
        for (n_tokens, is_fused) in [(1, true), (2, false), (32, false), (33, true)] {
            let plan = plan(n_tokens, 1);
            let products = plan.steps.iter().filter_map(|step| match step {
                Step::Linear { products, .. } => Some(products),
                _ => None,
            });
            let gates = products.flatten().filter(|p| p.gates.is_some()).count();
            assert_eq!(gates, if is_fused { 2 } else { 0 }, "{n_tokens} tokens");
            let is_gate = |step: &Step<Buf>| match step {
                Step::Change { change, .. } => matches!(change, Change::Gate(..)),
                Step::Linear { before, .. } => matches!(before, Before::Gate(..)),
                _ => false,
            };
            let others = plan.steps.iter().filter(|step| is_gate(step)).count();
            assert_eq!(others, if is_fused { 0 } else { 2 }, "{n_tokens} tokens");
        }
    }

    /// Norms and gates become part of the matrices after them where rows are rounded, and steps of their
    /// own where somebody reads them as they are.
    #[test]
    fn norms_and_gates_are_done_while_rows_are_rounded() {
        let count = |plan: &Plan| {
            let mut n = [0; 5];
            for step in &plan.steps {
                match step {
                    Step::RmsNorm { .. } => n[0] += 1,
                    Step::Linear { before, .. } => match before {
                        Before::RmsNorm { .. } => n[1] += 1,
                        Before::Gate(..) => n[2] += 1,
                        Before::Nothing => n[3] += 1,
                        Before::Rounded => n[4] += 1,
                    },
                    _ => {}
                }
            }
            n
        };
        // Of two layers: norms before attention and feed-forward, gates before the last matrix, and
        // attention's result as it is; then the output.
        let in_q8_0 = |n_tokens| {
            count(&plan_with(n_tokens, 1, |plain| {
                in_blocks(&*plain, BlockFormat::Q8_0)
            }))
        };
        assert_eq!(in_q8_0(3), [0, 5, 2, 2, 0]);
        assert_eq!(count(&plan(3, 1)), [5, 0, 0, 9, 0]);
        // One row is gated with its products, and rounded there.
        assert_eq!(in_q8_0(1), [0, 5, 0, 2, 2]);
        assert_eq!(count(&plan(1, 1)), [5, 0, 0, 9, 0]);
    }
}
