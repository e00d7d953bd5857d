//! [`NullBackend`]: the smallest backend. It stores rows, checks everything and computes nothing:
//! all outputs are zeros.
//!
//! It is what to start a backend from, read from top to bottom: each of the seven methods that must
//! be written is here, with what it owes to its caller. [`HostRows`] and [`HostWeights`] are of use
//! to any backend that computes on the host. It also serves tests of memories and schedulers, where
//! logits do not matter. Invariant: it accepts and refuses what a backend that computes would.

use std::sync::Arc;

use kv_core::ids::LayerIdx;
use kv_graph::weights::WeightSource;
use kv_graph::{Graph, Node};
use kv_rows::{KvType, RowLayout, StateType};

use crate::{
    Backend, BackendError, BackendInfo, OnProgress, RowKind, RowSpan, RowStorage, check_inputs,
    check_rows, check_weights, expect_len,
};
use crate::{GraphInputs, GraphOutputs};

/// Name in [`BackendInfo`] and errors.
const NAME: &str = "null";

/// Stores rows and computes nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NullBackend;

/// A graph that fits its weights and rows, and the layout of these rows.
#[derive(Clone, Debug)]
pub struct NullProgram {
    graph: Graph,
    layout: RowLayout,
}

impl Backend for NullBackend {
    // A device with memory of its own has buffers here, weights in its own formats, kernels to
    // launch.
    type Rows = HostRows;
    type Weights = HostWeights;
    type Program = NullProgram;

    fn info(&self) -> BackendInfo {
        BackendInfo {
            name: NAME.to_owned(),
            device: "none".to_owned(),
            // Rows are bytes here, so every type can be stored. Name those that your kernels read.
            kv_types: KvType::ALL.to_vec(),
            state_types: StateType::ALL.to_vec(),
        }
    }

    // Called once for an engine, before anything runs: the only allocation of rows. What does not
    // fit is an error with its size, not an abort.
    fn allocate(&self, layout: &RowLayout) -> Result<HostRows, BackendError> {
        HostRows::zeroed(NAME, layout)
    }

    // No graph is known yet, so a backend may keep the source and load what graphs name. One that
    // copies or packs reports how far it is.
    fn load_weights(
        &self,
        source: Arc<dyn WeightSource>,
        _on_progress: OnProgress,
    ) -> Result<HostWeights, BackendError> {
        Ok(HostWeights(source))
    }

    // The source is asked for each graph anew, so there is nothing to let go of.
    fn forget_weights(
        &self,
        _weights: &HostWeights,
        _names: &[String],
    ) -> Result<(), BackendError> {
        Ok(())
    }

    // Everything that can be refused before inputs are known is refused here: absent weights,
    // shapes, rows, operations. Here belongs what is done once for a graph: choosing kernels,
    // fusing, allocating scratch memory.
    fn compile(
        &self,
        graph: &Graph,
        weights: &HostWeights,
        layout: &RowLayout,
    ) -> Result<NullProgram, BackendError> {
        check_weights(graph, &*weights.0)?;
        check_rows(graph, layout)?;
        Ok(NullProgram {
            graph: graph.clone(),
            layout: layout.clone(),
        })
    }

    // Called for every ubatch. Inputs are checked whole before anything changes; then nodes are
    // computed in their order, stores among them, and the outputs are copied out.
    fn run(
        &self,
        program: &mut NullProgram,
        rows: &mut HostRows,
        inputs: &GraphInputs<'_>,
        outputs: &mut GraphOutputs,
    ) -> Result<(), BackendError> {
        if rows.layout() != &program.layout {
            let reason = "they have another layout than the program".to_owned();
            return Err(BackendError::Input {
                input: "rows",
                reason,
            });
        }
        check_inputs(&program.graph, &program.layout, inputs)?;
        // A backend that computes calls this before each node.
        inputs.check_cancelled()?;
        let graph = &program.graph;
        let sizes = graph.outputs().iter().map(|&id| graph.node(id));
        let sizes = sizes.map(|node| node.map_or(0, Node::n_values));
        for buffer in outputs.resize(sizes) {
            buffer.fill(0.0);
        }
        Ok(())
    }

    // Saved states, copies and shifts of keys go through these two where a backend has no better
    // way.
    fn read_rows(
        &self,
        rows: &HostRows,
        span: RowSpan,
        out: &mut [u8],
    ) -> Result<(), BackendError> {
        let bytes = rows.span(span)?;
        expect_len("bytes of rows", bytes.len(), out.len())?;
        out.copy_from_slice(bytes);
        Ok(())
    }

    fn write_rows(
        &self,
        rows: &mut HostRows,
        span: RowSpan,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        let to = rows.span_mut(span)?;
        expect_len("bytes of rows", to.len(), bytes.len())?;
        to.copy_from_slice(bytes);
        Ok(())
    }
}

/// Weights in their source.
#[derive(Clone)]
pub struct HostWeights(pub Arc<dyn WeightSource>);

impl std::fmt::Debug for HostWeights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HostWeights({} weights)", self.0.names().len())
    }
}

/// Rows in the memory of the host, as the bytes that [`RowShape`](kv_rows::RowShape)
/// defines.
#[derive(Clone, Debug, PartialEq)]
pub struct HostRows {
    layout: RowLayout,
    /// One entry for each kind of rows of each layer.
    stored: Vec<NullRow>,
}

#[derive(Clone, Debug, PartialEq)]
struct NullRow {
    layer: LayerIdx,
    kind: RowKind,
    bytes: Vec<u8>,
}

impl HostRows {
    /// Rows of zeros for `backend`.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`].
    pub fn zeroed(backend: &'static str, layout: &RowLayout) -> Result<Self, BackendError> {
        let mut stored = Vec::new();
        let mut add = |layer, kind, wanted: usize| {
            // Whether it can be had; untouched zeros take no pages.
            Vec::<u8>::new()
                .try_reserve_exact(wanted)
                .map_err(|_| BackendError::OutOfMemory {
                    backend,
                    wanted,
                    what: format!("{kind:?} rows of layer {layer}"),
                })?;
            let bytes = vec![0; wanted];
            stored.push(NullRow { layer, kind, bytes });
            Ok::<_, BackendError>(())
        };
        for rows in layout.layers() {
            add(rows.layer, RowKind::K, rows.n_rows * rows.k.bytes())?;
            if let Some(v) = rows.stored_v() {
                add(rows.layer, RowKind::V, rows.n_rows * v.bytes())?;
            }
        }
        for states in layout.states() {
            let (n_rows, layer) = (states.n_rows, states.layer);
            add(layer, RowKind::Conv, n_rows * states.conv_bytes())?;
            add(layer, RowKind::State, n_rows * states.state_bytes())?;
        }
        Ok(Self {
            layout: layout.clone(),
            stored,
        })
    }

    /// The bytes of some rows.
    ///
    /// # Errors
    /// [`BackendError::NoRows`] or [`BackendError::RowOutOfRange`].
    pub fn span(&self, span: RowSpan) -> Result<&[u8], BackendError> {
        let range = span.byte_range(&self.layout)?;
        let stored = self.stored(span.layer, span.kind)?;
        let bytes = stored.bytes.get(range);
        bytes.ok_or(BackendError::NoRows { layer: span.layer })
    }

    /// The same, to be written.
    ///
    /// # Errors
    /// As [`HostRows::span`].
    pub fn span_mut(&mut self, span: RowSpan) -> Result<&mut [u8], BackendError> {
        let range = span.byte_range(&self.layout)?;
        let none = BackendError::NoRows { layer: span.layer };
        let is_it = |s: &&mut NullRow| (s.layer, s.kind) == (span.layer, span.kind);
        let stored = self.stored.iter_mut().find(is_it);
        stored.and_then(|s| s.bytes.get_mut(range)).ok_or(none)
    }

    fn stored(&self, layer: LayerIdx, kind: RowKind) -> Result<&NullRow, BackendError> {
        let is_it = |s: &&NullRow| (s.layer, s.kind) == (layer, kind);
        let stored = self.stored.iter().find(is_it);
        stored.ok_or(BackendError::NoRows { layer })
    }
}

impl RowStorage for HostRows {
    fn layout(&self) -> &RowLayout {
        &self.layout
    }

    fn allocated_bytes(&self, layer: LayerIdx, kind: RowKind) -> Result<usize, BackendError> {
        Ok(self.stored(layer, kind)?.bytes.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_core::{
        ids::{CellIdx, PartIdx},
        layers::{AttentionMemory, LayerMap, LayerMemory},
        memory::PartInputs,
        visibility::Visibility,
        window::Window,
    };
    use kv_graph::weights::MemoryWeights;
    use kv_graph::{GraphBuilder, GraphShape, Input};

    const LAYER: LayerIdx = LayerIdx(0);

    fn layout() -> RowLayout {
        let memory = AttentionMemory {
            kv_heads: 1,
            k_dim: 4,
            v_dim: 2,
            window: Window::Full,
        };
        let map = LayerMap::new(vec![LayerMemory::Attention(memory)]);
        RowLayout::new(&map, &[8], KvType::F32).unwrap()
    }

    /// Stores and multiplies two tokens of six values.
    fn graph() -> Graph {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 2,
            n_outputs: 0,
        });
        let x = b.input(Input::Embeddings { dim: 6 }).unwrap();
        let cells = b.input(Input::Cells { part: PartIdx(0) }).unwrap();
        let k = b.columns("k", x, 0..4).unwrap();
        let k = b.reshape("k_heads", k, &[2, 1, 4]).unwrap();
        let v = b.columns("v", x, 4..6).unwrap();
        let v = b.reshape("v_heads", v, &[2, 1, 2]).unwrap();
        b.store_kv("store", LAYER, [k, v, cells]).unwrap();
        let y = b.linear("y", x, "y.w", 3).unwrap();
        b.finish(&[y]).unwrap()
    }

    fn compile(shape: &[usize], layout: &RowLayout) -> Result<NullProgram, BackendError> {
        let mut weights = MemoryWeights::new();
        let values = vec![0.5; shape.iter().product()];
        weights.insert_f32("y.w", shape, &values).unwrap();
        let weights = NullBackend.load_weights(Arc::new(weights), Default::default())?;
        NullBackend.compile(&graph(), &weights, layout)
    }

    #[test]
    fn a_run_gives_zeros_of_the_right_shape() {
        let mut program = compile(&[3, 6], &layout()).unwrap();
        let mut rows = NullBackend.allocate(&layout()).unwrap();
        let parts = [PartInputs {
            cells: vec![CellIdx(1), CellIdx(7)],
            visibility: Visibility::default(),
            ..PartInputs::default()
        }];
        let inputs = GraphInputs {
            embeddings: &[1.0; 12],
            parts: &parts,
            ..GraphInputs::default()
        };
        let mut outputs = GraphOutputs {
            values: vec![vec![f32::NAN; 9]; 2],
        };
        let mut run = |inputs: &GraphInputs<'_>| {
            NullBackend.run(&mut program, &mut rows, inputs, &mut outputs)
        };
        run(&inputs).unwrap();
        let short = GraphInputs {
            embeddings: &[1.0; 11],
            ..inputs
        };
        assert_eq!(
            run(&short).unwrap_err().to_string(),
            "input embeddings: the graph takes 12 values, got 11"
        );
        assert_eq!(outputs.values, [[0.0; 6]]);
    }

    #[test]
    fn what_does_not_fit_is_refused_when_compiling() {
        let error =
            |shape: &[usize], layout: RowLayout| compile(shape, &layout).unwrap_err().to_string();
        assert_eq!(
            error(&[6, 3], layout()),
            "weight 'y.w' has shape [6, 3], but the model's settings need [3, 6]"
        );
        assert_eq!(
            error(&[3, 6], RowLayout::default()),
            "layer 0 has no rows of this kind in the memory"
        );
        let nothing = HostWeights(Arc::new(MemoryWeights::new()));
        let missing = NullBackend.compile(&graph(), &nothing, &layout());
        assert_eq!(
            missing.unwrap_err().to_string(),
            "weight 'y.w' is missing; node 'y' needs it as [3, 6]"
        );
    }

    #[test]
    fn rows_are_read_and_written_in_their_bounds() {
        let mut rows = NullBackend.allocate(&layout()).unwrap();
        let span = |first, len| RowSpan {
            layer: LAYER,
            kind: RowKind::V,
            first: CellIdx(first),
            len,
        };
        NullBackend
            .write_rows(&mut rows, span(2, 2), &[7; 16])
            .unwrap();
        let mut bytes = [1; 24];
        NullBackend
            .read_rows(&rows, span(1, 3), &mut bytes)
            .unwrap();
        assert_eq!(bytes[..8], [0; 8]);
        assert_eq!(bytes[8..], [7; 16]);
        assert_eq!(rows.allocated_bytes(LAYER, RowKind::V).unwrap(), 64);
        let beyond = NullBackend.read_rows(&rows, span(7, 2), &mut bytes[..16]);
        assert!(matches!(
            beyond,
            Err(BackendError::RowOutOfRange { end: 9, .. })
        ));
        let short = NullBackend.write_rows(&mut rows, span(0, 2), &[0; 15]);
        assert!(matches!(
            short,
            Err(BackendError::WrongLength { got: 15, .. })
        ));
    }
}
