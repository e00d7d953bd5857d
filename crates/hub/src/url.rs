//! Addresses: pieces of paths are escaped, and redirects resolved.
//!
//! Invariant: what a server redirects to is never less protected than what was asked.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use ureq::http::Uri;

/// The characters that are escaped in a piece of a path: all but RFC 3986's unreserved characters.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~');

/// Escapes a path, piece by piece.
pub(crate) fn escape_path(path: &str) -> String {
    let escape = |piece| utf8_percent_encode(piece, ESCAPED).to_string();
    path.split('/').map(escape).collect::<Vec<_>>().join("/")
}

/// Scheme, host and port of an address, in lower case; `None` where it has none.
pub(crate) fn origin(address: &str) -> Option<String> {
    let uri: Uri = address.parse().ok()?;
    let scheme = uri.scheme_str()?.to_ascii_lowercase();
    let port = uri.port_u16().or(match scheme.as_str() {
        "https" => Some(443),
        "http" => Some(80),
        _ => None,
    })?;
    let host = uri.host()?.to_ascii_lowercase();
    Some(format!("{scheme}://{host}:{port}"))
}

/// The target of a redirect from `address` to `location`.
///
/// # Errors
/// If it leads nowhere, or from https to http.
pub(crate) fn redirect(address: &str, location: &str) -> Result<String, String> {
    let nowhere = || {
        format!(
            "redirected to '{}', which is no address",
            location.escape_debug()
        )
    };
    let secure = address.starts_with("https://");
    let target = if let Some(rest) = location.strip_prefix("//") {
        format!("{}//{rest}", if secure { "https:" } else { "http:" })
    } else if location.starts_with('/') {
        let uri: Uri = address.parse().map_err(|_| nowhere())?;
        let scheme = uri.scheme_str().ok_or_else(nowhere)?;
        let authority = uri.authority().ok_or_else(nowhere)?;
        format!("{scheme}://{authority}{location}")
    } else {
        location.to_owned()
    };
    let target_origin = origin(&target).ok_or_else(nowhere)?;
    if secure && !target_origin.starts_with("https://") {
        return Err(format!("redirected from https to {target_origin}"));
    }
    Ok(target)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_escaped() {
        assert_eq!(escape_path("a b/c?d#e%.gguf"), "a%20b/c%3Fd%23e%25.gguf");
        assert_eq!(escape_path("Q4_K_M/m-v2.1~x.gguf"), "Q4_K_M/m-v2.1~x.gguf");
    }

    #[test]
    fn redirects_are_resolved() {
        let from = "https://hub.example:8443/a/b";
        let to = |location| redirect(from, location);
        assert_eq!(to("/c?d=e").unwrap(), "https://hub.example:8443/c?d=e");
        assert_eq!(to("//cdn.example/c").unwrap(), "https://cdn.example/c");
        assert_eq!(
            to("https://cdn.example/c").unwrap(),
            "https://cdn.example/c"
        );
        assert!(
            to("http://cdn.example/c")
                .unwrap_err()
                .contains("from https to http://")
        );
        assert!(to("file:///etc/passwd").unwrap_err().contains("no address"));
        assert!(to("").is_err());
        assert_eq!(
            redirect("http://localhost:1/a", "/b").unwrap(),
            "http://localhost:1/b"
        );
    }

    #[test]
    fn origins_differ_in_scheme_host_and_port() {
        assert_eq!(
            origin("https://Hub.example/x"),
            origin("https://hub.example:443")
        );
        assert_ne!(
            origin("http://127.0.0.1:1/x"),
            origin("http://127.0.0.1:2/x")
        );
        assert_ne!(
            origin("https://a.example"),
            origin("https://a.example.evil.example")
        );
        // What stands before an '@' is a user's name, not the host.
        assert_ne!(
            origin("https://a.example@evil.example"),
            origin("https://a.example")
        );
        assert_eq!(origin("/relative"), None);
    }
}
