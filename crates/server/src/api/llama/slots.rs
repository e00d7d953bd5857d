//! `POST /slots/{id}?action=save|restore|erase`: cached prefixes to a file and back.
//!
//! Invariant: this server has no slots that keep a text of their own, so each action is of all
//! cached prefixes of the model, whichever slot it names, and only an admin may do it. A file is in
//! the directory of [`ServerConfig::slot_save_path`](crate::ServerConfig::slot_save_path), readable
//! by its user alone, and complete under its name. Nothing is done while requests are computed.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Extension, Path as UrlPath, Query, Request, State};
use axum::response::Response;
use axum::routing::MethodRouter;
use cellar_engine::serve::{PrefixCounts, ServiceError};
use cellar_engine::with_reasons;
use kv_backend::state::{SavedState, StateError};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::api::on_post;
use crate::app::App;
use crate::auth::Tenant;
use crate::body_worker::run_blocking;
use crate::error::ApiError;
use crate::json::{self, Body};
use crate::kept;
use crate::model::{Job, ServedModel};

/// The query of the address.
#[derive(Clone, Debug, Deserialize)]
struct Action {
    action: Option<String>,
    model: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
struct Fields {
    filename: Option<String>,
    model: Option<String>,
}

/// The route.
pub(crate) fn change() -> MethodRouter<App> {
    on_post(
        async |State(app): State<App>,
               Extension(tenant): Extension<Tenant>,
               UrlPath(id): UrlPath<String>,
               Query(query): Query<Action>,
               request: Request| {
            tenant.check_admin()?;
            let fields: Fields = Body::read(request).await?.get()?;
            let id: u64 = id.parse().map_err(|_| {
                ApiError::invalid_param("id", format!("'{id}' is no number of a slot"))
            })?;
            let name = match (&query.model, &fields.model) {
                (Some(address), Some(body)) if address != body => {
                    let message = format!(
                        "'model' is '{body}' here, and '{address}' in the address: name one"
                    );
                    return Err(ApiError::invalid_param("model", message));
                }
                (address, body) => address.as_deref().or(body.as_deref()),
            };
            let model = app.model_for(name, Job::Texts).await?;
            let action = query.action.as_deref().unwrap_or_default();
            let path = match action {
                "save" | "restore" => Some(file_of(&app, fields.filename.as_deref())?),
                "erase" => None,
                _ => {
                    let message =
                        format!("'action' is '{action}': it must be save, restore or erase");
                    return Err(ApiError::invalid_param("action", message));
                }
            };
            let shared = model.shared();
            let (action, name) = (action.to_owned(), fields.filename);
            let work = move || act(&shared, &action, path.as_deref());
            let mut answer = run_blocking(work).await??;
            answer["id_slot"] = json!(id);
            if let Some(name) = name.filter(|_| query.action.as_deref() != Some("erase")) {
                answer["filename"] = json!(name);
            }
            Ok::<Response, ApiError>(json::respond(&answer))
        },
    )
}

/// The file of this name.
fn file_of(app: &App, name: Option<&str>) -> Result<PathBuf, ApiError> {
    let Some(dir) = &app.config().slot_save_path else {
        return Err(ApiError::not_implemented(
            "this server keeps no slots: start it with --slot-save-path DIR",
        ));
    };
    let name = name.unwrap_or_default();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.starts_with('.') || !name.chars().all(is_plain) {
        let message = format!(
            "'filename' is '{name}': it must be letters, digits, '-', '_' and '.', and not begin with '.'"
        );
        return Err(ApiError::invalid_param("filename", message));
    }
    Ok(dir.join(name))
}

/// Does the action, with its file where it has one.
fn act(model: &Arc<ServedModel>, action: &str, path: Option<&Path>) -> Result<Value, ApiError> {
    let began = Instant::now();
    let service = model.service()?;
    let milliseconds = || json!(began.elapsed().as_secs_f64() * 1e3);
    let Some(path) = path else {
        let counts = service.clear_prefixes().map_err(in_use)?;
        return Ok(json!({"n_erased": counts.n_tokens}));
    };
    if action == "save" {
        let (counts, n_bytes) = save(model, path)?;
        return Ok(json!({
            "n_saved": counts.n_tokens, "n_written": n_bytes, "timings": {"save_ms": milliseconds()},
        }));
    }
    let bytes = fs::read(path).map_err(|error| cannot("read", path, &error))?;
    let n_bytes = bytes.len();
    let counts = service.replace_prefixes(bytes).map_err(wrong_file)?;
    Ok(json!({
        "n_restored": counts.n_tokens, "n_read": n_bytes, "timings": {"restore_ms": milliseconds()},
    }))
}

/// Writes the prefixes under another name first.
fn save(model: &ServedModel, path: &Path) -> Result<(PrefixCounts, u64), ApiError> {
    check_replaced(path)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let part = path.with_file_name(format!(".{name}.{}.part", std::process::id()));
    let service = model.service()?;
    let failed = |error: io::Error| cannot("write", path, &error);
    kept::replace(&part, path, failed, |file| {
        let counts = service
            .save_idle_prefixes(file)
            .map_err(|error| match error {
                ServiceError::Stopped | ServiceError::RequestsLive { .. } => in_use(error),
                other => {
                    ApiError::internal(format!("cannot write '{name}': {}", with_reasons(&other)))
                }
            })?;
        let metadata = file.metadata().map_err(failed)?;
        Ok((counts, metadata.len()))
    })
}

/// A file that is there already has to be one of saved prefixes: a client that names a model in the
/// directory would destroy it.
fn check_replaced(path: &Path) -> Result<(), ApiError> {
    let Ok(file) = File::open(path) else {
        return Ok(());
    };
    let mut start = Vec::new();
    let read = file.take(64).read_to_end(&mut start);
    read.map_err(|error| cannot("read", path, &error))?;
    if matches!(SavedState::parse(&start), Err(StateError::NotAState)) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let message =
            format!("'{name}' is there, and holds no cached prefixes: choose another name");
        return Err(ApiError::invalid_param("filename", message));
    }
    Ok(())
}

fn cannot(what: &str, path: &Path, error: &io::Error) -> ApiError {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    ApiError::invalid_param("filename", format!("cannot {what} '{name}': {error}"))
}

/// Requests are computed.
fn in_use(error: ServiceError) -> ApiError {
    match error {
        ServiceError::RequestsLive { .. } => ApiError::busy(error.to_string(), 1),
        other => ApiError::from(other),
    }
}

/// A file does not fit the model.
fn wrong_file(error: ServiceError) -> ApiError {
    match error {
        ServiceError::Stopped | ServiceError::RequestsLive { .. } => in_use(error),
        other => ApiError::invalid_param("filename", other.to_string()),
    }
}
