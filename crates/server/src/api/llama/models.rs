//! `POST /models/load` and `/models/unload`, as llama-server's router has them.

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use axum::routing::MethodRouter;
use serde::Deserialize;
use serde_json::json;

use crate::api::ollama::KeepAlive;
use crate::api::on_post;
use crate::app::App;
use crate::auth::Tenant;
use crate::error::ApiError;
use crate::json::{self, Body};

#[derive(Clone, Debug, Deserialize)]
struct Fields {
    model: String,
    /// As Ollama's: how long it stays loaded without requests.
    keep_alive: Option<KeepAlive>,
}

/// Loads a model; answers once it is loaded.
pub(crate) fn load() -> MethodRouter<App> {
    on_post(
        async |State(app): State<App>, Extension(tenant): Extension<Tenant>, request: Request| {
            tenant.check_admin()?;
            let body = Body::read(request).await?;
            let fields: Fields = body.get()?;
            let keep = fields
                .keep_alive
                .as_ref()
                .map(KeepAlive::keep)
                .transpose()?;
            let model = app
                .load(app.registry().find_now(&fields.model).await?)
                .await?;
            if let Some(keep) = keep {
                model.keep(keep);
            }
            Ok::<Response, ApiError>(json::respond(&json!({"success": true})))
        },
    )
}

/// Unloads a model once no request uses it; answers then.
pub(crate) fn unload() -> MethodRouter<App> {
    on_post(
        async |State(app): State<App>, Extension(tenant): Extension<Tenant>, request: Request| {
            tenant.check_admin()?;
            let body = Body::read(request).await?;
            let fields: Fields = body.get()?;
            let at = app.registry().find_now(&fields.model).await?;
            app.registry().unload(at).await?;
            Ok::<Response, ApiError>(json::respond(&json!({"success": true})))
        },
    )
}
