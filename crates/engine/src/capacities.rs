//! [`Capacities`]: the shape that a program is compiled for, so that few programs serve all
//! ubatches.
//!
//! Invariant: a ubatch fits the shape that is chosen for it, and one that wants all its outputs
//! gets a shape that has as many outputs as tokens: graphs of such shapes select no rows. Knows
//! neither models nor backends.

use kv_backend::Backend;
use kv_graph::GraphShape;
use model_core::architecture::{Model, ModelError};

use crate::config::Settings;
use crate::error::EngineError;

/// Numbers of tokens that programs are compiled for, ascending; none where each shape is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Capacities(Vec<usize>);

impl Capacities {
    /// Those of a backend's that are below `max_tokens`, the most tokens of a ubatch, and that.
    pub(crate) fn new(declared: &[usize], max_tokens: usize) -> Self {
        if declared.is_empty() {
            return Self::default();
        }
        let smaller = declared.iter().copied().filter(|&n| n < max_tokens);
        Self(smaller.chain([max_tokens]).collect())
    }

    /// Those of a backend for a model, where its graphs' rows can be counted.
    ///
    /// # Errors
    /// [`ModelError`] where the model cannot build its graphs.
    pub(crate) fn of(
        backend: &impl Backend,
        model: &dyn Model,
        max_tokens: usize,
    ) -> Result<Self, ModelError> {
        let declared = backend.program_capacities();
        let shape = |n_outputs| GraphShape {
            n_tokens: 2,
            n_outputs,
        };
        let takes_fewer = |shape| Ok::<_, ModelError>(model.graph(shape)?.row_counts().is_some());
        let is_counted = declared.is_empty() || takes_fewer(shape(1))? && takes_fewer(shape(2))?;
        Ok(if is_counted {
            Self::new(declared, max_tokens)
        } else {
            Self::default()
        })
    }

    /// True if programs serve more shapes than their own.
    pub(crate) fn serve_many(&self) -> bool {
        !self.0.is_empty()
    }

    /// The shape to compile for a ubatch.
    pub(crate) fn shape_for(&self, ubatch: GraphShape) -> GraphShape {
        let GraphShape {
            n_tokens: n,
            n_outputs,
        } = ubatch;
        let smallest = |at_least| self.0.iter().copied().find(|&n| n >= at_least);
        let Some(n_tokens) = smallest(n) else {
            return ubatch;
        };
        let n_outputs = if n_outputs == n {
            n_tokens
        } else {
            smallest(n_outputs).unwrap_or(n_tokens).min(n_tokens - 1)
        };
        GraphShape {
            n_tokens,
            n_outputs,
        }
    }
}

/// Has a device with kernels of its own load those for several texts and for long prompts: its
/// driver may have to compile them, which no request should wait for.
pub(crate) fn load_kernels<B: Backend>(
    backend: &B,
    weights: &B::Weights,
    settings: &Settings,
    model: &dyn Model,
) -> Result<(), EngineError> {
    if !backend.prefers_candidates() {
        return Ok(());
    }
    let most = settings.max_ubatch();
    for n_tokens in [SEVERAL_TEXTS.min(most), most] {
        let shape = GraphShape {
            n_tokens,
            n_outputs: 1,
        };
        backend.compile(&model.graph(shape)?, weights, &settings.layout)?;
    }
    Ok(())
}

/// Tokens of a step of several texts: few enough for the kernels of few tokens.
const SEVERAL_TEXTS: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(n_tokens: usize, n_outputs: usize) -> GraphShape {
        GraphShape {
            n_tokens,
            n_outputs,
        }
    }

    #[test]
    fn every_ubatch_fits_its_shape_and_selects_rows_as_it_does() {
        for max_tokens in [1, 2, 8, 31, 40] {
            let capacities = Capacities::new(&[1, 8, 32], max_tokens);
            let mut chosen = Vec::new();
            for n_tokens in 1..=max_tokens {
                for n_outputs in 0..=n_tokens {
                    let ubatch = shape(n_tokens, n_outputs);
                    let program = capacities.shape_for(ubatch);
                    assert!(ubatch.fits(program), "{ubatch:?} in {program:?}");
                    let wants_all = |s: GraphShape| s.n_tokens == s.n_outputs;
                    assert_eq!(wants_all(ubatch), wants_all(program), "{ubatch:?}");
                    chosen.push(program);
                }
            }
            chosen.sort_by_key(|s| (s.n_tokens, s.n_outputs));
            chosen.dedup();
            assert!(chosen.len() <= 14, "{chosen:?}");
        }
    }

    #[test]
    fn one_token_has_a_program_of_its_own() {
        let capacities = Capacities::new(&[1, 8], 40);
        assert_eq!(capacities.shape_for(shape(1, 1)), shape(1, 1));
        assert_eq!(capacities.shape_for(shape(2, 1)), shape(8, 1));
        assert_eq!(capacities.shape_for(shape(9, 0)), shape(40, 1));
        assert_eq!(capacities.shape_for(shape(9, 5)), shape(40, 8));
        assert_eq!(capacities.shape_for(shape(40, 39)), shape(40, 39));
    }

    #[test]
    fn without_capacities_and_beyond_them_shapes_are_exact() {
        let ubatch = shape(41, 3);
        assert_eq!(Capacities::new(&[], 40).shape_for(ubatch), ubatch);
        assert_eq!(Capacities::new(&[1, 8], 40).shape_for(ubatch), ubatch);
    }
}
