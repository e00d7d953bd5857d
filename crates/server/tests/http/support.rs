//! A server on a thread, and what requests to it give alone.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cellar_engine::sampler::SamplerConfig;
use cellar_engine::serve::{
    BlockObserver, FinishedText, Service, ServiceConfig, ServiceExtras, Speculation, TextRequest,
};
use cellar_engine::{CompletionOptions, DraftModel, Engine, EngineConfig};
use cellar_server::{App, Keys, ModelSettings, ServedModel, ServerConfig};
use kv_backend::{Backend, BackendError, BoxedBackend};
use kv_backend::{GraphInputs, GraphOutputs};
use kv_cpu::CpuBackend;
use kv_graph::weights::SharedBytes;
use model_core::adapters::{Adapter, Adapters};
use model_core::architecture::Registry;
use model_core::model_file::ModelFile;
use model_core::tokenizer::EncodeOptions;
use serde_json::Value;
use tokio::sync::oneshot;

/// A template in the manner of ChatML, which refuses a role that it does not know.
pub(crate) const TEMPLATE: &str = "{% for m in messages %}\
    {% if m.role not in ['system', 'user', 'assistant', 'tool'] %}\
    {{ raise_exception('unknown role') }}{% endif %}\
    <|{{ m.role }}|>{{ m.content }}\n{% endfor %}\
    {% if add_generation_prompt %}<|assistant|>{% endif %}";

/// The body of a request with more members, or others of the same names.
pub(crate) fn with(mut body: Value, extra: &Value) -> Value {
    let members = extra.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(members);
    body
}

/// A token that becomes a mark of fill in the middle.
#[derive(Clone, Copy)]
pub(crate) struct GapMark {
    pub(crate) id: u64,
    old: &'static [u8],
    new: &'static [u8],
}

/// Seldom used tokens, and marks of as many bytes: before, after, in the gap.
pub(crate) const GAP_MARKS: [GapMark; 3] = [
    GapMark {
        id: 733,
        old: b"ecial",
        new: b"<PRE>",
    },
    GapMark {
        id: 777,
        old: b"udden",
        new: b"<SUF>",
    },
    GapMark {
        id: 790,
        old: b"ughed",
        new: b"<MID>",
    },
];

pub(crate) struct Setup {
    pub(crate) n_seqs: u32,
    pub(crate) n_ctx: u32,
    pub(crate) service: ServiceConfig,
    pub(crate) server: ServerConfig,
    pub(crate) template: Option<&'static str>,
    pub(crate) speculation: Speculation,
    /// After how many tokens reasoning ends where a request does not say it.
    pub(crate) reasoning_tokens: Option<usize>,
    /// Whether the model drafts for itself.
    pub(crate) has_draft_model: bool,
    /// Set, all runs of the backend fail.
    pub(crate) is_broken: Option<Arc<AtomicBool>>,
    /// Set, all runs of the backend fail as its device is lost.
    pub(crate) is_lost: Option<Arc<AtomicBool>>,
    /// Set, all runs of the backend wait. A backend that is there holds it.
    pub(crate) is_held: Option<Arc<AtomicBool>>,
    /// Set, the model writes these tokens as long as there are some.
    pub(crate) script: Option<Script>,
    /// Whether the vocabulary has [`GAP_MARKS`].
    pub(crate) has_gap_marks: bool,
    pub(crate) stories: Stories,
    /// Names of adapters, each with the scale of requests that do not say one.
    pub(crate) adapters: Vec<(&'static str, f32)>,
    /// The key with which metrics are read, where there are keys.
    pub(crate) key: Option<String>,
}

/// The tokens that a model writes next.
pub(crate) type Script = Arc<Mutex<VecDeque<usize>>>;

/// The token of the byte 0; those of other bytes follow it.
const FIRST_BYTE: usize = 3;
/// The token that ends a text.
const END: usize = 2;

/// A small model that writes stories.
#[derive(Clone, Copy, Default)]
pub(crate) enum Stories {
    /// With attention over all tokens.
    #[default]
    Llama,
    /// With recurrent states, and no cells.
    Mamba,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            n_seqs: 4,
            n_ctx: 1024,
            service: ServiceConfig::default(),
            server: ServerConfig::default(),
            template: Some(TEMPLATE),
            speculation: Speculation::Off,
            reasoning_tokens: None,
            has_draft_model: false,
            is_broken: None,
            is_lost: None,
            is_held: None,
            script: None,
            has_gap_marks: false,
            stories: Stories::Llama,
            adapters: Vec::new(),
            key: None,
        }
    }
}

pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) app: App,
    key: Option<String>,
    script: Option<Script>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

pub(crate) fn stories() -> ModelFile {
    open(SharedBytes::new(Arc::new(cellar_stories::STORIES_LLAMA)))
}

impl Stories {
    fn open(self) -> ModelFile {
        match self {
            Self::Llama => stories(),
            Self::Mamba => {
                let path = model_tests::fixture("stories").join("stories-mamba-f16.gguf");
                open(SharedBytes::new(Arc::new(std::fs::read(path).unwrap())))
            }
        }
    }
}

/// The same model with [`GAP_MARKS`] in its vocabulary.
fn stories_with_gap_marks() -> ModelFile {
    let mut bytes = cellar_stories::STORIES_LLAMA.to_vec();
    for GapMark { old, new, .. } in GAP_MARKS {
        // GGUF writes the length of a text before it.
        let length = (old.len() as u64).to_le_bytes();
        let written = [&length[..], old].concat();
        let at = bytes
            .windows(written.len())
            .position(|part| part == written);
        let at = at.expect("the vocabulary has the token") + length.len();
        bytes[at..at + new.len()].copy_from_slice(new);
    }
    open(SharedBytes::new(Arc::new(bytes)))
}

fn open(bytes: SharedBytes) -> ModelFile {
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    model_mamba::register(&mut registry);
    ModelFile::from_bytes(bytes, &registry).unwrap()
}

/// The same model with adapters, whose values follow from their numbers.
fn adapted(file: ModelFile, adapters: &[(&'static str, f32)]) -> ModelFile {
    let folder = tempfile::tempdir().unwrap();
    let registry = Registry::new();
    let opened = (0..).zip(adapters).map(|(seed, &(name, scale))| {
        let path = folder.path().join(name);
        let architecture = file.model().architecture();
        model_tests::write_adapter(&path, architecture, &*file.weights(), seed);
        (Adapter::open(&path, &file, &registry).unwrap(), scale)
    });
    let opened: Vec<_> = opened.collect();
    if opened.is_empty() {
        return file;
    }
    let adapters = Adapters::new(&file, opened, None).unwrap();
    file.with_adapters(adapters).unwrap()
}

fn engine(file: &ModelFile, setup: &Setup) -> Engine<BoxedBackend> {
    let changes = (&setup.is_broken, &setup.is_lost, &setup.is_held);
    let backend = match changes {
        (None, None, None) if setup.script.is_none() => BoxedBackend::new(model_tests::cpu()),
        (is_broken, is_lost, is_held) => BoxedBackend::new(Breakable {
            script: setup.script.clone().unwrap_or_default(),
            n_vocab: file.tokenizer().n_tokens(),
            inner: model_tests::cpu(),
            is_broken: is_broken.clone().unwrap_or_default(),
            is_lost: is_lost.clone().unwrap_or_default(),
            is_held: is_held.clone().unwrap_or_default(),
        }),
    };
    let config = EngineConfig {
        n_ctx: Some(setup.n_ctx),
        n_seqs: setup.n_seqs,
        ..EngineConfig::default()
    };
    Engine::new(backend, file.model().clone(), file.weights(), &config).unwrap()
}

impl Setup {
    pub(crate) fn with_keys(keys: &str) -> Self {
        let mut setup = Self::default();
        setup.server.keys = Keys::parse(keys).unwrap();
        setup.key = keys.split_whitespace().next().map(str::to_owned);
        setup
    }

    /// A model that writes what [`Server::script`] says.
    pub(crate) fn scripted() -> Self {
        Self {
            n_seqs: 1,
            script: Some(Script::default()),
            ..Self::default()
        }
    }

    pub(crate) fn start(self) -> Server {
        self.start_observed(None)
    }

    pub(crate) fn start_observed(self, blocks: Option<BlockObserver>) -> Server {
        let model = self.served_observed("stories", &["tiny"], blocks);
        let mut server = Server::start(App::new(vec![model], self.server));
        server.key = self.key;
        server.script = self.script;
        server
    }

    /// The model, loaded.
    pub(crate) fn served(&self, id: &str, aliases: &[&str]) -> ServedModel {
        self.served_observed(id, aliases, None)
    }

    fn served_observed(
        &self,
        id: &str,
        aliases: &[&str],
        blocks: Option<BlockObserver>,
    ) -> ServedModel {
        let file = if self.has_gap_marks {
            stories_with_gap_marks()
        } else {
            self.stories.open()
        };
        let file = adapted(file, &self.adapters);
        let tokenizer = file.tokenizer();
        let draft_model = self.has_draft_model.then(|| {
            let engine = engine(&file, &Self::default());
            DraftModel::new(engine, tokenizer, tokenizer, 8).unwrap()
        });
        let extras = ServiceExtras {
            draft_model,
            blocks,
            ..ServiceExtras::default()
        };
        let engine = engine(&file, self);
        let service = Service::start_with(engine, tokenizer, &self.service, extras);
        let settings = ModelSettings {
            id: id.to_owned(),
            aliases: aliases.iter().map(|&alias| alias.to_owned()).collect(),
            chat_template: self.template.map(str::to_owned),
            n_parallel: self.n_seqs,
            speculation: self.speculation,
            reasoning_tokens: self.reasoning_tokens,
            ..ModelSettings::default()
        };
        ServedModel::texts(&file, service.unwrap(), settings).unwrap()
    }
}

impl Server {
    /// Serves these models.
    pub(crate) fn start(app: App) -> Self {
        let (stop, stopped) = oneshot::channel();
        let (send, address) = std::sync::mpsc::channel();
        let thread = {
            let app = app.clone();
            std::thread::spawn(move || {
                let mut runtime = tokio::runtime::Builder::new_current_thread();
                let runtime = runtime
                    .enable_all()
                    .max_blocking_threads(2)
                    .build()
                    .unwrap();
                runtime.block_on(async {
                    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
                    send.send(listener.local_addr().unwrap()).unwrap();
                    let stop = async {
                        let _stopped = stopped.await;
                    };
                    cellar_server::serve(listener, app.clone(), cellar_server::router(app), stop)
                        .await;
                });
            })
        };
        Self {
            address: address.recv().unwrap(),
            app,
            key: None,
            script: None,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    /// The model writes this text next, and ends.
    pub(crate) fn script(&self, text: &str) {
        let bytes = text.bytes().map(|byte| FIRST_BYTE + usize::from(byte));
        let mut script = self.script.as_ref().unwrap().lock().unwrap();
        *script = bytes.chain([END]).collect();
    }

    /// The model writes what it would.
    pub(crate) fn no_script(&self) {
        self.script.as_ref().unwrap().lock().unwrap().clear();
    }

    /// Begins to end the server, as a signal does.
    pub(crate) fn stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _gone = stop.send(());
        }
    }

    /// Waits for the end of the server.
    pub(crate) fn join(mut self) {
        self.stop();
        self.thread.take().unwrap().join().unwrap();
    }

    /// The value of a line of `/metrics`.
    #[track_caller]
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let key = self.key.as_ref().map(|key| format!("Bearer {key}"));
        let headers: Vec<_> = key.iter().map(|key| ("Authorization", &**key)).collect();
        let sent = model_tests::http::request("GET", "/metrics", &headers, "");
        let text = model_tests::http::open(self.address, &sent).finish().body;
        let line = text.lines().find(|line| line.starts_with(name));
        let line = line.unwrap_or_else(|| panic!("no {name} in {text}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    /// Waits until a line of `/metrics` has a value.
    #[track_caller]
    pub(crate) fn await_metric(&self, name: &str, value: f64) {
        let until = Instant::now() + Duration::from_secs(60);
        while self.metric(name) != value {
            assert!(Instant::now() < until, "{name} is {}", self.metric(name));
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// What texts are alone: each on an engine of its own.
pub(crate) struct Alone(ModelFile);

impl Alone {
    pub(crate) fn new() -> Self {
        Self::of(Stories::Llama)
    }

    pub(crate) fn of(stories: Stories) -> Self {
        Self(stories.open())
    }

    pub(crate) fn text(&self, prompt: &str, sampler: SamplerConfig, n: usize) -> FinishedText {
        let setup = Setup {
            n_seqs: 1,
            ..Setup::default()
        };
        let tokenizer = self.0.tokenizer();
        let config = ServiceConfig::default();
        let service = Service::start(engine(&self.0, &setup), tokenizer, &config).unwrap();
        let request = TextRequest {
            prompt: tokenizer.encode(prompt, EncodeOptions::PROMPT),
            options: CompletionOptions {
                sampler,
                n_predict: Some(n),
                ..CompletionOptions::default()
            },
            ..TextRequest::default()
        };
        service.submit(request).unwrap().finish().unwrap()
    }

    pub(crate) fn greedy(&self, prompt: &str, n: usize) -> String {
        let sampler = SamplerConfig {
            temperature: 0.0,
            ..SamplerConfig::default()
        };
        self.text(prompt, sampler, n).text
    }
}

/// A backend whose runs fail while it is broken or lost, wait while it is held, and
/// give the tokens of a script while there are some.
#[derive(Debug)]
struct Breakable {
    inner: CpuBackend,
    script: Script,
    n_vocab: usize,
    is_broken: Arc<AtomicBool>,
    is_lost: Arc<AtomicBool>,
    is_held: Arc<AtomicBool>,
}

impl Backend for Breakable {
    type Rows = <CpuBackend as Backend>::Rows;
    type Weights = <CpuBackend as Backend>::Weights;
    type Program = <CpuBackend as Backend>::Program;

    kv_backend::delegate!(
        info,
        allocate,
        load_weights,
        compile,
        read_rows,
        write_rows,
        copy_rows
    );

    fn run(
        &self,
        program: &mut Self::Program,
        rows: &mut Self::Rows,
        inputs: &GraphInputs<'_>,
        outputs: &mut GraphOutputs,
    ) -> Result<(), BackendError> {
        while self.is_held.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let (backend, reason) = ("breakable", "as told".to_owned());
        if self.is_lost.load(Ordering::Relaxed) {
            return Err(BackendError::DeviceLost { backend, reason });
        }
        if self.is_broken.load(Ordering::Relaxed) {
            return Err(BackendError::Device { backend, reason });
        }
        let Some(token) = self.script.lock().unwrap().pop_front() else {
            return self.inner.run(program, rows, inputs, outputs);
        };
        // Nothing is computed: no test reads the memory behind a script.
        let sizes = [inputs.output_rows.len() * self.n_vocab];
        let [logits] = outputs.resize(sizes.into_iter()) else {
            unreachable!("one output was asked for");
        };
        logits.fill(0.0);
        let n_before = logits.len().saturating_sub(self.n_vocab);
        if let Some(value) = logits.get_mut(n_before + token) {
            *value = 1000.0;
        }
        Ok(())
    }
}
