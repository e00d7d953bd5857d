//! [`Model`]: a file on a backend, with one text in memory.
//!
//! Invariant: the tokens that are noted are those in the memory, so that a text which begins as the
//! last one did evaluates only what is new. Knows nothing of chat messages.

use std::path::Path;

use engine::{Embedder, EmbedderConfig, Engine, EngineConfig, EngineError, GenerateOptions};
use kv_core::backend::{BoxedBackend, OnProgress};
use kv_core::memory::{Memory, Seqs};
use kv_core::{Pos, PosRange, SeqId, TokenId};
use model_core::chat_template::ChatMessage;
use model_core::model_file::{ModelFile, OpenModel};
use model_core::tokenizer::EncodeOptions;

use crate::architectures::architectures;
use crate::backends::{BackendOptions, open_backend};
use crate::chat::render_chat;
use crate::error::Error;
use crate::text::Text;

/// The sequence of the text.
pub(crate) const SEQ: SeqId = SeqId(0);

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

/// A model on a backend, with one text in memory.
///
/// Texts that begin alike are evaluated once: a prompt that continues or repeats the last text
/// costs only its new tokens. For many texts at once, take [`Model::into_engine`].
#[derive(Debug)]
pub struct Model {
    file: ModelFile,
    engine: Engine<BoxedBackend>,
    /// The tokens in the memory.
    pub(crate) evaluated: Vec<TokenId>,
}

impl Model {
    /// Opens a GGUF file (the first part of a split one) or a directory with safetensors files, on
    /// the fastest backend.
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
        let backend = open_backend(options.backend)?;
        let (model, weights) = (file.model().clone(), file.weights());
        let progress = options.on_progress;
        let engine = Engine::with_progress(backend, model, weights, &options.engine, progress)?;
        Ok(Self {
            file,
            engine,
            evaluated: Vec::new(),
        })
    }

    /// Continues a prompt: an iterator of pieces of text. The sequence and history of the options
    /// have no effect.
    ///
    /// # Errors
    /// [`Error`], as [`engine::Generation::new`] and [`engine::Generation::feed`]: the prompt has
    /// been evaluated when this returns.
    pub fn generate(&mut self, prompt: &str, options: GenerateOptions) -> Result<Text<'_>, Error> {
        let tokens = self.file.tokenizer().encode(prompt, EncodeOptions::PROMPT);
        self.generate_from(&tokens, options)
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
        let text = render_chat(&self.file, messages)?.ok_or(Error::NoChatTemplate)?;
        if text.is_empty() {
            return Err(Error::EmptyChat);
        }
        let tokens = self.file.tokenizer().encode(&text, EncodeOptions::CHAT);
        self.generate_from(&tokens, options)
    }

    /// Continues a prompt of tokens.
    ///
    /// # Errors
    /// As [`Model::generate`].
    pub fn generate_from(
        &mut self,
        prompt: &[TokenId],
        options: GenerateOptions,
    ) -> Result<Text<'_>, Error> {
        let n_known = self.keep_prefix(prompt)?;
        let (known, new) = prompt.split_at(n_known);
        let options = GenerateOptions {
            seq: SEQ,
            history: known.to_vec(),
            ..options
        };
        Text::begin(self, new, options)
    }

    /// The file, its tokenizer and metadata.
    pub fn file(&self) -> &ModelFile {
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

    pub(crate) fn engine_mut(&mut self) -> &mut Engine<BoxedBackend> {
        &mut self.engine
    }

    /// Removes what follows the common prefix with `tokens` from the memory, and returns how many
    /// tokens stay. The last of `tokens` is never among them: a text begins with its logits.
    pub(crate) fn keep_prefix(&mut self, tokens: &[TokenId]) -> Result<usize, EngineError> {
        // A context that was shifted no longer has the tokens where they were.
        let positions = self.engine.memory().positions(SEQ);
        let n_positions = positions.map_or(0, |has| has.last.next().as_usize());
        if n_positions != self.evaluated.len() {
            self.forget();
        }
        let both = tokens.iter().zip(&self.evaluated);
        let n_same = both.take_while(|(new, old)| new == old).count();
        let n_same = n_same.min(tokens.len().saturating_sub(1));
        if n_same == self.evaluated.len() {
            return Ok(n_same);
        }
        let first = u32::try_from(n_same).unwrap_or(u32::MAX);
        let rest = PosRange::from(Pos(first)..);
        match self.engine.remove(Seqs::One(SEQ), rest) {
            Ok(_) => self.evaluated.truncate(n_same),
            // A recurrent state does not go back so far.
            Err(EngineError::Refused(_)) => self.forget(),
            Err(error) => return Err(error),
        }
        Ok(self.evaluated.len())
    }

    /// Empties the memory.
    pub(crate) fn forget(&mut self) {
        let _ = self.engine.clear();
        self.evaluated.clear();
    }
}

/// The parts of a [`Model`].
#[derive(Debug)]
pub struct ModelEngine {
    /// The file, its tokenizer and metadata.
    pub file: ModelFile,
    /// The engine, with what is in memory.
    pub engine: Engine<BoxedBackend>,
}

/// Opens an encoder (BERT, ModernBERT) for vectors of texts: [`Embedder::embed`].
///
/// # Errors
/// [`Error`]: the file is not usable, or has no encoder.
pub fn embedder(
    file: &OpenModel,
    backend: BackendOptions,
    config: &EmbedderConfig,
) -> Result<Embedder<BoxedBackend>, Error> {
    Ok(Embedder::new(open_backend(backend)?, file, config)?)
}
