//! [`HostCheck`]: refuses requests that a web page of another site makes a browser send to this
//! machine (DNS rebinding, cross-site requests).
//!
//! Knows no keys: a browser may send requests without them.

use std::net::IpAddr;

use axum::http::header::{HOST, ORIGIN};
use axum::http::{HeaderMap, Uri};

use crate::error::ApiError;

/// Whose requests are taken, by the headers `Host` and `Origin`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostCheck {
    /// Those to `localhost` and loopback addresses, from no web page of another host: for a server
    /// that other machines cannot reach.
    #[default]
    Loopback,
    /// All: for a server that other machines reach under names of theirs.
    Any,
}

impl HostCheck {
    /// # Errors
    /// [`ApiError::forbidden`] with the header.
    pub fn check(self, headers: &HeaderMap) -> Result<(), ApiError> {
        if self == Self::Any {
            return Ok(());
        }
        let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
        match text(HOST) {
            Some(host) if !is_loopback(host) => {
                let message = format!(
                    "the Host '{host}' is not this machine: use http://127.0.0.1 or http://localhost"
                );
                return Err(ApiError::forbidden(message));
            }
            _ => {}
        }
        match text(ORIGIN) {
            Some(origin) if !origin_is_loopback(origin) => {
                let message = format!("web pages of '{origin}' may not use this server");
                Err(ApiError::forbidden(message))
            }
            _ => Ok(()),
        }
    }
}

/// Whether a host, perhaps with a port, is this machine.
fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    let name = name.trim_end_matches('.');
    name.eq_ignore_ascii_case("localhost")
        || name
            .parse::<IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}

fn origin_is_loopback(origin: &str) -> bool {
    let uri = origin.parse::<Uri>().ok();
    uri.and_then(|uri| uri.authority().map(|host| is_loopback(host.as_str())))
        .unwrap_or(false)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn only_names_of_this_machine_pass() {
        for host in [
            "localhost",
            "LOCALHOST:8080",
            "127.0.0.1:1",
            "127.8.0.1",
            "[::1]:80",
        ] {
            assert!(is_loopback(host), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "localhost.evil.example:80",
            "10.0.0.1",
            "[fe80::1]",
        ] {
            assert!(!is_loopback(host), "{host}");
        }
    }

    #[test]
    fn pages_of_other_sites_are_refused() {
        let check = |name, value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, HeaderValue::from_str(value).unwrap());
            HostCheck::Loopback.check(&headers)
        };
        assert!(check(ORIGIN, "http://localhost:3000").is_ok());
        for origin in [
            "https://evil.example",
            "null",
            "http://localhost@evil.example",
        ] {
            assert!(check(ORIGIN, origin).is_err(), "{origin}");
        }
        let error = check(HOST, "evil.example").unwrap_err();
        assert_eq!(error.status, 403);
        let mut headers = HeaderMap::new();
        headers.insert(HOST, HeaderValue::from_static("evil.example"));
        assert!(HostCheck::Any.check(&headers).is_ok());
    }
}
