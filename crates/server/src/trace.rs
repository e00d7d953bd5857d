//! The span of a request: its method and path, and the trace that it belongs to by W3C's
//! `traceparent`.
//!
//! Knows nothing of where spans go.

use axum::extract::Request;
use axum::http::HeaderMap;
use tracing::Span;

/// The trace that a request belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TraceParent<'h> {
    trace: &'h str,
    parent: &'h str,
}

impl<'h> TraceParent<'h> {
    /// `None` where there is no header of a version that is known, or it is not valid.
    fn of(headers: &'h HeaderMap) -> Option<Self> {
        let mut parts = headers.get("traceparent")?.to_str().ok()?.split('-');
        let (version, trace, parent) = (parts.next()?, parts.next()?, parts.next()?);
        let is_hex = |text: &str, n: usize| {
            text.len() == n
                && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
                && text.bytes().any(|b| b != b'0')
        };
        let is_valid = is_hex(trace, 32) && is_hex(parent, 16) && parts.next()?.len() == 2;
        let is_known = version.len() == 2 && version != "ff";
        (is_known && is_valid).then_some(Self { trace, parent })
    }
}

/// The span of a request.
pub(crate) fn span(request: &Request) -> Span {
    let (method, path) = (request.method(), request.uri().path());
    match TraceParent::of(request.headers()) {
        Some(TraceParent { trace, parent }) => {
            tracing::info_span!("request", %method, path, trace_id = trace, parent_id = parent)
        }
        None => tracing::info_span!("request", %method, path),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn only_valid_traces_are_taken() {
        let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
        let read = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("traceparent", HeaderValue::from_str(text).unwrap());
            TraceParent::of(&headers).map(|p| (p.trace.to_owned(), p.parent.to_owned()))
        };
        let valid = format!("00-{trace}-00f067aa0ba902b7-01");
        assert_eq!(
            read(&valid),
            Some((trace.to_owned(), "00f067aa0ba902b7".to_owned()))
        );
        for wrong in [
            "",
            "00",
            &format!("ff-{trace}-00f067aa0ba902b7-01"),
            &format!("00-{trace}-0000000000000000-01"),
            &format!("00-{}-00f067aa0ba902b7-01", trace.to_uppercase()),
            &format!("00-{trace}-00f067aa0ba902b7"),
        ] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }
}
