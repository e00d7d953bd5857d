//! Rotation of heads by the angles of their positions.
//!
//! The meaning is [`RopeSpec::rotate_head`]. Knows nothing of where positions come from.

use candle_core::{D, Device, Result, Tensor};
use kv_graph::rope::{RopeSpec, RopeStyle};

use crate::program::Rotation;

/// Cosines and sines, `[n, 1, n_rot / 2]` each, of tokens at these positions, rows and columns.
pub(crate) fn angles(
    rotation: &Rotation,
    coordinates: &[[u32; 3]],
    device: &Device,
) -> Result<[Tensor; 2]> {
    let (n, half) = (coordinates.len(), rotation.frequencies.len());
    let mut cos = vec![0.0; n * half];
    let mut sin = vec![0.0; n * half];
    let rows = cos
        .chunks_exact_mut(half.max(1))
        .zip(sin.chunks_exact_mut(half.max(1)));
    for ((cos, sin), &at) in rows.zip(coordinates) {
        match &rotation.sections {
            None => rotation.rope.angles(&rotation.frequencies, at[0], cos, sin),
            Some(sections) => {
                let (rope, frequencies) = (&rotation.rope, rotation.frequencies.as_slice());
                rope.section_angles(frequencies, sections, at, cos, sin);
            }
        }
    }
    Ok([
        Tensor::from_vec(cos, (n, 1, half), device)?,
        Tensor::from_vec(sin, (n, 1, half), device)?,
    ])
}

/// Rotates the first `n_rot` values of every head of `x [n, heads, dim]`.
pub(crate) fn rotate(x: &Tensor, rope: &RopeSpec, [cos, sin]: &[Tensor; 2]) -> Result<Tensor> {
    let (n, heads, dim) = x.dims3()?;
    let half = rope.n_rot / 2;
    if half == 0 {
        return Ok(x.clone());
    }
    let rotated = x.narrow(D::Minus1, 0, rope.n_rot)?;
    // Along which dimension of `[n, heads, .., ..]` the two values of a pair lie.
    let (pairs, along) = match rope.style {
        RopeStyle::Norm => (rotated.contiguous()?.reshape((n, heads, half, 2))?, 3),
        RopeStyle::Neox => (rotated.contiguous()?.reshape((n, heads, 2, half))?, 2),
    };
    let (a, b) = (
        pairs.narrow(along, 0, 1)?.squeeze(along)?,
        pairs.narrow(along, 1, 1)?.squeeze(along)?,
    );
    let new_a = a.broadcast_mul(cos)?.sub(&b.broadcast_mul(sin)?)?;
    let new_b = a.broadcast_mul(sin)?.add(&b.broadcast_mul(cos)?)?;
    let rotated = Tensor::stack(&[new_a, new_b], along)?.reshape((n, heads, rope.n_rot))?;
    if rope.n_rot == dim {
        return Ok(rotated);
    }
    Tensor::cat(
        &[rotated, x.narrow(D::Minus1, rope.n_rot, dim - rope.n_rot)?],
        D::Minus1,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_graph::rope::{RopeScaling, YarnRamp};

    #[test]
    fn both_styles_equal_the_scalar_rotation_of_each_head() {
        let yarn = RopeScaling::Yarn {
            factor: 4.0,
            original_context: 64,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: 1.138,
            ramp: YarnRamp::Whole,
        };
        let (positions, heads, dim) = ([0, 1, 77, 4000], 3, 10);
        let values: Vec<f32> = (0..120).map(|i| (i as f32 * 0.7).sin()).collect();
        let x = Tensor::from_slice(&values, (4, heads, dim), &Device::Cpu).unwrap();
        for style in [RopeStyle::Norm, RopeStyle::Neox] {
            for (n_rot, scaling) in [(10, RopeScaling::None), (6, yarn), (0, RopeScaling::None)] {
                let rope = RopeSpec {
                    style,
                    n_rot,
                    base: 10_000.0,
                    scaling,
                    factors: None,
                };
                let frequencies = rope.frequencies(None);
                let mut wanted = values.clone();
                let (mut cos, mut sin) = (vec![0.0; n_rot / 2], vec![0.0; n_rot / 2]);
                for (row, &pos) in wanted.chunks_exact_mut(heads * dim).zip(&positions) {
                    rope.angles(&frequencies, pos, &mut cos, &mut sin);
                    for head in row.chunks_exact_mut(dim) {
                        rope.rotate_head(head, &cos, &sin);
                    }
                }
                let rotation = Rotation {
                    rope: rope.clone(),
                    sections: None,
                    positions: None,
                    frequencies,
                };
                let coordinates = positions.map(|pos| [pos; 3]);
                let angles = angles(&rotation, &coordinates, &Device::Cpu).unwrap();
                let got = rotate(&x, &rope, &angles).unwrap().flatten_all().unwrap();
                for (got, wanted) in got.to_vec1::<f32>().unwrap().iter().zip(&wanted) {
                    assert!(
                        (got - wanted).abs() < 1e-6,
                        "{style:?} {n_rot}: {got} {wanted}"
                    );
                }
            }
        }
    }
}
