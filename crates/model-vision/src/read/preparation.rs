//! How pictures are prepared for a tower.
//!
//! Knows no picture.

use model_core::architecture::ModelError;

use super::{Source, setting};
use crate::family::{Family, PictureText, TowerKind};
use crate::pixels::Filter;
use crate::prepare::{Preparation, Shape};
use crate::tiles::Tiling;

/// The most tiles of a picture.
const MAX_TILES: u32 = 64;

impl Source<'_> {
    pub(super) fn preparation(&self, family: &Family) -> Result<Preparation, ModelError> {
        let three = |key: &str| -> Result<[f32; 3], ModelError> {
            let values: Vec<f32> = self.metadata.get(key)?;
            <[f32; 3]>::try_from(values).map_err(|values| {
                setting(
                    key,
                    format!("it has {} numbers, and 3 are needed", values.len()),
                )
            })
        };
        let as_u32 = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let shape = match family.tower {
            TowerKind::Qwen2Vl | TowerKind::Qwen25Vl | TowerKind::Qwen3Vl => {
                let pixels = |key: &str, or: u64| -> Result<u64, ModelError> {
                    Ok(self.optional_count(key)?.map_or(or, |n| n as u64))
                };
                let [least, most] = match family.tower {
                    TowerKind::Qwen3Vl => [1 << 16, 1 << 24],
                    _ => [56 * 56, 28 * 28 * 1280],
                };
                Shape::Natural {
                    merge: as_u32(self.merge()?),
                    pixels: [
                        pixels("image_min_pixels", least)?,
                        pixels("image_max_pixels", most)?,
                    ],
                    window: self.window(family)?.map(as_u32),
                }
            }
            TowerKind::Pixtral => {
                let longest = self.optional_count("image_longest_edge")?;
                Shape::Fitted {
                    merge: as_u32(self.merge()?),
                    longest: as_u32(longest.map_or_else(|| self.count("image_size"), Ok)?),
                }
            }
            TowerKind::InternVit => {
                let n = |key: &str, or: usize| -> Result<u32, ModelError> {
                    Ok(as_u32(self.optional_count(key)?.unwrap_or(or)))
                };
                let bounds = [n("preproc_min_tiles", 1)?, n("preproc_max_tiles", 12)?];
                if bounds[0] > bounds[1] || bounds[1] > MAX_TILES {
                    let reason =
                        format!("{} to {} tiles: at most {MAX_TILES}", bounds[0], bounds[1]);
                    return Err(setting("clip.vision.preproc_max_tiles", reason));
                }
                self.tiled(Tiling::Nearest(bounds), 1)?
            }
            TowerKind::SigLip if family.text == PictureText::NamedTiles => {
                let longest = self.optional_count("preproc_image_size")?;
                let longest = longest.map_or_else(|| self.count("image_size"), Ok)?;
                self.tiled(Tiling::Covering(as_u32(longest)), 0)?
            }
            TowerKind::SigLip => Shape::Stretched(as_u32(self.count("image_size")?)),
            TowerKind::Clip => Shape::Middle(as_u32(self.count("image_size")?)),
        };
        Ok(Preparation {
            patch: as_u32(self.patch),
            mean: three("clip.vision.image_mean")?,
            std: three("clip.vision.image_std")?,
            filter: match (
                self.metadata.optional("clip.vision.resample")?,
                family.tower,
            ) {
                (Some(1u32), _) => Filter::Lanczos,
                (None, TowerKind::SigLip) if family.text == PictureText::NamedTiles => {
                    Filter::Lanczos
                }
                (Some(2), _) | (None, TowerKind::SigLip) => Filter::Bilinear,
                (Some(_), _) | (None, _) => Filter::Bicubic,
            },
            shape,
        })
    }

    /// Tiles of the tower's size, with so many rows before patches.
    fn tiled(&self, tiling: Tiling, n_before: u32) -> Result<Shape, ModelError> {
        let (side, merge) = (self.side()?, self.merge()?);
        if side == 0 || !side.is_multiple_of(merge) {
            let reason = format!("{side} patches of a row are no whole squares of {merge}");
            return Err(setting("clip.vision.projector.scale_factor", reason));
        }
        let as_u32 = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Ok(Shape::Tiled {
            tiling,
            side: as_u32(self.count("image_size")?),
            n_before,
        })
    }
}
