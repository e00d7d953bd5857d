//! From the keys and tensors of an `mmproj` file, or of a directory in those words, to a tower and
//! how pictures or sounds are prepared for it.
//!
//! Invariant: what is read has every tensor that its graphs name, in its shape. Knows no picture.

mod bounds;
mod preparation;
mod projector;
mod sound;
mod source;

use std::sync::Arc;

use kv_core::Window;
use kv_graph::rope::{RopeSections, RopeSpec, RopeStyle};
use kv_graph::weights::{MemoryWeights, WeightSource};
use kv_graph::{Activation, Graph};
use model_core::architecture::{ModelError, check_named_tensors};
use model_core::blocks::{
    AttentionBlock, AttentionValues, FeedForwardBlock, FeedForwardForm, Norm, NormKind, QkNorm,
    QkvBias, QkvWeights,
};
use model_core::gguf::Metadata;
use model_core::media::MediaKind;

use crate::arrange::Arrangement;
use crate::clip::ClippedMatrices;
use crate::family::{Family, ProjectorKind, TowerKind};
use crate::prepare::ClassRow;
use crate::reader::MediaPreparation;
use crate::resample::{Corners, Resampling};
use crate::stage::{MERGER_UP, Merger, Stage};
use crate::tower::{
    AxialFrequencies, PATCH_BIAS, PATCH_EMBEDDING, POSITIONS, ROPE_DIVISORS, STEM, STEM_FRAMES,
    Tower, TowerFeedForward, TowerPositions, TowerResidual, axial_divisors, axial_rope,
};
use crate::weights::{Changes, PatchOrder, TowerWeights};
use source::{Source, setting};

/// The base of the rotations of towers.
const ROPE_BASE: f64 = 10_000.0;

/// The same in Gemma 4.
const GEMMA4_ROPE_BASE: f64 = 100.0;

/// Rows and columns of patches of a row of Gemma 4.
const GEMMA4_SQUARE: usize = 3;

/// Rows and columns of patches that become one row in the tower of MiniCPM-V, and of these rows
/// behind it.
const MERGER_SIDE: usize = 2;

/// The layer behind which they do, where files do not state it.
const MERGER_BEHIND: u32 = 6;

/// Rows of a picture of Gemma 3.
const GEMMA_ROWS: usize = 256;

/// A tower, its tensors, and how pictures or sounds are prepared for it.
pub(crate) struct ReadTower {
    pub(crate) family: &'static Family,
    pub(crate) tower: Arc<Tower>,
    pub(crate) weights: Arc<dyn WeightSource>,
    pub(crate) preparation: MediaPreparation,
    /// True if rows of a picture all see each other in the decoder.
    pub(crate) sees_itself: bool,
}

/// The widths of the decoders of Gemma 4 in which rows of a picture see earlier ones alone (E2B and
/// E4B). Files of towers do not say it.
const GEMMA4_CAUSAL: [usize; 2] = [1536, 2560];

/// Reads a tower.
///
/// # Errors
/// [`ModelError`] naming the key or tensor that is missing, wrong or not supported.
pub(crate) fn read_tower(
    metadata: &Metadata,
    weights: &Arc<dyn WeightSource>,
) -> Result<ReadTower, ModelError> {
    let keys = [
        "clip.vision.projector_type",
        "clip.projector_type",
        "clip.audio.projector_type",
    ];
    let stated = |key: &&str| metadata.optional::<&str>(key).transpose();
    let found = keys.iter().find_map(stated).transpose()?;
    let name = found.unwrap_or("mlp");
    let family = Family::of(name).ok_or_else(|| {
        let known = Family::names();
        setting(
            keys[0],
            format!("the tower '{name}' is not supported; those of these projectors are: {known}"),
        )
    })?;
    let weights = &sound::in_names_of_graphs(weights);
    let source = Source::new(metadata, weights, family)?;
    let tower = source.tower(family)?;
    let mut made = MemoryWeights::new();
    let preparation = match family.tower.media() {
        MediaKind::Picture => MediaPreparation::Picture(source.preparation(family)?),
        MediaKind::Sound => {
            source.add_sound_weights(&tower, &mut made)?;
            MediaPreparation::Sound(source.sound_preparation(&tower)?)
        }
    };
    if tower.attention.rope.is_some() {
        let frequencies = match family.tower {
            TowerKind::Pixtral => AxialFrequencies::InTurn,
            _ => AxialFrequencies::Same,
        };
        let base = source.rope_base(family)?;
        let divisors = axial_divisors(tower.attention.k_dim, base, frequencies);
        let inserted = made.insert_f32(ROPE_DIVISORS, &[divisors.len()], &divisors);
        inserted.map_err(ModelError::Weight)?;
    }
    let changes = Changes {
        patch_len: tower.patch_len,
        order: match (source.shape(PATCH_EMBEDDING)?.len(), family.tower) {
            // Not a convolution.
            (2, tower) if tower != TowerKind::Llama4 => PatchOrder::Pixels,
            _ => PatchOrder::Planes,
        },
        class_row: class_row(family.tower),
        head_rows: match family.tower {
            TowerKind::Llama4 => columns_first(tower.attention.k_dim),
            TowerKind::Gemma4 => halves_of_quarters(tower.attention.k_dim),
            _ => Vec::new(),
        },
        clipped: tower.clipped.clone(),
        transposed: match family.projector {
            ProjectorKind::Averaged => Some(INPUT_PROJECTION),
            _ => None,
        },
        unfolded: match family.tower {
            TowerKind::Whisper => vec![PATCH_EMBEDDING, STEM],
            _ => (source.has(PATCH_MERGER).then_some(PATCH_MERGER))
                .into_iter()
                .collect(),
        },
    };
    let weights = TowerWeights::new(Arc::clone(weights), made, changes);
    let weights: Arc<dyn WeightSource> = Arc::new(weights.map_err(ModelError::Weight)?);
    check_tensors(&tower, &*weights)?;
    let said: Option<bool> = metadata.optional("clip.vision.sees_itself")?;
    let is_causal =
        family.tower == TowerKind::Gemma4 && GEMMA4_CAUSAL.contains(&tower.output_dim());
    Ok(ReadTower {
        sees_itself: said.unwrap_or(family.sees_itself && !is_causal),
        family,
        tower: Arc::new(tower),
        weights,
        preparation,
    })
}

/// The row of a tower's tiles that is no patch's.
fn class_row(tower: TowerKind) -> ClassRow {
    match tower {
        TowerKind::Clip | TowerKind::InternVit => ClassRow::Plain,
        TowerKind::Llama4 => ClassRow::Corner,
        _ => ClassRow::None,
    }
}

/// The rows of a head whose first half rotates with columns and whose second half with rows, the
/// second half first: so graphs have them.
fn columns_first(head_dim: usize) -> Vec<usize> {
    let half = head_dim / 4 * 2;
    (half..head_dim).chain(0..half).collect()
}

/// The same where values that rotate together are a quarter of a head apart, and neighbours in
/// graphs.
fn halves_of_quarters(head_dim: usize) -> Vec<usize> {
    let quarter = head_dim / 4;
    let pairs = |first: usize| (first..first + quarter).flat_map(move |row| [row, row + quarter]);
    pairs(2 * quarter).chain(pairs(0)).collect()
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
            return Err(setting(&self.key("block_count"), reason));
        }
        if n_heads == 0 || !dim.is_multiple_of(n_heads) {
            let reason = format!("it is {n_heads}, no divisor of the width {dim}");
            return Err(setting(&self.key("attention.head_count"), reason));
        }
        let head_dim = dim / n_heads;
        let eps_key = self.key("attention.layer_norm_epsilon");
        let eps = self.metadata.optional(&eps_key)?.unwrap_or(1e-6f32);
        let layer_norm = Norm {
            kind: NormKind::LayerWithBias,
            eps,
        };
        let rms_norm = Norm {
            kind: NormKind::Rms,
            eps,
        };
        let norm = match family.tower {
            TowerKind::Qwen25Vl | TowerKind::Pixtral | TowerKind::Glm4v | TowerKind::Gemma4 => {
                rms_norm
            }
            // The larger of the two InternViTs has no biases in its norms.
            TowerKind::InternVit if !self.has("v.blk.0.ln1.bias") => rms_norm,
            _ => layer_norm,
        };
        let (rope, sections) = self.rotation(family, head_dim)?.unzip();
        let attention = AttentionBlock {
            n_heads,
            kv_heads: n_heads,
            k_dim: head_dim,
            v_dim: head_dim,
            scale: match family.tower {
                TowerKind::Gemma4 => 1.0,
                _ => (head_dim as f32).sqrt().recip(),
            },
            weights: match family.tower {
                // Rows of heads are moved, see `head_rows`.
                TowerKind::Llama4 | TowerKind::Gemma4 => QkvWeights::Separate,
                _ if self.has("v.blk.0.attn_qkv.weight") => QkvWeights::Fused,
                _ => QkvWeights::Separate,
            },
            bias: match family.tower {
                TowerKind::Pixtral | TowerKind::Glm4v | TowerKind::Gemma4 => QkvBias::None,
                TowerKind::InternVit if !self.has("v.blk.0.attn_q.bias") => QkvBias::Output,
                _ => QkvBias::All,
            },
            qk_norm: match family.tower {
                TowerKind::Gemma4 => QkNorm::PerHead,
                _ if self.has("v.blk.0.attn_q_norm.weight") => QkNorm::WholeRow,
                _ => QkNorm::None,
            },
            values: match family.tower {
                TowerKind::Gemma4 => AttentionValues::Normed,
                _ => AttentionValues::Projected,
            },
            norm_eps: eps,
            rope,
            sections,
            ..AttentionBlock::default()
        };
        let arrangement = self.arrangement(family)?;
        let n_bins = self.bins(family)?;
        Ok(Tower {
            n_bins,
            patch_len: match n_bins {
                None => 3 * self.patch * self.patch,
                Some(_) => STEM_FRAMES * dim,
            },
            patch_bias: self.has(PATCH_BIAS),
            dim,
            positions: self.positions(family)?,
            patch_norm: (family.tower == TowerKind::Glm4v).then_some(norm),
            first_norm: self.has("v.pre_ln.weight").then_some(norm),
            last_norm: match family.tower {
                TowerKind::Clip | TowerKind::Gemma4 | TowerKind::Whisper => None,
                TowerKind::InternVit => self.has("v.post_ln.weight").then_some(norm),
                TowerKind::Pixtral => self.has(PATCH_MERGER).then_some(norm),
                _ => Some(norm),
            },
            norm,
            attention,
            feed_forward: self.feed_forward(family)?,
            residual: match family.tower {
                TowerKind::Gemma4 => TowerResidual::Normed(norm),
                _ if self.has("v.blk.0.ls1.weight") => TowerResidual::Scaled,
                _ => TowerResidual::Plain,
            },
            merger: match family.tower {
                TowerKind::MiniCpm => Some(self.merger(n_layers)?),
                _ => None,
            },
            windows: self.windows(family, n_layers)?,
            arrangement,
            projector: self.projector(family)?,
            deep: self.deep_rows(n_layers)?,
            clipped: match family.tower {
                TowerKind::Gemma4 => self.clipped(n_layers)?,
                _ => ClippedMatrices::default(),
            },
        })
    }

    /// The rotation of keys and queries by the places of patches, where they have one.
    fn rotation(
        &self,
        family: &Family,
        head_dim: usize,
    ) -> Result<Option<(RopeSpec, RopeSections)>, ModelError> {
        Ok(match family.tower {
            TowerKind::Qwen2Vl | TowerKind::Qwen25Vl | TowerKind::Qwen3Vl | TowerKind::Glm4v => {
                Some(axial_rope(head_dim, ROPE_BASE, RopeStyle::Neox))
            }
            TowerKind::Pixtral | TowerKind::Llama4 | TowerKind::Gemma4 => {
                let base = self.rope_base(family)?;
                Some(axial_rope(head_dim, base, RopeStyle::Norm))
            }
            TowerKind::SigLip
            | TowerKind::SigLip2
            | TowerKind::MiniCpm
            | TowerKind::Clip
            | TowerKind::InternVit
            | TowerKind::Whisper => None,
        })
    }

    fn feed_forward(&self, family: &Family) -> Result<TowerFeedForward, ModelError> {
        let hidden = self.hidden()?;
        Ok(match (family.tower, self.activation()?) {
            (TowerKind::Qwen25Vl, _) => TowerFeedForward::Block(FeedForwardBlock {
                hidden,
                activation: Activation::Silu,
                form: FeedForwardForm::GatedWithBias,
            }),
            (TowerKind::Gemma4, _) => TowerFeedForward::Block(FeedForwardBlock {
                hidden,
                activation: Activation::GeluTanh,
                form: FeedForwardForm::Gated,
            }),
            (TowerKind::Pixtral | TowerKind::Glm4v, activation) => {
                TowerFeedForward::Block(FeedForwardBlock {
                    hidden,
                    activation: activation.unwrap_or(Activation::Silu),
                    form: FeedForwardForm::Gated,
                })
            }
            // Files have one key for both kinds of GELU.
            (TowerKind::InternVit | TowerKind::Llama4, Some(Activation::GeluTanh))
            | (TowerKind::Whisper, _) => TowerFeedForward::Block(FeedForwardBlock {
                hidden,
                activation: Activation::GeluErf,
                form: FeedForwardForm::PlainWithBias,
            }),
            (_, Some(activation)) => TowerFeedForward::Block(FeedForwardBlock {
                hidden,
                activation,
                form: FeedForwardForm::PlainWithBias,
            }),
            (_, None) => TowerFeedForward::QuickGelu(hidden),
        })
    }

    fn positions(&self, family: &Family) -> Result<TowerPositions, ModelError> {
        let n_learned = || -> Result<usize, ModelError> {
            let values: usize = self.shape(POSITIONS)?.iter().product();
            Ok(values / self.dim)
        };
        Ok(match family.tower {
            TowerKind::Qwen2Vl | TowerKind::Qwen25Vl | TowerKind::Pixtral => TowerPositions::None,
            TowerKind::SigLip
            | TowerKind::Clip
            | TowerKind::InternVit
            | TowerKind::Llama4
            | TowerKind::Whisper => TowerPositions::Learned(n_learned()?),
            TowerKind::Gemma4 => match self.shape(POSITIONS)?[..] {
                [2, n, dim] if dim == self.dim => TowerPositions::OfAxes(n),
                ref shape => {
                    let reason = format!(
                        "'{POSITIONS}' is {shape:?}, and not two tables of rows of {}",
                        self.dim
                    );
                    return Err(setting("clip.vision.embedding_length", reason));
                }
            },
            TowerKind::Qwen3Vl | TowerKind::SigLip2 | TowerKind::MiniCpm | TowerKind::Glm4v => {
                let n = n_learned()?;
                let side = n.isqrt();
                if side == 0 || side * side != n {
                    let reason = format!("the {n} rows of '{POSITIONS}' are no square");
                    return Err(setting("clip.vision.image_size", reason));
                }
                let corners = match family.tower {
                    TowerKind::SigLip2 => Corners::Edges,
                    TowerKind::MiniCpm => Corners::Nearest,
                    TowerKind::Glm4v => Corners::Cubic,
                    _ => Corners::Middles,
                };
                TowerPositions::Resampled(Resampling { side, corners })
            }
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
        Ok(match (family.tower, family.projector) {
            (TowerKind::Clip, _) => Arrangement::Squares {
                side: 1,
                n_before: 1,
            },
            (_, ProjectorKind::NormedSquares | ProjectorKind::ActivatedSquares) => {
                Arrangement::Squares {
                    side: self.merge()?,
                    n_before: 1,
                }
            }
            (_, ProjectorKind::Squares | ProjectorKind::MergedSquares) => Arrangement::Squares {
                side: self.merge()?,
                n_before: 0,
            },
            (_, ProjectorKind::UpDown) => Arrangement::Joined {
                n: MERGER_SIDE * MERGER_SIDE,
                n_patches: MERGER_SIDE * MERGER_SIDE,
            },
            (_, ProjectorKind::NormedPairs) => Arrangement::Pooled(2),
            (_, ProjectorKind::Standardized) => Arrangement::Averaged {
                kernel: self.averaged_side()?,
            },
            (_, ProjectorKind::Averaged) => {
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
            _ => {
                let merge = self.merge()?;
                Arrangement::Joined {
                    n: merge * merge,
                    n_patches: 1,
                }
            }
        })
    }

    /// The merger, which makes rows fewer between two layers.
    fn merger(&self, n_layers: usize) -> Result<Merger, ModelError> {
        let merge = self.merge()?;
        if merge != MERGER_SIDE * MERGER_SIDE {
            let reason =
                format!("a row of {merge} x {merge} patches is not supported: of 4 x 4 is");
            return Err(setting("clip.vision.projector.scale_factor", reason));
        }
        let key = "clip.vision.wa_layer_indexes";
        let listed: Option<Vec<u32>> = self.metadata.optional(key)?;
        let layer = match listed.as_deref() {
            None => MERGER_BEHIND,
            Some(&[layer]) => layer,
            Some(_) => return Err(setting(key, "it does not name one layer".to_owned())),
        };
        let n_before = layer as usize + 1;
        if n_before >= n_layers {
            let reason = format!("rows are merged behind layer {layer}, and there are {n_layers}");
            return Err(setting(key, reason));
        }
        Ok(Merger {
            n_before,
            n_joined: MERGER_SIDE * MERGER_SIDE,
            hidden: self.rows_of(MERGER_UP)?,
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
        let size = match self.optional_count("spatial_merge_size")? {
            Some(size) => Some(size),
            None => self.optional_count("projector.scale_factor")?,
        };
        let or = if is_merged { 2 } else { 1 };
        Ok(size.unwrap_or(or).max(1))
    }

    /// Rows and columns of patches of which a row is the mean, where files state it.
    fn averaged_side(&self) -> Result<usize, ModelError> {
        let side = self.optional_count("projector.scale_factor")?;
        Ok(side.unwrap_or(GEMMA4_SQUARE).max(1))
    }

    fn rope_base(&self, family: &Family) -> Result<f64, ModelError> {
        let base: Option<f32> = self.metadata.optional("clip.rope.freq_base")?;
        let usual = match family.tower {
            TowerKind::Gemma4 => GEMMA4_ROPE_BASE,
            _ => ROPE_BASE,
        };
        Ok(base.map_or(usual, f64::from))
    }
}

/// Every tensor that the graphs name must be there, in its shape.
fn check_tensors(tower: &Tower, weights: &dyn WeightSource) -> Result<(), ModelError> {
    let projectors = (0..tower.projectors().count()).map(Stage::Projector);
    let stem = tower.n_bins.map(|_| Stage::Stem);
    let stages = stem.into_iter().chain(tower.stages());
    let graphs = stages.chain(projectors);
    let graphs = graphs.map(|stage| tower.stage_graph(stage, 1));
    let graphs: Vec<Graph> = graphs.collect::<Result<_, _>>()?;
    check_named_tensors(&graphs, weights)
}
