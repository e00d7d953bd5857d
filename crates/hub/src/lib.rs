//! Models by name: repositories of the Hugging Face Hub, in the cache that other tools share.
//!
//! ```no_run
//! use cellar_hub::{Hub, HubConfig, ModelName};
//!
//! let hub = Hub::new(HubConfig::from_env()?);
//! let name: ModelName = "owner/name:Q4_K_M".parse()?;
//! let pulled = hub.pull(&name, &mut |_event| ())?;
//! println!("{}", pulled.path.display()); // a GGUF file, or a model directory
//! assert_eq!(hub.cache().find(&name)?, pulled.path); // from now on without a network
//! # Ok::<(), cellar_hub::HubError>(())
//! ```
//!
//! | module | what it does |
//! | --- | --- |
//! | `name` | parses `owner/name:quant` |
//! | `config` | reads `HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT` and their relatives |
//! | `variant` | groups the files of a repository into models and chooses one |
//! | `cache` | finds, lists and removes models in the cache |
//! | `client` | HTTP: listings, metadata of files, their bytes |
//! | `download` | one file: lock, resume, verify |
//! | `pull` | one model: all its files, in the right order |
//! | `fetch` | one small file from a public address |
//!
//! Invariants: a blob gets its name only when its size and hash are verified; an interrupted
//! download leaves a part that the next one continues; the token goes to the endpoint alone. Knows
//! neither model formats nor the program.

mod cache;
mod client;
mod config;
mod disk;
mod download;
mod error;
mod fetch;
mod hash;
mod name;
mod pull;
mod url;
mod variant;

pub use cache::{Cache, CachedModel, RemovedModel};
pub use config::{Access, HubConfig, Token};
pub use error::HubError;
pub use fetch::{FetchLimits, fetch_public};
pub use name::{ModelName, RepoId};
pub use pull::{Event, Hub, PulledModel};
pub use variant::{Format, RepoFile, Variant, VariantSize};
