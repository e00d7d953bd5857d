//! How pictures are prepared for a tower.
//!
//! Knows no picture.

use model_core::architecture::ModelError;

use super::{Source, class_row, setting};
use crate::family::{Family, ProjectorKind, TowerKind};
use crate::pixels::{Filter, MAX_PIXELS};
use crate::prepare::{ClassRow, Precision, Preparation, Shape};
use crate::size::{Size, SmallSides, SmartSize};
use crate::slices::SliceRules;
use crate::tiles::Tiling;
use crate::tower::LINE_END;

/// The most rows of a picture of Gemma 4, where files do not state it.
const GEMMA4_ROWS: u64 = 280;

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
        let (mut mean, mut std) = (
            three("clip.vision.image_mean")?,
            three("clip.vision.image_std")?,
        );
        if family.tower == TowerKind::Gemma4 {
            // What is stated gives values from 0 to 1, and the tower takes -1 to 1.
            std = std.map(|std| std / 2.0);
            mean = [0, 1, 2].map(|colour| mean[colour] + std[colour]);
        }
        Ok(Preparation {
            patch: u32::try_from(self.patch).unwrap_or(u32::MAX),
            mean,
            std,
            filter: match (
                self.metadata.optional("clip.vision.resample")?,
                family.tower,
            ) {
                (Some(1u32), _) => Filter::Lanczos,
                (None, TowerKind::SigLip) if family.projector == ProjectorKind::Squares => {
                    Filter::Lanczos
                }
                (Some(2), _)
                | (None, TowerKind::SigLip | TowerKind::SigLip2 | TowerKind::Llama4) => {
                    Filter::Bilinear
                }
                (Some(_), _) | (None, _) => Filter::Bicubic,
            },
            precision: match family.tower {
                TowerKind::Llama4 => Precision::Bf16,
                _ => Precision::Single,
            },
            shape: self.shape_of_pictures(family)?,
        })
    }

    /// The sizes and the order of patches.
    fn shape_of_pictures(&self, family: &Family) -> Result<Shape, ModelError> {
        let as_u32 = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let pixels = |key: &str, or: u64| -> Result<u64, ModelError> {
            Ok(self.optional_count(key)?.map_or(or, |n| n as u64))
        };
        let class_row = class_row(family.tower);
        Ok(match family.tower {
            TowerKind::Qwen2Vl | TowerKind::Qwen25Vl | TowerKind::Qwen3Vl | TowerKind::Glm4v => {
                let [least, most] = match family.tower {
                    TowerKind::Qwen3Vl => [1 << 16, 1 << 24],
                    TowerKind::Glm4v => [112 * 112 / 2, 28 * 28 * 15_000 / 2],
                    _ => [56 * 56, 28 * 28 * 1280],
                };
                let merge = as_u32(self.merge()?);
                Shape::Natural {
                    merge,
                    size: SmartSize {
                        factor: as_u32(self.patch).saturating_mul(merge),
                        pixels: [
                            pixels("image_min_pixels", least)?,
                            pixels("image_max_pixels", most)?,
                        ],
                        small: match family.tower {
                            TowerKind::Glm4v => SmallSides::Enlarged,
                            _ => SmallSides::AsTheyAre,
                        },
                    },
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
                let tiling = Tiling::Nearest(self.tile_counts([1, 12])?);
                self.tiled(tiling, self.count("image_size")?, class_row)?
            }
            TowerKind::Llama4 => {
                let [_, most] = self.tile_counts([1, 16])?;
                self.tiled(Tiling::Canvas(most), self.count("image_size")?, class_row)?
            }
            TowerKind::SigLip if family.projector == ProjectorKind::Squares => {
                let side = self.count("image_size")?;
                let longest = self.optional_count("preproc_image_size")?;
                let tiling = Tiling::Covering(as_u32(longest.unwrap_or(side)));
                self.tiled(tiling, side, class_row)?
            }
            TowerKind::SigLip2 => {
                let factor = self.patch * self.merge()?;
                // 64 to 256 rows of a picture that is not cut.
                let n_pixels = (factor as u64).pow(2);
                let whole = SmartSize {
                    factor: as_u32(factor),
                    pixels: [
                        pixels("image_min_pixels", 64 * n_pixels)?,
                        pixels("image_max_pixels", 256 * n_pixels)?,
                    ],
                    small: SmallSides::WholeFactor,
                };
                let tolerance = self.metadata.optional("clip.vision.preproc_tolerance")?;
                let tiling = Tiling::OfLarge {
                    tiles: self.tile_counts([2, 10])?,
                    whole,
                    tolerance: tolerance.unwrap_or(2.0),
                };
                let side = self.optional_count("preproc_image_size")?.unwrap_or(512);
                self.tiled(tiling, side, class_row)?
            }
            TowerKind::MiniCpm => {
                let [_, most] = self.tile_counts([1, 9])?;
                Shape::Sliced(SliceRules {
                    side: as_u32(self.count("image_size")?),
                    factor: as_u32(self.patch * self.merge()?),
                    most,
                })
            }
            TowerKind::SigLip => Shape::Stretched(as_u32(self.count("image_size")?)),
            TowerKind::Gemma4 => {
                let square = as_u32(self.patch * self.averaged_side()?);
                let of_row = u64::from(square).saturating_mul(square.into());
                let most = pixels("image_max_pixels", of_row.saturating_mul(GEMMA4_ROWS))?;
                if of_row > most.min(MAX_PIXELS) {
                    let reason = format!("{of_row} pixels of a row are more than {most} of all");
                    return Err(setting("clip.vision.projector.scale_factor", reason));
                }
                Shape::Filled {
                    square,
                    most: most.min(MAX_PIXELS),
                }
            }
            TowerKind::Whisper => {
                let reason = "it hears: no picture is prepared for it".to_owned();
                return Err(setting("clip.audio.projector_type", reason));
            }
            TowerKind::Clip => {
                let side = self.count("image_size")?;
                match self.listed_sizes(side)? {
                    Some(sizes) => self.tiled(Tiling::Padded(sizes), side, class_row)?,
                    None => Shape::Middle(as_u32(side)),
                }
            }
        })
    }

    /// The sizes that pictures are padded to, of tiles of this side, where there are such.
    fn listed_sizes(&self, side: usize) -> Result<Option<Vec<Size>>, ModelError> {
        let key = "clip.vision.image_grid_pinpoints";
        let listed: Option<Vec<i32>> = self.metadata.optional(key)?;
        let (Some(listed), true) = (listed, self.has(LINE_END)) else {
            return Ok(None);
        };
        let most = side.saturating_mul(MAX_TILES as usize);
        let whole = |length: i32| {
            let length = usize::try_from(length).ok()?;
            let fits = side > 0 && (1..=most).contains(&length) && length.is_multiple_of(side);
            u32::try_from(length).ok().filter(|_| fits)
        };
        let size = |pair: &[i32]| match *pair {
            [height, width] => Some(Size {
                width: whole(width)?,
                height: whole(height)?,
            }),
            _ => None,
        };
        let sizes: Option<Vec<Size>> = listed.chunks(2).map(size).collect();
        let sizes = sizes.filter(|sizes| !sizes.is_empty());
        let sizes = sizes.ok_or_else(|| {
            let reason = format!("{listed:?} are no pairs of whole tiles of {side} pixels");
            setting(key, reason)
        })?;
        Ok(Some(sizes))
    }

    /// The fewest and the most tiles of a picture.
    fn tile_counts(&self, [least, most]: [usize; 2]) -> Result<[u32; 2], ModelError> {
        let least = self.optional_count("preproc_min_tiles")?.unwrap_or(least);
        let most = self.optional_count("preproc_max_tiles")?.unwrap_or(most);
        match (u32::try_from(least), u32::try_from(most)) {
            (Ok(least), Ok(most)) if least <= most && most <= MAX_TILES => Ok([least, most]),
            _ => {
                let reason = format!("{least} to {most} tiles: at most {MAX_TILES} are taken");
                Err(setting("clip.vision.preproc_max_tiles", reason))
            }
        }
    }

    /// Tiles of so many pixels in a row.
    fn tiled(&self, tiling: Tiling, side: usize, class_row: ClassRow) -> Result<Shape, ModelError> {
        // Pixels behind the last whole patch are not seen.
        let (n_patches, merge) = (side / self.patch, self.merge()?);
        if n_patches == 0 || !n_patches.is_multiple_of(merge) {
            let reason = format!("{n_patches} patches of a row are no whole squares of {merge}");
            return Err(setting("clip.vision.projector.scale_factor", reason));
        }
        Ok(Shape::Tiled {
            tiling,
            side: u32::try_from(side).unwrap_or(u32::MAX),
            class_row,
        })
    }
}
