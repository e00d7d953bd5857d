//! [`begin`]: the lines of a batch through the routes that answer requests.
//!
//! Invariant: so many lines are computed at once that the engine is busy, and no more; one that
//! finds the queue full tries again. A batch that is cancelled begins no line any more. One that is
//! not over when the server ends is begun again by the next one, where batches outlive servers.

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use bytes::Bytes;
use cellar_engine::batch_file::BatchLine;
use cellar_engine::serve::TenantId;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tower::ServiceExt;

use super::{Batch, BatchStatus, BatchWork, NewBatch, lines};
use crate::app::{App, Phase};
use crate::auth::Tenant;
use crate::body_worker::run_blocking;
use crate::error::ApiError;
use crate::files::NewFile;
use crate::ids::random_id;

/// Lines that are with the engine for each that it computes at once.
const N_AHEAD: usize = 2;

/// The wait of a line that found the queue full.
const RETRY_TIME: Duration = Duration::from_millis(500);

/// The answer to a line.
struct LineAnswer {
    status: StatusCode,
    /// A line of the output.
    text: String,
}

/// The requests of a batch, or what is wrong with its lines, as OpenAI's objects.
///
/// # Errors
/// [`ApiError`] where its file is gone or cannot be read.
async fn read_lines(
    app: &App,
    tenant: Tenant,
    wanted: &NewBatch,
) -> Result<Result<Vec<BatchLine>, Vec<Value>>, ApiError> {
    let file = app.files().get(tenant, &wanted.input_file)?;
    let endpoint = wanted.endpoint.clone();
    run_blocking(move || Ok(lines::read(&file.bytes()?, &endpoint))).await?
}

/// Begins a batch, and keeps it. One whose lines are wrong has failed.
///
/// # Errors
/// [`ApiError`] where its file is gone or cannot be read, or there is no room for it.
pub(crate) async fn begin(
    app: &App,
    routes: Router,
    tenant: Tenant,
    wanted: NewBatch,
) -> Result<Batch, ApiError> {
    let lines = read_lines(app, tenant, &wanted).await?;
    let mut batch = Batch::new(wanted);
    match &lines {
        Ok(lines) => batch.counts.total = lines.len(),
        Err(errors) => {
            batch.errors.clone_from(errors);
            batch.end(BatchStatus::Failed);
        }
    }
    let (kept, of_app) = (batch.clone(), app.clone());
    run_blocking(move || of_app.batches().keep(tenant, kept)).await??;
    if let Ok(lines) = lines {
        tokio::spawn(run(
            app.clone(),
            routes,
            BatchWork::new(tenant, &batch, lines),
        ));
    }
    Ok(batch)
}

/// Begins the batches again that the server before this one did not end. Those of keys that are
/// gone wait for these.
pub(crate) fn resume(app: &App, routes: &Router) {
    for batch in app.batches().take_unfinished() {
        let Some(tenant) = app.config().keys.with_id(TenantId(batch.owner)) else {
            continue;
        };
        let (app, routes) = (app.clone(), routes.clone());
        tokio::spawn(async move {
            let errors = match read_lines(&app, tenant, &batch.wanted).await {
                Ok(Ok(lines)) => {
                    return run(app, routes, BatchWork::new(tenant, &batch, lines)).await;
                }
                Ok(Err(errors)) => errors,
                Err(error) => vec![json!({
                    "code": "no_input_file", "line": null, "message": error.message, "param": null,
                })],
            };
            let end = |batch: &mut Batch| {
                batch.errors = errors;
                batch.end(BatchStatus::Failed);
            };
            end_batch(app, tenant, batch.id, end).await;
        });
    }
}

/// Changes a batch to its end.
async fn end_batch(app: App, tenant: Tenant, id: String, end: impl FnOnce(&mut Batch)) {
    if app.batches().change(tenant, &id, end).is_ok() {
        // Only a thread that panics has no end.
        let _saved = run_blocking(move || app.batches().save(tenant, &id)).await;
    }
}

/// Computes a batch, and keeps its answers as files.
async fn run(app: App, routes: Router, work: BatchWork) {
    let n_together = n_together(&app);
    let (mut next, mut running) = (0, JoinSet::new());
    let mut answers: Vec<Option<LineAnswer>> = work.lines.iter().map(|_| None).collect();
    loop {
        let goes_on = is_wanted(&app, &work);
        while goes_on && running.len() < n_together && next < work.lines.len() {
            running.spawn(answer(app.clone(), routes.clone(), work.clone(), next));
            next += 1;
        }
        match running.join_next().await {
            Some(Ok((at, Some(answer)))) => {
                count(&app, &work, answer.status);
                if let Some(place) = answers.get_mut(at) {
                    *place = Some(answer);
                }
            }
            // It was given up, or its task has ended otherwise.
            Some(Ok((_, None)) | Err(_)) => {}
            None => break,
        }
    }
    finish(app, work, answers).await;
}

/// The number of lines that are computed at once.
fn n_together(app: &App) -> usize {
    let models = app.models().into_iter().filter_map(|status| status.model);
    let n_parallel = models.map(|model| model.n_parallel()).max();
    n_parallel.unwrap_or(1) * N_AHEAD
}

/// True if lines of the batch are to be begun.
fn is_wanted(app: &App, work: &BatchWork) -> bool {
    let batch = app.batches().get(work.tenant, &work.id);
    let goes_on = batch.is_ok_and(|batch| batch.status == BatchStatus::InProgress);
    goes_on && app.phase() == Phase::Open
}

/// The answer to the line of this number; `None` where it is not wanted any more.
async fn answer(
    app: App,
    routes: Router,
    work: BatchWork,
    at: usize,
) -> (usize, Option<LineAnswer>) {
    let Some(line) = work.lines.get(at) else {
        return (at, None);
    };
    loop {
        let (status, body) = ask(&routes, &work, line).await;
        if !status.is_success() && app.phase() != Phase::Open {
            // The server ends, and the next one computes it.
            return (at, None);
        }
        if status != StatusCode::TOO_MANY_REQUESTS {
            let text = shown(line, status, &body);
            return (at, Some(LineAnswer { status, text }));
        }
        tokio::time::sleep(RETRY_TIME).await;
        if !is_wanted(&app, &work) {
            return (at, None);
        }
    }
}

/// Sends a request to the routes, as a client with the batch's key would.
async fn ask(routes: &Router, work: &BatchWork, line: &BatchLine) -> (StatusCode, Value) {
    let mut body = line.body.clone();
    // Vectors have no priorities.
    if work.endpoint != "/v1/embeddings" {
        body.entry("priority").or_insert_with(|| json!("batch"));
    }
    let request = Request::post(&work.endpoint)
        .header(CONTENT_TYPE, "application/json")
        .extension::<Tenant>(work.tenant)
        .body(Body::from(Value::Object(body).to_string()));
    let request = match request {
        Ok(request) => request,
        Err(error) => return failed(&ApiError::internal(error.to_string())),
    };
    let response = match routes.clone().oneshot(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    };
    let status = response.status();
    let read = response.into_body().collect().await;
    let read = read.map(|body| serde_json::from_slice(&body.to_bytes()));
    match read {
        Ok(Ok(body)) => (status, body),
        Ok(Err(error)) => failed(&ApiError::internal(error.to_string())),
        Err(error) => failed(&ApiError::internal(error.to_string())),
    }
}

fn failed(error: &ApiError) -> (StatusCode, Value) {
    (error.status, error.openai())
}

/// A line of the output.
fn shown(line: &BatchLine, status: StatusCode, body: &Value) -> String {
    let answer = json!({
        "id": random_id("batch_req_"),
        "custom_id": line.custom_id,
        "response": {
            "status_code": status.as_u16(), "request_id": random_id("req_"), "body": body,
        },
        "error": null,
    });
    format!("{answer}\n")
}

fn count(app: &App, work: &BatchWork, status: StatusCode) {
    // A batch that is computed is kept.
    let _counted = app.batches().change(work.tenant, &work.id, |batch| {
        if status.is_success() {
            batch.counts.completed += 1;
        } else {
            batch.counts.failed += 1;
        }
    });
}

/// Keeps the answers, in the order of the lines, and ends the batch. Where the server ends before
/// all lines are answered, the batch goes on with the next one.
async fn finish(app: App, work: BatchWork, answers: Vec<Option<LineAnswer>>) {
    let is_whole = answers.iter().all(Option::is_some);
    let batch = app.batches().get(work.tenant, &work.id);
    let is_cancelled = batch.is_ok_and(|batch| batch.status == BatchStatus::Cancelling);
    if !is_whole && !is_cancelled {
        return;
    }
    let of_app = app.clone();
    let BatchWork { id, tenant, .. } = work;
    let of_files = id.clone();
    let kept = run_blocking(move || keep_answers(&of_app, tenant, &of_files, answers)).await;
    let end = |batch: &mut Batch| match kept.and_then(|kept| kept) {
        Ok(AnswerFiles { output, error }) => {
            batch.output_file = output;
            batch.error_file = error;
            batch.end(match batch.status {
                BatchStatus::InProgress => BatchStatus::Completed,
                _ => BatchStatus::Cancelled,
            });
        }
        Err(error) => {
            batch.errors.push(json!({
                "code": "no_room", "line": null, "message": error.message, "param": null,
            }));
            batch.end(BatchStatus::Failed);
        }
    };
    end_batch(app, tenant, id, end).await;
}

/// The files with the answers of a batch.
struct AnswerFiles {
    output: Option<String>,
    error: Option<String>,
}

fn keep_answers(
    app: &App,
    tenant: Tenant,
    batch: &str,
    answers: Vec<Option<LineAnswer>>,
) -> Result<AnswerFiles, ApiError> {
    let (mut good, mut bad) = (String::new(), String::new());
    for LineAnswer { status, text } in answers.into_iter().flatten() {
        if status.is_success() {
            good.push_str(&text);
        } else {
            bad.push_str(&text);
        }
    }
    let keep = |text: String, ending: &str| {
        if text.is_empty() {
            return Ok(None);
        }
        let new = NewFile {
            name: format!("{batch}_{ending}.jsonl"),
            purpose: "batch_output".to_owned(),
            bytes: Bytes::from(text),
        };
        let file = app.files().keep(tenant, new)?;
        Ok::<_, ApiError>(Some(file.id().to_owned()))
    };
    Ok(AnswerFiles {
        output: keep(good, "output")?,
        error: keep(bad, "error")?,
    })
}
