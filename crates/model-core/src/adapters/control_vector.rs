//! [`ControlVector`]: rows that are added to what leaves some layers (Zou et al., arXiv
//! 2310.01405), for all texts of a loaded model.
//!
//! Files are GGUF with a tensor `direction.N` for each layer `N`, counted from 0; layer 0 has none.

use std::path::PathBuf;

use kv_graph::Graph;

use super::check::{Fnv, check_values};
use super::gguf::check_kind;
use super::graph::LAYER_RESULT;
use super::{AdapterError, wrong};
use crate::architecture::Model;
use crate::error::ModelFileError;
use crate::gguf::GgufFile;
use crate::model_file::OpenModel;

/// Layers, from the first to the last, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerRange {
    /// The first.
    pub first: usize,
    /// The last.
    pub last: usize,
}

/// A file with a control vector.
#[derive(Clone, Debug, PartialEq)]
pub struct ControlVectorFile {
    /// The file.
    pub path: PathBuf,
    /// Its factor.
    pub scale: f32,
}

/// The sum of control vectors: a row for each layer.
#[derive(Clone, Debug)]
pub struct ControlVector {
    dim: usize,
    /// `[layers, dim]`, zeros for layers without one.
    values: Vec<f32>,
    layers: LayerRange,
}

impl ControlVector {
    /// Reads files and adds them up, each times its scale, for these layers, or all that a model
    /// has.
    ///
    /// # Errors
    /// [`ModelFileError`]: a file is no control vector, or one of another model; a layer is not in
    /// the model.
    pub fn open(
        files: &[ControlVectorFile],
        layers: Option<LayerRange>,
        model: &OpenModel,
    ) -> Result<Self, ModelFileError> {
        let model = model.model();
        let (n_layers, dim) = (model.layers().n_layers(), model.embedding_dim());
        let most = n_layers.saturating_sub(1);
        let layers = layers.unwrap_or(LayerRange {
            first: 1,
            last: most,
        });
        let mut values = vec![0.0; n_layers * dim];
        for ControlVectorFile { path, scale } in files {
            let file = GgufFile::open(path)?;
            let wrong = |reason| wrong(file.label(), reason);
            if !scale.is_finite() {
                return Err(wrong(AdapterError::NotFinite {
                    what: "the scale of the control vector".to_owned(),
                    value: *scale,
                }));
            }
            let LayerRange { first, last } = layers;
            if first == 0 || first > last || last > most {
                return Err(wrong(AdapterError::Layers { first, last, most }));
            }
            let architecture = [("general.architecture", "controlvector")];
            let kind = check_kind(file.metadata(), "control vector", &architecture);
            kind.map_err(wrong)?;
            let named = file.tensors().iter().filter_map(|tensor| {
                let layer = tensor.name().strip_prefix("direction.")?;
                Some((tensor.name(), layer.parse::<usize>().ok()?))
            });
            let mut n_found = 0;
            for (name, layer) in named {
                let weight = file.weight(name)?;
                if layer == 0 || layer > most {
                    let (first, last) = (layer, layer);
                    return Err(wrong(AdapterError::Layers { first, last, most }));
                }
                if weight.shape() != [dim] {
                    return Err(wrong(AdapterError::Shape {
                        matrix: name.to_owned(),
                        model: vec![dim],
                        a: weight.shape().to_vec(),
                        b: Vec::new(),
                    }));
                }
                let what = || format!("a value of '{name}'");
                check_values(&weight).map_err(|value| {
                    let what = what();
                    wrong(AdapterError::NotFinite { what, value })
                })?;
                let row = values.get_mut(layer * dim..(layer + 1) * dim);
                let row = row.unwrap_or_default().iter_mut();
                row.zip(weight.to_f32())
                    .for_each(|(to, v)| *to += v * scale);
                n_found += 1;
            }
            if n_found == 0 {
                return Err(wrong(AdapterError::Empty));
            }
        }
        Ok(Self {
            dim,
            values,
            layers,
        })
    }

    /// The rows of the layers from 1 on, one after the other, for some of them. Layers behind the
    /// last row have none.
    ///
    /// # Errors
    /// [`AdapterError`]: a row is not as wide as the model's, or a value is no number.
    pub fn from_rows(
        values: &[f32],
        dim: usize,
        layers: LayerRange,
        model: &dyn Model,
    ) -> Result<Self, AdapterError> {
        let (n_layers, wanted) = (model.layers().n_layers(), model.embedding_dim());
        if dim != wanted {
            return Err(AdapterError::Shape {
                matrix: "the control vector".to_owned(),
                model: vec![wanted],
                a: vec![dim],
                b: Vec::new(),
            });
        }
        if let Some(&value) = values.iter().find(|value| !value.is_finite()) {
            let what = "a value of the control vector".to_owned();
            return Err(AdapterError::NotFinite { what, value });
        }
        let mut all = vec![0.0; n_layers * dim];
        let rows = values.chunks_exact(dim.max(1));
        let places = all.chunks_exact_mut(dim.max(1)).skip(1);
        places
            .zip(rows)
            .for_each(|(to, row)| to.copy_from_slice(row));
        Ok(Self {
            dim,
            values: all,
            layers,
        })
    }

    /// True if something is added to what leaves this layer.
    pub(super) fn has_layer(&self, layer: usize) -> bool {
        let row = self.values.get(layer * self.dim..(layer + 1) * self.dim);
        let is_empty = row.is_none_or(|row| row.iter().all(|value| *value == 0.0));
        (self.layers.first..=self.layers.last).contains(&layer) && !is_empty
    }

    /// Layers of the model.
    pub(super) fn n_rows(&self) -> usize {
        self.values.len() / self.dim.max(1)
    }

    /// Values of a row.
    pub(super) fn dim(&self) -> usize {
        self.dim
    }

    /// All rows.
    pub(super) fn values(&self) -> &[f32] {
        &self.values
    }

    /// Checks that a graph has a result of each layer that something is added to.
    pub(super) fn check(&self, graph: &Graph, architecture: &str) -> Result<(), AdapterError> {
        let missing = (0..self.n_rows()).filter(|layer| self.has_layer(*layer));
        let mut missing = missing.filter(|layer| {
            let found = graph.find(&format!("{LAYER_RESULT}{layer}"));
            found.is_none_or(|(_, node)| node.shape.len() != 2)
        });
        match missing.next() {
            None => Ok(()),
            Some(layer) => Err(AdapterError::Graph {
                architecture: architecture.to_owned(),
                what: "control vectors",
                reason: format!("no node '{LAYER_RESULT}{layer}' is what leaves layer {layer}"),
            }),
        }
    }

    /// A number that tells it from others.
    pub fn id(&self) -> u64 {
        let mut id = Fnv::default();
        let rows = (0..self.n_rows()).filter(|layer| self.has_layer(*layer));
        for layer in rows {
            let row = self.values.get(layer * self.dim..(layer + 1) * self.dim);
            for value in row.unwrap_or_default() {
                id.update(&value.to_bits().to_le_bytes());
            }
        }
        id.finish()
    }
}
