//! Adapters: those that a model is opened with, and those of a text.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use cellar::model_core::adapters::{AdapterOptions, AdapterSpec, Adapters};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The adapters that a model is opened with.
pub(crate) struct Lora(Vec<AdapterSpec>);

/// A file or directory with the scale of texts that do not say one.
fn spec(path: PathBuf, scale: f32) -> AdapterSpec {
    AdapterSpec {
        path,
        name: None,
        scale,
    }
}

impl<'py> FromPyObject<'_, 'py> for Lora {
    type Error = PyErr;

    fn extract(lora: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(path) = lora.extract() {
            return Ok(Self(vec![spec(path, 1.0)]));
        }
        if let Ok(scales) = lora.cast::<PyDict>() {
            let each = scales.iter();
            let each = each.map(|(path, scale)| Ok(spec(path.extract()?, scale.extract()?)));
            return Ok(Self(each.collect::<PyResult<_>>()?));
        }
        let paths: Vec<PathBuf> = lora.extract().map_err(|_| {
            PyTypeError::new_err("lora: a path, a list of paths, or a dict of paths with scales")
        })?;
        Ok(Self(
            paths.into_iter().map(|path| spec(path, 1.0)).collect(),
        ))
    }
}

impl Lora {
    pub(crate) fn options(self) -> AdapterOptions {
        AdapterOptions {
            adapters: self.0,
            ..AdapterOptions::default()
        }
    }
}

/// The scales of a text, which names some of a model's adapters: those that it does not name have
/// none.
///
/// # Errors
/// `ValueError` for a name that the model does not have, with those that it has.
pub(crate) fn scales_of(
    adapters: Option<&Arc<Adapters>>,
    wanted: &HashMap<String, f32>,
) -> PyResult<Arc<[f32]>> {
    let Some(adapters) = adapters else {
        let message = "lora: the model was opened without adapters: open it with lora=";
        return Err(PyValueError::new_err(message));
    };
    let mut scales = vec![0.0; adapters.len()];
    for (name, scale) in wanted {
        let place = adapters.find(name).and_then(|at| scales.get_mut(at));
        let place = place.ok_or_else(|| {
            let names = adapters.all().iter().map(|adapter| adapter.name());
            let names = names.collect::<Vec<_>>().join(", ");
            PyValueError::new_err(format!("lora: '{name}' is none of the adapters: {names}"))
        })?;
        *place = *scale;
    }
    let checked = adapters.check_scales(&scales);
    checked.map_err(|error| PyValueError::new_err(format!("lora: {error}")))?;
    Ok(scales.into())
}
