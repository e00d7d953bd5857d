//! [`Tls`]: the certificate with which the server's connections are encrypted.
//!
//! Invariant: a certificate without its key is found out when it is read, before anything is
//! served. A renewed one is taken for new connections; where it cannot be used, the one before it
//! stays. Knows no HTTP.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{Error as PemError, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::server::TlsStream;

/// The time between two looks at the files.
const CHECK_TIME: Duration = Duration::from_secs(60);

/// A certificate with its key, and the files that they are in.
#[derive(Clone)]
pub struct Tls(Arc<TlsState>);

struct TlsState {
    certificate: PathBuf,
    key: PathBuf,
    current: Mutex<Current>,
}

struct Current {
    acceptor: TlsAcceptor,
    /// The files as they were when they were read last, with whatever success.
    stamps: [Stamp; 2],
    /// When they were looked at last.
    checked: Instant,
}

/// What tells a file from the one that was there before; `None` where there is none.
type Stamp = Option<(SystemTime, u64)>;

impl Tls {
    /// Reads PEM files: the certificate with those that signed it after it, and its key.
    ///
    /// # Errors
    /// With the name of the file that cannot be read or has no such thing, or where the key is of
    /// another certificate.
    pub fn read(certificate: &Path, key: &Path) -> io::Result<Self> {
        // Before they are read: what is written meanwhile is seen at the next look.
        let stamps = [certificate, key].map(stamp);
        let current = Current {
            acceptor: read(certificate, key)?,
            stamps,
            checked: Instant::now(),
        };
        Ok(Self(Arc::new(TlsState {
            certificate: certificate.to_owned(),
            key: key.to_owned(),
            current: Mutex::new(current),
        })))
    }

    /// Reads the files again, for connections that come from now on.
    ///
    /// # Errors
    /// Those of [`Tls::read`]; the certificate is then the one before.
    pub fn reload(&self) -> io::Result<()> {
        let mut current = self.lock();
        current.stamps = self.stamps();
        current.acceptor = read(&self.0.certificate, &self.0.key)?;
        Ok(())
    }

    /// Encrypts a connection.
    pub(crate) async fn accept<S>(&self, stream: S) -> io::Result<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        self.acceptor_at(Instant::now()).accept(stream).await
    }

    /// The acceptor of a new connection. The files are looked at once in a while.
    fn acceptor_at(&self, now: Instant) -> TlsAcceptor {
        let is_changed = {
            let mut current = self.lock();
            let is_due = now.saturating_duration_since(current.checked) >= CHECK_TIME;
            if is_due {
                current.checked = now;
            }
            is_due && current.stamps != self.stamps()
        };
        if is_changed {
            match self.reload() {
                Ok(()) => tracing::info!("the certificate has changed, and was read again"),
                Err(error) => {
                    tracing::error!(%error, "the certificate has changed: the one before it stays");
                }
            }
        }
        self.lock().acceptor.clone()
    }

    fn stamps(&self) -> [Stamp; 2] {
        [&self.0.certificate, &self.0.key].map(|path| stamp(path))
    }

    fn lock(&self) -> MutexGuard<'_, Current> {
        self.0
            .current
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
    }
}

fn stamp(path: &Path) -> Stamp {
    let metadata = fs::metadata(path).ok()?;
    Some((metadata.modified().ok()?, metadata.len()))
}

fn read(certificate: &Path, key: &Path) -> io::Result<TlsAcceptor> {
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
    Ok(TlsAcceptor::from(Arc::new(config)))
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

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    /// Writes a certificate that is new, and its key.
    fn renew(certificate: &Path, key: &Path) {
        let pair = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(["localhost".to_owned()]).unwrap();
        fs::write(certificate, params.self_signed(&pair).unwrap().pem()).unwrap();
        fs::write(key, pair.serialize_pem()).unwrap();
        // Later than any file before it, however coarse the times of the file system are.
        static LATER: Mutex<u64> = Mutex::new(0);
        let mut later = LATER.lock().unwrap();
        *later += 10;
        let time = SystemTime::now() + Duration::from_secs(*later);
        for path in [certificate, key] {
            let file = fs::File::options().write(true).open(path).unwrap();
            file.set_modified(time).unwrap();
        }
    }

    #[test]
    fn a_renewed_certificate_is_taken_within_a_minute_and_a_broken_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let [certificate, key] = ["cert.pem", "key.pem"].map(|name| dir.path().join(name));
        renew(&certificate, &key);
        let tls = Tls::read(&certificate, &key).unwrap();
        let mut now = Instant::now();
        let first = tls.acceptor_at(now);
        let is = |one: &TlsAcceptor, other: &TlsAcceptor| Arc::ptr_eq(one.config(), other.config());
        renew(&certificate, &key);
        assert!(is(&first, &tls.acceptor_at(now)), "looked at already");
        now += CHECK_TIME;
        let second = tls.acceptor_at(now);
        assert!(!is(&first, &second));
        now += CHECK_TIME;
        assert!(is(&second, &tls.acceptor_at(now)), "nothing has changed");

        fs::write(&certificate, "nonsense").unwrap();
        now += CHECK_TIME;
        assert!(is(&second, &tls.acceptor_at(now)));
        assert!(tls.reload().is_err());
        fs::remove_file(&key).unwrap();
        now += CHECK_TIME;
        assert!(is(&second, &tls.acceptor_at(now)));
        renew(&certificate, &key);
        now += CHECK_TIME;
        assert!(!is(&second, &tls.acceptor_at(now)));
    }
}
