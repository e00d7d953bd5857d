//! `cellar serve`: models over HTTP.
//!
//! Invariant: the address is printed only when requests are taken. Knows nothing of the APIs.

mod context;
mod directory;
#[cfg(feature = "hub")]
mod fetch;
mod loading;
mod log;
mod network;
mod prefixes;
mod room;
mod scan;
mod spans;

use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use cellar_engine::serve::{BlockObserver, ExcerptLen, Service, ServiceConfig};
use cellar_engine::{EngineConfig, PromptOutputs, Tower};
use cellar_server::{
    App, KeepLoaded, LoadState, MemoryBudget, ModelEntry, ModelSettings, ModelStatus,
    ObserveRequests, ServedModel, ServerConfig,
};
use cellar_tasks::{Embedder, EmbedderConfig, Reranker, RerankerConfig};
use kv_rows::KvType;
use model_core::architecture::OutputKind;
use model_core::model_file::{ModelFile, OpenModel};

use self::directory::{Directory, Given};
use self::loading::Loader;
use self::log::RequestLog;
use self::network::Listener;
use self::room::RoomRequest;
use self::spans::SpanExport;
use crate::args::{PredictLimit, Seed, ServeArgs};
use crate::failure::{Exit, usage};
use crate::input;
use crate::long_context;
use crate::machine;
use crate::model_room::ModelRoom;
use crate::models::ModelSource;
use crate::pictures;
use crate::prefix_tiers::SharedTiers;
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

/// Models among which the memory is shared out where those of a directory come and go.
const N_OF_DIRECTORY: usize = 4;

pub(super) fn run(mut args: ServeArgs) -> anyhow::Result<Exit> {
    args.speculation.draft_model()?;
    if args.speculation.file().is_some() && args.models.is_some() {
        return usage(
            "--draft-model drafts for models of its vocabulary: name them with -m, without --models",
        );
    }
    network::check_descriptors()?;
    let spans = SpanExport::start()?;
    let config = network::server_config(&args)?;
    #[cfg(feature = "hub")]
    fetch::missing_models(&args)?;
    let budget = room::budget(&args);
    args.room = model_room(&args, &budget);
    args.tiers = SharedTiers::open(&args.store)?;
    let args = &Arc::new(args);
    let models = named_models(args)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(N_PREPARING)
        .build()
        .context("cannot start the server")?;
    // An address that is taken is reported before a model is loaded.
    let listener = runtime.block_on(network::listen(args))?;
    let given = models.iter().map(|model| Given {
        id: model.settings.id.clone(),
        source: model.source.clone(),
    });
    let given = given.collect();
    let entries = entries(args, &budget, models)?;
    let log = RequestLog::start(args)?;
    let of_log = log.clone().map(|log| log as Arc<dyn ObserveRequests>);
    let config = ServerConfig {
        observers: spans.observer().into_iter().chain(of_log).collect(),
        ..config
    };
    let app = App::with_models(entries, budget, config);
    if let Some(dir) = &args.files_dir {
        app.keep_files_in(dir).context("--files-dir")?;
    }
    if let Some(dir) = &args.models {
        app.set_finder(Arc::new(Directory::new(args, dir, given)))?;
    }
    let ended = runtime.block_on(async {
        let ended = serve(app.clone(), listener).await;
        app.unloads_end().await;
        ended
    });
    spans.close();
    if let Some(log) = log {
        log.close();
    }
    ended?;
    if args.tiers.is_some() {
        prefixes::save_all(&app);
    }
    Ok(Exit::Done)
}

/// The memory that contexts are chosen by, where there is no `--ctx`.
fn model_room(args: &ServeArgs, budget: &MemoryBudget) -> ModelRoom {
    let n_models = match args.models {
        Some(_) => N_OF_DIRECTORY,
        None => args.named().len(),
    };
    ModelRoom::new(budget.host, budget.device, n_models)
}

/// Serves until a signal comes. A line gives the address once requests are taken.
async fn serve(app: App, listener: Listener) -> anyhow::Result<()> {
    // A handler that is there before the address is printed.
    let stop = network::stop_signal()?;
    let models = app.models();
    let (served, size) = (served(&models), size(&models));
    let served = terminal::escape(&served);
    let router = cellar_server::router(app.clone());
    match listener {
        Listener::Tcp(listener, tls) => {
            let address = listener.local_addr().context("cannot listen")?;
            let scheme = if tls.is_some() { "https" } else { "http" };
            if let Some(tls) = &tls {
                network::reload_on_hangup(tls.clone())?;
            }
            terminal::note(format_args!(
                "{served} served at {scheme}://{address} ({size}open it in a browser to chat; Ctrl-C \
                 ends)"
            ));
            match tls {
                Some(tls) => cellar_server::serve_tls(listener, tls, app, router, stop).await,
                None => cellar_server::serve(listener, app, router, stop).await,
            }
        }
        #[cfg(unix)]
        Listener::Unix(listener, path) => {
            let shown = path.display().to_string();
            let shown = terminal::escape(&shown);
            terminal::note(format_args!(
                "{served} served at the socket {shown} ({size}Ctrl-C ends)"
            ));
            cellar_server::serve_unix(listener, app, router, stop).await;
            std::fs::remove_file(&path).context("cannot remove the socket")?;
        }
    }
    Ok(())
}

/// The contexts and the memory of the loaded models, as the beginning of a list.
fn size(models: &[ModelStatus]) -> String {
    let loaded = || {
        models
            .iter()
            .filter(|model| model.state == LoadState::Loaded)
    };
    let contexts: Vec<String> = loaded()
        .filter_map(|model| Some(model.facts.n_ctx?.to_string()))
        .collect();
    let bytes = loaded().map(|model| model.bytes.host.saturating_add(model.bytes.device));
    let bytes = bytes.fold(0, u64::saturating_add);
    let contexts = if contexts.is_empty() {
        String::new()
    } else {
        format!("context {}; ", contexts.join(" and "))
    };
    match bytes {
        0 => contexts,
        n => format!("{contexts}{} of memory; ", machine::bytes(n)),
    }
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
    if (models.len() > 1 || args.models.is_some()) && !args.changes().is_empty() {
        return usage(
            "adapters, control vectors and other settings are of one model: serve it alone, without --models",
        );
    }
    give_aliases(args, &mut models)?;
    if let [only] = models.as_mut_slice() {
        let names = args.lora_modules.iter().map(|module| module.name.clone());
        only.settings.aliases.extend(names);
    }
    // The directory is looked at again and again: these names were only checked.
    models.retain(|model| model.start == Start::AtOnce);
    Ok(models)
}

/// Names the models as `--alias` says.
fn give_aliases(args: &ServeArgs, models: &mut [Named]) -> anyhow::Result<()> {
    let mut names = Vec::new();
    for (alias, of) in args.aliases() {
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
            // The first that is a name; patterns are none.
            if let Some(at) = names.iter().position(|name| !name.contains('*')) {
                only.settings.id = names.remove(at);
            }
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
        reasoning_tokens: args.reasoning_budget.and_then(PredictLimit::tokens),
        n_parallel: args.parallel.parallel,
        speculation: args.speculation.speculation(),
        draft_max: Some(args.speculation.draft_max() as usize),
        #[cfg(feature = "hub")]
        picture_fetcher: args.allow_image_urls.then(pictures::fetcher),
        #[cfg(not(feature = "hub"))]
        picture_fetcher: None,
    })
}

/// A file's name without its ending, or the name of a downloaded model as it was given.
fn name_of(path: &Path) -> String {
    let name = if path.is_dir() {
        path.file_name()
    } else if path.exists() {
        path.file_stem()
    } else {
        None
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
    let wanted = opened.iter().map(|(loader, _, bytes)| RoomRequest {
        id: &loader.settings.id,
        bytes: *bytes,
    });
    room::check(args, budget, &wanted.collect::<Vec<_>>())?;
    let mut entries = Vec::with_capacity(opened.len());
    for (loader, file, bytes) in opened {
        let _loading = Progress::spinner(format!("loading {}", loader.source.name()));
        let model = load(args, &loader.source, &file, loader.settings.clone())?;
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
    source: &ModelSource,
    file: &ModelFile,
    settings: ModelSettings,
) -> anyhow::Result<ServedModel> {
    let flags = resolve::backend_flags(&args.engine.compute)?;
    let weights = file.weights();
    let model = match file.model().output() {
        OutputKind::Logits | OutputKind::MaskLogits(_) => {
            resolve::continues_texts(file)?;
            let mut sight = pictures::sight(file, source, &args.vision)?;
            let tower = pictures::tower_or_warning(&mut sight, &args.engine.compute);
            let model = ServedModel::texts(file, start(args, file, tower)?, settings);
            model.map(|model| model.with_pictures(pictures::reader(&sight)))
        }
        OutputKind::Embeddings => {
            let config = embedder_config(args, file);
            let plan = config.plan(file)?;
            let work = resolve::text_work(&plan, &weights);
            let embedder = flags.load(&work, |backend| Embedder::new(backend, file, &config))?;
            ServedModel::embeddings(file, embedder, settings)
        }
        OutputKind::Scores { n_labels: 1 } => {
            let config = reranker_config(args, file);
            let plan = config.plan(file)?;
            let work = resolve::text_work(&plan, &weights);
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
    let config = args.parallel.engine_config(config);
    let n_ctx = config.n_ctx;
    EngineConfig {
        n_ctx: n_ctx.or_else(|| context::default_n_ctx(&args.room, &config, file)),
        ..config
    }
}

fn embedder_config(args: &ServeArgs, file: &OpenModel) -> EmbedderConfig {
    EmbedderConfig {
        max_tokens: resolve::n_ctx(args.engine.compute.ctx, &**file.model()),
        n_batch: TEXT_BATCH,
        ..EmbedderConfig::default()
    }
}

fn reranker_config(args: &ServeArgs, file: &OpenModel) -> RerankerConfig {
    RerankerConfig {
        max_tokens: resolve::n_ctx(args.engine.compute.ctx, &**file.model()),
        n_batch: TEXT_BATCH,
        ..RerankerConfig::default()
    }
}

fn start(
    args: &ServeArgs,
    file: &ModelFile,
    tower: Option<Tower>,
) -> anyhow::Result<Service<kv_backend::BoxedBackend>> {
    let config = engine_config(args, file);
    let engine = resolve::open_engine(file, &args.engine.compute, &config, PromptOutputs::Last)?;
    let limits = args.parallel.service_config(DEFAULT_STEP_MS);
    // Without bytes of their own, preempted requests have some of the tiers'.
    let tiers = args.tiers.as_ref();
    let shared = tiers.filter(|_| args.parallel.swap.swap_memory.is_none());
    let shared = shared.map(SharedTiers::swap).transpose()?.flatten();
    let (swap_bytes, swap_host, swap_disk) = match shared {
        Some(swap) => (swap.n_bytes, Some(swap.host), swap.disk),
        None => (limits.swap_bytes, None, args.parallel.swap.disk()?),
    };
    let config = ServiceConfig {
        swap_bytes,
        max_queued: args.max_queued as usize,
        excerpts: if args.show_text {
            ExcerptLen::Tokens(EXCERPT_LEN)
        } else {
            ExcerptLen::None
        },
        long_context: long_context::of_service(
            &args.parallel.long_context,
            engine.settings().n_ctx,
            file.tokenizer(),
        )?,
        ..limits
    };
    let flags = ServiceFlags {
        engine: &args.engine,
        speculation: &args.speculation,
        trace: args.trace.writer()?,
        blocks: blocks(args)?,
        swap_disk,
        swap_host,
        prefix_tiers: tiers.map(SharedTiers::of_model).transpose()?,
        tower,
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
