//! [`SoundPreparation`]: from a sound to the frames that a tower takes, as a model's own processor
//! does it.
//!
//! Invariant: a sound gives as many rows in a prompt as its tile says. Knows no file format and no
//! graph.

use kv_core::GridPos;
use model_core::picture::{PictureError, Tile};

use super::Sound;
use super::mel::{HOP, LogMel, SAMPLE_RATE};

/// The way from sounds to frames.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SoundPreparation {
    /// Bins of a frame.
    pub(crate) n_bins: usize,
    /// Rows of the tower for as much as it takes at once: one for two frames.
    pub(crate) n_rows: usize,
    /// Rows of the tower that become one.
    pub(crate) joined: usize,
}

impl SoundPreparation {
    /// The most seconds of a sound: a tower takes it at once.
    pub(crate) fn most_seconds(&self) -> u32 {
        u32::try_from(self.tile_samples() / SAMPLE_RATE as usize).unwrap_or(u32::MAX)
    }

    /// Samples of what a tower takes at once.
    fn tile_samples(&self) -> usize {
        2 * self.n_rows * HOP
    }

    /// The tile of a sound of at most [`SoundPreparation::most_seconds`]: rows end where it ends.
    ///
    /// # Errors
    /// [`PictureError::SoundTooShort`] where it is too short.
    pub(crate) fn prepare(&self, sound: &Sound) -> Result<Tile, PictureError> {
        let samples = &sound.samples;
        let n_rows = samples.len().div_ceil(HOP).div_ceil(2).min(self.n_rows);
        if n_rows < self.joined.max(1) {
            return Err(PictureError::SoundTooShort {
                got: samples.len(),
                rate: SAMPLE_RATE,
                least: (2 * self.joined).saturating_sub(2) * HOP + 1,
            });
        }
        // The last row looks at the frame behind its two.
        let n_frames = (2 * n_rows + 1).min(2 * self.n_rows);
        let mel = LogMel::new(self.n_bins);
        let frames = mel.frames(samples, self.tile_samples(), n_frames);
        Ok(self.tile(&frames, n_rows))
    }

    /// The tile of these frames, which give so many rows. There is an empty frame before them, and
    /// behind the last that a tower takes.
    fn tile(&self, frames: &[f32], n_rows: usize) -> Tile {
        let mut patches = vec![0.0; self.n_bins];
        patches.extend_from_slice(frames);
        patches.resize((2 * n_rows + 2) * self.n_bins, 0.0);
        let n_rows = u32::try_from(n_rows).unwrap_or(u32::MAX);
        Tile {
            patches,
            positions: (0..n_rows).collect(),
            places: (0..n_rows).map(|y| GridPos { y, x: 0 }).collect(),
            order: Vec::new(),
        }
    }
}
