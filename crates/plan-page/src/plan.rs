//! [`HeaderPlan`]: the bytes of a model's memory and weights, from its header. The numbers are
//! those of the engine; what a backend adds (scratch memory, packed weights) is not among them.

use cellar_engine::{ConfigError, EngineConfig, HEAD_SNAPSHOTS, MemoryBudget, MemoryReport};
use kv_core::memory::{MAX_N_CTX, Streams};
use kv_rows::{KvType, KvTypes, StateType};
use model_core::architecture::Model;
use serde::{Deserialize, Serialize};

use crate::header::HeaderModel;

/// The shortest context of [`HeaderPlan::by_context`].
const FIRST_N_CTX: u32 = 1024;
/// The number of its contexts, each twice as long as the one before.
const N_CONTEXTS: u32 = 11;

/// What a person chooses.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanOptions {
    /// Tokens that the memory holds; `None` for what `cellar plan` takes.
    pub n_ctx: Option<u32>,
    /// Sequences.
    pub n_seqs: u32,
    /// Whether sequences share cells.
    pub streams: Streams,
    /// Type of K rows.
    pub k: KvType,
    /// Type of V rows.
    pub v: KvType,
    /// Type of recurrent states.
    pub state: StateType,
    /// Bytes that memory and weights may take together; `None` where that does not matter.
    pub room: Option<u64>,
}

impl PlanOptions {
    fn config(&self, model: &dyn Model, n_ctx: Option<u32>) -> EngineConfig {
        EngineConfig {
            n_ctx,
            n_snapshots: model.draft_head().map_or(0, |_| HEAD_SNAPSHOTS),
            n_seqs: self.n_seqs,
            streams: self.streams,
            kv_types: KvTypes {
                state: self.state,
                ..KvTypes::new(self.k, self.v)
            },
            budget: MemoryBudget::Unlimited,
            ..EngineConfig::default()
        }
    }
}

/// What a model takes, in bytes.
#[derive(Clone, Debug, Serialize)]
pub struct HeaderPlan {
    /// The rows of the memory.
    #[serde(flatten)]
    pub plan: MemoryReport,
    /// Rows, and what is kept of every cell.
    pub memory: u64,
    /// All tensors, as they are stored.
    pub weights: u64,
    /// Their values.
    pub n_weights: u64,
    /// How they are stored.
    pub quantization: String,
    /// Tokens that the model was trained with.
    pub trained_n_ctx: usize,
    /// The largest context with which memory and weights fit into the room.
    pub largest_n_ctx: Option<u32>,
    /// The memory by context.
    pub by_context: Vec<ContextBytes>,
}

/// The bytes of the memory for a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ContextBytes {
    /// Tokens.
    pub n_ctx: u32,
    /// Rows, and what is kept of every cell.
    pub memory: u64,
}

impl HeaderPlan {
    /// Plans with the engine's own arithmetic.
    ///
    /// # Errors
    /// [`ConfigError`], the first option that makes no sense or does not fit the model.
    pub fn new(header: &HeaderModel, options: &PlanOptions) -> Result<Self, ConfigError> {
        let model = header.model();
        let config = options.config(model, options.n_ctx);
        let settings = config.settings(model)?;
        let lengths = (0..N_CONTEXTS).map(|i| FIRST_N_CTX << i);
        let by_context = lengths.map(|n_ctx| {
            let sizes = options.config(model, Some(n_ctx)).sizes(model)?;
            let memory = sizes.memory_bytes();
            Ok(ContextBytes { n_ctx, memory })
        });
        let weights = header.weights();
        let room = options
            .room
            .and_then(|room| room.checked_sub(weights.n_bytes));
        Ok(Self {
            plan: MemoryReport::new(model, &config, &settings),
            memory: settings.memory_bytes(),
            weights: weights.n_bytes,
            n_weights: weights.n_values,
            quantization: weights.quantization.clone(),
            trained_n_ctx: model.context_length(),
            largest_n_ctx: room.and_then(|room| config.largest_n_ctx(model, room)),
            by_context: by_context.collect::<Result<_, ConfigError>>()?,
        })
    }
}

const _: () = assert!(FIRST_N_CTX << (N_CONTEXTS - 1) <= MAX_N_CTX);
