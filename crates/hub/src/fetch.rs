//! [`fetch_public`]: a small file by its address, for somebody who may not see this machine's
//! network.
//!
//! Invariant: a connection is opened to public addresses alone, redirects and names that lead
//! elsewhere included; a body is read up to its limit. Knows no cache, and sends no token.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use ureq::config::Config;
use ureq::http::Uri;
use ureq::tls::TlsConfig;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};
use ureq::{Agent, Error};

use crate::client::root_certificates;
use crate::error::HubError;

const MAX_REDIRECTS: u32 = 3;

/// What a fetch may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchLimits {
    /// The most bytes of the file.
    pub n_bytes: u64,
    /// The longest time from beginning to end.
    pub time: Duration,
}

/// Fetches a file over HTTP or HTTPS from a public address, without a proxy.
///
/// # Errors
/// [`HubError`]; an address of this machine or of a private network is refused, whatever name leads
/// to it.
pub fn fetch_public(url: &str, limits: FetchLimits) -> Result<Vec<u8>, HubError> {
    fetch(url, limits, is_public)
}

fn fetch(url: &str, limits: FetchLimits, allowed: Allowed) -> Result<Vec<u8>, HubError> {
    let answer = |reason: String| HubError::Answer {
        url: url.to_owned(),
        reason,
    };
    let has_scheme = |scheme: &str| {
        let start = url.get(..scheme.len());
        start.is_some_and(|start| start.eq_ignore_ascii_case(scheme))
    };
    if !has_scheme("http://") && !has_scheme("https://") {
        let reason = "only 'http:' and 'https:' addresses are fetched";
        return Err(answer(reason.to_owned()));
    }
    let config = Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(MAX_REDIRECTS)
        .proxy(None)
        .timeout_global(Some(limits.time))
        .user_agent(concat!("cellar/", env!("CARGO_PKG_VERSION")))
        .tls_config(TlsConfig::builder().root_certs(root_certificates()).build())
        .build();
    let resolver = AllowedAddresses {
        names: DefaultResolver::default(),
        allowed,
    };
    let agent = Agent::with_parts(config, DefaultConnector::default(), resolver);
    let too_large = || answer(format!("it has more than {} bytes", limits.n_bytes));
    let network = |error: Error| match error {
        Error::BodyExceedsLimit(_) => too_large(),
        Error::Io(error) => answer(error.to_string()),
        error => answer(error.to_string()),
    };
    let mut response = agent.get(url).call().map_err(network)?;
    let status = response.status();
    if !status.is_success() {
        return Err(HubError::Status {
            url: url.to_owned(),
            status: status.as_u16(),
            detail: String::new(),
        });
    }
    let body = response.body_mut();
    if body.content_length().is_some_and(|n| n > limits.n_bytes) {
        return Err(too_large());
    }
    let body = body.with_config().limit(limits.n_bytes);
    body.read_to_vec().map_err(network)
}

/// Whether a connection to an address is allowed.
type Allowed = fn(IpAddr) -> bool;

/// Names as the system resolves them, without the addresses that are not allowed.
#[derive(Debug)]
struct AllowedAddresses {
    names: DefaultResolver,
    allowed: Allowed,
}

impl Resolver for AllowedAddresses {
    fn resolve(
        &self,
        uri: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, Error> {
        let found = self.names.resolve(uri, config, timeout)?;
        let mut public = self.empty();
        let is_allowed = |address: &&SocketAddr| (self.allowed)(address.ip());
        for address in found.iter().filter(is_allowed) {
            public.push(*address);
        }
        if public.is_empty() {
            let host = uri.host().unwrap_or_default();
            let wrong = format!("'{host}' is no public address, and no other is fetched from");
            return Err(Error::Io(io::Error::other(wrong)));
        }
        Ok(public)
    }
}

/// True if an address is that of a machine on the public internet (IANA's registries of special
/// addresses, RFC 6890).
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let is_special = address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_multicast()
        || address.is_documentation()
        || a == 0
        || a >= 240
        // Shared by the customers of a provider.
        || (a == 100 && (64..128).contains(&b))
        || (a, b, c) == (192, 0, 0)
        || (a, b, c) == (192, 88, 99)
        // Benchmarks.
        || (a == 198 && (18..20).contains(&b));
    !is_special
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let [a, b, c, d, e, f, g, h] = address.segments();
    let v4 = |high: u16, low: u16| {
        let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
        is_public_v4(Ipv4Addr::new(a, b, c, d))
    };
    match (a, b) {
        // Addresses of version 4: as they are, behind a translator, and 6to4.
        (0, 0) if [c, d, e, f] == [0, 0, 0, 0xffff] => v4(g, h),
        (0x64, 0xff9b) if [c, d, e, f] == [0, 0, 0, 0] => v4(g, h),
        (0x2002, _) => v4(b, c),
        // Tunnels, and what is reserved for protocols and documentation.
        (0x2001, ..0x200 | 0xdb8) | (0x3fff, ..0x1000) => false,
        // The addresses that were given to networks.
        _ => a & 0xe000 == 0x2000,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    const LIMITS: FetchLimits = FetchLimits {
        n_bytes: 100,
        time: Duration::from_secs(5),
    };

    /// A server that answers so many requests, each by what it asks for.
    fn server(n_requests: usize) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            for stream in listener.incoming().take(n_requests) {
                let mut stream = stream.unwrap();
                let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
                let first = lines.next().unwrap().unwrap();
                let path = first.split(' ').nth(1).unwrap().to_owned();
                while !lines.next().unwrap().unwrap().is_empty() {}
                let answer = match path.as_str() {
                    "/small" => "200 OK\r\nContent-Length: 5\r\n\r\nbytes".to_owned(),
                    "/large" => format!("200 OK\r\nContent-Length: 101\r\n\r\n{:101}", ""),
                    "/endless" => format!("200 OK\r\n\r\n{:200}", ""),
                    "/away" => {
                        let port = address.port();
                        format!(
                            "302 Found\r\nLocation: http://127.0.0.2:{port}/small\r\nContent-Length: 0\r\n\r\n"
                        )
                    }
                    _ => "404 Not Found\r\nContent-Length: 0\r\n\r\n".to_owned(),
                };
                let connection = "Connection: close\r\n";
                let (status, rest) = answer.split_once("\r\n").unwrap();
                // A client that has read enough closes the connection.
                let _sent = write!(stream, "HTTP/1.1 {status}\r\n{connection}{rest}");
            }
        });
        format!("http://{address}")
    }

    fn only_first(address: IpAddr) -> bool {
        address == Ipv4Addr::LOCALHOST
    }

    #[test]
    fn a_file_is_read_up_to_its_limit() {
        let server = server(4);
        let get = |path: &str| fetch(&format!("{server}{path}"), LIMITS, only_first);
        assert_eq!(get("/small").unwrap(), b"bytes");
        for path in ["/large", "/endless"] {
            let error = get(path).unwrap_err();
            let error = error.to_string();
            assert!(error.contains("more than 100 bytes"), "{path}: {error}");
        }
        let error = get("/none").unwrap_err();
        assert!(
            matches!(error, HubError::Status { status: 404, .. }),
            "{error}"
        );
    }

    #[test]
    fn no_address_that_is_not_allowed_is_connected_to() {
        let server = server(1);
        let error = fetch(&format!("{server}/away"), LIMITS, only_first).unwrap_err();
        let wanted = "'127.0.0.2' is no public address, and no other is fetched from";
        assert!(error.to_string().ends_with(wanted), "{error}");
        for url in [&server, "http://localhost/a.png", "http://[::1]/a.png"] {
            let error = fetch_public(url, LIMITS).unwrap_err().to_string();
            assert!(error.contains("is no public address"), "{error}");
        }
        for url in ["file:///etc/passwd", "ftp://example.com/a", "a.png", ""] {
            let error = fetch_public(url, LIMITS).unwrap_err().to_string();
            assert!(error.contains("only 'http:'"), "{url}: {error}");
        }
    }

    #[test]
    fn special_addresses_are_not_public() {
        for address in [
            "0.0.0.0",
            "10.1.2.3",
            "100.64.0.1",
            "127.0.0.1",
            "169.254.169.254",
            "172.16.0.1",
            "192.0.0.8",
            "192.168.1.1",
            "198.18.0.1",
            "203.0.113.1",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:10.0.0.1",
            "64:ff9b::7f00:1",
            "2001:db8::1",
            "2002:7f00:1::",
            "fc00::1",
            "fe80::1",
            "fec0::1",
            "ff02::1",
            "100::1",
        ] {
            assert!(!is_public(address.parse().unwrap()), "{address}");
        }
        for address in [
            "1.1.1.1",
            "100.128.0.1",
            "172.32.0.1",
            "192.0.1.1",
            "198.20.0.1",
            "223.255.255.1",
            "2606:4700::1111",
            "::ffff:1.1.1.1",
            "64:ff9b::808:808",
            "2002:808:808::",
        ] {
            assert!(is_public(address.parse().unwrap()), "{address}");
        }
    }
}
