//! [`Model`]: a file on a backend, with its texts.
//!
//! Invariant: a text is what it would be alone, whatever else is computed. Knows nothing of how
//! text is chosen, and of how memory is shared: the [`Session`] does.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use cellar_engine::serve::{
    FinishedText, PromptProgress, Retention, ServiceConfig, ServiceExtras, TextRequest, TextStream,
};
use cellar_engine::session::{Activity, Session};
use cellar_engine::{CancelFlag, Engine, EngineError, PromptOutputs, SaveOptions, Tower};
use cellar_tasks::{Embedder, EmbedderConfig, Reranker, RerankerConfig, TextPlan};
use kv_backend::state::SavedState;
use kv_backend::{Backend, BoxedBackend};
use kv_core::batch::Batch;
use kv_core::memory::{Composite, Memory, Seqs};
use kv_core::{SeqId, TokenId};
use model_core::chat_template::ChatMessage;
use model_core::media::MediaKind;
use model_core::model_file::{ModelFile, OpenModel};
use model_core::picture::PreparedPicture;
use model_core::tokenizer::EncodeOptions;
use model_vision::PictureReader;
use serde_json::{Map, Value};

use crate::architectures::architectures;
use crate::backends::BackendOptions;
use crate::chat::render_chat;
use crate::choice::{ModelWork, choose_backend};
use crate::error::Error;
use crate::model_options::ModelOptions;
use crate::options::GenerateOptions;
use crate::pictures::{media_message, open_tower, picture_chat, vision_of};
use crate::text::{Text, TextState};

/// A model on a backend, with its texts.
///
/// Texts are computed together, as many as the memory has sequences
/// ([`EngineConfig::n_seqs`](crate::EngineConfig::n_seqs), 1 by default); where there are more, the
/// one that is asked for goes on. What a prompt has in common with texts before is not computed
/// again.
///
/// It is generic over what computes, `B`, and what remembers, `M`. [`Model::open`] chooses a
/// backend at run time; [`Model::open_on`] takes one of the caller's, and [`Model::with_engine`]
/// an engine with a memory of the caller's, which [`Engine::with_memory`] makes.
#[derive(Debug)]
pub struct Model<B: Backend = BoxedBackend, M: Memory + Clone = Composite> {
    file: Arc<ModelFile>,
    session: Session<B, M>,
    /// The reader of pictures or sounds, where it has a tower.
    reader: Option<Arc<PictureReader>>,
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
        let path = path.as_ref();
        let file = ModelFile::open(path, &architectures())?;
        // A tower that is not supported is no reason to refuse texts, unless it was asked for.
        let vision = match vision_of(&file, path, options.mmproj.as_deref()) {
            Err(_) if options.mmproj.is_none() => None,
            found => found?,
        };
        let Some(vision) = vision else {
            return Self::load(file, options);
        };
        let tower = open_tower(&vision, options.backend.clone())?;
        let mut model = Self::load_with(file, options, Some(tower))?;
        model.reader = Some(Arc::clone(vision.reader()));
        Ok(model)
    }

    /// A model from an open file, perhaps of an architecture of the caller's.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn load(file: ModelFile, options: ModelOptions) -> Result<Self, Error> {
        Self::load_with(file, options, None)
    }

    fn load_with(
        file: ModelFile,
        options: ModelOptions,
        tower: Option<Tower>,
    ) -> Result<Self, Error> {
        let file = options.prepare(file)?;
        let work = ModelWork {
            model: file.model(),
            weights: &file.weights(),
            config: &options.engine,
            outputs: PromptOutputs::Last,
        };
        let backend = choose_backend(options.backend.clone(), &work)?.backend;
        Self::on_backend(file, backend, options, tower)
    }
}

impl<B: Backend> Model<B> {
    /// The same on a backend of the caller's: [`ModelOptions::backend`] has no effect, and there is
    /// no vision tower, which needs a backend of its own.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn open_on(
        path: impl AsRef<Path>,
        backend: B,
        options: ModelOptions,
    ) -> Result<Self, Error> {
        let file = options.prepare(ModelFile::open(path, &architectures())?)?;
        Self::on_backend(file, backend, options, None)
    }

    fn on_backend(
        file: ModelFile,
        backend: B,
        options: ModelOptions,
        tower: Option<Tower>,
    ) -> Result<Self, Error> {
        let (model, weights) = (file.model().clone(), file.weights());
        let progress = options.on_progress;
        let engine = Engine::with_progress(backend, model, weights, &options.engine, progress)?;
        let extras = ServiceExtras {
            draft_model: options.draft_model,
            tower,
            ..ServiceExtras::default()
        };
        Self::with_engine(file, engine, extras)
    }
}

impl<B: Backend, M: Memory + Clone> Model<B, M> {
    /// A model on an engine of the caller's, which was made of this file, perhaps with a model that
    /// drafts for it, or a tower for its pictures. What the engine remembered goes.
    ///
    /// # Errors
    /// As [`Session::with`].
    pub fn with_engine(
        file: impl Into<Arc<ModelFile>>,
        engine: Engine<B, M>,
        extras: ServiceExtras,
    ) -> Result<Self, Error> {
        let file = file.into();
        let config = ServiceConfig {
            max_queued: usize::MAX,
            max_queued_tokens: usize::MAX,
            ..ServiceConfig::default()
        };
        let session = Session::with(engine, file.tokenizer(), &config, extras)?;
        Ok(Self {
            file,
            session,
            reader: None,
        })
    }

    /// True if it was opened with a head that drafts
    /// ([`Speculation::Head`](cellar_engine::Speculation::Head)).
    pub fn has_head(&self) -> bool {
        self.session.has_head()
    }

    /// Continues a prompt: an iterator of pieces of text.
    ///
    /// # Errors
    /// As [`Model::begin`]: the prompt has been computed when this returns.
    pub fn generate(
        &mut self,
        prompt: &str,
        options: GenerateOptions,
    ) -> Result<Text<'_, B, M>, Error> {
        let tokens = self.file.tokenizer().encode(prompt, EncodeOptions::PROMPT);
        let state = self.begin(options.request(tokens))?;
        Ok(Text::new(self, state))
    }

    /// Answers messages, as the model's own chat template renders them. Messages that were answered
    /// before are not computed again.
    ///
    /// # Errors
    /// [`Error::NoChatTemplate`], [`Error::Template`] where the template refuses the messages;
    /// otherwise as [`Model::generate`].
    pub fn chat(
        &mut self,
        messages: &[ChatMessage],
        options: GenerateOptions,
    ) -> Result<Text<'_, B, M>, Error> {
        let tokens = self.chat_tokens(messages)?;
        let state = self.begin(options.request(tokens))?;
        Ok(Text::new(self, state))
    }

    /// The reader of pictures or sounds; `None` where the model has no tower for them.
    pub fn picture_reader(&self) -> Option<&Arc<PictureReader>> {
        self.reader.as_ref()
    }

    /// Answers a message about pictures, which are given as the bytes of PNG, JPEG, WebP, GIF or
    /// BMP files. What was computed of the same pictures before is not computed again.
    ///
    /// # Errors
    /// [`Error::SeesNothing`] where the model has no vision tower, [`Error::Picture`] where one
    /// cannot be read; otherwise as [`Model::chat`].
    pub fn look(
        &mut self,
        pictures: &[impl AsRef<[u8]>],
        text: &str,
        options: GenerateOptions,
    ) -> Result<Text<'_, B, M>, Error> {
        self.take_in(MediaKind::Picture, pictures, text, options)
    }

    /// Answers a message about sounds, which are given as the bytes of WAV, MP3 or FLAC files. What
    /// was computed of the same sounds before is not computed again.
    ///
    /// # Errors
    /// [`Error::HearsNothing`] where the model has no audio tower, [`Error::Picture`] where a sound
    /// cannot be read; otherwise as [`Model::chat`].
    pub fn listen(
        &mut self,
        sounds: &[impl AsRef<[u8]>],
        text: &str,
        options: GenerateOptions,
    ) -> Result<Text<'_, B, M>, Error> {
        self.take_in(MediaKind::Sound, sounds, text, options)
    }

    fn take_in(
        &mut self,
        media: MediaKind,
        files: &[impl AsRef<[u8]>],
        text: &str,
        options: GenerateOptions,
    ) -> Result<Text<'_, B, M>, Error> {
        let missing = match media {
            MediaKind::Picture => Error::SeesNothing,
            MediaKind::Sound => Error::HearsNothing,
        };
        let reader = self.reader.clone().ok_or(missing)?;
        let read = files
            .iter()
            .map(|bytes| reader.read_media(media, bytes.as_ref()));
        let read = read.collect::<Result<Vec<_>, _>>()?;
        self.chat_with_pictures(&[media_message(media, text, read.len())], &read, options)
    }

    /// Answers messages with pictures or sounds, which [`Model::picture_reader`] has read: each
    /// part `{"type": "image"}` or `{"type": "audio"}` of a content is the next one.
    ///
    /// # Errors
    /// As [`Model::look`].
    pub fn chat_with_pictures(
        &mut self,
        messages: &[Value],
        pictures: &[PreparedPicture],
        options: GenerateOptions,
    ) -> Result<Text<'_, B, M>, Error> {
        let reader = self.reader.clone().ok_or(Error::SeesNothing)?;
        let chat = picture_chat(&self.file, &reader, messages, &Map::new(), pictures)?;
        let request = TextRequest {
            pictures: chat.prompt.pictures,
            ..options.request(chat.prompt.tokens)
        };
        let state = self.begin(request)?;
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

    /// Computes what is new of a prompt, and returns the state of the text, which
    /// [`TextState::next_piece`] takes further. Of the request, [`TextRequest::retention`] has no
    /// effect.
    ///
    /// # Errors
    /// [`Error::Text`]: as [`Session::submit`], and where the prompt cannot be computed.
    pub fn begin(&mut self, request: TextRequest) -> Result<TextState, Error> {
        self.begin_with(request, |_| ())
    }

    /// The same, calling `on_progress` after each step with what is done of the prompt.
    ///
    /// # Errors
    /// As [`Model::begin`].
    pub fn begin_with(
        &mut self,
        request: TextRequest,
        mut on_progress: impl FnMut(PromptProgress),
    ) -> Result<TextState, Error> {
        let request = TextRequest {
            retention: Retention::Park,
            ..request
        };
        let cancel = request.cancel.clone().unwrap_or_default();
        let request = TextRequest {
            cancel: Some(cancel.clone()),
            ..request
        };
        let stream = self.session.submit(request)?;
        self.session.make_way(&stream);
        while !stream.has_read_prompt() && self.session.step() == Activity::Busy {
            on_progress(stream.progress());
        }
        TextState::begun(stream, cancel)
    }

    /// Lets a text go on behind another prompt: what was chosen so far, and how the next token is
    /// chosen, stay.
    ///
    /// # Errors
    /// As [`Session::rebase`].
    pub fn rebase(&mut self, text: &mut TextState, prompt: Vec<TokenId>) -> Result<(), Error> {
        self.session.pause(text.stream());
        Ok(self.session.rebase(text.stream_mut(), prompt)?)
    }

    /// Computes requests together, and returns the texts in their order when all have ended, or
    /// `None` when `cancel` is set before. [`TextRequest::cancel`] is not needed.
    ///
    /// # Errors
    /// [`Error::Text`]: a request that is refused or fails; the others are given up then.
    pub fn finish_all(
        &mut self,
        requests: impl IntoIterator<Item = TextRequest>,
        cancel: &CancelFlag,
    ) -> Result<Option<Vec<FinishedText>>, Error> {
        let streams = requests.into_iter().map(|request| {
            let request = TextRequest {
                retention: Retention::Release,
                ..request
            };
            self.session.submit(request)
        });
        let streams: Vec<TextStream> = streams.collect::<Result<_, _>>()?;
        let mut finished = Vec::with_capacity(streams.len());
        for stream in streams {
            self.session.make_way(&stream);
            while !stream.has_ended() {
                if cancel.is_cancelled() {
                    return Ok(None);
                }
                if self.session.step() == Activity::Idle {
                    break;
                }
            }
            finished.push(stream.finish()?);
        }
        Ok(Some(finished))
    }

    /// The logits of every token, `[tokens, vocab]`, until `cancel` is set. Nothing is remembered
    /// afterwards: texts that go on are computed again up to where they were.
    ///
    /// # Errors
    /// [`EngineError::PromptTooLong`] before anything changes; as [`Engine::decode_until`].
    pub fn logits(&mut self, tokens: &[TokenId], cancel: &CancelFlag) -> Result<Vec<f32>, Error> {
        let (n_prompt, n_ctx) = (tokens.len(), self.engine().settings().n_ctx as usize);
        if n_prompt > n_ctx {
            let too_long = EngineError::PromptTooLong {
                seq: SeqId(0),
                n_prompt,
                n_ctx,
                n_used: 0,
            };
            return Err(too_long.into());
        }
        let computed = self.session.with_engine(|engine| {
            let n_batch = engine.settings().rules.n_batch.max(1) as usize;
            let mut values = Vec::new();
            for piece in tokens.chunks(n_batch) {
                let mut batch = Batch::new();
                for &token in piece {
                    batch.push_token(token).with_output();
                }
                values.extend_from_slice(engine.decode_until(&batch, cancel)?.values());
            }
            Ok::<_, EngineError>(values)
        });
        Ok(computed?)
    }

    /// Writes a text as a state that [`Model::restore`] takes: what is computed of its prompt and
    /// of its tokens. A text that goes on is paused for it. Returns the state's size in bytes.
    ///
    /// # Errors
    /// [`Error::Text`] where the memory has nothing of the text any more; [`Error::Engine`] where
    /// it cannot be written.
    pub fn save(&mut self, text: &TextState, out: &mut impl Write) -> Result<u64, Error> {
        self.session.pause(text.stream());
        let tokens = [self.session.parked(text.stream())?];
        let options = SaveOptions {
            seqs: Seqs::One(tokens[0].seq),
            tokens: &tokens,
            kv_type: None,
            state_type: None,
        };
        Ok(self.engine().save_state(&options, out)?)
    }

    /// Restores the one sequence of a state, and returns its tokens: a prompt that begins with them
    /// costs only what follows. Those that were chosen but not computed are not among them.
    ///
    /// # Errors
    /// [`Error::Text`] where the state is another model's, or does not fit;
    /// [`Error::Engine`] where it is damaged; [`Error::SequencesOfState`] where it has none or
    /// several. Nothing has changed then.
    pub fn restore(&mut self, state: &[u8]) -> Result<Vec<TokenId>, Error> {
        let state = SavedState::parse(state).map_err(EngineError::State)?;
        let seqs = state.snapshot().seqs();
        let (Some(from), 1) = (seqs.first(), seqs.len()) else {
            let n_seqs = seqs.len();
            return Err(Error::SequencesOfState { n_seqs });
        };
        // Texts that go on give their sequences for it. Nobody goes on with it, so others may.
        self.session.pause_all();
        drop(self.session.restore(&state, from, TextRequest::default())?);
        let known = state.tokens().iter().find(|tokens| tokens.seq == from);
        Ok(known.map_or(Vec::new(), |known| known.evaluated.clone()))
    }

    /// Forgets everything: texts that go on are computed again up to where they were.
    pub fn clear(&mut self) {
        self.session.with_engine(|_| ());
    }

    /// The file, its tokenizer and metadata.
    pub fn file(&self) -> &Arc<ModelFile> {
        &self.file
    }

    /// The engine, with its memory and settings.
    pub fn engine(&self) -> &Engine<B, M> {
        self.session.engine()
    }

    /// The session that computes its texts.
    pub fn session(&mut self) -> &mut Session<B, M> {
        &mut self.session
    }

    /// The engine, without texts.
    pub fn into_engine(self) -> Engine<B, M> {
        self.session.into_engine()
    }
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
