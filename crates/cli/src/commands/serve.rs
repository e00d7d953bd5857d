//! `cellar serve`: models over HTTP.
//!
//! Invariant: the address is printed only when requests are taken, and a server that other machines
//! reach has keys, or was told not to have them. Knows nothing of the APIs.

mod room;

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use engine::serve::{ExcerptLen, Service, ServiceConfig, Speculation};
use engine::{Embedder, EmbedderConfig, EngineConfig, PromptOutputs, Reranker, RerankerConfig};
use kv_core::KvType;
use model_core::architecture::OutputKind;
use model_core::model_file::ModelFile;
use server::{App, HostCheck, Keys, ModelSettings, ServedModel, ServerConfig};
use tokio::net::TcpListener;

use crate::args::{Seed, ServeArgs};
use crate::failure::{Exit, usage};
use crate::input;
use crate::models::ModelSource;
use crate::progress::Progress;
use crate::resolve;
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

pub(super) fn run(args: &ServeArgs) -> anyhow::Result<Exit> {
    let config = server_config(args)?;
    let sources = sources(args);
    let settings = model_settings(args, &sources)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(N_PREPARING)
        .build()
        .context("cannot start the server")?;
    // An address that is taken is reported before a model is loaded.
    let listener = runtime.block_on(listen(args))?;
    let models = load_all(args, &sources, settings)?;
    let names: Vec<&str> = models.iter().map(ServedModel::id).collect();
    let name = names.join("', '");
    let is_are = if names.len() > 1 { "are" } else { "is" };
    let app = App::new(models, config);
    runtime.block_on(async {
        // A handler that is there before the address is printed.
        let stop = stop_signal()?;
        let name = terminal::escape(&name);
        let router = server::router(app.clone());
        match listener {
            Listener::Tcp(listener) => {
                let address = listener.local_addr().context("cannot listen")?;
                terminal::note(format_args!(
                    "'{name}' {is_are} served at http://{address} (Ctrl-C ends)"
                ));
                server::serve(listener, app, router, stop).await;
            }
            #[cfg(unix)]
            Listener::Unix(listener, path) => {
                let shown = path.display().to_string();
                let shown = terminal::escape(&shown);
                terminal::note(format_args!(
                    "'{name}' {is_are} served at the socket {shown} (Ctrl-C ends)"
                ));
                server::serve_unix(listener, app, router, stop).await;
                std::fs::remove_file(&path).context("cannot remove the socket")?;
            }
        }
        anyhow::Ok(())
    })?;
    Ok(Exit::Done)
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
            "--show-text shows all texts to each key: it takes an --api-key-file with one key",
        );
    }
    Ok(ServerConfig {
        keys,
        hosts: match is_local && !is_on_socket(args) {
            true => HostCheck::Loopback,
            false => HostCheck::Any,
        },
        drain: Duration::from_secs(args.drain.into()),
        ..ServerConfig::default()
    })
}

/// The models, or else the one in the binary.
fn sources(args: &ServeArgs) -> Vec<ModelSource> {
    match args.model.as_slice() {
        [] => vec![ModelSource::new(None)],
        paths => paths
            .iter()
            .map(|path| ModelSource::new(Some(path)))
            .collect(),
    }
}

/// The settings of each model.
fn model_settings(args: &ServeArgs, sources: &[ModelSource]) -> anyhow::Result<Vec<ModelSettings>> {
    if sources.len() > 1 && !args.alias.is_empty() {
        return usage("--alias names the only model: of several, each has the name of its file");
    }
    if sources.len() > 1 && args.chat_template.is_some() {
        return usage("--chat-template is for the only model: several have their own");
    }
    let settings = sources.iter().map(|source| settings_of(args, source));
    let settings = settings.collect::<anyhow::Result<Vec<_>>>()?;
    for (at, one) in settings.iter().enumerate() {
        if settings.iter().skip(at + 1).any(|other| other.id == one.id) {
            return usage(format!(
                "two models are called '{}': give their files other names",
                one.id
            ));
        }
    }
    Ok(settings)
}

fn settings_of(args: &ServeArgs, source: &ModelSource) -> anyhow::Result<ModelSettings> {
    let mut names = args.alias.clone();
    if names.iter().any(|name| name.is_empty()) {
        return usage("--alias needs a name");
    }
    let file_name = match source {
        ModelSource::File(path) => name_of(path),
        ModelSource::Embedded => "stories".to_owned(),
    };
    let id = match names.is_empty() {
        true => file_name,
        false => names.remove(0),
    };
    let template = args.chat_template.as_deref().map(input::text).transpose()?;
    Ok(ModelSettings {
        id,
        aliases: names,
        chat_template: template,
        sampler: resolve::sampler(&args.sampler)?,
        seed: match args.sampler.seed {
            Some(Seed::Fixed(seed)) => Some(seed),
            Some(Seed::Random) | None => None,
        },
        n_parallel: args.parallel.parallel,
        speculation: args.speculation.speculation(),
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

/// Loads the models, once it is known that they fit together.
fn load_all(
    args: &ServeArgs,
    sources: &[ModelSource],
    settings: Vec<ModelSettings>,
) -> anyhow::Result<Vec<ServedModel>> {
    let mut files = Vec::with_capacity(sources.len());
    for source in sources {
        files.push(source.load()?);
    }
    if let [_, _, ..] = files.as_slice() {
        room::check(args, &files, &settings)?;
    }
    let mut models = Vec::with_capacity(files.len());
    for ((source, file), settings) in sources.iter().zip(&files).zip(settings) {
        let _loading = Progress::spinner(format!("loading {}", source.name()));
        models.push(load(args, file, settings)?);
    }
    Ok(models)
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
            if settings.speculation != Speculation::Off {
                resolve::warn_of_no_speculation(service.draft_limit().err());
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

fn engine_config(args: &ServeArgs, file: &ModelFile) -> EngineConfig {
    let config = resolve::engine_config(&args.engine, &**file.model(), KvType::F16);
    args.parallel.engine_config(config)
}

fn embedder_config(args: &ServeArgs, file: &ModelFile) -> EmbedderConfig {
    EmbedderConfig {
        max_tokens: resolve::n_ctx(args.engine.ctx, &**file.model()),
        n_batch: TEXT_BATCH,
        ..EmbedderConfig::default()
    }
}

fn reranker_config(args: &ServeArgs, file: &ModelFile) -> RerankerConfig {
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
    Ok(Service::start(engine, file.tokenizer(), &config)?)
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
