//! Stores on other machines, by address.
//!
//! ```text
//! redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]
//! s3://BUCKET[/PREFIX][?endpoint=URL&region=NAME]
//! file:///DIRECTORY?max_bytes=N                     of a file system that several machines mount
//! ```
//!
//! The keys of S3 are in `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`.
//!
//! Nothing is connected before the first job, so a store that cannot be reached is no error of the
//! start. Who can write to such a store can remove groups and cost memory for what it sends, and
//! nothing else: names and seals need the key.

mod redis;
mod s3;

use std::time::Duration;

use url::Url;

use crate::directory::{DirectoryConfig, DirectoryStore};
use crate::error::StoreError;
use crate::store::GroupStore;

/// How long a store may take to connect.
const CONNECT_TIME: Duration = Duration::from_secs(2);

/// How long it may say nothing while an answer is awaited.
const SILENCE: Duration = Duration::from_secs(5);

/// Handles of the store at an address: one for each thread of a [`Tier`](crate::Tier).
///
/// # Errors
/// [`StoreError::Url`] with the schemes that there are; for directories as
/// [`DirectoryStore::open`].
pub fn open(url: &str, n_handles: usize) -> Result<Vec<Box<dyn GroupStore>>, StoreError> {
    let parsed = Url::parse(url).map_err(|error| refused(url, error.to_string()))?;
    let handle = || -> Result<Box<dyn GroupStore>, StoreError> {
        Ok(match parsed.scheme() {
            "redis" => Box::new(redis::RedisStore::new(&parsed)?),
            "s3" => Box::new(s3::S3Store::new(&parsed)?),
            "file" => Box::new(DirectoryStore::open(directory(&parsed)?)?),
            other => {
                let known = "redis://, s3:// and file:// are known";
                return Err(refused(
                    url,
                    format!("the scheme '{other}' is not: {known}"),
                ));
            }
        })
    };
    (0..n_handles.max(1)).map(|_| handle()).collect()
}

fn directory(url: &Url) -> Result<DirectoryConfig, StoreError> {
    let path = url.to_file_path();
    let path = path.map_err(|()| refused(url.as_str(), "it names no directory".to_owned()))?;
    let max_bytes = parameter(url, "max_bytes").and_then(|text| text.parse().ok());
    let missing = || refused(url.as_str(), "it needs ?max_bytes=N".to_owned());
    Ok(DirectoryConfig {
        dir: path,
        max_bytes: max_bytes.ok_or_else(missing)?,
    })
}

fn parameter(url: &Url, name: &str) -> Option<String> {
    let mut pairs = url.query_pairs();
    let found = pairs.find(|(key, _)| key == name);
    found.map(|(_, value)| value.into_owned())
}

/// The error of an address, which is shown without its user and password.
fn refused(url: &str, reason: String) -> StoreError {
    let url = match Url::parse(url) {
        Ok(mut parsed) => {
            // An address without a host has neither.
            let _none = parsed.set_username("");
            let _none = parsed.set_password(None);
            parsed.to_string()
        }
        Err(_) => match url.rsplit_once('@') {
            Some((_, rest)) => format!("…@{rest}"),
            None => url.to_owned(),
        },
    };
    StoreError::Url { url, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_addresses_are_refused_without_their_passwords() {
        for (url, reason) in [
            ("nowhere", "relative URL"),
            (
                "mongodb://me:secret@host",
                "redis://, s3:// and file:// are known",
            ),
            ("redis://me:secret@:bad", "empty host"),
            ("s3://", "bucket"),
            ("file:///tmp", "max_bytes"),
        ] {
            let error = open(url, 1).unwrap_err().to_string();
            assert!(error.contains(reason), "{url}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
        assert_eq!(open("redis://127.0.0.1:1", 3).unwrap().len(), 3);
    }
}
