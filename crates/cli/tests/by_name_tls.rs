//! Models by name over TLS: a server whose certificate an authority made for the test has signed.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use crate::server::HubServer;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};

const REPO: &str = "owner/tiny-GGUF";

/// An authority, and a file with its certificate.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    file: PathBuf,
}

impl Authority {
    fn new(dir: &Path, name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let file = dir.join(name);
        std::fs::write(&file, issuer.pem()).unwrap();
        Self { issuer, file }
    }

    /// What a server of this name needs to speak TLS.
    fn server_config(&self, name: &str) -> Arc<ServerConfig> {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new([name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let key = PrivatePkcs8KeyDer::from(key.serialize_der());
        let config = ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], key.into());
        Arc::new(config.unwrap())
    }
}

/// A hub and its content server at https://localhost, with certificates of this name.
fn serve(authority: &Authority, name: &str) -> HubServer {
    let config = authority.server_config(name);
    HubServer::start_over("https://localhost", REPO, move |stream| {
        let mut tls = StreamOwned::new(ServerConnection::new(Arc::clone(&config)).ok()?, stream);
        // A client that does not trust the certificate hangs up.
        tls.conn.complete_io(&mut tls.sock).ok()?;
        Some(Box::new(tls))
    })
}

/// The exit code of `cellar pull`, and what it prints to stdout and stderr.
fn pull(server: &HubServer, home: &Path, trusted: &Path) -> (i32, String, String) {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("cellar"));
    for variable in [
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "SSL_CERT_DIR",
    ] {
        command.env_remove(variable);
    }
    command
        .args(["pull", REPO])
        .env("HF_HOME", home)
        .env("HF_ENDPOINT", &server.endpoint)
        .env("HF_TOKEN", "hf_secret")
        .env("SSL_CERT_FILE", trusted)
        .env("NO_PROXY", "localhost")
        .stdin(Stdio::null());
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let code = output.status.code().unwrap();
    (code, text(&output.stdout), text(&output.stderr))
}

#[test]
fn a_model_is_pulled_from_a_server_whose_authority_is_trusted() {
    let home = tempfile::tempdir().unwrap();
    let authority = Authority::new(home.path(), "authority.pem");
    let server = serve(&authority, "localhost");
    let bytes = vec![7; 100_000];
    server
        .add("tiny-Q8_0.gguf", &bytes)
        .require_token("hf_secret");
    let (code, stdout, stderr) = pull(&server, home.path(), &authority.file);
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(std::fs::read(stdout.trim_end()).unwrap(), bytes);
    let requests = server.requests();
    // The content server has another port, and does not get the token: it checks that itself.
    assert!(
        requests.iter().any(|request| request.is_content),
        "{requests:?}"
    );
    assert!(
        server.endpoint.starts_with("https://"),
        "{}",
        server.endpoint
    );
}

#[test]
fn a_server_that_cannot_be_trusted_is_refused() {
    let home = tempfile::tempdir().unwrap();
    let ours = Authority::new(home.path(), "ours.pem");
    let other = Authority::new(home.path(), "other.pem");
    for (name, trusted, why) in [
        (
            "localhost",
            &other,
            "UnknownIssuer; if the authority that signed its certificate is yours, set SSL_CERT_FILE",
        ),
        (
            "elsewhere.example",
            &ours,
            "certificate not valid for name \"localhost\"",
        ),
    ] {
        let server = serve(&ours, name);
        server.add("tiny-Q8_0.gguf", &[7; 100]);
        let (code, stdout, stderr) = pull(&server, home.path(), &trusted.file);
        assert_eq!((code, &*stdout), (1, ""), "{stderr}");
        let start = format!("error: cannot trust {}: ", server.endpoint);
        assert!(
            stderr.starts_with(&start) && stderr.contains(why),
            "{stderr}"
        );
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        // Nothing was asked, and so the token was not sent.
        assert!(server.requests().is_empty());
    }
}
