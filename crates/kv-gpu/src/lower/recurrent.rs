//! Convolutions and scans along sequences, which read and store states.

use bytemuck::{Pod, Zeroable};
use kv_backend::{BackendError, RowKind};
use kv_core::LayerIdx;
use kv_graph::{ConvSpec, HeadScanSpec, Node, ScanSpec};

use super::{Lower, Result, word};
use crate::device::Device;
use crate::inputs::NumberedNode;
use crate::program::{Grid, Operand};

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

impl<D: Device> Lower<'_, D> {
    /// Lowers a convolution.
    pub(super) fn conv(
        &mut self,
        (id, node): NumberedNode<'_>,
        layer: LayerIdx,
        conv: &ConvSpec,
    ) -> Result<()> {
        let settings = ConvSettings {
            header: self.states_header(node)?,
            channels: word(node.row_len())?,
            width: word(conv.width)?,
            has_bias: u32::from(conv.bias.is_some()),
        };
        let weights = conv.weights().map(|name| self.host_weight(name, node));
        let weights = weights.collect::<Result<Vec<_>, _>>()?;
        let device = &self.context.shared.device;
        let weight = Operand::Weight(self.context.weights.joined(device, &weights)?);
        let bias = self.floats_or(conv.bias.as_deref(), node, &weight)?;
        let x = self.operand(node, 0)?;
        let states = self.rows(layer, RowKind::Conv)?;
        let words = Operand::Inputs(0);
        let operands = vec![x, weight, bias, words, states, self.result(id)];
        let x = settings.channels.div_ceil(CHANNELS);
        self.launch("conv", Grid::Chains { x }, operands, &settings)
    }

    /// Lowers a scan of channels.
    pub(super) fn scan(
        &mut self,
        (id, node): NumberedNode<'_>,
        layer: LayerIdx,
        scan: &ScanSpec,
    ) -> Result<()> {
        let settings = ScanSettings {
            header: self.states_header(node)?,
            channels: word(node.row_len())?,
            d_state: word(scan.d_state)?,
        };
        let operands = self.scan_operands((id, node), layer, &[&scan.a, &scan.d])?;
        let x = settings.channels.div_ceil(CHANNELS);
        let kernel = self.of_state_type("scan", layer)?;
        self.launch(&kernel, Grid::Chains { x }, operands, &settings)
    }

    /// Lowers a scan of heads.
    pub(super) fn scan_heads(
        &mut self,
        (id, node): NumberedNode<'_>,
        layer: LayerIdx,
        scan: &HeadScanSpec,
    ) -> Result<()> {
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
        let kernel = self.of_state_type("scan_heads", layer)?;
        self.launch(&kernel, Grid::Chains { x }, operands, &settings)
    }

    /// The kernel of this name for the type of a layer's states.
    pub(super) fn of_state_type(&self, kernel: &str, layer: LayerIdx) -> Result<String> {
        let states = self.context.layout.state(layer);
        let states = states.ok_or(BackendError::NoRows { layer })?;
        Ok(format!("{kernel}_{}", states.state_type))
    }

    /// The operands of a scan with these weights: x, dt, B, C, the weights, the tables, the states
    /// and the result.
    fn scan_operands(
        &mut self,
        (id, node): NumberedNode<'_>,
        layer: LayerIdx,
        weights: &[&String],
    ) -> Result<Vec<Operand<D>>> {
        let mut operands = self.operands(node, 4)?;
        for name in weights {
            operands.push(self.floats(name, node)?);
        }
        let states = self.rows(layer, RowKind::State)?;
        operands.extend([Operand::Inputs(0), states, self.result(id)]);
        Ok(operands)
    }

    /// The first word of the header of the states' tables.
    pub(super) fn states_header(&self, node: &Node) -> Result<u32> {
        let header = self.inputs.states();
        word(header.ok_or_else(|| self.unsupported(node))?)
    }
}
