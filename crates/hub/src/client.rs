//! HTTP with the hub: listings of repositories, metadata of files, their bytes.
//!
//! Invariant: the token goes to the endpoint's scheme, host and port, and not along with a redirect
//! to another server. Sends nothing but what is asked for. Knows no cache.

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use rustls::CertificateError;
use serde::Deserialize;
use ureq::http::{HeaderMap, Response, StatusCode};
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::{Agent, Body};

use crate::config::HubConfig;
use crate::error::HubError;
use crate::hash::ETag;
use crate::name::RepoId;
use crate::url;
use crate::variant::RepoFile;

const MAX_REDIRECTS: usize = 10;

/// The longest listing that is read: a repository with 100,000 files.
const MAX_LISTING: u64 = 64 << 20;

/// The contents of a repository.
#[derive(Debug)]
pub(crate) struct Listing {
    /// Its name as its owner writes it.
    pub(crate) repo: RepoId,
    /// The commit that all of this is about.
    pub(crate) commit: String,
    /// Its files.
    pub(crate) files: Vec<RepoFile>,
}

/// The hub's statement about a file.
#[derive(Clone, Debug)]
pub(crate) struct FileMetadata {
    /// Its name in the cache, and its hash.
    pub(crate) etag: ETag,
    /// Its size.
    pub(crate) n_bytes: u64,
}

/// The bytes of a file, from `offset` on.
pub(crate) struct Download {
    pub(crate) reader: Box<dyn Read>,
    /// Their start; 0 where the server sends the whole file although a part was asked for.
    pub(crate) offset: u64,
}

/// Why the bytes of a file do not come.
#[derive(Debug)]
pub(crate) enum OpenError {
    /// It makes sense to try again.
    Retry(String),
    /// The server has no such range of the file.
    NoSuchRange,
    /// It makes no sense to try again.
    Final(HubError),
}

/// A connection to the endpoint and the servers that it redirects to.
#[derive(Debug)]
pub(crate) struct Client {
    agent: Agent,
    config: HubConfig,
}

#[derive(Clone, Copy)]
enum Method {
    Get,
    Head,
}

/// The redirects that are followed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RedirectPolicy {
    /// To any server.
    Everywhere,
    /// Within the endpoint: the first answer that leads elsewhere is the last one.
    SameOrigin,
}

impl Client {
    pub(crate) fn new(config: &HubConfig) -> Self {
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .timeout_connect(Some(Duration::from_secs(20)))
            .timeout_recv_response(Some(Duration::from_secs(60)))
            .timeout_per_read(Some(config.read_timeout))
            .user_agent(concat!("cellar/", env!("CARGO_PKG_VERSION")))
            .tls_config(TlsConfig::builder().root_certs(root_certificates()).build())
            .build();
        Self {
            agent: agent.into(),
            config: config.clone(),
        }
    }

    /// The files of a repository.
    pub(crate) fn listing(&self, repo: &RepoId) -> Result<Listing, HubError> {
        let address = format!(
            "{}/api/models/{repo}/revision/main?blobs=true",
            self.config.endpoint
        );
        let answer = |reason: String| HubError::Answer {
            url: address.clone(),
            reason,
        };
        let sent = self.send(Method::Get, &address, None, RedirectPolicy::Everywhere);
        let response = self.expect(repo, &address, sent?)?;
        let mut text = Vec::new();
        let mut body = response.into_body().into_reader().take(MAX_LISTING);
        body.read_to_end(&mut text)
            .map_err(|error| answer(error.to_string()))?;
        let listing: ModelInfo = serde_json::from_slice(&text).map_err(|error| {
            let is_page = text.trim_ascii_start().starts_with(b"<");
            answer(if is_page {
                "a web page came where the hub lists files; check HF_ENDPOINT, and whether a \
                 proxy or a login page answers in its place"
                    .to_owned()
            } else {
                format!("the hub's list of files cannot be read: {error}; check HF_ENDPOINT")
            })
        })?;
        if !is_commit(&listing.sha) {
            return Err(answer(format!(
                "'{}' is no commit",
                listing.sha.escape_debug()
            )));
        }
        let id = listing.id.and_then(|id| id.parse::<RepoId>().ok());
        let files = listing.siblings.into_iter();
        let files = files.filter(|file| is_safe_path(&file.rfilename));
        Ok(Listing {
            // A renamed repository answers with another name, but is found by this one.
            repo: id
                .filter(|id| repo.is_same(id))
                .unwrap_or_else(|| repo.clone()),
            commit: listing.sha,
            files: files
                .map(|file| RepoFile {
                    path: file.rfilename,
                    n_bytes: file.size,
                })
                .collect(),
        })
    }

    /// Size and hash of a file.
    pub(crate) fn metadata(&self, listing: &Listing, path: &str) -> Result<FileMetadata, HubError> {
        let address = self.resolve(listing, path);
        let sent = self.send(Method::Head, &address, None, RedirectPolicy::SameOrigin)?;
        let headers = if sent.status().is_redirection() {
            sent.headers().clone()
        } else {
            self.expect(&listing.repo, &address, sent)?
                .headers()
                .clone()
        };
        let missing = |what: &str| HubError::Answer {
            url: address.clone(),
            reason: format!("the answer has no usable {what}"),
        };
        if let Some(commit) = header(&headers, "x-repo-commit")
            && commit != listing.commit
        {
            return Err(HubError::Answer {
                url: address,
                reason: format!("the file is of commit {}", commit.escape_debug()),
            });
        }
        let etag = header(&headers, "x-linked-etag").or_else(|| header(&headers, "etag"));
        let size = header(&headers, "x-linked-size").or_else(|| header(&headers, "content-length"));
        Ok(FileMetadata {
            etag: etag.and_then(ETag::parse).ok_or_else(|| missing("ETag"))?,
            n_bytes: size
                .and_then(|size| size.parse().ok())
                .ok_or_else(|| missing("size"))?,
        })
    }

    /// The bytes of a file from `offset` on.
    pub(crate) fn open(
        &self,
        listing: &Listing,
        path: &str,
        offset: u64,
    ) -> Result<Download, OpenError> {
        let address = self.resolve(listing, path);
        let range = (offset > 0).then(|| format!("bytes={offset}-"));
        let sent = self.send(
            Method::Get,
            &address,
            range.as_deref(),
            RedirectPolicy::Everywhere,
        );
        let response = sent.map_err(|error| match error {
            HubError::Unreachable { host, reason } => OpenError::Retry(format!("{host}: {reason}")),
            other => OpenError::Final(other),
        })?;
        let status = response.status();
        let offset = match status {
            StatusCode::PARTIAL_CONTENT => {
                let range = header(response.headers(), "content-range").unwrap_or_default();
                let first = range.strip_prefix("bytes ").and_then(|r| r.split_once('-'));
                if first.and_then(|(first, _)| first.parse().ok()) != Some(offset) {
                    return Err(OpenError::NoSuchRange);
                }
                offset
            }
            StatusCode::RANGE_NOT_SATISFIABLE => return Err(OpenError::NoSuchRange),
            _ if status.is_server_error() || status == StatusCode::REQUEST_TIMEOUT => {
                return Err(OpenError::Retry(format!("the server answers {status}")));
            }
            _ => 0,
        };
        let response = self.expect(&listing.repo, &address, response);
        let body = response.map_err(OpenError::Final)?.into_body();
        Ok(Download {
            reader: Box::new(body.into_reader()),
            offset,
        })
    }

    fn resolve(&self, listing: &Listing, path: &str) -> String {
        let path = url::escape_path(path);
        let Listing { repo, commit, .. } = listing;
        format!("{}/{repo}/resolve/{commit}/{path}", self.config.endpoint)
    }

    /// Sends a request and follows redirects.
    fn send(
        &self,
        method: Method,
        address: &str,
        range: Option<&str>,
        follow: RedirectPolicy,
    ) -> Result<Response<Body>, HubError> {
        let endpoint = url::origin(&self.config.endpoint);
        let answer = |reason: String| HubError::Answer {
            url: address.to_owned(),
            reason,
        };
        let mut target = address.to_owned();
        for _ in 0..=MAX_REDIRECTS {
            let mut request = match method {
                Method::Get => self.agent.get(&target),
                Method::Head => self.agent.head(&target),
            };
            request = request.header("accept-encoding", "identity");
            if let Some(range) = range {
                request = request.header("range", range);
            }
            if let Some(token) = &self.config.token
                && url::origin(&target) == endpoint
            {
                request = request.header("authorization", token.header());
            }
            let response = request
                .call()
                .map_err(|error| unreachable(&target, &error))?;
            if !response.status().is_redirection() {
                return Ok(response);
            }
            let location = header(response.headers(), "location")
                .ok_or_else(|| answer("redirected to nowhere".to_owned()))?;
            let next = url::redirect(&target, location).map_err(answer)?;
            if follow == RedirectPolicy::SameOrigin && url::origin(&next) != endpoint {
                return Ok(response);
            }
            target = next;
        }
        Err(answer(format!(
            "redirected more than {MAX_REDIRECTS} times"
        )))
    }

    /// Turns the codes of refusals into errors that suggest what to do.
    fn expect(
        &self,
        repo: &RepoId,
        address: &str,
        response: Response<Body>,
    ) -> Result<Response<Body>, HubError> {
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let endpoint = self.config.endpoint.clone();
        let code = header(response.headers(), "x-error-code").unwrap_or_default();
        let has_token = self.config.token.is_some();
        let repo = repo.clone();
        let refused = status == StatusCode::UNAUTHORIZED || status == StatusCode::FORBIDDEN;
        if refused && code == "GatedRepo" {
            let then = if has_token {
                "with the account of your token, and wait until access is granted"
            } else {
                "then set HF_TOKEN to a token of that account"
            };
            return Err(HubError::Gated {
                endpoint,
                repo,
                then,
            });
        }
        if refused || code == "RepoNotFound" || status == StatusCode::NOT_FOUND && code.is_empty() {
            let hint = if has_token {
                "check the name, and whether the token may read it"
            } else {
                "check the name; for a private one, set HF_TOKEN"
            };
            return Err(HubError::NoRepository {
                endpoint,
                repo,
                hint,
            });
        }
        let message = header(response.headers(), "x-error-message").unwrap_or_default();
        let wait = header(response.headers(), "retry-after");
        let detail = match (status, wait) {
            (StatusCode::TOO_MANY_REQUESTS, Some(wait)) => {
                format!(
                    ", too many requests; try again in {} s",
                    wait.escape_debug()
                )
            }
            _ if message.is_empty() && status.is_server_error() => {
                "; try again later, the fault is there".to_owned()
            }
            _ if message.is_empty() => String::new(),
            _ => format!(": {}", message.escape_debug()),
        };
        Err(HubError::Status {
            url: address.to_owned(),
            status: status.as_u16(),
            detail,
        })
    }
}

/// The certificates that this machine trusts, or else Mozilla's.
pub(crate) fn root_certificates() -> RootCerts {
    let found = rustls_native_certs::load_native_certs().certs;
    if found.is_empty() {
        return RootCerts::WebPki;
    }
    let owned = found
        .iter()
        .map(|der| Certificate::from_der(der).to_owned());
    RootCerts::Specific(Arc::new(owned.collect()))
}

fn unreachable(address: &str, error: &ureq::Error) -> HubError {
    let host = url::origin(address).unwrap_or_else(|| address.to_owned());
    match certificate_error(error) {
        Some(reason @ CertificateError::UnknownIssuer) => HubError::Untrusted {
            host,
            reason: reason.to_string(),
            hint: "; if the authority that signed its certificate is yours, set SSL_CERT_FILE to a \
                   PEM file of trusted certificates that has it",
        },
        Some(reason) => HubError::Untrusted {
            host,
            reason: reason.to_string(),
            hint: "",
        },
        None => HubError::Unreachable {
            host,
            reason: error.to_string(),
        },
    }
}

/// The fault of the server's certificate, where that is why there is no connection.
fn certificate_error(error: &ureq::Error) -> Option<&CertificateError> {
    let error = match error {
        ureq::Error::Rustls(error) => error,
        ureq::Error::Io(error) => error.get_ref()?.downcast_ref()?,
        _ => return None,
    };
    match error {
        rustls::Error::InvalidCertificate(reason) => Some(reason),
        _ => None,
    }
}

fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// A commit is also the name of a folder in the cache.
fn is_commit(text: &str) -> bool {
    (7..=64).contains(&text.len()) && text.chars().all(|c| c.is_ascii_hexdigit())
}

/// True if a path stays within the folder that it is joined to.
fn is_safe_path(path: &str) -> bool {
    let is_name = |piece: &str| !piece.is_empty() && piece != "." && piece != "..";
    let allowed = |c: char| c != '\\' && c != ':' && !c.is_control();
    path.split('/').all(is_name) && path.chars().all(allowed)
}

/// The hub's description of a repository.
#[derive(Debug, Deserialize)]
struct ModelInfo {
    id: Option<String>,
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Debug, Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_from_a_server_cannot_leave_its_folder() {
        for safe in ["a.gguf", "Q4/a b.gguf", "..a/.b"] {
            assert!(is_safe_path(safe), "{safe}");
        }
        for unsafe_path in [
            "", "/a", "a//b", "../a", "a/../b", "a/.", "a\\b", "C:a", "a\nb",
        ] {
            assert!(!is_safe_path(unsafe_path), "{unsafe_path}");
        }
        assert!(is_commit("0123456789abcdef"));
        assert!(!is_commit("../../../../etc"));
    }
}
