//! [`Embedder`]: texts in, one vector each out.
//!
//! Several texts are computed at once, each in its own sequence that sees no other. Invariant: the
//! vector of a text does not depend on the other texts, as far as the backend guarantees, and texts
//! are truncated only on request. Knows nothing of where texts come from.

use kv_core::backend::Backend;
use kv_core::batch::Batch;
use kv_core::{SeqId, TokenId};
use model_core::architecture::OutputKind;
use model_core::model_file::OpenModel;
use model_core::sentence::{Pooling, SentenceSettings, normalise};
use model_core::tokenizer::{EncodeOptions, Tokenizer};

use crate::config::EngineConfig;
use crate::decode::Engine;
use crate::error::EngineError;

/// Texts that are computed at once, at most; each is a sequence.
const MAX_BATCH_TEXTS: usize = 256;

/// The settings of an [`Embedder`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbedderConfig {
    /// How the rows of a text become one vector; `None` takes the file's pooling.
    pub pooling: Option<Pooling>,
    /// The length of vectors.
    pub normalization: Normalization,
    /// What to do with a text that is too long.
    pub long_texts: LongTexts,
    /// Tokens of several texts that are computed at once; a longer text is computed alone.
    pub n_batch: u32,
}

/// The length of vectors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Normalization {
    /// 1, so that a dot product is the cosine similarity.
    #[default]
    Unit,
    /// As pooled.
    None,
}

/// What to do with a text of more tokens than the model takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LongTexts {
    /// Return an error with the numbers.
    #[default]
    Refuse,
    /// Cut off its end, but keep the token that ends every text.
    Truncate,
}

/// An encoder on a backend, which computes vectors of texts.
///
/// ```no_run
/// # use {kv_candle::CandleBackend, model_core::architecture::Registry};
/// # fn vectors(backend: CandleBackend, registry: Registry) -> Result<(), Box<dyn std::error::Error>> {
/// use engine::{Embedder, EmbedderConfig};
/// use model_core::model_file::ModelFile;
///
/// let file = ModelFile::open("all-MiniLM-L6-v2", &registry)?;
/// let mut embedder = Embedder::new(backend, &file, &EmbedderConfig::default())?;
/// let vectors = embedder.embed(file.tokenizer(), &["A cat.", "A dog."])?;
/// assert_eq!(vectors[0].len(), embedder.dim());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Embedder<B: Backend> {
    engine: Engine<B>,
    pooling: Pooling,
    config: EmbedderConfig,
    max_tokens: usize,
}

impl Default for EmbedderConfig {
    fn default() -> Self {
        Self {
            pooling: None,
            normalization: Normalization::default(),
            long_texts: LongTexts::default(),
            n_batch: 2048,
        }
    }
}

impl<B: Backend> Embedder<B> {
    /// Loads an encoder into a backend.
    ///
    /// # Errors
    /// [`EngineError`], before anything is loaded where the model is not an encoder or has no
    /// pooling.
    pub fn new(backend: B, file: &OpenModel, config: &EmbedderConfig) -> Result<Self, EngineError> {
        let model = file.model();
        let architecture = || model.architecture().to_owned();
        if model.output() != OutputKind::Embeddings {
            let architecture = architecture();
            return Err(EngineError::NoEncoder { architecture });
        }
        let settings = SentenceSettings::read(file.metadata())?;
        let Some(pooling) = config.pooling.or(settings.pooling) else {
            let architecture = architecture();
            return Err(EngineError::NoPooling { architecture });
        };
        let context = model.context_length();
        let max_tokens = settings.max_tokens.map_or(context, |n| n.min(context));
        let n_batch = config.n_batch.max(count(max_tokens));
        let engine_config = EngineConfig {
            n_ctx: Some(count(context)),
            n_batch,
            n_ubatch: n_batch,
            n_seqs: count(MAX_BATCH_TEXTS),
            ..EngineConfig::default()
        };
        let (model, weights) = (model.clone(), file.weights());
        Ok(Self {
            engine: Engine::new(backend, model, weights, &engine_config)?,
            pooling,
            config: *config,
            max_tokens,
        })
    }

    /// The number of values in a vector.
    pub fn dim(&self) -> usize {
        self.engine.settings().output_width()
    }

    /// The most tokens that a text can have, with those around it.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// How the rows of a text become one.
    pub fn pooling(&self) -> Pooling {
        self.pooling
    }

    /// The engine that computes rows.
    pub fn engine(&self) -> &Engine<B> {
        &self.engine
    }

    /// The tokens of every text, none more than the model takes.
    ///
    /// # Errors
    /// [`EngineError::TextTooLong`] where that is an error, [`EngineError::EmptyText`].
    pub fn tokens(
        &self,
        tokenizer: &Tokenizer,
        texts: &[impl AsRef<str>],
    ) -> Result<Vec<Vec<TokenId>>, EngineError> {
        let encode = |(index, text): (usize, &_)| {
            let text: &str = AsRef::as_ref(text);
            let mut tokens = tokenizer.encode(text, EncodeOptions::PROMPT);
            let (n_tokens, limit) = (tokens.len(), self.max_tokens);
            if n_tokens > limit && self.config.long_texts == LongTexts::Truncate {
                let last = tokenizer.adds_last();
                tokens.truncate(limit - usize::from(last.is_some()));
                tokens.extend(last);
            }
            self.check(index, &tokens)?;
            Ok(tokens)
        };
        texts.iter().enumerate().map(encode).collect()
    }

    /// A vector for each text.
    ///
    /// # Errors
    /// As [`Embedder::tokens`], before anything is computed, and [`EngineError`].
    pub fn embed(
        &mut self,
        tokenizer: &Tokenizer,
        texts: &[impl AsRef<str>],
    ) -> Result<Vec<Vec<f32>>, EngineError> {
        let tokens = self.tokens(tokenizer, texts)?;
        self.embed_tokens(&tokens)
    }

    /// A vector for each list of tokens.
    ///
    /// # Errors
    /// [`EngineError::TextTooLong`], [`EngineError::EmptyText`] and [`EngineError`].
    pub fn embed_tokens(
        &mut self,
        texts: &[impl AsRef<[TokenId]>],
    ) -> Result<Vec<Vec<f32>>, EngineError> {
        for (index, tokens) in texts.iter().enumerate() {
            self.check(index, tokens.as_ref())?;
        }
        let mut vectors = Vec::with_capacity(texts.len());
        let mut rest = texts;
        while !rest.is_empty() {
            let (group, after) = rest.split_at(self.n_together(rest));
            self.embed_group(group, &mut vectors)?;
            rest = after;
        }
        Ok(vectors)
    }

    /// How many of the first texts are computed at once: at least one.
    pub fn n_together(&self, texts: &[impl AsRef<[TokenId]>]) -> usize {
        let mut n_tokens = 0;
        let fits = |text: &&_| {
            n_tokens += AsRef::<[TokenId]>::as_ref(*text).len();
            n_tokens <= self.config.n_batch as usize
        };
        texts
            .iter()
            .take(MAX_BATCH_TEXTS)
            .take_while(fits)
            .count()
            .max(1)
    }

    fn check(&self, index: usize, tokens: &[TokenId]) -> Result<(), EngineError> {
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

    fn embed_group(
        &mut self,
        texts: &[impl AsRef<[TokenId]>],
        vectors: &mut Vec<Vec<f32>>,
    ) -> Result<(), EngineError> {
        let mut batch = Batch::new();
        let mut n_rows = Vec::with_capacity(texts.len());
        for (text, seq) in texts.iter().zip((0..).map(SeqId)) {
            let tokens = text.as_ref();
            let wanted = match self.pooling {
                Pooling::Mean => 0..tokens.len(),
                Pooling::Cls => 0..1,
                Pooling::Last => tokens.len().saturating_sub(1)..tokens.len(),
            };
            for (at, &token) in tokens.iter().enumerate() {
                let entry = batch.push_token(token).in_sequence(seq);
                if wanted.contains(&at) {
                    entry.with_output();
                }
            }
            n_rows.push(wanted.len());
        }
        let rows = self.engine.embed(&batch)?;
        let dim = rows.dim();
        let mut rest = rows.values();
        for n in n_rows {
            let (own, after) = rest.split_at((n * dim).min(rest.len()));
            rest = after;
            let mut vector = self.pooling.pool(own, dim);
            if self.config.normalization == Normalization::Unit {
                normalise(&mut vector);
            }
            vectors.push(vector);
        }
        Ok(())
    }
}

/// A number of tokens or sequences, which models keep below `u32::MAX`.
fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
