//! A backend, the rows of one attention layer, and runs of cells, for tests of attention.

#![allow(clippy::unwrap_used)]

use std::num::NonZeroUsize;

use kv_core::{
    CellIdx, CellRun, Pos, Window,
    layers::{AttentionMemory, LayerMap, LayerMemory},
};
use kv_cpu::isa::Isa;
use kv_cpu::{CpuBackend, CpuConfig};
use kv_graph::AttendSpec;
use kv_rows::{KvType, RowLayout};

pub(crate) fn backend(isa: Isa, n_threads: usize) -> CpuBackend {
    let config = CpuConfig {
        n_threads: NonZeroUsize::new(n_threads),
        isa: Some(isa),
        ..CpuConfig::default()
    };
    CpuBackend::new(config).unwrap()
}

/// `n_cells` cells of one layer that is attended as `spec` says.
pub(crate) fn layout(spec: &AttendSpec, n_cells: usize, kv_type: KvType) -> RowLayout {
    let memory = AttentionMemory {
        kv_heads: spec.kv_heads,
        k_dim: spec.k_dim,
        v_dim: spec.v_dim,
        window: Window::Full,
    };
    let map = LayerMap::new(vec![LayerMemory::Attention(memory)]);
    RowLayout::new(&map, &[n_cells], kv_type).unwrap()
}

pub(crate) fn run(cell: u32, pos: u32, len: u32) -> CellRun {
    let (cell, pos) = (CellIdx(cell), Pos(pos));
    CellRun { cell, pos, len }
}
