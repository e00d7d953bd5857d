//! The contract of moving keys: stored keys become those of other positions, and nothing else
//! changes.
//!
//! The golden cases hold keys before and after a move, computed by an independent implementation:
//! both styles of pairs, partial rotation, stretched frequencies, divisors of frequencies, and
//! YaRN, whose magnitude must be in a moved key once.

use serde::Deserialize;

use super::rows::{dump, fill};
use super::{Subject, assert_close};
use kv_backend::{Backend, BackendError, RowKind, RowSpan};
use kv_core::{
    CellIdx, LayerIdx, PartIdx, PosDelta, Window,
    layers::{AttentionMemory, LayerMap, LayerMemory},
    memory::RowShift,
};
use kv_graph::rope::{LayerRope, RopeScaling, RopeSpec, RopeStyle, Rotation, YarnRamp};
use kv_rows::{KvRotation, KvType, KvTypes, LayerKvTypes, RowLayout, RowShape};

const CASES: &str = include_str!("../../../tests/fixtures/kv-core/rope_shift.json");
const TENSORS: &[u8] = include_bytes!("../../../tests/fixtures/kv-core/rope_shift.safetensors");

#[derive(Deserialize)]
struct Cases {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    mode: RopeStyle,
    head_dim: usize,
    n_rot: usize,
    delta: Vec<i32>,
    rope_base: f64,
    freq_scale: f64,
    freq_factors: Option<Vec<f32>>,
    yarn: Option<Yarn>,
    mscale: f64,
}

#[derive(Deserialize)]
struct Yarn {
    orig: u32,
    beta_fast: f64,
    beta_slow: f64,
}

impl Case {
    fn rotation(&self) -> Rotation {
        let factor = 1.0 / self.freq_scale;
        let scaling = match &self.yarn {
            Some(yarn) => RopeScaling::Yarn {
                factor,
                original_context: yarn.orig,
                beta_fast: yarn.beta_fast,
                beta_slow: yarn.beta_slow,
                attention_factor: self.mscale,
                ramp: YarnRamp::Whole,
            },
            None => RopeScaling::Linear { factor },
        };
        let rope = RopeSpec {
            style: self.mode,
            n_rot: self.n_rot,
            base: self.rope_base,
            scaling,
            factors: self.freq_factors.as_ref().map(|_| "factors".to_owned()),
        };
        Rotation::new(rope, self.freq_factors.as_deref())
    }

    /// Keys of this case, `[rows, 2, head_dim]`.
    fn keys(&self, which: &str) -> Vec<f32> {
        let (length, rest) = TENSORS.split_first_chunk::<8>().unwrap();
        let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
        let header: serde_json::Value = serde_json::from_slice(header).unwrap();
        let offsets = &header[format!("{}.{which}", self.name)]["data_offsets"];
        let [from, to] = [0, 1].map(|at| offsets[at].as_u64().unwrap() as usize);
        let values = data[from..to].as_chunks::<4>().0.iter();
        values.copied().map(f32::from_le_bytes).collect()
    }
}

fn layer(k_dim: usize, window: Window) -> LayerMemory {
    LayerMemory::Attention(AttentionMemory {
        kv_heads: 2,
        k_dim,
        v_dim: 32,
        window,
    })
}

/// Every type of keys, rotated and not. Values have the first type.
fn key_types<B: Backend>(backend: &B) -> Vec<KvTypes> {
    let types = backend.info().kv_types;
    let plain = types.iter().map(|&t| KvTypes::new(t, types[0]));
    let unrotated = types.iter().filter(|t| t.is_quantised());
    let unrotated = unrotated.map(|&t| KvTypes::new(t, types[0]).with_rotation(KvRotation::Off));
    plain.chain(unrotated).collect()
}

fn shift(part: u32, first: u32, len: u32, delta: i32) -> RowShift {
    RowShift {
        part: PartIdx(part),
        first: CellIdx(first),
        len,
        delta: PosDelta(delta),
    }
}

fn encoded(shape: RowShape, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; shape.bytes() * (values.len() / shape.len())];
    let rows = bytes.chunks_exact_mut(shape.bytes());
    for (row, values) in rows.zip(values.chunks_exact(shape.len())) {
        shape.encode(values, row);
    }
    bytes
}

fn decoded(shape: RowShape, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; shape.len() * (bytes.len() / shape.bytes())];
    let rows = bytes.chunks_exact(shape.bytes());
    for (row, values) in rows.zip(values.chunks_exact_mut(shape.len())) {
        shape.decode(row, values);
    }
    values
}

/// The largest change of a value by storing these keys.
fn rounding(shape: RowShape, keys: &[f32]) -> f64 {
    let stored = decoded(shape, &encoded(shape, keys));
    let off = stored
        .iter()
        .zip(keys)
        .map(|(s, k)| f64::from((s - k).abs()));
    off.fold(0.0, f64::max)
}

/// Moved keys are those that an independent implementation computes at the new positions. Types
/// that round do so twice: before the move, which turns the error of two values, and after it.
pub fn d15a_golden_shifts_are_matched<B: Backend>(subject: &Subject<B>) {
    let backend = &subject.backend;
    let Cases { cases } = serde_json::from_str(CASES).unwrap();
    assert_eq!(cases.len(), 40);
    let n_rows = |case: &Case| case.delta.len();
    assert!(
        cases.iter().all(|case| n_rows(case) == 6),
        "a move of each row"
    );
    for (case, types) in cases
        .iter()
        .flat_map(|case| key_types(backend).into_iter().map(move |t| (case, t)))
    {
        let map = LayerMap::new(vec![layer(case.head_dim, Window::Full)]);
        let kv_type = types.k;
        let layout = RowLayout::new(&map, &[8], types).unwrap();
        let shape = layout.layers()[0].k;
        let mut rows = backend.allocate(&layout).unwrap();
        let span = RowSpan {
            layer: LayerIdx(0),
            kind: RowKind::K,
            first: CellIdx(1),
            len: 6,
        };
        let (before, wanted) = (case.keys("k_at_pos"), case.keys("k_shifted"));
        let stored = encoded(shape, &before);
        backend.write_rows(&mut rows, span, &stored).unwrap();
        let shifts: Vec<RowShift> = (1..)
            .zip(&case.delta)
            .map(|(cell, &delta)| shift(0, cell, 1, delta))
            .collect();
        let ropes = [LayerRope {
            layer: LayerIdx(0),
            rotation: Some(case.rotation()),
        }];
        backend.shift_rows(&mut rows, &shifts, &ropes).unwrap();
        let mut bytes = vec![0; stored.len()];
        backend.read_rows(&rows, span, &mut bytes).unwrap();
        let (got, name) = (decoded(shape, &bytes), &case.name);
        if kv_type == KvType::F32 {
            let wanted: Vec<f64> = wanted.iter().copied().map(f64::from).collect();
            assert_close(name, &got, &wanted, subject.tolerance.elementwise);
            continue;
        }
        let turned = rounding(shape, &before) * std::f64::consts::SQRT_2;
        // What is rounded the second time is not quite `wanted`: allow twice its error.
        let allowed = turned + 2.0 * rounding(shape, &wanted) + 1e-5;
        for (at, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
            let off = f64::from((got - wanted).abs());
            assert!(
                off <= allowed,
                "{name}, {kv_type}: value {at} is {got}, not {wanted}"
            );
        }
    }
}

/// Full, sliding, full: parts 0, 1, 0. Layer 2 has no rotation.
fn two_parts(types: &KvTypes) -> (RowLayout, [LayerRope; 3]) {
    let layers = [Window::Full, Window::Sliding(4), Window::Full].map(|w| layer(32, w));
    let layout = RowLayout::new(&LayerMap::new(layers.to_vec()), &[90, 6], types).unwrap();
    let rope = |n_rot| RopeSpec {
        style: RopeStyle::Neox,
        n_rot,
        base: 1e4,
        scaling: RopeScaling::None,
        factors: None,
    };
    let ropes = [Some(rope(32)), Some(rope(8)), None];
    let mut layers = (0..).map(LayerIdx);
    let ropes = ropes.map(|rope| LayerRope {
        layer: layers.next().unwrap(),
        rotation: rope.map(|rope| Rotation::new(rope, None)),
    });
    (layout, ropes)
}

/// Only K rows that are named change, each layer's by its own rotation.
pub fn shifts_change_the_named_keys_only<B: Backend>(subject: &Subject<B>) {
    let backend = &subject.backend;
    for types in key_types(backend) {
        let kv_type = types.k;
        let (layout, ropes) = two_parts(&types);
        let mut rows = backend.allocate(&layout).unwrap();
        let mut wanted = fill(backend, &mut rows, 41);
        // Two runs, longer than a few rows; one that moves nothing; one of the other part.
        let shifts = [shift(0, 2, 70, 9), shift(0, 80, 4, 0), shift(1, 5, 1, -3)];
        backend.shift_rows(&mut rows, &shifts, &ropes).unwrap();
        backend.shift_rows(&mut rows, &[], &ropes).unwrap();
        let got = dump(backend, &rows);
        for (at, rope, (first, len), delta) in [(0, 0, (2, 70), 9), (2, 1, (5, 1), -3)] {
            let shape = layout.layers()[rope].k;
            let span = first * shape.bytes()..(first + len) * shape.bytes();
            let rotation = ropes[rope].rotation.as_ref().unwrap();
            let (cos, sin) = rotation.angles(PosDelta(delta));
            let before = decoded(shape, &wanted[at][span.clone()]);
            let mut moved = before.clone();
            for head in moved.chunks_exact_mut(32) {
                rotation.rope().rotate_head(head, &cos, &sin);
            }
            let after = decoded(shape, &got[at][span.clone()]);
            let allowed = 2.0 * rounding(shape, &moved) + 1e-5;
            for (g, w) in after.iter().zip(&moved) {
                assert!(
                    f64::from((g - w).abs()) <= allowed,
                    "{kv_type}: {g}, not {w}"
                );
            }
            assert_ne!(before, after, "{kv_type}");
            wanted[at][span.clone()].copy_from_slice(&got[at][span]);
        }
        assert!(got == wanted, "{kv_type}: another row changed");
    }
}

/// Keys that are rotated before they are stored and keys that are not, in neighbouring layers, come
/// out of a move as what they are: whether a row is rotated is a matter of its own shape, and RoPE
/// turns what was rotated back first, also where it turns a part of the head only.
pub fn d15c_d15d_rotations_do_not_mix<B: Backend>(subject: &Subject<B>) {
    let backend = &subject.backend;
    let all = backend.info().kv_types;
    let Some(&quantised) = all.iter().find(|t| t.is_quantised()) else {
        return;
    };
    let first = all[0];
    let other = LayerKvTypes {
        first: LayerIdx(1),
        last: LayerIdx(1),
        k: first,
        v: quantised,
    };
    let rope = |n_rot| RopeSpec {
        style: RopeStyle::Norm,
        n_rot,
        base: 1e4,
        scaling: RopeScaling::None,
        factors: None,
    };
    for (rotation, head_dim) in [
        (KvRotation::On, 64),
        (KvRotation::On, 16),
        (KvRotation::Off, 64),
    ] {
        let types = KvTypes::new(quantised, first)
            .with_rotation(rotation)
            .with_layers(other);
        let map = LayerMap::new(vec![layer(head_dim, Window::Full); 3]);
        let layout = RowLayout::new(&map, &[5], &types).unwrap();
        let expected = rotation == KvRotation::On && head_dim == 64;
        let rotated = |l: usize| !layout.layers()[l].k.rotation.is_none();
        assert_eq!([0, 1, 2].map(rotated), [expected, false, expected]);
        let ropes = [0, 1, 2].map(|layer| LayerRope {
            layer: LayerIdx(layer),
            rotation: Some(Rotation::new(rope(8 << (layer % 2)), None)),
        });
        let mut rows = backend.allocate(&layout).unwrap();
        let before = fill(backend, &mut rows, 43);
        backend
            .shift_rows(&mut rows, &[shift(0, 1, 3, -7)], &ropes)
            .unwrap();
        let after = dump(backend, &rows);
        for (layer, rope) in ropes.iter().enumerate() {
            let shape = layout.layers()[layer].k;
            assert_eq!(before[2 * layer + 1], after[2 * layer + 1], "V stays");
            let mut wanted = decoded(shape, &before[2 * layer]);
            let rotation = rope.rotation.as_ref().unwrap();
            let (cos, sin) = rotation.angles(PosDelta(-7));
            for head in wanted[shape.len()..4 * shape.len()].chunks_exact_mut(head_dim) {
                rotation.rope().rotate_head(head, &cos, &sin);
            }
            let got = decoded(shape, &after[2 * layer]);
            let allowed = 2.0 * rounding(shape, &wanted) + 1e-5;
            for (got, wanted) in got.iter().zip(&wanted) {
                assert!(
                    f64::from((got - wanted).abs()) <= allowed,
                    "layer {layer} of {types}: {got}, not {wanted}"
                );
            }
        }
    }
}

/// What cannot be done is an error before any row is changed.
pub fn shifts_that_cannot_be_are_refused<B: Backend>(subject: &Subject<B>) {
    let backend = &subject.backend;
    let kv_type = backend.info().kv_types[0];
    let (layout, ropes) = two_parts(&kv_type.into());
    let mut rows = backend.allocate(&layout).unwrap();
    let wanted = fill(backend, &mut rows, 42);
    let good = shift(0, 0, 2, 1);
    for (first, len) in [(89, 2), (90, 1), (u32::MAX, 1)] {
        let shifts = [good, shift(0, first, len, 1)];
        let error = backend.shift_rows(&mut rows, &shifts, &ropes).unwrap_err();
        let right = matches!(error, BackendError::RowOutOfRange { n_rows: 90, .. });
        assert!(right, "{error}");
    }
    let error = backend
        .shift_rows(&mut rows, &[good], &ropes[..1])
        .unwrap_err();
    let layer = LayerIdx(2);
    assert!(matches!(error, BackendError::MissingRope { layer: named } if named == layer));
    let mut wide = ropes;
    let rope = wide[0].rotation.as_ref().unwrap().rope().clone();
    wide[0].rotation = Some(Rotation::new(RopeSpec { n_rot: 34, ..rope }, None));
    let error = backend.shift_rows(&mut rows, &[good], &wide).unwrap_err();
    let right = matches!(
        error,
        BackendError::RopeWidth {
            n_rot: 34,
            dim: 32,
            ..
        }
    );
    assert!(right, "{error}");
    assert_eq!(dump(backend, &rows), wanted);
}
