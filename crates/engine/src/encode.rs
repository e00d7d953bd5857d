//! Encoding sources: what a model with an encoder attends over in addition to a text.
//!
//! Invariant: a source is computed once; what layers attend over stays in the memory. Knows nothing
//! of how a text follows.

use kv_backend::{Backend, CancelFlag};
use kv_core::batch::Batch;
use kv_core::memory::Memory;

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
