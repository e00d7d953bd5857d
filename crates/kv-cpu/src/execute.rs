//! What each step of a program does, divided among the team.
//!
//! Invariant: how work is divided changes no bit of the result: every value is computed by one task
//! from the same operands in the same order. Knows nothing of graphs.

mod gated;
mod plain;
mod products;
mod recurrent;

use std::ops::Range;
use std::sync::Mutex;

use kv_core::Visibility;
use kv_core::backend::BackendError;
use kv_core::graph::{Activation, AttendSpec, GraphInputs};

use crate::activations::RowBuffer;
use crate::attend::{Attention, ScoreMods, Scratch, Workspace, attend};
use crate::curves;
use crate::custom;
use crate::experts::{ExpertBuffers, SlotBufs};
use crate::kernels::Kernels;
use crate::kv_rows::KvRows;
use crate::plan::{Buf, Change, EmbedBy, HeadValues, RopeTable, Step};
use crate::storage::CpuRows;
use crate::store_rows::{self, NewRows};
use crate::team::Lead;
use crate::values::{Frame, SharedValues};
use kv_core::backend::Profiler;

pub(crate) use gated::{GatedRow, gated_len};
pub(crate) use products::{pieces_of, pieces_of_product};

/// Values that are worth a task of their own: some microseconds of elementwise work.
pub(crate) const VALUES_PER_TASK: usize = 8192;
/// Tasks for each thread, so that one that was put aside leaves most of its share to others, and all are done at about the
/// same time.
const TASKS_PER_THREAD: usize = 10;
/// Weight rows of a task come in multiples of this: outputs of two tasks share no cache line.
const ROWS_STEP: usize = 16;

/// Computes one row of a buffer: `(row, values)`.
type FillRow<'a> = dyn Fn(usize, &mut [f32]) -> Result<(), BackendError> + Sync + 'a;

/// Cosines and sines of a ubatch's positions, `[tokens, pairs]` each.
#[derive(Debug)]
pub(crate) struct Angles {
    n_pairs: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Angles {
    pub(crate) fn new(n_tokens: usize, n_pairs: usize) -> Self {
        let zeros = || vec![0.0; n_tokens * n_pairs];
        Self {
            n_pairs,
            cos: zeros(),
            sin: zeros(),
        }
    }
}

/// One run of a program.
pub(crate) struct Run<'a> {
    pub(crate) kernels: &'a Kernels,
    pub(crate) lead: Lead<'a>,
    pub(crate) n_threads: usize,
    pub(crate) frame: Frame<'a>,
    pub(crate) inputs: &'a GraphInputs<'a>,
    /// With a scale for every block, and long ones.
    pub(crate) prepared: &'a mut [RowBuffer; 3],
    pub(crate) gated_row: &'a mut GatedRow,
    pub(crate) angles: &'a mut [Angles],
    pub(crate) ropes: &'a [RopeTable],
    pub(crate) scratch: &'a [Mutex<Scratch>],
    pub(crate) attention: &'a mut Workspace,
    pub(crate) experts: &'a mut ExpertBuffers,
    pub(crate) profiler: Profiler<'a>,
}

/// The `at`-th piece of `n` things cut into pieces of `step`.
pub(crate) fn piece(at: usize, step: usize, n: usize) -> Range<usize> {
    at * step..((at + 1) * step).min(n)
}

impl Run<'_> {
    /// The angles of every rotation, once for all layers.
    pub(crate) fn rotations(&mut self) -> Result<(), BackendError> {
        let GraphInputs {
            positions,
            coordinates,
            ..
        } = *self.inputs;
        for (table, angles) in self.ropes.iter().zip(self.angles.iter_mut()) {
            let n = angles.n_pairs;
            let (cos, sin) = (
                SharedValues::new(&mut angles.cos),
                SharedValues::new(&mut angles.sin),
            );
            let tokens_per_task = (VALUES_PER_TASK / 16 / n.max(1)).max(1);
            let n_tokens = match table.sections {
                None => positions.len(),
                Some(_) => coordinates.len(),
            };
            let n_tasks = n_tokens.div_ceil(tokens_per_task);
            self.lead.each(n_tasks, &|_, task| {
                for token in piece(task, tokens_per_task, n_tokens) {
                    let range = token * n..(token + 1) * n;
                    // SAFETY: each token belongs to one task.
                    let (cos, sin) = unsafe { (cos.range(range.clone()), sin.range(range)) };
                    let (spec, frequencies) = (&table.spec, table.frequencies.as_slice());
                    match &table.sections {
                        None => spec.angles(frequencies, positions[token], cos, sin),
                        Some(sections) => {
                            let at = coordinates[token];
                            spec.section_angles(frequencies, sections, at, cos, sin);
                        }
                    }
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Runs one step.
    pub(crate) fn step(
        &mut self,
        step: &Step<Buf>,
        rows: &mut CpuRows,
    ) -> Result<(), BackendError> {
        match step {
            Step::Embed { matrix, by, out } => {
                let ids = match by {
                    EmbedBy::Token => self.inputs.tokens,
                    EmbedBy::Position => self.inputs.positions,
                };
                let kernels = self.kernels;
                self.rows(*out, &|row, values| {
                    matrix.row(kernels, ids[row] as usize, values)
                })
            }
            Step::Linear {
                x,
                before,
                products,
            } => self.linear((*x, before), products),
            Step::RmsNorm {
                x,
                gain,
                dim,
                eps,
                out,
            } => {
                // SAFETY: the plan lets no step write what it reads.
                let x = unsafe { self.frame.read(*x) };
                let (kernels, dim) = (self.kernels, *dim);
                let n_groups = gain.len() / dim;
                // Heads are normed one by one, so a row is `dim` values here.
                let heads = Buf {
                    rows: out.len() / dim,
                    width: dim,
                    ..*out
                };
                self.rows(heads, &|row, values| {
                    let gain = &gain[row % n_groups * dim..][..dim];
                    (kernels.rms_norm)(&x[row * dim..(row + 1) * dim], gain, *eps, values);
                    Ok(())
                })
            }
            Step::LayerNorm {
                x,
                gain,
                bias,
                eps,
                out,
            } => self.layer_norm((gain, bias.as_deref()), *eps, [*x, *out]),
            Step::AddRow { x, added, out } => self.add_row(*x, added, *out),
            Step::Change { x, change, out } => self.change(*x, change, *out),
            Step::Store { layer, part, k, v } => {
                // SAFETY: no step writes its operands, and this one writes no buffer.
                let read = |buf| unsafe { self.frame.read(buf) };
                let new = NewRows {
                    layer: *layer,
                    k: read(*k),
                    v: v.map_or(&[][..], read),
                    cells: &self.inputs.parts[*part].cells,
                };
                store_rows::store(self.kernels, &mut self.lead, rows, new)
            }
            Step::Attend {
                layer,
                part,
                spec,
                beside,
                q,
                out,
            } => {
                let Some(stored) = rows.stored(*layer) else {
                    return Ok(());
                };
                let visibility = &self.inputs.parts[*part].visibility;
                self.attend(stored, visibility, (spec, beside), [*q, *out])
            }
            Step::AttendBatch {
                window,
                spec,
                beside,
                qkv: [q, k, v],
                out,
            } => {
                let Some(visibility) = self.inputs.batch_visibility(*window) else {
                    return Ok(());
                };
                // SAFETY: the plan lets no step write what it reads.
                let (k, v) = unsafe { (self.frame.read(*k), self.frame.read(*v)) };
                let fresh = |x, dim| KvRows::from_f32(x, spec.kv_heads, dim);
                let fresh = [fresh(k, spec.k_dim), fresh(v, spec.v_dim)];
                self.attend(fresh, visibility, (spec, beside), [*q, *out])
            }
            Step::Plain { of, x, out } => self.plain(of, rows, [*x, *out]),
            Step::TakeRows { x, out } => {
                // SAFETY: the plan lets no step write what it reads.
                let x = unsafe { self.frame.read(*x) };
                let wanted = self.inputs.output_rows;
                let width = out.width;
                self.rows(*out, &|row, values| {
                    values.copy_from_slice(&x[wanted[row] as usize * width..][..width]);
                    Ok(())
                })
            }
            Step::Columns { x, first, out } => {
                // SAFETY: the plan lets no step write what it reads.
                let values = unsafe { self.frame.read(*x) };
                let (first, width) = (*first, x.width);
                self.rows(*out, &|row, to| {
                    to.copy_from_slice(&values[row * width + first..][..to.len()]);
                    Ok(())
                })
            }
            Step::Conv {
                layer,
                kernel,
                x,
                out,
            } => match rows.states_mut(*layer) {
                Some([states, _]) => self.conv(kernel, states, [*x, *out]),
                None => Ok(()),
            },
            Step::Scan {
                layer,
                weights,
                inputs,
                out,
            } => match rows.states_mut(*layer) {
                Some([_, states]) => self.scan(&**weights, states, (*inputs, *out)),
                None => Ok(()),
            },
            Step::ScanHeads {
                layer,
                weights,
                inputs,
                out,
            } => match rows.states_mut(*layer) {
                Some([_, states]) => self.scan(&**weights, states, (*inputs, *out)),
                None => Ok(()),
            },
            Step::Route { x, spec, out } => self.route(spec, *x, *out),
            Step::ExpertLinear {
                x,
                routes,
                experts,
                n_used,
                out,
            } => {
                let (x, routes, out) = (*x, *routes, *out);
                self.expert_linear(experts, *n_used, SlotBufs { x, routes, out })
            }
            Step::ExpertWeigh {
                x,
                routes,
                n_used,
                out,
            } => {
                let (x, routes, out) = (*x, *routes, *out);
                self.expert_weigh(*n_used, SlotBufs { x, routes, out })
            }
            Step::ExpertSum { x, out } => self.expert_sum(*x, *out),
            Step::Custom { call, inputs, out } => custom::run(
                (call, inputs, *out),
                (self.frame, &mut self.lead),
                (rows, self.inputs.states),
            ),
            Step::Copy { x, out } => {
                // SAFETY: the plan lets no step write what it reads.
                let x = unsafe { self.frame.read(*x) };
                self.rows(*out, &|row, values| {
                    values.copy_from_slice(&x[row * out.width..][..out.width]);
                    Ok(())
                })
            }
        }
    }

    /// Calls `fill(row, values)` for each row of `out`.
    pub(crate) fn rows(&mut self, out: Buf, fill: &FillRow<'_>) -> Result<(), BackendError> {
        let values = self.frame.write(out);
        let per_task = (VALUES_PER_TASK / out.width.max(1)).max(1);
        self.lead.each(out.rows.div_ceil(per_task), &|_, task| {
            piece(task, per_task, out.rows).try_for_each(|row| {
                // SAFETY: each row belongs to one task, and the plan lets no step read what it
                // writes.
                fill(row, unsafe {
                    values.range(row * out.width..(row + 1) * out.width)
                })
            })
        })
    }

    fn change(&mut self, x: Buf, change: &Change<Buf>, out: Buf) -> Result<(), BackendError> {
        match *change {
            Change::Rope { table, dim } => return self.rope(x, (table, dim), out),
            Change::ScaleByPosition(scale) => return self.scale_by_position(x, scale, out),
            _ => {}
        }
        let (kernels, frame) = (self.kernels, self.frame);
        let values = frame.write(out);
        let n = out.len();
        self.lead.each(n.div_ceil(VALUES_PER_TASK), &|_, task| {
            let range = piece(task, VALUES_PER_TASK, n);
            // SAFETY: each piece belongs to one task.
            let to = unsafe { values.range(range.clone()) };
            if x.place != out.place {
                // SAFETY: another buffer than `out`, which nobody writes in this step.
                to.copy_from_slice(unsafe { &frame.read(x)[range.clone()] });
            }
            // SAFETY: the plan gives `out` no other place than `x`'s or a new one.
            let other = |y: Buf| unsafe { &frame.read(y)[range.clone()] };
            match *change {
                Change::Add(y) => (kernels.add)(to, other(y)),
                Change::Mul(y) => (kernels.mul)(to, other(y)),
                Change::Gate(activation, y) => gate(kernels, activation)?(to, other(y)),
                Change::Activate(activation) => {
                    let gate = gate(kernels, activation)?;
                    to.chunks_mut(ONES.len())
                        .for_each(|to| gate(to, &ONES[..to.len()]));
                }
                Change::Scale(factor) => (kernels.scale)(to, factor),
                Change::SoftCap(cap) => (kernels.soft_cap)(to, cap),
                Change::ClampedGate(curve, y) => {
                    curves::clamped_gate(kernels, curve, to, other(y));
                }
                Change::Rope { .. } | Change::ScaleByPosition(_) => {}
            }
            Ok(())
        })
    }

    fn rope(&mut self, x: Buf, (table, dim): (usize, usize), out: Buf) -> Result<(), BackendError> {
        let (spec, angles) = (&self.ropes[table].spec, &self.angles[table]);
        let n = angles.n_pairs;
        let values = self.frame.write(out);
        let frame = self.frame;
        let per_task = (VALUES_PER_TASK / 4 / out.width.max(1)).max(1);
        self.lead.each(out.rows.div_ceil(per_task), &|_, task| {
            for row in piece(task, per_task, out.rows) {
                let range = row * out.width..(row + 1) * out.width;
                // SAFETY: each row belongs to one task.
                let to = unsafe { values.range(range.clone()) };
                if x.place != out.place {
                    // SAFETY: another buffer than `out`, which nobody writes in this step.
                    to.copy_from_slice(unsafe { &frame.read(x)[range] });
                }
                let (cos, sin) = (&angles.cos[row * n..][..n], &angles.sin[row * n..][..n]);
                to.chunks_exact_mut(dim.max(1))
                    .for_each(|h| spec.rotate_head(h, cos, sin));
            }
            Ok(())
        })
    }

    fn score_mods<'v>(&self, of: &'v HeadValues) -> ScoreMods<'v>
    where
        Self: 'v,
    {
        ScoreMods {
            sinks: of.sinks.as_deref(),
            slopes: of.slopes.as_deref(),
            positions: self.inputs.positions,
        }
    }

    fn attend(
        &mut self,
        kv: [KvRows<'_>; 2],
        visibility: &Visibility,
        (spec, beside): (&AttendSpec, &HeadValues),
        [q, out]: [Buf; 2],
    ) -> Result<(), BackendError> {
        let attention = Attention {
            kernels: self.kernels,
            spec: *spec,
            kv,
            // SAFETY: the plan lets no step write what it reads.
            q: unsafe { self.frame.read(q) },
            visibility,
            score_mods: self.score_mods(beside),
            out: self.frame.write(out),
        };
        // SAFETY: the inputs were validated, so the visibility is sound for these rows and cells.
        unsafe { attend(&mut self.lead, &attention, self.attention, self.scratch) }
    }
}

/// What an activation without a gate is multiplied with.
static ONES: [f32; 256] = [1.0; 256];

/// Changes the first values by the second: `(gate, up)`.
type ChangeBy = fn(&mut [f32], &[f32]);

/// `gate[i] = activation(gate[i]) * up[i]`.
fn gate(kernels: &Kernels, activation: Activation) -> Result<ChangeBy, BackendError> {
    match activation {
        Activation::Silu => Ok(kernels.silu_mul),
        Activation::GeluTanh => Ok(kernels.gelu_tanh_mul),
        Activation::GeluErf => Ok(kernels.gelu_erf_mul),
        other => Err(BackendError::UnsupportedOp {
            backend: "cpu",
            op: "gate",
            node: other.to_string(),
        }),
    }
}
