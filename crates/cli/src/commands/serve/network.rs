//! The listener of a server, its keys and hosts, and the signal that ends it.
//!
//! Invariant: a server that other machines reach has keys, or was told not to have them. Knows no
//! models.

use std::net::SocketAddr;
use std::num::NonZeroUsize;
#[cfg(unix)]
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use cellar_server::{HostCheck, Keys, Origins, ServerConfig, Tls};
use tokio::net::TcpListener;

use crate::args::ServeArgs;
use crate::failure::{Exit, UsageError, usage, warn};
use crate::terminal;

/// Files that the runtime and its signal handlers open; they panic where they cannot.
#[cfg(unix)]
const N_DESCRIPTORS: usize = 8;

/// Checks that so many files can be opened.
#[cfg(unix)]
pub(super) fn check_descriptors() -> anyhow::Result<()> {
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
pub(super) fn check_descriptors() -> anyhow::Result<()> {
    Ok(())
}

/// The source of connections.
pub(super) enum Listener {
    Tcp(TcpListener, Option<Tls>),
    #[cfg(unix)]
    Unix(tokio::net::UnixListener, std::path::PathBuf),
}

/// # Errors
/// The address is taken, or the certificate of `--tls-cert` cannot be used.
pub(super) async fn listen(args: &ServeArgs) -> anyhow::Result<Listener> {
    #[cfg(unix)]
    if let Some(path) = &args.socket {
        return listen_on_socket(path);
    }
    let tls = match (&args.tls_cert, &args.tls_key) {
        (Some(certificate), Some(key)) => Some(Tls::read(certificate, key)?),
        _ => None,
    };
    let address = SocketAddr::new(args.host, args.port);
    let listener = TcpListener::bind(address).await;
    let listener = listener.with_context(|| format!("cannot listen on {address}"))?;
    Ok(Listener::Tcp(listener, tls))
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

/// True if only this user reaches the server, by a socket.
#[cfg(unix)]
fn is_on_socket(args: &ServeArgs) -> bool {
    args.socket.is_some()
}

/// The system has no sockets with names.
#[cfg(not(unix))]
fn is_on_socket(_: &ServeArgs) -> bool {
    false
}

/// The limits of the server: its keys, hosts and origins, and the sizes of requests.
///
/// # Errors
/// A usage error where other machines reach it and need no key, or a name, an origin or a key is
/// none.
pub(super) fn server_config(args: &ServeArgs) -> anyhow::Result<ServerConfig> {
    let is_local = is_on_socket(args) || args.host.is_loopback();
    let keys = keys(args)?;
    if !keys.are_needed() && !is_local && !args.no_auth {
        return usage(format!(
            "other machines can reach {}: add --api-key-file FILE, or --no-auth to let everybody use \
             the server",
            args.host
        ));
    }
    if args.show_text && keys.n_keys() > 1 {
        return usage("--show-text shows the texts of all keys: it takes one key alone");
    }
    let names = args.allow_host.iter();
    if let Some(wrong) = names.clone().find(|name| !is_host_name(name)) {
        return usage(format!(
            "--allow-host '{wrong}' is no name: give it without http:// and without a port"
        ));
    }
    // Pages of other sites know no key, and others reach a server under names of theirs.
    let hosts = if is_local && !is_on_socket(args) && !keys.are_needed() {
        HostCheck::Names(names.cloned().collect())
    } else {
        HostCheck::Any
    };
    let origins = Origins::parse(&args.allow_origin);
    let origins = origins.map_err(|error| UsageError(format!("--allow-origin: {error}")))?;
    if origins.are_all() && !keys.are_needed() {
        warn("--allow-origin '*' without keys: every web page that you open can use this server");
    }
    Ok(ServerConfig {
        keys,
        hosts,
        origins,
        max_body: usize::try_from(args.max_body.0).unwrap_or(usize::MAX),
        max_client_connections: NonZeroUsize::new(args.max_client_connections as usize),
        drain: Duration::from_secs(args.drain.into()),
        slot_save_path: args.slot_save_path.clone(),
        strict: args.strict,
        verify: args.verify.unwrap_or(0.0),
        ..ServerConfig::default()
    })
}

/// The keys of the file and of the flags.
fn keys(args: &ServeArgs) -> anyhow::Result<Keys> {
    let of_file = match &args.api_key_file {
        Some(path) if args.api_key.is_empty() => return Ok(Keys::read(path)?),
        Some(path) => {
            let text = std::fs::read_to_string(path);
            text.with_context(|| format!("cannot use the key file '{}'", path.display()))?
        }
        None if args.api_key.is_empty() => return Ok(Keys::none()),
        None => String::new(),
    };
    let is_key = |key: &&String| !key.starts_with('#') && key.split_whitespace().count() == 1;
    if !args.api_key.iter().all(|key| is_key(&key)) {
        return usage("--api-key is one word; limits and roles are in an --api-key-file");
    }
    let all = [of_file, args.api_key.join("\n")].join("\n");
    let keys = Keys::parse(&all);
    Ok(keys.map_err(|error| UsageError(format!("--api-key: {error}")))?)
}

/// True for what can be the name of a host, or its address.
fn is_host_name(name: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    !name.is_empty() && name.chars().all(is_part)
}

/// Reads the certificate again whenever a signal to hang up comes.
#[cfg(unix)]
pub(super) fn reload_on_hangup(tls: Tls) -> anyhow::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut hangup = signal(SignalKind::hangup())?;
    tokio::spawn(async move {
        while hangup.recv().await.is_some() {
            match tls.reload() {
                Ok(()) => terminal::note("(the certificate was read again)"),
                Err(error) => warn(&format!("{error}; the certificate before it stays")),
            }
        }
    });
    Ok(())
}

/// The system has no such signal.
#[cfg(not(unix))]
pub(super) fn reload_on_hangup(_: Tls) -> anyhow::Result<()> {
    Ok(())
}

/// Ends at the first Ctrl-C or termination signal; the second ends the program.
#[cfg(unix)]
pub(super) fn stop_signal() -> anyhow::Result<impl Future<Output = ()>> {
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
pub(super) fn stop_signal() -> anyhow::Result<impl Future<Output = ()>> {
    Ok(async move {
        let _no_handler = tokio::signal::ctrl_c().await;
        terminal::note("(ending: running requests are finished, a second Ctrl-C ends at once)");
        tokio::spawn(async move {
            let _no_handler = tokio::signal::ctrl_c().await;
            std::process::exit(i32::from(Exit::Interrupted.code()));
        });
    })
}
