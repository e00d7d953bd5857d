//! [`EngineConfig`]: how much an engine remembers and takes at once, checked before anything is
//! allocated.
//!
//! Invariant: [`Settings`] are consistent and the bytes that they cost are known. Knows no backend.

use kv_core::{
    LayerIdx, MAX_SEQS, TokenId, Window,
    batch::BatchRules,
    layers::LayerMap,
    memory::{
        Composite, MAX_N_CTX, Memory, MemoryConfig, MemoryConfigError, RowCounts, Streams, SwaSize,
    },
};
use kv_rows::{KvType, KvTypes, LayoutError, RowLayout, StateType};
use model_core::architecture::{Model, OutputKind};

/// The context length where none is chosen, unless the model was trained with less.
pub const DEFAULT_N_CTX: u32 = 4096;

/// States that recurrent layers keep to go back to where a head drafts: most of its tokens that are
/// right are among the first.
pub const HEAD_SNAPSHOTS: u32 = 3;

/// How attention over a memory is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionMode {
    /// In one node, over what each row sees: [`Op::Attend`](kv_graph::Op::Attend).
    #[default]
    Fused,
    /// Scores, masked softmax and weighted sum in nodes of their own, over all cells up to the last
    /// that is seen: slower, and everything can be looked at.
    Plain,
}

/// What an embedder chooses.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// Tokens that the memory holds: of all sequences together where they share cells, of each
    /// where they have their own. `None` takes the model's trained length, at most
    /// [`DEFAULT_N_CTX`].
    pub n_ctx: Option<u32>,
    /// Tokens that one call of decode takes.
    pub n_batch: u32,
    /// Tokens that are computed at once; more than `n_batch` has no effect.
    pub n_ubatch: u32,
    /// Sequences that can be remembered at the same time.
    pub n_seqs: u32,
    /// How K and V are stored, by layer and by age, and recurrent states.
    pub kv_types: KvTypes,
    /// Whether sequences share cells.
    pub streams: Streams,
    /// How many cells layers with a window have.
    pub swa: SwaSize,
    /// How attention is computed.
    pub attention: AttentionMode,
    /// Earlier states of each sequence that recurrent layers keep: a sequence can go back by so
    /// many tokens. Each costs as much as the state itself, twice.
    pub n_snapshots: u32,
    /// Sequences that grow at the same time; `None` for all. Sliding windows have cells, and
    /// recurrent layers states, for so many: the others are ids that hold what room is left. An
    /// engine of a [`Service`](crate::serve::Service) runs so many requests at once, and keeps
    /// cached prefixes in the other sequences.
    pub n_active: Option<u32>,
    /// Bytes, at most, for windows and states of sequences beyond those that grow
    /// ([`Streams::PerSequence`]: for further sequences): what is kept of texts that do not go on
    /// has room there. They are allocated in addition; 0 for none.
    pub idle_bytes: u64,
    /// Programs that are kept; the least recently used one makes room for a new one. One serves
    /// ubatches of many shapes where the backend can run it so
    /// ([`Backend::program_capacities`](kv_backend::Backend::program_capacities)), else of
    /// one.
    pub n_programs: usize,
    /// Bytes that the memory may take.
    pub budget: MemoryBudget,
}

/// The longest window of recent tokens that penalties can look at.
pub const MAX_LAST_N: usize = 1 << 20;

/// The largest bias that can be added to a logit, and the smallest is its negative.
pub const MAX_BIAS: f32 = 100.0;

/// The most tokens that log probabilities are given of, not counting the one that was chosen.
pub const MAX_TOP_LOGPROBS: usize = 20;

/// How many bytes the memory of an engine may take, its rows and what is kept of its cells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryBudget {
    /// At most what the backend's device has free ([`Backend::memory`]). Where that is not known,
    /// allocating may be refused.
    ///
    /// [`Backend::memory`]: kv_backend::Backend::memory
    #[default]
    Device,
    /// As many as can be allocated, more than the device has free too: a system may give memory
    /// that it does not have, and end the program once it is used.
    Unlimited,
    /// At most this many.
    Bytes(u64),
}

/// A setting that is out of range, or does not fit the model.
#[derive(Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A count that is 0 or too large.
    #[error("{name} is {got}: it must be between 1 and {max}")]
    OutOfRange {
        /// Which count.
        name: &'static str,
        /// Its value.
        got: usize,
        /// The largest possible value.
        max: usize,
    },
    /// Sizes that cannot be counted.
    #[error("{name} of the model is {got}: more than can be counted")]
    Model {
        /// Which size.
        name: &'static str,
        /// Its value.
        got: usize,
    },
    /// The rows of all cells cannot be counted.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Tokens that see later ones of their ubatch, and a memory whose batches are cut anywhere.
    #[error(
        "tokens of the model see later ones through {window}, but its memory takes a sequence in \
         pieces: its tokens must see each other in both, or in none"
    )]
    CutSequences {
        /// The window through which they do.
        window: Window,
    },
    /// There is no memory for such layers, or none of such a size.
    #[error(transparent)]
    Memory(#[from] MemoryConfigError),
    /// Types for old rows, of a model in which none are.
    #[error(
        "no layer of the model attends over tokens of any age, so none gets old: choose no types for old \
         rows"
    )]
    NothingGetsOld,
    /// A memory of the caller's takes more than it may.
    #[error("the memory takes {wanted} bytes, but only {available} may be used")]
    MemoryOverBudget {
        /// Bytes that its rows and its bookkeeping take.
        wanted: u64,
        /// Bytes of the budget.
        available: u64,
    },
    /// A sampling temperature that is negative or not a number.
    #[error("temperature {0} is not a number of at least 0")]
    Temperature(f32),
    /// The number of standard deviations is negative or no number.
    #[error("top-n-sigma {0} is not a number of at least 0")]
    TopNSigma(f32),
    /// A sampling probability outside `0..=1`.
    #[error("{name} {got} is not between 0 and 1")]
    Probability {
        /// Which setting.
        name: &'static str,
        /// Its value.
        got: f32,
    },
    /// An option about earlier tokens, for a text that is not made in order.
    #[error("masks are not filled in order, so {option} cannot be had: leave it out")]
    OrderOfMasks {
        /// The option.
        option: &'static str,
    },
    /// A strength of guidance that is negative or not a number.
    #[error("guidance {0} is not a number of at least 0")]
    Guidance(f32),
    /// A schedule that would leave out blocks.
    #[error("{n_steps} steps are too few for {n_blocks} blocks: each needs one")]
    TooFewSteps {
        /// Steps.
        n_steps: usize,
        /// Blocks of the text.
        n_blocks: usize,
    },
    /// A repetition penalty that is not positive.
    #[error("repetition penalty {0} is not a number above 0")]
    RepeatPenalty(f32),
    /// A penalty that is not a number.
    #[error("{name} penalty {got} is not a finite number")]
    Penalty {
        /// Which penalty.
        name: &'static str,
        /// Its value.
        got: f32,
    },
    /// A window of penalties that is too long.
    #[error("penalties over the last {got} tokens: at most {MAX_LAST_N} can be looked at")]
    PenaltyWindow {
        /// Its length in tokens.
        got: usize,
    },
    /// A bias that is too large, or not a number.
    #[error(
        "the bias of token {token} is {got}: it must be between -{MAX_BIAS} and {MAX_BIAS}, or a ban"
    )]
    LogitBias {
        /// The token.
        token: TokenId,
        /// Its bias.
        got: f32,
    },
    /// A bias of a token that the vocabulary does not have.
    #[error("the bias is of token {token}, but the vocabulary has {n_tokens} tokens")]
    BiasToken {
        /// The token.
        token: TokenId,
        /// Tokens of the vocabulary.
        n_tokens: usize,
    },
    /// A stop token that the vocabulary does not have.
    #[error("token {token} is to end texts, but the vocabulary has {n_tokens} tokens")]
    StopToken {
        /// The token.
        token: TokenId,
        /// Tokens of the vocabulary.
        n_tokens: usize,
    },
    /// A setting of a sampling step that is too small, or not a number.
    #[error("{name} is {got}: it must be a number of at least {least}")]
    BelowLeast {
        /// Which setting.
        name: &'static str,
        /// Its value.
        got: f32,
        /// The smallest possible value.
        least: u8,
    },
    /// A target of mirostat that is not positive.
    #[error("mirostat target {0} is not a number above 0")]
    MirostatTarget(f32),
    /// An empty sequence breaker of DRY, which would break everywhere.
    #[error("DRY sequence breaker {index} is empty")]
    EmptyBreaker {
        /// Its index.
        index: usize,
    },
    /// A step for which the sampler needs a tokenizer, and was given none.
    #[error("the sampling option {name} needs the tokenizer of the model")]
    NeedsTokenizer {
        /// Which option.
        name: &'static str,
    },
    /// More tokens than the text may have.
    #[error("the text must have at least {min_tokens} tokens, but may have {n_predict} at most")]
    MinTokens {
        /// The least number of tokens.
        min_tokens: usize,
        /// The largest.
        n_predict: usize,
    },
    /// A type for swapped rows that makes them no smaller.
    #[error("rows are stored as {stored}, and are not smaller when they are swapped as {kv_type}")]
    SwapType {
        /// The type.
        kv_type: KvType,
        /// That of the first rows that it makes no smaller.
        stored: KvType,
    },
    /// A type that an operation cannot keep its states in.
    #[error(
        "{architecture} models keep the states of '{op}' (layer {layer}) as f32 only, not as \
         {state_type}: choose --state-type f32"
    )]
    StateType {
        /// The architecture.
        architecture: String,
        /// The operation.
        op: String,
        /// The first layer with it.
        layer: LayerIdx,
        /// The type.
        state_type: StateType,
    },
    /// The same for a model without rows and states.
    #[error("the model has no K and V, and no states, to be swapped as {kv_type}")]
    NothingToSwap {
        /// The type.
        kv_type: KvType,
    },
    /// Fewer texts to choose from than are wanted.
    #[error("best_of is {best_of}: it must be at least n, which is {n}")]
    BestOf {
        /// Texts that are wanted.
        n: u32,
        /// Texts that they are chosen from.
        best_of: u32,
    },
    /// Log probabilities of too many tokens.
    #[error(
        "log probabilities of the {got} likeliest tokens: at most {MAX_TOP_LOGPROBS} can be given"
    )]
    TopLogprobs {
        /// How many were asked for.
        got: usize,
    },
    /// An empty stop string, which would stop every text.
    #[error("stop string {index} is empty")]
    EmptyStop {
        /// Its index.
        index: usize,
    },
    /// The memory takes more than it may.
    #[error(
        "a context of {n_ctx} tokens takes {wanted} bytes in {n_cells} cells, but only {available} \
         may be used; {}",
        largest(*.largest_n_ctx)
    )]
    OverBudget {
        /// The context length.
        n_ctx: u32,
        /// Cells of all parts.
        n_cells: u64,
        /// Bytes that their rows and what is kept of them take.
        wanted: u64,
        /// Bytes of the budget.
        available: u64,
        /// The largest context length that would do, if any does.
        largest_n_ctx: Option<u32>,
    },
}

fn largest(n_ctx: Option<u32>) -> String {
    match n_ctx {
        Some(n_ctx) => format!("the largest context that fits is {n_ctx}"),
        None => "no context fits".to_owned(),
    }
}

/// A configuration that was checked against a model.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Tokens that the memory holds, see [`EngineConfig::n_ctx`].
    pub n_ctx: u32,
    /// Tokens that are computed at once.
    pub n_ubatch: u32,
    /// What a batch must comply with.
    pub rules: BatchRules,
    /// The rows that a backend allocates.
    pub layout: RowLayout,
    /// Programs that are kept.
    pub n_programs: usize,
    /// What the model gives.
    pub output: OutputKind,
    /// How attention is computed.
    pub attention: AttentionMode,
    /// Width of the rows between layers.
    pub embedding_dim: usize,
    layers: LayerMap,
    memory: MemoryConfig,
    n_active: u32,
}

impl Settings {
    /// Sequences that grow at the same time, see [`EngineConfig::n_active`]: without those that
    /// have windows and states of [`EngineConfig::idle_bytes`].
    pub fn n_active(&self) -> u32 {
        self.n_active
    }
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            n_ctx: None,
            n_batch: 2048,
            n_ubatch: 512,
            n_seqs: 1,
            kv_types: KvTypes::new(KvType::F16, KvType::F16),
            streams: Streams::Shared,
            swa: SwaSize::Window,
            attention: AttentionMode::Fused,
            n_snapshots: 0,
            n_active: None,
            idle_bytes: 0,
            n_programs: 8,
            budget: MemoryBudget::Device,
        }
    }
}

impl EngineConfig {
    /// Checks every choice, also against the model, and computes what the memory costs
    /// ([`Settings::layout`]). Allocates nothing.
    ///
    /// # Errors
    /// [`ConfigError`], the first choice that makes no sense; [`ConfigError::OverBudget`] where the
    /// memory takes more than it may.
    pub fn settings(&self, model: &dyn Model) -> Result<Settings, ConfigError> {
        let settings = self.sizes(model)?;
        self.check_budget(model, &settings)?;
        Ok(settings)
    }

    /// [`EngineConfig::sizes`] with room for the windows and states of so many idle sequences.
    pub(crate) fn sizes_with_room(
        &self,
        model: &dyn Model,
        n_more: u32,
    ) -> Result<Settings, ConfigError> {
        let own = self.memory(model)?;
        let mut memory = own;
        if n_more > 0 {
            memory.n_active = Some(own.n_active() + n_more);
            if own.streams == Streams::PerSequence {
                memory.n_seqs += n_more;
            }
        }
        let rows = RowCounts {
            cells: memory.cells_per_part(&self.layers(model)?)?,
            states: memory.n_state_rows(),
        };
        let settings = self.settings_with(model, memory, &rows)?;
        Ok(Settings {
            n_active: own.n_active(),
            ..settings
        })
    }

    /// The settings for a memory of the caller's, which says itself how many rows it needs.
    ///
    /// # Errors
    /// [`ConfigError`], the first choice that makes no sense; [`ConfigError::MemoryOverBudget`]
    /// where the memory takes more than it may.
    pub fn settings_for(
        &self,
        model: &dyn Model,
        memory: &impl Memory,
    ) -> Result<Settings, ConfigError> {
        let config = Self {
            n_seqs: memory.n_seqs(),
            n_snapshots: 0,
            n_active: None,
            idle_bytes: 0,
            ..self.clone()
        };
        let settings = config.settings_with(model, config.memory(model)?, &memory.n_rows())?;
        match (self.budget, settings.memory_bytes()) {
            (MemoryBudget::Bytes(available), wanted) if wanted > available => {
                Err(ConfigError::MemoryOverBudget { wanted, available })
            }
            _ => Ok(settings),
        }
    }

    /// What concerns the memory, with every count in its range.
    fn memory(&self, model: &dyn Model) -> Result<MemoryConfig, ConfigError> {
        let default_n_ctx =
            count("context length", model.context_length())?.clamp(1, DEFAULT_N_CTX);
        let n_ctx = self.n_ctx.unwrap_or(default_n_ctx);
        let (n_batch, n_ubatch) = (self.n_batch as usize, self.n_ubatch as usize);
        in_range("the context length", n_ctx as usize, MAX_N_CTX as usize)?;
        in_range("the batch size", n_batch, MAX_N_CTX as usize)?;
        in_range("the ubatch size", n_ubatch, MAX_N_CTX as usize)?;
        in_range("the number of sequences", self.n_seqs as usize, MAX_SEQS)?;
        in_range("the number of compiled shapes", self.n_programs, 1 << 16)?;
        Ok(MemoryConfig {
            n_ctx,
            n_seqs: self.n_seqs,
            streams: self.streams,
            n_ubatch: self.n_ubatch.min(self.n_batch),
            causality: model.causality(),
            swa: self.swa,
            n_snapshots: self.n_snapshots,
            n_active: self.n_active,
        })
    }

    fn settings_with(
        &self,
        model: &dyn Model,
        memory: MemoryConfig,
        rows: &RowCounts,
    ) -> Result<Settings, ConfigError> {
        let layers = self.layers(model)?;
        self.check_recent(memory.n_ctx)?;
        let settings = Settings {
            n_ctx: memory.n_ctx,
            n_ubatch: memory.n_ubatch,
            rules: BatchRules {
                n_batch: self.n_batch,
                n_seqs: memory.n_seqs,
                n_vocab: count("vocabulary", model.vocab_size())?,
                n_embd: count("width of given rows", model.given_dim())?,
            },
            layout: RowLayout::new(&layers, &rows.cells, &self.kv_types)?
                .with_states(&layers, rows.states)?
                .with_state_type(self.kv_types.state),
            n_programs: self.n_programs,
            output: model.output(),
            attention: self.attention,
            embedding_dim: model.embedding_dim(),
            layers,
            n_active: memory.n_active(),
            memory,
        };
        settings.check_state_type(model)?;
        Ok(settings)
    }
}

impl Settings {
    /// What each layer remembers; see [`EngineConfig::layers`].
    pub fn layers(&self) -> &LayerMap {
        &self.layers
    }

    /// What the memory is made of.
    pub(crate) fn memory_config(&self) -> (&LayerMap, &MemoryConfig) {
        (&self.layers, &self.memory)
    }

    /// Values of one row that comes out: the vocabulary's tokens, the width of an embedding, or the
    /// labels of a classifier.
    pub fn output_width(&self) -> usize {
        match self.output {
            OutputKind::Logits | OutputKind::MaskLogits(_) => self.rules.n_vocab as usize,
            OutputKind::Embeddings => self.embedding_dim,
            OutputKind::Scores { n_labels } => n_labels,
        }
    }

    /// The most tokens of a ubatch: no more than all sequences hold.
    pub(crate) fn max_ubatch(&self) -> usize {
        let n_ctx = self.n_ctx.saturating_mul(self.rules.n_seqs);
        self.n_ubatch.min(n_ctx) as usize
    }

    /// An empty memory of these sizes.
    ///
    /// # Errors
    /// [`ConfigError::Memory`] where the sizes are too large for it.
    pub fn memory(&self) -> Result<Composite, ConfigError> {
        Ok(Composite::new(&self.layers, &self.memory)?)
    }

    /// States of each recurrent layer that are there only to be gone back to.
    pub(crate) fn n_snapshot_rows(&self) -> usize {
        self.memory.n_snapshot_rows()
    }
}

pub(crate) fn in_range(name: &'static str, got: usize, max: usize) -> Result<(), ConfigError> {
    match got {
        0 => Err(ConfigError::OutOfRange { name, got, max }),
        n if n > max => Err(ConfigError::OutOfRange { name, got, max }),
        _ => Ok(()),
    }
}

fn count(name: &'static str, got: usize) -> Result<u32, ConfigError> {
    u32::try_from(got).map_err(|_| ConfigError::Model { name, got })
}
