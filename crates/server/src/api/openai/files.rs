//! `/v1/files`: what clients upload for batches, and what batches answer.

use axum::extract::{Extension, Path, Request, State};
use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::MethodRouter;
use multer::Multipart;
use serde_json::json;

use super::lists::{ListQuery, PageLimits};
use crate::api::{on_delete, on_get, on_post};
use crate::app::App;
use crate::auth::Tenant;
use crate::body_worker::run_blocking;
use crate::error::ApiError;
use crate::files::NewFile;
use crate::json;

/// The purpose of a file whose form names none.
const PURPOSE: &str = "batch";

/// Takes a file.
pub(crate) fn upload() -> MethodRouter<App> {
    on_post(
        async |State(app): State<App>, Extension(tenant): Extension<Tenant>, request: Request| {
            let new = read_form(request).await?;
            let file = run_blocking(move || app.files().keep(tenant, new)).await??;
            Ok::<Response, ApiError>(json::respond(&file.object()))
        },
    )
}

/// The file in a form.
async fn read_form(request: Request) -> Result<NewFile, ApiError> {
    let content_type = request.headers().get(CONTENT_TYPE);
    let content_type = content_type.and_then(|value| value.to_str().ok());
    let boundary = content_type.and_then(|value| multer::parse_boundary(value).ok());
    let Some(boundary) = boundary else {
        return Err(ApiError::invalid(
            "the body is no form: send 'file' and 'purpose' as multipart/form-data",
        ));
    };
    let wrong = |error: multer::Error| ApiError::invalid(format!("the form is wrong: {error}"));
    let mut form = Multipart::new(request.into_body().into_data_stream(), boundary);
    let (mut file, mut purpose) = (None, None);
    while let Some(part) = form.next_field().await.map_err(wrong)? {
        match part.name() {
            Some("file") => {
                let name = part.file_name().unwrap_or("file").to_owned();
                file = Some((name, part.bytes().await.map_err(wrong)?));
            }
            Some("purpose") => purpose = Some(part.text().await.map_err(wrong)?),
            _ => {}
        }
    }
    let Some((name, bytes)) = file else {
        return Err(ApiError::invalid_param("file", "the form has no 'file'"));
    };
    Ok(NewFile {
        name,
        purpose: purpose.unwrap_or_else(|| PURPOSE.to_owned()),
        bytes,
    })
}

/// The files of a key.
pub(crate) fn list() -> MethodRouter<App> {
    on_get(
        async |State(app): State<App>, Extension(tenant): Extension<Tenant>, query: ListQuery| {
            let files = app.files().list(tenant);
            let files = files.iter().filter(|file| query.wants(file.purpose()));
            let files = files.map(|file| file.object()).collect();
            let page = query.page(files, PageLimits::FILES)?;
            Ok::<Response, ApiError>(json::respond(&page))
        },
    )
}

/// One file.
pub(crate) fn one() -> MethodRouter<App> {
    on_get(
        async |State(app): State<App>,
               Extension(tenant): Extension<Tenant>,
               Path(id): Path<String>| {
            let file = app.files().get(tenant, &id)?;
            Ok::<Response, ApiError>(json::respond(&file.object()))
        },
    )
}

/// The bytes of a file.
pub(crate) fn content() -> MethodRouter<App> {
    on_get(
        async |State(app): State<App>,
               Extension(tenant): Extension<Tenant>,
               Path(id): Path<String>| {
            let file = app.files().get(tenant, &id)?;
            let lines = HeaderValue::from_static("application/octet-stream");
            let bytes = run_blocking(move || file.bytes()).await??;
            let answer = ([(CONTENT_TYPE, lines)], bytes);
            Ok::<Response, ApiError>(answer.into_response())
        },
    )
}

/// Forgets a file.
pub(crate) fn remove() -> MethodRouter<App> {
    on_delete(
        async |State(app): State<App>,
               Extension(tenant): Extension<Tenant>,
               Path(id): Path<String>| {
            app.files().remove(tenant, &id)?;
            let answer = json!({"id": id, "object": "file", "deleted": true});
            Ok::<Response, ApiError>(json::respond(&answer))
        },
    )
}
