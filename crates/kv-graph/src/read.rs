//! Reads an [`Op`] from its JSON form: an object with the operation's name as `op`, and its fields.
//!
//! By hand, as serde's derived reader was a third of compiling this crate. Invariant: reads what
//! the derived writer of [`Op`] writes. Does not know whether an operation fits into a graph.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Error, Map, Value};

use crate::op::Op;

impl<'de> Deserialize<'de> for Op {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let op = UniqueFields::deserialize(from)?.op();
        op.map_err(D::Error::custom)
    }
}

/// The operation with a name: each of its fields is `required`, `optional`, or a structure whose
/// own fields stand among the others, `flat`.
macro_rules! read {
    ($from:expr, $($name:literal => $op:ident { $($field:tt: $how:ident),* })*) => {
        match $from.required("op")? {
            $($name => Ok(Op::$op { $($field: $from.$how(stringify!($field))?),* }),)*
            unknown => Err(Error::custom(format!("unknown operation '{unknown}'"))),
        }
    };
}

/// JSON in which no object has two fields of a name.
struct UniqueFields(Value);

impl UniqueFields {
    fn required<'a, T: Deserialize<'a>>(&'a self, name: &'static str) -> Result<T, Error> {
        let value = self.0.get(name).ok_or_else(|| Error::missing_field(name))?;
        T::deserialize(value)
    }

    fn optional<'a, T: Deserialize<'a> + Default>(&'a self, name: &str) -> Result<T, Error> {
        let value = self.0.get(name);
        value.map_or_else(|| Ok(T::default()), T::deserialize)
    }

    fn flat<'a, T: Deserialize<'a>>(&'a self, _name: &str) -> Result<T, Error> {
        T::deserialize(&self.0)
    }

    fn op(&self) -> Result<Op, Error> {
        read! { self,
            "store_kv" => StoreKv { layer: required }
            "store_k" => StoreK { layer: required }
            "attend" => Attend { layer: required, spec: flat, sinks: optional, relative: optional }
            "attend_partial" => AttendPartial { layer: required, spec: flat, sinks: optional }
            "merge_partials" => MergePartials { form: optional }
            "attend_batch" => AttendBatch { spec: flat, sinks: optional, relative: optional }
            "index" => Index { layer: required, index: flat }
            "attend_sparse" => AttendSparse { layer: required, spec: flat }
            "kq" => Kq { layer: required, spec: flat }
            "kq_soft_max" => KqSoftMax { spec: flat, sinks: optional }
            "kqv" => Kqv { layer: required, spec: flat }
            "conv" => Conv { layer: required, conv: flat }
            "scan" => Scan { layer: required, scan: flat }
            "scan_heads" => ScanHeads { layer: required, scan: flat }
            "decay" => Decay { decay: flat }
            "delta" => Delta { layer: required, delta: flat }
            "route" => Route { spec: flat, bias: optional, gain: optional }
            "expert_linear" => ExpertLinear { weight: required, bias: optional }
            "expert_scale" => ExpertScale {}
            "expert_sum" => ExpertSum {}
            "input" => Input { 0: flat }
            "embed" => Embed { weight: required }
            "linear" => Linear { weight: required, bias: optional }
            "head_linear" => HeadLinear { weight: required }
            "rms_norm" => RmsNorm { weight: optional, eps: required }
            "layer_norm" => LayerNorm { weight: optional, bias: optional, eps: required }
            "rope" => Rope { rope: required }
            "rope_sections" => RopeSections { rope: required, sections: required }
            "reshape" => Reshape {}
            "concat" => Concat {}
            "columns" => Columns { first: required }
            "take_rows" => TakeRows {}
            "top_k" => TopK { k: required }
            "mix" => Mix {}
            "custom" => Custom { custom: required }
            "add" => Add {}
            "mul" => Mul {}
            "scale" => Scale { factor: required }
            "scale_by_position" => ScaleByPosition { scale: flat }
            "gate" => Gate { activation: required }
            "clamped_gate" => ClampedGate { slope: required, limit: required }
            "activate" => Activate { activation: required }
            "add_row" => AddRow { weight: required, row: required }
            "gain" => Gain { weight: required }
            "gaussian_top_k" => GaussianTopK { deviations: required }
            "soft_cap" => SoftCap { cap: required }
            "clamp" => Clamp { limit: required }
        }
    }
}

impl<'de> Deserialize<'de> for UniqueFields {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(ReadUnique).map(Self)
    }
}

struct ReadUnique;

impl<'de> Visitor<'de> for ReadUnique {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(UniqueFields(value)) = from.next_element()? {
            values.push(value);
        }
        Ok(values.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut fields = Map::new();
        while let Some((name, UniqueFields(value))) = from.next_entry::<String, _>()? {
            if fields.contains_key(&name) {
                return Err(A::Error::custom(format!("duplicate field `{name}`")));
            }
            fields.insert(name, value);
        }
        Ok(fields.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Activation, AttendSpec};
    use kv_core::ids::LayerIdx;

    #[track_caller]
    fn comes_back(op: &Op) {
        let json = serde_json::to_string(op).unwrap();
        assert_eq!(&serde_json::from_str::<Op>(&json).unwrap(), op, "{json}");
    }

    // The other operations are read by the tests of their families, and in every snapshot of a
    // model.
    #[test]
    fn operations_come_back_from_json() {
        for op in [
            Op::Add,
            Op::Mul,
            Op::TakeRows,
            Op::Clamp { limit: 1e-7 },
            Op::GaussianTopK { deviations: 1.6 },
            Op::Gate {
                activation: Activation::GeluTanh,
            },
        ] {
            comes_back(&op);
        }
    }

    #[test]
    fn fields_that_are_not_written_have_their_defaults() {
        let spec = AttendSpec {
            n_heads: 4,
            kv_heads: 2,
            k_dim: 8,
            v_dim: 8,
            scale: 0.1,
            soft_cap: None,
            alibi: None,
        };
        let op = Op::Attend {
            layer: LayerIdx(3),
            spec,
            sinks: None,
            relative: None,
        };
        let json = serde_json::to_value(&op).unwrap();
        assert_eq!(json.as_object().unwrap().len(), 7, "{json}");
        comes_back(&op);
    }

    #[track_caller]
    fn refused(json: &str, why: &str) {
        let error = serde_json::from_str::<Op>(json).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }

    #[test]
    fn what_is_no_operation_is_refused() {
        refused("3", "missing field `op`");
        refused(r#"{"op": 3}"#, "invalid type");
        refused(r#"{"op": "sum"}"#, "unknown operation 'sum'");
        let twice = "duplicate field `factor`";
        refused(r#"{"op": "scale", "factor": 1, "factor": 2}"#, twice);
        let twice = r#"{"op": "rope", "rope": {"dim": 2, "dim": 4}}"#;
        refused(twice, "duplicate field `dim`");
        refused(r#"{"op": "scale"}"#, "missing field `factor`");
        refused(r#"{"op": "scale", "factor": "2"}"#, "invalid type");
        refused(r#"{"op": "attend", "layer": 0}"#, "missing field `n_heads`");
    }
}
