//! [`Tls`]: the certificate with which the server's connections are encrypted.
//!
//! Invariant: a certificate without its key is found out when it is read, before anything is
//! served. Knows no HTTP.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{Error as PemError, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::server::TlsStream;

/// A certificate with its key.
#[derive(Clone)]
pub struct Tls(TlsAcceptor);

impl Tls {
    /// Reads PEM files: the certificate with those that signed it after it, and its key.
    ///
    /// # Errors
    /// With the name of the file that cannot be read or has no such thing, or where the key is of
    /// another certificate.
    pub fn read(certificate: &Path, key: &Path) -> io::Result<Self> {
        let chain = CertificateDer::pem_file_iter(certificate)
            .and_then(Iterator::collect::<Result<Vec<_>, _>>)
            .map_err(|error| unreadable("certificate", certificate, error))?;
        if chain.is_empty() {
            return Err(unreadable(
                "certificate",
                certificate,
                PemError::NoItemsFound,
            ));
        }
        let private = PrivateKeyDer::from_pem_file(key);
        let private = private.map_err(|error| unreadable("private key", key, error))?;
        let provider = Arc::new(ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .and_then(|config| {
                let config = config.with_no_client_auth();
                config.with_single_cert(chain, private)
            });
        let config = config.map_err(|error| {
            let message = format!(
                "cannot use the certificate '{}' with the key '{}': {error}",
                certificate.display(),
                key.display()
            );
            io::Error::new(io::ErrorKind::InvalidData, message)
        })?;
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }

    /// Encrypts a connection.
    pub(crate) async fn accept<S>(&self, stream: S) -> io::Result<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        self.0.accept(stream).await
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
    }
}

fn unreadable(what: &str, path: &Path, error: PemError) -> io::Error {
    let path = path.display();
    let (kind, reason) = match error {
        PemError::Io(error) => (error.kind(), error.to_string()),
        PemError::NoItemsFound => {
            let reason = format!("there is no {what} in it, in the form of PEM");
            (io::ErrorKind::InvalidData, reason)
        }
        error => (io::ErrorKind::InvalidData, error.to_string()),
    };
    io::Error::new(kind, format!("cannot use '{path}' as the {what}: {reason}"))
}
