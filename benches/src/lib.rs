//! Setup that benches share: seeded weights, one-matrix graphs, filled memories.
//!
//! Knows nothing of criterion.

mod exact_shapes;

use std::sync::Arc;

use kv_backend::{Backend, BackendError};
use kv_block::BlockFormat;
use kv_core::batch::{Batch, BatchRules, ValidBatch, validate};
use kv_core::memory::{Memory, MemoryInputs, Streams, Unified, UnifiedConfig};
use kv_core::{Causality, PartIdx, SeqId, TokenId, Window};
use kv_graph::weights::{MemoryWeights, Weight, WeightError};
use kv_graph::{Graph, GraphBuilder, GraphError, GraphShape, Input};

pub use exact_shapes::ExactShapes;

/// Any error of a setup.
pub type Failure = Box<dyn std::error::Error>;

/// A small random number generator (SplitMix64), so that benches are the same everywhere.
#[derive(Clone, Debug)]
pub struct SeededRandom(u64);

impl SeededRandom {
    /// A generator that starts from `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number between -1 and 1.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// A matrix `[rows, columns]` of random blocks with finite scales.
///
/// # Errors
/// [`WeightError`] if `columns` is not a whole number of blocks.
pub fn random_matrix(
    name: &str,
    [rows, columns]: [usize; 2],
    format: BlockFormat,
) -> Result<Weight, WeightError> {
    let mut random = SeededRandom::new(7);
    let bytes = match format {
        BlockFormat::F32 => (0..rows * columns)
            .flat_map(|_| (random.unit() * 0.05).to_le_bytes())
            .collect(),
        // Values as in a model: how a row of BF16 is packed depends on them.
        BlockFormat::BF16 => (0..rows * columns)
            .flat_map(|_| {
                let [_, _, low, high] = (random.unit() * 0.05).to_le_bytes();
                [low, high]
            })
            .collect(),
        // Clears two exponent bits of every 16-bit float, which bounds scales and values.
        _ => {
            let n = rows * columns / format.block_len() * format.block_bytes();
            let bytes = (0..n).map(|_| (random.bits() as u8) & 0xB7);
            let mut bytes: Vec<u8> = bytes.collect();
            if format == BlockFormat::MXFP4 {
                // Its scales are one byte, an exponent.
                let scales = bytes.iter_mut().step_by(format.block_bytes());
                scales.for_each(|e| *e = 120);
            }
            bytes
        }
    };
    Weight::new(name, vec![rows, columns], format, bytes.into())
}

/// One matmul: `[n_tokens, columns]` by a matrix `[rows, columns]`.
///
/// # Errors
/// [`GraphError`] if the sizes do not fit.
pub fn linear_graph(n_tokens: usize, [rows, columns]: [usize; 2]) -> Result<Graph, GraphError> {
    let mut b = GraphBuilder::new(GraphShape {
        n_tokens,
        n_outputs: n_tokens,
    });
    let x = b.input(Input::Embeddings { dim: columns })?;
    let y = b.linear("y", x, "w", rows)?;
    b.finish(&[y])
}

/// A backend's weights with the one matrix `w`.
///
/// # Errors
/// The report of the backend.
pub fn load<B: Backend>(backend: &B, weight: Weight) -> Result<B::Weights, BackendError> {
    let mut weights = MemoryWeights::new();
    weights.insert(weight);
    backend.load_weights(Arc::new(weights), Default::default())
}

/// A memory of `n_cells` cells that all sequences share.
///
/// # Errors
/// If there are no cells or no sequences.
pub fn memory(n_cells: u32, n_seqs: u32, window: Window) -> Result<Unified, Failure> {
    Ok(Unified::new(UnifiedConfig {
        part: PartIdx(0),
        n_seqs,
        n_cells,
        streams: Streams::Shared,
        window,
        causality: Causality::Causal,
    })?)
}

/// The next `n` tokens of each of `n_seqs` sequences, as a batch that fits `memory`.
///
/// # Errors
/// If the batch is not valid.
pub fn next_tokens(memory: &Unified, n_seqs: u32, n: u32) -> Result<ValidBatch, Failure> {
    let mut batch = Batch::new();
    for _ in 0..n {
        for seq in 0..n_seqs {
            batch
                .push_token(TokenId(1))
                .in_sequence(SeqId(seq))
                .with_output();
        }
    }
    let rules = BatchRules {
        n_batch: 1 << 20,
        n_seqs,
        n_vocab: 2,
        n_embd: 1,
    };
    Ok(validate(&batch, &rules, |seq| memory.positions(seq))?)
}

/// Plans and commits a batch, in ubatches of `n_ubatch`.
///
/// # Errors
/// If it does not fit.
pub fn commit(
    memory: &mut Unified,
    batch: &ValidBatch,
    n_ubatch: u32,
    inputs: &mut MemoryInputs,
) -> Result<(), Failure> {
    let mut steps = memory.begin(batch, n_ubatch)?;
    while steps.next(inputs).is_some() {}
    Ok(())
}

/// Seconds that this thread has computed so far.
///
/// # Errors
/// The system does not say.
pub fn cpu_seconds() -> Result<f64, Failure> {
    // Its time is counted when it is scheduled.
    std::thread::yield_now();
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let nanoseconds = text.split(' ').next().unwrap_or_default();
    Ok(nanoseconds.parse::<f64>()? * 1e-9)
}

/// The median of some values.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
