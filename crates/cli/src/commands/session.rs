//! Saved states of `cellar run`: loading one before the prompt, saving one after the text.
//!
//! Invariant: every saved state can be continued: a token that was chosen but not evaluated is part
//! of it. Knows nothing of how text is generated.

use std::path::Path;

use anyhow::Context;
use cellar_engine::serve::{ServiceError, TextRequest, TextStream};
use cellar_engine::session::Session;
use cellar_engine::{Engine, EngineError, SaveOptions};
use kv_backend::BoxedBackend;
use kv_backend::state::{SavedState, SeqTokens};
use kv_core::memory::Seqs;
use kv_core::{SeqId, TokenId};

use crate::args::{RunArgs, SessionArgs};
use crate::failure::usage;
use crate::output_file;

use super::run::with_advice;

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

/// A saved state, before its rows are restored.
pub(super) struct LoadedState<'s> {
    path: &'s Path,
    state: SavedState<'s>,
    /// Its one sequence; `None` where nothing of it was computed.
    pub(super) seq: Option<SeqId>,
    /// The tokens that were computed.
    pub(super) tokens: Vec<TokenId>,
    /// Those that were not.
    pub(super) pending: Vec<TokenId>,
}

impl<'s> LoadedState<'s> {
    /// Reads all but the rows of a state.
    ///
    /// # Errors
    /// Where the bytes are no state, or have several sequences.
    pub(super) fn parse(bytes: &'s [u8], path: &'s Path) -> anyhow::Result<Self> {
        let cannot = || format!("cannot load '{}'", path.display());
        let state = SavedState::parse(bytes).with_context(cannot)?;
        let seqs = state.snapshot().seqs();
        if seqs.len() > 1 {
            anyhow::bail!(
                "{}: it holds the sequences {seqs}, and one is needed",
                cannot()
            );
        }
        let seq = seqs.first();
        let mut all = state.tokens().iter();
        let own = match seq {
            Some(seq) => all.find(|tokens| tokens.seq == seq),
            None => all.next(),
        };
        let own = own.cloned().unwrap_or_default();
        Ok(Self {
            path,
            seq,
            tokens: own.evaluated,
            pending: own.pending,
            state,
        })
    }

    /// The text that goes on behind it. Where nothing was computed, the prompt is all of it.
    ///
    /// # Errors
    /// Where it is another model's, or does not fit; nothing has changed then.
    pub(super) fn restore(
        &self,
        session: &mut Session<BoxedBackend>,
        request: TextRequest,
    ) -> anyhow::Result<TextStream> {
        let fingerprint = session.engine().fingerprint();
        let same = fingerprint.check(self.state.fingerprint());
        same.with_context(|| self.cannot())?;
        let Some(from) = self.seq else {
            return session.submit(request).map_err(with_advice);
        };
        let restored = session.restore(&self.state, from, request);
        restored.map_err(|error| match &error {
            ServiceError::Engine(why) if is_of_state(why) => {
                anyhow::Error::from(error).context(self.cannot())
            }
            _ => with_advice(error),
        })
    }

    fn cannot(&self) -> String {
        format!("cannot load '{}'", self.path.display())
    }
}

/// True if a state is the reason, and no option of the text.
fn is_of_state(error: &EngineError) -> bool {
    matches!(
        error,
        EngineError::State(_) | EngineError::RestoreRows { .. } | EngineError::Backend(_)
    )
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
        seqs: Seqs::One(tokens[0].seq),
        tokens: &tokens,
        kv_type: args.save_kv_type,
        state_type: args.save_state_type,
    };
    output_file::write(path, |file| Ok(engine.save_state(&options, file)?))
}
