//! The page, compiled in.
//!
//! Invariant: every browser gets the same page, and its Content-Security-Policy allows scripts,
//! styles and connections of this server alone. Two of its scripts were written elsewhere:
//! `page/vendor/README.md`.

use axum::extract::Path;
use axum::http::header::{
    ACCEPT, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, VARY,
    X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method};
use axum::response::{IntoResponse, Response};
use axum::routing::MethodRouter;

use crate::api::on_get;
use crate::app::App;
use crate::error::ApiError;

const HTML: &str = include_str!("page/index.html");

const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";

/// Files of the page, by their name under `/view/`.
const ASSETS: [(&str, &str, &str); 20] = [
    ("style.css", STYLE, include_str!("page/style.css")),
    ("chat.css", STYLE, include_str!("page/chat.css")),
    ("app.js", SCRIPT, include_str!("page/app.js")),
    ("chat.js", SCRIPT, include_str!("page/chat.js")),
    ("experts.js", SCRIPT, include_str!("page/experts.js")),
    ("grid.js", SCRIPT, include_str!("page/grid.js")),
    ("history.js", SCRIPT, include_str!("page/history.js")),
    ("map.js", SCRIPT, include_str!("page/map.js")),
    ("markdown.js", SCRIPT, include_str!("page/markdown.js")),
    ("memory.js", SCRIPT, include_str!("page/memory.js")),
    ("messages.js", SCRIPT, include_str!("page/messages.js")),
    ("panels.js", SCRIPT, include_str!("page/panels.js")),
    ("settings.js", SCRIPT, include_str!("page/settings.js")),
    ("store.js", SCRIPT, include_str!("page/store.js")),
    ("stream.js", SCRIPT, include_str!("page/stream.js")),
    ("tree.js", SCRIPT, include_str!("page/tree.js")),
    ("views.js", SCRIPT, include_str!("page/views.js")),
    ("words.js", SCRIPT, include_str!("page/words.js")),
    ("marked.js", SCRIPT, include_str!("page/vendor/marked.js")),
    ("purify.js", SCRIPT, include_str!("page/vendor/purify.js")),
];

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src 'self' data:; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'";

/// Whether a path is a file of the page, which needs no key.
pub(crate) fn is_asset(path: &str) -> bool {
    let name = path.strip_prefix("/view/");
    name.is_some_and(|name| ASSETS.iter().any(|(known, ..)| *known == name))
}

/// Whether a request to `/` wants the page: browsers ask for HTML by name.
pub(crate) fn is_for_browser(headers: &HeaderMap) -> bool {
    let mut accepts = headers.get_all(ACCEPT).iter();
    accepts.any(|accept| {
        accept
            .to_str()
            .is_ok_and(|accept| accept.contains("text/html"))
    })
}

/// The page.
pub(crate) fn page() -> Response {
    respond("text/html; charset=utf-8", HTML)
}

/// A file of the page.
pub(crate) fn asset() -> MethodRouter<App> {
    on_get(async |Path(name): Path<String>| {
        let found = ASSETS.iter().find(|(known, ..)| *known == name);
        match found {
            Some(&(_, content_type, text)) => Ok(respond(content_type, text)),
            None => Err(ApiError::no_route(&Method::GET, &format!("/view/{name}"))),
        }
    })
}

fn respond(content_type: &'static str, text: &'static str) -> Response {
    let headers: [(HeaderName, HeaderValue); 6] = [
        (CONTENT_TYPE, HeaderValue::from_static(content_type)),
        (CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
        (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        (CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (VARY, HeaderValue::from_static("accept")),
    ];
    (headers, text).into_response()
}
