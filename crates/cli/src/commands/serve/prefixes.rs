//! What becomes of the cached prefixes of a model that is unloaded, and of all models when the
//! server ends.
//!
//! Invariant: what goes wrong is a line on stderr, never an end of the server.

use cellar_engine::serve::{PrefixCounts, Service};
use cellar_server::App;
use kv_backend::BoxedBackend;

use crate::failure::{one_line, warn};
use crate::terminal::note;

/// Stores the prefixes of all models that are loaded. To be called when no request is left.
pub(super) fn save_all(app: &App) {
    for model in app.models() {
        if let Some(service) = model.service() {
            save(&model.id, service);
        }
    }
}

/// Stores the prefixes of a model that no request uses, with a line of what became of them.
pub(super) fn save(id: &str, service: &Service<BoxedBackend>) {
    match service.publish_prefixes() {
        Ok(counts) if counts.n_lost > 0 => warn(&format!(
            "not all of the {} of '{id}' are saved: the store is full or gone; CELLAR_LOG=warn says \
             more",
            words(counts)
        )),
        Ok(counts) => note(format_args!("({} of '{id}' saved)", words(counts))),
        Err(error) => warn(&format!(
            "the cached prefixes of '{id}' are not saved: {}",
            one_line(&error.into())
        )),
    }
}

fn words(counts: PrefixCounts) -> String {
    let n_tokens = counts.n_tokens;
    let prefixes = match counts.n_prefixes {
        1 => "1 cached prefix".to_owned(),
        n => format!("{n} cached prefixes"),
    };
    let left_out = match counts.n_left_out {
        0 => String::new(),
        n => format!(", without {n} for which the time was too short,"),
    };
    format!("{prefixes} of {n_tokens} tokens{left_out}")
}
