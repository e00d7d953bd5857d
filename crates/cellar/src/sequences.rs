//! What a [`Model`] does with whole sequences: copy, save, restore. Knows nothing of text.

use std::io::Write;

use cellar_engine::{EngineError, SaveOptions};
use kv_core::memory::{Memory, RestoreInto, Seqs};
use kv_core::state::{SavedState, SeqTokens};
use kv_core::{PosRange, SeqId, TokenId};

use crate::error::Error;
use crate::model::Model;

impl Model {
    /// Makes `to` the same text as `from`; where sequences share cells, no row is copied. Returns
    /// how many tokens `to` has now.
    ///
    /// # Errors
    /// [`Error::Engine`]; nothing has changed then.
    pub fn copy(&mut self, from: SeqId, to: SeqId) -> Result<u32, Error> {
        let n_tokens = self.engine_mut().copy(from, to, PosRange::ALL)?;
        let tokens = self.evaluated(from).to_vec();
        self.set_evaluated(to, tokens);
        Ok(n_tokens)
    }

    /// Writes a sequence as a state that [`Model::restore`] takes. Returns its size in bytes.
    ///
    /// # Errors
    /// [`Error::EmptySequence`]; [`Error::Engine`] where it cannot be written.
    pub fn save(&self, seq: SeqId, out: &mut impl Write) -> Result<u64, Error> {
        let memory = self.engine().memory();
        if seq.0 < memory.n_seqs() && memory.positions(seq).is_none() {
            return Err(Error::EmptySequence { seq });
        }
        let tokens = [SeqTokens {
            seq,
            evaluated: self.evaluated(seq).to_vec(),
            pending: Vec::new(),
        }];
        let options = SaveOptions {
            seqs: Seqs::One(seq),
            tokens: &tokens,
            kv_type: None,
            state_type: None,
        };
        Ok(self.engine().save_state(&options, out)?)
    }

    /// Restores the one sequence of a state into `seq`, replacing what it has. Returns its tokens;
    /// those that were chosen but not evaluated are not among them.
    ///
    /// # Errors
    /// [`Error::Engine`] where the state is damaged, another model's, or does not fit;
    /// [`Error::SequencesOfState`] where it has none or several. Nothing has changed then.
    pub fn restore(&mut self, seq: SeqId, state: &[u8]) -> Result<&[TokenId], Error> {
        let state = SavedState::parse(state).map_err(EngineError::State)?;
        let seqs = state.snapshot().seqs();
        let (Some(from), 1) = (seqs.first(), seqs.len()) else {
            let n_seqs = seqs.len();
            return Err(Error::SequencesOfState { n_seqs });
        };
        let into = RestoreInto::One { from, to: seq };
        let restored = self.engine_mut().restore_state(&state, into)?;
        let own = restored.tokens.into_iter().find(|tokens| tokens.seq == seq);
        self.set_evaluated(seq, own.unwrap_or_default().evaluated);
        Ok(self.evaluated(seq))
    }
}
