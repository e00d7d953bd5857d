//! Metadata values as the file types them. Conversions live in [`super::metadata`].

use std::fmt;

/// One metadata value.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the names are the definitions
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(String),
    Array(Array),
}

/// A metadata array: all elements have one type, and none is an array.
///
/// Bytes of strings that are not UTF-8 were replaced by U+FFFD when the file was read: token lists
/// of real files hold a few such tokens, and a token's index must stay what it is.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the names are the definitions
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    String(Vec<String>),
}

impl Value {
    /// The type, as the error messages name it: `u32`, `string`, `array of f32` …
    pub fn type_name(&self) -> String {
        match self {
            Self::Array(array) => format!("array of {}", array.element_type_name()),
            Self::U8(_) => "u8".to_owned(),
            Self::I8(_) => "i8".to_owned(),
            Self::U16(_) => "u16".to_owned(),
            Self::I16(_) => "i16".to_owned(),
            Self::U32(_) => "u32".to_owned(),
            Self::I32(_) => "i32".to_owned(),
            Self::U64(_) => "u64".to_owned(),
            Self::I64(_) => "i64".to_owned(),
            Self::F32(_) => "f32".to_owned(),
            Self::F64(_) => "f64".to_owned(),
            Self::Bool(_) => "bool".to_owned(),
            Self::String(_) => "string".to_owned(),
        }
    }
}

impl Array {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::U8(v) => v.len(),
            Self::I8(v) => v.len(),
            Self::U16(v) => v.len(),
            Self::I16(v) => v.len(),
            Self::U32(v) => v.len(),
            Self::I32(v) => v.len(),
            Self::U64(v) => v.len(),
            Self::I64(v) => v.len(),
            Self::F32(v) => v.len(),
            Self::F64(v) => v.len(),
            Self::Bool(v) => v.len(),
            Self::String(v) => v.len(),
        }
    }

    /// True if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Element `i` as a value of its own, or `None` beyond the end.
    pub fn get(&self, i: usize) -> Option<Value> {
        match self {
            Self::U8(v) => v.get(i).copied().map(Value::U8),
            Self::I8(v) => v.get(i).copied().map(Value::I8),
            Self::U16(v) => v.get(i).copied().map(Value::U16),
            Self::I16(v) => v.get(i).copied().map(Value::I16),
            Self::U32(v) => v.get(i).copied().map(Value::U32),
            Self::I32(v) => v.get(i).copied().map(Value::I32),
            Self::U64(v) => v.get(i).copied().map(Value::U64),
            Self::I64(v) => v.get(i).copied().map(Value::I64),
            Self::F32(v) => v.get(i).copied().map(Value::F32),
            Self::F64(v) => v.get(i).copied().map(Value::F64),
            Self::Bool(v) => v.get(i).copied().map(Value::Bool),
            Self::String(v) => v.get(i).cloned().map(Value::String),
        }
    }

    /// The type of the elements: `u32`, `string` …
    pub fn element_type_name(&self) -> &'static str {
        match self {
            Self::U8(_) => "u8",
            Self::I8(_) => "i8",
            Self::U16(_) => "u16",
            Self::I16(_) => "i16",
            Self::U32(_) => "u32",
            Self::I32(_) => "i32",
            Self::U64(_) => "u64",
            Self::I64(_) => "i64",
            Self::F32(_) => "f32",
            Self::F64(_) => "f64",
            Self::Bool(_) => "bool",
            Self::String(_) => "string",
        }
    }
}

/// Scalars as themselves, strings in quotes, arrays by their first elements and length.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::U8(v) => write!(f, "{v}"),
            Self::I8(v) => write!(f, "{v}"),
            Self::U16(v) => write!(f, "{v}"),
            Self::I16(v) => write!(f, "{v}"),
            Self::U32(v) => write!(f, "{v}"),
            Self::I32(v) => write!(f, "{v}"),
            Self::U64(v) => write!(f, "{v}"),
            Self::I64(v) => write!(f, "{v}"),
            Self::F32(v) => write!(f, "{v}"),
            Self::F64(v) => write!(f, "{v}"),
            Self::Bool(v) => write!(f, "{v}"),
            Self::String(v) => write!(f, "{v:?}"),
            Self::Array(v) => write!(f, "{v}"),
        }
    }
}

/// The first elements, and how many there are: `[1, 2, 3, … 512 of u32]`.
impl fmt::Display for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        f.write_str("[")?;
        for i in 0..self.len().min(SHOWN) {
            let comma = if i == 0 { "" } else { ", " };
            if let Some(value) = self.get(i) {
                write!(f, "{comma}{value}")?;
            }
        }
        if self.len() > SHOWN {
            write!(f, ", … {} of {}", self.len(), self.element_type_name())?;
        }
        f.write_str("]")
    }
}

impl From<u32> for Value {
    fn from(value: u32) -> Self {
        Self::U32(value)
    }
}

impl From<f32> for Value {
    fn from(value: f32) -> Self {
        Self::F32(value)
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl From<&str> for Value {
    fn from(value: &str) -> Self {
        Self::String(value.to_owned())
    }
}

impl From<Array> for Value {
    fn from(value: Array) -> Self {
        Self::Array(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_print_short() {
        assert_eq!(Value::from("a\"b").to_string(), r#""a\"b""#);
        assert_eq!(Value::from(Array::I32(vec![1, -2])).to_string(), "[1, -2]");
        let long = Value::from(Array::U8((0..100).collect()));
        assert_eq!(long.to_string(), "[0, 1, 2, 3, 4, 5, 6, 7, … 100 of u8]");
        assert_eq!(long.type_name(), "array of u8");
    }

    #[test]
    fn elements_end_where_the_array_ends() {
        let array = Array::Bool(vec![true]);
        assert_eq!(
            (array.get(0), array.get(1)),
            (Some(Value::Bool(true)), None)
        );
    }
}
