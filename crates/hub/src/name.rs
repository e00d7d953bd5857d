//! Names of models: `owner/name`, with a quantization after a colon where the repository has
//! several.
//!
//! Invariant: a name can be part of a path and of a URL as it is.

use std::fmt;
use std::str::FromStr;

use crate::error::HubError;

/// The hub's limit for owner and name together.
const MAX_LENGTH: usize = 96;

/// A model repository: `owner/name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RepoId {
    owner: String,
    name: String,
}

impl RepoId {
    /// The name of its folder in a cache: `models--owner--name`.
    pub(crate) fn folder(&self) -> String {
        format!("models--{}--{}", self.owner, self.name)
    }

    /// From the name of its folder; `None` where that is none of a model.
    pub(crate) fn from_folder(folder: &str) -> Option<Self> {
        let (owner, name) = folder.strip_prefix("models--")?.split_once("--")?;
        format!("{owner}/{name}").parse().ok()
    }

    /// True if the hub takes both for the same repository: it ignores case.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.owner.eq_ignore_ascii_case(&other.owner) && self.name.eq_ignore_ascii_case(&other.name)
    }
}

impl fmt::Display for RepoId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.name)
    }
}

impl FromStr for RepoId {
    type Err = HubError;

    fn from_str(text: &str) -> Result<Self, HubError> {
        let wrong = |reason| HubError::Name {
            text: text.to_owned(),
            reason,
        };
        let (owner, name) = text.split_once('/').ok_or(wrong("it has no '/'"))?;
        if text.len() > MAX_LENGTH {
            return Err(wrong("it is longer than 96 characters"));
        }
        for part in [owner, name] {
            check_part(part).map_err(wrong)?;
        }
        Ok(Self {
            owner: owner.to_owned(),
            name: name.to_owned(),
        })
    }
}

/// The hub's rules for the two halves of a repository's name.
fn check_part(part: &str) -> Result<(), &'static str> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if part.is_empty() {
        return Err("a half of it is empty");
    }
    if !part.chars().all(allowed) {
        return Err("only letters, digits, '-', '_' and '.' are allowed");
    }
    if part.starts_with(['-', '.']) || part.ends_with(['-', '.']) {
        return Err("its halves begin and end with a letter, a digit or '_'");
    }
    if part.contains("--") || part.contains("..") {
        return Err("'--' and '..' are not allowed");
    }
    Ok(())
}

/// A model: a repository, and which of its files where it has several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelName {
    /// The repository.
    pub repo: RepoId,
    /// The quantization (`Q4_K_M`, in any case), the name of a file, or `safetensors`.
    pub quant: Option<String>,
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.quant {
            Some(quant) => write!(f, "{}:{quant}", self.repo),
            None => self.repo.fmt(f),
        }
    }
}

impl FromStr for ModelName {
    type Err = HubError;

    /// Parses `owner/name` or `owner/name:quant`. The address of a repository's page is a name,
    /// too.
    fn from_str(text: &str) -> Result<Self, HubError> {
        let wrong = |reason| HubError::Name {
            text: text.to_owned(),
            reason,
        };
        let name = text.strip_prefix("https://").unwrap_or(text);
        let site = ["huggingface.co/", "hf.co/"];
        let name = site
            .iter()
            .find_map(|s| name.strip_prefix(s))
            .unwrap_or(name);
        let (repo, quant) = match name.split_once(':') {
            Some((repo, quant)) => (repo, Some(quant)),
            None => (name, None),
        };
        let repo = repo.parse().map_err(|error| match error {
            HubError::Name { reason, .. } => wrong(reason),
            other => other,
        })?;
        if let Some(quant) = quant {
            let allowed = |c: char| !c.is_control() && !c.is_whitespace() && c != '/' && c != ':';
            if quant.is_empty() {
                return Err(wrong("nothing follows the ':'"));
            }
            if !quant.chars().all(allowed) {
                return Err(wrong(
                    "a quantization or the name of a file follows the ':'",
                ));
            }
        }
        Ok(Self {
            repo,
            quant: quant.map(str::to_owned),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_and_printed() {
        for text in [
            "a/b",
            "Qwen/Qwen3-0.6B-GGUF:Q8_0",
            "_/b_.c",
            "a/b:model.v2-q4",
        ] {
            let name: ModelName = text.parse().unwrap();
            assert_eq!(name.to_string(), text);
        }
        for text in ["https://huggingface.co/a/b:Q4_0", "hf.co/a/b:Q4_0"] {
            let name: ModelName = text.parse().unwrap();
            assert_eq!(name.to_string(), "a/b:Q4_0");
        }
    }

    #[test]
    fn what_is_no_name_is_refused_with_the_reason() {
        let long = format!("a/{}", "b".repeat(95));
        let cases = [
            ("model.gguf", "it has no '/'"),
            ("/etc/passwd", "a half of it is empty"),
            ("a/", "a half of it is empty"),
            ("a/b/c", "only letters"),
            ("../b", "begin and end"),
            ("a/b.", "begin and end"),
            ("a/b..c", "'..' are not"),
            ("a--b/c", "'--' and"),
            ("a/b:", "nothing follows"),
            ("a/b:Q4/../x", "follows the ':'"),
            ("a/b c", "only letters"),
            ("a/\u{1b}[2J", "only letters"),
            (&long, "longer than 96"),
        ];
        for (text, wanted) in cases {
            let error = text.parse::<ModelName>().unwrap_err().to_string();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }

    #[test]
    fn folders_are_those_of_other_tools() {
        let repo: RepoId = "openai/gpt-oss-20b".parse().unwrap();
        assert_eq!(repo.folder(), "models--openai--gpt-oss-20b");
        assert_eq!(
            RepoId::from_folder("models--openai--gpt-oss-20b"),
            Some(repo)
        );
        for folder in ["datasets--a--b", "models--gpt2", "models--..--x", ".locks"] {
            assert_eq!(RepoId::from_folder(folder), None, "{folder}");
        }
    }
}
