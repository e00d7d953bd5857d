//! [`run`]: the lines of a batch through the routes that answer requests.
//!
//! Invariant: so many lines are computed at once that the engine is busy, and no more; one that
//! finds the queue full tries again. A batch that is cancelled begins no line any more.

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use bytes::Bytes;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tower::ServiceExt;

use super::lines::BatchLine;
use super::{BatchStatus, BatchWork};
use crate::api::params::random_id;
use crate::app::{App, Phase};
use crate::auth::Tenant;
use crate::error::ApiError;
use crate::files::NewFile;

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

/// Computes a batch, and keeps its answers as files.
pub(crate) async fn run(app: App, routes: Router, work: BatchWork) {
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
    finish(&app, &work, answers);
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

/// Keeps the answers, in the order of the lines, and ends the batch.
fn finish(app: &App, work: &BatchWork, answers: Vec<Option<LineAnswer>>) {
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
            name: format!("{}_{ending}.jsonl", work.id),
            purpose: "batch_output".to_owned(),
            bytes: Bytes::from(text),
        };
        let file = app.files().keep(work.tenant, new)?;
        Ok::<_, ApiError>(Some(file.id().to_owned()))
    };
    let kept = keep(good, "output").and_then(|output| Ok((output, keep(bad, "error")?)));
    let _ended = app
        .batches()
        .change(work.tenant, &work.id, |batch| match kept {
            Ok((output, error)) => {
                batch.output_file = output;
                batch.error_file = error;
                let is_whole = batch.counts.completed + batch.counts.failed == batch.counts.total;
                batch.end(match batch.status {
                    BatchStatus::InProgress if is_whole => BatchStatus::Completed,
                    _ => BatchStatus::Cancelled,
                });
            }
            Err(error) => {
                batch.errors.push(json!({
                    "code": "no_room", "line": null, "message": error.message, "param": null,
                }));
                batch.end(BatchStatus::Failed);
            }
        });
}
