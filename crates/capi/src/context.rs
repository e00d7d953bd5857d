//! Contexts: a model on a backend, with what it remembers.
//!
//! Invariant: sizes are those that `llama_init_from_model` settled and never change; all else is
//! behind a lock, so that threads which share a context wait for each other. A context keeps what
//! it needs of its model. Computes nothing itself.

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use cellar::{BackendOptions, ModelWork, choose_backend};
use cellar_engine::with_reasons;
use cellar_engine::{Engine, EngineConfig, PromptOutputs};
use kv_backend::BoxedBackend;
use kv_core::{
    layers::LayerMemory,
    memory::{Streams, SwaSize},
};
use kv_graph::weights::WeightSource;
use kv_rows::KvTypes;
use model_core::architecture::{Model as Architecture, OutputKind};
use model_core::gguf::Metadata;
use model_core::sentence::SentenceSettings;

use crate::abi::{AbortCallback, ContextParams, ggml_type, pooling};
use crate::adapter::ContextAdapters;
use crate::ffi::{Handle, c_api};
use crate::log;
use crate::model::{Model, SharedModel};
use crate::output::Outputs;
use crate::perf::Times;

/// The most sequences of llama.cpp: with a unified memory, ids up to it are free to use.
pub(crate) const MAX_SEQ: u32 = 256;
/// Contexts are multiples of this.
const CONTEXT_STEP: u32 = 256;

/// The target of a `llama_context *`, and of its `llama_memory_t`: the same address.
pub(crate) struct Context {
    pub(crate) model: Handle<Model>,
    pub(crate) shared: Arc<SharedModel>,
    pub(crate) sizes: Sizes,
    /// `llama_pooling_type`.
    pub(crate) pooling: i32,
    /// True if anything is remembered from one batch to the next.
    pub(crate) has_memory: bool,
    state: Mutex<State>,
}

/// A context of a model that was opened with `vocab_only`: it has sizes, and computes nothing.
struct VocabContext {
    model: Handle<Model>,
    sizes: Sizes,
}

/// The numbers of a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) n_ctx: u32,
    pub(crate) n_ctx_seq: u32,
    pub(crate) n_batch: u32,
    pub(crate) n_ubatch: u32,
    pub(crate) n_seq_max: u32,
    pub(crate) n_rs_seq: u32,
}

/// The part of a context that changes.
pub(crate) struct State {
    pub(crate) engine: Engine<BoxedBackend>,
    /// True if the rows before the output matrix are wanted, of every token.
    pub(crate) embeddings: bool,
    pub(crate) threads: [i32; 2],
    pub(crate) abort: Abort,
    /// The adapters that it computes with.
    pub(crate) adapters: ContextAdapters,
    pub(crate) outputs: Outputs,
    /// The memory of the outputs before, for the next.
    pub(crate) spare: Vec<f32>,
    pub(crate) times: Times,
}

/// The program's callback that ends a computation.
#[derive(Clone, Copy)]
pub(crate) struct Abort {
    pub(crate) callback: AbortCallback,
    /// An address of the program's, which is handed back and never followed.
    pub(crate) data: usize,
}

impl Abort {
    fn new(callback: AbortCallback, data: *mut c_void) -> Self {
        Self {
            callback,
            data: data as usize,
        }
    }
}

impl Context {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The context of a handle, or a line.
pub(crate) fn context<'a>(name: &str, context: Handle<Context>) -> Option<&'a Context> {
    let found = context.get();
    if found.is_none() {
        let reason = match of_vocab(context).get() {
            Some(_) => "the model was opened with vocab_only: nothing can be computed",
            None => "there is no such context",
        };
        log::error(&format!("{name}: {reason}"));
    }
    found
}

/// The same address, as a context that computes nothing.
fn of_vocab(context: Handle<Context>) -> Handle<VocabContext> {
    Handle::of(context.as_ptr().cast())
}

impl Sizes {
    /// As llama.cpp settles them.
    fn of(params: &ContextParams, trained: u32) -> Result<Self, String> {
        let n_seq_max = params.n_seq_max.max(1);
        if n_seq_max > MAX_SEQ {
            return Err(format!(
                "n_seq_max is {n_seq_max}: at most {MAX_SEQ} can be"
            ));
        }
        if params.n_batch == 0 && params.n_ubatch == 0 {
            return Err("n_batch and n_ubatch are 0: choose one".to_owned());
        }
        let n_ctx = match params.n_ctx {
            0 if trained == 0 => {
                return Err("n_ctx is 0, and the model does not say one: choose it".to_owned());
            }
            0 => trained,
            n_ctx => n_ctx,
        };
        let padded = |n: u32| n.checked_next_multiple_of(CONTEXT_STEP);
        let too_large = || format!("n_ctx is {n_ctx}: more than can be counted");
        let n_batch = params.n_batch.min(n_ctx);
        let n_ubatch = match params.n_ubatch {
            0 => params.n_batch,
            n_ubatch => n_ubatch,
        };
        let n_ctx = padded(n_ctx).ok_or_else(too_large)?;
        let n_ctx_seq = if params.kv_unified {
            n_ctx
        } else {
            padded(n_ctx / n_seq_max).ok_or_else(too_large)?
        };
        if n_ctx_seq == 0 {
            return Err(format!(
                "n_ctx is {n_ctx}: too few for {n_seq_max} sequences"
            ));
        }
        let n_ctx = if params.kv_unified {
            n_ctx
        } else {
            n_ctx_seq.checked_mul(n_seq_max).ok_or_else(too_large)?
        };
        Ok(Self {
            n_ctx,
            n_ctx_seq,
            n_batch,
            n_ubatch: n_ubatch.min(n_batch).max(1),
            n_seq_max,
            n_rs_seq: params.n_rs_seq,
        })
    }
}

/// The model as a context wants it: its rotation changed, perhaps without its output matrix.
fn architecture(
    shared: &SharedModel,
    params: &ContextParams,
) -> Result<Arc<dyn Architecture>, String> {
    let Some(model) = &shared.architecture else {
        return Err("the model was opened with vocab_only".to_owned());
    };
    let mut metadata = shared.metadata.clone();
    let model = if change_rotation(&mut metadata, params)? {
        let registry = cellar::architectures();
        let changed = registry.model(&metadata, &*shared.file);
        changed.map_err(|error| error.to_string())?
    } else {
        Arc::clone(model)
    };
    match (model.output(), params.embeddings) {
        (OutputKind::Logits, true) => model.without_head().ok_or_else(|| {
            let name = model.architecture();
            format!("'{name}' gives no rows before its output matrix (embeddings)")
        }),
        (OutputKind::MaskLogits(_), _) => Err(format!(
            "'{}' is a diffusion model, whose tokens see later ones: `cellar run` computes it",
            model.architecture()
        )),
        _ => Ok(model),
    }
}

/// Writes what is to be other than in the file; true if there is anything.
fn change_rotation(metadata: &mut Metadata, params: &ContextParams) -> Result<bool, String> {
    let architecture: &str = metadata
        .get("general.architecture")
        .map_err(|error| error.to_string())?;
    let key = format!("{architecture}.rope");
    let mut is_changed = false;
    let mut set = |name: &str, value: model_core::gguf::Value| {
        metadata.insert(&format!("{key}.{name}"), value);
        is_changed = true;
    };
    if params.rope_freq_base > 0.0 {
        set("freq_base", params.rope_freq_base.into());
    }
    let kind = match params.rope_scaling_type {
        -1 if params.rope_freq_scale > 0.0 && params.rope_freq_scale != 1.0 => Some("linear"),
        -1 => None,
        0 => Some("none"),
        1 => Some("linear"),
        2 => Some("yarn"),
        3 => Some("longrope"),
        other => return Err(format!("rope_scaling_type is {other}: -1 to 3 are known")),
    };
    if let Some(kind) = kind {
        set("scaling.type", kind.into());
    }
    if params.rope_freq_scale > 0.0 && kind != Some("none") && kind.is_some() {
        set("scaling.factor", (1.0 / params.rope_freq_scale).into());
    }
    if params.yarn_orig_ctx > 0 {
        let trained = params.yarn_orig_ctx;
        set("scaling.original_context_length", trained.into());
    }
    let yarn = [
        ("scaling.yarn_ext_factor", params.yarn_ext_factor),
        ("scaling.attn_factor", params.yarn_attn_factor),
        ("scaling.yarn_beta_fast", params.yarn_beta_fast),
        ("scaling.yarn_beta_slow", params.yarn_beta_slow),
    ];
    for (name, value) in yarn {
        if value >= 0.0 && kind == Some("yarn") {
            set(name, value.into());
        }
    }
    Ok(is_changed)
}

/// Parameters without an effect are named once.
fn warn_of(params: &ContextParams) {
    let name = "llama_init_from_model";
    if !params.cb_eval.is_null() {
        log::error(&format!(
            "{name}: cb_eval is never called: there are no ggml tensors"
        ));
    }
    if !params.samplers.is_null() && params.n_samplers > 0 {
        log::warn(&format!(
            "{name}: samplers of the context are not used: sample with llama_sampler_sample"
        ));
    }
    if !params.ctx_other.is_null() {
        log::warn(&format!("{name}: ctx_other has no effect"));
    }
}

fn kv_types(params: &ContextParams) -> Result<KvTypes, String> {
    let of = |name: &str, number| {
        ggml_type::kv_type(number)
            .ok_or_else(|| format!("{name} is ggml type {number}, which no rows are stored in"))
    };
    let types = KvTypes::new(of("type_k", params.type_k)?, of("type_v", params.type_v)?);
    let is_float = matches!(params.type_v, 0 | ggml_type::F16 | 30);
    if !is_float && params.flash_attn_type == 0 {
        return Err("quantized values (type_v) need flash_attn_type auto or enabled".to_owned());
    }
    Ok(types)
}

fn has_memory(model: &dyn Architecture) -> bool {
    let layers = model.layers();
    let mut all = layers.iter();
    all.any(|(_, layer)| layer != LayerMemory::Nothing)
}

/// The pooling of a model's texts, as the program or the file says.
fn pooling_of(shared: &SharedModel, params: &ContextParams) -> Result<i32, String> {
    match params.pooling_type {
        pooling::UNSPECIFIED => {
            let settings = SentenceSettings::read(&shared.metadata);
            let pooling = settings.map_err(|error| error.to_string())?.pooling;
            Ok(pooling.map_or(pooling::NONE, |pooling| pooling.code() as i32))
        }
        pooling::NONE..=pooling::RANK => Ok(params.pooling_type),
        other => Err(format!("pooling_type is {other}: -1 to 4 are known")),
    }
}

/// A context of a model.
///
/// # Errors
/// Why there is none, for people.
fn open(handle: Handle<Model>, params: &ContextParams) -> Result<Context, String> {
    let model = handle.get().ok_or("there is no such model")?;
    let shared = Arc::clone(&model.shared);
    if params.ctx_type != 0 {
        return Err("contexts of multi-token prediction (ctx_type) are not supported".to_owned());
    }
    let architecture = architecture(&shared, params)?;
    let trained = u32::try_from(architecture.context_length()).unwrap_or(u32::MAX);
    let mut sizes = Sizes::of(params, trained)?;
    let has_memory = has_memory(&*architecture);
    let (mut n_ctx, mut n_ubatch) = (sizes.n_ctx_seq, sizes.n_ubatch);
    if !has_memory {
        // A text is computed whole.
        sizes.n_batch = params.n_batch.max(params.n_ubatch).max(1);
        n_ubatch = sizes.n_batch;
        n_ctx = trained.max(1);
    }
    let n_seqs = if params.kv_unified || !has_memory {
        MAX_SEQ
    } else {
        sizes.n_seq_max
    };
    let shares_cells = params.kv_unified || sizes.n_seq_max == 1;
    let config = EngineConfig {
        n_ctx: Some(n_ctx),
        n_batch: sizes.n_batch,
        n_ubatch,
        n_seqs,
        n_active: Some(sizes.n_seq_max).filter(|&n| n < n_seqs && has_memory),
        kv_types: kv_types(params)?,
        streams: if shares_cells {
            Streams::Shared
        } else {
            Streams::PerSequence
        },
        swa: if params.swa_full {
            SwaSize::Full
        } else {
            SwaSize::Window
        },
        n_snapshots: params.n_rs_seq,
        ..EngineConfig::default()
    };
    let weights: Arc<dyn WeightSource> = Arc::clone(&shared.file) as _;
    let work = ModelWork {
        model: &architecture,
        weights: &weights,
        config: &config,
        outputs: PromptOutputs::Last,
    };
    let n_threads = usize::try_from(params.n_threads).unwrap_or(0);
    let most = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let options = BackendOptions {
        gpu_layers: shared.gpu_layers,
        n_threads: NonZeroUsize::new(n_threads.min(most)),
        ..BackendOptions::default()
    };
    let backend = choose_backend(options, &work).map_err(|error| error.to_string())?;
    let engine = Engine::new(backend.backend, architecture, weights, &config);
    let engine = engine.map_err(|error| with_reasons(&error))?;
    warn_of(params);
    Ok(Context {
        model: handle,
        pooling: pooling_of(&shared, params)?,
        sizes,
        has_memory,
        state: Mutex::new(State {
            engine,
            embeddings: params.embeddings || !has_memory,
            threads: [params.n_threads, params.n_threads_batch],
            abort: Abort::new(params.abort_callback, params.abort_callback_data),
            adapters: ContextAdapters::default(),
            outputs: Outputs::default(),
            spare: Vec::new(),
            times: Times::starting(Instant::now(), shared.load_ms),
        }),
        shared,
    })
}

/// A context of a model without weights.
fn open_vocab(
    model: Handle<Model>,
    params: &ContextParams,
) -> Option<Result<VocabContext, String>> {
    let shared = &model.get()?.shared;
    if shared.architecture.is_some() {
        return None;
    }
    let trained = shared.number("context_length").unwrap_or(0);
    let sizes = Sizes::of(params, u32::try_from(trained).unwrap_or(u32::MAX));
    Some(sizes.map(|sizes| VocabContext { model, sizes }))
}

fn opened(name: &str, model: Handle<Model>, params: &ContextParams) -> Handle<Context> {
    if let Some(opened) = open_vocab(model, params) {
        let opened = log::or_line(name, opened).map(Handle::new);
        return opened.map_or(Handle::NULL, |context| Handle::of(context.as_ptr().cast()));
    }
    match log::or_line(name, open(model, params)) {
        Some(context) => Handle::new(context),
        None => Handle::NULL,
    }
}

fn sizes(name: &str, handle: Handle<Context>, of: impl Fn(&Sizes) -> u32) -> u32 {
    if let Some(context) = of_vocab(handle).get() {
        return of(&context.sizes);
    }
    context(name, handle).map_or(0, |context| of(&context.sizes))
}

c_api! {
    fn llama_init_from_model(model: Handle<Model>, params: ContextParams)
        -> Handle<Context> = Handle::NULL; {
        opened("llama_init_from_model", model, &params)
    }

    fn llama_new_context_with_model(model: Handle<Model>, params: ContextParams)
        -> Handle<Context> = Handle::NULL; {
        opened("llama_new_context_with_model", model, &params)
    }

    fn llama_free(context: Handle<Context>); {
        let is_freed = context.take().is_some() || of_vocab(context).take().is_some();
        if !is_freed && !context.is_null() {
            log::error("llama_free: there is no such context, or it was freed before");
        }
    }

    fn llama_n_ctx(context: Handle<Context>) -> u32 = 0; {
        sizes("llama_n_ctx", context, |sizes| sizes.n_ctx)
    }

    fn llama_n_ctx_seq(context: Handle<Context>) -> u32 = 0; {
        sizes("llama_n_ctx_seq", context, |sizes| sizes.n_ctx_seq)
    }

    fn llama_n_batch(context: Handle<Context>) -> u32 = 0; {
        sizes("llama_n_batch", context, |sizes| sizes.n_batch)
    }

    fn llama_n_ubatch(context: Handle<Context>) -> u32 = 0; {
        sizes("llama_n_ubatch", context, |sizes| sizes.n_ubatch)
    }

    fn llama_n_seq_max(context: Handle<Context>) -> u32 = 0; {
        sizes("llama_n_seq_max", context, |sizes| sizes.n_seq_max)
    }

    fn llama_n_rs_seq(context: Handle<Context>) -> u32 = 0; {
        sizes("llama_n_rs_seq", context, |sizes| sizes.n_rs_seq)
    }

    fn llama_get_model(handle: Handle<Context>) -> Handle<Model> = Handle::NULL; {
        if let Some(context) = of_vocab(handle).get() {
            return context.model;
        }
        context("llama_get_model", handle).map_or(Handle::NULL, |context| context.model)
    }

    fn llama_get_memory(handle: Handle<Context>) -> Handle<Context> = Handle::NULL; {
        let context = context("llama_get_memory", handle);
        context.filter(|context| context.has_memory).map_or(Handle::NULL, |_| handle)
    }

    fn llama_pooling_type(handle: Handle<Context>) -> i32 = pooling::UNSPECIFIED; {
        context("llama_pooling_type", handle).map_or(pooling::UNSPECIFIED, |c| c.pooling)
    }

    fn llama_set_n_threads(handle: Handle<Context>, n_threads: i32, n_threads_batch: i32); {
        if let Some(context) = context("llama_set_n_threads", handle) {
            context.lock().threads = [n_threads, n_threads_batch];
        }
    }

    fn llama_n_threads(handle: Handle<Context>) -> i32 = 0; {
        context("llama_n_threads", handle).map_or(0, |context| context.lock().threads[0])
    }

    fn llama_n_threads_batch(handle: Handle<Context>) -> i32 = 0; {
        context("llama_n_threads_batch", handle).map_or(0, |context| context.lock().threads[1])
    }

    fn llama_set_embeddings(handle: Handle<Context>, embeddings: bool); {
        let name = "llama_set_embeddings";
        if let Some(context) = context(name, handle)
            && context.lock().embeddings != embeddings
        {
            log::error(&format!(
                "{name}: a context gives logits or embeddings for all its life: open one with \
                 embeddings = {embeddings}"
            ));
        }
    }

    fn llama_set_causal_attn(handle: Handle<Context>, causal: bool); {
        let name = "llama_set_causal_attn";
        if context(name, handle).is_some() && llama_get_causal_attn(handle) != causal {
            log::error(&format!("{name}: what tokens see is the model's and cannot be changed"));
        }
    }

    fn llama_get_causal_attn(handle: Handle<Context>) -> bool = false; {
        let context = context("llama_get_causal_attn", handle);
        context.is_some_and(|context| {
            let state = context.lock();
            context.has_memory && state.engine.model().causality().is_causal()
        })
    }

    fn llama_set_warmup(handle: Handle<Context>, _warmup: bool); {
        context("llama_set_warmup", handle);
    }

    fn llama_set_abort_callback(handle: Handle<Context>, callback: AbortCallback, data: *mut c_void); {
        if let Some(context) = context("llama_set_abort_callback", handle) {
            context.lock().abort = Abort::new(callback, data);
        }
    }

    fn llama_synchronize(handle: Handle<Context>); {
        context("llama_synchronize", handle);
    }
}
