//! The bounds of matrices, which files have as four numbers each.
//!
//! Knows no graph.

use std::collections::BTreeMap;

use model_core::architecture::ModelError;

use super::{Source, setting};
use crate::clip::{Bounds, ClippedMatrices, MatrixBounds};
use crate::weights::usual_name;

/// The matrices of a layer.
const MATRICES: [&str; 7] = [
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
];

/// Beyond it a bound is none.
const UNBOUNDED: f32 = 1e30;

impl Source<'_> {
    /// The matrices of so many layers that have bounds.
    pub(super) fn clipped(&self, n_layers: usize) -> Result<ClippedMatrices, ModelError> {
        let said: Option<bool> = self.metadata.optional("clip.vision.use_clipped_linears")?;
        let mut clipped = BTreeMap::new();
        if said == Some(false) {
            return Ok(ClippedMatrices(clipped));
        }
        for layer in 0..n_layers {
            for matrix in MATRICES {
                let matrix = format!("v.blk.{layer}.{matrix}");
                let [input, output] =
                    ["input", "output"].map(|side| self.bounds(&format!("{matrix}.{side}")));
                let bounds = MatrixBounds {
                    input: input?,
                    output: output?,
                };
                if bounds != MatrixBounds::default() {
                    clipped.insert(format!("{matrix}.weight"), bounds);
                }
            }
        }
        Ok(ClippedMatrices(clipped))
    }

    /// The bounds with names of this beginning.
    fn bounds(&self, name: &str) -> Result<Option<Bounds>, ModelError> {
        let bound = |end: &str, or: f32| -> Option<f32> {
            let own = format!("{name}_{end}");
            let found = self.weights.get(&own);
            match found.or_else(|| self.weights.get(&usual_name(&own))) {
                None => Some(or),
                Some(weight) => weight.to_f32().first().copied(),
            }
        };
        let (least, most) = (bound("min", f32::NEG_INFINITY), bound("max", f32::INFINITY));
        match (least, most) {
            (Some(least), Some(most)) if least < -UNBOUNDED && most > UNBOUNDED => Ok(None),
            (Some(least), Some(most))
                if least >= -UNBOUNDED && most <= UNBOUNDED && least <= most =>
            {
                Ok(Some(Bounds { least, most }))
            }
            (least, most) => {
                let reason = format!(
                    "values from {least:?} to {most:?} pass: two numbers, the smaller first, or none \
                     are taken"
                );
                Err(setting(&format!("{name}_min"), reason))
            }
        }
    }
}
