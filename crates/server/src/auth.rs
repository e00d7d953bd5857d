//! [`Keys`]: who may use the server, and [`Tenant`]: who shares cached prefixes with whom.
//!
//! Invariant: keys are held as SHA-256 hashes and compared in constant time, each with all. Two keys
//! are two tenants, whose prefixes are never shared.

use std::io;
use std::path::Path;

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use engine::serve::Salt;
use sha2::{Digest, Sha256};
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

use crate::error::ApiError;

/// The keys that a server takes.
#[derive(Clone, Default)]
pub struct Keys {
    /// Empty where none is needed.
    hashes: Vec<[u8; 32]>,
}

/// Whose request it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tenant {
    hash: [u8; 32],
}

impl Keys {
    /// No key is needed; all requests are of one tenant.
    pub fn none() -> Self {
        Self::default()
    }

    /// One key a line; empty lines and lines that begin with `#` are passed over.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] where there is no key, or a key has white space in it.
    pub fn parse(text: &str) -> io::Result<Self> {
        let invalid = |message: String| io::Error::new(io::ErrorKind::InvalidData, message);
        let lines = (1..).zip(text.lines().map(str::trim));
        let mut hashes = Vec::new();
        for (number, key) in lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#')) {
            if key.contains(|c: char| c.is_whitespace() || !c.is_ascii()) {
                let message = format!("line {number}: a key is one word of ASCII characters");
                return Err(invalid(message));
            }
            hashes.push(Sha256::digest(key.as_bytes()).into());
        }
        match hashes.is_empty() {
            true => Err(invalid("there is no key in it".to_owned())),
            false => Ok(Self { hashes }),
        }
    }

    /// The keys in a file.
    ///
    /// # Errors
    /// Where it cannot be read, and as [`Keys::parse`], with the file's name.
    pub fn read(path: &Path) -> io::Result<Self> {
        let keys = std::fs::read_to_string(path).and_then(|text| Self::parse(&text));
        keys.map_err(|error| {
            let message = format!("cannot use the key file '{}': {error}", path.display());
            io::Error::new(error.kind(), message)
        })
    }

    /// Whether a key is needed.
    pub fn are_needed(&self) -> bool {
        !self.hashes.is_empty()
    }

    /// How many there are.
    pub fn n_keys(&self) -> usize {
        self.hashes.len()
    }

    /// Whose request this is, by the key in `Authorization: Bearer` or `x-api-key`.
    ///
    /// # Errors
    /// [`ApiError::unauthorized`].
    pub fn tenant(&self, headers: &HeaderMap) -> Result<Tenant, ApiError> {
        if !self.are_needed() {
            return Ok(Tenant { hash: [0; 32] });
        }
        let given = key_of(headers).unwrap_or_default();
        let hash: [u8; 32] = Sha256::digest(given).into();
        let (mut found, mut tenant) = (Choice::from(0), [0u8; 32]);
        // All keys are compared, whichever is right.
        for known in &self.hashes {
            let is_same = known.ct_eq(&hash);
            found |= is_same;
            for (to, from) in tenant.iter_mut().zip(known) {
                to.conditional_assign(from, is_same);
            }
        }
        match bool::from(found) {
            true => Ok(Tenant { hash: tenant }),
            false => Err(ApiError::unauthorized()),
        }
    }
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Keys({})", self.hashes.len())
    }
}

impl Tenant {
    /// Who shares cached prefixes: requests of this tenant with the same salt of their own.
    pub fn salt(&self, narrowed_by: Option<&str>) -> Salt {
        let mut hasher = Sha256::new();
        hasher.update(self.hash);
        if let Some(salt) = narrowed_by {
            hasher.update([1]);
            hasher.update(salt.as_bytes());
        }
        let hash = hasher.finalize();
        Salt(
            hash.iter()
                .take(8)
                .fold(0, |salt, &byte| salt << 8 | u64::from(byte)),
        )
    }
}

fn key_of(headers: &HeaderMap) -> Option<&[u8]> {
    if let Some(key) = headers.get("x-api-key") {
        return Some(key.as_bytes());
    }
    let value = headers.get(AUTHORIZATION)?.as_bytes();
    let (scheme, key) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then_some(key)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(name, HeaderValue::from_str(value).unwrap());
        headers
    }

    #[test]
    fn only_known_keys_open() {
        let keys = Keys::parse("# two\n first \n\nsecond\n").unwrap();
        let first = keys
            .tenant(&headers("authorization", "Bearer first"))
            .unwrap();
        let second = keys.tenant(&headers("x-api-key", "second")).unwrap();
        assert_ne!(first.salt(None), second.salt(None));
        assert_ne!(first.salt(None), first.salt(Some("")));
        assert_ne!(first.salt(Some("a")), second.salt(Some("a")));
        assert_eq!(
            first,
            keys.tenant(&headers("authorization", "bearer first"))
                .unwrap()
        );
        for wrong in [
            "Bearer firs",
            "Bearer first2",
            "Bearer ",
            "first",
            "Basic first",
        ] {
            assert!(
                keys.tenant(&headers("authorization", wrong)).is_err(),
                "{wrong}"
            );
        }
        assert!(keys.tenant(&HeaderMap::new()).is_err());
        assert!(!format!("{keys:?}").contains("first"));
    }

    #[test]
    fn without_keys_everybody_is_one_tenant() {
        let keys = Keys::none();
        let anybody = keys.tenant(&HeaderMap::new()).unwrap();
        assert_eq!(anybody, keys.tenant(&headers("x-api-key", "any")).unwrap());
    }

    #[test]
    fn files_without_keys_are_refused() {
        assert!(Keys::parse("\n# none\n").is_err());
        assert!(
            Keys::parse("two words")
                .unwrap_err()
                .to_string()
                .contains("line 1")
        );
        let missing = Keys::read(Path::new("/nowhere/keys"))
            .unwrap_err()
            .to_string();
        assert!(missing.contains("'/nowhere/keys'"), "{missing}");
    }
}
