//! [`HostCheck`]: refuses requests that a web page of another site makes a browser send to this
//! machine (DNS rebinding, cross-site requests).
//!
//! Knows no keys: a browser may send requests without them.

use std::net::{Ipv4Addr, Ipv6Addr};

use axum::http::HeaderMap;
use axum::http::header::{HOST, ORIGIN};

use crate::cors::Origins;
use crate::error::ApiError;

/// Whose requests are taken, by the headers `Host`, `Origin` and `Sec-Fetch-Site`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostCheck {
    /// Those to `localhost`, loopback addresses and these names, from no web page of another host:
    /// for a server that other machines cannot reach, or reach by a proxy under these names.
    Names(Vec<String>),
    /// All: for a server that other machines reach under names of theirs, and for one that needs
    /// keys, which web pages do not have.
    Any,
}

impl Default for HostCheck {
    /// Only what is sent to this machine itself.
    fn default() -> Self {
        Self::Names(Vec::new())
    }
}

impl HostCheck {
    /// Checks a request. Pages of `origins` are as good as its own.
    ///
    /// # Errors
    /// [`ApiError::forbidden`] with the header.
    pub fn check(&self, headers: &HeaderMap, origins: &Origins) -> Result<(), ApiError> {
        let Self::Names(names) = self else {
            return Ok(());
        };
        let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
        match text(HOST) {
            Some(host) if !is_served(names, host) => {
                let message = format!(
                    "the Host '{host}' is not this machine: use http://127.0.0.1 or http://localhost, \
                     or start the server with --allow-host NAME for a name of its proxy, or with keys"
                );
                return Err(ApiError::forbidden(message));
            }
            _ => {}
        }
        match text(ORIGIN) {
            Some(_) if origins.allowed(headers).is_some() => Ok(()),
            Some(origin) if !origin_is_served(names, origin) => {
                let message = format!(
                    "web pages of '{origin}' may not use this server: start it with --allow-origin \
                     ORIGIN for pages that may"
                );
                Err(ApiError::forbidden(message))
            }
            None if is_of_other_site(headers) && !origins.are_all() => {
                let message = "web pages of other sites may not use this server (Sec-Fetch-Site)";
                Err(ApiError::forbidden(message))
            }
            _ => Ok(()),
        }
    }
}

/// True if a host, perhaps with a port, is this machine or has one of these names.
fn is_served(names: &[String], authority: &str) -> bool {
    let (host, port) = authority.split_at(authority.find(':').unwrap_or(authority.len()));
    let host = host.strip_suffix('.').unwrap_or(host);
    let is_it = |name: &String| name.eq_ignore_ascii_case(host);
    is_loopback(authority) || is_port(port) && names.iter().any(is_it)
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

/// True if an origin, which is a scheme, a host and perhaps a port, is this machine or has one of
/// these names.
fn origin_is_served(names: &[String], origin: &str) -> bool {
    let schemes = ["http://", "https://"];
    let authority = schemes
        .iter()
        .find_map(|scheme| origin.strip_prefix(scheme));
    authority.is_some_and(|authority| is_served(names, authority))
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
            HostCheck::default().check(&headers, &Origins::default())
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
        assert!(HostCheck::Any.check(&headers, &Origins::default()).is_ok());
    }

    #[test]
    fn names_that_are_given_pass_with_their_own_pages_alone() {
        let hosts = HostCheck::Names(vec!["example.org".to_owned()]);
        let check = |host: &'static str, origin: Option<&'static str>, origins: &[&str]| {
            let mut headers = HeaderMap::new();
            headers.insert(HOST, HeaderValue::from_static(host));
            if let Some(origin) = origin {
                headers.insert(ORIGIN, HeaderValue::from_static(origin));
            }
            let origins: Vec<String> = origins.iter().map(|&text| text.to_owned()).collect();
            hosts
                .check(&headers, &Origins::parse(&origins).unwrap())
                .is_ok()
        };
        for host in [
            "example.org",
            "EXAMPLE.org:8443",
            "example.org.",
            "localhost",
        ] {
            assert!(check(host, None, &[]), "{host}");
            assert!(check(host, Some("https://example.org"), &[]), "{host}");
            assert!(!check(host, Some("https://evil.example"), &[]), "{host}");
            assert!(check(
                host,
                Some("https://app.example"),
                &["https://app.example"]
            ));
        }
        for host in [
            "evil.example",
            "example.org.evil.example",
            "example.org:x",
            "a@example.org",
        ] {
            assert!(!check(host, None, &[]), "{host}");
            // A page that may use the server still has to name it.
            assert!(!check(host, Some("https://app.example"), &["*"]), "{host}");
        }
    }

    #[test]
    fn what_other_sites_load_is_refused_and_links_are_not() {
        let check = |headers: &[(&'static str, &'static str)]| {
            let headers = headers
                .iter()
                .map(|&(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value)));
            let check = HostCheck::default();
            check.check(&headers.collect(), &Origins::default()).is_ok()
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
