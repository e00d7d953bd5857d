//! [`Step`]: what is computed, what it reads and what it writes.
//!
//! Steps are over values of type `V`: nodes of the graph after lowering and fusion, buffers after
//! allocation. Invariant: [`StepOp`] holds no value, so every pass finds all of a step's values in
//! `reads` and `writes`. Does not know how a step is computed.

use std::sync::Arc;

use kv_backend::StepKind;
use kv_graph::Activation;

use super::lower::{AttentionOp, CustomStep, Elementwise, ExpertsOp, NormOp, RecurrentOp, RowsOp};
use crate::activations::ActivationKind;
use crate::matrix::Matrix;

/// One step.
#[derive(Clone, Debug)]
pub(crate) struct Step<V> {
    pub(crate) op: StepOp,
    /// Operands, in the order that the operation documents.
    pub(crate) reads: Vec<V>,
    /// Results: one of each output of a [`MatMul`], none where rows of a layer are stored, else
    /// one.
    pub(crate) writes: Vec<V>,
}

impl<V> Step<V> {
    /// The same step over other values.
    pub(super) fn map<W>(self, mut f: impl FnMut(V) -> W) -> Step<W> {
        Step {
            op: self.op,
            reads: self.reads.into_iter().map(&mut f).collect(),
            writes: self.writes.into_iter().map(&mut f).collect(),
        }
    }

    /// The matrix multiplication that it is, if it is one.
    pub(crate) fn matmul(&self) -> Option<&MatMul> {
        match &self.op {
            StepOp::MatMul(matmul) => Some(matmul),
            _ => None,
        }
    }

    /// As [`Step::matmul`], to change it.
    pub(super) fn matmul_mut(&mut self) -> Option<&mut MatMul> {
        match &mut self.op {
            StepOp::MatMul(matmul) => Some(matmul),
            _ => None,
        }
    }
}

/// The operation of a step, by family: each family's enum is next to its lowering, and lists the
/// operands of its operations in their order.
#[derive(Clone, Debug)]
pub(crate) enum StepOp {
    /// `(x, operands of prologue and epilogues …)`.
    MatMul(MatMul),
    /// `(x)` or `(x, other)`; where `x` and the result are one buffer, nothing is copied.
    Elementwise(Elementwise),
    Norm(NormOp),
    Rows(RowsOp),
    Attention(AttentionOp),
    Recurrent(RecurrentOp),
    Experts(ExpertsOp),
    /// A registered operation, over rows or over states of a recurrent layer. `(x …)`.
    Custom(Arc<CustomStep>),
}

impl StepOp {
    /// The kind of step and the bytes of the weight matrices that it reads; those of experts are
    /// not counted, as only some of them are read.
    pub(crate) fn kind_and_weight_bytes(&self) -> (StepKind, usize) {
        let kind = match self {
            Self::MatMul(matmul) => {
                let n_bytes = matmul.matrices().map(|m| m.n_rows() * m.row_bytes()).sum();
                return (StepKind::Matmul, n_bytes);
            }
            Self::Elementwise(_) | Self::Norm(_) => StepKind::Elementwise,
            Self::Rows(op) => op.kind(),
            Self::Attention(op) => op.kind(),
            Self::Recurrent(_) => StepKind::Recurrent,
            Self::Experts(op) => return op.kind_and_weight_bytes(),
            Self::Custom(_) => StepKind::Custom,
        };
        (kind, 0)
    }
}

/// Matrices that are multiplied with the same rows.
#[derive(Clone, Debug)]
pub(crate) struct MatMul {
    pub(crate) prologue: Prologue,
    /// One for each value that the step writes, in their order.
    pub(crate) outputs: Vec<MatMulOutput>,
}

impl MatMul {
    /// All matrices, those of gates included.
    pub(crate) fn matrices(&self) -> impl Iterator<Item = &Arc<Matrix>> {
        self.outputs.iter().flat_map(MatMulOutput::matrices)
    }

    /// True if a matrix reads activations of this kind.
    pub(crate) fn takes(&self, kind: ActivationKind) -> bool {
        self.matrices()
            .any(|matrix| matrix.activation_kind() == kind)
    }
}

/// One matrix of a [`MatMul`]: `epilogue(x W^T + bias)`.
#[derive(Clone, Debug)]
pub(crate) struct MatMulOutput {
    pub(crate) matrix: Arc<Matrix>,
    pub(crate) bias: Option<Arc<[f32]>>,
    pub(crate) epilogue: Epilogue,
}

impl MatMulOutput {
    /// Its matrix, and the one of its gate.
    pub(crate) fn matrices(&self) -> impl Iterator<Item = &Arc<Matrix>> {
        let up = self.gate().map(|gate| &gate.up);
        std::iter::once(&self.matrix).chain(up)
    }

    /// The gate in its epilogue.
    pub(crate) fn gate(&self) -> Option<&GateEpilogue> {
        match &self.epilogue {
            Epilogue::Gate(gate) => Some(gate),
            _ => None,
        }
    }
}

/// The way rows become the rows that matrices are multiplied with, where nothing else reads the
/// result.
#[derive(Clone, Debug)]
pub(crate) enum Prologue {
    /// As they are.
    None,
    /// The norm of whole rows.
    RmsNorm { gain: Arc<[f32]>, eps: f32 },
    /// `activation(x) * operand`, where the operand is the `read`-th of the step.
    Gate { activation: Activation, read: usize },
    /// The step before gated and quantized them: see [`GateEpilogue::quantize`].
    Quantized,
}

/// The work on the product of one matrix before it is stored.
#[derive(Clone, Debug)]
pub(crate) enum Epilogue {
    /// Nothing.
    None,
    /// The `read`-th operand of the step is added.
    Residual { read: usize },
    /// It gates the product of another matrix.
    Gate(GateEpilogue),
}

/// `activation(product) * (x up^T + up_bias)`.
#[derive(Clone, Debug)]
pub(crate) struct GateEpilogue {
    pub(crate) activation: Activation,
    /// A matrix of the same shape.
    pub(crate) up: Arc<Matrix>,
    pub(crate) up_bias: Option<Arc<[f32]>>,
    /// The kind of activations that the result is also quantized to, where it is one row that only
    /// matrices of this kind read.
    pub(crate) quantize: Option<ActivationKind>,
}
