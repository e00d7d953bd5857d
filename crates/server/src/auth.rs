//! [`Keys`]: who may use the server, and [`Tenant`]: who shares cached prefixes with whom.
//!
//! Invariant: keys are held as SHA-256 hashes and compared in constant time, each with all. Two
//! keys are two tenants, whose prefixes are never shared, and each has the class and limits of its
//! line.

use std::io;
use std::num::NonZeroU32;
use std::path::Path;

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use cellar_engine::serve::{Priority, Salt, TenantId, TenantLimits};
use sha2::{Digest, Sha256};
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

use crate::error::ApiError;

/// The keys that a server takes.
#[derive(Clone, Default)]
pub struct Keys {
    /// Empty where none is needed.
    tenants: Vec<Tenant>,
}

/// Whose request it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tenant {
    hash: [u8; 32],
    limits: TenantLimits,
    /// The highest priority of its requests; `None` is any.
    class: Option<Priority>,
    role: Role,
}

/// The rights of a key beyond requests of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Role {
    /// Nothing.
    User,
    /// Load and unload models, and see the requests of all keys.
    #[default]
    Admin,
}

impl Keys {
    /// No key is needed; all requests are of one tenant.
    pub fn none() -> Self {
        Self::default()
    }

    /// One key a line, perhaps with limits after it: `KEY class=batch weight=2 max_running=4
    /// max_queued=16 role=admin`. Empty lines and lines that begin with `#` are passed over. A key
    /// that is the only one is an admin.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] where there is no key, a key has other than ASCII characters,
    /// or a limit is none.
    pub fn parse(text: &str) -> io::Result<Self> {
        let invalid = |message: String| io::Error::new(io::ErrorKind::InvalidData, message);
        let lines = (1..).zip(text.lines().map(str::trim));
        let mut tenants = Vec::new();
        for (number, line) in lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#')) {
            let mut words = line.split_whitespace();
            let key = words.next().unwrap_or_default();
            if !key.is_ascii() {
                let message = format!("line {number}: a key is one word of ASCII characters");
                return Err(invalid(message));
            }
            let tenant = Tenant {
                hash: Sha256::digest(key.as_bytes()).into(),
                role: Role::User,
                ..Tenant::default()
            };
            let tenant = tenant.with_words(words);
            tenants.push(tenant.map_err(|what| invalid(format!("line {number}: {what}")))?);
        }
        match tenants.as_mut_slice() {
            [] => return Err(invalid("there is no key in it".to_owned())),
            [only] => only.role = Role::Admin,
            _ => {}
        }
        Ok(Self { tenants })
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
        !self.tenants.is_empty()
    }

    /// How many there are.
    pub fn n_keys(&self) -> usize {
        self.tenants.len()
    }

    /// Whose request this is, by the key in `Authorization: Bearer` or `x-api-key`.
    ///
    /// # Errors
    /// [`ApiError::unauthorized`].
    pub fn tenant(&self, headers: &HeaderMap) -> Result<Tenant, ApiError> {
        if !self.are_needed() {
            return Ok(Tenant::default());
        }
        let given = key_of(headers).unwrap_or_default();
        let hash: [u8; 32] = Sha256::digest(given).into();
        let (mut found, mut at) = (Choice::from(0), 0u64);
        // All keys are compared, whichever is right.
        for (number, known) in (0..).zip(&self.tenants) {
            let is_same = known.hash.ct_eq(&hash);
            found |= is_same;
            at.conditional_assign(&number, is_same);
        }
        let tenant = self.tenants.get(at as usize).copied();
        match tenant.filter(|_| bool::from(found)) {
            Some(tenant) => Ok(tenant),
            None => Err(ApiError::unauthorized()),
        }
    }
}

impl Keys {
    /// Who this is to the scheduler; `None` where there is no such key any more.
    pub(crate) fn with_id(&self, id: TenantId) -> Option<Tenant> {
        let anybody = (!self.are_needed()).then(Tenant::default);
        let mut all = self.tenants.iter().copied().chain(anybody);
        all.find(|tenant| tenant.id() == id)
    }
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Keys({})", self.tenants.len())
    }
}

impl Tenant {
    /// The same with the class and the limits in the words after a key. An error repeats none of
    /// them: it may be another key.
    fn with_words<'w>(
        mut self,
        words: impl Iterator<Item = &'w str>,
    ) -> Result<Self, &'static str> {
        const FORM: &str = "after a key can be role=admin, class=interactive, class=normal or class=batch, \
                            and weight=N, max_running=N and max_queued=N, each a number from 1 on";
        for word in words {
            let (name, value) = word.split_once('=').ok_or(FORM)?;
            if name == "role" {
                self.role = match value {
                    "admin" => Role::Admin,
                    "user" => Role::User,
                    _ => return Err(FORM),
                };
                continue;
            }
            if name == "class" {
                self.class = Some(match value {
                    "interactive" => Priority::Interactive,
                    "normal" => Priority::Normal,
                    "batch" => Priority::Batch,
                    _ => return Err(FORM),
                });
                continue;
            }
            let number: NonZeroU32 = value.parse().map_err(|_| FORM)?;
            match name {
                "weight" => self.limits.weight = number,
                "max_running" => self.limits.max_running = Some(number),
                "max_queued" => self.limits.max_queued = Some(number),
                _ => return Err(FORM),
            }
        }
        Ok(self)
    }

    /// True if it may load and unload models, and see the requests of all keys.
    pub(crate) fn is_admin(&self) -> bool {
        self.role == Role::Admin
    }

    /// # Errors
    /// [`ApiError::forbidden`] where it is no admin.
    pub(crate) fn check_admin(&self) -> Result<(), ApiError> {
        if self.is_admin() {
            return Ok(());
        }
        Err(ApiError::forbidden(
            "this needs the key of an admin: of several keys, those with 'role=admin' after them in \
             the key file",
        ))
    }

    /// The priority that a request gets which asks for this one: that of its class at most.
    pub(crate) fn priority(&self, asked: Priority) -> Priority {
        self.class.map_or(asked, |class| asked.min(class))
    }

    /// Who it is to the scheduler.
    pub(crate) fn id(&self) -> TenantId {
        TenantId(self.salt(None).0)
    }

    /// What it gets.
    pub(crate) fn limits(&self) -> TenantLimits {
        self.limits
    }

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
    fn a_key_has_the_limits_of_its_line() {
        let keys = Keys::parse("first weight=3 max_queued=5\nsecond  max_running=2\n").unwrap();
        let limits = |key: &str| keys.tenant(&headers("x-api-key", key)).unwrap().limits();
        let number = |n: u32| NonZeroU32::new(n).unwrap();
        let first = TenantLimits {
            weight: number(3),
            max_running: None,
            max_queued: Some(number(5)),
        };
        assert_eq!(limits("first"), first);
        assert_eq!(limits("second").max_running, Some(number(2)));
        assert_eq!(limits("second").weight, number(1));
        for wrong in ["weight", "weight=0", "weight=x", "max=3", "other-key"] {
            let error = Keys::parse(&format!("key {wrong}"))
                .unwrap_err()
                .to_string();
            let repeats = error.contains("other-key") || error.contains("=x");
            assert!(error.contains("line 1") && !repeats, "{error}");
        }
    }

    #[test]
    fn a_class_is_the_highest_priority_of_a_key() {
        let keys = Keys::parse("any\nlow class=batch weight=2\nmid class=normal\n").unwrap();
        let given = |key: &str, asked| {
            keys.tenant(&headers("x-api-key", key))
                .unwrap()
                .priority(asked)
        };
        let (low, mid, high) = (Priority::Batch, Priority::Normal, Priority::Interactive);
        for (key, gets) in [
            ("any", [low, mid, high]),
            ("mid", [low, mid, mid]),
            ("low", [low; 3]),
        ] {
            assert_eq!(
                [low, mid, high].map(|asked| given(key, asked)),
                gets,
                "{key}"
            );
        }
        assert!(Keys::parse("key class=fast").is_err());
    }

    #[test]
    fn of_several_keys_those_with_the_role_are_admins() {
        let is_admin = |keys: &str, key: &str| {
            let keys = Keys::parse(keys).unwrap();
            keys.tenant(&headers("x-api-key", key)).unwrap().is_admin()
        };
        let several = "a\nb role=admin weight=2\nc role=user\n";
        assert!(!is_admin(several, "a") && is_admin(several, "b") && !is_admin(several, "c"));
        assert!(!is_admin("a\nb", "a") && is_admin("# one\na\n", "a"));
        assert!(Keys::none().tenant(&HeaderMap::new()).unwrap().is_admin());
        assert!(Keys::parse("a role=root").is_err());
        let error = Keys::parse("a\nb")
            .unwrap()
            .tenant(&headers("x-api-key", "a"));
        assert_eq!(error.unwrap().check_admin().unwrap_err().status, 403);
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
