//! Custom operations: values come to the host, are computed there and go back.
//!
//! Invariant: only the state rows that groups store in change, and only where the operation did not
//! fail. Knows nothing of what is computed.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use kv_backend::GraphInputs;
use kv_backend::{BackendError, CustomCall, CustomOp, CustomOps, CustomStates};
use kv_core::CellIdx;
use kv_core::memory::{StateGroup, StateStore};
use kv_graph::CustomSpec;
use kv_graph::weights::Weight;

use crate::device::{Device, Region};
use crate::program::{Buffers, Operand, locked};

/// The needs on the host of a model's custom operations.
#[derive(Debug, Default)]
pub(crate) struct HostOps {
    pub(crate) ops: CustomOps,
    /// Weights as floats, by name.
    weights: Mutex<HashMap<String, Arc<[f32]>>>,
    /// Operations that were reported.
    reported: Mutex<HashSet<String>>,
}

impl HostOps {
    pub(crate) fn new(ops: CustomOps) -> Self {
        Self {
            ops,
            ..Self::default()
        }
    }

    /// The values of a weight, decoded once.
    pub(crate) fn floats(&self, weight: &Weight) -> Arc<[f32]> {
        let mut known = locked(&self.weights);
        let values = known.entry(weight.name().to_owned());
        Arc::clone(values.or_insert_with(|| Arc::from(weight.to_f32())))
    }

    /// Says once for each operation where it is computed.
    pub(crate) fn report(&self, backend: &'static str, spec: &CustomSpec) {
        if locked(&self.reported).insert(spec.name.clone()) {
            let op = &spec.name;
            tracing::warn!(
                "custom operation '{op}' has no source for {backend}: it runs on the host, and \
                 its values are copied there and back in every run"
            );
        }
    }
}

/// A step that the host computes.
#[derive(Debug)]
pub(crate) struct HostStep<D: Device> {
    pub(crate) op: Arc<dyn CustomOp>,
    pub(crate) spec: CustomSpec,
    pub(crate) node: String,
    pub(crate) operands: Vec<Values<D>>,
    pub(crate) weights: Vec<Arc<[f32]>>,
    pub(crate) n_rows: usize,
    pub(crate) result: Values<D>,
    pub(crate) states: Option<States<D>>,
}

/// Floats on the device.
#[derive(Debug)]
pub(crate) struct Values<D: Device> {
    pub(crate) place: Operand<D>,
    pub(crate) len: usize,
}

/// The states of a layer on the device.
#[derive(Debug)]
pub(crate) struct States<D: Device> {
    pub(crate) place: Operand<D>,
    /// Values of one.
    pub(crate) len: usize,
}

impl<D: Device> HostStep<D> {
    /// Computes the step and waits for the device before.
    pub(crate) fn run(
        &self,
        device: &D,
        buffers: &Buffers<'_, D>,
        inputs: &GraphInputs<'_>,
    ) -> Result<(), BackendError> {
        let read = |values: &Values<D>| {
            let mut floats = vec![0f32; values.len];
            if values.len > 0 {
                let from = buffers.region(device, &values.place)?;
                device.read(from, bytemuck::cast_slice_mut(&mut floats))?;
            }
            Ok(floats)
        };
        let operands = self.operands.iter().map(read);
        let operands = operands.collect::<Result<Vec<Vec<f32>>, BackendError>>()?;
        let operands: Vec<&[f32]> = operands.iter().map(Vec::as_slice).collect();
        let call = CustomCall {
            op: &*self.op,
            spec: &self.spec,
            node: &self.node,
            operands: &operands,
            weights: &self.weights,
            n_rows: self.n_rows,
        };
        let mut out = vec![0f32; self.result.len];
        match &self.states {
            Some(states) => {
                let states = TouchedStates::new(states, inputs.states);
                states.run(device, buffers, |groups, values| {
                    call.recur(groups, values, &mut out)
                })?;
            }
            None => call.without_state(inputs, &mut out)?,
        }
        if out.is_empty() {
            return Ok(());
        }
        let to = buffers.region(device, &self.result.place)?;
        device.write(to, bytemuck::cast_slice(&out))
    }
}

/// The states that groups read or store in: their rows are numbered anew, without gaps.
struct TouchedStates<'a, D: Device> {
    states: &'a States<D>,
    cells: Vec<CellIdx>,
    groups: Vec<StateGroup>,
}

impl<'a, D: Device> TouchedStates<'a, D> {
    fn new(states: &'a States<D>, groups: &[StateGroup]) -> Self {
        let stores = groups.iter().flat_map(|group| &group.stores);
        let sources = groups.iter().filter_map(|group| group.source);
        let mut cells: Vec<CellIdx> = stores.map(|s| s.to).chain(sources).collect();
        cells.sort_unstable();
        cells.dedup();
        let number = |cell| CellIdx(cells.partition_point(|&c| c < cell) as u32);
        let renumber = |group: &StateGroup| StateGroup {
            rows: group.rows.clone(),
            source: group.source.map(number),
            stores: group
                .stores
                .iter()
                .map(|store| StateStore {
                    to: number(store.to),
                    ..*store
                })
                .collect(),
        };
        let groups = groups.iter().map(renumber).collect();
        Self {
            states,
            cells,
            groups,
        }
    }

    /// Reads the states, hands them to `recur`, and writes those that were stored.
    fn run(
        &self,
        device: &D,
        buffers: &Buffers<'_, D>,
        recur: impl FnOnce(&[StateGroup], CustomStates<'_>) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let n_state = self.states.len;
        let mut values = vec![0f32; self.cells.len() * n_state];
        let buffer = buffers.region(device, &self.states.place)?;
        let place = |number: CellIdx| {
            let number = number.as_usize();
            let at = self.cells.get(number).map_or(0, |cell| cell.as_usize());
            let region = Region {
                buffer: buffer.buffer,
                at: buffer.at + at * n_state * size_of::<f32>(),
            };
            (region, number * n_state..(number + 1) * n_state)
        };
        for source in self.groups.iter().filter_map(|group| group.source) {
            let (from, to) = place(source);
            device.read(from, bytemuck::cast_slice_mut(&mut values[to]))?;
        }
        let states = CustomStates {
            values: &mut values,
            n_state,
        };
        recur(&self.groups, states)?;
        for store in self.groups.iter().flat_map(|group| &group.stores) {
            let (to, from) = place(store.to);
            device.write(to, bytemuck::cast_slice(&values[from]))?;
        }
        Ok(())
    }
}
