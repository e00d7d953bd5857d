//! [`TextEngine`]: lists of tokens in, one pooled row each out.
//!
//! Several texts are computed at once, each in its own sequence that sees no other; what the memory
//! holds of them is forgotten before the next ones. Invariant: the row of a text does not depend on
//! the other texts, as far as the backend guarantees. Knows nothing of strings.

use std::sync::Arc;

use kv_backend::Backend;
use kv_core::{
    Causality, SeqId, TokenId,
    batch::Batch,
    layers::{LayerMap, LayerMemory},
};
use kv_rows::KvType;
use model_core::architecture::Model;
use model_core::model_file::OpenModel;
use model_core::sentence::Pooling;
use model_core::tokenizer::TokenPair;

use cellar_engine::Engine;
use cellar_engine::EngineError;
use cellar_engine::{DEFAULT_N_CTX, EngineConfig};

/// Texts that are computed at once, at most; each is a sequence.
const MAX_BATCH_TEXTS: usize = 256;

/// The same for models that keep a state for each sequence, which may be large.
const MAX_BATCH_STATES: usize = 16;

/// Tokens that a model with a memory computes at once.
const MEMORY_UBATCH: u32 = 512;

/// The tokens of one text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TextTokens<'a> {
    pub(crate) tokens: &'a [TokenId],
    /// Where the second text of a pair begins, whose tokens have another type.
    second: usize,
}

impl<'a> TextTokens<'a> {
    /// One text.
    pub(crate) fn of_text(tokens: &'a [TokenId]) -> Self {
        let second = tokens.len();
        Self { tokens, second }
    }

    /// Two texts that are read together.
    pub(crate) fn of_pair(pair: &'a TokenPair) -> Self {
        Self {
            tokens: &pair.tokens,
            second: pair.second,
        }
    }
}

/// How texts are computed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TextSettings {
    /// How the rows of a text become one.
    pub(crate) pooling: Pooling,
    /// The longest text, in tokens, where the file or the caller says it.
    pub(crate) max_tokens: Option<usize>,
    /// Tokens of several texts that are computed at once.
    pub(crate) n_batch: u32,
}

/// How the texts of a file are computed: with which model, in which memory. What a backend takes
/// for it can be planned before one is opened.
#[derive(Clone)]
pub struct TextPlan {
    /// The model that gives rows of texts, which may be another one than the file's.
    pub model: Arc<dyn Model>,
    /// The engine that computes them.
    pub engine: EngineConfig,
    /// The longest text, in tokens.
    pub(crate) max_tokens: usize,
    pub(crate) pooling: Pooling,
    n_batch: u32,
    max_texts: usize,
}

impl std::fmt::Debug for TextPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TextPlan({} tokens)", self.max_tokens)
    }
}

impl TextPlan {
    pub(crate) fn new(model: Arc<dyn Model>, settings: TextSettings) -> Self {
        let trained = model.context_length();
        let memory = TextMemory::of(model.layers());
        let longest = match memory {
            TextMemory::None => trained,
            TextMemory::Cells | TextMemory::States => trained.min(DEFAULT_N_CTX as usize),
        };
        let max_tokens = settings.max_tokens.unwrap_or(longest).min(trained);
        // Cells do not depend on the batch: the context's length chooses the rotation (LongRoPE).
        let n_batch = match memory {
            TextMemory::None => settings.n_batch.max(count(max_tokens)),
            TextMemory::Cells | TextMemory::States => count(max_tokens),
        };
        let n_ubatch = match (memory, model.causality()) {
            (TextMemory::None, _) | (_, Causality::NonCausal) => n_batch,
            _ => n_batch.min(MEMORY_UBATCH),
        };
        let max_texts = match memory {
            TextMemory::None | TextMemory::Cells => MAX_BATCH_TEXTS,
            TextMemory::States => MAX_BATCH_STATES,
        };
        let engine = EngineConfig {
            n_ctx: Some(match memory {
                TextMemory::None => count(trained),
                TextMemory::Cells | TextMemory::States => n_batch,
            }),
            n_batch,
            n_ubatch,
            n_seqs: count(max_texts),
            // Texts are forgotten soon, and vectors are compared to the last digit.
            kv_types: KvType::F32.into(),
            ..EngineConfig::default()
        };
        Self {
            model,
            engine,
            max_tokens,
            pooling: settings.pooling,
            n_batch: settings.n_batch.min(n_batch),
            max_texts,
        }
    }
}

/// An engine for whole texts.
#[derive(Debug)]
pub(crate) struct TextEngine<B: Backend> {
    pub(crate) engine: Engine<B>,
    pub(crate) pooling: Pooling,
    /// The longest text, in tokens.
    pub(crate) max_tokens: usize,
    n_batch: u32,
    /// Texts that are computed at once, at most.
    max_texts: usize,
}

impl<B: Backend> TextEngine<B> {
    /// Loads what was planned.
    pub(crate) fn new(backend: B, file: &OpenModel, plan: TextPlan) -> Result<Self, EngineError> {
        Ok(Self {
            engine: Engine::new(backend, plan.model, file.weights(), &plan.engine)?,
            pooling: plan.pooling,
            max_tokens: plan.max_tokens,
            n_batch: plan.n_batch,
            max_texts: plan.max_texts,
        })
    }

    /// That text number `index` can be computed.
    pub(crate) fn check(&self, index: usize, tokens: &[TokenId]) -> Result<(), EngineError> {
        let limit = self.max_tokens;
        match tokens.len() {
            0 => Err(EngineError::EmptyText { index }),
            n_tokens if n_tokens > limit => Err(EngineError::TextTooLong {
                index,
                n_tokens,
                limit,
            }),
            _ => Ok(()),
        }
    }

    /// How many of the first texts, of so many tokens, are computed at once: at least one.
    pub(crate) fn n_together(&self, n_tokens: impl Iterator<Item = usize>) -> usize {
        let mut total = 0;
        let fits = |n: &usize| {
            total += n;
            total <= self.n_batch as usize
        };
        n_tokens
            .take(self.max_texts)
            .take_while(fits)
            .count()
            .max(1)
    }

    /// The pooled row of each text.
    ///
    /// # Errors
    /// [`EngineError::TextTooLong`], [`EngineError::EmptyText`], before anything is computed, and
    /// [`EngineError`].
    pub(crate) fn rows(&mut self, texts: &[TextTokens<'_>]) -> Result<Vec<Vec<f32>>, EngineError> {
        for (index, text) in texts.iter().enumerate() {
            self.check(index, text.tokens)?;
        }
        let mut rows = Vec::with_capacity(texts.len());
        let mut rest = texts;
        while !rest.is_empty() {
            let n = self.n_together(rest.iter().map(|text| text.tokens.len()));
            let (group, after) = rest.split_at(n);
            self.group(group, &mut rows)?;
            rest = after;
        }
        Ok(rows)
    }

    fn group(
        &mut self,
        texts: &[TextTokens<'_>],
        pooled: &mut Vec<Vec<f32>>,
    ) -> Result<(), EngineError> {
        let mut batch = Batch::new();
        let mut n_rows = Vec::with_capacity(texts.len());
        for (text, seq) in texts.iter().zip((0..).map(SeqId)) {
            let n_tokens = text.tokens.len();
            let wanted = match self.pooling {
                Pooling::Mean | Pooling::None => 0..n_tokens,
                Pooling::Cls | Pooling::Rank => 0..1,
                Pooling::Last => n_tokens.saturating_sub(1)..n_tokens,
            };
            for (at, &token) in text.tokens.iter().enumerate() {
                let entry = batch.push_token(token).in_sequence(seq);
                let entry = entry.of_type(u32::from(at >= text.second));
                if wanted.contains(&at) {
                    entry.with_output();
                }
            }
            n_rows.push(wanted.len());
        }
        self.engine.clear();
        let rows = self.engine.embed(&batch)?;
        let dim = rows.dim();
        let mut rest = rows.values();
        for n in n_rows {
            let (own, after) = rest.split_at((n * dim).min(rest.len()));
            rest = after;
            pooled.push(self.pooling.pool(own, dim));
        }
        Ok(())
    }
}

/// What a model remembers of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TextMemory {
    /// Nothing: its tokens see each other within a ubatch.
    None,
    /// Rows of its tokens.
    Cells,
    /// A state for each sequence, perhaps with rows of tokens.
    States,
}

impl TextMemory {
    fn of(layers: &LayerMap) -> Self {
        let mut memory = Self::None;
        for (index, layer) in layers.iter() {
            if layers.recurrent(index).is_some() {
                return Self::States;
            }
            if layer != LayerMemory::Nothing {
                memory = Self::Cells;
            }
        }
        memory
    }
}

/// A number of tokens or sequences, which models keep below `u32::MAX`.
fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use model_tests::sizes::{CELLS, STATES, Sizes};

    /// Longest text, tokens at once, and of the engine context, batch, ubatch and sequences.
    fn planned(layers: &[LayerMemory], max_tokens: Option<usize>) -> [u32; 6] {
        sizes(layers, Causality::Causal, max_tokens)
    }

    fn sizes(layers: &[LayerMemory], causality: Causality, max_tokens: Option<usize>) -> [u32; 6] {
        let layers = LayerMap::new(layers.to_vec());
        let settings = TextSettings {
            pooling: Pooling::Mean,
            max_tokens,
            n_batch: 2048,
        };
        let plan = TextPlan::new(Arc::new(Sizes { layers, causality }), settings);
        let EngineConfig {
            n_ctx,
            n_batch,
            n_ubatch,
            n_seqs,
            ..
        } = plan.engine;
        assert_eq!(n_seqs as usize, plan.max_texts);
        let longest = plan.max_tokens as u32;
        [
            longest,
            plan.n_batch,
            n_ctx.unwrap(),
            n_batch,
            n_ubatch,
            n_seqs,
        ]
    }

    #[test]
    fn without_a_memory_a_text_is_one_ubatch() {
        let layers = [LayerMemory::Nothing; 2];
        let longest = [20_000, 2048, 20_000, 20_000, 20_000, 256];
        assert_eq!(planned(&layers, None), longest);
        assert_eq!(planned(&layers, Some(30_000)), longest, "what was trained");
        let short = [100, 2048, 20_000, 2048, 2048, 256];
        assert_eq!(planned(&layers, Some(100)), short);
    }

    #[test]
    fn cells_are_there_for_the_longest_text() {
        let layers = [CELLS, LayerMemory::Nothing];
        let longest = [4096, 2048, 4096, 4096, 512, 256];
        assert_eq!(planned(&layers, None), longest);
        assert_eq!(planned(&layers, Some(100)), [100, 100, 100, 100, 100, 256]);
        let longer = [6000, 2048, 6000, 6000, 512, 256];
        assert_eq!(planned(&layers, Some(6000)), longer);
    }

    #[test]
    fn tokens_that_see_later_ones_are_in_one_ubatch() {
        let seen = sizes(&[CELLS], Causality::NonCausal, None);
        assert_eq!(seen, [4096, 2048, 4096, 4096, 4096, 256]);
    }

    #[test]
    fn of_models_with_states_fewer_texts_are_computed_at_once() {
        let wanted = [4096, 2048, 4096, 4096, 512, 16];
        for layers in [&[STATES][..], &[CELLS, STATES], &[STATES, CELLS]] {
            assert_eq!(planned(layers, None), wanted);
        }
    }
}
