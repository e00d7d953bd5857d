//! Reads an [`Op`] from its JSON form: an object with the operation's name as `op`, and its fields.
//!
//! By hand, as serde's derived reader was a third of compiling this crate. Invariant: reads what the
//! derived writer of [`Op`] writes. Does not know whether an operation fits into a graph.

use serde::de::{Deserialize, Deserializer, Error as _};
use serde_json::{Error, Value};

use super::op::Op;

impl<'de> Deserialize<'de> for Op {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let op = Fields(Value::deserialize(from)?).op();
        op.map_err(D::Error::custom)
    }
}

/// The object that an operation is in JSON.
struct Fields(Value);

impl Fields {
    /// The field of this name.
    fn get<'a, T: Deserialize<'a>>(&'a self, name: &'static str) -> Result<T, Error> {
        let value = self.0.get(name).ok_or_else(|| Error::missing_field(name))?;
        T::deserialize(value)
    }

    /// The same, or its default where there is none.
    fn or_default<'a, T: Deserialize<'a> + Default>(&'a self, name: &str) -> Result<T, Error> {
        self.0
            .get(name)
            .map_or_else(|| Ok(T::default()), T::deserialize)
    }

    /// A structure whose fields are among these.
    fn flat<'a, T: Deserialize<'a>>(&'a self) -> Result<T, Error> {
        T::deserialize(&self.0)
    }

    fn op(&self) -> Result<Op, Error> {
        let name = self.get("op")?;
        for family in [
            Self::attention,
            Self::recurrent,
            Self::experts,
            Self::rows,
            Self::elementwise,
        ] {
            if let Some(op) = family(self, name)? {
                return Ok(op);
            }
        }
        Err(Error::custom(format!("unknown operation '{name}'")))
    }

    fn attention(&self, name: &str) -> Result<Option<Op>, Error> {
        Ok(Some(match name {
            "store_kv" => Op::StoreKv {
                layer: self.get("layer")?,
            },
            "store_k" => Op::StoreK {
                layer: self.get("layer")?,
            },
            "attend" => Op::Attend {
                layer: self.get("layer")?,
                spec: self.flat()?,
                sinks: self.or_default("sinks")?,
                relative: self.or_default("relative")?,
            },
            "attend_partial" => Op::AttendPartial {
                layer: self.get("layer")?,
                spec: self.flat()?,
                sinks: self.or_default("sinks")?,
            },
            "merge_partials" => Op::MergePartials {
                form: self.or_default("form")?,
            },
            "attend_batch" => Op::AttendBatch {
                spec: self.flat()?,
                sinks: self.or_default("sinks")?,
                relative: self.or_default("relative")?,
            },
            "index" => Op::Index {
                layer: self.get("layer")?,
                index: self.flat()?,
            },
            "attend_sparse" => Op::AttendSparse {
                layer: self.get("layer")?,
                spec: self.flat()?,
            },
            "kq" => Op::Kq {
                layer: self.get("layer")?,
                spec: self.flat()?,
            },
            "kq_soft_max" => Op::KqSoftMax {
                spec: self.flat()?,
                sinks: self.or_default("sinks")?,
            },
            "kqv" => Op::Kqv {
                layer: self.get("layer")?,
                spec: self.flat()?,
            },
            _ => return Ok(None),
        }))
    }

    fn recurrent(&self, name: &str) -> Result<Option<Op>, Error> {
        Ok(Some(match name {
            "conv" => Op::Conv {
                layer: self.get("layer")?,
                conv: self.flat()?,
            },
            "scan" => Op::Scan {
                layer: self.get("layer")?,
                scan: self.flat()?,
            },
            "scan_heads" => Op::ScanHeads {
                layer: self.get("layer")?,
                scan: self.flat()?,
            },
            "decay" => Op::Decay {
                decay: self.flat()?,
            },
            "delta" => Op::Delta {
                layer: self.get("layer")?,
                delta: self.flat()?,
            },
            _ => return Ok(None),
        }))
    }

    fn experts(&self, name: &str) -> Result<Option<Op>, Error> {
        Ok(Some(match name {
            "route" => Op::Route {
                spec: self.flat()?,
                bias: self.or_default("bias")?,
                gain: self.or_default("gain")?,
            },
            "expert_linear" => Op::ExpertLinear {
                weight: self.get("weight")?,
                bias: self.or_default("bias")?,
            },
            "expert_scale" => Op::ExpertScale,
            "expert_sum" => Op::ExpertSum,
            _ => return Ok(None),
        }))
    }

    fn rows(&self, name: &str) -> Result<Option<Op>, Error> {
        Ok(Some(match name {
            "input" => Op::Input(self.flat()?),
            "embed" => Op::Embed {
                weight: self.get("weight")?,
            },
            "linear" => Op::Linear {
                weight: self.get("weight")?,
                bias: self.or_default("bias")?,
            },
            "head_linear" => Op::HeadLinear {
                weight: self.get("weight")?,
            },
            "rms_norm" => Op::RmsNorm {
                weight: self.or_default("weight")?,
                eps: self.get("eps")?,
            },
            "layer_norm" => Op::LayerNorm {
                weight: self.get("weight")?,
                bias: self.or_default("bias")?,
                eps: self.get("eps")?,
            },
            "rope" => Op::Rope {
                rope: self.get("rope")?,
            },
            "rope_sections" => Op::RopeSections {
                rope: self.get("rope")?,
                sections: self.get("sections")?,
            },
            "reshape" => Op::Reshape,
            "concat" => Op::Concat,
            "columns" => Op::Columns {
                first: self.get("first")?,
            },
            "take_rows" => Op::TakeRows,
            "top_k" => Op::TopK { k: self.get("k")? },
            "mix" => Op::Mix,
            "custom" => Op::Custom {
                custom: self.get("custom")?,
            },
            _ => return Ok(None),
        }))
    }

    fn elementwise(&self, name: &str) -> Result<Option<Op>, Error> {
        Ok(Some(match name {
            "add" => Op::Add,
            "mul" => Op::Mul,
            "scale" => Op::Scale {
                factor: self.get("factor")?,
            },
            "scale_by_position" => Op::ScaleByPosition {
                scale: self.flat()?,
            },
            "gate" => Op::Gate {
                activation: self.get("activation")?,
            },
            "clamped_gate" => Op::ClampedGate {
                slope: self.get("slope")?,
                limit: self.get("limit")?,
            },
            "activate" => Op::Activate {
                activation: self.get("activation")?,
            },
            "add_row" => Op::AddRow {
                weight: self.get("weight")?,
                row: self.get("row")?,
            },
            "gain" => Op::Gain {
                weight: self.get("weight")?,
            },
            "gaussian_top_k" => Op::GaussianTopK {
                deviations: self.get("deviations")?,
            },
            "soft_cap" => Op::SoftCap {
                cap: self.get("cap")?,
            },
            "clamp" => Op::Clamp {
                limit: self.get("limit")?,
            },
            _ => return Ok(None),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Activation, AttendSpec};
    use crate::ids::LayerIdx;

    #[track_caller]
    fn comes_back(op: &Op) {
        let json = serde_json::to_string(op).unwrap();
        assert_eq!(&serde_json::from_str::<Op>(&json).unwrap(), op, "{json}");
    }

    // The other operations are read by the tests of their families, and in every snapshot of a model.
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
        refused(r#"{"op": "scale"}"#, "missing field `factor`");
        refused(r#"{"op": "scale", "factor": "2"}"#, "invalid type");
        refused(r#"{"op": "attend", "layer": 0}"#, "missing field `n_heads`");
    }
}
