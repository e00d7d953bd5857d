//! Changes of stored rows outside of runs: copies, and keys that move to other positions.
//!
//! Invariant: what cannot be done is an error before any row is changed. Knows nothing of graphs.

use std::collections::HashMap;

use bytemuck::{Pod, Zeroable};
use kv_backend::{BackendError, RowKind, RowSpan, RowStorage};
use kv_core::{
    CellIdx, PartIdx,
    memory::{RowCopy, RowShift},
};
use kv_graph::rope::{LayerRope, RopeStyle, Rotation};
use kv_rows::LayerRows;

use crate::device::{Argument, Device, Region};
use crate::kernels::word;
use crate::lower::StoredRows;
use crate::program::{MAX_GRID_Y, ProgramContext};
use crate::rows::GpuRows;

/// Values of a row that a thread block rotates at most.
const MAX_UNIT: usize = 8000;

/// Copies rows of every layer of a part, in order.
pub(crate) fn copy_rows<D: Device>(
    device: &D,
    rows: &GpuRows<D>,
    copies: &[RowCopy],
) -> Result<(), BackendError> {
    let mut checked = Vec::new();
    for copy in copies {
        for layer in layers_of(rows, copy.part) {
            let v = layer.stored_v().map(|_| RowKind::V);
            for kind in [RowKind::K].into_iter().chain(v) {
                let [from, to] = [copy.from, copy.to].map(|first| {
                    let (layer, len) = (layer.layer, copy.len);
                    let span = RowSpan {
                        layer,
                        kind,
                        first,
                        len,
                    };
                    span.byte_range(rows.layout())
                });
                checked.push((rows.buffer_of(layer.layer, kind)?, from?, to?));
            }
        }
    }
    checked.into_iter().try_for_each(|(buffer, from, to)| {
        let len = from.len();
        let [from, to] = [from.start, to.start].map(|at| Region { buffer, at });
        device.copy(from, to, len)
    })
}

fn layers_of<D: Device>(rows: &GpuRows<D>, part: PartIdx) -> Vec<LayerRows> {
    let layers = rows.layout().layers().iter();
    layers.filter(|l| l.part == part).copied().collect()
}

/// `ShiftArgs` of `store.k`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Settings {
    k: StoredRows,
    dim: u32,
    n_pairs: u32,
    neox: u32,
    unit: u32,
    /// The word of the table at which the moves begin.
    moves: u32,
}

/// Moves of some keys of one layer, no row twice.
struct KeyMoves {
    layer: LayerRows,
    settings: Settings,
    /// Cells with the words of the table at which their angles begin.
    moved: Vec<(CellIdx, u32)>,
}

/// Rotates keys, as [`Backend::shift_rows`](kv_backend::Backend::shift_rows) says.
pub(crate) fn shift_rows<D: Device>(
    shared: &ProgramContext<D>,
    rows: &GpuRows<D>,
    shifts: &[RowShift],
    ropes: &[LayerRope],
) -> Result<(), BackendError> {
    let mut steps: Vec<KeyMoves> = Vec::new();
    let mut angles = Angles::default();
    let twice = is_any_row_twice(shifts);
    for &shift in shifts {
        for layer in layers_of(rows, shift.part) {
            let Some((rotation, settings)) = check(rows, layer, shift, ropes)? else {
                continue;
            };
            let at = angles.place(rotation, shift)?;
            let of_layer = |step: &&mut KeyMoves| step.layer.layer == layer.layer;
            let step = match steps.iter_mut().rev().find(of_layer) {
                Some(step) if !twice => step,
                _ => {
                    steps.push(KeyMoves {
                        layer,
                        settings,
                        moved: Vec::new(),
                    });
                    let last = steps.len() - 1;
                    &mut steps[last]
                }
            };
            let cells = (0..shift.len).map(|i| shift.first.offset(i));
            step.moved.extend(cells.map(|cell| (cell, at)));
        }
    }
    launch(shared, rows, &steps, &angles)
}

fn is_any_row_twice(shifts: &[RowShift]) -> bool {
    let mut spans: Vec<_> = shifts
        .iter()
        .map(|s| (s.part, u64::from(s.first.0), u64::from(s.len)))
        .collect();
    spans.sort_unstable();
    let mut pairs = spans.windows(2);
    pairs.any(|pair| pair[0].0 == pair[1].0 && pair[0].1 + pair[0].2 > pair[1].1)
}

/// One shift in one layer, checked; `None` where no key changes.
fn check<'a, D: Device>(
    rows: &GpuRows<D>,
    layer: LayerRows,
    shift: RowShift,
    ropes: &'a [LayerRope],
) -> Result<Option<(&'a Rotation, Settings)>, BackendError> {
    let number = layer.layer;
    RowSpan {
        layer: number,
        kind: RowKind::K,
        first: shift.first,
        len: shift.len,
    }
    .byte_range(rows.layout())?;
    let rope = ropes.iter().find(|rope| rope.layer == number);
    let rope = rope.ok_or(BackendError::MissingRope { layer: number })?;
    let Some(rotation) = rope.rotation.as_ref().filter(|_| shift.delta.0 != 0) else {
        return Ok(None);
    };
    let (n_rot, dim) = (rotation.rope().n_rot, layer.k.dim);
    if n_rot > dim {
        return Err(BackendError::RopeWidth {
            layer: number,
            n_rot,
            dim,
        });
    }
    // The fewest heads that are whole blocks.
    let block = layer.k.kv_type.block_len();
    let heads = (1..=block).find(|n| (n * dim).is_multiple_of(block));
    let unit = heads.unwrap_or(1) * dim;
    if unit > MAX_UNIT {
        return Err(BackendError::Input {
            input: "shift",
            reason: format!(
                "{unit} values of layer {number} are rotated together, at most {MAX_UNIT}"
            ),
        });
    }
    let settings = Settings {
        k: StoredRows::new(&layer.k)?,
        dim: word(dim)?,
        n_pairs: word(n_rot / 2)?,
        neox: u32::from(rotation.rope().style == RopeStyle::Neox),
        unit: word(unit)?,
        moves: 0,
    };
    Ok(Some((rotation, settings)))
}

/// Cosines and sines of all moves, those of one rotation and delta once.
#[derive(Default)]
struct Angles<'a> {
    places: HashMap<i32, Vec<(&'a Rotation, u32)>>,
    values: Vec<f32>,
}

impl<'a> Angles<'a> {
    fn place(&mut self, rotation: &'a Rotation, shift: RowShift) -> Result<u32, BackendError> {
        let known = self.places.entry(shift.delta.0).or_default();
        if let Some(&(_, at)) = known.iter().find(|(other, _)| *other == rotation) {
            return Ok(at);
        }
        let at = word(self.values.len())?;
        let (cos, sin) = rotation.angles(shift.delta);
        self.values.extend(cos);
        self.values.extend(sin);
        known.push((rotation, at));
        Ok(at)
    }
}

/// Uploads the table of all steps and launches them in order.
fn launch<D: Device>(
    shared: &ProgramContext<D>,
    rows: &GpuRows<D>,
    steps: &[KeyMoves],
    angles: &Angles<'_>,
) -> Result<(), BackendError> {
    if steps.iter().all(|step| step.moved.is_empty()) {
        return Ok(());
    }
    let device = &shared.device;
    let mut words: Vec<u32> = angles.values.iter().map(|v| v.to_bits()).collect();
    let mut launches = Vec::new();
    for step in steps {
        for moved in step.moved.chunks(MAX_GRID_Y as usize) {
            let moves = word(words.len())?;
            let settings = Settings {
                moves,
                ..step.settings
            };
            launches.push((step.layer.layer, settings, moved.len()));
            words.extend(moved.iter().flat_map(|&(cell, at)| [cell.0, at]));
        }
    }
    let bytes: &[u8] = bytemuck::cast_slice(&words);
    let table = device.allocate(bytes.len(), "moves of keys")?;
    device.write(Region::start(&table), bytes)?;
    let kernel = shared.kernel("shift_keys")?;
    for (layer, settings, n_rows) in launches {
        let units = settings.k.len() / settings.unit.max(1);
        let keys = rows.buffer_of(layer, RowKind::K)?;
        let arguments = [
            Argument::Buffer(Region::start(keys)),
            Argument::Buffer(Region::start(&table)),
            Argument::Settings(bytemuck::bytes_of(&settings)),
        ];
        device.launch(&kernel, [units, word(n_rows)?], &arguments)?;
    }
    // The table is needed until then.
    device.wait()
}
