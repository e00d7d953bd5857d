//! What goes into a run and what comes out: borrowed slices in, reusable buffers out.
//!
//! Knows nothing of how the values were found; executors check lengths against the graph's shape.

use kv_core::memory::{BatchVisibility, PartInputs, StateGroup};
use kv_core::visibility::Visibility;
use kv_core::window::Window;
use kv_graph::GraphShape;

use crate::{BackendError, CancelFlag, RunProgress};

/// The inputs of one run.
#[derive(Clone, Copy, Debug, Default)]
pub struct GraphInputs<'a> {
    /// Tokens and outputs of the run; `None` for those of the program's graph. Fewer need a backend
    /// that declares it
    /// ([`Backend::program_capacities`](crate::Backend::program_capacities)).
    pub shape: Option<GraphShape>,
    /// Token ids. Where embeddings are given, they count for graphs alone that take both.
    pub tokens: &'a [u32],
    /// Embedding rows one after the other; empty where tokens are given.
    pub embeddings: &'a [f32],
    /// Position of each token.
    pub positions: &'a [u32],
    /// Type of each token.
    pub token_types: &'a [u32],
    /// Position, row and column of each token; empty where the graph takes text only.
    pub coordinates: &'a [[u32; 3]],
    /// Rows whose logits are wanted, ascending.
    pub output_rows: &'a [u32],
    /// One entry for each part of the memory.
    pub parts: &'a [PartInputs],
    /// One entry for each window through which tokens see their own ubatch; empty without such
    /// layers.
    pub batch: &'a [BatchVisibility],
    /// The recurrent state that each row continues; empty without recurrent layers.
    pub states: &'a [StateGroup],
    /// Cancels the run; `None` where it cannot be cancelled.
    pub cancel: Option<&'a CancelFlag>,
    /// Takes how far the run has come; `None` where it is not followed.
    pub progress: Option<&'a RunProgress>,
}

impl<'a> GraphInputs<'a> {
    /// The visibility of its own ubatch through `window`; `None` where it was not given.
    pub fn batch_visibility(&self, window: Window) -> Option<&'a Visibility> {
        let found = self.batch.iter().find(|b| b.window == window);
        found.map(|b| &b.visibility)
    }

    /// Tokens and outputs of the run of a program whose graph has this shape.
    ///
    /// # Errors
    /// [`BackendError::Input`] where the run has more of them.
    pub fn shape_within(&self, program: GraphShape) -> Result<GraphShape, BackendError> {
        let shape = self.shape.unwrap_or(program);
        if shape.fits(program) {
            Ok(shape)
        } else {
            Err(BackendError::Input {
                input: "shape",
                reason: format!(
                    "{} tokens and {} outputs, the program is for {} and {} at most",
                    shape.n_tokens, shape.n_outputs, program.n_tokens, program.n_outputs
                ),
            })
        }
    }

    /// Checks that the run may go on: to be called between its steps.
    ///
    /// # Errors
    /// [`BackendError::Cancelled`].
    pub fn check_cancelled(&self) -> Result<(), BackendError> {
        if self.cancel.is_some_and(CancelFlag::is_cancelled) {
            Err(BackendError::Cancelled)
        } else {
            Ok(())
        }
    }

    /// Reports that so many steps of the run are done.
    pub fn report_step(&self, done: usize, n_steps: usize) {
        if let Some(progress) = self.progress {
            let count = |n| u32::try_from(n).unwrap_or(u32::MAX);
            progress.report(count(done), count(n_steps));
        }
    }
}

/// The results of one run, one buffer for each output of the graph. Buffers keep their capacity
/// from run to run.
#[derive(Clone, Debug, Default)]
pub struct GraphOutputs {
    /// Values of each output, row after row.
    pub values: Vec<Vec<f32>>,
}

impl GraphOutputs {
    /// Makes room for the outputs of these sizes and hands out their buffers.
    pub fn resize(&mut self, sizes: impl ExactSizeIterator<Item = usize>) -> &mut [Vec<f32>] {
        self.values.resize_with(sizes.len(), Vec::new);
        for (buffer, size) in self.values.iter_mut().zip(sizes) {
            buffer.resize(size, 0.0);
        }
        &mut self.values
    }

    /// The first output: the logits of a language model, `[outputs, vocab]`.
    pub fn first(&self) -> &[f32] {
        self.values.first().map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_cancelled_and_followed() {
        let (cancel, progress) = (CancelFlag::default(), RunProgress::default());
        let inputs = GraphInputs {
            cancel: Some(&cancel),
            progress: Some(&progress),
            ..GraphInputs::default()
        };
        inputs.check_cancelled().unwrap();
        inputs.report_step(3, 4);
        assert_eq!(progress.fraction(), 0.75);
        cancel.cancel();
        let cancelled = inputs.check_cancelled().unwrap_err();
        assert!(matches!(cancelled, BackendError::Cancelled));
        GraphInputs::default().check_cancelled().unwrap();
    }

    #[test]
    fn visibility_is_found_by_its_window() {
        let seen = |window, n_rows| {
            let mut visibility = Visibility::default();
            visibility.n_rows = n_rows;
            BatchVisibility { window, visibility }
        };
        let batch = [seen(Window::Full, 1), seen(Window::Sliding(3), 2)];
        let inputs = GraphInputs {
            batch: &batch,
            ..GraphInputs::default()
        };
        let found = |window| inputs.batch_visibility(window).map(|seen| seen.n_rows);
        assert_eq!(found(Window::Sliding(3)), Some(2));
        assert_eq!(found(Window::Sliding(4)), None);
    }

    #[test]
    fn outputs_have_the_sizes_that_were_asked_for() {
        let mut outputs = GraphOutputs::default();
        outputs.resize([2, 1].into_iter())[0][1] = 5.0;
        assert_eq!(outputs.first(), [0.0, 5.0]);
        assert_eq!(outputs.resize([3].into_iter()).len(), 1);
        assert_eq!(outputs.first().len(), 3);
    }
}
