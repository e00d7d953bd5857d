//! Metadata: an ordered map from keys to [`Value`]s, with typed access.
//!
//! Invariant: keys are unique; the order is that of the file. Knows the meaning of no key.

use std::collections::HashMap;

use super::value::{Array, Value};
use crate::error::MetadataError;

/// All metadata of a file, in its order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata {
    entries: Vec<(String, Value)>,
    index: HashMap<String, usize>,
}

impl Metadata {
    /// No metadata.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets a key. One that is there already keeps its place; its old value is handed back.
    pub fn insert(&mut self, key: &str, value: impl Into<Value>) -> Option<Value> {
        let value = value.into();
        let known = self.index.get(key).and_then(|&i| self.entries.get_mut(i));
        if let Some((_, old)) = known {
            return Some(std::mem::replace(old, value));
        }
        self.index.insert(key.to_owned(), self.entries.len());
        self.entries.push((key.to_owned(), value));
        None
    }

    /// Removes a key, and returns its value, where it was there.
    pub fn remove(&mut self, key: &str) -> Option<Value> {
        let at = self.index.remove(key)?;
        let behind = self.index.values_mut().filter(|place| **place > at);
        behind.for_each(|place| *place -= 1);
        Some(self.entries.remove(at).1)
    }

    /// The value as it is typed in the file.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.index
            .get(key)
            .and_then(|&i| self.entries.get(i))
            .map(|(_, value)| value)
    }

    /// True if the key is there.
    pub fn contains(&self, key: &str) -> bool {
        self.index.contains_key(key)
    }

    /// All keys and values, in the order of the file.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries
            .iter()
            .map(|(key, value)| (key.as_str(), value))
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True if there are no keys.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The value of a key that must be there: `let n: u32 = metadata.get("llama.block_count")?`.
    ///
    /// Integers convert between all widths and signs where the number fits, and floating-point
    /// numbers between both widths; nothing else converts. See [`FromValue`] for the types.
    ///
    /// # Errors
    /// [`MetadataError`] where the key is missing, of another type, or out of range.
    pub fn get<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T, MetadataError> {
        let missing = || MetadataError::Missing {
            key: key.to_owned(),
            expected: T::EXPECTED,
        };
        self.optional(key)?.ok_or_else(missing)
    }

    /// As [`Self::get`], but a missing key is `None`. One of a wrong type is still an error.
    ///
    /// # Errors
    /// [`MetadataError`] where the value is of another type or out of range.
    pub fn optional<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>, MetadataError> {
        self.value(key).map(|value| convert(key, value)).transpose()
    }

    /// One number a layer: from a list of `n_layers`, or one number for all of them.
    ///
    /// # Errors
    /// [`MetadataError`] where the key is missing, of another type, out of range, or a list of
    /// another length.
    pub fn per_layer<'a, T>(&'a self, key: &str, n_layers: usize) -> Result<Vec<T>, MetadataError>
    where
        T: FromValue<'a> + Clone,
        Vec<T>: FromValue<'a>,
    {
        let missing = || MetadataError::Missing {
            key: key.to_owned(),
            expected: T::EXPECTED,
        };
        self.optional_per_layer(key, n_layers)?.ok_or_else(missing)
    }

    /// As [`Self::per_layer`], but a missing key is `None`.
    ///
    /// # Errors
    /// [`MetadataError`] where the value is of another type, out of range, or a list of another
    /// length.
    pub fn optional_per_layer<'a, T>(
        &'a self,
        key: &str,
        n_layers: usize,
    ) -> Result<Option<Vec<T>>, MetadataError>
    where
        T: FromValue<'a> + Clone,
        Vec<T>: FromValue<'a>,
    {
        match self.value(key) {
            None => Ok(None),
            Some(value @ Value::Array(_)) => {
                let values: Vec<T> = convert(key, value)?;
                if values.len() == n_layers {
                    return Ok(Some(values));
                }
                let found = values.len();
                Err(MetadataError::LayerCount {
                    key: key.to_owned(),
                    n_layers,
                    found,
                })
            }
            Some(value) => Ok(Some(vec![convert::<T>(key, value)?; n_layers])),
        }
    }
}

fn convert<'a, T: FromValue<'a>>(key: &str, value: &'a Value) -> Result<T, MetadataError> {
    let key = || key.to_owned();
    T::from_value(value).map_err(|mismatch| match mismatch {
        Mismatch::Type => MetadataError::WrongType {
            key: key(),
            expected: T::EXPECTED,
            found: value.type_name(),
        },
        Mismatch::Range(found) => MetadataError::OutOfRange {
            key: key(),
            expected: T::EXPECTED,
            found,
        },
    })
}

/// Why a value is not of the wanted type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mismatch {
    /// It is of another type.
    Type,
    /// It is a number, but this one does not fit.
    Range(String),
}

/// Types that [`Metadata::get`] can return: integers, floating-point numbers, `bool`, `&str`,
/// `&[String]`, `&Array`, and a `Vec` of numbers or truth values.
pub trait FromValue<'a>: Sized {
    /// The wanted type, as in an error message.
    const EXPECTED: &'static str;

    /// The value as this type.
    ///
    /// # Errors
    /// [`Mismatch`] where it is not of this type.
    fn from_value(value: &'a Value) -> Result<Self, Mismatch>;
}

macro_rules! from_integer {
    ($($type:ident),*) => {$(
        impl FromValue<'_> for $type {
            const EXPECTED: &'static str = stringify!($type);

            fn from_value(value: &Value) -> Result<Self, Mismatch> {
                let number = match *value {
                    Value::U8(v) => i128::from(v),
                    Value::I8(v) => i128::from(v),
                    Value::U16(v) => i128::from(v),
                    Value::I16(v) => i128::from(v),
                    Value::U32(v) => i128::from(v),
                    Value::I32(v) => i128::from(v),
                    Value::U64(v) => i128::from(v),
                    Value::I64(v) => i128::from(v),
                    _ => return Err(Mismatch::Type),
                };
                $type::try_from(number).map_err(|_| Mismatch::Range(number.to_string()))
            }
        }
    )*};
}

from_integer!(u8, u16, u32, u64, usize, i8, i16, i32, i64);

impl FromValue<'_> for f32 {
    const EXPECTED: &'static str = "f32";

    fn from_value(value: &Value) -> Result<Self, Mismatch> {
        match *value {
            Value::F32(v) => Ok(v),
            Value::F64(v) if v.is_finite() && !(v as f32).is_finite() => {
                Err(Mismatch::Range(v.to_string()))
            }
            Value::F64(v) => Ok(v as f32),
            _ => Err(Mismatch::Type),
        }
    }
}

impl FromValue<'_> for f64 {
    const EXPECTED: &'static str = "f32 or f64";

    fn from_value(value: &Value) -> Result<Self, Mismatch> {
        match *value {
            Value::F32(v) => Ok(f64::from(v)),
            Value::F64(v) => Ok(v),
            _ => Err(Mismatch::Type),
        }
    }
}

impl FromValue<'_> for bool {
    const EXPECTED: &'static str = "bool";

    fn from_value(value: &Value) -> Result<Self, Mismatch> {
        match *value {
            Value::Bool(v) => Ok(v),
            _ => Err(Mismatch::Type),
        }
    }
}

impl<'a> FromValue<'a> for &'a str {
    const EXPECTED: &'static str = "string";

    fn from_value(value: &'a Value) -> Result<Self, Mismatch> {
        match value {
            Value::String(v) => Ok(v),
            _ => Err(Mismatch::Type),
        }
    }
}

impl<'a> FromValue<'a> for &'a [String] {
    const EXPECTED: &'static str = "array of string";

    fn from_value(value: &'a Value) -> Result<Self, Mismatch> {
        match value {
            Value::Array(Array::String(v)) => Ok(v),
            _ => Err(Mismatch::Type),
        }
    }
}

impl<'a> FromValue<'a> for &'a Array {
    const EXPECTED: &'static str = "array";

    fn from_value(value: &'a Value) -> Result<Self, Mismatch> {
        match value {
            Value::Array(v) => Ok(v),
            _ => Err(Mismatch::Type),
        }
    }
}

macro_rules! from_array {
    ($($type:ident $expected:literal),*) => {$(
        impl FromValue<'_> for Vec<$type> {
            const EXPECTED: &'static str = $expected;

            fn from_value(value: &Value) -> Result<Self, Mismatch> {
                let Value::Array(array) = value else { return Err(Mismatch::Type) };
                if matches!(array, Array::String(_)) {
                    return Err(Mismatch::Type);
                }
                let elements = (0..array.len()).filter_map(|i| array.get(i));
                elements.map(|element| $type::from_value(&element)).collect()
            }
        }
    )*};
}

from_array!(
    u8 "array of u8",
    u32 "array of u32",
    usize "array of usize",
    i32 "array of i32",
    f32 "array of f32",
    bool "array of bool"
);

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Metadata {
        let mut metadata = Metadata::new();
        metadata.insert("count", Value::U64(7));
        metadata.insert("negative", Value::I32(-1));
        metadata.insert("eps", Value::F64(1e-5));
        metadata.insert("huge", Value::F64(1e300));
        metadata.insert("name", "x");
        metadata.insert("heads", Array::I32(vec![2, 4, 2]));
        metadata.insert("words", Array::String(vec!["a".into(), "b".into()]));
        metadata
    }

    #[test]
    fn numbers_convert_where_nothing_is_lost() {
        let m = sample();
        assert_eq!(m.get::<u8>("count"), Ok(7));
        assert_eq!(m.get::<usize>("count"), Ok(7));
        assert_eq!(m.get::<i64>("negative"), Ok(-1));
        assert_eq!(m.get::<f32>("eps"), Ok(1e-5));
        assert_eq!(m.get::<&str>("name"), Ok("x"));
        assert_eq!(m.get::<Vec<u32>>("heads"), Ok(vec![2, 4, 2]));
        assert_eq!(m.get::<&[String]>("words").map(<[String]>::len), Ok(2));
        assert_eq!(
            m.get::<u32>("negative").unwrap_err().to_string(),
            "metadata 'negative' is -1, which is out of range for u32"
        );
        assert!(matches!(
            m.get::<f32>("huge"),
            Err(MetadataError::OutOfRange { .. })
        ));
    }

    #[test]
    fn errors_name_key_and_types() {
        let m = sample();
        assert_eq!(
            m.get::<f32>("count").unwrap_err().to_string(),
            "metadata 'count' is u64, not f32"
        );
        assert_eq!(
            m.get::<Vec<f32>>("words").unwrap_err().to_string(),
            "metadata 'words' is array of string, not array of f32"
        );
        assert_eq!(
            m.get::<u32>("absent").unwrap_err().to_string(),
            "metadata 'absent' is missing (u32 wanted)"
        );
        assert_eq!(m.optional::<u32>("absent"), Ok(None));
        assert!(
            m.optional::<u32>("name").is_err(),
            "a wrong type is not a missing key"
        );
    }

    #[test]
    fn per_layer_takes_a_list_or_one_number() {
        let m = sample();
        assert_eq!(m.per_layer::<u32>("heads", 3), Ok(vec![2, 4, 2]));
        assert_eq!(m.per_layer::<u32>("count", 2), Ok(vec![7, 7]));
        assert_eq!(
            m.per_layer::<u32>("heads", 4),
            Err(MetadataError::LayerCount {
                key: "heads".into(),
                n_layers: 4,
                found: 3
            })
        );
        assert_eq!(m.optional_per_layer::<u32>("absent", 4), Ok(None));
        assert!(m.per_layer::<u32>("absent", 4).is_err());
        assert!(m.per_layer::<u32>("name", 4).is_err());
    }

    #[test]
    fn a_key_keeps_its_place() {
        let mut m = sample();
        assert_eq!(m.insert("count", 9u32), Some(Value::U64(7)));
        assert_eq!(m.iter().next(), Some(("count", &Value::U32(9))));
        assert_eq!(m.len(), 7);
    }
}
