//! From what was typed to what is done: every default that depends on something, every conflict.
//!
//! Invariant: what comes out can be carried out as it is. Reads prompts; computes nothing.

use std::fs;
use std::io::{IsTerminal, Read};
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use engine::sampler::{Penalties, SamplerConfig};
use engine::{
    AttentionMode, ConfigError, Engine, EngineConfig, EngineError, GroupAttention, LongContext,
    MemoryBudget,
};
use kv_core::KvType;
use kv_core::backend::{BoxedBackend, Profile};
use kv_core::memory::{Streams, SwaSize};
use model_core::architecture::OutputKind;
use model_core::model_file::OpenModel;

use crate::args::{AttentionName, EngineArgs, LongContextArgs, SamplerArgs};
use crate::backends::{self, BackendOptions};
use crate::failure::{UsageError, usage};
use crate::machine;

/// Tokens generated where nobody says how many.
pub(crate) const DEFAULT_N_PREDICT: usize = 256;

/// The longest prompt that is read.
const MAX_TEXT: u64 = 256 << 20;

/// The sampler's configuration.
///
/// # Errors
/// A usage error where a choice makes no sense.
pub(crate) fn sampler(args: &SamplerArgs) -> anyhow::Result<SamplerConfig> {
    let config = SamplerConfig {
        temperature: args.temp,
        top_k: NonZeroU32::new(args.top_k),
        top_p: args.top_p,
        min_p: args.min_p,
        penalties: Penalties {
            last_n: args.repeat_last_n,
            repeat: args.repeat_penalty,
            frequency: args.frequency_penalty,
            presence: args.presence_penalty,
        },
        seed: args.seed.unwrap_or_else(random_seed),
    };
    config
        .check()
        .map_err(|error| UsageError(error.to_string()))?;
    Ok(config)
}

/// What happens when a text gets longer than the context; `n_bos` tokens at its beginning are kept
/// beside those that were asked for.
///
/// # Errors
/// A usage error where groups cannot be formed.
pub(crate) fn long_context(args: &LongContextArgs, n_bos: u32) -> anyhow::Result<LongContext> {
    match args.group_attention_factor {
        Some(factor) => GroupAttention::new(factor, args.group_attention_width)
            .map(LongContext::Group)
            .map_err(|error| UsageError(error.to_string()).into()),
        None if args.context_shift => Ok(LongContext::Shift {
            n_keep: args.keep.saturating_add(n_bos),
        }),
        None => Ok(LongContext::Stop),
    }
}

/// A seed that differs from run to run, short enough to be typed again.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    // Every `RandomState` is seeded by the system.
    RandomState::new().build_hasher().finish() & u64::from(u32::MAX)
}

/// The engine's configuration, but for the number of sequences.
pub(crate) fn engine_config(args: &EngineArgs, default_kv_type: KvType) -> EngineConfig {
    EngineConfig {
        n_ctx: args.ctx,
        n_batch: args.batch,
        n_ubatch: args.ubatch,
        kv_types: args.kv.types(default_kv_type),
        streams: if args.streams {
            Streams::PerSequence
        } else {
            Streams::Shared
        },
        swa: if args.swa_full {
            SwaSize::Full
        } else {
            SwaSize::Window
        },
        n_snapshots: args.snapshots,
        attention: match args.attention {
            AttentionName::Fused => AttentionMode::Fused,
            AttentionName::Plain => AttentionMode::Plain,
        },
        budget: budget(args),
        ..EngineConfig::default()
    }
}

/// What this machine has free.
fn budget(args: &EngineArgs) -> MemoryBudget {
    match machine::available_memory() {
        Some(available) if !args.no_memory_check => MemoryBudget::Bytes(available),
        _ => MemoryBudget::Unlimited,
    }
}

/// Checks that a model has logits.
///
/// # Errors
/// A usage error where it is an encoder.
pub(crate) fn continues_texts(file: &OpenModel) -> anyhow::Result<()> {
    match file.model().output() {
        OutputKind::Logits => Ok(()),
        OutputKind::Embeddings => usage(format!(
            "'{}' is an encoder: it gives vectors and continues no text; 'cellar embed' prints them",
            file.model().architecture()
        )),
    }
}

/// Opens the backend and loads the model into it.
///
/// # Errors
/// A usage error where the model is an encoder; before anything is allocated, an error where the
/// memory does not fit this machine; else the errors of backend and engine.
pub(crate) fn open_engine(
    file: &OpenModel,
    args: &EngineArgs,
    config: &EngineConfig,
) -> anyhow::Result<Engine<BoxedBackend>> {
    open_profiled_engine(file, args, config, None)
}

/// The same with a backend that adds its steps to a profile, where one is given.
///
/// # Errors
/// As [`open_engine`], and a usage error where the backend cannot profile.
pub(crate) fn open_profiled_engine(
    file: &OpenModel,
    args: &EngineArgs,
    config: &EngineConfig,
    profile: Option<Arc<Profile>>,
) -> anyhow::Result<Engine<BoxedBackend>> {
    continues_texts(file)?;
    let options = BackendOptions {
        n_threads: args.threads,
        activations: args.activations,
        repack: args.repack,
        profile,
    };
    let backend = backends::open(args.backend, options)?;
    let engine = Engine::new(backend, file.model().clone(), file.weights(), config);
    engine.map_err(does_not_fit)
}

/// The machine's numbers for people, where the memory does not fit it.
fn does_not_fit(error: EngineError) -> anyhow::Error {
    let EngineError::Config(ConfigError::OverBudget {
        n_cells,
        wanted,
        available,
        largest_n_ctx,
        ..
    }) = error
    else {
        return error.into();
    };
    let advice = match largest_n_ctx {
        Some(n_ctx) => format!("--ctx {n_ctx} is the largest that fits"),
        None => "no --ctx fits".to_owned(),
    };
    anyhow::anyhow!(
        "a context of {n_cells} cells takes {}, but this machine has {} free; {advice} \
         (--no-memory-check tries anyway)",
        machine::bytes(wanted),
        machine::bytes(available),
    )
}

/// What a text argument, a file and a pipe say, in this order; `None` where they say nothing.
///
/// # Errors
/// Where the file or pipe cannot be read or holds no text.
pub(crate) fn text(argument: Option<&str>, file: Option<&Path>) -> anyhow::Result<Option<String>> {
    if let Some(text) = argument {
        return Ok(Some(text.to_owned()));
    }
    if let Some(path) = file {
        let cannot = || format!("cannot read '{}'", path.display());
        if path.is_dir() {
            anyhow::bail!("{}: it is a directory", cannot());
        }
        let reader = fs::File::open(path).with_context(cannot)?;
        return read_text(reader).with_context(cannot).map(Some);
    }
    let stdin = std::io::stdin();
    if stdin.is_terminal() {
        return Ok(None);
    }
    let text = read_text(stdin.lock()).context("cannot read the text on stdin")?;
    Ok(Some(text).filter(|text| !text.is_empty()))
}

fn read_text(reader: impl Read) -> anyhow::Result<String> {
    let mut text = String::new();
    let n_read = reader.take(MAX_TEXT + 1).read_to_string(&mut text)?;
    if n_read as u64 > MAX_TEXT {
        anyhow::bail!("it is longer than {}", machine::bytes(MAX_TEXT));
    }
    Ok(text)
}

/// A prompt without the line break that editors and `echo` leave at its end.
pub(crate) fn without_last_line_break(mut text: String) -> String {
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    text
}

/// Ids of one sequence, separated by commas or white space.
///
/// # Errors
/// A usage error naming what is no token id.
pub(crate) fn token_ids(list: &str) -> anyhow::Result<Vec<u32>> {
    let separators = |c: char| c == ',' || c.is_whitespace();
    let parts = list.split(separators).filter(|part| !part.is_empty());
    let ids = parts.map(|part| match part.parse() {
        Ok(id) => Ok(id),
        Err(_) => usage(format!(
            "'{part}' is no token id: a number of at least 0 is needed"
        )),
    });
    ids.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_line_break_goes() {
        let cut = |text: &str| without_last_line_break(text.to_owned());
        assert_eq!(cut("a\n\n"), "a\n");
        assert_eq!(cut("a\r\n"), "a");
        assert_eq!(cut("a "), "a ");
    }

    #[test]
    fn token_lists_take_commas_and_spaces() {
        assert_eq!(token_ids("1,2, 3\t4\n").unwrap(), [1, 2, 3, 4]);
        let error = token_ids("1,-2").unwrap_err().to_string();
        assert_eq!(
            error,
            "'-2' is no token id: a number of at least 0 is needed"
        );
        assert!(token_ids("4294967296").is_err());
    }
}
