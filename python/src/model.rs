//! `Model`: opening, tokens, texts, logits, and what the file says.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use cellar::engine::EngineError;
use cellar::engine::serve::ServiceError;
use cellar::model_core::chat_template::GenerationPrompt;
use cellar::model_core::tokenizer::{EncodeOptions, SpecialPieces, Tokenizer};
use cellar::{
    EngineConfig, Error, HeadUse, KvType, KvTypes, ModelFile, ModelOptions, PictureReader,
    PromptTokens, TokenId, picture_chat, render_json_chat,
};
use cellar_grammar::{Grammar, GrammarCompiler};
use numpy::{PyArray2, PyArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::adapters::{Lora, scales_of};
use crate::batch::{FinishedText, finish_together};
use crate::chat::{Audio, Chat, GivenMedia, Image};
use crate::compute::interruptible;
use crate::memory::Memory;
use crate::options::{Constraint, TextOptions, backend_options, text_options};
use crate::shared::SharedModel;
use crate::text::{Text, text_failed};
use crate::values::{Count, metadata};
use crate::{failed, not_opened};

/// The head that drafts: that of the file, or the file of one (EAGLE-3).
#[derive(FromPyObject)]
enum DraftHead {
    Use(bool),
    File(PathBuf),
}

impl From<DraftHead> for HeadUse {
    fn from(head: DraftHead) -> Self {
        match head {
            DraftHead::Use(false) => Self::Unused,
            DraftHead::Use(true) => Self::Drafts,
            DraftHead::File(path) => Self::File(path),
        }
    }
}

/// A model on a backend, with its texts.
#[pyclass(module = "cellar", frozen)]
pub(crate) struct Model {
    shared: Arc<SharedModel<cellar::Model>>,
    file: Arc<ModelFile>,
    /// The reader of pictures or sounds; none where it takes none.
    reader: Option<Arc<PictureReader>>,
    /// Compiles grammars: made when the first is needed.
    compiler: OnceLock<GrammarCompiler>,
}

#[pymethods]
impl Model {
    /// Opens a GGUF file or a directory with safetensors files.
    #[new]
    #[pyo3(signature = (path, *, n_ctx=None, n_seqs=Count(1), threads=None, kv_type="f16", backend=None,
        gpu_layers=None, draft_head=DraftHead::Use(false), mmproj=None, lora=None))]
    #[allow(clippy::too_many_arguments)] // keywords
    fn new(
        py: Python<'_>,
        path: PathBuf,
        n_ctx: Option<Count>,
        n_seqs: Count,
        threads: Option<usize>,
        kv_type: &str,
        backend: Option<&str>,
        gpu_layers: Option<Count>,
        draft_head: DraftHead,
        mmproj: Option<PathBuf>,
        lora: Option<Lora>,
    ) -> PyResult<Self> {
        let no_type =
            |_| PyValueError::new_err(format!("kv_type: '{kv_type}' is no type of K and V"));
        let kv_type: KvType = kv_type.parse().map_err(no_type)?;
        let head = HeadUse::from(draft_head);
        let options = ModelOptions {
            backend: backend_options(backend, gpu_layers, threads)?,
            engine: EngineConfig {
                n_ctx: n_ctx.map(|n| n.0),
                n_seqs: n_seqs.0,
                kv_types: KvTypes::from(kv_type),
                // What a head drafts is taken back.
                n_snapshots: if head == HeadUse::Unused { 0 } else { 3 },
                ..EngineConfig::default()
            },
            head,
            mmproj,
            adapters: lora.map(Lora::options).unwrap_or_default(),
            ..ModelOptions::default()
        };
        let model = py.detach(|| cellar::Model::open_with(&path, options));
        let model = model.map_err(|error| not_opened(&path, &error))?;
        let file = Arc::clone(model.file());
        let reader = model.picture_reader().cloned();
        Ok(Self {
            shared: Arc::new(SharedModel::new(model)),
            file,
            reader,
            compiler: OnceLock::new(),
        })
    }

    /// Continues a prompt (text or token ids): an iterator of pieces of text.
    #[pyo3(signature = (prompt, **options))]
    fn generate(
        &self,
        py: Python<'_>,
        prompt: Prompt,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Text> {
        self.begin(
            py,
            text_only(self.prompt_tokens(prompt)),
            text_options(options)?,
        )
    }

    /// As 'generate', to be awaited: the event loop goes on while the prompt is read.
    #[pyo3(signature = (prompt, **options))]
    fn generate_async<'py>(
        this: &Bound<'py, Self>,
        prompt: &Bound<'py, PyAny>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        in_thread(this.getattr("generate")?, prompt, options)
    }

    /// Continues many prompts at once, in the model's sequences, and returns each when all have
    /// ended. Prompt number i has i added to its seed.
    #[pyo3(signature = (prompts, **options))]
    fn generate_batch(
        &self,
        py: Python<'_>,
        prompts: Vec<Prompt>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Vec<FinishedText>> {
        let options = self.with_adapters(text_options(options)?)?;
        let grammar = self.grammar(options.constraint.as_ref())?;
        let seed = options.generate.sampler.seed;
        let requests = (0..).zip(prompts).map(|(number, prompt)| {
            let mut generate = options.generate.clone();
            generate.sampler.seed = seed.wrapping_add(number);
            let mut request = generate.request(self.prompt_tokens(prompt));
            let step = grammar
                .as_ref()
                .map(|grammar| Box::new(grammar.step()) as _);
            request.steps.extend(step);
            request
        });
        finish_together(py, &self.shared, requests.collect(), seed)
    }

    /// Answers messages, each with 'role' and 'content', by the model's own chat template.
    /// 'variables' are others that the template reads, such as enable_thinking. 'images' are the
    /// pictures of parts {'type': 'image'}, or of the last message where there are none: bytes or
    /// paths of files, or numpy arrays [height, width, 3] of uint8. 'audio' are the sounds of parts
    /// {'type': 'audio'}, in the same way: bytes or paths of files, or numpy arrays of float32 with
    /// 16000 samples a second.
    #[pyo3(signature = (messages, *, images=Vec::new(), audio=Vec::new(), tools=None, variables=None, **options))]
    #[allow(clippy::too_many_arguments)] // keywords
    fn chat(
        &self,
        py: Python<'_>,
        messages: &Bound<'_, PyAny>,
        images: Vec<Image>,
        audio: Vec<Audio>,
        tools: Option<&Bound<'_, PyAny>>,
        variables: Option<&Bound<'_, PyDict>>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Text> {
        let mut chat = Chat::new(messages, tools, variables)?;
        let given = GivenMedia {
            images,
            sounds: audio,
        };
        if chat.shows_media() || !given.is_empty() {
            let prompt = self.with_media(&mut chat, given)?;
            return self.begin(py, prompt, text_options(options)?);
        }
        let text = self.rendered(py, &chat, GenerationPrompt::Add)?;
        if text.is_empty() {
            return Err(failed(&Error::EmptyChat));
        }
        let tokens = self.tokenizer().encode(&text, EncodeOptions::CHAT);
        self.begin(py, text_only(tokens), text_options(options)?)
    }

    /// As 'chat', to be awaited.
    #[pyo3(signature = (messages, **options))]
    fn chat_async<'py>(
        this: &Bound<'py, Self>,
        messages: &Bound<'py, PyAny>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        in_thread(this.getattr("chat")?, messages, options)
    }

    /// The text that the model sees for these messages.
    #[pyo3(signature = (messages, *, tools=None, variables=None, add_generation_prompt=true))]
    fn apply_chat_template(
        &self,
        py: Python<'_>,
        messages: &Bound<'_, PyAny>,
        tools: Option<&Bound<'_, PyAny>>,
        variables: Option<&Bound<'_, PyDict>>,
        add_generation_prompt: bool,
    ) -> PyResult<String> {
        let prompt = if add_generation_prompt {
            GenerationPrompt::Add
        } else {
            GenerationPrompt::Omit
        };
        self.rendered(py, &Chat::new(messages, tools, variables)?, prompt)
    }

    /// The token ids of a text; 'special' adds those around it and reads special tokens in it.
    #[pyo3(signature = (text, *, special=true))]
    fn tokenize(&self, text: &str, special: bool) -> Vec<u32> {
        let options = if special {
            EncodeOptions::PROMPT
        } else {
            EncodeOptions::TEXT
        };
        let tokens = self.tokenizer().encode(text, options);
        tokens.into_iter().map(|token| token.0).collect()
    }

    /// The text of token ids; 'special' writes special tokens, too.
    #[pyo3(signature = (tokens, *, special=false))]
    fn detokenize(&self, tokens: Vec<Count>, special: bool) -> PyResult<String> {
        let special = if special {
            SpecialPieces::Render
        } else {
            SpecialPieces::Skip
        };
        let text = self.tokenizer().decode(&ids(tokens), special);
        text.map_err(|error| failed(&error))
    }

    /// The logits of every token of a text, a numpy array [tokens, vocabulary] of float32.
    /// Nothing is remembered afterwards.
    #[pyo3(signature = (tokens))]
    fn logits<'py>(
        &self,
        py: Python<'py>,
        tokens: Vec<Count>,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let tokens = ids(tokens);
        let shape = [tokens.len(), self.n_vocab()];
        let cancel = cellar::CancelFlag::default();
        let values = interruptible(
            py,
            || cancel.cancel(),
            || {
                self.shared.with(|model| {
                    if tokens.is_empty() {
                        Ok(Vec::new())
                    } else {
                        model.logits(&tokens, &cancel)
                    }
                })
            },
        )??;
        let values = values.map_err(|error| failed(&error))?;
        numpy::PyArray1::from_vec(py, values).reshape(shape)
    }

    /// The memory of the model.
    #[getter]
    fn memory(&self) -> Memory {
        Memory {
            model: Arc::clone(&self.shared),
        }
    }

    /// Tokens that the memory holds at most.
    #[getter]
    fn n_ctx(&self, py: Python<'_>) -> PyResult<u32> {
        py.detach(|| self.shared.with(|model| model.engine().settings().n_ctx))
    }

    /// Tokens of the vocabulary.
    #[getter]
    fn n_vocab(&self) -> usize {
        self.tokenizer().n_tokens()
    }

    /// The token that begins a sequence; None where there is none.
    #[getter]
    fn bos_id(&self) -> Option<u32> {
        self.tokenizer().special_ids().bos.map(|token| token.0)
    }

    /// The token that ends a sequence; None where there is none.
    #[getter]
    fn eos_id(&self) -> Option<u32> {
        self.tokenizer().special_ids().eos.map(|token| token.0)
    }

    /// The name of the architecture.
    #[getter]
    fn architecture(&self) -> String {
        self.file.model().architecture().to_owned()
    }

    /// The adapters that it was opened with: the scale of texts that do not say one, by name.
    #[getter]
    fn lora<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let all = PyDict::new(py);
        if let Some(adapters) = self.file.model().adapters() {
            for (adapter, scale) in adapters.all().iter().zip(&**adapters.default_scales()) {
                all.set_item(adapter.name(), scale)?;
            }
        }
        Ok(all)
    }

    /// All metadata of the file.
    #[getter]
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let all = PyDict::new(py);
        for (key, value) in self.file.metadata().iter() {
            all.set_item(key, metadata(py, value)?)?;
        }
        Ok(all)
    }

    /// Frees it; texts and the memory cannot be used any more.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.shared.close());
    }

    fn __enter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        let (name, architecture) = (self.file.label(), self.architecture());
        format!(
            "<cellar.Model {name}, {architecture}, {} tokens>",
            self.n_vocab()
        )
    }
}

impl Model {
    fn with_media(&self, chat: &mut Chat, given: GivenMedia) -> PyResult<PromptTokens> {
        let Some(reader) = &self.reader else {
            let has_sounds = !given.sounds.is_empty() || chat.plays_sounds();
            return Err(failed(if has_sounds {
                &Error::HearsNothing
            } else {
                &Error::SeesNothing
            }));
        };
        let pictures = chat.take_media(reader, given)?;
        let (messages, variables) = (&chat.messages, &chat.variables);
        let chat = picture_chat(&self.file, reader, messages, variables, &pictures);
        Ok(chat.map_err(|error| failed(&error))?.prompt)
    }

    fn begin(&self, py: Python<'_>, prompt: PromptTokens, options: TextOptions) -> PyResult<Text> {
        let TextOptions {
            generate,
            constraint,
            ..
        } = self.with_adapters(options)?;
        let grammar = self.grammar(constraint.as_ref())?;
        let (cancel, seed) = (generate.cancel.clone(), generate.sampler.seed);
        let mut request = generate.request(prompt.tokens);
        request.pictures = prompt.pictures;
        let failure = grammar.map(|grammar| {
            let step = grammar.step();
            let failure = step.failure();
            request.steps.push(Box::new(step));
            failure
        });
        let state = interruptible(
            py,
            || cancel.cancel(),
            || self.shared.with(|model| model.begin(request)),
        )??;
        let state = state.map_err(|error| match &error {
            Error::Text(ServiceError::Engine(why)) if matches!(**why, EngineError::Config(_)) => {
                PyValueError::new_err(error.to_string())
            }
            _ => text_failed(&error, failure.as_ref()),
        })?;
        Ok(Text::new(Arc::clone(&self.shared), state, cancel, seed).with_failure(failure))
    }

    /// The options with the scales of the adapters that they name.
    fn with_adapters(&self, mut options: TextOptions) -> PyResult<TextOptions> {
        if let Some(wanted) = &options.lora {
            let adapters = self.file.model().adapters();
            options.generate.adapters = Some(scales_of(adapters, wanted)?);
        }
        Ok(options)
    }

    fn tokenizer(&self) -> &Arc<Tokenizer> {
        self.file.tokenizer()
    }

    fn prompt_tokens(&self, prompt: Prompt) -> Vec<TokenId> {
        match prompt {
            Prompt::Tokens(tokens) => ids(tokens),
            Prompt::Text(text) => self.tokenizer().encode(&text, EncodeOptions::PROMPT),
        }
    }

    fn rendered(&self, py: Python<'_>, chat: &Chat, prompt: GenerationPrompt) -> PyResult<String> {
        let rendered =
            py.detach(|| render_json_chat(&self.file, &chat.messages, &chat.variables, prompt));
        let rendered = rendered.and_then(|text| text.ok_or(Error::NoChatTemplate));
        rendered.map_err(|error| failed(&error))
    }

    fn grammar(&self, constraint: Option<&Constraint>) -> PyResult<Option<Grammar>> {
        let Some(constraint) = constraint else {
            return Ok(None);
        };
        let wrong = |error: cellar_grammar::GrammarError| PyValueError::new_err(error.to_string());
        let compiler = match self.compiler.get() {
            Some(compiler) => compiler,
            None => {
                let made = GrammarCompiler::new(self.tokenizer()).map_err(wrong)?;
                self.compiler.get_or_init(|| made)
            }
        };
        let compiled = match constraint {
            Constraint::Schema(schema) => compiler.json_schema(schema),
            Constraint::Grammar(grammar) => compiler.grammar(grammar),
        };
        compiled.map(Some).map_err(wrong)
    }
}

/// A call as a coroutine that another thread computes.
fn in_thread<'py>(
    method: Bound<'py, PyAny>,
    argument: &Bound<'py, PyAny>,
    options: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let asyncio = method.py().import("asyncio")?;
    asyncio.call_method("to_thread", (method, argument), options)
}

/// A prompt without pictures and sounds.
fn text_only(tokens: Vec<TokenId>) -> PromptTokens {
    PromptTokens {
        tokens,
        ..PromptTokens::default()
    }
}

fn ids(tokens: Vec<Count>) -> Vec<TokenId> {
    tokens.into_iter().map(|token| TokenId(token.0)).collect()
}

/// A text, or its tokens.
enum Prompt {
    Text(String),
    Tokens(Vec<Count>),
}

impl<'py> FromPyObject<'_, 'py> for Prompt {
    type Error = PyErr;

    fn extract(prompt: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match prompt.cast::<PyString>() {
            Ok(text) => Ok(Self::Text(text.extract()?)),
            Err(_) => Ok(Self::Tokens(prompt.extract()?)),
        }
    }
}
