//! [`Reranker`]: a query and documents in, one score for each document out.
//!
//! Query and document are read together, as a pair (Nogueira and Cho, arXiv 1901.04085). Invariant:
//! the score of a document does not depend on the other documents, as far as the backend
//! guarantees, and documents are truncated only on request. Knows nothing of where texts come from.

use std::sync::Arc;

use kv_backend::Backend;
use model_core::architecture::OutputKind;
use model_core::model_file::OpenModel;
use model_core::sentence::{Pooling, SentenceSettings};
use model_core::tokenizer::{SpecialText, TokenPair, Tokenizer};

use crate::embedder::LongTexts;
use crate::texts::{TextEngine, TextPlan, TextSettings, TextTokens};
use cellar_engine::Engine;
use cellar_engine::EngineError;

/// The settings of a [`Reranker`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RerankerConfig {
    /// What to do with a query and a document that are too long together: the end of the document
    /// is cut off, or there is an error.
    pub long_texts: LongTexts,
    /// The longest pair in tokens, at most what the model was trained with. `None` takes what it
    /// was made for.
    pub max_tokens: Option<u32>,
    /// Tokens of several pairs that are computed at once; a longer pair is computed alone.
    pub n_batch: u32,
}

/// A document's place in a list, and its score.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ranked {
    /// Which document, counted from 0 as given.
    pub index: usize,
    /// How well it answers the query, as the model's head gives it: comparable among documents of
    /// one query; its sigmoid is between 0 and 1.
    pub score: f32,
}

/// A model on a backend that scores pairs of texts: an encoder with a head of one label.
///
/// ```no_run
/// # use {kv_candle::CandleBackend, model_core::architecture::Registry};
/// # type Error = Box<dyn std::error::Error>;
/// # fn ranked(backend: CandleBackend, registry: Registry) -> Result<(), Error> {
/// use cellar_tasks::{Reranker, RerankerConfig};
/// use model_core::model_file::ModelFile;
///
/// let file = ModelFile::open("bge-reranker-v2-m3", &registry)?;
/// let mut reranker = Reranker::new(backend, &file, &RerankerConfig::default())?;
/// let documents = ["It rains.", "Paris is the capital of France."];
/// let ranked = reranker.rank(file.tokenizer(), "What is the capital of France?", &documents)?;
/// assert_eq!(ranked[0].index, 1);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Reranker<B: Backend> {
    texts: TextEngine<B>,
    long_texts: LongTexts,
}

impl Default for RerankerConfig {
    fn default() -> Self {
        Self {
            long_texts: LongTexts::default(),
            max_tokens: None,
            n_batch: 2048,
        }
    }
}

impl RerankerConfig {
    /// How a [`Reranker`] of this file computes.
    ///
    /// # Errors
    /// [`EngineError`] where the model does not give one score for a text.
    pub fn plan(&self, file: &OpenModel) -> Result<TextPlan, EngineError> {
        let model = file.model();
        let architecture = || model.architecture().to_owned();
        match model.output() {
            OutputKind::Scores { n_labels: 1 } => {}
            OutputKind::Scores { n_labels } => {
                let architecture = architecture();
                return Err(EngineError::ManyLabels {
                    architecture,
                    n_labels,
                });
            }
            OutputKind::Logits | OutputKind::Embeddings | OutputKind::MaskLogits(_) => {
                let architecture = architecture();
                return Err(EngineError::NoScores { architecture });
            }
        }
        let max_tokens = match self.max_tokens {
            Some(n) => Some(n as usize),
            None => SentenceSettings::read(file.metadata())?.max_tokens,
        };
        let settings = TextSettings {
            pooling: Pooling::Rank,
            max_tokens,
            n_batch: self.n_batch,
        };
        Ok(TextPlan::new(Arc::clone(model), settings))
    }
}

impl<B: Backend> Reranker<B> {
    /// Loads a model into a backend.
    ///
    /// # Errors
    /// [`EngineError`], before anything is loaded where the model does not give one score for a
    /// text.
    pub fn new(backend: B, file: &OpenModel, config: &RerankerConfig) -> Result<Self, EngineError> {
        Ok(Self {
            texts: TextEngine::new(backend, file, config.plan(file)?)?,
            long_texts: config.long_texts,
        })
    }

    /// The most tokens that a query and a document can have, with those around them.
    pub fn max_tokens(&self) -> usize {
        self.texts.max_tokens
    }

    /// Sets how documents that are too long are treated from now on.
    pub fn set_long_texts(&mut self, long_texts: LongTexts) {
        self.long_texts = long_texts;
    }

    /// The engine that computes scores.
    pub fn engine(&self) -> &Engine<B> {
        &self.texts.engine
    }

    /// The query with each document as tokens, none more than the model takes.
    ///
    /// # Errors
    /// [`EngineError::TextTooLong`] where that is an error, or the query alone is too long.
    pub fn pairs(
        &self,
        tokenizer: &Tokenizer,
        query: &str,
        documents: &[impl AsRef<str>],
    ) -> Result<Vec<TokenPair>, EngineError> {
        let encode = |(index, document): (usize, &_)| {
            let document: &str = AsRef::as_ref(document);
            let mut pair = tokenizer.encode_pair(query, document, SpecialText::Parse);
            if self.long_texts == LongTexts::Truncate {
                pair.truncate(self.texts.max_tokens);
            }
            self.texts.check(index, &pair.tokens)?;
            Ok(pair)
        };
        documents.iter().enumerate().map(encode).collect()
    }

    /// A score for each document, in their order.
    ///
    /// # Errors
    /// As [`Reranker::pairs`], before anything is computed, and [`EngineError`].
    pub fn scores(
        &mut self,
        tokenizer: &Tokenizer,
        query: &str,
        documents: &[impl AsRef<str>],
    ) -> Result<Vec<f32>, EngineError> {
        let pairs = self.pairs(tokenizer, query, documents)?;
        self.score_pairs(&pairs)
    }

    /// The documents with their scores, the best first; of equal ones the first given.
    ///
    /// # Errors
    /// As [`Reranker::scores`].
    pub fn rank(
        &mut self,
        tokenizer: &Tokenizer,
        query: &str,
        documents: &[impl AsRef<str>],
    ) -> Result<Vec<Ranked>, EngineError> {
        let scores = self.scores(tokenizer, query, documents)?;
        Ok(Ranked::sorted(scores))
    }

    /// A score for each pair.
    ///
    /// # Errors
    /// [`EngineError::TextTooLong`], [`EngineError::EmptyText`] and [`EngineError`].
    pub fn score_pairs(&mut self, pairs: &[TokenPair]) -> Result<Vec<f32>, EngineError> {
        let texts: Vec<_> = pairs.iter().map(TextTokens::of_pair).collect();
        let rows = self.texts.rows(&texts)?;
        Ok(rows.into_iter().flatten().collect())
    }

    /// How many of the first pairs are computed at once: at least one.
    pub fn n_together(&self, pairs: &[TokenPair]) -> usize {
        let n_tokens = pairs.iter().map(|pair| pair.tokens.len());
        self.texts.n_together(n_tokens)
    }
}

impl Ranked {
    /// The score as a number between 0 and 1.
    #[must_use]
    pub fn probability(score: f32) -> f32 {
        1.0 / (1.0 + (-score).exp())
    }

    /// Scores with their places, the best first; of equal ones the first given.
    pub fn sorted(scores: Vec<f32>) -> Vec<Self> {
        let scores = scores.into_iter().enumerate();
        let mut ranked: Vec<Self> = scores.map(|(index, score)| Self { index, score }).collect();
        ranked.sort_by(|a, b| b.score.total_cmp(&a.score));
        ranked
    }
}
