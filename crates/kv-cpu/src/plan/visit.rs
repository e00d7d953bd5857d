//! Which values a step reads and which it writes, said once: [`Step::map`] visits them all.

use super::{Before, Change, Product, Step};

/// What a step does with a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
}

use Access::{Read, Write};

impl<V: Copy> Change<V> {
    /// The same change with another value.
    fn map<W>(self, mut other: impl FnMut(V) -> W) -> Change<W> {
        match self {
            Self::Add(y) => Change::Add(other(y)),
            Self::Mul(y) => Change::Mul(other(y)),
            Self::Gate(activation, y) => Change::Gate(activation, other(y)),
            Self::Scale(factor) => Change::Scale(factor),
            Self::Activate(activation) => Change::Activate(activation),
            Self::SoftCap(cap) => Change::SoftCap(cap),
            Self::ClampedGate(curve, y) => Change::ClampedGate(curve, other(y)),
            Self::ScaleByPosition(scale) => Change::ScaleByPosition(scale),
            Self::Rope { table, dim } => Change::Rope { table, dim },
        }
    }

    /// What is read beside the value that changes.
    pub(super) fn other(&self) -> Option<V> {
        let mut other = None;
        self.map(|y| other = Some(y));
        other
    }
}

impl<V: Copy> Step<V> {
    /// What the step reads and what it writes.
    pub(super) fn values(&self) -> (Vec<V>, Vec<V>) {
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        self.clone().map(&mut |access, value| match access {
            Read => reads.push(value),
            Write => writes.push(value),
        });
        (reads, writes)
    }

    /// The same step over other values: `f` is asked once for each value, in the order of reads and
    /// of writes.
    pub(super) fn map<W>(self, f: &mut impl FnMut(Access, V) -> W) -> Step<W> {
        match self {
            Self::Embed { matrix, by, out } => Step::Embed {
                matrix,
                by,
                out: f(Write, out),
            },
            Self::AddRow { x, added, out } => Step::AddRow {
                x: f(Read, x),
                added,
                out: f(Write, out),
            },
            Self::Linear {
                x,
                before,
                products,
            } => Step::Linear {
                x: f(Read, x),
                before: match before {
                    Before::Nothing => Before::Nothing,
                    Before::Rounded => Before::Rounded,
                    Before::RmsNorm { gain, eps } => Before::RmsNorm { gain, eps },
                    Before::Gate(activation, y) => Before::Gate(activation, f(Read, y)),
                },
                products: products
                    .into_iter()
                    .map(|p| Product {
                        matrix: p.matrix,
                        bias: p.bias,
                        gates: p.gates,
                        residual: p.residual.map(|r| f(Read, r)),
                        out: f(Write, p.out),
                    })
                    .collect(),
            },
            Self::RmsNorm {
                x,
                gain,
                dim,
                eps,
                out,
            } => Step::RmsNorm {
                x: f(Read, x),
                gain,
                dim,
                eps,
                out: f(Write, out),
            },
            Self::LayerNorm {
                x,
                gain,
                bias,
                eps,
                out,
            } => Step::LayerNorm {
                x: f(Read, x),
                gain,
                bias,
                eps,
                out: f(Write, out),
            },
            Self::Change { x, change, out } => Step::Change {
                x: f(Read, x),
                change: change.map(|y| f(Read, y)),
                out: f(Write, out),
            },
            Self::Store { layer, part, k, v } => Step::Store {
                layer,
                part,
                k: f(Read, k),
                v: v.map(|v| f(Read, v)),
            },
            Self::Attend {
                layer,
                part,
                spec,
                beside,
                q,
                out,
            } => Step::Attend {
                layer,
                part,
                spec,
                beside,
                q: f(Read, q),
                out: f(Write, out),
            },
            Self::AttendBatch {
                window,
                spec,
                beside,
                qkv,
                out,
            } => Step::AttendBatch {
                window,
                spec,
                beside,
                qkv: qkv.map(|x| f(Read, x)),
                out: f(Write, out),
            },
            Self::Plain { of, x, out } => Step::Plain {
                of,
                x: f(Read, x),
                out: f(Write, out),
            },
            Self::TakeRows { x, out } => Step::TakeRows {
                x: f(Read, x),
                out: f(Write, out),
            },
            Self::Columns { x, first, out } => Step::Columns {
                x: f(Read, x),
                first,
                out: f(Write, out),
            },
            Self::Conv {
                layer,
                kernel,
                x,
                out,
            } => Step::Conv {
                layer,
                kernel,
                x: f(Read, x),
                out: f(Write, out),
            },
            Self::Scan {
                layer,
                weights,
                inputs,
                out,
            } => Step::Scan {
                layer,
                weights,
                inputs: inputs.map(|x| f(Read, x)),
                out: f(Write, out),
            },
            Self::ScanHeads {
                layer,
                weights,
                inputs,
                out,
            } => Step::ScanHeads {
                layer,
                weights,
                inputs: inputs.map(|x| f(Read, x)),
                out: f(Write, out),
            },
            Self::Route { x, spec, out } => Step::Route {
                x: f(Read, x),
                spec,
                out: f(Write, out),
            },
            Self::ExpertLinear {
                x,
                routes,
                experts,
                n_used,
                out,
            } => Step::ExpertLinear {
                x: f(Read, x),
                routes: f(Read, routes),
                experts,
                n_used,
                out: f(Write, out),
            },
            Self::ExpertWeigh {
                x,
                routes,
                n_used,
                out,
            } => Step::ExpertWeigh {
                x: f(Read, x),
                routes: f(Read, routes),
                n_used,
                out: f(Write, out),
            },
            Self::ExpertSum { x, out } => Step::ExpertSum {
                x: f(Read, x),
                out: f(Write, out),
            },
            Self::Custom { call, inputs, out } => Step::Custom {
                call,
                inputs: inputs.into_iter().map(|x| f(Read, x)).collect(),
                out: f(Write, out),
            },
            Self::Copy { x, out } => Step::Copy {
                x: f(Read, x),
                out: f(Write, out),
            },
        }
    }
}
