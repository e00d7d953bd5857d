//! Models: opened files, and what is known of them without computing.
//!
//! Invariant: what [`SharedModel`] holds does not change, so that texts which were handed out stay
//! as long as the model; a context keeps its model, in whichever order they are freed. Holds no
//! weights: a context loads them.

use std::ffi::{CString, c_char, c_void};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use cellar_grammar::GrammarCompiler;
use kv_graph::weights::WeightSource;
use model_core::architecture::Model as Architecture;
use model_core::gguf::{GgufFile, Metadata, Value};
use model_core::model_file::{OpenModel, has_no_text, tokenizer_spec};
use model_core::tokenizer::{Tokenizer, TokenizerModel};

use crate::abi::{KvOverride, ModelParams};
use crate::adapter::LoraAdapter;
use crate::ffi::{CText, Handle, In, c_api};
use crate::log;

/// The target of a `llama_model *` and of its `llama_vocab *`: the same address.
pub(crate) struct Model {
    pub(crate) shared: Arc<SharedModel>,
    /// The adapters that are freed with it.
    pub(crate) adapters: Mutex<Vec<Handle<LoraAdapter>>>,
}

/// A vocabulary is its model.
pub(crate) type Vocab = Model;

/// A model that was opened.
pub(crate) struct SharedModel {
    pub(crate) file: Arc<GgufFile>,
    /// The file's, with the overrides of the program.
    pub(crate) metadata: Metadata,
    /// `None` where only the vocabulary was opened.
    pub(crate) architecture: Option<Arc<dyn Architecture>>,
    /// `None` where the model's tokens are no text.
    pub(crate) tokenizer: Option<Arc<Tokenizer>>,
    pub(crate) tokenizer_model: Option<TokenizerModel>,
    /// Number of layers that a GPU computes; `None` for all.
    pub(crate) gpu_layers: Option<u32>,
    /// Milliseconds that opening took.
    pub(crate) load_ms: f64,
    /// The texts of tokens, made when they are first asked for.
    texts: OnceLock<Vec<CString>>,
    /// Texts that were handed out.
    handed_out: Mutex<Vec<CString>>,
    compiler: OnceLock<Result<GrammarCompiler, String>>,
    suppressed: OnceLock<Vec<i32>>,
}

impl SharedModel {
    fn open(file: GgufFile, params: &ModelParams) -> Result<Self, String> {
        let started = Instant::now();
        let mut metadata = file.metadata().clone();
        let overrides = In::of(params.kv_overrides);
        for change in overrides.until(|change| change.key[0] == 0) {
            let (key, value) = overridden(change)?;
            metadata.insert(&key, value);
        }
        let file = Arc::new(file);
        let text = |error: &dyn std::fmt::Display| format!("{}: {error}", file.label());
        let architecture = if params.vocab_only {
            None
        } else {
            let registry = cellar::architectures();
            let model = registry.model(&metadata, &*file);
            Some(model.map_err(|error| text(&error))?)
        };
        let (mut tokenizer, mut tokenizer_model) = (None, None);
        let is_mute = !metadata.contains("tokenizer.ggml.model")
            || has_no_text(&metadata).map_err(|error| text(&error))?;
        if !is_mute {
            let spec = tokenizer_spec(&metadata).map_err(|error| text(&error))?;
            tokenizer_model = Some(spec.model);
            let read = Tokenizer::new(spec).map_err(|error| text(&error))?;
            tokenizer = Some(Arc::new(read));
        }
        file.check().map_err(|error| text(&error))?;
        Ok(Self {
            metadata,
            architecture,
            tokenizer,
            tokenizer_model,
            gpu_layers: u32::try_from(params.n_gpu_layers).ok(),
            load_ms: started.elapsed().as_secs_f64() * 1e3,
            texts: OnceLock::new(),
            handed_out: Mutex::default(),
            compiler: OnceLock::new(),
            suppressed: OnceLock::new(),
            file,
        })
    }

    /// The model as what reads adapters or writes files takes it.
    ///
    /// # Errors
    /// Only the vocabulary was opened.
    pub(crate) fn open_model(&self) -> Result<OpenModel, String> {
        let model = self.architecture.clone();
        let model = model.ok_or("the model was opened with vocab_only: it has no weights")?;
        let file = Arc::clone(&self.file);
        Ok(OpenModel::of_gguf(file, model, self.metadata.clone()))
    }

    /// The number under a key that begins with the architecture's name, the first of a list.
    pub(crate) fn number(&self, name: &str) -> Option<u64> {
        let architecture: &str = self.metadata.get("general.architecture").ok()?;
        let value = self.metadata.value(&format!("{architecture}.{name}"))?;
        let value = match value {
            Value::Array(array) => &array.get(0)?,
            value => value,
        };
        Some(match *value {
            Value::U8(n) => n.into(),
            Value::U16(n) => n.into(),
            Value::U32(n) => n.into(),
            Value::U64(n) => n,
            Value::I8(n) => u64::try_from(n).ok()?,
            Value::I16(n) => u64::try_from(n).ok()?,
            Value::I32(n) => u64::try_from(n).ok()?,
            Value::I64(n) => u64::try_from(n).ok()?,
            _ => return None,
        })
    }

    /// The same for a real number.
    pub(crate) fn real(&self, name: &str) -> Option<f32> {
        let architecture: &str = self.metadata.get("general.architecture").ok()?;
        let value = self.metadata.optional(&format!("{architecture}.{name}"));
        value.ok().flatten()
    }

    /// Tokens of the vocabulary: the width of the logits.
    pub(crate) fn n_vocab(&self) -> usize {
        match (&self.architecture, &self.tokenizer) {
            (_, Some(tokenizer)) => tokenizer.n_tokens(),
            (Some(model), None) => model.vocab_size(),
            (None, None) => 0,
        }
    }

    /// Width of the embedding rows.
    pub(crate) fn n_embd(&self) -> usize {
        match &self.architecture {
            Some(model) => model.embedding_dim(),
            None => self.number("embedding_length").unwrap_or(0) as usize,
        }
    }

    /// Width of rows in place of tokens.
    pub(crate) fn n_embd_inp(&self) -> usize {
        match &self.architecture {
            Some(model) => model.given_dim(),
            None => self.n_embd(),
        }
    }

    /// The texts of all tokens as the vocabulary has them.
    pub(crate) fn token_texts(&self) -> &[CString] {
        self.texts.get_or_init(|| {
            let Some(tokenizer) = &self.tokenizer else {
                return Vec::new();
            };
            let ids = (0..tokenizer.n_tokens()).map(|id| kv_core::TokenId(id as u32));
            ids.map(|id| c_text(tokenizer.token_text(id).unwrap_or_default()))
                .collect()
        })
    }

    /// A text that stays as long as the model; the same one for equal texts.
    pub(crate) fn hand_out(&self, text: &str) -> *const c_char {
        let text = c_text(text);
        let mut texts = self
            .handed_out
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = texts.iter().find(|known| **known == text) {
            return known.as_ptr();
        }
        let pointer = text.as_ptr();
        texts.push(text);
        pointer
    }

    /// The compiler of grammars for its tokens.
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) fn compiler(&self) -> Result<&GrammarCompiler, String> {
        let compiler = self.compiler.get_or_init(|| {
            let tokenizer = self
                .tokenizer
                .as_ref()
                .ok_or("the model's tokens are no text")?;
            GrammarCompiler::new(tokenizer).map_err(|error| error.to_string())
        });
        compiler.as_ref().map_err(Clone::clone)
    }

    /// Tokens that the file wants never to be chosen.
    pub(crate) fn suppressed(&self) -> &[i32] {
        self.suppressed.get_or_init(|| {
            let tokens = self.metadata.optional("tokenizer.ggml.suppress_tokens");
            tokens.ok().flatten().unwrap_or_default()
        })
    }
}

/// A text with a NUL behind it; without those inside.
fn c_text(text: &str) -> CString {
    CString::new(text.replace('\0', "")).unwrap_or_default()
}

/// The key and value of an override.
pub(crate) fn overridden(change: &KvOverride) -> Result<(String, Value), String> {
    let text = |bytes: &[u8]| {
        let text = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(text).into_owned()
    };
    let key = text(&change.key.map(|byte| byte as u8));
    let bytes = change.value.0;
    let mut eight = [0; 8];
    eight.copy_from_slice(&bytes[..8]);
    let value = match change.tag {
        0 => Value::I64(i64::from_ne_bytes(eight)),
        1 => Value::F64(f64::from_ne_bytes(eight)),
        2 => Value::Bool(bytes[0] != 0),
        3 => Value::String(text(&bytes)),
        tag => {
            return Err(format!(
                "the override of '{key}' has the unknown type {tag}"
            ));
        }
    };
    Ok((key, value))
}

/// Opens a model for a program: its handle, or none and a log line.
fn loaded(name: &str, file: Result<GgufFile, String>, params: &ModelParams) -> Handle<Model> {
    let is_wanted = |progress: f32| match params.progress_callback {
        // SAFETY: the program gave the callback and its data for such calls.
        Some(callback) => unsafe { callback(progress, params.progress_callback_user_data) },
        None => true,
    };
    if !is_wanted(0.0) {
        log::warn(&format!("{name}: the program ended loading"));
        return Handle::NULL;
    }
    let opened = file.and_then(|file| SharedModel::open(file, params));
    let Some(model) = log::or_line(name, opened) else {
        return Handle::NULL;
    };
    // The list ends with a pattern that is null.
    let places = In::of(params.tensor_buft_overrides).get();
    if places.is_some_and(|place| !place.pattern.is_null()) {
        log::warn(&format!(
            "{name}: places of single tensors (tensor_buft_overrides) have no effect"
        ));
    }
    if !is_wanted(1.0) {
        log::warn(&format!("{name}: the program ended loading"));
        return Handle::NULL;
    }
    log::info(&format!("{name}: opened {}", model.file.label()));
    Handle::new(Model {
        shared: Arc::new(model),
        adapters: Mutex::default(),
    })
}

fn from_path(name: &str, path: CText, params: &ModelParams) -> Handle<Model> {
    let file = path
        .get()
        .ok_or_else(|| "the path of the model is null or not UTF-8".to_owned())
        .and_then(|path| GgufFile::open(path).map_err(|error| error.to_string()));
    loaded(name, file, params)
}

c_api! {
    fn llama_model_load_from_file(path: CText, params: ModelParams)
        -> Handle<Model> = Handle::NULL; {
        from_path("llama_model_load_from_file", path, &params)
    }

    fn llama_load_model_from_file(path: CText, params: ModelParams)
        -> Handle<Model> = Handle::NULL; {
        from_path("llama_load_model_from_file", path, &params)
    }

    fn llama_model_load_from_file_ptr(file: *mut libc::FILE, params: ModelParams)
        -> Handle<Model> = Handle::NULL; {
        let name = "llama_model_load_from_file_ptr";
        let bytes = read_rest(file).and_then(|bytes| {
            GgufFile::from_bytes(bytes.into()).map_err(|error| error.to_string())
        });
        loaded(name, bytes, &params)
    }

    fn llama_model_load_from_splits(paths: In<CText>, n_paths: usize, params: ModelParams)
        -> Handle<Model> = Handle::NULL; {
        let name = "llama_model_load_from_splits";
        let paths = paths.slice(n_paths);
        let first = paths.first().and_then(|path| path.get());
        let file = first
            .ok_or_else(|| "the list of parts is empty, or a path is not UTF-8".to_owned())
            .and_then(|first| GgufFile::open(first).map_err(|error| error.to_string()))
            .and_then(|file| match file.n_parts() {
                n if n == paths.len() => Ok(file),
                n => Err(format!("{} has {n} parts, and {n_paths} were given", file.label())),
            });
        loaded(name, file, &params)
    }

    fn llama_model_init_from_user(
        _metadata: *const c_void,
        _set_tensor_data: *const c_void,
        _user_data: *mut c_void,
        _params: ModelParams,
    ) -> Handle<Model> = Handle::NULL; {
        log::error("llama_model_init_from_user: models are loaded from files only");
        Handle::NULL
    }

    fn llama_model_free(model: Handle<Model>); {
        free(model);
    }

    fn llama_free_model(model: Handle<Model>); {
        free(model);
    }
}

fn free(model: Handle<Model>) {
    match model.take() {
        Some(model) => model.free_adapters(),
        None if model.is_null() => {}
        None => log::error("llama_model_free: there is no such model, or it was freed before"),
    }
}

/// The bytes from where a file stands to its end.
pub(crate) fn read_rest(file: *mut libc::FILE) -> Result<Vec<u8>, String> {
    if file.is_null() {
        return Err("the file is null".to_owned());
    }
    let mut bytes = Vec::new();
    let mut piece = vec![0_u8; 1 << 20];
    loop {
        // SAFETY: the caller vouches for an open file; `piece` has room for as many bytes.
        let n = unsafe { libc::fread(piece.as_mut_ptr().cast(), 1, piece.len(), file) };
        if n == 0 {
            return Ok(bytes);
        }
        bytes.extend_from_slice(&piece[..n]);
    }
}
