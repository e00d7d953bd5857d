//! [`Origins`]: the web pages whose scripts may use the server, by CORS.
//!
//! Invariant: without a list no answer has a header of CORS. An answer names the origin that asked,
//! never more, and lets no cookies through. Knows no keys: a preflight request carries none.

use std::io;

use axum::extract::{Request, State};
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, ORIGIN, VARY,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::app::App;

/// Seconds for which a browser need not ask again.
const MAX_AGE: HeaderValue = HeaderValue::from_static("600");

/// A page of the Internet asks for a server of the network around it.
const REQUEST_PRIVATE: HeaderName =
    HeaderName::from_static("access-control-request-private-network");
/// It may have it.
const ALLOW_PRIVATE: HeaderName = HeaderName::from_static("access-control-allow-private-network");

/// Origins of web pages, or patterns of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origins(Vec<String>);

impl Origins {
    /// Each is an origin as browsers write it (`https://app.example.org`, `app://obsidian.md`,
    /// `null`), `SCHEME://HOST:*` for any port, `SCHEME://*` for any host, or `*` for all pages.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] with the text that is none of these.
    pub fn parse(origins: &[String]) -> io::Result<Self> {
        let origins = origins.iter().map(|origin| {
            let origin = origin.trim_end_matches('/');
            if is_pattern(origin) {
                return Ok(origin.to_ascii_lowercase());
            }
            let message = format!(
                "'{origin}' is no origin: write SCHEME://HOST or SCHEME://HOST:PORT, where '*' stands \
                 for any host or any port, or '*' for all pages"
            );
            Err(io::Error::new(io::ErrorKind::InvalidInput, message))
        });
        Ok(Self(origins.collect::<io::Result<_>>()?))
    }

    /// True if every web page may use the server.
    pub fn are_all(&self) -> bool {
        self.0.iter().any(|pattern| pattern == "*")
    }

    /// The origin of a request whose page may use the server.
    pub(crate) fn allowed<'h>(&self, headers: &'h HeaderMap) -> Option<&'h HeaderValue> {
        let origin = headers.get(ORIGIN)?;
        let text = origin.to_str().ok()?.to_ascii_lowercase();
        let is_it = |pattern: &String| matches(pattern, &text);
        self.0.iter().any(is_it).then_some(origin)
    }

    /// The answer to a browser that asks before it sends the request of an allowed page: what it
    /// asks for is allowed. `None` for any other request.
    pub(crate) fn preflight(&self, request: &Request) -> Option<Response> {
        let headers = request.headers();
        let method = headers.get(ACCESS_CONTROL_REQUEST_METHOD)?;
        if request.method() != Method::OPTIONS || self.allowed(headers).is_none() {
            return None;
        }
        let mut answer = StatusCode::NO_CONTENT.into_response();
        let allowed = answer.headers_mut();
        allowed.insert(ACCESS_CONTROL_ALLOW_METHODS, method.clone());
        allowed.insert(ACCESS_CONTROL_MAX_AGE, MAX_AGE);
        if let Some(names) = headers.get(ACCESS_CONTROL_REQUEST_HEADERS) {
            allowed.insert(ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
        }
        if headers.contains_key(REQUEST_PRIVATE) {
            allowed.insert(ALLOW_PRIVATE, HeaderValue::from_static("true"));
        }
        let varies = "access-control-request-method, access-control-request-headers";
        allowed.append(VARY, HeaderValue::from_static(varies));
        Some(answer)
    }
}

/// Marks the answers, and errors, that an allowed page may read.
pub(crate) async fn mark(State(app): State<App>, request: Request, next: Next) -> Response {
    let origins = &app.config().origins;
    if origins.0.is_empty() {
        return next.run(request).await;
    }
    let origin = origins.allowed(request.headers()).cloned();
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    headers.append(VARY, HeaderValue::from_static("origin"));
    if let Some(origin) = origin {
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        let all = HeaderValue::from_static("*");
        headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, all);
    }
    response
}

/// True if a list may have this.
fn is_pattern(text: &str) -> bool {
    if matches!(text, "*" | "null") {
        return true;
    }
    let Some((scheme, host)) = text.split_once("://") else {
        return false;
    };
    let is_scheme = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.');
    let without_end = host.strip_suffix(":*").unwrap_or(host);
    let is_host = |c: char| c.is_ascii_graphic() && !matches!(c, '/' | '?' | '#' | '@' | '*');
    let is_named = !without_end.is_empty() && without_end.chars().all(is_host);
    !scheme.is_empty() && scheme.chars().all(is_scheme) && (host == "*" || is_named)
}

/// True if an origin, in lower case, is one of those that a pattern stands for.
fn matches(pattern: &str, origin: &str) -> bool {
    let Some(start) = pattern.strip_suffix('*') else {
        return pattern == origin;
    };
    let Some(rest) = origin.strip_prefix(start) else {
        return false;
    };
    let is_port = !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit());
    is_port || !start.ends_with(':')
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    fn is_allowed(patterns: &[&str], origin: &str) -> bool {
        let patterns: Vec<String> = patterns.iter().map(|&text| text.to_owned()).collect();
        let mut headers = HeaderMap::new();
        headers.insert(ORIGIN, HeaderValue::from_str(origin).unwrap());
        let origins = Origins::parse(&patterns).unwrap();
        origins.allowed(&headers).is_some()
    }

    #[test]
    fn origins_are_whole_and_patterns_end_at_hosts_and_ports() {
        let app = ["https://app.example.org/", "app://obsidian.md"];
        assert!(is_allowed(&app, "https://app.example.org"));
        assert!(is_allowed(&app, "app://obsidian.md"));
        for other in [
            "http://app.example.org",
            "https://app.example.org:8443",
            "https://app.example.org.evil.example",
            "https://evil.example",
            "null",
            "",
        ] {
            assert!(!is_allowed(&app, other), "{other}");
        }
        let ports = ["http://192.168.1.5:*"];
        assert!(is_allowed(&ports, "http://192.168.1.5:3000"));
        assert!(!is_allowed(&ports, "http://192.168.1.5"));
        assert!(!is_allowed(&ports, "http://192.168.1.5:80@evil.example"));
        assert!(is_allowed(&["vscode-webview://*"], "vscode-webview://0ab1"));
        assert!(!is_allowed(&["vscode-webview://*"], "https://evil.example"));
        assert!(is_allowed(&["*"], "null") && is_allowed(&["null"], "null"));
        assert!(!is_allowed(&[], "https://app.example.org"));
    }

    #[test]
    fn what_is_no_origin_is_refused() {
        for wrong in [
            "",
            "example.org",
            "https://",
            "https://a/b",
            "https://*.example.org",
            "https://user@example.org",
            "://a",
            "https://a b",
        ] {
            let error = Origins::parse(&[wrong.to_owned()]).unwrap_err().to_string();
            assert!(error.contains("is no origin"), "{wrong}: {error}");
        }
    }
}
