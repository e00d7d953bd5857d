//! [`EmbedWorker`] and [`RerankWorker`]: models of whole texts, on a thread of their own.
//!
//! Invariant: jobs are computed in the order in which they came; one whose client has gone is not
//! computed. Knows no API.

use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};

use cellar_engine::EngineError;
use cellar_tasks::{Embedder, LongTexts, Reranker};
use kv_backend::Backend;
use kv_core::TokenId;
use model_core::sentence::normalise;
use model_core::tokenizer::Tokenizer;
use tokio::sync::oneshot;

use crate::error::ApiError;

/// Jobs that may wait.
const MAX_QUEUED: usize = 64;

/// Seconds after which a client may try again when the queue is full.
const RETRY_AFTER: u64 = 1;

/// What vectors are wanted of.
#[derive(Clone, Debug)]
pub enum EmbedTexts {
    /// Texts, which the model's tokenizer encodes.
    Texts(Vec<String>),
    /// Tokens of each text, as they are.
    Tokens(Vec<Vec<TokenId>>),
}

impl EmbedTexts {
    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Texts(texts) => texts.len(),
            Self::Tokens(lists) => lists.len(),
        }
    }

    /// The first token that a vocabulary of so many lacks.
    pub(crate) fn unknown(&self, n_tokens: usize) -> Option<TokenId> {
        match self {
            Self::Texts(_) => None,
            Self::Tokens(lists) => {
                let mut ids = lists.iter().flatten();
                ids.find(|id| id.as_usize() >= n_tokens).copied()
            }
        }
    }
}

/// The vectors of texts.
#[derive(Clone, Debug)]
pub struct Embedded {
    /// One for each text, in their order.
    pub vectors: Vec<Vec<f32>>,
    /// Tokens of all texts.
    pub n_tokens: usize,
}

impl Embedded {
    /// Vectors of so many dimensions, cut off and of length 1 again, as models that were trained
    /// for it (Matryoshka) allow.
    ///
    /// # Errors
    /// [`ApiError`] 400 where the vectors have fewer.
    pub(crate) fn cut(mut self, dimensions: Option<usize>) -> Result<Self, ApiError> {
        let Some(n) = dimensions else {
            return Ok(self);
        };
        for vector in &mut self.vectors {
            let width = vector.len();
            if n == 0 || n > width {
                let message = format!(
                    "'dimensions' is {n}: the vectors of this model have {width}, and 1 to {width} can be kept"
                );
                return Err(ApiError::invalid_param("dimensions", message));
            }
            if n < width {
                vector.truncate(n);
                normalise(vector);
            }
        }
        Ok(self)
    }
}

/// The scores of documents.
#[derive(Clone, Debug)]
pub struct Scored {
    /// One for each document, in their order.
    pub scores: Vec<f32>,
    /// Tokens of all pairs.
    pub n_tokens: usize,
}

/// The treatment of texts that are too long, by a field `truncate`; `default` where it is not
/// given.
pub(crate) fn long_texts(truncate: Option<bool>, default: LongTexts) -> LongTexts {
    match truncate {
        Some(true) => LongTexts::Truncate,
        Some(false) => LongTexts::Refuse,
        None => default,
    }
}

/// Texts whose vectors are wanted.
#[derive(Clone, Debug)]
pub struct EmbedJob {
    /// The texts.
    pub texts: EmbedTexts,
    /// The treatment of texts that are too long; lists of tokens are refused.
    pub long_texts: LongTexts,
}

impl From<EmbedTexts> for EmbedJob {
    fn from(texts: EmbedTexts) -> Self {
        Self {
            texts,
            long_texts: LongTexts::Refuse,
        }
    }
}

/// A query and documents.
#[derive(Clone, Debug)]
pub struct RerankJob {
    /// What is asked for.
    pub query: String,
    /// What is scored.
    pub documents: Vec<String>,
    /// The treatment of documents that are too long.
    pub long_texts: LongTexts,
}

type Reply<T> = oneshot::Sender<Result<T, ApiError>>;

/// A model that gives vectors.
#[derive(Debug)]
pub struct EmbedWorker {
    jobs: SyncSender<(EmbedJob, Reply<Embedded>)>,
}

/// A model that scores documents.
#[derive(Debug)]
pub struct RerankWorker {
    jobs: SyncSender<(RerankJob, Reply<Scored>)>,
}

impl EmbedWorker {
    /// Starts the thread, which ends when the worker is dropped.
    pub fn start<B: Backend>(mut embedder: Embedder<B>, tokenizer: &Arc<Tokenizer>) -> Self {
        let tokenizer = Arc::clone(tokenizer);
        let jobs = start(move |job| embed(&mut embedder, &tokenizer, job));
        Self { jobs }
    }

    /// The vectors of these texts.
    ///
    /// # Errors
    /// [`ApiError`] 400 where a text is too long, 429 where too much waits.
    pub async fn embed(&self, job: impl Into<EmbedJob>) -> Result<Embedded, ApiError> {
        submit(&self.jobs, job.into()).await
    }
}

impl RerankWorker {
    /// Starts the thread, which ends when the worker is dropped.
    pub fn start<B: Backend>(mut reranker: Reranker<B>, tokenizer: &Arc<Tokenizer>) -> Self {
        let tokenizer = Arc::clone(tokenizer);
        let jobs = start(move |job: RerankJob| score(&mut reranker, &tokenizer, &job));
        Self { jobs }
    }

    /// The scores of documents.
    ///
    /// # Errors
    /// As [`EmbedWorker::embed`].
    pub async fn score(&self, job: RerankJob) -> Result<Scored, ApiError> {
        submit(&self.jobs, job).await
    }
}

fn embed<B: Backend>(
    embedder: &mut Embedder<B>,
    tokenizer: &Tokenizer,
    job: EmbedJob,
) -> Result<Embedded, EngineError> {
    embedder.set_long_texts(job.long_texts);
    let tokens = match job.texts {
        EmbedTexts::Texts(texts) => embedder.tokens(tokenizer, &texts)?,
        EmbedTexts::Tokens(tokens) => tokens,
    };
    let vectors = embedder.embed_tokens(&tokens)?;
    let n_tokens = tokens.iter().map(Vec::len).sum();
    Ok(Embedded { vectors, n_tokens })
}

fn score<B: Backend>(
    reranker: &mut Reranker<B>,
    tokenizer: &Tokenizer,
    job: &RerankJob,
) -> Result<Scored, EngineError> {
    reranker.set_long_texts(job.long_texts);
    let pairs = reranker.pairs(tokenizer, &job.query, &job.documents)?;
    let scores = reranker.score_pairs(&pairs)?;
    let n_tokens = pairs.iter().map(|pair| pair.tokens.len()).sum();
    Ok(Scored { scores, n_tokens })
}

fn start<J: Send + 'static, T: Send + 'static>(
    mut compute: impl FnMut(J) -> Result<T, EngineError> + Send + 'static,
) -> SyncSender<(J, Reply<T>)> {
    let (jobs, received) = sync_channel::<(J, Reply<T>)>(MAX_QUEUED);
    let run = move || {
        for (job, reply) in received {
            if !reply.is_closed() {
                let computed = compute(job).map_err(|error| ApiError::from(&error));
                // The client may have gone meanwhile.
                let _gone = reply.send(computed);
            }
        }
    };
    let thread = std::thread::Builder::new().name("cellar-texts".to_owned());
    if let Err(error) = thread.spawn(run) {
        // The channel is closed then, and every job is refused.
        tracing::error!(%error, "cannot start a thread");
    }
    jobs
}

async fn submit<J, T>(jobs: &SyncSender<(J, Reply<T>)>, job: J) -> Result<T, ApiError> {
    let (reply, computed) = oneshot::channel();
    jobs.try_send((job, reply)).map_err(|error| match error {
        TrySendError::Full(_) => {
            ApiError::busy(format!("{MAX_QUEUED} requests wait already"), RETRY_AFTER)
        }
        TrySendError::Disconnected(_) => ApiError::internal("the model's thread has ended"),
    })?;
    match computed.await {
        Ok(computed) => computed,
        Err(_) => Err(ApiError::internal("the model's thread has ended")),
    }
}
