//! `pull`: models by name. Knows nothing of what they contain.

use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use cellar_hub::{Event, Hub, HubConfig, ModelName};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::failed;

/// A message of a download to the thread that waits for it.
enum News {
    Progress { n_done: u64, n_bytes: u64 },
    Ended(Result<PathBuf, PyErr>),
}

/// Downloads a model ('owner/name' or 'owner/name:Q4_K_M') into the cache of Hugging Face's tools,
/// unless it is there, and returns the path to open. 'progress' is called with bytes so far and
/// bytes in all. Ctrl-C returns at once; what was downloaded stays, and the next call continues it.
#[pyfunction]
#[pyo3(signature = (name, *, progress=None))]
pub(crate) fn pull(
    py: Python<'_>,
    name: &str,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<PathBuf> {
    let name: ModelName = name
        .parse()
        .map_err(|error: cellar_hub::HubError| PyValueError::new_err(error.to_string()))?;
    let hub = Hub::new(HubConfig::from_env().map_err(|error| failed(&error))?);
    if let Ok(path) = hub.cache().find(&name) {
        return Ok(path);
    }
    let (sender, mut receiver) = channel();
    // Not waited for after Ctrl-C: nothing stops a connection in the middle.
    std::thread::Builder::new().spawn(move || {
        let mut n_bytes = 0;
        let pulled = hub.pull(&name, &mut |event| {
            let n_done = match event {
                Event::Chosen {
                    n_bytes: all,
                    n_present,
                    ..
                } => {
                    n_bytes = all;
                    n_present
                }
                Event::Progress { n_bytes } => n_bytes,
                _ => return,
            };
            let _ = sender.send(News::Progress { n_done, n_bytes });
        });
        let ended = pulled
            .map(|pulled| pulled.path)
            .map_err(|error| failed(&error));
        let _ = sender.send(News::Ended(ended));
    })?;
    loop {
        let (news, waiting) = py.detach(move || {
            let news = receiver.recv_timeout(Duration::from_millis(50));
            (news, receiver)
        });
        receiver = waiting;
        py.check_signals()?;
        match (news, &progress) {
            (Ok(News::Ended(ended)), _) => return ended,
            (Ok(News::Progress { n_done, n_bytes }), Some(progress)) => {
                progress.call1((n_done, n_bytes))?;
            }
            (Ok(News::Progress { .. }), None) | (Err(RecvTimeoutError::Timeout), _) => {}
            (Err(RecvTimeoutError::Disconnected), _) => {
                return Err(PyRuntimeError::new_err("the download panicked; see stderr"));
            }
        }
    }
}
