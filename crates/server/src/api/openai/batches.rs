//! `/v1/batches`: files of requests that are answered while their client does something else.

use axum::extract::{Extension, Path, Request, State};
use axum::response::Response;
use axum::routing::MethodRouter;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::files;
use super::lists::{ListQuery, PageLimits};
use crate::api::openapi::fields;
use crate::api::{DELETE, Endpoint, GET, endpoint, on_get, on_post, post_endpoint, routes};
use crate::app::App;
use crate::auth::Tenant;
use crate::batches::{self, Batch, BatchStatus, NewBatch};
use crate::body_worker::run_blocking;
use crate::error::ApiError;
use crate::json::{self, Body};

/// The endpoints of batches and of their files.
pub(in crate::api) const ENDPOINTS: [Endpoint; 9] = [
    post_endpoint(
        "/v1/files",
        "takes a file for a batch (OpenAI)",
        files::upload,
        fields::form(fields::FILE),
    ),
    endpoint(GET, "/v1/files", "the files (OpenAI)", files::list),
    endpoint(GET, "/v1/files/{id}", "one file (OpenAI)", files::one),
    endpoint(
        DELETE,
        "/v1/files/{id}",
        "forgets a file (OpenAI)",
        files::remove,
    ),
    endpoint(
        GET,
        "/v1/files/{id}/content",
        "what is in a file (OpenAI)",
        files::content,
    ),
    post_endpoint(
        "/v1/batches",
        "answers a file of requests (OpenAI)",
        create,
        fields::body(fields::BATCH),
    ),
    endpoint(GET, "/v1/batches", "the batches (OpenAI)", list),
    endpoint(GET, "/v1/batches/{id}", "one batch (OpenAI)", one),
    post_endpoint(
        "/v1/batches/{id}/cancel",
        "ends a batch (OpenAI)",
        cancel,
        fields::body(&[]),
    ),
];

/// The endpoints whose requests a batch may have.
const ANSWERED: [&str; 4] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
];

#[derive(Clone, Debug, Deserialize)]
struct Fields {
    input_file_id: String,
    endpoint: String,
    completion_window: Option<String>,
    metadata: Option<Map<String, Value>>,
}

/// Begins a batch.
pub(crate) fn create() -> MethodRouter<App> {
    on_post(
        async |State(app): State<App>, Extension(tenant): Extension<Tenant>, request: Request| {
            let body = Body::read(request).await?;
            let fields: Fields = body.get()?;
            app.check_open()?;
            let batch = begin(&app, tenant, fields).await?;
            Ok::<Response, ApiError>(json::respond(&batch.object()))
        },
    )
}

async fn begin(app: &App, tenant: Tenant, fields: Fields) -> Result<Batch, ApiError> {
    let Fields {
        input_file_id,
        endpoint,
        completion_window,
        metadata,
    } = fields;
    if !ANSWERED.contains(&endpoint.as_str()) {
        let known = ANSWERED.join("', '");
        let message = format!("'endpoint' is '{endpoint}': batches are for '{known}'");
        return Err(ApiError::invalid_param("endpoint", message));
    }
    let wanted = NewBatch {
        input_file: input_file_id,
        endpoint,
        window: completion_window.unwrap_or_else(|| "24h".to_owned()),
        metadata,
    };
    batches::begin(app, routes(app), tenant, wanted).await
}

/// The batches of a key.
pub(crate) fn list() -> MethodRouter<App> {
    on_get(
        async |State(app): State<App>, Extension(tenant): Extension<Tenant>, query: ListQuery| {
            let batches = app.batches().list(tenant);
            let batches = batches.iter().map(Batch::object).collect();
            let page = query.page(batches, PageLimits::BATCHES)?;
            Ok::<Response, ApiError>(json::respond(&page))
        },
    )
}

/// One batch.
pub(crate) fn one() -> MethodRouter<App> {
    on_get(
        async |State(app): State<App>,
               Extension(tenant): Extension<Tenant>,
               Path(id): Path<String>| {
            let batch = app.batches().get(tenant, &id)?;
            Ok::<Response, ApiError>(json::respond(&batch.object()))
        },
    )
}

/// Begins no line of a batch any more; those that are computed end.
pub(crate) fn cancel() -> MethodRouter<App> {
    on_post(
        async |State(app): State<App>,
               Extension(tenant): Extension<Tenant>,
               Path(id): Path<String>| {
            let batch = app.batches().change(tenant, &id, |batch| {
                if !batch.status.is_over() {
                    batch.status = BatchStatus::Cancelling;
                }
                batch.clone()
            })?;
            run_blocking(move || app.batches().save(tenant, &id)).await?;
            Ok::<Response, ApiError>(json::respond(&batch.object()))
        },
    )
}
