//! Convolutions and scans along sequences, which read and store states.

use bytemuck::{Pod, Zeroable};
use kv_core::backend::{BackendError, RowKind};
use kv_core::graph::{ConvSpec, HeadScanSpec, Node, NodeId, Op, ScanSpec};
use kv_core::{LayerIdx, StateType};

use super::{Lower, word};
use crate::device::Device;
use crate::program::{Grid, Operand};
use crate::weights::WeightForm;

/// Channels of a block of all these kernels.
pub(super) const CHANNELS: u32 = 32;

/// `ConvArgs` of `conv.k`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ConvSettings {
    header: u32,
    channels: u32,
    width: u32,
    has_bias: u32,
}

/// `ScanArgs` of `scan.k`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ScanSettings {
    header: u32,
    channels: u32,
    d_state: u32,
}

/// `HeadScanArgs` of `scan.k`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct HeadScanSettings {
    header: u32,
    n_heads: u32,
    head_dim: u32,
    n_groups: u32,
    d_state: u32,
}

/// Lowers a convolution or scan.
pub(super) fn lower<D: Device>(
    lower: &mut Lower<'_, D>,
    id: NodeId,
    node: &Node,
) -> Result<(), BackendError> {
    match &node.op {
        Op::Conv { layer, conv } => lower.conv((id, node), *layer, conv),
        Op::Scan { layer, scan } => lower.scan((id, node), *layer, scan),
        Op::ScanHeads { layer, scan } => lower.scan_heads((id, node), *layer, scan),
        _ => Err(lower.unsupported(node)),
    }
}

impl<D: Device> Lower<'_, D> {
    fn conv(
        &mut self,
        (id, node): (NodeId, &Node),
        layer: LayerIdx,
        conv: &ConvSpec,
    ) -> Result<(), BackendError> {
        let settings = ConvSettings {
            header: self.states_header(node)?,
            channels: word(node.row_len())?,
            width: word(conv.width)?,
            has_bias: u32::from(conv.bias.is_some()),
        };
        let weights = conv.weights().map(|name| self.host_weight(name, node));
        let weights = weights.collect::<Result<Vec<_>, _>>()?;
        let device = self.context.device;
        let weight = Operand::Weight(self.context.weights.joined(device, &weights)?);
        let bias = match &conv.bias {
            Some(name) => self.floats(name, node)?,
            None => weight.clone(),
        };
        let x = self.operand(node, 0)?;
        let states = self.rows(layer, RowKind::Conv)?;
        let words = Operand::Inputs(0);
        let operands = vec![x, weight, bias, words, states, self.result(id)];
        let x = settings.channels.div_ceil(CHANNELS);
        self.launch("conv", Grid::Chains { x }, operands, &settings)
    }

    fn scan(
        &mut self,
        (id, node): (NodeId, &Node),
        layer: LayerIdx,
        scan: &ScanSpec,
    ) -> Result<(), BackendError> {
        let settings = ScanSettings {
            header: self.states_header(node)?,
            channels: word(node.row_len())?,
            d_state: word(scan.d_state)?,
        };
        let operands = self.scan_operands((id, node), layer, &[&scan.a, &scan.d])?;
        let x = settings.channels.div_ceil(CHANNELS);
        let kernel = self.of_state_type(layer, ["scan_f32", "scan_f16", "scan_bf16"])?;
        self.launch(kernel, Grid::Chains { x }, operands, &settings)
    }

    fn scan_heads(
        &mut self,
        (id, node): (NodeId, &Node),
        layer: LayerIdx,
        scan: &HeadScanSpec,
    ) -> Result<(), BackendError> {
        let settings = HeadScanSettings {
            header: self.states_header(node)?,
            n_heads: word(scan.n_heads)?,
            head_dim: word(node.row_len() / scan.n_heads.max(1))?,
            n_groups: word(scan.n_groups)?,
            d_state: word(scan.d_state)?,
        };
        let weights = [&scan.a, &scan.d, &scan.dt_bias];
        let operands = self.scan_operands((id, node), layer, &weights)?;
        let x = settings.n_heads * settings.head_dim.div_ceil(CHANNELS);
        let kernels = ["scan_heads_f32", "scan_heads_f16", "scan_heads_bf16"];
        let kernel = self.of_state_type(layer, kernels)?;
        self.launch(kernel, Grid::Chains { x }, operands, &settings)
    }

    /// The kernel for the type of a layer's states: f32, f16 or bf16.
    pub(super) fn of_state_type(
        &self,
        layer: LayerIdx,
        [f32, f16, bf16]: [&'static str; 3],
    ) -> Result<&'static str, BackendError> {
        let states = self.context.layout.state(layer);
        let states = states.ok_or(BackendError::NoRows { layer })?;
        Ok(match states.state_type {
            StateType::F32 => f32,
            StateType::F16 => f16,
            StateType::BF16 => bf16,
        })
    }

    /// The operands of a scan with these weights: x, dt, B, C, the weights, the tables, the states
    /// and the result.
    fn scan_operands(
        &mut self,
        (id, node): (NodeId, &Node),
        layer: LayerIdx,
        weights: &[&String],
    ) -> Result<Vec<Operand<D>>, BackendError> {
        let values = (0..4).map(|at| self.operand(node, at));
        let weights = weights.iter().map(|name| self.floats(name, node));
        let mut operands = values.chain(weights).collect::<Result<Vec<_>, _>>()?;
        operands.push(Operand::Inputs(0));
        operands.push(self.rows(layer, RowKind::State)?);
        operands.push(self.result(id));
        Ok(operands)
    }

    /// A weight as floats.
    pub(super) fn floats(&self, name: &str, node: &Node) -> Result<Operand<D>, BackendError> {
        let weight = self.weight(name, node, WeightForm::Floats)?;
        Ok(Operand::Weight(weight))
    }

    /// The first word of the header of the states' tables.
    pub(super) fn states_header(&self, node: &Node) -> Result<u32, BackendError> {
        let header = self.inputs.states();
        word(header.ok_or_else(|| self.unsupported(node))?)
    }
}
