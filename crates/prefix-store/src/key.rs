//! Names of groups: keyed hashes of tokens and of all that a group's bytes depend on.
//!
//! ```text
//! chain[0]  32 zero bytes
//! chain[i]  SHA-256("cellar chain 1" ‖ chain[i-1] ‖ n_tokens:u32 ‖ token:u32 …)
//! name      HMAC-SHA-256(name key,
//!               "cellar group 1" ‖ identity fields ‖ salt:u64 ‖ kind:u8 ‖ chain[i])
//! ```
//!
//! Numbers are little-endian; a field of text has its length before it. Invariant: two groups have
//! the same name only if they have the same tokens before and in them, the same identity, the same
//! salt and the same key. Without the key a name says nothing about tokens.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use crate::error::StoreError;

/// Tokens of a group: a multiple of every usual size of a router's block.
pub const GROUP_TOKENS: usize = 256;

/// Tokens of a group of what is left of a prefix behind its last whole group.
pub const TAIL_TOKENS: usize = 16;

/// Bytes that a secret has at least.
pub const MIN_SECRET: usize = 32;

/// The most bytes that are read of a file with a secret.
const MAX_SECRET: u64 = 4096;

pub(crate) type HmacSha256 = Hmac<Sha256>;

/// The secret of a store: who has it can name, seal and open groups.
#[derive(Clone)]
pub struct StoreKey {
    names: HmacSha256,
    pub(crate) seals: HmacSha256,
}

impl StoreKey {
    /// A key from a secret.
    ///
    /// # Errors
    /// [`StoreError::ShortKey`].
    pub fn new(secret: &[u8]) -> Result<Self, StoreError> {
        let n_bytes = secret.len();
        if n_bytes < MIN_SECRET {
            return Err(StoreError::ShortKey { n_bytes });
        }
        // One secret, two purposes: what is computed for one is of no use for the other.
        let derive = |purpose: &[u8]| {
            let mut mac = HmacSha256::new_from_slice(secret).ok()?;
            mac.update(purpose);
            HmacSha256::new_from_slice(&mac.finalize().into_bytes()).ok()
        };
        // HMAC takes keys of any length.
        let short = StoreError::ShortKey { n_bytes };
        match (derive(b"cellar names"), derive(b"cellar seals")) {
            (Some(names), Some(seals)) => Ok(Self { names, seals }),
            _ => Err(short),
        }
    }

    /// A key of its own.
    ///
    /// # Errors
    /// [`StoreError::System`] where the system has no random bytes.
    pub fn random() -> Result<Self, StoreError> {
        let mut secret = [0; MIN_SECRET];
        getrandom::fill(&mut secret).map_err(|error| {
            let source = io::Error::other(error.to_string());
            StoreError::system("no random bytes", source)
        })?;
        Self::new(&secret)
    }

    /// The key in a file that only its owner reads; an end of line after it does not count.
    ///
    /// # Errors
    /// [`StoreError::System`], [`StoreError::Unsafe`] where others may read or write the file, and
    /// [`StoreError::ShortKey`].
    pub fn read(path: &Path) -> Result<Self, StoreError> {
        let failed =
            |source| StoreError::system(format!("cannot read '{}'", path.display()), source);
        let file = File::open(path).map_err(failed)?;
        check_private(path, &file)?;
        let mut secret = Vec::new();
        file.take(MAX_SECRET)
            .read_to_end(&mut secret)
            .map_err(failed)?;
        while matches!(secret.last(), Some(b'\n' | b'\r')) {
            secret.pop();
        }
        Self::new(&secret)
    }

    /// The key in a file, which is made with a random one where there is none. Of several processes
    /// that make it at the same time, all get the same key.
    ///
    /// # Errors
    /// As [`StoreKey::read`].
    pub fn read_or_make(path: &Path) -> Result<Self, StoreError> {
        match Self::read(path) {
            Err(StoreError::System { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            other => return other,
        }
        let failed =
            |source| StoreError::system(format!("cannot make '{}'", path.display()), source);
        let mut random = [0; MIN_SECRET + 8];
        getrandom::fill(&mut random)
            .map_err(|error| failed(io::Error::other(error.to_string())))?;
        let (secret, number) = random.split_at(MIN_SECRET);
        let hex = |bytes: &[u8]| {
            let digits = bytes.iter().map(|byte| format!("{byte:02x}"));
            digits.collect::<String>()
        };
        let part = path.with_extension(format!("{}.part", hex(number)));
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let mut file = options.open(&part).map_err(failed)?;
        let line = format!("{}\n", hex(secret));
        let written = file.write_all(line.as_bytes());
        // A link is made whole or not at all, and never over a key that is there.
        let linked = written
            .and_then(|()| file.sync_all())
            .and_then(|()| fs::hard_link(&part, path));
        let _gone = fs::remove_file(&part); // whether it was linked is what counts
        match linked {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(failed(error)),
            _ => Self::read(path),
        }
    }
}

impl fmt::Debug for StoreKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoreKey(…)")
    }
}

/// Refuses a file that others may read or write.
#[cfg(unix)]
fn check_private(path: &Path, file: &File) -> Result<(), StoreError> {
    use std::os::unix::fs::MetadataExt;
    let unsafe_ = |reason| StoreError::Unsafe {
        path: path.to_owned(),
        reason,
    };
    let found = file.metadata();
    let found =
        found.map_err(|source| StoreError::system("cannot look at the key file", source))?;
    if !found.is_file() {
        return Err(unsafe_("a key is a regular file"));
    }
    if found.mode() & 0o077 != 0 {
        return Err(unsafe_("others may read or write it: chmod 600"));
    }
    Ok(())
}

#[cfg(not(unix))]
fn check_private(_path: &Path, _file: &File) -> Result<(), StoreError> {
    Ok(())
}

/// The name of a group.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupName(pub [u8; 32]);

impl GroupName {
    /// The name that has these 64 hexadecimal digits, in small letters.
    pub fn from_hex(digits: &str) -> Option<Self> {
        let digits = <&[u8; 64]>::try_from(digits.as_bytes()).ok()?;
        let value = |digit: u8| match digit {
            b'0'..=b'9' => Some(digit - b'0'),
            b'a'..=b'f' => Some(digit - b'a' + 10),
            _ => None,
        };
        let mut name = [0; 32];
        for (byte, pair) in name.iter_mut().zip(digits.as_chunks::<2>().0) {
            *byte = value(pair[0])? << 4 | value(pair[1])?;
        }
        Some(Self(name))
    }
}

impl fmt::Display for GroupName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for GroupName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GroupName({self})")
    }
}

/// What is in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum GroupKind {
    /// The rows that full attention has of the tokens of one group.
    Rows = 1,
    /// What windows and recurrent states keep after the last token: with it a prefix can be
    /// continued there.
    End = 2,
    /// Nothing: that it is there says that an [`End`](Self::End) is, after at most
    /// [`GROUP_TOKENS`] more tokens.
    Mark = 3,
}

/// All that the bytes of a group depend on besides tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity<'a> {
    /// The version of the program: another may compute other bits.
    pub version: &'a str,
    /// The backend that computes: another computes other bits.
    pub backend: &'a str,
    /// What tells the model from all others.
    pub fingerprint: &'a [u8],
    /// How keys, values and states are stored.
    pub kv_types: &'a str,
    /// The adapters that are applied to the model.
    pub adapters: &'a str,
}

/// Names the groups of one sequence of tokens, one after the other.
#[derive(Clone)]
pub struct GroupNamer {
    /// The name key, the identity and the salt.
    begun: HmacSha256,
    chain: [u8; 32],
}

impl GroupNamer {
    /// A namer at the beginning of a text. Only requests with the same salt share groups.
    pub fn new(key: &StoreKey, identity: &Identity<'_>, salt: u64) -> Self {
        let mut begun = key.names.clone();
        begun.update(b"cellar group 1");
        for field in [
            identity.version.as_bytes(),
            identity.backend.as_bytes(),
            identity.fingerprint,
            identity.kv_types.as_bytes(),
            identity.adapters.as_bytes(),
        ] {
            begun.update(&(field.len() as u64).to_le_bytes());
            begun.update(field);
        }
        begun.update(&salt.to_le_bytes());
        Self {
            begun,
            chain: [0; 32],
        }
    }

    /// Goes on behind these tokens: [`GROUP_TOKENS`] of them, or fewer behind the last whole group.
    pub fn push(&mut self, tokens: &[u32]) {
        let mut hash = Sha256::new();
        hash.update(b"cellar chain 1");
        hash.update(self.chain);
        hash.update((tokens.len() as u32).to_le_bytes());
        tokens
            .iter()
            .for_each(|token| hash.update(token.to_le_bytes()));
        self.chain = hash.finalize().into();
    }

    /// The name of the group that ends here.
    pub fn name(&self, kind: GroupKind) -> GroupName {
        let mut mac = self.begun.clone();
        mac.update(&[kind as u8]);
        mac.update(&self.chain);
        GroupName(mac.finalize().into_bytes().into())
    }

    /// The names of all whole groups of a text's tokens.
    pub fn names(mut self, tokens: &[u32], kind: GroupKind) -> Vec<GroupName> {
        self.push_chunks::<GROUP_TOKENS>(tokens, kind)
    }

    /// The names of the small groups of the tokens behind the last whole group.
    pub fn tail_names(mut self, tokens: &[u32], kind: GroupKind) -> Vec<GroupName> {
        self.push_chunks::<TAIL_TOKENS>(tokens, kind)
    }

    fn push_chunks<const N: usize>(&mut self, tokens: &[u32], kind: GroupKind) -> Vec<GroupName> {
        let chunks = tokens.as_chunks::<N>().0.iter();
        let names = chunks.map(|chunk| {
            self.push(chunk);
            self.name(kind)
        });
        names.collect()
    }
}

impl fmt::Debug for GroupNamer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GroupNamer(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Identity<'_> = Identity {
        version: "0.1.0",
        backend: "cpu",
        fingerprint: b"model",
        kv_types: "f16",
        adapters: "",
    };

    fn key(byte: u8) -> StoreKey {
        StoreKey::new(&[byte; MIN_SECRET]).unwrap()
    }

    fn names(key: &StoreKey, identity: &Identity<'_>, salt: u64) -> Vec<GroupName> {
        let tokens: Vec<u32> = (0..700).collect();
        GroupNamer::new(key, identity, salt).names(&tokens, GroupKind::Rows)
    }

    /// The whole groups, and each name depends on everything that it should.
    #[test]
    fn names_differ_where_bytes_could() {
        let here = names(&key(1), &HERE, 7);
        assert_eq!(here.len(), 2);
        assert_eq!(here, names(&key(1), &HERE, 7));
        let others = [
            Identity {
                version: "0.1.1",
                ..HERE
            },
            Identity {
                backend: "cuda",
                ..HERE
            },
            Identity {
                fingerprint: b"other",
                ..HERE
            },
            Identity {
                kv_types: "q8_0",
                ..HERE
            },
            Identity {
                adapters: "a",
                ..HERE
            },
            // The same bytes in other fields.
            Identity {
                version: "0.1.0c",
                backend: "pu",
                ..HERE
            },
        ];
        let mut all = vec![
            here.clone(),
            names(&key(2), &HERE, 7),
            names(&key(1), &HERE, 8),
        ];
        all.extend(others.iter().map(|other| names(&key(1), other, 7)));
        let mut flat: Vec<GroupName> = all.concat();
        flat.sort();
        flat.dedup();
        assert_eq!(flat.len(), 2 * all.len());
    }

    #[test]
    fn a_name_depends_on_all_tokens_before_it_and_on_none_after() {
        let mut tokens: Vec<u32> = (0..768).collect();
        let namer = GroupNamer::new(&key(1), &HERE, 0);
        let before = namer.clone().names(&tokens, GroupKind::Rows);
        tokens[300] += 1;
        let after = namer.clone().names(&tokens, GroupKind::Rows);
        assert_eq!(before[0], after[0]);
        assert!(before[1] != after[1] && before[2] != after[2]);
        // Where a text is cut into groups is part of the name.
        let (mut one, mut two) = (namer.clone(), namer);
        one.push(&[1, 2]);
        two.push(&[1]);
        two.push(&[2]);
        assert_ne!(one.name(GroupKind::End), two.name(GroupKind::End));
        assert_ne!(one.name(GroupKind::End), one.name(GroupKind::Rows));
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        let name = names(&key(1), &HERE, 0)[0];
        assert_eq!(GroupName::from_hex(&name.to_string()), Some(name));
        for wrong in [
            "",
            "zz",
            &name.to_string()[1..],
            &name.to_string().to_uppercase(),
        ] {
            assert_eq!(GroupName::from_hex(wrong), None, "{wrong}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn key_files_are_private_and_made_once() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        assert!(matches!(
            StoreKey::read(&path),
            Err(StoreError::System { .. })
        ));
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let path = path.clone();
                std::thread::spawn(move || StoreKey::read_or_make(&path).unwrap())
            })
            .collect();
        let keys: Vec<StoreKey> = threads.into_iter().map(|t| t.join().unwrap()).collect();
        let first = names(&keys[0], &HERE, 0);
        assert!(keys.iter().all(|key| names(key, &HERE, 0) == first));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let refused = StoreKey::read(&path).unwrap_err();
        assert!(refused.to_string().contains("chmod 600"), "{refused}");
        fs::write(&path, "short\n").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        let short = StoreKey::read(&path).unwrap_err();
        assert!(
            matches!(short, StoreError::ShortKey { n_bytes: 5 }),
            "{short}"
        );
    }
}
