//! Where the cache is, which server is asked, and with which token: the variables of Hugging Face's
//! own tools.
//!
//! Invariant: the token is never printed. Opens no connection.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::HubError;

/// The server that is asked unless `HF_ENDPOINT` names another.
const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

/// A secret that proves who downloads.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// The value of the header `Authorization`.
    pub(crate) fn header(&self) -> String {
        format!("Bearer {}", self.0)
    }

    fn parse(variable: &'static str, text: &str) -> Result<Option<Self>, HubError> {
        let text = text.trim();
        if text.is_empty() {
            return Ok(None);
        }
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(HubError::Environment {
                variable,
                reason: "the token has characters that no token has".to_owned(),
            });
        }
        Ok(Some(Self(text.to_owned())))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// The permission to download.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// They are.
    Online,
    /// They are not, because of this environment variable.
    Offline(&'static str),
}

/// The way the hub is used.
#[derive(Clone, Debug)]
pub struct HubConfig {
    /// The cache, shared with Hugging Face's tools.
    pub cache: PathBuf,
    /// The server: scheme, host and port, without a slash at the end.
    pub endpoint: String,
    /// Sent to the endpoint, and to no other server.
    pub token: Option<Token>,
    /// The permission to download.
    pub access: Access,
    /// The time that the first retry of a broken connection waits; each further one waits twice as
    /// long.
    pub retry_wait: Duration,
    /// The time that a silent server is waited for.
    pub read_timeout: Duration,
}

impl HubConfig {
    /// Reads `HF_HUB_CACHE`, `HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN`, `HF_TOKEN_PATH`, the token file
    /// and `HF_HUB_OFFLINE`.
    ///
    /// # Errors
    /// If a variable cannot be used, or no home directory is known and none of them replaces it.
    pub fn from_env() -> Result<Self, HubError> {
        Self::from_variables(|name| std::env::var_os(name))
    }

    /// Reads the same variables from `get`.
    ///
    /// # Errors
    /// As [`HubConfig::from_env`].
    pub fn from_variables(get: impl Fn(&str) -> Option<OsString>) -> Result<Self, HubError> {
        let cache = cache_folder(&get)?;
        let variables = Variables { get: &get };
        let home = variables.hf_home();
        Ok(Self {
            cache,
            endpoint: variables.endpoint()?,
            token: variables.token(home.as_deref())?,
            access: variables.access(),
            retry_wait: Duration::from_secs(1),
            read_timeout: Duration::from_secs(30),
        })
    }
}

/// The cache's folder.
pub(crate) fn cache_folder(get: &dyn Fn(&str) -> Option<OsString>) -> Result<PathBuf, HubError> {
    let variables = Variables { get };
    let named = variables.path("HF_HUB_CACHE");
    let named = named.or_else(|| variables.path("HUGGINGFACE_HUB_CACHE"));
    let cache = named.or_else(|| Some(variables.hf_home()?.join("hub")));
    let cache = cache.ok_or_else(|| HubError::Environment {
        variable: "HF_HOME",
        reason: "no home directory is known; set it to a directory for models".to_owned(),
    })?;
    Ok(std::path::absolute(&cache).unwrap_or(cache))
}

struct Variables<'a> {
    get: &'a dyn Fn(&str) -> Option<OsString>,
}

impl Variables<'_> {
    /// A variable that is set and not empty.
    fn value(&self, name: &str) -> Option<OsString> {
        (self.get)(name).filter(|value| !value.is_empty())
    }

    /// A path, in which `~/` is the home directory.
    fn path(&self, name: &str) -> Option<PathBuf> {
        let path = PathBuf::from(self.value(name)?);
        let in_home = path.strip_prefix("~").ok();
        Some(match in_home.zip(self.home()) {
            Some((rest, home)) => Path::new(&home).join(rest),
            None => path,
        })
    }

    /// The home directory, which Windows names otherwise.
    fn home(&self) -> Option<OsString> {
        self.value("HOME").or_else(|| self.value("USERPROFILE"))
    }

    fn hf_home(&self) -> Option<PathBuf> {
        let in_cache = || Some(self.path("XDG_CACHE_HOME")?.join("huggingface"));
        let in_home = || {
            let home = PathBuf::from(self.home()?);
            Some(home.join(".cache").join("huggingface"))
        };
        self.path("HF_HOME").or_else(in_cache).or_else(in_home)
    }

    fn endpoint(&self) -> Result<String, HubError> {
        let Some(value) = self.value("HF_ENDPOINT") else {
            return Ok(DEFAULT_ENDPOINT.to_owned());
        };
        let text = value.to_string_lossy();
        let endpoint = text.trim().trim_end_matches('/');
        let uri: Option<ureq::http::Uri> = endpoint.parse().ok();
        let is_server = |uri: &ureq::http::Uri| {
            let scheme = uri.scheme_str();
            uri.host().is_some() && (scheme == Some("http") || scheme == Some("https"))
        };
        match uri.filter(is_server) {
            Some(_) => Ok(endpoint.to_owned()),
            None => Err(HubError::Environment {
                variable: "HF_ENDPOINT",
                reason: format!(
                    "'{}' is no address; one like {DEFAULT_ENDPOINT} is needed",
                    endpoint.escape_debug()
                ),
            }),
        }
    }

    fn token(&self, home: Option<&Path>) -> Result<Option<Token>, HubError> {
        for variable in ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"] {
            if let Some(value) = self.value(variable)
                && let Some(token) = Token::parse(variable, &value.to_string_lossy())?
            {
                return Ok(Some(token));
            }
        }
        if self.is_true("HF_HUB_DISABLE_IMPLICIT_TOKEN") {
            return Ok(None);
        }
        let file = self.path("HF_TOKEN_PATH");
        let Some(file) = file.or_else(|| Some(home?.join("token"))) else {
            return Ok(None);
        };
        match std::fs::read_to_string(file) {
            Ok(text) => Token::parse("HF_TOKEN_PATH", &text),
            // Most people have none.
            Err(_) => Ok(None),
        }
    }

    fn access(&self) -> Access {
        let variables = ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"];
        let set = variables.into_iter().find(|name| self.is_true(name));
        set.map_or(Access::Online, Access::Offline)
    }

    fn is_true(&self, name: &str) -> bool {
        let value = self.value(name).unwrap_or_default();
        let value = value.to_string_lossy().to_ascii_uppercase();
        ["1", "ON", "YES", "TRUE"].contains(&value.trim())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(variables: &[(&str, &str)]) -> Result<HubConfig, HubError> {
        HubConfig::from_variables(|name| {
            let found = variables.iter().find(|(n, _)| *n == name);
            found.map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn the_cache_is_where_other_tools_have_it() {
        let cases: [(&[(&str, &str)], &str); 5] = [
            (&[("HOME", "/h")], "/h/.cache/huggingface/hub"),
            (
                &[("HOME", "/h"), ("XDG_CACHE_HOME", "/c")],
                "/c/huggingface/hub",
            ),
            (&[("HOME", "/h"), ("HF_HOME", "~/hf")], "/h/hf/hub"),
            (&[("HF_HOME", "/a"), ("HF_HUB_CACHE", "/b")], "/b"),
            (&[("HF_HOME", "/a"), ("HF_HUB_CACHE", "")], "/a/hub"),
        ];
        for (variables, wanted) in cases {
            let wanted = std::path::absolute(wanted).unwrap();
            assert_eq!(config(variables).unwrap().cache, wanted);
        }
        let error = config(&[]).unwrap_err().to_string();
        assert!(error.starts_with("HF_HOME: no home directory"), "{error}");
    }

    #[test]
    fn the_token_comes_from_a_variable_or_a_file_and_is_not_printed() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().to_str().unwrap();
        assert_eq!(config(&[("HF_HOME", home)]).unwrap().token, None);
        std::fs::write(dir.path().join("token"), "hf_file\n").unwrap();
        let header = |variables: &[(&str, &str)]| {
            let token = config(variables).unwrap().token?;
            assert_eq!(format!("{token:?}"), "Token(…)");
            Some(token.header())
        };
        assert_eq!(header(&[("HF_HOME", home)]).unwrap(), "Bearer hf_file");
        let both = [("HF_HOME", home), ("HF_TOKEN", " hf_variable ")];
        assert_eq!(header(&both).unwrap(), "Bearer hf_variable");
        let none = [("HF_HOME", home), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")];
        assert_eq!(header(&none), None);
        let error = config(&[("HF_HOME", home), ("HF_TOKEN", "hf\nsecret")]);
        let error = error.unwrap_err().to_string();
        assert_eq!(
            error,
            "HF_TOKEN: the token has characters that no token has"
        );
    }

    #[test]
    fn offline_mode_and_endpoint() {
        let with = |name, value| config(&[("HOME", "/h"), (name, value)]);
        assert_eq!(with("X", "1").unwrap().access, Access::Online);
        assert_eq!(with("HF_HUB_OFFLINE", "0").unwrap().access, Access::Online);
        let offline = Access::Offline("HF_HUB_OFFLINE");
        assert_eq!(with("HF_HUB_OFFLINE", "yes").unwrap().access, offline);
        assert_eq!(with("X", "").unwrap().endpoint, "https://huggingface.co");
        let mirror = with("HF_ENDPOINT", "http://localhost:8080/").unwrap();
        assert_eq!(mirror.endpoint, "http://localhost:8080");
        for wrong in ["localhost", "ftp://a", "http://", "https:// a"] {
            let error = with("HF_ENDPOINT", wrong).unwrap_err().to_string();
            assert!(error.contains("is no address"), "{wrong}: {error}");
        }
    }
}
