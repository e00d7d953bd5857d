//! [`Embedder`]: texts in, one vector each out.
//!
//! Invariant: the vector of a text does not depend on the other texts, as far as the backend
//! guarantees, and texts are truncated only on request. Knows nothing of where texts come from.

use std::sync::Arc;

use kv_backend::Backend;
use kv_core::TokenId;
use model_core::architecture::OutputKind;
use model_core::model_file::OpenModel;
use model_core::sentence::{Normalization, Pooling, SentenceSettings, normalise};
use model_core::tokenizer::{EncodeOptions, Tokenizer};

use crate::texts::{TextEngine, TextPlan, TextSettings, TextTokens};
use cellar_engine::Engine;
use cellar_engine::EngineError;

/// The settings of an [`Embedder`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbedderConfig {
    /// How the rows of a text become one vector; `None` takes the file's pooling.
    pub pooling: Option<Pooling>,
    /// The length of vectors; `None` takes the file's, and where that says nothing, 1. Rows without
    /// pooling stay as they are.
    pub normalization: Option<Normalization>,
    /// What to do with a text that is too long.
    pub long_texts: LongTexts,
    /// The longest text in tokens, at most what the model was trained with. `None` takes what it
    /// was made for; of a model that stores keys and values, at most
    /// [`DEFAULT_N_CTX`](cellar_engine::DEFAULT_N_CTX).
    pub max_tokens: Option<u32>,
    /// Tokens of several texts that are computed at once; a longer text is computed alone.
    pub n_batch: u32,
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

/// A model on a backend, which computes vectors of texts: an encoder, or a decoder without its
/// output matrix, whose tokens see no later ones.
///
/// ```no_run
/// # use {kv_candle::CandleBackend, model_core::architecture::Registry};
/// # type Error = Box<dyn std::error::Error>;
/// # fn vectors(backend: CandleBackend, registry: Registry) -> Result<(), Error> {
/// use cellar_tasks::{Embedder, EmbedderConfig};
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
    texts: TextEngine<B>,
    normalization: Normalization,
    long_texts: LongTexts,
}

impl Default for EmbedderConfig {
    fn default() -> Self {
        Self {
            pooling: None,
            normalization: None,
            long_texts: LongTexts::default(),
            max_tokens: None,
            n_batch: 2048,
        }
    }
}

impl EmbedderConfig {
    /// How an [`Embedder`] of this file computes.
    ///
    /// # Errors
    /// [`EngineError`] where the model gives no vectors or has no pooling.
    pub fn plan(&self, file: &OpenModel) -> Result<TextPlan, EngineError> {
        let settings = SentenceSettings::read(file.metadata())?;
        self.plan_with(file, &settings)
    }

    fn plan_with(
        &self,
        file: &OpenModel,
        settings: &SentenceSettings,
    ) -> Result<TextPlan, EngineError> {
        let model = file.model();
        let architecture = || model.architecture().to_owned();
        let without_head = match model.output() {
            OutputKind::Embeddings => Some(Arc::clone(model)),
            OutputKind::Logits => model.without_head(),
            OutputKind::Scores { .. } | OutputKind::MaskLogits(_) => None,
        };
        let Some(embedding_model) = without_head else {
            return Err(EngineError::NoVectors {
                architecture: architecture(),
            });
        };
        let pooling = self.pooling.or(settings.pooling);
        let Some(pooling) = pooling.filter(|&pooling| pooling != Pooling::Rank) else {
            let architecture = architecture();
            return Err(EngineError::NoPooling { architecture });
        };
        let text_settings = TextSettings {
            pooling,
            max_tokens: match self.max_tokens {
                Some(n) => Some(n as usize),
                None => settings.max_tokens,
            },
            n_batch: self.n_batch,
        };
        Ok(TextPlan::new(embedding_model, text_settings))
    }
}

impl<B: Backend> Embedder<B> {
    /// Loads a model into a backend. How the rows of a text become one vector, and how long vectors
    /// are, is the file's choice where `config` makes none.
    ///
    /// # Errors
    /// [`EngineError`], before anything is loaded where the model gives no vectors or has no
    /// pooling.
    pub fn new(backend: B, file: &OpenModel, config: &EmbedderConfig) -> Result<Self, EngineError> {
        let settings = SentenceSettings::read(file.metadata())?;
        let plan = config.plan_with(file, &settings)?;
        // What files say of lengths is about vectors of whole texts.
        let of_vectors = match plan.pooling {
            Pooling::None => Normalization::None,
            _ => settings.normalization.unwrap_or_default(),
        };
        Ok(Self {
            texts: TextEngine::new(backend, file, plan)?,
            normalization: config.normalization.unwrap_or(of_vectors),
            long_texts: config.long_texts,
        })
    }

    /// The number of values in a vector, or in a row.
    pub fn dim(&self) -> usize {
        self.texts.engine.settings().output_width()
    }

    /// The most tokens that a text can have, with those around it.
    pub fn max_tokens(&self) -> usize {
        self.texts.max_tokens
    }

    /// How the rows of a text become one.
    pub fn pooling(&self) -> Pooling {
        self.texts.pooling
    }

    /// The length of vectors.
    pub fn normalization(&self) -> Normalization {
        self.normalization
    }

    /// Sets how texts that are too long are treated from now on.
    pub fn set_long_texts(&mut self, long_texts: LongTexts) {
        self.long_texts = long_texts;
    }

    /// The engine that computes rows.
    pub fn engine(&self) -> &Engine<B> {
        &self.texts.engine
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
            let (n_tokens, limit) = (tokens.len(), self.texts.max_tokens);
            if n_tokens > limit && self.long_texts == LongTexts::Truncate {
                let last = tokenizer.adds_last();
                tokens.truncate(limit.saturating_sub(usize::from(last.is_some())));
                tokens.extend(last);
            }
            self.texts.check(index, &tokens)?;
            Ok(tokens)
        };
        texts.iter().enumerate().map(encode).collect()
    }

    /// A vector for each text; with [`Pooling::None`] the rows of its tokens, one behind the other.
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

    /// As [`Embedder::embed`] for each list of tokens. A model whose tokens are no text has no
    /// other way.
    ///
    /// # Errors
    /// [`EngineError::TextTooLong`], [`EngineError::EmptyText`] and [`EngineError`].
    pub fn embed_tokens(
        &mut self,
        texts: &[impl AsRef<[TokenId]>],
    ) -> Result<Vec<Vec<f32>>, EngineError> {
        let tokens = texts.iter().map(AsRef::as_ref);
        let texts: Vec<_> = tokens.map(TextTokens::of_text).collect();
        let mut vectors = self.texts.rows(&texts)?;
        if self.normalization == Normalization::Unit {
            let dim = self.dim().max(1);
            let rows = vectors.iter_mut().flat_map(|rows| rows.chunks_mut(dim));
            rows.for_each(normalise);
        }
        Ok(vectors)
    }

    /// How many of the first texts are computed at once: at least one.
    pub fn n_together(&self, texts: &[impl AsRef<[TokenId]>]) -> usize {
        let n_tokens = texts.iter().map(|text| text.as_ref().len());
        self.texts.n_together(n_tokens)
    }
}
