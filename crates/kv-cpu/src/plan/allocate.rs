//! Allocates a buffer for every value: that of its operand where the operand is dead after an
//! elementwise step, the caller's where it is an output, else one in the arena for as long as a
//! step reads it.

use std::collections::HashMap;

use kv_graph::{Graph, RowCount};

use super::lower::{LoweredGraph, Value};
use super::{Plan, RowsOp, Step, StepOp};
use crate::arena::{Arena, Slot};
use crate::values::{Buf, BufLoc};

struct Allocator<'a> {
    graph: &'a Graph,
    /// By node; `None` where the plan is for the graph's shape alone.
    row_counts: Option<Vec<RowCount>>,
    /// The first output that a value is.
    outputs: HashMap<Value, usize>,
    /// The last step that reads a value.
    last_use: HashMap<Value, usize>,
    locations: HashMap<Value, BufLoc>,
    slots: HashMap<Value, Slot>,
    arena: Arena,
}

/// The plan of these steps.
pub(super) fn allocate(graph: &Graph, lowered: LoweredGraph) -> Plan {
    let LoweredGraph {
        steps,
        ropes,
        needs,
        outputs,
    } = lowered;
    let mut allocator = Allocator {
        graph,
        row_counts: graph.row_counts(),
        outputs: HashMap::new(),
        last_use: HashMap::new(),
        locations: HashMap::new(),
        slots: HashMap::new(),
        arena: Arena::default(),
    };
    for (at, output) in outputs.iter().enumerate() {
        match output {
            // The caller's embeddings are copied at the end.
            Value::Embeddings(_) => {}
            Value::Node(_) => {
                allocator.outputs.entry(*output).or_insert(at);
            }
        }
    }
    for (at, step) in steps.iter().enumerate() {
        for &value in &step.reads {
            allocator.last_use.insert(value, at);
        }
    }
    for (at, step) in steps.iter().enumerate() {
        allocator.step(at, step);
    }
    let mut allocated: Vec<Step<Buf>> = steps
        .into_iter()
        .map(|step| step.map(|v| allocator.buf(v)))
        .collect();
    for (at, output) in outputs.iter().enumerate() {
        let x = allocator.buf(*output);
        let out = Buf {
            loc: BufLoc::Output(at),
            ..x
        };
        if x != out {
            allocated.push(Step {
                op: StepOp::Rows(RowsOp::Copy),
                reads: vec![x],
                writes: vec![out],
            });
        }
    }
    Plan {
        capacity: graph.shape(),
        run: graph.shape(),
        takes_fewer: allocator.row_counts.is_some(),
        steps: allocated,
        ropes,
        needs,
        outputs: outputs.iter().map(|v| allocator.buf(*v)).collect(),
        arena_len: allocator.arena.len(),
        total_len: allocator.arena.total(),
    }
}

impl Allocator<'_> {
    fn step(&mut self, at: usize, step: &Step<Value>) {
        for &out in &step.writes {
            if !self.reuse_operand(at, step, out) {
                self.allocate(out);
            }
        }
        for value in step.reads.iter().chain(&step.writes) {
            if self.last_use.get(value).is_none_or(|&last| last <= at)
                && let Some(slot) = self.slots.remove(value)
            {
                self.arena.give_back(slot);
            }
        }
    }

    /// Gives `out` the buffer of the first operand, where the step can work in place and is the
    /// operand's last use.
    fn reuse_operand(&mut self, at: usize, step: &Step<Value>, out: Value) -> bool {
        let (StepOp::Elementwise(_), [x, others @ ..]) = (&step.op, &*step.reads) else {
            return false;
        };
        let dies = self.last_use.get(x).is_none_or(|&last| last <= at);
        if !dies || others.contains(x) || self.outputs.contains_key(&out) {
            return false;
        }
        let Some(slot) = self.slots.remove(x) else {
            return false;
        };
        self.slots.insert(out, slot);
        self.locations.insert(out, BufLoc::Arena(slot.start));
        true
    }

    fn allocate(&mut self, value: Value) {
        if let Some(&output) = self.outputs.get(&value) {
            self.locations.insert(value, BufLoc::Output(output));
            return;
        }
        let slot = self.arena.take(value.len(self.graph));
        self.slots.insert(value, slot);
        self.locations.insert(value, BufLoc::Arena(slot.start));
    }

    fn buf(&self, value: Value) -> Buf {
        let (rows, width) = value.shape(self.graph);
        let known = self.locations.get(&value).copied();
        let loc = match value {
            Value::Embeddings(_) => BufLoc::Embeddings,
            // An earlier step wrote every value that a step reads (`lower` checks it).
            Value::Node(_) => known.unwrap_or(BufLoc::Arena(0)),
        };
        let counts = self.row_counts.as_ref();
        let count = counts.and_then(|counts| counts.get(value.id().as_usize()));
        Buf {
            loc,
            count: count.copied().unwrap_or(RowCount::Tokens),
            rows,
            width,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::fuse::testing::tiny_plan as plan;

    fn range(buf: &Buf) -> Option<(usize, usize)> {
        match buf.loc {
            BufLoc::Arena(start) => Some((start, start + buf.len())),
            BufLoc::Output(_) | BufLoc::Embeddings => None,
        }
    }

    #[test]
    fn no_buffer_is_overwritten_before_its_last_reader() {
        for (n_tokens, n_outputs) in [(1, 1), (7, 2), (5, 0)] {
            let plan = plan(n_tokens, n_outputs);
            // The step that wrote a value of the arena last: what is read must still be whole.
            let mut writer: Vec<Option<(usize, Buf)>> = vec![None; plan.arena_len];
            for (at, step) in plan.steps.iter().enumerate() {
                let (reads, writes) = (&step.reads, &step.writes);
                for buf in reads {
                    let Some((start, end)) = range(buf) else {
                        continue;
                    };
                    let mut owners = writer[start..end].iter();
                    let first = owners.next().copied().flatten();
                    assert!(
                        start == end || first.is_some(),
                        "step {at} reads what no step wrote"
                    );
                    assert!(owners.all(|o| *o == first), "step {at} reads a torn buffer");
                    if let Some((_, owner)) = first {
                        assert_eq!(owner.len(), buf.len(), "step {at} reads another's buffer");
                    }
                }
                for buf in writes {
                    let Some((start, end)) = range(buf) else {
                        continue;
                    };
                    assert!(end <= plan.arena_len);
                    writer[start..end].fill(Some((at, *buf)));
                    let overlaps = |r: &&Buf| range(r).is_some_and(|(s, e)| s < end && start < e);
                    let in_place =
                        matches!(&step.op, StepOp::Elementwise(_) if reads[0].loc == buf.loc);
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
}
