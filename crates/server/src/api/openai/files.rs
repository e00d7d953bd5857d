//! `/v1/files`: what clients upload for batches, and what batches answer.

use axum::extract::{Extension, Path, Request, State};
use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::MethodRouter;
use multer::Multipart;
use serde_json::{Value, json};

use crate::api::{on_delete, on_get, on_post};
use crate::app::App;
use crate::auth::Tenant;
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
            let file = app.files().keep(tenant, new)?;
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
        async |State(app): State<App>, Extension(tenant): Extension<Tenant>| {
            let files = app.files().list(tenant);
            let data: Vec<Value> = files.iter().map(|file| file.object()).collect();
            json::respond(&json!({"object": "list", "data": data, "has_more": false}))
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
            let answer = ([(CONTENT_TYPE, lines)], file.bytes.clone());
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
            if app.files().remove(tenant, &id) {
                let answer = json!({"id": id, "object": "file", "deleted": true});
                Ok(json::respond(&answer))
            } else {
                Err(ApiError::unknown_id("file", &id))
            }
        },
    )
}
