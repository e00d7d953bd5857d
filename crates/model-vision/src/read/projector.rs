//! The steps from a tower's rows to a decoder's.
//!
//! Knows no layer.

use kv_graph::Activation;
use model_core::architecture::ModelError;
use model_core::blocks::{Norm, NormKind};

use super::{INPUT_PROJECTION, PATCH_MERGER, Source, setting};
use crate::family::{Family, ProjectorKind};
use crate::tower::{DeepRows, ProjectorStep, bias_of};
use crate::weights::STD_SHIFT;

/// The factor of each value behind the layers of Gemma 4.
const STD_SCALE: &str = "v.std_scale";

impl Source<'_> {
    pub(super) fn projector(&self, family: &Family) -> Result<Vec<ProjectorStep>, ModelError> {
        Ok(match family.projector {
            ProjectorKind::TwoMatrices => self.two_matrices("mm.0.weight", "mm.2.weight")?.to_vec(),
            ProjectorKind::Merged | ProjectorKind::MergedSquares => {
                let step = |name: &str| -> Result<ProjectorStep, ModelError> {
                    let width = self.rows_of(name)?;
                    Ok(if self.has(&bias_of(name)) {
                        ProjectorStep::Affine(name.to_owned(), width)
                    } else {
                        ProjectorStep::Matrix(name.to_owned(), width)
                    })
                };
                let first = match family.projector {
                    ProjectorKind::MergedSquares => self.has("mm.input_norm.weight").then(|| {
                        let norm = layer_norm(1e-5);
                        Ok(ProjectorStep::Norm(norm, "mm.input_norm".to_owned()))
                    }),
                    _ => self.has(PATCH_MERGER).then(|| step(PATCH_MERGER)),
                };
                let mut steps: Vec<ProjectorStep> = first.transpose()?.into_iter().collect();
                steps.extend([
                    step("mm.1.weight")?,
                    ProjectorStep::Activate(Activation::GeluErf),
                    step("mm.2.weight")?,
                ]);
                steps
            }
            ProjectorKind::NormedSquares => {
                let matrices = ["mm.model.mlp.1.weight", "mm.model.mlp.3.weight"];
                self.normed_matrices(1e-5, "mm.model.mlp.0".to_owned(), matrices)?
            }
            ProjectorKind::UpDown => {
                let matrices = ["mm.up.weight", "mm.down.weight"];
                self.normed_matrices(1e-6, "mm.input_norm".to_owned(), matrices)?
            }
            ProjectorKind::Gated => {
                let norm = layer_norm(1e-5);
                let matrix =
                    |name: &str| Ok::<_, ModelError>((name.to_owned(), self.rows_of(name)?));
                let (fc, width) = matrix("mm.model.fc.weight")?;
                let [gate, up, down] =
                    ["gate", "up", "down"].map(|part| matrix(&format!("mm.{part}.weight")));
                let activation = self.activation()?.unwrap_or(Activation::Silu);
                vec![
                    ProjectorStep::Affine(PATCH_MERGER.to_owned(), self.rows_of(PATCH_MERGER)?),
                    ProjectorStep::Matrix(fc, width),
                    ProjectorStep::Norm(norm, "mm.post_norm".to_owned()),
                    ProjectorStep::Activate(Activation::GeluErf),
                    ProjectorStep::Gated([gate?, up?, down?], activation),
                ]
            }
            ProjectorKind::ActivatedSquares => {
                let matrix = |name: &str| -> Result<ProjectorStep, ModelError> {
                    Ok(ProjectorStep::Matrix(name.to_owned(), self.rows_of(name)?))
                };
                vec![
                    matrix("mm.model.mlp.1.weight")?,
                    ProjectorStep::Activate(Activation::GeluErf),
                    matrix("mm.model.mlp.2.weight")?,
                    ProjectorStep::Activate(Activation::GeluErf),
                    matrix("mm.model.fc.weight")?,
                ]
            }
            ProjectorKind::Standardized => {
                let eps_key = "clip.vision.attention.layer_norm_epsilon";
                let eps = self.metadata.optional(eps_key)?.unwrap_or(1e-6);
                let mut steps = vec![ProjectorStep::Scale((self.dim as f32).sqrt())];
                let said: Option<bool> = self.metadata.optional("clip.vision.standardize")?;
                if said.unwrap_or_else(|| self.has(STD_SCALE)) {
                    steps.push(ProjectorStep::Plus(STD_SHIFT.to_owned()));
                    steps.push(ProjectorStep::Times(STD_SCALE.to_owned()));
                }
                let width = self.rows_of(INPUT_PROJECTION)?;
                steps.push(ProjectorStep::PlainNorm(eps));
                steps.push(ProjectorStep::Matrix(INPUT_PROJECTION.to_owned(), width));
                steps
            }
            ProjectorKind::NormedPairs => {
                let norm = layer_norm(1e-5);
                let name = "mm.fc.weight".to_owned();
                let width = self.rows_of(&name)?;
                vec![
                    ProjectorStep::Norm(norm, "v.post_ln".to_owned()),
                    ProjectorStep::Affine(name, width),
                ]
            }
            ProjectorKind::Squares => {
                let name = "mm.model.fc.weight";
                vec![ProjectorStep::Matrix(name.to_owned(), self.rows_of(name)?)]
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
                    ProjectorStep::Norm(norm, "mm.soft_emb_norm".to_owned()),
                    ProjectorStep::Matrix(
                        INPUT_PROJECTION.to_owned(),
                        shape.last().copied().unwrap_or(0),
                    ),
                ]
            }
        })
    }

    /// The rows behind a row's own values: a file has names with the numbers of layers, a directory
    /// lists these layers and counts the names.
    pub(super) fn deep_rows(&self, n_layers: usize) -> Result<Vec<DeepRows>, ModelError> {
        let key = "clip.vision.deepstack_layers";
        let listed: Option<Vec<u32>> = self.metadata.optional(key)?;
        let mut layers: Vec<(usize, usize)> = match listed {
            Some(listed) => (listed.iter().map(|&layer| layer as usize))
                .zip(0..)
                .collect(),
            None => (0..n_layers)
                .filter(|layer| self.has(&format!("v.deepstack.{layer}.fc1.weight")))
                .map(|layer| (layer, layer))
                .collect(),
        };
        layers.sort_unstable();
        if let Some((layer, _)) = layers.iter().find(|(layer, _)| *layer >= n_layers) {
            return Err(setting(
                key,
                format!("layer {layer} is none of the tower's {n_layers}"),
            ));
        }
        let rows = |(layer, number): (usize, usize)| -> Result<DeepRows, ModelError> {
            let name = |part: &str| format!("v.deepstack.{number}.{part}");
            let matrices = [&*name("fc1.weight"), &*name("fc2.weight")];
            let projector = self.normed_matrices(1e-6, name("norm"), matrices)?;
            Ok(DeepRows { layer, projector })
        };
        layers.into_iter().map(rows).collect()
    }

    /// A norm, and two matrices with biases and GELU between them.
    fn normed_matrices(
        &self,
        eps: f32,
        norm: String,
        [first, second]: [&str; 2],
    ) -> Result<Vec<ProjectorStep>, ModelError> {
        let mut steps = vec![ProjectorStep::Norm(layer_norm(eps), norm)];
        steps.extend(self.two_matrices(first, second)?);
        Ok(steps)
    }

    /// Two matrices with biases and GELU between them.
    fn two_matrices(&self, first: &str, second: &str) -> Result<[ProjectorStep; 3], ModelError> {
        Ok([
            ProjectorStep::Affine(first.to_owned(), self.rows_of(first)?),
            ProjectorStep::Activate(Activation::GeluErf),
            ProjectorStep::Affine(second.to_owned(), self.rows_of(second)?),
        ])
    }

    /// The rows of a matrix: the values that it gives.
    pub(super) fn rows_of(&self, name: &str) -> Result<usize, ModelError> {
        Ok(self.shape(name)?.first().copied().unwrap_or(0))
    }
}

fn layer_norm(eps: f32) -> Norm {
    Norm {
        kind: NormKind::LayerWithBias,
        eps,
    }
}
