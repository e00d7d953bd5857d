//! The span of a request in the log: its method and path, and the trace that it belongs to by W3C's
//! `traceparent`.
//!
//! Knows nothing of where spans go.

use axum::extract::Request;
use axum::http::HeaderMap;
use tracing::Span;

/// The trace that a request belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceParent {
    /// The trace; not 0.
    pub trace: u128,
    /// The span that the request is part of; not 0.
    pub parent: u64,
    /// The flags of the trace; the lowest bit: the caller records it.
    pub flags: u8,
}

impl TraceParent {
    /// `None` where there is no header of a version that is known, or it is not valid.
    pub(crate) fn of(headers: &HeaderMap) -> Option<Self> {
        let mut parts = headers.get("traceparent")?.to_str().ok()?.split('-');
        let (version, trace, parent) = (parts.next()?, parts.next()?, parts.next()?);
        let flags = parts.next()?;
        let hex = |text: &str, n: usize| {
            let is_hex = |b| matches!(b, b'0'..=b'9' | b'a'..=b'f');
            let is_valid = text.len() == n && text.bytes().all(is_hex);
            is_valid.then(|| u128::from_str_radix(text, 16).ok())?
        };
        let is_known = hex(version, 2)? != 0xff;
        let (trace, parent, flags) = (hex(trace, 32)?, hex(parent, 16)?, hex(flags, 2)?);
        (is_known && trace != 0 && parent != 0).then_some(Self {
            trace,
            parent: parent as u64,
            flags: flags as u8,
        })
    }
}

/// The span of a request.
pub(crate) fn span(request: &Request) -> Span {
    let (method, path) = (request.method(), request.uri().path());
    match TraceParent::of(request.headers()) {
        Some(TraceParent { trace, parent, .. }) => {
            let (trace, parent) = (format!("{trace:032x}"), format!("{parent:016x}"));
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
            TraceParent::of(&headers)
        };
        let valid = TraceParent {
            trace: 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736,
            parent: 0x00f0_67aa_0ba9_02b7,
            flags: 1,
        };
        assert_eq!(
            read(&format!("00-{trace}-00f067aa0ba902b7-01")),
            Some(valid)
        );
        for wrong in [
            "",
            "00",
            &format!("ff-{trace}-00f067aa0ba902b7-01"),
            &format!("00-{trace}-0000000000000000-01"),
            &format!("00-{}-00f067aa0ba902b7-01", trace.to_uppercase()),
            &format!("00-{trace}-00f067aa0ba902b7"),
            &format!("00-{trace}-00f067aa0ba902b7-0"),
            &format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32)),
        ] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }
}
