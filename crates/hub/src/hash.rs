//! The hashes with which the hub names its files.
//!
//! Large files are named by their SHA-256, small ones by the SHA-1 of a git blob: of `blob`, their
//! size, a zero byte, and their contents.

use std::fmt::Write;

use sha2::Digest;

/// The hub's id of a file: its `ETag`, and with that the name of its blob in a cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ETag(String);

impl ETag {
    /// From the header's value; `None` where it cannot be the name of a file.
    pub(crate) fn parse(header: &str) -> Option<Self> {
        let text = header.trim();
        let text = text.strip_prefix("W/").unwrap_or(text).trim_matches('"');
        let allowed = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
        let is_name = !text.is_empty() && text.len() <= 128 && text.chars().all(allowed);
        is_name.then(|| Self(text.to_owned()))
    }

    /// The name of the blob.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// The hasher for the file's bytes; `None` where the name is no hash that is known.
    pub(crate) fn hasher(&self, n_bytes: u64) -> Option<Hasher> {
        if !self.0.chars().all(|c| c.is_ascii_hexdigit()) {
            return None;
        }
        match self.0.len() {
            64 => Some(Hasher::Sha256(sha2::Sha256::new())),
            40 => {
                let header = format!("blob {n_bytes}\0");
                Some(Hasher::GitBlob(sha1::Sha1::new_with_prefix(header)))
            }
            _ => None,
        }
    }
}

/// A hash in the making.
#[derive(Clone, Debug)]
pub(crate) enum Hasher {
    /// Of a large file.
    Sha256(sha2::Sha256),
    /// Of a small file.
    GitBlob(sha1::Sha1),
}

impl Hasher {
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Sha256(_) => "sha256",
            Self::GitBlob(_) => "git blob hash",
        }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hash) => hash.update(bytes),
            Self::GitBlob(hash) => hash.update(bytes),
        }
    }

    /// In hexadecimal digits.
    pub(crate) fn finish(self) -> String {
        match self {
            Self::Sha256(hash) => hex(&hash.finalize()),
            Self::GitBlob(hash) => hex(&hash.finalize()),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_sha256sum_and_git() {
        let of = |etag: &str, text: &str| {
            let mut hasher = ETag::parse(etag)
                .unwrap()
                .hasher(text.len() as u64)
                .unwrap();
            hasher.update(text.as_bytes());
            hasher.finish()
        };
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(of(abc, "abc"), abc);
        // echo hello | git hash-object --stdin
        let hello = "ce013625030ba8dba906f756967f9e9ca394464a";
        assert_eq!(of(&format!("W/\"{hello}\""), "hello\n"), hello);
    }

    #[test]
    fn an_etag_is_a_file_name() {
        for wrong in ["", "\"\"", "../x", "a/b", "a\0", ".locks", &"a".repeat(129)] {
            assert_eq!(ETag::parse(wrong), None, "{wrong}");
        }
        // A server that names files otherwise: nothing to verify but the size.
        assert!(ETag::parse("\"5f-618\"").unwrap().hasher(3).is_none());
    }
}
