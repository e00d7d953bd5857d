//! [`Whole`]: a JSON value whose whole numbers may be written as floats, `4.0` for 4, as clients in
//! languages with one type of number do.
//!
//! Invariant: a field that is read as an integer takes a float without a fraction; every other
//! field gets the value as it was sent.

use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{Deserializer, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;
use serde_json::{Error, Map, Value};

/// Floats below this have each whole number.
const MAX_WHOLE: f64 = (1_u64 << 53) as f64;

/// A JSON value that is read into a type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Whole<'de>(pub(crate) &'de Value);

/// The integer that a number is, also where it is written as a float.
pub(crate) fn integer(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| {
        let float = value.as_f64().filter(|_| value.is_f64())?;
        let is_whole = float.fract() == 0.0 && float.abs() <= MAX_WHOLE;
        is_whole.then_some(float as i64)
    })
}

/// The members of an object, each read as [`Whole`].
pub(crate) fn members(
    members: &Map<String, Value>,
) -> impl Deserializer<'_, Error = Error> + use<'_> {
    let members = members
        .iter()
        .map(|(name, value)| (name.as_str(), Whole(value)));
    MapDeserializer::new(members)
}

impl<'de> IntoDeserializer<'de, Error> for Whole<'de> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

macro_rules! integers {
    ($($method:ident)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            match integer(self.0) {
                Some(n) if self.0.is_f64() => visitor.visit_i64(n),
                _ => self.0.$method(visitor),
            }
        }
    )*};
}

impl<'de> Deserializer<'de> for Whole<'de> {
    type Error = Error;

    integers! {
        deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64
        deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.0.deserialize_any(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Array(items) => {
                let mut items = SeqDeserializer::new(items.iter().map(Whole));
                let read = visitor.visit_seq(&mut items)?;
                items.end()?;
                Ok(read)
            }
            _ => self.0.deserialize_seq(visitor),
        }
    }

    fn deserialize_tuple<V: Visitor<'de>>(
        self,
        _len: usize,
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.deserialize_seq(visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Object(object) => members(object).deserialize_map(visitor),
            _ => self.0.deserialize_map(visitor),
        }
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self.0 {
            Value::Object(object) => members(object).deserialize_struct(name, fields, visitor),
            _ => self.0.deserialize_struct(name, fields, visitor),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.0.deserialize_enum(name, variants, visitor)
    }

    forward_to_deserialize_any! {
        bool i128 u128 f32 f64 char str string bytes byte_buf unit unit_struct tuple_struct identifier
        ignored_any
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    #[derive(Debug, Deserialize, PartialEq)]
    struct Fields {
        n: u32,
        minus: Option<i64>,
        list: Vec<usize>,
        inner: Option<Box<Fields>>,
        float: f32,
        any: Value,
    }

    fn read(value: &Value) -> Result<Fields, Error> {
        Fields::deserialize(Whole(value))
    }

    #[test]
    fn whole_numbers_may_be_floats() {
        let mut body = json!({"n": 4.0, "minus": -1.0, "list": [1.0, 2], "float": 2.5, "any": 3.0});
        let outer = body.clone();
        body["inner"] = outer;
        let inner = Fields {
            n: 4,
            minus: Some(-1),
            list: vec![1, 2],
            inner: None,
            float: 2.5,
            any: json!(3.0),
        };
        let fields = read(&body).unwrap();
        assert_eq!(fields.inner.as_deref(), Some(&inner));
        // What is no integer field stays as it was sent.
        assert_eq!(fields.any.to_string(), "3.0");
        for wrong in [
            json!(4.5),
            json!(-4.0),
            json!(1e300),
            json!("4"),
            json!(null),
        ] {
            body["n"] = wrong.clone();
            assert!(read(&body).is_err(), "{wrong}");
        }
    }

    #[test]
    fn integers_are_found_in_floats() {
        assert_eq!(integer(&json!(-2.0)), Some(-2));
        assert_eq!(integer(&json!(7)), Some(7));
        for none in [json!(0.5), json!(1e16), json!("1"), json!(true)] {
            assert_eq!(integer(&none), None, "{none}");
        }
    }
}
