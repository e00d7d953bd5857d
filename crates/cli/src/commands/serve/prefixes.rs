//! `--save-cache DIR`: a file of cached prefixes for each model, written when the server ends, when
//! the model is unloaded and from time to time, and read when the model is loaded.
//!
//! Invariant: what is wrong with a file is a line on stderr, never an end of the server; a file is
//! complete under its name, and only this user reads it. Which prefixes a request shares is decided
//! by the salts in it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use cellar_engine::serve::{PrefixCounts, Service, ServiceError};
use cellar_server::App;
use kv_backend::BoxedBackend;

use crate::failure::{one_line, warn};
use crate::terminal::note;
use crate::{input, output_file};

/// What the names of these files end with.
const ENDING: &str = ".prefixes";

/// Makes the directory, where there is none, and checks that files can be written in it.
///
/// # Errors
/// The directory cannot be made, or no file in it.
pub(super) fn prepare_dir(dir: &Path) -> anyhow::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    let made = builder.create(dir);
    made.with_context(|| {
        format!(
            "--save-cache: cannot make the directory '{}'",
            dir.display()
        )
    })?;
    output_file::remove_abandoned(dir, |of| of.to_string_lossy().ends_with(ENDING));
    let any = dir.join(format!("any{ENDING}"));
    output_file::check("--save-cache", &any).with_context(|| {
        format!(
            "--save-cache: no file can be written in '{}'",
            dir.display()
        )
    })
}

/// Takes the prefixes back that were saved of this model.
pub(super) fn restore(dir: &Path, id: &str, service: &Service<BoxedBackend>) {
    let path = path_of(dir, id, service);
    for other in others(dir, id, &path) {
        warn(&format!(
            "'{}' is not restored: another file of the model '{id}' computed it",
            other.display()
        ));
    }
    if !path.exists() {
        return;
    }
    let restored = input::bytes(&path).and_then(|bytes| Ok(service.restore_prefixes(bytes)?));
    match restored {
        Ok(counts) => note(format_args!("({} of '{id}' restored)", words(counts))),
        Err(error) => warn(&format!(
            "'{}' is not restored: {}",
            path.display(),
            one_line(&error)
        )),
    }
}

/// Writes the prefixes of all models that are loaded. To be called when no request is left.
pub(super) fn save_all(dir: &Path, app: &App) {
    for model in app.models() {
        if let Some(service) = model.service() {
            save(dir, &model.id, service);
        }
    }
}

/// Writes the prefixes of a model that no request uses, with a line of what became of it.
pub(super) fn save(dir: &Path, id: &str, service: &Service<BoxedBackend>) {
    match write(dir, id, service, Service::save_prefixes) {
        Ok(counts) => note(format_args!("({} of '{id}' saved)", words(counts))),
        Err(error) => warn(&format!(
            "the cached prefixes of '{id}' are not saved: {}",
            one_line(&error)
        )),
    }
}

/// How the prefixes of a service are written.
type SavePrefixes =
    fn(&Service<BoxedBackend>, &mut dyn Write) -> Result<PrefixCounts, ServiceError>;

fn write(
    dir: &Path,
    id: &str,
    service: &Service<BoxedBackend>,
    save: SavePrefixes,
) -> anyhow::Result<PrefixCounts> {
    // A model that is unloaded while its prefixes are written has the same file.
    static WRITING: Mutex<()> = Mutex::new(());
    let _writing = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
    let path = path_of(dir, id, service);
    let counts = output_file::write(&path, |out| {
        #[cfg(unix)]
        {
            let own = std::os::unix::fs::PermissionsExt::from_mode(0o600);
            out.get_ref().set_permissions(own)?;
        }
        Ok(save(service, out)?)
    })?;
    if counts.n_prefixes == 0 {
        fs::remove_file(path)?;
    }
    Ok(counts)
}

/// How often a save that is due looks whether requests run.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A thread that writes the prefixes of loaded models again and again, until this is dropped: each
/// model's once they have changed and no request runs.
#[derive(Debug)]
pub(super) struct PeriodicSave {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl PeriodicSave {
    /// Starts it.
    ///
    /// # Errors
    /// There is no thread for it.
    pub(super) fn start(dir: PathBuf, app: App, every: Duration) -> anyhow::Result<Self> {
        let (stop, stopped) = channel();
        let thread = std::thread::Builder::new().name("cellar-save-cache".to_owned());
        let thread = thread.spawn(move || {
            let mut last = BTreeMap::new();
            let look_every = every.min(LOOK_EVERY);
            while stopped.recv_timeout(look_every) == Err(RecvTimeoutError::Timeout) {
                save_changed(&dir, &app, every, &mut last);
            }
        });
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread.context("cannot start the thread of --save-cache-every")?),
        })
    }
}

impl Drop for PeriodicSave {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _panicked = thread.join(); // its message was printed
        }
    }
}

/// What is known of a model's last save.
#[derive(Clone, Copy, Debug)]
struct LastSave {
    at: Instant,
    /// The load of the model, and the steps that it had computed.
    n_loads: u64,
    n_steps: u64,
}

/// Writes the prefixes of the models whose time has come. One that was not written yet counts as
/// written when it is first seen.
fn save_changed(dir: &Path, app: &App, every: Duration, last: &mut BTreeMap<String, LastSave>) {
    for model in app.models() {
        let Some(service) = model.service() else {
            continue;
        };
        let now = LastSave {
            at: Instant::now(),
            n_loads: model.counts.n_loads,
            n_steps: service.counters().n_steps,
        };
        let Some(saved) = last.get_mut(&model.id) else {
            let n_steps = 0;
            last.insert(model.id, LastSave { n_steps, ..now });
            continue;
        };
        let is_changed = (saved.n_loads, saved.n_steps) != (now.n_loads, now.n_steps);
        if !is_changed || now.n_steps == 0 || saved.at.elapsed() < every || model.n_uses > 0 {
            continue;
        }
        match write(dir, &model.id, service, Service::save_idle_prefixes) {
            Ok(counts) => tracing::debug!(model = model.id, counts.n_prefixes, "prefixes saved"),
            // A request came before: the next look may find none.
            Err(error) if is_busy(&error) => continue,
            Err(error) => warn(&format!(
                "the cached prefixes of '{}' are not saved: {}",
                model.id,
                one_line(&error)
            )),
        }
        *saved = now;
    }
}

fn is_busy(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref(),
        Some(ServiceError::RequestsLive { .. } | ServiceError::Stopped)
    )
}

/// The file of a model: its name, and what tells its weights from others.
fn path_of(dir: &Path, id: &str, service: &Service<BoxedBackend>) -> PathBuf {
    let hash = service.fingerprint().weights.hash;
    dir.join(format!("{}{hash:016x}{ENDING}", beginning(id)))
}

/// What the names of the files of a model begin with.
fn beginning(id: &str) -> String {
    let safe = |c: char| match c {
        c if c.is_ascii_alphanumeric() || "-_.".contains(c) => c,
        _ => '_',
    };
    format!("{}-", id.chars().map(safe).collect::<String>())
}

/// Files of other models of this name.
fn others(dir: &Path, id: &str, own: &Path) -> Vec<PathBuf> {
    let beginning = beginning(id);
    let is_other = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        let hash = name.and_then(|name| name.strip_prefix(&beginning)?.strip_suffix(ENDING));
        let is_hash = |hash: &str| hash.len() == 16 && u64::from_str_radix(hash, 16).is_ok();
        path != own && hash.is_some_and(is_hash)
    };
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(is_other).collect()
}

fn words(counts: PrefixCounts) -> String {
    let mut words = match counts.n_prefixes {
        1 => "1 cached prefix".to_owned(),
        n => format!("{n} cached prefixes"),
    };
    // Writing to a text cannot fail.
    let _ = write!(words, " of {} tokens", counts.n_tokens);
    if counts.n_left_out > 0 {
        let _ = write!(words, ", without {} that do not fit,", counts.n_left_out);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_are_safe_and_told_apart() {
        assert_eq!(beginning("OWNER/NAME:Q4_K_M"), "OWNER_NAME_Q4_K_M-");
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = dir.path().join(name);
            fs::write(&path, "").unwrap();
            path
        };
        let own = file("chat-0123456789abcdef.prefixes");
        let other = file("chat-fedcba9876543210.prefixes");
        file("chat-v2-fedcba9876543210.prefixes");
        file("chat-notes.prefixes");
        assert_eq!(others(dir.path(), "chat", &own), [other]);
        assert!(others(&dir.path().join("nowhere"), "chat", &own).is_empty());
    }
}
