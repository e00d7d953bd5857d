//! [`Subject`]: a model with what transformers or numpy made of three sequences of tokens.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::path::Path;
use std::sync::Arc;

use cellar_engine::{Engine, EngineConfig};
use kv_backend::Backend;
use kv_core::batch::Batch;
use kv_core::{SeqId, TokenId};
use kv_graph::weights::WeightSource;
use model_core::architecture::{Model, OutputKind};
use model_core::model_file::OpenModel;
use model_core::sentence::{Pooling, normalise};
use model_tests::{Recipe, Reference};

use crate::common::{data, registry};

/// Largest difference of a value of a row, or of a score.
pub(crate) const TOLERANCE: f32 = 2e-5;
/// Largest difference of a value of a vector of length 1.
pub(crate) const VECTOR_TOLERANCE: f32 = 2e-6;

#[track_caller]
pub(crate) fn assert_close(what: &str, got: &[f32], wanted: &[f32], tolerance: f32) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    let off = model_tests::distance(got, wanted);
    // Not `> tolerance`: NaN must fail.
    assert!(off <= tolerance, "{what}: off by {off}");
}

/// A model with its reference.
pub(crate) struct Subject {
    pub(crate) name: String,
    pub(crate) model: Arc<dyn Model>,
    pub(crate) weights: Arc<dyn WeightSource>,
    pub(crate) reference: Reference,
}

/// The rows of a sequence that a batch asks for.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum RequestedRows {
    First,
    All,
}

impl Subject {
    /// The recipe of this name.
    pub(crate) fn recipe(name: &str) -> Self {
        let recipe = Recipe::open(&data(name));
        let directory = recipe.directory(&registry()).unwrap();
        Self {
            name: name.to_owned(),
            model: Arc::clone(directory.model()),
            weights: directory.weights().clone(),
            reference: recipe.reference(),
        }
    }

    /// A model directory or GGUF file next to a reference.
    pub(crate) fn file(path: &Path, reference: &Path) -> Self {
        let file = OpenModel::open(path, &registry()).unwrap();
        Self {
            name: path.display().to_string(),
            model: Arc::clone(file.model()),
            weights: file.weights(),
            reference: Reference::open(reference),
        }
    }

    /// The rows that are asked of the model.
    pub(crate) fn wanted(&self) -> RequestedRows {
        match self.model.output() {
            OutputKind::Scores { .. } => RequestedRows::First,
            _ => RequestedRows::All,
        }
    }

    pub(crate) fn batch(&self, sequences: &[usize], wanted: RequestedRows) -> Batch {
        let mut batch = Batch::new();
        for &at in sequences {
            let ids = self.reference.ids(&format!("ids_{at}")).unwrap();
            let types = self.reference.ids(&format!("type_ids_{at}"));
            let types = types.unwrap_or_else(|| vec![0; ids.len()]);
            for (i, (&id, of_type)) in ids.iter().zip(types).enumerate() {
                let seq = SeqId(u32::try_from(at).unwrap());
                let entry = batch.push_token(TokenId(id)).in_sequence(seq);
                let entry = entry.of_type(of_type);
                if i == 0 || wanted == RequestedRows::All {
                    entry.with_output();
                }
            }
        }
        batch
    }

    /// Rows of each of these sequences, all in one batch.
    pub(crate) fn rows<B: Backend>(
        &self,
        backend: B,
        sequences: &[usize],
        wanted: RequestedRows,
    ) -> Vec<Vec<f32>> {
        let config = EngineConfig {
            n_seqs: 3,
            ..EngineConfig::default()
        };
        let (model, weights) = (Arc::clone(&self.model), Arc::clone(&self.weights));
        let mut engine = Engine::new(backend, model, weights, &config).unwrap();
        let rows = engine.embed(&self.batch(sequences, wanted)).unwrap();
        let mut rest = rows.values();
        let of_sequence = sequences.iter().map(|at| {
            let n_rows = match wanted {
                RequestedRows::First => 1,
                RequestedRows::All => self.reference.ids(&format!("ids_{at}")).unwrap().len(),
            };
            let (own, others) = rest.split_at(n_rows * rows.dim());
            rest = others;
            own.to_vec()
        });
        of_sequence.collect()
    }

    /// Compares with the reference what `backend` makes of all sequences together.
    pub(crate) fn check<B: Backend>(&self, how: &str, backend: impl Fn() -> B) {
        let values = |name: &str, at: usize| {
            let values = self.reference.values(&format!("{name}_{at}"));
            values.unwrap_or_else(|| panic!("{}: no {name}", self.name))
        };
        if let OutputKind::Scores { n_labels } = self.model.output() {
            let scores = self.rows(backend(), &[0, 1, 2], RequestedRows::First);
            for (at, got) in scores.iter().enumerate() {
                assert_eq!(got.len(), n_labels);
                let what = format!("{}, {how}, scores {at}", self.name);
                assert_close(&what, got, &values("scores", at).1, TOLERANCE);
            }
            return;
        }
        let rows = self.rows(backend(), &[0, 1, 2], RequestedRows::All);
        for (at, got) in rows.iter().enumerate() {
            let what = format!("{}, {how}, sequence {at}", self.name);
            let dim = self.model.embedding_dim();
            let all = || (0..u32::try_from(got.len() / dim).unwrap()).collect();
            let kept = self.reference.ids(&format!("rows_{at}"));
            let kept: Vec<u32> = kept.unwrap_or_else(all);
            let kept = kept
                .iter()
                .flat_map(|&row| &got[row as usize * dim..][..dim]);
            let kept: Vec<f32> = kept.copied().collect();
            assert_close(&what, &kept, &values("hidden", at).1, TOLERANCE);
            let mut mean = Pooling::Mean.pool(got, dim);
            normalise(&mut mean);
            assert_close(&what, &mean, &values("mean", at).1, VECTOR_TOLERANCE);
        }
    }
}
