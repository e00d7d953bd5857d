//! Things that tests talk about: layouts of one part, tokens in cells, what they see, and a small
//! random model in the manner of Llama.

use std::sync::Arc;

use super::Random;
use kv_backend::GraphInputs;
use kv_block::{BlockFormat, quantize};
use kv_core::{
    Causality, CellIdx, CellRun, LayerIdx, PartIdx, Pos, PosRange, Visibility, VisibleGroup,
    Window,
    layers::{AttentionMemory, LayerMap, LayerMemory},
    memory::{BatchVisibility, PartInputs, StateGroup},
};
use kv_graph::rope::{RopeScaling, RopeSpec, RopeStyle};
use kv_graph::weights::{MemoryWeights, Weight, WeightSource};
use kv_graph::{
    Activation, AttendSpec, Graph, GraphBuilder, GraphError, GraphShape, Input, NodeId,
};
use kv_rows::{KvType, KvTypes, RowLayout};

/// A layout of `n_layers` equal layers with `n_cells` cells of `heads × (k_dim, v_dim)`.
pub(super) fn layout(
    n_layers: usize,
    n_cells: usize,
    (kv_heads, k_dim, v_dim): (usize, usize, usize),
    types: impl Into<KvTypes>,
) -> RowLayout {
    let memory = AttentionMemory {
        kv_heads,
        k_dim,
        v_dim,
        window: Window::Full,
    };
    let map = LayerMap::new(vec![LayerMemory::Attention(memory); n_layers]);
    let cells: Vec<usize> = map.parts().iter().map(|_| n_cells).collect();
    RowLayout::new(&map, &cells, types).unwrap()
}

/// `dim`, or the next width of heads of which rows of `kv_type` can be made.
pub(super) fn fitting(heads: usize, dim: usize, kv_type: KvType) -> usize {
    match kv_type.block_len() {
        len if (heads * dim).is_multiple_of(len) => dim,
        len => dim.next_multiple_of(len),
    }
}

/// Runs of cells that hold these positions; neighbours in both are joined.
pub(super) fn runs(cells: &[(u32, u32)]) -> Vec<CellRun> {
    let mut sorted: Vec<(u32, u32)> = cells.iter().map(|&(cell, pos)| (pos, cell)).collect();
    sorted.sort_unstable();
    let mut runs: Vec<CellRun> = Vec::new();
    for (pos, cell) in sorted {
        match runs.last_mut() {
            Some(run) if run.pos.0 + run.len == pos && run.cell.0 + run.len == cell => run.len += 1,
            _ => runs.push(CellRun {
                cell: CellIdx(cell),
                pos: Pos(pos),
                len: 1,
            }),
        }
    }
    runs
}

/// One token of a scene: a line of text, a position in it, and the cell that remembers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// The token's id.
    pub id: u32,
    /// The text that it belongs to.
    pub text: usize,
    /// Its position.
    pub pos: u32,
    /// Its cell.
    pub cell: u32,
}

/// Tokens that are in the memory of one part, and what later ones see of them.
#[derive(Clone, Debug, Default)]
pub struct Scene {
    /// Tokens that were run, in that order.
    pub seen: Vec<Token>,
}

/// Everything that one run needs besides the graph.
#[derive(Clone, Debug, Default)]
pub struct Step {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Positions.
    pub positions: Vec<u32>,
    /// Types of the tokens, where the graph wants them.
    pub token_types: Vec<u32>,
    /// Position, row and column, where the graph wants them.
    pub coordinates: Vec<[u32; 3]>,
    /// Rows whose logits are wanted.
    pub output_rows: Vec<u32>,
    /// Embedding rows, where the graph wants them.
    pub embeddings: Vec<f32>,
    /// Cells and visibility.
    pub parts: Vec<PartInputs>,
    /// The visibility of the tokens' own ubatch, where the graph wants it.
    pub batch: Vec<BatchVisibility>,
    /// Groups of rows of recurrent layers.
    pub states: Vec<StateGroup>,
}

impl Step {
    /// The same, borrowed.
    pub fn inputs(&self) -> GraphInputs<'_> {
        GraphInputs {
            shape: None,
            tokens: &self.tokens,
            embeddings: &self.embeddings,
            positions: &self.positions,
            token_types: &self.token_types,
            coordinates: &self.coordinates,
            output_rows: &self.output_rows,
            parts: &self.parts,
            batch: &self.batch,
            states: &self.states,
            cancel: None,
            progress: None,
        }
    }
}

impl Scene {
    /// Adds `tokens` and returns how they are run together: every token sees its own text through
    /// `window`; rows of one text form one group.
    pub fn step(&mut self, tokens: &[Token], window: Window, output_rows: &[u32]) -> Step {
        self.seen.extend_from_slice(tokens);
        let mut texts: Vec<usize> = tokens.iter().map(|t| t.text).collect();
        texts.sort_unstable();
        texts.dedup();
        let group = |&text: &usize| {
            let of_text = |t: &&Token| t.text == text;
            let cells: Vec<_> = self
                .seen
                .iter()
                .filter(of_text)
                .map(|t| (t.cell, t.pos))
                .collect();
            let own = (0u32..).zip(tokens).filter(|(_, t)| t.text == text);
            let (rows, limits): (Vec<u32>, Vec<PosRange>) = own
                .map(|(row, t)| (row, window.visible_keys(Pos(t.pos), Causality::Causal)))
                .unzip();
            VisibleGroup::new(rows, runs(&cells), limits)
        };
        let groups = texts.iter().map(group).collect();
        let part = PartInputs {
            cells: tokens.iter().map(|t| CellIdx(t.cell)).collect(),
            visibility: Visibility::new(tokens.len() as u32, groups),
            ..PartInputs::default()
        };
        Step {
            tokens: tokens.iter().map(|t| t.id).collect(),
            positions: tokens.iter().map(|t| t.pos).collect(),
            output_rows: output_rows.to_vec(),
            parts: vec![part],
            ..Step::default()
        }
    }
}

/// Sizes of the small model: 2 layers, 4 query heads on 2 key/value heads of 16 values, width 64.
pub(super) const VOCAB: usize = 96;
pub(super) const WIDTH: usize = 64;
pub(super) const N_LAYERS: usize = 2;
pub(super) const SPEC: AttendSpec = AttendSpec {
    n_heads: 4,
    kv_heads: 2,
    k_dim: 16,
    v_dim: 16,
    scale: 0.25,
    soft_cap: None,
    alibi: None,
};
const HIDDEN: usize = 96;

/// Rows for [`tiny_llama`]: one part of `n_cells` cells, its keys and values of `kv_type`.
pub fn tiny_layout(n_cells: usize, kv_type: KvType) -> RowLayout {
    layout(
        N_LAYERS,
        n_cells,
        (SPEC.kv_heads, SPEC.k_dim, SPEC.v_dim),
        kv_type,
    )
}

pub(super) fn rope(style: RopeStyle, n_rot: usize) -> RopeSpec {
    RopeSpec {
        style,
        n_rot,
        base: 10_000.0,
        scaling: RopeScaling::None,
        factors: None,
    }
}

/// A decoder of two layers in the manner of Llama: embedding, norms, attention with RoPE and
/// grouped heads, a gated feed-forward net, output head. Rows: 2 heads of 16 values, one part.
pub fn tiny_llama(shape: GraphShape) -> Graph {
    let mut b = GraphBuilder::new(shape);
    llama_logits(&mut b)
        .and_then(|logits| b.finish(&[logits]))
        .unwrap()
}

fn llama_logits(b: &mut GraphBuilder) -> Result<NodeId, GraphError> {
    let (part, n, window) = (PartIdx(0), b.shape().n_tokens, Window::Full);
    let tokens = b.input(Input::Tokens)?;
    let positions = b.input(Input::Positions)?;
    let cells = b.input(Input::Cells { part })?;
    let visibility = b.input(Input::Visibility { part, window })?;
    let wanted = b.input(Input::OutputRows)?;
    let (rope, eps) = (rope(RopeStyle::Norm, SPEC.k_dim), 1e-5);
    let mut x = b.embed("embd", tokens, "embd.w", [VOCAB, WIDTH])?;
    for layer in (0..N_LAYERS as u32).map(LayerIdx) {
        let b = &mut b.scope(layer);
        let norm = b.rms_norm("attn_norm", x, "attn_norm.w", eps)?;
        let heads = |b: &mut GraphBuilder, s: &str, heads: usize, dim: usize| {
            let y = b.linear(s, norm, &format!("{s}.w"), heads * dim)?;
            b.reshape(&format!("{s}_heads"), y, &[n, heads, dim])
        };
        let q = heads(b, "q", SPEC.n_heads, SPEC.k_dim)?;
        let q = b.rope("q_rope", q, positions, &rope)?;
        let k = heads(b, "k", SPEC.kv_heads, SPEC.k_dim)?;
        let k = b.rope("k_rope", k, positions, &rope)?;
        let v = heads(b, "v", SPEC.kv_heads, SPEC.v_dim)?;
        let stored = b.store_kv("store", layer, [k, v, cells])?;
        let kqv = b.attend("kqv", layer, SPEC, [q, stored, visibility])?;
        let out = b.linear("attn_out", kqv, "o.w", WIDTH)?;
        x = b.add("attn_residual", out, x)?;
        let norm = b.rms_norm("ffn_norm", x, "ffn_norm.w", eps)?;
        let gate = b.linear("gate", norm, "gate.w", HIDDEN)?;
        let up = b.linear("up", norm, "up.w", HIDDEN)?;
        let hidden = b.gate("gated", Activation::Silu, gate, up)?;
        let down = b.linear("down", hidden, "down.w", WIDTH)?;
        x = b.add("ffn_residual", down, x)?;
    }
    let x = b.take_rows("wanted", x, wanted)?;
    let x = b.rms_norm("norm", x, "norm.w", eps)?;
    b.linear("logits", x, "embd.w", VOCAB)
}

/// Random `F32` weights for every weight that `graph` names.
pub fn tiny_weights(graph: &Graph, seed: u64) -> Arc<dyn WeightSource> {
    Arc::new(memory_weights(graph, seed))
}

/// The same weights with their matrices in blocks of `format`.
pub fn in_blocks(plain: &dyn WeightSource, format: BlockFormat) -> Arc<dyn WeightSource> {
    let mut weights = MemoryWeights::new();
    for name in plain.names() {
        let weight = plain.get(&name).unwrap();
        if weight.shape().len() == 1 {
            weights.insert(weight);
            continue;
        }
        let bytes = quantize(format, &weight.to_f32()).unwrap();
        let shape = weight.shape().to_vec();
        weights.insert(Weight::new(name, shape, format, bytes.into()).unwrap());
    }
    Arc::new(weights)
}

pub(super) fn memory_weights(graph: &Graph, seed: u64) -> MemoryWeights {
    let mut random = Random::new(seed);
    let mut weights = MemoryWeights::new();
    for weight in graph.weights() {
        let n = weight.shape.iter().product();
        let columns = *weight.shape.last().unwrap_or(&1);
        // Vectors are gains around 1 (also right for divisors), matrices keep the scale.
        let spread = (3.0 / columns as f32).sqrt();
        let value = |r: &mut Random| match weight.shape.len() {
            1 => 1.0 + 0.25 * r.value(),
            _ => spread * r.value(),
        };
        let values: Vec<f32> = (0..n).map(|_| value(&mut random)).collect();
        weights
            .insert_f32(&weight.name, &weight.shape, &values)
            .unwrap();
    }
    weights
}

/// `n` tokens of one text with positions from `first` on, in the given cells.
pub(super) fn text(random: &mut Random, text: usize, first: u32, cells: &[u32]) -> Vec<Token> {
    let token = |(pos, &cell)| Token {
        id: random.below(VOCAB) as u32,
        text,
        pos,
        cell,
    };
    (first..).zip(cells).map(token).collect()
}
