//! Python values to numbers and JSON, and back. Decides nothing.

use cellar::model_core::gguf::{Array, Value as MetadataValue};
use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyList;
use serde_json::Value;

/// A number of something, or an index: of a sequence, a position, a token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Count(pub(crate) u32);

impl<'py> FromPyObject<'_, 'py> for Count {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let got = value.extract::<u32>();
        let got = got.map_err(|error| in_range(error, &value, "from 0 to 4294967295"));
        Ok(Self(got?))
    }
}

/// The error for an integer that is too large or negative, with the number and the range.
pub(crate) fn in_range(error: PyErr, value: &Bound<'_, PyAny>, range: &str) -> PyErr {
    let py = value.py();
    if error.is_instance_of::<PyOverflowError>(py) {
        PyValueError::new_err(format!("{value} is out of range: it must be {range}"))
    } else {
        error
    }
}

/// A Python object as JSON.
pub(crate) fn json(value: &Bound<'_, PyAny>) -> PyResult<Value> {
    let text: String = value
        .py()
        .import("json")?
        .call_method1("dumps", (value,))?
        .extract()?;
    serde_json::from_str(&text).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// A value of a file's metadata as a Python object.
pub(crate) fn metadata<'py>(py: Python<'py>, value: &MetadataValue) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        MetadataValue::U8(n) => n.into_pyobject(py)?.into_any(),
        MetadataValue::I8(n) => n.into_pyobject(py)?.into_any(),
        MetadataValue::U16(n) => n.into_pyobject(py)?.into_any(),
        MetadataValue::I16(n) => n.into_pyobject(py)?.into_any(),
        MetadataValue::U32(n) => n.into_pyobject(py)?.into_any(),
        MetadataValue::I32(n) => n.into_pyobject(py)?.into_any(),
        MetadataValue::U64(n) => n.into_pyobject(py)?.into_any(),
        MetadataValue::I64(n) => n.into_pyobject(py)?.into_any(),
        MetadataValue::F32(n) => n.into_pyobject(py)?.into_any(),
        MetadataValue::F64(n) => n.into_pyobject(py)?.into_any(),
        MetadataValue::Bool(is) => is.into_pyobject(py)?.to_owned().into_any(),
        MetadataValue::String(text) => text.into_pyobject(py)?.into_any(),
        MetadataValue::Array(array) => list(py, array)?.into_any(),
    })
}

fn list<'py>(py: Python<'py>, array: &Array) -> PyResult<Bound<'py, PyList>> {
    match array {
        Array::U8(items) => PyList::new(py, items),
        Array::I8(items) => PyList::new(py, items),
        Array::U16(items) => PyList::new(py, items),
        Array::I16(items) => PyList::new(py, items),
        Array::U32(items) => PyList::new(py, items),
        Array::I32(items) => PyList::new(py, items),
        Array::U64(items) => PyList::new(py, items),
        Array::I64(items) => PyList::new(py, items),
        Array::F32(items) => PyList::new(py, items),
        Array::F64(items) => PyList::new(py, items),
        Array::Bool(items) => PyList::new(py, items),
        Array::String(items) => PyList::new(py, items),
    }
}
