//! Saved states of `cellar run`: loading one before the prompt, saving one after the text.
//!
//! Invariant: every saved state can be continued: a token that was chosen but not evaluated is part
//! of it. Knows nothing of how text is generated.

use std::path::Path;

use anyhow::Context;
use cellar_engine::{Engine, SaveOptions};
use kv_core::SeqId;
use kv_core::backend::BoxedBackend;
use kv_core::memory::{RestoreInto, Seqs};
use kv_core::state::{SavedState, SeqTokens};

use crate::args::{RunArgs, SessionArgs};
use crate::failure::usage;
use crate::{input, output_file};

/// The sequence of a run.
pub(super) const SEQ: SeqId = SeqId(0);

/// Checks that the options work together with a saved state.
///
/// # Errors
/// A usage error with the reason, and what can be done instead.
pub(super) fn check(args: &RunArgs) -> anyhow::Result<()> {
    if let Some(path) = &args.session.save_state {
        output_file::check("--save-state", path)?;
        if args.json && output_file::is_stdout(path) {
            return usage(
                "--save-state - and --json both write to stdout: save the state in a file, or leave \
                 out --json",
            );
        }
    }
    if args.session.load_state.is_none() {
        return Ok(());
    }
    if args.long_context.group_attention_factor.is_some() {
        return usage(
            "--load-state cannot be used with --group-attention-factor: a state does not record which \
             of its tokens share positions; continue without groups, or read the whole text again",
        );
    }
    if args.system.is_some() {
        return usage(
            "--load-state cannot be used with --system: a system message comes before all others, and \
             the saved text has begun already; give it in the run that saves",
        );
    }
    Ok(())
}

/// Restores the one sequence of a state, and returns its tokens.
///
/// # Errors
/// Where the file is not a state, is another model's, or does not fit; nothing has changed then.
pub(super) fn load(engine: &mut Engine<BoxedBackend>, path: &Path) -> anyhow::Result<SeqTokens> {
    let bytes = input::bytes(path)?;
    let cannot = || format!("cannot load '{}'", path.display());
    let state = SavedState::parse(&bytes).with_context(cannot)?;
    let seqs = state.snapshot().seqs();
    let into = match (seqs.first(), seqs.len()) {
        (Some(from), 1) => RestoreInto::One { from, to: SEQ },
        // Nothing was evaluated yet: all of its tokens are pending.
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

/// Saves the sequence of a run, and returns the state's size in bytes.
///
/// # Errors
/// Where it cannot be written; a regular file of this name is then unchanged.
pub(super) fn save(
    engine: &Engine<BoxedBackend>,
    path: &Path,
    tokens: SeqTokens,
    args: &SessionArgs,
) -> anyhow::Result<u64> {
    let tokens = [tokens];
    let options = SaveOptions {
        seqs: Seqs::One(SEQ),
        tokens: &tokens,
        kv_type: args.save_kv_type,
        state_type: args.save_state_type,
    };
    output_file::write(path, |file| Ok(engine.save_state(&options, file)?))
}
