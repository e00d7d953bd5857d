//! [`HostCheck`]: refuses requests that a web page of another site makes a browser send to this
//! machine (DNS rebinding, cross-site requests).
//!
//! Knows no keys: a browser may send requests without them.

use std::net::{Ipv4Addr, Ipv6Addr};

use axum::http::HeaderMap;
use axum::http::header::{HOST, ORIGIN};

use crate::error::ApiError;

/// Whose requests are taken, by the headers `Host`, `Origin` and `Sec-Fetch-Site`.
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
            None if is_of_other_site(headers) => {
                let message = "web pages of other sites may not use this server (Sec-Fetch-Site)";
                Err(ApiError::forbidden(message))
            }
            _ => Ok(()),
        }
    }
}

/// True if a host, perhaps with a port, is this machine. What is anything else as well is not.
fn is_loopback(authority: &str) -> bool {
    let (name, rest) = match authority.strip_prefix('[') {
        Some(after) => match after.split_once(']') {
            Some((address, rest)) => {
                let address = address.parse::<Ipv6Addr>();
                return address.is_ok_and(|address| address.is_loopback()) && is_port(rest);
            }
            None => return false,
        },
        None => authority.split_at(authority.find(':').unwrap_or(authority.len())),
    };
    let name = name.strip_suffix('.').unwrap_or(name);
    let is_name = name.eq_ignore_ascii_case("localhost");
    let address = name.parse::<Ipv4Addr>();
    (is_name || address.is_ok_and(|address| address.is_loopback())) && is_port(rest)
}

/// True if this is what may follow a host: nothing, or `:` and a number.
fn is_port(rest: &str) -> bool {
    let digits = rest.strip_prefix(':');
    rest.is_empty()
        || digits.is_some_and(|digits| {
            digits.bytes().all(|byte| byte.is_ascii_digit()) && digits.parse::<u16>().is_ok()
        })
}

/// True if an origin, which is a scheme, a host and perhaps a port, is this machine.
fn origin_is_loopback(origin: &str) -> bool {
    let schemes = ["http://", "https://"];
    let authority = schemes
        .iter()
        .find_map(|scheme| origin.strip_prefix(scheme));
    authority.is_some_and(is_loopback)
}

/// True if a browser says that a page of another site sent this. It names an origin with what could
/// change something, but not with what an image, a script or a frame loads. A link that a user
/// follows is no such request.
fn is_of_other_site(headers: &HeaderMap) -> bool {
    let is = |name, value: &str| headers.get(name).is_some_and(|given| given == value);
    let is_link = is("sec-fetch-mode", "navigate") && is("sec-fetch-dest", "document");
    is("sec-fetch-site", "cross-site") && !is_link
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
            "localhost.:65535",
            "[::1]",
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
            "[::1",
            "[::1]evil.example",
            "[::1]:80evil.example",
            "[::1]:",
            "[127.0.0.1]",
            "::1",
            "localhost:",
            "localhost:+80",
            "localhost:65536",
            "localhost:80:80",
            "localhost:x@evil.example",
            "localhost:80@evil.example",
            "user@localhost",
            "localhost..",
            "localhost/",
            "localhost?a",
            "127.1",
            "0x7f.0.0.1",
            "0.0.0.0",
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
        for origin in [
            "http://localhost:3000",
            "https://127.0.0.1",
            "http://[::1]:8080",
        ] {
            assert!(check(ORIGIN, origin).is_ok(), "{origin}");
        }
        for origin in [
            "https://evil.example",
            "null",
            "",
            "localhost",
            "ftp://localhost",
            "http://localhost@evil.example",
            "http://localhost:x@evil.example",
            "http://localhost:80@evil.example",
            "http://[::1]evil.example",
            "http://[::1].evil.example",
            "http://localhost/",
            "http://localhost\\@evil.example",
            "http://localhost#@evil.example",
            "http:///localhost",
        ] {
            assert!(check(ORIGIN, origin).is_err(), "{origin}");
        }
        let error = check(HOST, "evil.example").unwrap_err();
        assert_eq!(error.status, 403);
        let mut headers = HeaderMap::new();
        headers.insert(HOST, HeaderValue::from_static("evil.example"));
        assert!(HostCheck::Any.check(&headers).is_ok());
    }

    #[test]
    fn what_other_sites_load_is_refused_and_links_are_not() {
        let check = |headers: &[(&'static str, &'static str)]| {
            let headers = headers
                .iter()
                .map(|&(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value)));
            HostCheck::Loopback.check(&headers.collect()).is_ok()
        };
        let image = [
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-mode", "no-cors"),
            ("sec-fetch-dest", "image"),
        ];
        let frame = [
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-mode", "navigate"),
            ("sec-fetch-dest", "iframe"),
        ];
        let link = [
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-mode", "navigate"),
            ("sec-fetch-dest", "document"),
        ];
        assert!(!check(&image) && !check(&frame) && !check(&image[..1]));
        assert!(check(&link));
        for own in ["same-origin", "same-site", "none"] {
            assert!(check(&[("sec-fetch-site", own)]), "{own}");
        }
    }
}
