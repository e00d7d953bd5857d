//! Encoding sources: what a model with an encoder attends over in addition to a text.
//!
//! Invariant: a source is computed once; what layers attend over stays in the memory. Knows nothing
//! of how a text follows.

use kv_core::backend::{Backend, CancelFlag};
use kv_core::batch::Batch;
use kv_core::memory::Memory;
use kv_core::{SeqId, TokenId};
use model_core::architecture::SourceEncoder;

use crate::decode::Engine;
use crate::error::EngineError;
use crate::rows_out::Embeddings;
use crate::runner::RowsOut;

impl<B: Backend, M: Memory + Clone> Engine<B, M> {
    /// Encodes the sources of sequences, each whole, before tokens of those are decoded. What
    /// layers attend over is stored; the last rows of the entries whose output is wanted come out.
    ///
    /// # Errors
    /// [`EngineError::NoEncoder`]; [`EngineError::WrongTokens`] where the batch is none of
    /// [`TokensOf::Source`](kv_core::batch::TokensOf::Source); [`EngineError::Batch`] where a
    /// sequence has a source already, or one is longer than a ubatch; as [`Engine::decode`].
    pub fn encode(&mut self, batch: &Batch) -> Result<Embeddings<'_>, EngineError> {
        self.encode_or_cancel(batch, None)
    }

    /// As [`Engine::encode`], until `cancel` is set.
    ///
    /// # Errors
    /// [`EngineError::Cancelled`]; as [`Engine::encode`].
    pub fn encode_until(
        &mut self,
        batch: &Batch,
        cancel: &CancelFlag,
    ) -> Result<Embeddings<'_>, EngineError> {
        self.encode_or_cancel(batch, Some(cancel))
    }

    /// Encodes a prompt as the source of a sequence that has none, and gives the tokens with which
    /// its text begins; `None` where it has one, or models of this kind have none.
    pub(crate) fn encode_prompt(
        &mut self,
        seq: SeqId,
        prompt: &[TokenId],
        cancel: &CancelFlag,
    ) -> Result<Option<Vec<TokenId>>, EngineError> {
        if !self.memory.takes_sources() || self.memory.source_positions(seq).is_some() {
            return Ok(None);
        }
        let Some(SourceEncoder { start, .. }) = self.runner.model.source_encoder() else {
            return Err(self.no_encoder());
        };
        self.encode_until(&Batch::source(seq, prompt.iter().copied()), cancel)?;
        Ok(Some(start))
    }

    fn encode_or_cancel(
        &mut self,
        batch: &Batch,
        cancel: Option<&CancelFlag>,
    ) -> Result<Embeddings<'_>, EngineError> {
        if !self.memory.takes_sources() {
            return Err(self.no_encoder());
        }
        self.evaluate(batch, RowsOut::Sources, cancel)?;
        Ok(Embeddings {
            values: &self.runner.rows_out,
            dim: self.runner.row_width(),
        })
    }

    fn no_encoder(&self) -> EngineError {
        let architecture = self.runner.model.architecture().to_owned();
        EngineError::NoEncoder { architecture }
    }
}
