//! From the keys and tensors of an `mmproj` file, or of a directory in those words, to a tower and
//! how pictures are prepared for it.
//!
//! Invariant: what is read has every tensor that its graphs name, in its shape. Knows no picture.

use std::sync::Arc;

use kv_core::Window;
use kv_graph::Activation;
use kv_graph::rope::RopeStyle;
use kv_graph::weights::{MemoryWeights, WeightError, WeightSource};
use model_core::architecture::ModelError;
use model_core::blocks::{
    AttentionBlock, FeedForwardBlock, FeedForwardForm, Norm, NormKind, QkvBias, QkvWeights,
};
use model_core::gguf::Metadata;

use crate::arrange::Arrangement;
use crate::family::{Family, ProjectorKind, TowerKind};
use crate::pixels::Filter;
use crate::prepare::{Preparation, Shape};
use crate::tower::{
    AxialFrequencies, PATCH_BIAS, POSITIONS, ProjectorStep, ROPE_DIVISORS, Tower, TowerFeedForward,
    TowerPositions, axial_divisors, axial_rope, bias_of,
};
use crate::weights::{Changes, TowerWeights};

/// The base of the rotations of towers.
const ROPE_BASE: f64 = 10_000.0;

/// Rows of a picture of Gemma 3.
const GEMMA_ROWS: usize = 256;

/// A tower, its tensors, and how pictures are prepared for it.
pub(crate) struct ReadTower {
    pub(crate) family: &'static Family,
    pub(crate) tower: Arc<Tower>,
    pub(crate) weights: Arc<dyn WeightSource>,
    pub(crate) preparation: Preparation,
}

/// Keys and tensors, while they are read.
struct Source<'a> {
    metadata: &'a Metadata,
    weights: &'a Arc<dyn WeightSource>,
    dim: usize,
    patch: usize,
}

/// Reads a tower.
///
/// # Errors
/// [`ModelError`] naming the key or tensor that is missing, wrong or not supported.
pub(crate) fn read_tower(
    metadata: &Metadata,
    weights: &Arc<dyn WeightSource>,
) -> Result<ReadTower, ModelError> {
    let keys = ["clip.vision.projector_type", "clip.projector_type"];
    let found: Option<&str> = match metadata.optional(keys[0])? {
        Some(name) => Some(name),
        None => metadata.optional(keys[1])?,
    };
    let name = found.unwrap_or("mlp");
    let family = Family::of(name).ok_or_else(|| {
        let known = Family::names();
        setting(
            keys[0],
            format!(
                "the vision tower '{name}' is not supported; those of these projectors are: {known}"
            ),
        )
    })?;
    let source = Source {
        metadata,
        weights,
        dim: metadata.get::<u32>("clip.vision.embedding_length")? as usize,
        patch: metadata.get::<u32>("clip.vision.patch_size")? as usize,
    };
    if source.patch == 0 || source.dim == 0 {
        return Err(setting("clip.vision.patch_size", "it is 0".to_owned()));
    }
    let tower = source.tower(family)?;
    let preparation = source.preparation(family)?;
    let mut made = MemoryWeights::new();
    if tower.positions == TowerPositions::Rotated {
        let frequencies = match family.tower {
            TowerKind::Pixtral => AxialFrequencies::InTurn,
            _ => AxialFrequencies::Same,
        };
        let divisors = axial_divisors(tower.attention.k_dim, source.rope_base()?, frequencies);
        let inserted = made.insert_f32(ROPE_DIVISORS, &[divisors.len()], &divisors);
        inserted.map_err(ModelError::Weight)?;
    }
    let changes = Changes {
        patch_len: tower.patch_len,
        transposed: match family.projector {
            ProjectorKind::Averaged => Some(INPUT_PROJECTION),
            ProjectorKind::TwoMatrices | ProjectorKind::Merged => None,
        },
        unfolded: source.has(PATCH_MERGER).then_some(PATCH_MERGER),
    };
    let weights = TowerWeights::new(Arc::clone(weights), made, changes);
    let weights: Arc<dyn WeightSource> = Arc::new(weights.map_err(ModelError::Weight)?);
    check_tensors(&tower, &*weights)?;
    Ok(ReadTower {
        family,
        tower: Arc::new(tower),
        weights,
        preparation,
    })
}

/// The matrix of Gemma's projector, which files have the other way round.
const INPUT_PROJECTION: &str = "mm.input_projection.weight";

/// The matrix of Mistral's projector that makes squares of patches one row.
const PATCH_MERGER: &str = "mm.patch_merger.weight";

impl Source<'_> {
    fn tower(&self, family: &Family) -> Result<Tower, ModelError> {
        let dim = self.dim;
        let n_layers = self.count("block_count")?;
        let n_heads = self.count("attention.head_count")?;
        if n_layers > self.weights.names().len() {
            let reason = format!("it is {n_layers}, more than there are tensors");
            return Err(setting("clip.vision.block_count", reason));
        }
        if n_heads == 0 || !dim.is_multiple_of(n_heads) {
            let reason = format!("it is {n_heads}, no divisor of the width {dim}");
            return Err(setting("clip.vision.attention.head_count", reason));
        }
        let head_dim = dim / n_heads;
        let eps_key = "clip.vision.attention.layer_norm_epsilon";
        let eps = self.metadata.optional(eps_key)?.unwrap_or(1e-6f32);
        let layer_norm = Norm {
            kind: NormKind::LayerWithBias,
            eps,
        };
        let norm = match family.tower {
            TowerKind::Qwen25Vl | TowerKind::Pixtral => Norm {
                kind: NormKind::Rms,
                eps,
            },
            _ => layer_norm,
        };
        let (rope, sections) = match family.tower {
            TowerKind::Qwen2Vl | TowerKind::Qwen25Vl => {
                let (rope, sections) = axial_rope(head_dim, ROPE_BASE, RopeStyle::Neox);
                (Some(rope), Some(sections))
            }
            TowerKind::Pixtral => {
                let (rope, sections) = axial_rope(head_dim, self.rope_base()?, RopeStyle::Norm);
                (Some(rope), Some(sections))
            }
            TowerKind::SigLip | TowerKind::Clip => (None, None),
        };
        let attention = AttentionBlock {
            n_heads,
            kv_heads: n_heads,
            k_dim: head_dim,
            v_dim: head_dim,
            scale: (head_dim as f32).sqrt().recip(),
            weights: if self.has("v.blk.0.attn_qkv.weight") {
                QkvWeights::Fused
            } else {
                QkvWeights::Separate
            },
            bias: match family.tower {
                TowerKind::Pixtral => QkvBias::None,
                _ => QkvBias::All,
            },
            rope,
            sections,
            ..AttentionBlock::default()
        };
        let hidden = self.hidden()?;
        let feed_forward = match (family.tower, self.activation()?) {
            (TowerKind::Qwen25Vl, _) => TowerFeedForward::Block(FeedForwardBlock {
                hidden,
                activation: Activation::Silu,
                form: FeedForwardForm::GatedWithBias,
            }),
            (TowerKind::Pixtral, activation) => TowerFeedForward::Block(FeedForwardBlock {
                hidden,
                activation: activation.unwrap_or(Activation::Silu),
                form: FeedForwardForm::Gated,
            }),
            (_, Some(activation)) => TowerFeedForward::Block(FeedForwardBlock {
                hidden,
                activation,
                form: FeedForwardForm::PlainWithBias,
            }),
            (_, None) => TowerFeedForward::QuickGelu(hidden),
        };
        let arrangement = self.arrangement(family)?;
        Ok(Tower {
            patch_len: 3 * self.patch * self.patch,
            patch_bias: self.has(PATCH_BIAS),
            dim,
            positions: match family.tower {
                TowerKind::Qwen2Vl | TowerKind::Qwen25Vl | TowerKind::Pixtral => {
                    TowerPositions::Rotated
                }
                TowerKind::SigLip | TowerKind::Clip => {
                    let values: usize = self.shape(POSITIONS)?.iter().product();
                    TowerPositions::Learned(values / dim)
                }
            },
            first_norm: self.has("v.pre_ln.weight").then_some(norm),
            last_norm: match family.tower {
                TowerKind::Clip => None,
                TowerKind::Pixtral => self.has(PATCH_MERGER).then_some(norm),
                _ => Some(norm),
            },
            norm,
            attention,
            feed_forward,
            windows: self.windows(family, n_layers)?,
            arrangement,
            projector: self.projector(family)?,
        })
    }

    /// The width between the matrices of the feed-forward block.
    fn hidden(&self) -> Result<usize, ModelError> {
        let shape = self.shape("v.blk.0.ffn_up.weight")?;
        // Older files have the names of the matrices the other way round.
        let hidden = match shape[..] {
            [rows, columns] if rows == self.dim => columns,
            [rows, _] => rows,
            _ => 0,
        };
        Ok(hidden)
    }

    /// The activation of layers; `None` for CLIP's.
    fn activation(&self) -> Result<Option<Activation>, ModelError> {
        let flag = |key: &str| self.metadata.optional::<bool>(key);
        Ok(if flag("clip.use_gelu")?.unwrap_or(false) {
            let exact = flag("clip.vision.use_exact_gelu")?.unwrap_or(false);
            Some(if exact {
                Activation::GeluErf
            } else {
                Activation::GeluTanh
            })
        } else if flag("clip.use_silu")?.unwrap_or(false) {
            Some(Activation::Silu)
        } else {
            None
        })
    }

    /// Patches of a row of a picture whose size is fixed.
    fn side(&self) -> Result<usize, ModelError> {
        Ok(self.count("image_size")? / self.patch)
    }

    fn arrangement(&self, family: &Family) -> Result<Arrangement, ModelError> {
        Ok(match family.tower {
            TowerKind::Qwen2Vl | TowerKind::Qwen25Vl | TowerKind::Pixtral => {
                let merge = self.merge()?;
                Arrangement::Joined(merge * merge)
            }
            TowerKind::Clip => Arrangement::WithoutFirst,
            TowerKind::SigLip => {
                let side = self.side()?;
                let rows = (GEMMA_ROWS as f64).sqrt() as usize;
                let rows = self.optional_count("projector.query_side")?.unwrap_or(rows);
                if rows == 0 || !side.is_multiple_of(rows) {
                    let reason = format!("{side} patches of a row make no {rows} rows");
                    return Err(setting("clip.vision.image_size", reason));
                }
                Arrangement::Averaged {
                    kernel: side / rows,
                }
            }
        })
    }

    fn projector(&self, family: &Family) -> Result<Vec<ProjectorStep>, ModelError> {
        let out_of = |name: &'static str| -> Result<usize, ModelError> {
            Ok(self.shape(name)?.first().copied().unwrap_or(0))
        };
        Ok(match family.projector {
            ProjectorKind::TwoMatrices => vec![
                ProjectorStep::Affine("mm.0.weight", out_of("mm.0.weight")?),
                ProjectorStep::Activate(Activation::GeluErf),
                ProjectorStep::Affine("mm.2.weight", out_of("mm.2.weight")?),
            ],
            ProjectorKind::Merged => {
                let step = |name: &'static str| -> Result<ProjectorStep, ModelError> {
                    let width = out_of(name)?;
                    Ok(if self.has(&bias_of(name)) {
                        ProjectorStep::Affine(name, width)
                    } else {
                        ProjectorStep::Matrix(name, width)
                    })
                };
                let merger = self.has(PATCH_MERGER).then(|| step(PATCH_MERGER));
                let mut steps: Vec<ProjectorStep> = merger.transpose()?.into_iter().collect();
                steps.extend([
                    step("mm.1.weight")?,
                    ProjectorStep::Activate(Activation::GeluErf),
                    step("mm.2.weight")?,
                ]);
                steps
            }
            ProjectorKind::Averaged => {
                let norm = Norm {
                    kind: NormKind::Rms,
                    eps: self
                        .metadata
                        .optional("clip.vision.attention.layer_norm_epsilon")?
                        .unwrap_or(1e-6),
                };
                let shape = self.shape(INPUT_PROJECTION)?;
                vec![
                    ProjectorStep::Norm(norm, "mm.soft_emb_norm"),
                    ProjectorStep::Matrix(INPUT_PROJECTION, shape.last().copied().unwrap_or(0)),
                ]
            }
        })
    }

    /// The window of each layer, in places: a window has so many.
    fn windows(&self, family: &Family, n_layers: usize) -> Result<Vec<Window>, ModelError> {
        let Some(window) = self.window(family)? else {
            return Ok(vec![Window::Full; n_layers]);
        };
        let n_places = u32::try_from(window * window).unwrap_or(u32::MAX);
        let listed: Option<Vec<u32>> = self.metadata.optional("clip.vision.wa_layer_indexes")?;
        let every = self.optional_count("n_wa_pattern")?;
        let is_full = |layer: usize| match (&listed, every) {
            (Some(listed), _) => listed.iter().any(|&full| full as usize == layer),
            (None, Some(every)) => (layer + 1).is_multiple_of(every.max(1)),
            (None, None) => false,
        };
        let window = |layer| {
            if is_full(layer) {
                Window::Full
            } else {
                Window::Chunked(n_places)
            }
        };
        Ok((0..n_layers).map(window).collect())
    }

    /// Patches of a row of a window, where layers see windows.
    fn window(&self, family: &Family) -> Result<Option<usize>, ModelError> {
        match family.tower {
            TowerKind::Qwen25Vl => {
                let pixels = self.optional_count("window_size")?.unwrap_or(112);
                let merge = self.merge()?;
                // Whole squares of patches.
                let squares = (pixels / merge / self.patch).max(1);
                Ok(Some(squares * merge))
            }
            _ => Ok(None),
        }
    }

    fn merge(&self) -> Result<usize, ModelError> {
        let is_merged = !self.has("mm.1.weight") || self.has(PATCH_MERGER);
        let size = self.optional_count("spatial_merge_size")?;
        let or = if is_merged { 2 } else { 1 };
        Ok(size.unwrap_or(or).max(1))
    }

    fn rope_base(&self) -> Result<f64, ModelError> {
        let base: Option<f32> = self.metadata.optional("clip.rope.freq_base")?;
        Ok(base.map_or(ROPE_BASE, f64::from))
    }

    fn preparation(&self, family: &Family) -> Result<Preparation, ModelError> {
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
            TowerKind::Qwen2Vl | TowerKind::Qwen25Vl => {
                let pixels = |key: &str, or: u64| -> Result<u64, ModelError> {
                    Ok(self.optional_count(key)?.map_or(or, |n| n as u64))
                };
                Shape::Natural {
                    merge: as_u32(self.merge()?),
                    pixels: [
                        pixels("image_min_pixels", 56 * 56)?,
                        pixels("image_max_pixels", 28 * 28 * 1280)?,
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
                (Some(2), _) | (None, TowerKind::SigLip) => Filter::Bilinear,
                (Some(_), _) | (None, _) => Filter::Bicubic,
            },
            shape,
        })
    }

    fn has(&self, name: &str) -> bool {
        self.weights.describe(name).is_ok()
    }

    fn shape(&self, name: &str) -> Result<Vec<usize>, ModelError> {
        let found = self.weights.describe(name);
        found.map(|info| info.shape).map_err(ModelError::Weight)
    }

    fn count(&self, key: &str) -> Result<usize, ModelError> {
        let count: u32 = self.metadata.get(&format!("clip.vision.{key}"))?;
        Ok(count as usize)
    }

    fn optional_count(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let count: Option<u32> = self.metadata.optional(&format!("clip.vision.{key}"))?;
        Ok(count.map(|count| count as usize))
    }
}

/// Every tensor that the graphs name must be there, in its shape.
fn check_tensors(tower: &Tower, weights: &dyn WeightSource) -> Result<(), ModelError> {
    let graphs = [tower.graph(1)?, tower.projector_graph(1)?];
    for wanted in graphs.iter().flat_map(|graph| graph.weights()) {
        let found = weights
            .describe(&wanted.name)
            .map_err(|error| match error {
                WeightError::Missing { name } => ModelError::MissingTensor {
                    name,
                    shape: wanted.shape.clone(),
                },
                other => ModelError::Weight(other),
            })?;
        if found.shape != wanted.shape {
            return Err(ModelError::TensorShape {
                name: wanted.name.clone(),
                wanted: wanted.shape.clone(),
                got: found.shape,
            });
        }
    }
    Ok(())
}

fn setting(key: &str, reason: String) -> ModelError {
    ModelError::Setting {
        key: key.to_owned(),
        reason,
    }
}
