//! `cellar serve`: models over HTTP.
//!
//! Invariant: the address is printed only when requests are taken, and a server that other machines
//! reach has keys, or was told not to have them. Knows nothing of the APIs.

mod directory;
mod loading;
mod prefixes;
mod room;
mod scan;
mod spans;

use std::net::SocketAddr;
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use cellar_engine::serve::{BlockObserver, ExcerptLen, Service, ServiceConfig};
use cellar_engine::{
    Embedder, EmbedderConfig, EngineConfig, PromptOutputs, Reranker, RerankerConfig,
};
use cellar_server::{
    App, HostCheck, KeepLoaded, Keys, LoadState, MemoryBudget, ModelEntry, ModelSettings,
    ModelStatus, ServedModel, ServerConfig,
};
use kv_core::KvType;
use model_core::architecture::OutputKind;
use model_core::model_file::{ModelFile, OpenModel};
use tokio::net::TcpListener;

use self::directory::{Directory, Given};
use self::loading::Loader;
use self::room::Wanted;
use self::spans::SpanExport;
use crate::args::{Seed, ServeArgs};
use crate::failure::{Exit, usage};
use crate::input;
use crate::models::ModelSource;
use crate::progress::Progress;
use crate::resolve;
use crate::service::ServiceFlags;
use crate::terminal;

/// Threads that tokenize, render and compile schemas.
const N_PREPARING: usize = 2;

/// How long a step may take while texts go on: readers get five tokens a second at least, and most
/// of each step is still for prompts.
const DEFAULT_STEP_MS: u32 = 200;

/// Tokens from each end of a text that the live view shows.
const EXCERPT_LEN: NonZeroU32 = match NonZeroU32::new(24) {
    Some(n) => n,
    None => NonZeroU32::MIN,
};

/// Tokens of several texts that an encoder computes at once.
const TEXT_BATCH: u32 = 2048;

pub(super) fn run(args: ServeArgs) -> anyhow::Result<Exit> {
    let args = &Arc::new(args);
    if args.speculation.draft_model()?.is_some() && args.models.is_some() {
        return usage(
            "--draft-model drafts for models of its vocabulary: name them with -m, without --models",
        );
    }
    check_descriptors()?;
    let spans = SpanExport::start()?;
    let config = ServerConfig {
        observer: spans.observer(),
        ..server_config(args)?
    };
    let models = named_models(args)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(N_PREPARING)
        .build()
        .context("cannot start the server")?;
    // An address that is taken is reported before a model is loaded.
    let listener = runtime.block_on(listen(args))?;
    if let Some(dir) = &args.save_cache {
        prefixes::prepare_dir(dir)?;
    }
    let budget = room::budget(args);
    let given = models.iter().map(|model| Given {
        id: model.settings.id.clone(),
        source: model.source.clone(),
    });
    let given = given.collect();
    let app = App::with_models(entries(args, &budget, models)?, budget, config);
    if let Some(dir) = &args.models {
        app.set_finder(Arc::new(Directory::new(args, dir, given)))?;
    }
    let served = served(&app.models());
    let served_app = app.clone();
    let ended = runtime.block_on(async {
        // A handler that is there before the address is printed.
        let stop = stop_signal()?;
        let served = terminal::escape(&served);
        let router = cellar_server::router(app.clone());
        match listener {
            Listener::Tcp(listener) => {
                let address = listener.local_addr().context("cannot listen")?;
                terminal::note(format_args!(
                    "{served} served at http://{address} (Ctrl-C ends)"
                ));
                cellar_server::serve(listener, app, router, stop).await;
            }
            #[cfg(unix)]
            Listener::Unix(listener, path) => {
                let shown = path.display().to_string();
                let shown = terminal::escape(&shown);
                terminal::note(format_args!(
                    "{served} served at the socket {shown} (Ctrl-C ends)"
                ));
                cellar_server::serve_unix(listener, app, router, stop).await;
                std::fs::remove_file(&path).context("cannot remove the socket")?;
            }
        }
        anyhow::Ok(())
    });
    spans.close();
    ended?;
    if let Some(dir) = &args.save_cache {
        prefixes::save_all(dir, &served_app);
    }
    Ok(Exit::Done)
}

/// Files that the runtime and its signal handlers open; they panic where they cannot.
const N_DESCRIPTORS: usize = 8;

/// Checks that so many files can be opened.
#[cfg(unix)]
fn check_descriptors() -> anyhow::Result<()> {
    let open = |_| std::fs::File::open("/dev/null");
    let opened: std::io::Result<Vec<_>> = (0..N_DESCRIPTORS).map(open).collect();
    let opened = opened.with_context(|| {
        format!(
            "a server needs {N_DESCRIPTORS} open files, and one for each connection: raise the limit \
             (ulimit -n)"
        )
    });
    opened.map(drop)
}

/// The system has no such limit.
#[cfg(not(unix))]
fn check_descriptors() -> anyhow::Result<()> {
    Ok(())
}

/// What is served, in words: the loaded models by name.
fn served(models: &[ModelStatus]) -> String {
    let is_loaded = |model: &&ModelStatus| model.state == LoadState::Loaded;
    let loaded = models.iter().filter(is_loaded);
    let names: Vec<&str> = loaded.map(|model| model.id.as_str()).collect();
    let lazy = match models.len() - names.len() {
        0 => String::new(),
        1 => "1 model, loaded when it is needed,".to_owned(),
        n => format!("{n} models, loaded when they are needed,"),
    };
    let loaded = format!("'{}'", names.join("', '"));
    match (names.len(), lazy.is_empty()) {
        (0, _) if models.len() == 1 => format!("{lazy} is"),
        (0, _) => format!("{lazy} are"),
        (1, true) => format!("{loaded} is"),
        (_, true) => format!("{loaded} are"),
        (_, false) => format!("{loaded} and {lazy} are"),
    }
}

/// Where requests come from.
enum Listener {
    Tcp(TcpListener),
    #[cfg(unix)]
    Unix(tokio::net::UnixListener, std::path::PathBuf),
}

async fn listen(args: &ServeArgs) -> anyhow::Result<Listener> {
    #[cfg(unix)]
    if let Some(path) = &args.socket {
        return listen_on_socket(path);
    }
    let address = SocketAddr::new(args.host, args.port);
    let listener = TcpListener::bind(address).await;
    let listener = listener.with_context(|| format!("cannot listen on {address}"))?;
    Ok(Listener::Tcp(listener))
}

/// A socket that only this user may use. One that a server left behind is replaced.
#[cfg(unix)]
fn listen_on_socket(path: &Path) -> anyhow::Result<Listener> {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt};
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket());
    if is_socket && std::os::unix::net::UnixStream::connect(path).is_err() {
        std::fs::remove_file(path).context("cannot replace the old socket")?;
    }
    let cannot = || format!("cannot listen on '{}'", path.display());
    let listener = tokio::net::UnixListener::bind(path).with_context(cannot)?;
    let own = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(path, own).with_context(cannot)?;
    Ok(Listener::Unix(listener, path.to_owned()))
}

/// Whether only this user, or programs of this machine, reach the server.
fn is_on_socket(args: &ServeArgs) -> bool {
    #[cfg(unix)]
    return args.socket.is_some();
    #[cfg(not(unix))]
    return false;
}

fn server_config(args: &ServeArgs) -> anyhow::Result<ServerConfig> {
    let is_local = is_on_socket(args) || args.host.is_loopback();
    let keys = match &args.api_key_file {
        Some(path) => Keys::read(path)?,
        None if is_local || args.no_auth => Keys::none(),
        None => {
            return usage(format!(
                "other machines can reach {}: add --api-key-file FILE, or --no-auth to let everybody use \
                 the server",
                args.host
            ));
        }
    };
    if args.show_text && keys.n_keys() > 1 {
        return usage(
            "--show-text shows the texts of all keys: it takes an --api-key-file with one key",
        );
    }
    Ok(ServerConfig {
        keys,
        hosts: match is_local && !is_on_socket(args) {
            true => HostCheck::Loopback,
            false => HostCheck::Any,
        },
        max_body: usize::try_from(args.max_body.0).unwrap_or(usize::MAX),
        max_client_connections: NonZeroUsize::new(args.max_client_connections as usize),
        drain: Duration::from_secs(args.drain.into()),
        ..ServerConfig::default()
    })
}

/// A model that is served, under its names.
struct Named {
    source: ModelSource,
    settings: ModelSettings,
    start: Start,
}

/// When a model is loaded.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Start {
    /// Before the first request.
    AtOnce,
    /// When a request needs it.
    Lazy,
}

/// The models of `-m`, or else the one in the binary. Those of `--models` are checked with them.
fn named_models(args: &ServeArgs) -> anyhow::Result<Vec<Named>> {
    let given = match args.named().as_slice() {
        [] if args.models.is_some() => Vec::new(),
        [] => vec![ModelSource::new(None)],
        paths => paths
            .iter()
            .map(|path| ModelSource::new(Some(path)))
            .collect(),
    };
    let mut models = Vec::new();
    for source in given {
        let id = match &source {
            ModelSource::File(path) => name_of(path),
            ModelSource::Embedded => "stories".to_owned(),
        };
        if models.iter().any(|other: &Named| other.settings.id == id) {
            return usage(format!(
                "two models are called '{id}': give their files other names"
            ));
        }
        models.push(Named::new(args, source, id, Start::AtOnce)?);
    }
    if let Some(dir) = &args.models {
        let found = scan::models_in(dir)?;
        if found.is_empty() && models.is_empty() {
            return usage(format!(
                "there is no model in '{}': no .gguf file, and no directory with config.json and \
                 safetensors files",
                dir.display()
            ));
        }
        for scan::Found { id, path } in found {
            if models.iter().all(|other| other.settings.id != id) {
                let source = ModelSource::File(path);
                models.push(Named::new(args, source, id, Start::Lazy)?);
            }
        }
    }
    if args.trace.trace.is_some() && (models.len() > 1 || args.models.is_some()) {
        return usage("--trace is of one model: serve it alone, without --models");
    }
    #[cfg(feature = "kv-events")]
    if args.kv_events.is_wanted() && (models.len() > 1 || args.models.is_some()) {
        return usage("--kv-events is of one model: serve it alone, without --models");
    }
    if (models.len() > 1 || args.models.is_some()) && args.chat_template.is_some() {
        return usage("--chat-template is for the only model: several have their own");
    }
    give_aliases(&args.alias, &mut models)?;
    // The directory is looked at again and again: these names were only checked.
    models.retain(|model| model.start == Start::AtOnce);
    Ok(models)
}

/// Names the models as `--alias` says.
fn give_aliases(aliases: &[String], models: &mut [Named]) -> anyhow::Result<()> {
    let mut names = Vec::new();
    for alias in aliases {
        let (alias, of) = match alias.split_once('=') {
            Some((alias, model)) => (alias, Some(model)),
            None => (alias.as_str(), None),
        };
        if alias.is_empty() {
            return usage("--alias needs a name");
        }
        let Some(model) = of else {
            names.push(alias.to_owned());
            continue;
        };
        if models.iter().any(|other| other.settings.is_called(alias)) {
            return usage(format!("two models are called '{alias}'"));
        }
        let found = models.iter_mut().find(|other| other.settings.id == model);
        match found {
            Some(found) => found.settings.aliases.push(alias.to_owned()),
            None => return usage(format!("--alias: there is no model '{model}'")),
        }
    }
    match (names.is_empty(), models) {
        (true, _) => Ok(()),
        (false, [only]) if only.start == Start::AtOnce => {
            only.settings.id = names.remove(0);
            only.settings.aliases.extend(names);
            Ok(())
        }
        (false, _) => usage(
            "--alias NAME names the only model; of several, --alias NAME=MODEL gives one another name",
        ),
    }
}

impl Named {
    fn new(
        args: &ServeArgs,
        source: ModelSource,
        id: String,
        start: Start,
    ) -> anyhow::Result<Self> {
        let template = args.chat_template.as_deref().map(input::text).transpose()?;
        Ok(Self {
            source,
            settings: ModelSettings {
                chat_template: template,
                ..model_settings(args, id)?
            },
            start,
        })
    }
}

/// What requests to a model of this name are given, with the template of its file.
fn model_settings(args: &ServeArgs, id: String) -> anyhow::Result<ModelSettings> {
    Ok(ModelSettings {
        id,
        aliases: Vec::new(),
        chat_template: None,
        sampler: resolve::sampler(&args.sampler)?,
        seed: match args.sampler.seed {
            Some(Seed::Fixed(seed)) => Some(seed),
            Some(Seed::Random) | None => None,
        },
        n_parallel: args.parallel.parallel,
        speculation: args.speculation.speculation(),
        draft_max: Some(args.speculation.draft_max() as usize),
    })
}

/// A file's name without its ending, or the name of a downloaded model as it was given.
fn name_of(path: &Path) -> String {
    let name = match path.exists() {
        true if path.is_dir() => path.file_name(),
        true => path.file_stem(),
        false => None,
    };
    let name = name.unwrap_or(path.as_os_str());
    name.to_string_lossy().into_owned()
}

/// The models of `-m`, loaded, once it is known that they fit together.
fn entries(
    args: &Arc<ServeArgs>,
    budget: &MemoryBudget,
    models: Vec<Named>,
) -> anyhow::Result<Vec<ModelEntry>> {
    let mut opened = Vec::with_capacity(models.len());
    for Named {
        source, settings, ..
    } in models
    {
        let args = Arc::clone(args);
        let loader = Loader {
            args,
            source,
            settings,
        };
        let (file, bytes) = loader.open()?;
        opened.push((loader, file, bytes));
    }
    let wanted = opened.iter().map(|(loader, _, bytes)| Wanted {
        id: &loader.settings.id,
        bytes: *bytes,
    });
    room::check(args, budget, &wanted.collect::<Vec<_>>())?;
    let mut entries = Vec::with_capacity(opened.len());
    for (loader, file, bytes) in opened {
        let _loading = Progress::spinner(format!("loading {}", loader.source.name()));
        let model = load(args, &file, loader.settings.clone())?;
        entries.push(ModelEntry {
            id: loader.settings.id.clone(),
            aliases: loader.settings.aliases.clone(),
            facts: loading::facts(args, &loader.source, Some(&*file)),
            keep: KeepLoaded::Forever,
            loader: Some(Arc::new(loader)),
            loaded: Some((model, bytes)),
        });
    }
    Ok(entries)
}

fn load(
    args: &ServeArgs,
    file: &ModelFile,
    settings: ModelSettings,
) -> anyhow::Result<ServedModel> {
    let flags = resolve::backend_flags(&args.engine)?;
    let weights = file.weights();
    let model = match file.model().output() {
        OutputKind::Logits | OutputKind::MaskLogits(_) => {
            resolve::continues_without_source(file)?;
            let service = start(args, file)?;
            if let Some(dir) = &args.save_cache {
                prefixes::restore(dir, &settings.id, &service);
            }
            ServedModel::texts(file, service, settings)
        }
        OutputKind::Embeddings => {
            let config = embedder_config(args, file);
            let plan = config.plan(file)?;
            let work = resolve::text_work(&plan, &*weights);
            let embedder = flags.load(&work, |backend| Embedder::new(backend, file, &config))?;
            ServedModel::embeddings(file, embedder, settings)
        }
        OutputKind::Scores { n_labels: 1 } => {
            let config = reranker_config(args, file);
            let plan = config.plan(file)?;
            let work = resolve::text_work(&plan, &*weights);
            let reranker = flags.load(&work, |backend| Reranker::new(backend, file, &config))?;
            ServedModel::scores(file, reranker, settings)
        }
        OutputKind::Scores { n_labels } => {
            return usage(format!(
                "'{}' is a classifier with {n_labels} labels, and cannot be served",
                file.model().architecture()
            ));
        }
    };
    Ok(model?)
}

fn engine_config(args: &ServeArgs, file: &OpenModel) -> EngineConfig {
    let config = resolve::engine_config(&args.engine, &**file.model(), KvType::F16);
    args.parallel.engine_config(config)
}

fn embedder_config(args: &ServeArgs, file: &OpenModel) -> EmbedderConfig {
    EmbedderConfig {
        max_tokens: resolve::n_ctx(args.engine.ctx, &**file.model()),
        n_batch: TEXT_BATCH,
        ..EmbedderConfig::default()
    }
}

fn reranker_config(args: &ServeArgs, file: &OpenModel) -> RerankerConfig {
    RerankerConfig {
        max_tokens: resolve::n_ctx(args.engine.ctx, &**file.model()),
        n_batch: TEXT_BATCH,
        ..RerankerConfig::default()
    }
}

fn start(
    args: &ServeArgs,
    file: &ModelFile,
) -> anyhow::Result<Service<kv_core::backend::BoxedBackend>> {
    let config = engine_config(args, file);
    let engine = resolve::open_engine(file, &args.engine, &config, PromptOutputs::Last)?;
    let config = ServiceConfig {
        max_queued: args.max_queued as usize,
        excerpts: match args.show_text {
            true => ExcerptLen::Tokens(EXCERPT_LEN),
            false => ExcerptLen::None,
        },
        ..args.parallel.service_config(DEFAULT_STEP_MS)
    };
    let flags = ServiceFlags {
        engine: &args.engine,
        speculation: &args.speculation,
        trace: args.trace.writer()?,
        blocks: blocks(args)?,
        swap_disk: args.parallel.swap.disk()?,
    };
    flags.start(engine, file.tokenizer(), &config)
}

/// The publisher of KV events, where one is wanted.
fn blocks(args: &ServeArgs) -> anyhow::Result<Option<BlockObserver>> {
    #[cfg(feature = "kv-events")]
    return args.kv_events.observer();
    #[cfg(not(feature = "kv-events"))]
    {
        let _none = args;
        Ok(None)
    }
}

/// Ends at the first Ctrl-C or termination signal; the second ends the program.
#[cfg(unix)]
fn stop_signal() -> anyhow::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        terminal::note("(ending: running requests are finished, a second Ctrl-C ends at once)");
        tokio::spawn(async move {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            std::process::exit(i32::from(Exit::Interrupted.code()));
        });
    })
}

/// Ends at the first Ctrl-C; the second ends the program.
#[cfg(not(unix))]
fn stop_signal() -> anyhow::Result<impl Future<Output = ()>> {
    Ok(async move {
        let _no_handler = tokio::signal::ctrl_c().await;
        terminal::note("(ending: running requests are finished, a second Ctrl-C ends at once)");
        tokio::spawn(async move {
            let _no_handler = tokio::signal::ctrl_c().await;
            std::process::exit(i32::from(Exit::Interrupted.code()));
        });
    })
}
