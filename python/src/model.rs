//! `Model`: opening, tokens, texts, logits.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cellar::kv_core::batch::Batch;
use cellar::kv_core::memory::Seqs;
use cellar::kv_core::{PosRange, SeqId};
use cellar::model_core::tokenizer::{EncodeOptions, SpecialPieces, Tokenizer};
use cellar::{
    BackendOptions, CancelFlag, ChatMessage, EngineConfig, GenerateOptions, KvType, KvTypes,
    ModelOptions, TokenId,
};
use numpy::{PyArray2, PyArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::memory::Memory;
use crate::options::generate_options;
use crate::text::Text;
use crate::{failed, not_opened};

/// A model that several Python objects use.
pub(crate) struct Shared(Mutex<cellar::Model>);

impl Shared {
    /// The model, for one computation. A panic elsewhere leaves it as it was before that call.
    pub(crate) fn lock(&self) -> MutexGuard<'_, cellar::Model> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A model on a backend, with a text in each of its sequences.
#[pyclass(module = "cellar", frozen)]
pub(crate) struct Model {
    shared: Arc<Shared>,
    tokenizer: Arc<Tokenizer>,
}

#[pymethods]
impl Model {
    /// Opens a GGUF file or a directory with safetensors files.
    #[new]
    #[pyo3(signature = (path, *, n_ctx=None, n_seqs=1, threads=None, kv_type="f16"))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        n_ctx: Option<u32>,
        n_seqs: u32,
        threads: Option<usize>,
        kv_type: &str,
    ) -> PyResult<Self> {
        let invalid = |message: String| PyValueError::new_err(message);
        let kv_type: KvType = kv_type
            .parse()
            .map_err(|_| invalid(format!("kv_type: '{kv_type}' is no type of K and V")))?;
        let n_threads = match threads {
            None => None,
            Some(n) => Some(NonZeroUsize::new(n).ok_or_else(|| invalid("threads: 0".to_owned()))?),
        };
        let options = ModelOptions {
            backend: BackendOptions {
                n_threads,
                ..BackendOptions::default()
            },
            engine: EngineConfig {
                n_ctx,
                n_seqs,
                kv_types: KvTypes::from(kv_type),
                ..EngineConfig::default()
            },
            ..ModelOptions::default()
        };
        let model = py.detach(|| cellar::Model::open_with(&path, options));
        let model = model.map_err(|error| not_opened(&path, &error))?;
        Ok(Self {
            tokenizer: Arc::clone(model.file().tokenizer()),
            shared: Arc::new(Shared(Mutex::new(model))),
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
        let tokens = match prompt {
            Prompt::Tokens(ids) => ids.into_iter().map(TokenId).collect(),
            Prompt::Text(text) => self.tokenizer.encode(&text, EncodeOptions::PROMPT),
        };
        self.begin(py, &tokens, generate_options(options)?)
    }

    /// Answers messages, each with 'role' and 'content', by the model's own chat template.
    #[pyo3(signature = (messages, **options))]
    fn chat(
        &self,
        py: Python<'_>,
        messages: Vec<Bound<'_, PyDict>>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Text> {
        let text_of = |message: &Bound<'_, PyDict>, key: &str| match message.get_item(key)? {
            Some(text) => text.extract::<String>(),
            None => Err(PyValueError::new_err(format!("a message has no '{key}'"))),
        };
        let message = |m: &Bound<'_, PyDict>| -> PyResult<ChatMessage> {
            Ok(ChatMessage::new(
                text_of(m, "role")?,
                text_of(m, "content")?,
            ))
        };
        let messages = messages.iter().map(message).collect::<PyResult<Vec<_>>>()?;
        let tokens = py.detach(|| self.shared.lock().chat_tokens(&messages));
        let tokens = tokens.map_err(|error| failed(&error))?;
        self.begin(py, &tokens, generate_options(options)?)
    }

    /// The token ids of a text; 'special' adds those around it and reads special tokens in it.
    #[pyo3(signature = (text, *, special=true))]
    fn tokenize(&self, text: &str, special: bool) -> Vec<u32> {
        let options = match special {
            true => EncodeOptions::PROMPT,
            false => EncodeOptions::TEXT,
        };
        let tokens = self.tokenizer.encode(text, options);
        tokens.into_iter().map(|token| token.0).collect()
    }

    /// The text of token ids; 'special' writes special tokens, too.
    #[pyo3(signature = (tokens, *, special=false))]
    fn detokenize(&self, tokens: Vec<u32>, special: bool) -> PyResult<String> {
        let tokens: Vec<TokenId> = tokens.into_iter().map(TokenId).collect();
        let special = match special {
            true => SpecialPieces::Render,
            false => SpecialPieces::Skip,
        };
        let text = self.tokenizer.decode(&tokens, special);
        text.map_err(|error| failed(&error))
    }

    /// The logits of every token of a text, a numpy array [tokens, vocabulary] of float32. Replaces
    /// what is in the sequence.
    #[pyo3(signature = (tokens, *, seq=0))]
    fn logits<'py>(
        &self,
        py: Python<'py>,
        tokens: Vec<u32>,
        seq: u32,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let n_rows = tokens.len();
        let computed = py.detach(|| {
            let mut model = self.shared.lock();
            let seq = SeqId(seq);
            let engine = model.engine_mut();
            engine.remove(Seqs::One(seq), PosRange::ALL)?;
            let n_batch = engine.settings().rules.n_batch.max(1) as usize;
            let mut values = Vec::new();
            for piece in tokens.chunks(n_batch) {
                let mut batch = Batch::new();
                for &token in piece {
                    batch
                        .push_token(TokenId(token))
                        .in_sequence(seq)
                        .with_output();
                }
                values.extend_from_slice(engine.decode(&batch)?.values());
            }
            // The facade does not know these tokens: the next text evaluates its prompt anew.
            engine.remove(Seqs::One(seq), PosRange::ALL)?;
            Ok::<_, cellar::engine::EngineError>(values)
        });
        let values = computed.map_err(|error| failed(&error))?;
        let n_columns = values.len().checked_div(n_rows).unwrap_or(0);
        numpy::PyArray1::from_vec(py, values).reshape([n_rows, n_columns])
    }

    /// What the model remembers.
    #[getter]
    fn memory(&self) -> Memory {
        Memory {
            model: Arc::clone(&self.shared),
        }
    }

    /// Tokens that the memory holds at most.
    #[getter]
    fn n_ctx(&self, py: Python<'_>) -> u32 {
        py.detach(|| self.shared.lock().engine().settings().n_ctx)
    }

    /// The name of the architecture.
    #[getter]
    fn architecture(&self, py: Python<'_>) -> String {
        py.detach(|| {
            let model = self.shared.lock();
            model.engine().model().architecture().to_owned()
        })
    }
}

impl Model {
    fn begin(
        &self,
        py: Python<'_>,
        tokens: &[TokenId],
        options: GenerateOptions,
    ) -> PyResult<Text> {
        let cancel: CancelFlag = options.cancel.clone();
        let state = py.detach(|| self.shared.lock().begin(tokens, options));
        let state = state.map_err(|error| failed(&error))?;
        Ok(Text::new(Arc::clone(&self.shared), state, cancel))
    }
}

/// A text, or its tokens.
#[derive(FromPyObject)]
enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}
