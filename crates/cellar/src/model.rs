//! [`Model`]: a file on a backend, with a text in each sequence of its memory.
//!
//! Invariant: the tokens that are noted are those in the memory, so that a text which begins as the
//! last one of its sequence did evaluates only what is new. Knows nothing of how text is chosen.

use std::path::Path;
use std::sync::Arc;

use cellar_engine::{
    CancelFlag, Embedder, EmbedderConfig, Engine, EngineConfig, EngineError, GenerateOptions,
    Generation, PromptOutputs, PromptProgress, Reranker, RerankerConfig, TextPlan,
};
use kv_core::backend::{BoxedBackend, OnProgress};
use kv_core::batch::Batch;
use kv_core::memory::{Memory, Seqs};
use kv_core::{Pos, PosRange, SeqId, TokenId};
use model_core::chat_template::ChatMessage;
use model_core::model_file::{ModelFile, OpenModel};
use model_core::tokenizer::EncodeOptions;

use crate::architectures::architectures;
use crate::backends::BackendOptions;
use crate::chat::render_chat;
use crate::choice::{ModelWork, choose_backend};
use crate::error::Error;
use crate::text::{Text, TextState};

/// How a model is opened.
#[derive(Debug, Default)]
pub struct ModelOptions {
    /// What computes.
    pub backend: BackendOptions,
    /// The context's length, KV types and so on.
    pub engine: EngineConfig,
    /// Told how far loading is.
    pub on_progress: OnProgress,
}

/// A model on a backend, with a text in each sequence of its memory
/// ([`EngineConfig::n_seqs`], 1 by default).
///
/// A prompt that begins as the last text of its sequence did costs only its new tokens. Texts in
/// different sequences can take turns: [`Model::begin`].
#[derive(Debug)]
pub struct Model {
    file: Arc<ModelFile>,
    engine: Engine<BoxedBackend>,
    /// The tokens in the memory, by sequence.
    evaluated: Vec<EvaluatedTokens>,
}

/// The tokens of a sequence.
#[derive(Clone, Debug, Default)]
struct EvaluatedTokens {
    tokens: Vec<TokenId>,
    /// [`Engine::n_changes`] when they were noted: with another number they may be others.
    n_changes: u64,
}

impl Model {
    /// Opens a GGUF file (the first part of a split one) or a directory with safetensors files, on
    /// a GPU where there is one and the model fits, else on the CPU ([`choose_backend`]).
    ///
    /// # Errors
    /// [`Error`]: the file is not usable, or does not fit this machine.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        Self::open_with(path, ModelOptions::default())
    }

    /// The same with a choice of backend, context length, KV types and so on.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn open_with(path: impl AsRef<Path>, options: ModelOptions) -> Result<Self, Error> {
        Self::load(ModelFile::open(path, &architectures())?, options)
    }

    /// A model from an open file, perhaps of an architecture of the caller's.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn load(file: ModelFile, options: ModelOptions) -> Result<Self, Error> {
        let work = ModelWork {
            model: file.model(),
            weights: &file.weights(),
            config: &options.engine,
            outputs: PromptOutputs::Last,
        };
        let backend = choose_backend(options.backend, &work)?.backend;
        let (model, weights) = (file.model().clone(), file.weights());
        let progress = options.on_progress;
        let engine = Engine::with_progress(backend, model, weights, &options.engine, progress)?;
        Ok(Self::with_engine(file, engine))
    }

    /// A model on an engine of the caller's, which was made of this file.
    pub fn with_engine(file: impl Into<Arc<ModelFile>>, engine: Engine<BoxedBackend>) -> Self {
        let evaluated = vec![EvaluatedTokens::default(); engine.settings().rules.n_seqs as usize];
        Self {
            file: file.into(),
            engine,
            evaluated,
        }
    }

    /// Continues a prompt: an iterator of pieces of text.
    ///
    /// # Errors
    /// As [`Model::begin`]: the prompt has been evaluated when this returns.
    pub fn generate(&mut self, prompt: &str, options: GenerateOptions) -> Result<Text<'_>, Error> {
        let tokens = self.file.tokenizer().encode(prompt, EncodeOptions::PROMPT);
        let state = self.begin(&tokens, options)?;
        Ok(Text::new(self, state))
    }

    /// Answers messages, as the model's own chat template renders them. Messages that were answered
    /// before are not evaluated again.
    ///
    /// # Errors
    /// [`Error::NoChatTemplate`], [`Error::Template`] where the template refuses the messages;
    /// otherwise as [`Model::generate`].
    pub fn chat(
        &mut self,
        messages: &[ChatMessage],
        options: GenerateOptions,
    ) -> Result<Text<'_>, Error> {
        let tokens = self.chat_tokens(messages)?;
        let state = self.begin(&tokens, options)?;
        Ok(Text::new(self, state))
    }

    /// The tokens of messages, as the model's own chat template renders them.
    ///
    /// # Errors
    /// As [`Model::chat`].
    pub fn chat_tokens(&self, messages: &[ChatMessage]) -> Result<Vec<TokenId>, Error> {
        let text = render_chat(&self.file, messages)?.ok_or(Error::NoChatTemplate)?;
        if text.is_empty() {
            Err(Error::EmptyChat)
        } else {
            Ok(self.file.tokenizer().encode(&text, EncodeOptions::CHAT))
        }
    }

    /// Evaluates what is new of a prompt, in the sequence of the options, and returns the state of
    /// the text, which [`TextState::next_piece`] takes further. The history of the options has no
    /// effect.
    ///
    /// # Errors
    /// [`Error`], as [`cellar_engine::Generation::new`] and [`cellar_engine::Generation::feed`]. A
    /// text that was begun in the sequence before cannot go on ([`EngineError::SequenceChanged`]).
    pub fn begin(
        &mut self,
        prompt: &[TokenId],
        options: GenerateOptions,
    ) -> Result<TextState, Error> {
        self.begin_with(prompt, options, |_| ())
    }

    /// The same, calling `on_progress` after each ubatch with what is done of the new tokens.
    ///
    /// # Errors
    /// As [`Model::begin`].
    pub fn begin_with(
        &mut self,
        prompt: &[TokenId],
        options: GenerateOptions,
        mut on_progress: impl FnMut(PromptProgress),
    ) -> Result<TextState, Error> {
        let seq = options.seq;
        let n_known = self.keep_prefix(seq, prompt)?;
        let (known, new) = prompt.split_at(n_known);
        let options = GenerateOptions {
            history: known.to_vec(),
            ..options
        };
        let tokenizer = self.file.tokenizer();
        let mut generation = Generation::new(&self.engine, tokenizer, options)?;
        self.evaluate_in(seq, |engine| {
            let mut n_done = 0;
            let fed = generation.feed(engine, new, |progress| {
                n_done = progress.n_done;
                on_progress(progress);
            });
            (fed, new.get(..n_done).unwrap_or(new))
        })?;
        Ok(TextState::new(generation, seq))
    }

    /// The logits of every token, `[tokens, vocab]`, until `cancel` is set. Afterwards the sequence
    /// holds these tokens, as if a text had been begun with them; what it held before is gone.
    ///
    /// # Errors
    /// [`EngineError::PromptTooLong`] before anything changes; as [`Engine::decode_until`], and the
    /// sequence is empty then.
    pub fn logits(
        &mut self,
        seq: SeqId,
        tokens: &[TokenId],
        cancel: &CancelFlag,
    ) -> Result<Vec<f32>, Error> {
        let (n_prompt, n_ctx) = (tokens.len(), self.engine.settings().n_ctx as usize);
        if n_prompt > n_ctx {
            let too_long = EngineError::PromptTooLong {
                seq,
                n_prompt,
                n_ctx,
                n_used: 0,
            };
            return Err(too_long.into());
        }
        self.forget(seq)?;
        let computed = self.evaluate_in(seq, |engine| {
            let n_batch = engine.settings().rules.n_batch.max(1) as usize;
            let mut values = Vec::new();
            for piece in tokens.chunks(n_batch) {
                let mut batch = Batch::new();
                for &token in piece {
                    batch.push_token(token).in_sequence(seq).with_output();
                }
                match engine.decode_until(&batch, cancel) {
                    Ok(logits) => values.extend_from_slice(logits.values()),
                    Err(error) => return (Err(error), [].as_slice()),
                }
            }
            (Ok(values), tokens)
        });
        if computed.is_err() {
            self.forget(seq)?;
        }
        Ok(computed?)
    }

    /// The file, its tokenizer and metadata.
    pub fn file(&self) -> &Arc<ModelFile> {
        &self.file
    }

    /// The engine, with its memory and settings.
    pub fn engine(&self) -> &Engine<BoxedBackend> {
        &self.engine
    }

    /// File and engine, to work with many sequences.
    pub fn into_engine(self) -> ModelEngine {
        ModelEngine {
            file: self.file,
            engine: self.engine,
        }
    }

    /// The engine, to edit its memory. Sequences whose tokens are no longer where they were are
    /// evaluated anew.
    pub fn engine_mut(&mut self) -> &mut Engine<BoxedBackend> {
        &mut self.engine
    }

    /// The tokens that were evaluated in a sequence; none where its memory was changed by other
    /// means than this model's, such as [`Model::engine_mut`].
    pub fn evaluated(&self, seq: SeqId) -> &[TokenId] {
        match self.evaluated.get(seq.as_usize()) {
            Some(known) if known.n_changes == self.engine.n_changes(seq) => &known.tokens,
            _ => &[],
        }
    }

    /// Notes that a sequence has these tokens and no others.
    pub(crate) fn set_evaluated(&mut self, seq: SeqId, tokens: Vec<TokenId>) {
        let n_changes = self.engine.n_changes(seq);
        if let Some(known) = self.evaluated.get_mut(seq.as_usize()) {
            *known = EvaluatedTokens { tokens, n_changes };
        }
    }

    /// Does something with the engine that evaluates tokens in a sequence, and notes those that
    /// `new` says were. Where the tokens before were not known, they stay unknown.
    pub(crate) fn evaluate_in<'t, R>(
        &mut self,
        seq: SeqId,
        evaluate: impl FnOnce(&mut Engine<BoxedBackend>) -> (R, &'t [TokenId]),
    ) -> R {
        let before = self.engine.n_changes(seq);
        let (result, new) = evaluate(&mut self.engine);
        let n_changes = self.engine.n_changes(seq);
        if let Some(known) = self.evaluated.get_mut(seq.as_usize())
            && known.n_changes == before
        {
            known.tokens.extend(new);
            known.n_changes = n_changes;
        }
        result
    }

    /// Removes what follows the common prefix with `tokens` from a sequence, and returns how many
    /// tokens stay. The last of `tokens` is never among them: a text begins with its logits. With a
    /// model that encodes sources, nothing stays.
    /// [`Model::begin`] does it first; before, it tells how much there is to evaluate.
    ///
    /// # Errors
    /// [`EngineError::Backend`] where the memory could not be changed.
    pub fn keep_prefix(&mut self, seq: SeqId, tokens: &[TokenId]) -> Result<usize, EngineError> {
        if seq.as_usize() >= self.evaluated.len() {
            // The engine refuses the sequence, with its number.
            return Ok(0);
        }
        if self.engine.memory().takes_sources() {
            // A prompt is a source, which is encoded whole.
            return self.forget(seq);
        }
        // A context that was shifted no longer has the tokens where they were.
        let n_positions = self.engine.memory().next_pos(seq).as_usize();
        let evaluated = self.evaluated(seq);
        let both = tokens.iter().zip(evaluated);
        let n_same = if n_positions == evaluated.len() {
            both.take_while(|(new, old)| new == old).count()
        } else {
            0
        };
        let n_same = n_same.min(tokens.len().saturating_sub(1));
        if n_same != n_positions {
            let first = Pos(u32::try_from(n_same).unwrap_or(u32::MAX));
            let removed = self.engine.remove(Seqs::One(seq), PosRange::from(first..));
            match removed {
                // A recurrent state does not go back so far.
                Err(EngineError::Refused(_)) => return self.forget(seq),
                removed => removed?,
            };
        }
        self.set_evaluated(seq, tokens[..n_same].to_vec());
        Ok(n_same)
    }

    /// Empties a sequence.
    fn forget(&mut self, seq: SeqId) -> Result<usize, EngineError> {
        self.engine.remove(Seqs::One(seq), PosRange::ALL)?;
        self.set_evaluated(seq, Vec::new());
        Ok(0)
    }
}

/// The parts of a [`Model`].
#[derive(Debug)]
pub struct ModelEngine {
    /// The file, its tokenizer and metadata.
    pub file: Arc<ModelFile>,
    /// The engine, with what is in memory.
    pub engine: Engine<BoxedBackend>,
}

/// Opens an encoder or a decoder for vectors of texts: [`Embedder::embed`].
///
/// # Errors
/// [`Error`]: the file is not usable, gives no vectors, or does not say how texts are pooled.
pub fn embedder(
    file: &OpenModel,
    backend: BackendOptions,
    config: &EmbedderConfig,
) -> Result<Embedder<BoxedBackend>, Error> {
    let backend = backend_for(&config.plan(file)?, file, backend)?;
    Ok(Embedder::new(backend, file, config)?)
}

/// Opens a cross-encoder for scores of documents: [`Reranker::rank`].
///
/// # Errors
/// [`Error`]: the file is not usable, or does not give one score for a pair of texts.
pub fn reranker(
    file: &OpenModel,
    backend: BackendOptions,
    config: &RerankerConfig,
) -> Result<Reranker<BoxedBackend>, Error> {
    let backend = backend_for(&config.plan(file)?, file, backend)?;
    Ok(Reranker::new(backend, file, config)?)
}

fn backend_for(
    plan: &TextPlan,
    file: &OpenModel,
    options: BackendOptions,
) -> Result<BoxedBackend, Error> {
    let work = ModelWork {
        model: &plan.model,
        weights: &file.weights(),
        config: &plan.engine,
        outputs: PromptOutputs::All,
    };
    Ok(choose_backend(options, &work)?.backend)
}
