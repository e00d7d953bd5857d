//! What towers that hear have of their own: tensors that graphs want and files lack, and how sounds
//! are prepared.
//!
//! Knows no layer.

use std::sync::Arc;

use kv_graph::weights::{
    MemoryWeights, SourceChanged, Weight, WeightError, WeightInfo, WeightSource,
};
use model_core::architecture::ModelError;
use model_core::media::MediaKind;

use super::{Source, setting};
use crate::arrange::Arrangement;
use crate::family::Family;
use crate::sound::{N_POWERS, SoundPreparation};
use crate::tower::{PATCH_BIAS, STEM_BIAS, Tower, TowerPositions};

/// The most bins of a frame: it has powers of so many frequencies.
const MAX_BINS: usize = N_POWERS;

/// The most rows of a tile: four times Whisper's.
const MAX_ROWS: usize = 6000;

/// The beginnings of names in graphs, and those in `mmproj` files with audio towers. The first that
/// is one counts.
const NAMES: [[&str; 2]; 4] = [
    ["v.stem.", "a.conv1d.1."],
    ["v.patch_embd.", "a.conv1d.2."],
    ["v.", "a."],
    ["mm.", "mm.a."],
];

/// The tensors of a file under the names of graphs, where it has an audio tower.
pub(super) fn in_names_of_graphs(file: &Arc<dyn WeightSource>) -> Arc<dyn WeightSource> {
    if file.describe("a.conv1d.1.weight").is_ok() {
        Arc::new(RenamedWeights(Arc::clone(file)))
    } else {
        Arc::clone(file)
    }
}

/// The tensors of an `mmproj` file with an audio tower.
struct RenamedWeights(Arc<dyn WeightSource>);

/// The name with the beginning that is at place `to` of [`NAMES`] where it is at place `from`.
fn renamed(name: &str, from: usize, to: usize) -> String {
    let found = NAMES.iter().find_map(|names| {
        let rest = name.strip_prefix(names[from])?;
        Some(format!("{}{rest}", names[to]))
    });
    found.unwrap_or_else(|| name.to_owned())
}

impl WeightSource for RenamedWeights {
    fn get(&self, name: &str) -> Option<Weight> {
        self.0.get(&renamed(name, 0, 1))
    }

    fn names(&self) -> Vec<String> {
        let names = self.0.names();
        names.iter().map(|name| renamed(name, 1, 0)).collect()
    }

    fn require(&self, name: &str) -> Result<Weight, WeightError> {
        self.0.require(&renamed(name, 0, 1))
    }

    fn describe(&self, name: &str) -> Result<WeightInfo, WeightError> {
        self.0.describe(&renamed(name, 0, 1))
    }

    fn check(&self) -> Result<(), SourceChanged> {
        self.0.check()
    }
}

impl Source<'_> {
    /// Bins of the frames of a sound, where the tower hears.
    pub(super) fn bins(&self, family: &Family) -> Result<Option<usize>, ModelError> {
        match family.tower.media() {
            MediaKind::Sound => self.positive("num_mel_bins").map(Some),
            MediaKind::Picture => Ok(None),
        }
    }

    /// Adds the biases of keys, which Whisper does without: they are 0. Those of convolutions are
    /// columns in `mmproj` files, and rows here.
    pub(super) fn add_sound_weights(
        &self,
        tower: &Tower,
        made: &mut MemoryWeights,
    ) -> Result<(), ModelError> {
        let none = vec![0.0; self.dim];
        for layer in 0..tower.windows.len() {
            let name = format!("v.blk.{layer}.attn_k.bias");
            if !self.has(&name) {
                let inserted = made.insert_f32(&name, &[self.dim], &none);
                inserted.map_err(ModelError::Weight)?;
            }
        }
        for name in [STEM_BIAS, PATCH_BIAS] {
            let bias = self.weights.require(name).map_err(ModelError::Weight)?;
            let inserted = made.insert_f32(name, &[self.dim], &bias.to_f32());
            inserted.map_err(ModelError::Weight)?;
        }
        Ok(())
    }

    /// The way from sounds to frames.
    pub(super) fn sound_preparation(&self, tower: &Tower) -> Result<SoundPreparation, ModelError> {
        let n_bins = tower.n_bins.unwrap_or(0);
        if n_bins > MAX_BINS {
            let reason = format!("it is {n_bins}: at most {MAX_BINS} are supported");
            return Err(setting(&self.key("num_mel_bins"), reason));
        }
        let n_rows = match tower.positions {
            TowerPositions::Learned(n) => n,
            _ => 0,
        };
        if n_rows == 0 || n_rows > MAX_ROWS {
            let reason = format!("it has {n_rows} positions: 1 to {MAX_ROWS} are supported");
            return Err(setting(&self.key("embedding_length"), reason));
        }
        Ok(SoundPreparation {
            n_bins,
            n_rows,
            joined: match tower.arrangement {
                Arrangement::Pooled(n) => n,
                _ => 1,
            },
        })
    }
}
