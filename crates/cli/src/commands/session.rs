//! A text that goes on in another process: what a run begins with, and what it leaves.
//!
//! Invariant: what is left can always be gone on from: a token that was chosen but not evaluated is
//! part of it. Knows nothing of how a text is told.

use std::fs;
use std::io::Read;
use std::path::Path;

use anyhow::Context;
use engine::{Engine, SaveOptions};
use kv_core::backend::BoxedBackend;
use kv_core::memory::{RestoreInto, Seqs};
use kv_core::state::{SavedState, SeqTokens};
use kv_core::{KvType, SeqId, TokenId};

use crate::args::RunArgs;
use crate::aside;
use crate::failure::usage;
use crate::machine;

/// The sequence of a run.
const SEQ: SeqId = SeqId(0);

/// Whether what was asked for can be done from a saved state.
///
/// # Errors
/// A usage error that says why not, and what can be done instead.
pub(super) fn check(args: &RunArgs) -> anyhow::Result<()> {
    if args.session.load_state.is_none() {
        return Ok(());
    }
    if args.long_context.group_attention_factor.is_some() {
        return usage(
            "--load-state cannot be used with --group-attention-factor: a state does not say which of \
             its tokens share positions; go on without groups, or read the whole text again",
        );
    }
    if args.system.is_some() {
        return usage(
            "--load-state cannot be used with --system: a system message comes before all others, and \
             the saved text has begun; give it in the run that saves",
        );
    }
    Ok(())
}

/// The bytes of a file that is a state, if it is one.
///
/// # Errors
/// Where it cannot be read, or is larger than this machine's memory.
pub(super) fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    let cannot = || format!("cannot read '{}'", path.display());
    if path.is_dir() {
        anyhow::bail!("{}: it is a directory", cannot());
    }
    let mut file = fs::File::open(path).with_context(cannot)?;
    let n_bytes = file.metadata().with_context(cannot)?.len();
    if let Some(available) = machine::available_memory()
        && n_bytes > available
    {
        let (wanted, free) = (machine::bytes(n_bytes), machine::bytes(available));
        anyhow::bail!(
            "{}: it takes {wanted}, but this machine has {free} free",
            cannot()
        );
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).with_context(cannot)?;
    Ok(bytes)
}

/// Restores the one sequence of a state, and returns its tokens.
///
/// # Errors
/// Where the file is no state, another model's, or has no place; nothing has changed then.
pub(super) fn load(engine: &mut Engine<BoxedBackend>, path: &Path) -> anyhow::Result<SeqTokens> {
    let bytes = read(path)?;
    let cannot = || format!("cannot load '{}'", path.display());
    let state = SavedState::parse(&bytes).with_context(cannot)?;
    let seqs = state.snapshot().seqs();
    let into = match (seqs.first(), seqs.len()) {
        (Some(from), 1) => RestoreInto::One { from, to: SEQ },
        // Nothing was evaluated yet: all of its tokens wait.
        (None, _) => RestoreInto::All,
        _ => anyhow::bail!(
            "{}: it holds the sequences {seqs}, and one is needed",
            cannot()
        ),
    };
    let restored = engine.restore_state(&state, into).with_context(cannot)?;
    let own = restored.tokens.into_iter().find(|tokens| tokens.seq == SEQ);
    Ok(own.unwrap_or_default())
}

/// Saves the sequence of a run, in place of a file of this name, and returns its bytes.
///
/// # Errors
/// Where it cannot be written; a file of this name is then what it was.
pub(super) fn save(
    engine: &Engine<BoxedBackend>,
    path: &Path,
    (evaluated, pending): (Vec<TokenId>, Vec<TokenId>),
    kv_type: Option<KvType>,
) -> anyhow::Result<u64> {
    let tokens = [SeqTokens {
        seq: SEQ,
        evaluated,
        pending,
    }];
    let options = SaveOptions {
        seqs: Seqs::One(SEQ),
        tokens: &tokens,
        kv_type,
    };
    aside::replace(path, |file| Ok(engine.save_state(&options, file)?))
}
